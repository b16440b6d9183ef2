"""Ranks that see different things, a full disk, ranks that die or hang: nobody is left waiting."""

import contextlib
import csv
import json
import os
import resource
import shutil
import signal
import subprocess
import time

import numpy as np

from cli_support import (MPIEXEC, OPERANDS, OUTPUT, PROGRAM, TIMEOUT, CliTest, command,
                         holds_temporary, main, ranks_of)


class RanksDiffer(CliTest):
    """mpirun starts every rank with words, folder or variables of its own."""

    def two_ranks(self, first, second):
        """`first` and `second` are (flags of mpirun, words of annulus)."""
        (flags0, words0), (flags1, words1) = first, second
        return self.execute([*MPIEXEC, "1", *flags0, PROGRAM, *words0,
                             ":", "-n", "1", *flags1, PROGRAM, *words1])

    def run_with_a_bad_folder(self, damage):
        self.save_operands()
        other = self.path("other")
        os.mkdir(other)
        for name in ["query.npy", "key.npy", "value.npy"]:
            shutil.copy(self.path(name), other)
        damage(other)
        words = ["run", *OPERANDS, "--output", self.path("output.npy")]
        result = self.two_ranks(([], words), (["-wdir", other], words))
        self.expect_no_files("output.npy")
        return result

    def test_file_missing_on_one_rank(self):
        result = self.run_with_a_bad_folder(lambda folder: os.remove(folder + "/key.npy"))
        self.expect_error(result, 2, "annulus: error: rank 1: --key key.npy: cannot be opened")

    def test_other_shape_on_one_rank(self):
        def damage(folder):
            np.save(folder + "/query.npy", self.random(1, 32, 4, 16))

        self.expect_error(self.run_with_a_bad_folder(damage), 2, "rank 1: input files", "T=32", "T=64")

    def test_other_words_or_variables_on_one_rank(self):
        words = ["--mesh", "sp=2", "--shape", "1,64,64,4,4,8", "--device", "cpu"]
        for flags, second, texts in [
                ([], ["verify", *words, "--causal"], ["rank 1: command and options", "--causal"]),
                ([], ["bench", *words], ["rank 1: command and options", "verify", "bench"]),
                (["-x", "ANNULUS_WINDOW=wide"], ["verify", *words], ["rank 1: ANNULUS_WINDOW: got 'wide'"])]:
            with self.subTest(second, flags=flags):
                self.expect_error(self.two_ranks(([], ["verify", *words]), (flags, second)), 2, *texts)


class FullDisk(CliTest):
    @staticmethod
    def limit_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    def test_is_a_failure_with_one_message_and_no_file(self):
        self.save_operands()
        result = self.annulus("run", *OPERANDS, *OUTPUT,
                              environment={"ANNULUS_LOG_LEVEL": "info"},
                              preexec_fn=self.limit_files)
        self.expect_error(result, 3, "--output output.npy: needs 16.12 KiB: File too large")
        self.assertNotIn("computed in", result.stderr)
        self.expect_no_files("output.npy")

    def test_of_a_report_names_its_option(self):
        result = self.annulus("plan", "--mesh", "sp=4", "--shape", "1,1k,1k,8,2,64", "--json",
                              "plan.json", preexec_fn=self.limit_files)
        self.expect_error(result, 3, "--json plan.json: ", "File too large")
        self.expect_no_files("plan.json")


