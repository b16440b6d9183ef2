"""The program on several hosts, which are emulated on this machine: right numbers, what is sent between hosts,
and what happens when a cable is cut or a host dies."""

import emulated_hosts

emulated_hosts.enter_namespaces()  # before cli_support takes its variables from the environment

import collections
import json
import os
import re
import subprocess

from cli_support import MPIEXEC, OPERANDS, OUTPUT, PROGRAM, CliTest, main

RANKS_PER_HOST = 2
PATIENCE = 240  # seconds; machines may be busy
VERIFY_RUNS = 3  # sharded runs of annulus verify

# Traffic between ranks besides the transfers of the plan: the start of MPI, agreements,
# acknowledgements, headers of packets.
OTHER_BYTES = 1 << 19
OTHER_SHARE = 0.02


class HostsTest(CliTest):
    def start_hosts(self, count):
        self.hosts = self.enterContext(emulated_hosts.Hosts(count))
        self.ranks = RANKS_PER_HOST * count

    def words(self, *words, flags=()):
        return [*self.hosts.mpirun(MPIEXEC[0], RANKS_PER_HOST), *flags, PROGRAM, *map(str, words)]

    def on_hosts(self, *words, flags=(), environment=None):
        """Runs the program with two ranks on every host."""
        result = self.execute(self.words(*words, flags=flags),
                              {**self.hosts.environment(), **(environment or {})})
        self.expect_no_processes(result.stdout + result.stderr)
        return result

    def expect_no_processes(self, output=""):
        """mpirun's helpers on other hosts end a moment after it."""
        self.wait_for(lambda: not any(host.processes() for host in self.hosts), PATIENCE,
                      lambda: f"{[host.processes() for host in self.hosts]} {output}")


