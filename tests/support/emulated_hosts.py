"""Several hosts on one machine, for tests of jobs on more than one node.

A host is a network namespace with a host name of its own. A cable (a pair of virtual interfaces) connects it to
a switch (a bridge), which lies in the network namespace of the test. No namespace has a way out, so what is
sent stays in there. mpirun starts its daemons on other hosts through an agent that enters their namespaces,
where it would otherwise use ssh.

The test is the first process of a process namespace. When it ends, in whatever way, the kernel kills every
process that it has started, and namespaces and cables go with the last of them.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile

SKIPPED = 77  # the exit code by which ctest knows a test that was skipped
REQUIRED = "ANNULUS_TEST_REQUIRE_HOSTS"  # 1: what would be skipped fails instead
PATIENCE = 60  # seconds for a command that takes milliseconds; machines may be busy
NETWORK = "10.0.0.0/24"

_INSIDE = "ANNULUS_TEST_INSIDE_NAMESPACES"
_UNSHARE = ["unshare", "--net", "--mount", "--mount-proc", "--pid", "--fork", "--kill-child"]
_TRIAL = """
ip link add name trial type bridge
ip link add name end1 type veth peer name end2
unshare --net --uts hostname trial
"""


def enter_namespaces():
    """Starts this program once more, in namespaces of its own. Where that is not permitted, ends it as skipped,
    or as failed if ANNULUS_TEST_REQUIRE_HOSTS=1."""
    if os.environ.pop(_INSIDE, None):
        return
    # In a user namespace of their own, users have the rights of root, on machines that permit it.
    words = [*_UNSHARE, *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    try:
        trial = subprocess.run([*words, "sh", "-e", "-c", _TRIAL], capture_output=True, text=True,
                               timeout=PATIENCE)
    except FileNotFoundError as error:
        _skip(error)
    if trial.returncode != 0:
        _skip(trial.stderr.strip())
    sys.stdout.flush()
    os.execvpe(words[0], [*words, sys.executable, *sys.argv], {**os.environ, _INSIDE: "1"})


def _skip(reason):
    if os.environ.get(REQUIRED) == "1":
        print(f"failed: hosts cannot be emulated here, and {REQUIRED}=1 asks for it: {reason}")
        sys.exit(1)
    print(f"skipped: hosts cannot be emulated here: {reason}")
    sys.exit(SKIPPED)


def _run(*words):
    result = subprocess.run([str(word) for word in words], capture_output=True, text=True,
                            timeout=PATIENCE)
    if result.returncode != 0:
        raise RuntimeError(f"{words}: {result.stderr.strip()}")


class Host:
    """One host, with a cable to the switch. To be closed."""

    def __init__(self, number):
        self.name = f"node{number}"
        self._port = f"port{number}"  # the cable's end in the switch
        with contextlib.ExitStack() as stack:
            # A process that keeps the namespaces while nothing else runs in them.
            self._keeper = subprocess.Popen(
                ["unshare", "--net", "--uts", "sh", "-e", "-c",
                 f"hostname {self.name}; ip link set lo up; echo ready; exec sleep infinity"],
                stdout=subprocess.PIPE, text=True)
            stack.callback(self._keeper.wait)
            stack.callback(self._keeper.kill)
            with self._keeper.stdout as output:
                if output.readline() != "ready\n":
                    raise RuntimeError(f"{self.name} does not start")
            _run("ip", "link", "add", "name", self._port, "type", "veth", "peer", "name", "eth0",
                 "netns", self._keeper.pid)
            # Otherwise the kernel takes its time after the end of the host.
            stack.callback(_run, "ip", "link", "delete", self._port)
            stack.callback(self.kill)
            _run("ip", "link", "set", self._port, "master", "switch", "up")
            _run(*self.words("ip", "address", "add", f"10.0.0.{number}/24", "dev", "eth0"))
            _run(*self.words("ip", "link", "set", "eth0", "up"))
            self._closing = stack.pop_all()

    def close(self):
        self._closing.close()

    def words(self, *words):
        """The words that run a command on this host."""
        return ["nsenter", f"--target={self._keeper.pid}", "--net", "--uts", "--", *words]

    def traffic(self):
        """Bytes that have come and gone through the cable, as the kernel counts them."""
        with open(f"/proc/{self._keeper.pid}/net/dev") as file:
            lines = dict(line.split(":") for line in file if ":" in line)
        counters = {name.strip(): numbers.split() for name, numbers in lines.items()}["eth0"]
        return int(counters[0]), int(counters[8])

    def cut_cable(self):
        _run("ip", "link", "set", self._port, "down")

    def processes(self):
        """The names of the processes that run on this host, by id."""
        here = os.readlink(f"/proc/{self._keeper.pid}/ns/net")
        found = {}
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has ended
                if int(entry) != self._keeper.pid and os.readlink(f"/proc/{entry}/ns/net") == here:
                    with open(f"/proc/{entry}/comm") as file:
                        found[int(entry)] = file.read().strip()
        return found

    def kill(self):
        """Kills all processes of the host, and the processes that they start meanwhile."""
        while processes := self.processes():
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


class Hosts:
    """node1, node2 and so on, and the switch between them. To be used with `with`."""

    def __init__(self, count):
        with contextlib.ExitStack() as stack:
            self._folder = stack.enter_context(tempfile.TemporaryDirectory())
            _run("ip", "link", "add", "name", "switch", "type", "bridge")
            stack.callback(_run, "ip", "link", "delete", "switch")
            _run("ip", "link", "set", "switch", "up")
            self._hosts = []
            for number in range(1, count + 1):
                self._hosts.append(Host(number))
                stack.callback(self._hosts[-1].close)
            self._write_agent()
            self._closing = stack.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._closing.close()

    def __getitem__(self, index):
        return self._hosts[index]

    def __len__(self):
        return len(self._hosts)

    def mpirun(self, program, ranks_per_host):
        """The words that make mpirun (`program`) start a job on all hosts, up to its other flags."""
        names = ",".join(f"{host.name}:{ranks_per_host}" for host in self._hosts)
        return self._hosts[0].words(program, "--host", names, "--bind-to", "none")

    def environment(self):
        """The variables that mpirun needs."""
        settings = {"plm": "rsh", "plm_rsh_agent": self._agent, "btl": "tcp,self,vader",
                    "btl_tcp_if_include": NETWORK, "oob_tcp_if_include": NETWORK,
                    "btl_vader_backing_directory": self._folder,
                    # There are more ranks than cores, which mpirun cannot know.
                    "mpi_yield_when_idle": "1"}
        of_version_5 = {"plm": "ssh", "plm_ssh_agent": self._agent, "prte_if_include": NETWORK}
        return {**os.environ, "TMPDIR": self._folder,
                **{f"OMPI_MCA_{name}": value for name, value in settings.items()},
                **{f"PRTE_MCA_{name}": value for name, value in of_version_5.items()}}

    def _write_agent(self):
        """The agent is called as ssh is: HOST COMMAND..."""
        self._agent = os.path.join(self._folder, "agent")
        cases = "".join(f'{host.name}) {shlex.join(host.words("sh", "-c"))} "$*" ;;\n'
                        for host in self._hosts)
        with open(self._agent, "w") as file:
            file.write('#!/bin/sh\nhost=$1\nshift\ncase $host in\n' + cases +
                       '*) echo "no host $host" >&2; exit 255 ;;\nesac\ncode=$?\n'
                       "# Nobody tells that a host has died.\n"
                       "[ $code -lt 128 ] || exec sleep infinity\nexit $code\n")
        os.chmod(self._agent, 0o755)
