"""A rank that stops or dies, at whatever moment, ends the job: with a word on who is missing, within the
timeout, and without leaving processes behind."""

import os
import signal
import subprocess
import sys
import time
import unittest
import uuid

from processes import processes_with
from store_ranks import Ranks

PROGRAM = sys.argv.pop(1)
MPIRUN = sys.argv.pop(1)

RANKS = 3
MISSING = 1
TIMEOUT = 4  # seconds that a rank waits for another one
PATIENCE = 60  # for a machine that is busy with other things
GONE = 5  # seconds that processes may outlive mpirun


class Lifecycle(unittest.TestCase):
    def run_job(self, stage, which, timeout=TIMEOUT):
        """Exit code, messages and seconds of a job in which a rank sends itself the signal."""
        mark = f"ANNULUS_TEST_JOB={uuid.uuid4()}"
        name, value = mark.split("=")
        words = [MPIRUN, "-n", str(RANKS), "--oversubscribe", "--bind-to", "none", PROGRAM,
                 str(timeout), stage, str(MISSING), str(int(which))]
        start = time.monotonic()
        job = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, name: value})
        try:
            _, messages = job.communicate(timeout=PATIENCE)
            seconds = time.monotonic() - start
            deadline = time.monotonic() + GONE
            while processes_with(mark) and time.monotonic() < deadline:
                time.sleep(0.1)
            self.assertEqual(processes_with(mark), [], messages)
            return job.returncode, messages, seconds
        finally:
            for process in processes_with(mark):
                os.kill(process, signal.SIGKILL)
            job.wait()

    def test_a_job_without_incident(self):
        code, messages, _ = self.run_job("nowhere", signal.SIGSTOP)
        self.assertEqual(code, 0, messages)
        self.assertNotIn("lifecycle:", messages)

    def test_an_endless_timeout_is_a_long_one(self):
        for timeout in ["1e10", "inf"]:
            code, messages, _ = self.run_job("nowhere", signal.SIGSTOP, timeout)
            self.assertEqual(code, 0, messages)
            self.assertNotIn("lifecycle:", messages)

    def stopped(self, stage, expected):
        code, messages, seconds = self.run_job(stage, signal.SIGSTOP)
        self.assertEqual(code, 3, messages)
        self.assertIn(expected, messages)
        self.assertGreaterEqual(seconds, TIMEOUT)
        self.assertNotIn("waiting for rank 0", messages)
        self.assertNotIn("waiting for rank 2", messages)

    def test_stopped_before_mpi(self):
        self.stopped("start", "lifecycle: start of MPI: waiting for other ranks (no progress for 4 s)")

    def test_stopped_before_the_mesh(self):
        self.stopped("mesh", "lifecycle: start of the mesh: waiting for rank 1 to arrive (no progress for 4 s)")

    def test_stopped_while_ranks_are_numbered(self):
        self.stopped("split", "lifecycle: order of the ranks: waiting for MPI_Comm_split (no progress for 4 s)")

    def test_stopped_before_a_group(self):
        self.stopped("group", "axes of a group: waiting for rank 1 to give its text (no progress for 4 s)")

    def test_stopped_before_a_control_call(self):
        self.stopped("barrier", "lifecycle: barrier: waiting for rank 1 to arrive (no progress for 4 s)")

    def test_stopped_at_the_end(self):
        self.stopped("end", "lifecycle: end of the job: waiting for rank 1 to arrive (no progress for 4 s)")

    def test_stopped_where_nobody_asks_for_the_end(self):
        code, messages, _ = self.run_job("destructor", signal.SIGSTOP)
        self.assertNotEqual(code, 0, messages)
        self.assertIn("lifecycle: end of the job: waiting for rank 1 to arrive (no progress for 4 s)", messages)

    def test_killed_at_any_stage(self):
        for stage in ["start", "mesh", "group", "barrier", "end"]:
            with self.subTest(stage):
                code, messages, _ = self.run_job(stage, signal.SIGKILL)
                self.assertNotEqual(code, 0, messages)


class LifecycleOnAStore(unittest.TestCase):
    """Without MPI, only its ranks can end a job."""

    def run_job(self, stage, which, ranks=RANKS):
        """Exit codes and messages of the ranks; None for one that has stopped."""
        job = Ranks(ranks, [PROGRAM, str(TIMEOUT), stage, str(MISSING), str(int(which))])
        try:
            found = []
            for rank, process in enumerate(job.processes):
                if rank == MISSING and which == signal.SIGSTOP and stage != "nowhere":
                    found.append((None, ""))
                    continue
                messages, _ = process.communicate(timeout=PATIENCE)
                found.append((process.returncode, messages))
            return found
        finally:
            for process in job.processes:
                process.stdout.close()
            job.kill()

    def missing(self, stage, which, expected, ranks=RANKS):
        for rank, (code, messages) in enumerate(self.run_job(stage, which, ranks)):
            if rank == MISSING:
                continue
            self.assertEqual(code, 3, messages)
            self.assertIn(expected, messages)

    def test_a_job_without_incident(self):
        for ranks in (1, 2, 3, 4, 8):
            for code, messages in self.run_job("nowhere", signal.SIGSTOP, ranks):
                self.assertEqual((code, messages), (0, ""))

    def test_stopped_or_killed(self):
        for stage, expected in [
                ("mesh", "start of the mesh: waiting for rank 1 to arrive (no progress for 4 s)"),
                ("group", "axes of a group: waiting for rank 1 to give its text (no progress"),
                ("barrier", "barrier: waiting for rank 1 to arrive (no progress for 4 s)")]:
            for which, sizes in ((signal.SIGSTOP, (2, 4, 8)), (signal.SIGKILL, (3,))):
                for ranks in sizes if stage == "barrier" else (RANKS,):
                    with self.subTest(stage=stage, signal=which, ranks=ranks):
                        self.missing(stage, which, expected, ranks)

    def test_an_abort_ends_ranks_that_wait(self):
        for rank, (code, messages) in enumerate(self.run_job("abort", 0)):
            self.assertEqual(code, 5, f"rank {rank}: {messages}")


if __name__ == "__main__":
    unittest.main()
