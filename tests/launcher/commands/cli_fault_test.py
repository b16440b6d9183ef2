"""Faults at random steps of random ranks: a job ends in time, leaves nothing behind, and says what went wrong.

ANNULUS_TEST_FAULTS is how many (12 by default), ANNULUS_TEST_SEED which ones.
"""

import functools
import json
import os
import random
import signal
import time
import unittest.mock
import uuid

from cli_support import MPIEXEC, OPERANDS, PROGRAM, CliTest, main
from processes import processes_with

FAULTS = int(os.environ.pop("ANNULUS_TEST_FAULTS", 12))
SEED = os.environ.pop("ANNULUS_TEST_SEED", "1")
LIBRARY = os.environ.pop("ANNULUS_TEST_FAULT_LIBRARY")

WAITING = 4  # seconds that a rank waits for another one …
STARTING = 30  # … and at the start of MPI
PATIENCE = 30  # for the rest, on a machine that is busy with other things
GONE = 10  # seconds after mpirun's end

ON_RANKS = ["--device", "cpu", "--threads", "1"]
SHAPE = ["--shape", "1,512,512,4,2,16", "--causal"]


class Command:
    """A way to call the program: its words, how many ranks it may get, and the files that it writes.

    Arrays are the same in every run. Reports differ; is_complete() checks only that they are whole."""

    def __init__(self, words, ranks, arrays=(), reports=()):
        self.words, self.ranks = words, ranks
        self.arrays, self.reports = {*arrays}, {*reports}
        self.files = self.arrays | self.reports


COMMANDS = {
    "run": Command(["run", *OPERANDS, "--causal", "--output", "output.npy", "--lse", "lse.npy", "--json",
                    "report.json", "--trace", "trace.json", *ON_RANKS],
                   [2, 3, 4], ["output.npy", "lse.npy"], ["report.json", "trace.json"]),
    "verify": Command(["verify", *SHAPE, "--json", "report.json", "--csv", "report.csv", *ON_RANKS],
                      [2, 3], reports=["report.json", "report.csv"]),
    "verify --random": Command(["verify", "--random", "3", "--json", "report.json", *ON_RANKS],
                               [2], reports=["report.json"]),
    "bench": Command(["bench", *SHAPE, "--iters", "2", "--json", "report.json", "--csv", "report.csv",
                      *ON_RANKS], [2], reports=["report.json", "report.csv"]),
}


def is_complete(name, text):
    """True if a report was written to its end."""
    if name.endswith(".json"):
        return bool(json.loads(text))
    lines = text.split("\n")
    return lines[-1] == "" and len(lines) > 2


# The required messages. Where a message of ours is lost with its process, mpirun names the signal;
# where Open MPI ends the process while it starts, it speaks for itself.
CAUSES = {
    "kill": r"signal 9 \(Killed\)",
    "stop": r"(waiting for|(from|by)) (rank {rank}\b|other ranks)",
    "memory": r"annulus: error: .*(no memory for|out of memory)|^out of dynamic memory in opal_",
    "disk": r"No space left on device",
    "pipe": r"signal 13 \(Broken pipe\)",
}


class Fault:
    """One fault: what happens to which rank of how many of which command, and at which of its steps."""

    def __init__(self, number, steps_of):
        draw = random.Random(f"{SEED}:{number}")
        self.kind = list(CAUSES)[number % len(CAUSES)]
        self.command = draw.choice(["run", "run", "run", *COMMANDS])
        self.ranks = draw.choice(COMMANDS[self.command].ranks)
        self.rank = draw.randrange(self.ranks)
        steps = steps_of(self.command, self.ranks)[self.rank]
        if self.kind == "stop":
            # mpirun waits for a process that is stopped after the end of MPI, as no rank does.
            steps = steps[:steps.index("MPI_Finalize") + 1]
        last = len(steps) - 1
        self.step = draw.choice([0, last, *[draw.randint(1, last - 1) for _ in range(4)]])
        self.name = steps[self.step]
        # The last steps are named, since their numbers may depend on which rank was faster.
        self.place = self.name if self.name in ["MPI_Finalize", "end"] else self.step

    def __str__(self):
        return (f"{self.kind} at step {self.step} ({self.name}) of rank {self.rank} of {self.ranks} of "
                f"annulus {self.command}")


