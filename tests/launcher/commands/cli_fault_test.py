"""Faults at random steps of random ranks: a job ends in time, leaves nothing behind, and says what went wrong.

ANNULUS_TEST_FAULTS is how many (12 by default), ANNULUS_TEST_SEED which ones.
"""

import functools
import json
import os
import random
import re
import signal
import subprocess
import time
import uuid

import numpy as np

from cli_support import MPIEXEC, OPERANDS, PROGRAM, CliTest, main
from processes import processes_with

FAULTS = int(os.environ.pop("ANNULUS_TEST_FAULTS", 12))
SEED = os.environ.pop("ANNULUS_TEST_SEED", "1")
LIBRARY = os.environ.pop("ANNULUS_TEST_FAULT_LIBRARY")

WAITING = 4  # seconds that a rank waits for another one …
STARTING = 30  # … and at the start of MPI
PATIENCE = 30  # for the rest, on a machine that is busy with other things
GONE = 10  # seconds after mpirun's end

ARRAYS = ["output.npy", "lse.npy"]
REPORTS = ["report.json", "trace.json"]

# What must be said. Where a message of ours is lost with its process, mpirun names the signal.
CAUSES = {
    "kill": r"signal 9 \(Killed\)",
    "stop": r"(waiting for|(from|by)) (rank {rank}\b|other ranks)",
    "memory": r"annulus: error: .*(no memory for|out of memory)",
    "disk": r"No space left on device",
    "pipe": r"signal 13 \(Broken pipe\)",
}


class Fault:
    """One fault: what happens to which rank of how many, and at which of its steps."""

    def __init__(self, number, steps_of):
        draw = random.Random(f"{SEED}:{number}")
        self.kind = list(CAUSES)[number % len(CAUSES)]
        self.ranks = draw.choice([2, 3, 4])
        self.rank = draw.randrange(self.ranks)
        steps = steps_of(self.ranks)[self.rank]
        if self.kind == "stop":
            # mpirun waits for a process that is stopped after the end of MPI, as no rank does.
            steps = steps[:steps.index("MPI_Finalize") + 1]
        last = len(steps) - 1
        self.step = draw.choice([0, last, *[draw.randint(1, last - 1) for _ in range(4)]])
        self.name = steps[self.step]

    def __str__(self):
        return f"{self.kind} at step {self.step} ({self.name}) of rank {self.rank} of {self.ranks}"


class Faults(CliTest):
    def setUp(self):
        super().setUp()
        self.save_operands(rows=4096, heads=4, kv_heads=2, dim=16)

    def job(self, ranks, **fault):
        """Exit code, messages and seconds of a job with this fault; the processes that it leaves."""
        mark = f"FAULT_JOB={uuid.uuid4()}"
        variables = {"LD_PRELOAD": LIBRARY, "FAULT_REPORT": self.path("steps"), **fault}
        passed = [word for item in variables.items() for word in ("-x", "=".join(map(str, item)))]
        words = [*MPIEXEC, str(ranks), *passed, PROGRAM, "run", *OPERANDS, "--causal", "--output",
                 "output.npy", "--lse", "lse.npy", "--json", "report.json", "--trace", "trace.json",
                 "--device", "cpu", "--threads", "1", "--timeout", str(WAITING)]
        name, value = mark.split("=")
        start = time.monotonic()
        job = subprocess.Popen(words, cwd=self.directory, env={**os.environ, name: value}, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
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
    def without_fault(self, ranks):
        """The steps of every rank and the contents of the arrays, if nothing goes wrong."""
        code, messages, _, left = self.job(ranks, FAULT_KIND="none")
        self.assertEqual((code, left), (0, []), messages)
        steps = []
        for rank in range(ranks):
            with open(self.path(f"steps.{rank}")) as file:
                steps.append(file.read().split("\n")[:-1])
            os.remove(self.path(f"steps.{rank}"))
        arrays = {}
        for name in ARRAYS:
            with open(self.path(name), "rb") as file:
                arrays[name] = file.read()
        self.assertEqual(self.take_files(arrays), {*ARRAYS, *REPORTS})
        return steps, arrays

    def take_files(self, arrays):
        """Removes the files that a job has written, all of them complete; returns their names."""
        found = {*os.listdir(self.directory)} - {"query.npy", "key.npy", "value.npy", "steps"}
        for name in found:
            with open(self.path(name), "rb") as file:
                contents = file.read()
            if name in ARRAYS:
                self.assertEqual(contents, arrays[name], f"{name} is not what a run without fault writes")
            elif name in REPORTS:
                self.assertTrue(json.loads(contents), name)
            else:
                self.fail(f"{name} is left behind")
            os.remove(self.path(name))
        return found

    def inflict(self, fault):
        code, messages, seconds, left = self.job(
            fault.ranks, FAULT_KIND=fault.kind, FAULT_RANK=fault.rank, FAULT_STEP=fault.step)
        self.assertEqual(left, [], "processes are left behind\n" + messages)
        happened = os.path.exists(self.path("steps"))
        if happened:
            os.remove(self.path("steps"))
        files = self.take_files(self.without_fault(fault.ranks)[1])
        print(f"  {fault}: {seconds:.1f} s, exit code {code}, {len(files)} files", flush=True)
        self.assertTrue(happened, "the fault did not happen\n" + messages)
        if code == 0 and fault.kind not in ["kill", "stop"]:
            self.assertEqual(files, {*ARRAYS, *REPORTS}, messages)  # it needed no more of it
            return
        self.assertNotEqual(code, 0, messages)
        self.assertRegex(messages, CAUSES[fault.kind].format(rank=fault.rank))

    def test_random_faults(self):
        for number in range(FAULTS):
            fault = Fault(number, lambda ranks: self.without_fault(ranks)[0])
            with self.subTest(fault=str(fault), number=number):
                self.inflict(fault)


if __name__ == "__main__":
    main()