class Schedules(HostsTest):
    """Every schedule on two and on four hosts."""

    def planned_traffic(self, words):
        """Bytes that come to and go from each host in one run, by the plan."""
        result = self.succeed("plan", *words, "--json", "-")
        received, sent = collections.Counter(), collections.Counter()
        for rank in json.loads(result.stdout)["ranks"]:
            host = rank["rank"] // RANKS_PER_HOST
            for task in rank["tasks"]:
                for transfer in task.get("sends", []):
                    peer = rank["groups"][task["group"]]["ranks"][transfer["peer"]]
                    if peer // RANKS_PER_HOST != host:
                        sent[host] += transfer["bytes"]
                        received[peer // RANKS_PER_HOST] += transfer["bytes"]
        return [(received[host], sent[host]) for host in range(len(self.hosts))]

    def traffic_of(self, schedule, mesh, batch=1, how=(), plan=()):
        """Verifies a problem; bytes that come to and go from each host in one run, by the plan."""
        words = ["--schedule", schedule, "--mesh", mesh, "--shape", f"{batch},128,2k,8,8,32", *how]
        before = [host.traffic() for host in self.hosts]
        result = self.expect_success(self.on_hosts("verify", *words))
        self.assertIn(f"{self.ranks} on {len(self.hosts)} nodes", result.stdout)
        counted = [tuple(now - then for now, then in zip(host.traffic(), start))
                   for host, start in zip(self.hosts, before)]
        planned = self.planned_traffic([*words, *plan])
        print(f"  {schedule} on {mesh}: planned {planned}, counted {counted}", flush=True)
        for both in zip(planned, counted):
            for expected, real in zip(*both):
                self.assertGreaterEqual(real, VERIFY_RUNS * expected)
                self.assertLess(real, VERIFY_RUNS * expected * (1 + OTHER_SHARE) + OTHER_BYTES)
        return planned

    def check_all(self, hosts):
        self.start_hosts(hosts)
        along = f"sp={self.ranks}"
        # Nothing leaves a host in the following runs.
        nothing = [(0, 0)] * hosts
        self.assertEqual(self.traffic_of("local", f"dp={self.ranks}", batch=self.ranks), nothing)
        self.assertEqual(self.traffic_of("ring", f"dp={hosts},sp=2", batch=hosts), nothing)
        ring = self.traffic_of("ring", along)
        # The plan, which needs no hosts, is told what the program finds out.
        double_ring = self.traffic_of("double_ring", along, plan=["--inner-size", RANKS_PER_HOST])
        for one, other in zip(double_ring, ring):
            self.assertLess(sum(one), sum(other))
        self.traffic_of("allgather", along, plan=["--ranks-per-node", RANKS_PER_HOST])
        self.traffic_of("ulysses", along)
        self.traffic_of("pass_q", along)
        specs = ["--query-spec", "-,outer+inner,-,-", "--kv-spec", "-,outer+inner,-,-"]
        self.traffic_of("hybrid", f"outer={hosts},inner=2", how=specs)

    def test_two_hosts(self):
        self.check_all(2)
        result = self.expect_success(self.on_hosts("verify", "--random", 20))
        self.assertIn("20 of 20", result.stdout)

    def test_four_hosts(self):
        self.check_all(4)
        self.expect_success(self.on_hosts("verify", "--random", 5))

    def test_files(self):
        self.start_hosts(2)
        self.save_operands(rows=100, columns=160, heads=8)
        self.expect_success(self.on_hosts("run", *OPERANDS, *OUTPUT, "--causal"))
        self.expect_right_files([*OPERANDS, *OUTPUT], ["--causal"])


class RankOrder(HostsTest):
    """mpirun places the ranks on the hosts in turn."""

    FLAGS = ["--map-by", "node"]

    def traffic_of(self, order):
        """Bytes that come to all hosts while a ring along all ranks is verified."""
        before = sum(host.traffic()[0] for host in self.hosts)
        result = self.on_hosts("verify", "--schedule", "ring", "--shape", "1,128,2k,8,8,32",
                               "--rank-order", order, flags=self.FLAGS)
        self.expect_success(result)
        received = sum(host.traffic()[0] for host in self.hosts) - before
        print(f"  {order}: {received}", flush=True)
        return received

    def test_a_ring_enters_each_host_once(self):
        self.start_hosts(2)
        result = self.on_hosts("info", flags=self.FLAGS)
        self.assertRegex(result.stdout, r"node 0 +node1, 2 ranks: 0, 1 \(mpirun's 0, 2\)\n")
        self.assertRegex(result.stdout, r"node 1 +node2, 2 ranks: 2, 3 \(mpirun's 1, 3\)\n")
        # In mpirun's order every hop is one between hosts; by node it is every other one.
        hop = 4 * 512 * 8 * (32 + 32) * VERIFY_RUNS
        self.assertGreaterEqual(self.traffic_of("mpirun"), 4 * 3 * hop)
        self.assertLess(self.traffic_of("node"), 2 * 3 * hop * (1 + OTHER_SHARE) + 2 * OTHER_BYTES)


class Faults(HostsTest):
    """A run on several hosts, in which one of them becomes unreachable while keys are on the way to it."""

    WAITING = 5  # seconds that a rank waits for another one
    ABORTING = 10  # and for mpirun, which it asks to end the job

    def setUp(self):
        super().setUp()
        # Seconds of computing, in which 16 MiB of keys and values go from host to host several times.
        self.save_operands(rows=4096, columns=16384, heads=8, kv_heads=8, dim=64)

    def start_run(self):
        words = self.words("run", *OPERANDS, *OUTPUT, "--schedule", "ring", "--timeout", self.WAITING,
                           flags=["--output-filename", self.path("messages")])
        environment = {**self.hosts.environment(), "ANNULUS_DEVICE": "cpu"}
        job = self.start(words, subprocess.DEVNULL, env=environment)
        self.addCleanup(job.stderr.close)
        self.addCleanup(job.wait)
        self.addCleanup(job.kill)
        self.wait_for(lambda: job.poll() is not None or self.hosts[-1].traffic()[0] >= 4 << 20, PATIENCE,
                      lambda: "nothing is sent", pause=0.001)
        self.assertIsNone(job.poll(), "the job has ended")
        return job

    def expect_end_of_ranks(self):
        """All ranks end by themselves, on both sides, and leave no file."""
        program = os.path.basename(PROGRAM)
        self.wait_for(lambda: not any(program in host.processes().values() for host in self.hosts),
                      self.WAITING + self.ABORTING + PATIENCE,
                      lambda: [host.processes() for host in self.hosts])
        self.expect_no_files("output.npy")

    def awaited_by(self, ranks):
        """The ranks for which these ranks say that they have waited in vain."""
        named = set()
        for rank in ranks:
            with open(self.path(f"messages/1/rank.{rank}/stderr")) as file:
                messages = file.read()
            for line in messages.splitlines():
                if line.startswith("annulus: error: ") and f"(no progress for {self.WAITING} s)" in line:
                    named.update(map(int, re.findall(r"(?:from|by|for) rank (\d+)", line)))
        return named

    def test_cut_cable(self):
        self.start_hosts(2)
        self.start_run()
        self.hosts[1].cut_cable()
        self.expect_end_of_ranks()
        self.assertTrue(self.awaited_by([0, 1]) & {2, 3})
        self.assertTrue(self.awaited_by([2, 3]) & {0, 1})

    def test_host_without_power(self):
        self.start_hosts(4)
        self.start_run()
        self.hosts[3].cut_cable()
        self.hosts[3].kill()
        self.expect_end_of_ranks()
        self.assertTrue(self.awaited_by(range(6)) & {6, 7})

    def test_killed_processes(self):
        self.start_hosts(2)
        job = self.start_run()
        self.hosts[1].kill()
        _, messages = job.communicate(timeout=PATIENCE)
        self.assertNotEqual(job.returncode, 0)
        self.assertIn("node2", messages)
        self.expect_end_of_ranks()
        self.expect_no_processes()


if __name__ == "__main__":
    main()