class NoMemory(CliTest):
    @staticmethod
    def limit_memory():
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    def test_names_the_tensor_and_how_much_it_wants(self):
        self.save_operands(rows=1, heads=1, kv_heads=1, dim=64)
        shape = (1, 32 << 20, 1, 64)  # 8 GiB, none of them on the disk
        np.lib.format.open_memmap(self.path("key.npy"), "w+", np.float32, shape)
        np.lib.format.open_memmap(self.path("value.npy"), "w+", np.float32, shape)
        result = self.annulus("run", *OPERANDS, *OUTPUT, "--threads", 1,
                              preexec_fn=self.limit_memory)
        self.expect_error(result, 3, "annulus: error: --key key.npy: key: tensor [1, 33554432, 1, 64] of "
                          "float32: cpu: no memory for 8 GiB", "available, this process may have 4 GiB")
        self.expect_no_files("output.npy")

    def test_of_verify_names_the_tensor_too(self):
        result = self.annulus("verify", "--shape", "1,64,32M,1,1,64", "--threads", 1,
                              preexec_fn=self.limit_memory)
        self.expect_error(result, 3, "annulus: error: key: tensor [1, 33554432, 1, 64] of float32: cpu: no "
                          "memory for 8 GiB", "available, this process may have 4 GiB")

    def test_little_address_space_is_an_error_and_no_hang(self):
        # Without room for its buffers, OpenBLAS would try for ever. With AMX, it is not used.
        with open("/proc/cpuinfo", encoding="ascii") as processors:
            least = 200 if "amx_bf16" in processors.read() else 400
        ended = set()
        for limit in least, 600, 800, 1200:
            limits = (limit << 20, limit << 20)
            result = self.annulus("verify", "--shape", "1,512,512,4,2,64", "--threads", 2,
                                  preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limits))
            self.assertIn(result.returncode, (0, 3, 127), result.stderr)  # 127: no room for libraries
            if result.returncode == 3:
                self.assertRegex(result.stderr, "no memory|out of memory")
            ended.add(result.returncode)
        self.assertTrue(ended & {3, 127}, ended)
        self.assertIn(0, ended)


class FullOutput(CliTest):
    def test_is_a_failure(self):
        shape = ["--shape", "1,64,64,4,2,16"]
        plan = ["plan", "--mesh", "sp=2", *shape]
        for words in [["--help"], ["verify", "--random", 2], ["verify", *shape, "--json", "-"], plan,
                      ["bench", "--iters", 1, "--warmup", 0, *shape, "--csv", "-"]]:
            with self.subTest(words), open("/dev/full", "w") as full:
                result = subprocess.run(command(*words), cwd=self.directory, stdout=full,
                                        stderr=subprocess.PIPE, text=True, timeout=TIMEOUT)
                self.assertEqual(result.returncode, 3, result.stderr)
                self.assertIn("annulus: error: standard output: cannot be written in full",
                              result.stderr)
                self.assertEqual(result.stderr.count("standard output"), 1)