class Faults(CliTest):
    def setUp(self):
        super().setUp()
        self.save_operands(rows=4096, heads=4, kv_heads=2, dim=16)

    def job(self, command, ranks, **fault):
        """Exit code, messages and seconds of a job with this fault; the processes that it leaves."""
        mark = f"FAULT_JOB={uuid.uuid4()}"
        variables = {"LD_PRELOAD": LIBRARY, "FAULT_REPORT": self.path("steps"),
                     "ANNULUS_TIMEOUT": WAITING, **fault}
        passed = [word for item in variables.items() for word in ("-x", "=".join(map(str, item)))]
        words = [*MPIEXEC, str(ranks), *passed, PROGRAM, *COMMANDS[command].words]
        name, value = mark.split("=")
        start = time.monotonic()
        job = self.start(words, env={**os.environ, name: value})
        try:
            _, messages = job.communicate(timeout=WAITING + STARTING + PATIENCE)
            seconds = time.monotonic() - start
            deadline = time.monotonic() + GONE
            while (left := processes_with(mark)) and time.monotonic() < deadline:
                time.sleep(0.05)
            return job.returncode, messages, seconds, left
        finally:
            for process in processes_with(mark):
                os.kill(process, signal.SIGKILL)
            job.wait()

    @functools.cache
    def without_fault(self, command, ranks):
        """The steps of every rank and the contents of the arrays, if nothing goes wrong."""
        code, messages, _, left = self.job(command, ranks, FAULT_KIND="none")
        self.assertEqual((code, left), (0, []), messages)
        steps = []
        for rank in range(ranks):
            steps.append(self.read(f"steps.{rank}").decode().split("\n")[:-1])
            os.remove(self.path(f"steps.{rank}"))
        arrays = {name: self.read(name) for name in COMMANDS[command].arrays}
        self.assertEqual(self.take_files(command, arrays), COMMANDS[command].files)
        return steps, arrays

    def take_files(self, command, arrays):
        """Removes the files that a job has written, all of them complete; returns their names."""
        found = {*os.listdir(self.directory)} - {"query.npy", "key.npy", "value.npy", "steps"}
        for name in found:
            contents = self.read(name)
            if name in arrays:
                self.assertEqual(contents, arrays[name], f"{name} is not what a run without fault writes")
            elif name in COMMANDS[command].reports:
                self.assertTrue(is_complete(name, contents.decode()), name)
            else:
                self.fail(f"{name} is left behind")
            os.remove(self.path(name))
        return found

    def inflict(self, fault):
        code, messages, seconds, left = self.job(fault.command, fault.ranks, FAULT_KIND=fault.kind,
                                                 FAULT_RANK=fault.rank, FAULT_STEP=fault.place)
        self.assertEqual(left, [], "processes are left behind\n" + messages)
        happened = os.path.exists(self.path("steps"))
        if happened:
            os.remove(self.path("steps"))
        files = self.take_files(fault.command, self.without_fault(fault.command, fault.ranks)[1])
        print(f"  {fault}: {seconds:.1f} s, exit code {code}, {len(files)} files", flush=True)
        self.assertTrue(happened, "the fault did not happen\n" + messages)
        if code == 0 and fault.kind not in ["kill", "stop"]:
            self.assertEqual(files, COMMANDS[fault.command].files, messages)  # it needed no more of it
            return
        self.assertNotEqual(code, 0, messages)
        if fault.kind == "disk":  # no name is given before all arrays are complete
            arrays = COMMANDS[fault.command].arrays
            self.assertIn(files & arrays, [set(), arrays])
        self.assertRegex(messages, CAUSES[fault.kind].format(rank=fault.rank))

    def test_striped_rows_are_written_in_few_pieces(self):
        """Four bytes of the LSE, and 256 of the output, are neighbours on a rank."""
        command = Command([*COMMANDS["run"].words, "--sequence-layout", "striped"], [4],
                          COMMANDS["run"].arrays, COMMANDS["run"].reports)
        with unittest.mock.patch.dict(COMMANDS, {"striped": command}):
            steps, _ = self.without_fault("striped", 4)
        for rank, names in enumerate(steps):
            self.assertLessEqual(names.count("pwrite"), 32, f"rank {rank}")

    def test_random_faults(self):
        for number in range(FAULTS):
            fault = Fault(number, lambda *job: self.without_fault(*job)[0])
            with self.subTest(fault=str(fault), number=number):
                self.inflict(fault)


if __name__ == "__main__":
    main()