class RankFails(CliTest):
    """A rank dies or stops in the middle of a computation of many seconds."""

    WAITING = 5  # seconds that a rank waits for another one

    @contextlib.contextmanager
    def computing(self, words, begun, **arguments):
        """A job that has computed for two seconds since begun(job); it is killed at the end."""
        job = self.start(words, **arguments)
        try:
            self.wait_for(lambda: job.poll() is not None or begun(job), TIMEOUT / 2)
            time.sleep(2)
            self.assertIsNone(job.poll(), "too fast to be interrupted")
            yield job
        finally:
            for process in ranks_of(job.pid).values():
                os.kill(process, signal.SIGKILL)
            job.kill()
            job.communicate()

    def interrupt(self, rank, which):
        """Starts a long run on three ranks, sends one of them (mpirun if `rank` is None) a signal once all
        compute, and returns exit code, messages and the seconds from the signal to the end. Many short
        calls rather than a long one, since ranks finish a block before they notice anything."""
        self.save_operands(rows=6000, heads=4, kv_heads=1, dim=32)
        words = command("run", *OPERANDS, *OUTPUT, "--device", "cpu", "--timeout", self.WAITING,
                        "--threads", 1, "--repeat", 10000, ranks=3)

        def begun(job):  # the output file is open right before the operands are read
            return any(holds_temporary(process, self.directory) for process in ranks_of(job.pid).values())
        with self.computing(words, begun) as job:
            ranks = ranks_of(job.pid)
            self.assertEqual(set(ranks), {0, 1, 2})
            os.kill(job.pid if rank is None else ranks[rank], which)
            start = time.monotonic()
            _, messages = job.communicate(timeout=TIMEOUT / 2)
            return job.returncode, messages, time.monotonic() - start

    def interrupt_alone(self, which):
        """The same with a run on one rank; returns its exit code and messages."""
        self.save_operands(rows=24000, heads=16, kv_heads=1, dim=32)
        words = command("run", *OPERANDS, *OUTPUT, "--device", "cpu", "--lse", "lse.npy", "--json",
                        "report.json", "--trace", "trace.json", "--threads", 1)
        with self.computing(words, lambda job: holds_temporary(job.pid, self.directory) >= 4,
                            stdout=subprocess.DEVNULL) as job:
            job.send_signal(which)
            _, messages = job.communicate(timeout=TIMEOUT / 2)
            return job.returncode, messages

    def test_signals_say_what_they_interrupt_and_leave_no_file(self):
        for which in [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]:
            with self.subTest(which):
                code, messages = self.interrupt_alone(which)
                self.assertEqual(code, -which)
                self.assertIn(f"annulus: interrupted by {which.name} while annulus run was computing",
                              messages)
                self.expect_no_files("output.npy", "lse.npy", "report.json", "trace.json")

    def test_a_killed_run_leaves_no_file(self):
        try:
            os.close(os.open(self.directory, os.O_WRONLY | os.O_TMPFILE))
        except OSError:
            self.skipTest("no O_TMPFILE in " + self.directory)
        self.interrupt_alone(signal.SIGKILL)
        self.expect_no_files("output.npy", "lse.npy", "report.json", "trace.json")

    def test_an_interrupted_bench_keeps_its_rows(self):
        words = command("bench", "--sweep", "16:64k", "--iters", "2", "--csv", "rows.csv", "--json", "-")
        job = self.start(words)
        self.wait_for(lambda: os.path.exists(self.path("rows.csv")), TIMEOUT, pause=0.01)
        job.send_signal(signal.SIGINT)
        output, messages = job.communicate(timeout=TIMEOUT)
        self.assertEqual(job.returncode, -signal.SIGINT, messages)
        # The signal may come before the message knows of the first row.
        self.assertRegex(messages, "(finished rows are kept|no unfinished file is left)\n$")
        report = json.loads(output)
        self.assertRegex(report["verdict"]["text"], r"unfinished after \d+ row")
        with open(self.path("rows.csv"), newline="") as file:
            rows = list(csv.DictReader(file))
        # The signal may come between the two.
        self.assertLessEqual(abs(len(rows) - len(report["rows"])), 1)
        self.assertEqual(report["rows"][0]["shape"], rows[0]["shape (B,T,S,N,K,D,Dv)"])

    def test_repeated_signals_to_mpirun_give_one_message_at_most(self):
        words = command("bench", "--device", "cpu", "--threads", "1", "--sweep", "16:64k", "--iters", "2",
                        "--csv", "rows.csv", ranks=3)
        for which in [signal.SIGINT, signal.SIGTERM]:
            with self.subTest(which):
                job = self.start(words, subprocess.DEVNULL)
                self.wait_for(lambda: os.path.exists(self.path("rows.csv")), TIMEOUT / 2, pause=0.01)
                for _ in range(3):
                    job.send_signal(which)
                    time.sleep(0.1)
                _, messages = job.communicate(timeout=TIMEOUT / 2)
                # At its second signal mpirun may kill ranks before they say anything.
                self.assertLessEqual(messages.count("annulus: interrupted by "), 1, messages)
                os.remove(self.path("rows.csv"))

    def test_interrupted_mpirun_says_what_it_interrupts_once(self):
        code, messages, _ = self.interrupt(None, signal.SIGINT)
        self.assertNotIn(code, [0, 2, 3, 4], "codes of the program")
        self.assertEqual(messages.count("annulus: interrupted by "), 1, messages)
        self.assertIn("while annulus run was computing", messages)
        self.expect_no_files("output.npy")

    def test_killed(self):
        code, messages, seconds = self.interrupt(1, signal.SIGKILL)
        self.assertNotEqual(code, 0)
        self.assertIn("signal 9", messages)
        self.assertLess(seconds, self.WAITING + 5)
        self.expect_no_files("output.npy")

    def test_stopped(self):
        code, messages, seconds = self.interrupt(2, signal.SIGSTOP)
        self.assertEqual(code, 3, messages)
        self.assertRegex(messages, r"annulus: error: rank [01]: .*(from|by|for) rank 2.*, while annulus run "
                                   "was computing")
        self.assertLess(seconds, 60)
        self.expect_no_files("output.npy")


if __name__ == "__main__":
    main()
