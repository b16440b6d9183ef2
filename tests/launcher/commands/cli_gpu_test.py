"""annulus on GPU ranks: numbers, bench, refusals, and ranks that die or hang.

Ranks that outnumber the GPUs share them, so that one GPU is enough. Without any, all is skipped.
"""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np

from cli_support import (OPERANDS, OUTPUT, TIMEOUT, CliTest, as_bfloat16, as_float16, command,
                         command_on_nodes, main, ranks_of)

SKIPPED = 77  # for ctest
CONVERSIONS = {"float32": lambda array: array, "float16": as_float16, "bfloat16": as_bfloat16}


@functools.cache
def info():
    result = subprocess.run(command("info", "--json", "-"), stdout=subprocess.PIPE, text=True,
                            check=True, timeout=TIMEOUT)
    return json.loads(result.stdout)


def gpu_count():
    return sum(re.fullmatch(r"GPU \d+", key) is not None for key in info()["machine"])


def on_gpus(ranks, transport=None):
    """The options that put this many ranks on the GPUs there are."""
    words = ["--device", "cuda"]
    if ranks > gpu_count():
        return [*words, "--share-gpus", "--transport", "peer"]
    return words if transport is None else [*words, "--transport", transport]


def implementations_for(dtype):
    """The kernels that may compute shapes that fast kernels take."""
    fast = {name for name in (["flash_attn2"] if dtype == "float32" else ["sdpa", "flash_attn2"])
            if info()["implementations"].get(name, "no").startswith("yes")}
    return fast or {"native"}


class Numbers(CliTest):
    """From files to files, against an independent NumPy computation."""

    def check_on_gpus(self, ranks, meaning, dtype, how=()):
        self.check(meaning, ranks=ranks,
                   how=["--dtype", dtype, *on_gpus(ranks), *how, "--json", "report.json"])
        (row,) = self.load_json("report.json")["rows"]
        # The plain kernel is correct too, but hundreds of times slower: falling back to it is a
        # failure.
        self.assertLessEqual(set(row["impl"].split("+")), implementations_for(dtype), row)

    def save_uneven(self, dtype, rows=997, dim=64, **sizes):
        self.save_operands(rows=rows, dim=dim, convert=CONVERSIONS[dtype], **sizes)

    def test_one_rank(self):
        for dtype in CONVERSIONS:
            with self.subTest(dtype):
                self.save_uneven(dtype, batch=2)
                self.check_on_gpus(1, ["--causal"], dtype)

    def test_unnormalised_outputs(self):
        for dtype in CONVERSIONS:
            with self.subTest(dtype):
                self.save_operands(rows=301, dim=40, convert=CONVERSIONS[dtype])
                self.check(["--causal", "--normalize-output", "false"], ranks=2,
                           files=[*OPERANDS, *OUTPUT, "--maximum", "maximum.npy", "--sum",
                                  "sum.npy"], how=["--dtype", dtype, *on_gpus(2)])

    def test_two_ranks_and_the_same_bits_twice(self):
        for dtype in CONVERSIONS:
            with self.subTest(dtype):
                self.save_uneven(dtype)
                self.check_on_gpus(2, ["--causal"], dtype)
                again = ["--output", "output2.npy", "--lse", "lse2.npy"]
                self.succeed("run", *OPERANDS, *again, "--causal", "--dtype", dtype, *on_gpus(2), ranks=2)
                for name in ["output", "lse"]:
                    self.assertEqual(self.read(name + ".npy"), self.read(name + "2.npy"), name)

    def test_four_ranks(self):
        for dtype in CONVERSIONS:
            with self.subTest(dtype):
                self.save_uneven(dtype, rows=2000, heads=8, dim=128)
                self.check_on_gpus(4, ["--causal"], dtype)

    def test_named_implementations(self):
        for name, dtype in [("sdpa", "bfloat16"), ("native", "bfloat16"), ("native", "float32")]:
            with self.subTest(name, dtype=dtype):
                if not info()["implementations"][name].startswith("yes"):
                    self.skipTest(name + ": " + info()["implementations"][name])
                self.save_uneven(dtype)
                self.check(["--causal"], ranks=2, how=["--dtype", dtype, *on_gpus(2), "--impl", name,
                                                       "--json", "report.json"])
                (row,) = self.load_json("report.json")["rows"]
                self.assertEqual(row["impl"], name)

    def test_schedules(self):
        self.save_uneven("bfloat16")
        for schedule in ["ring", "allgather"]:
            with self.subTest(schedule):
                self.check_on_gpus(4, ["--causal"], "bfloat16", ["--schedule", schedule])

    # Dtype, operands, ranks, the options that decide what is computed, and those that decide how.
    CASES = [("bfloat16", {"columns": 1203}, 2, "", ""),
             ("float32", {}, 4, "--window 100,0", ""),
             ("bfloat16", {}, 4, "--window 100,0", ""),
             ("float16", {"batch": 2}, 2, "--causal --cu-seqlens cu.npy", ""),
             ("bfloat16", {"batch": 3, "columns": 1203}, 2, "--kv-lengths kv.npy", ""),
             ("float16", {"batch": 2, "bhtd": True}, 4, "--causal --layout bhtd", "--mesh sp=2,tp=2")]

    def test_cases(self):
        self.save("cu.npy", np.array([0, 1, 300, 300, 611, 997], np.int32))
        self.save("kv.npy", np.array([1203, 0, 333], np.int32))
        for dtype, operands, ranks, meaning, how in self.CASES:
            with self.subTest(meaning, dtype=dtype):
                self.save_uneven(dtype, **operands)
                self.check_on_gpus(ranks, meaning.split(), dtype, how.split())


class TwoNodes(CliTest):
    """Two nodes pretended on one machine: ranks of different nodes may have the same GPU, as NCCL
    takes it for two."""

    VERIFY = ["verify", "--dtype", "bfloat16", "--causal", "--shape"]

    def on_two_nodes(self, ranks, *words):
        """--transport composite is to be named where ranks share GPUs."""
        if ranks > 2 * gpu_count():
            self.skipTest(f"{ranks} ranks on two nodes need {ranks // 2} GPUs")
        nodes = ["one"] * (ranks // 2) + ["two"] * (ranks // 2)
        device = ["--device", "cuda", *(["--share-gpus"] if ranks > gpu_count() else [])]
        return self.execute(command_on_nodes(*words, *device, nodes=nodes))

    def verify(self, ranks, shape, *words):
        result = self.expect_success(self.on_two_nodes(ranks, *self.VERIFY, shape, *words, "--json", "-"))
        return json.loads(result.stdout)["rows"][0]

    def check_schedules(self, ranks, schedules):
        for schedule in schedules:
            with self.subTest(schedule):
                row = self.verify(ranks, "1,997,997,8,4,64", "--schedule", schedule, "--transport",
                                  "composite")
                self.assertEqual(row["transport"], "composite")
                self.assertEqual(row["schedule"], schedule)

    def test_two_ranks(self):
        self.check_schedules(2, ["ring", "allgather", "ulysses"])

    def test_four_ranks(self):
        self.check_schedules(4, ["ring", "allgather", "ulysses", "hybrid", "double_ring"])

    def test_calls_are_replayed(self):
        for ranks in [2, 4]:
            with self.subTest(ranks=ranks):
                result = self.on_two_nodes(ranks, "bench", "--shape", "1,4k,4k,8,4,64", "--dtype",
                                           "bfloat16", "--causal", "--iters", "20", "--transport",
                                           "composite", "--json", "-")
                self.expect_success(result)
                (row,) = json.loads(result.stdout)["rows"]
                self.assertEqual(row["transport"], "composite")
                self.assertEqual(row["verdict"], "OK")

    def test_files(self):
        self.save_operands(rows=1001, heads=8, kv_heads=4, dim=64, convert=as_bfloat16)
        self.expect_success(self.on_two_nodes(
            4, "run", *OPERANDS, *OUTPUT, "--causal", "--dtype", "bfloat16", "--schedule",
            "double_ring", "--transport", "composite"))
        self.expect_right_files([*OPERANDS, *OUTPUT], ["--causal"])

    def test_automatic(self):
        if gpu_count() < 2:
            self.skipTest("needs 2 GPUs")
        self.assertEqual(self.verify(2, "1,256,256,4,4,64")["transport"], "nccl")
        if gpu_count() < 4:
            self.skipTest("needs 4 GPUs")
        self.assertEqual(self.verify(4, "1,256,256,4,4,64")["transport"], "composite")

    def test_inside_a_node(self):
        if gpu_count() < 2:
            self.skipTest("needs 2 GPUs")
        self.assertEqual(self.json(*self.VERIFY, "1,256,256,4,4,64", "--device", "cuda", "--transport",
                                   "composite", ranks=2)["rows"][0]["transport"], "composite")

    def test_peer_does_not_leave_the_node(self):
        result = self.on_two_nodes(2, *self.VERIFY, "1,256,256,4,4,64", "--transport", "peer")
        self.expect_error(result, 2, "transport peer: ranks 0 and 1 are on different nodes")


class Bench(CliTest):
    def report(self, *words):
        return self.json("bench", *words, *on_gpus(2), ranks=2)

    def test_columns(self):
        report = self.report("--shape", "1,8k,8k,8,2,128", "--dtype", "bfloat16", "--causal",
                             "--iters", "20")
        units = {column["name"]: column["unit"] for column in report["columns"]}
        for name, unit in {"time": "ms, median", "p99": "ms", "rate": "GFLOP/s/rank",
                           "local": "GFLOP/s/rank", "extra": "MiB/rank"}.items():
            self.assertEqual(units[name], unit)
        (row,) = report["rows"]
        self.assertLess(0, row["least"])
        self.assertLessEqual(row["least"], row["time"])
        self.assertLessEqual(row["time"], row["p99"])
        for name in ["rate", "local", "extra"]:
            self.assertGreater(row[name], 0, name)
        operations_per_rank = 2 * 8 * (128 + 128) * (8192 * 8193 / 2) / 2
        self.assertAlmostEqual(row["rate"], operations_per_rank / row["time"] * 1e-6,
                               delta=0.01 + row["rate"] * 0.001 / row["time"])
        self.assertIn(row["transport"], ["peer"] if gpu_count() < 2 else ["peer", "nccl"])
        self.assertLessEqual(set(row["impl"].split("+")), implementations_for("bfloat16"))
        self.assertEqual(row["verdict"], "OK")
        self.assertTrue(report["verdict"]["passed"])
        self.assertEqual(report["verdict"]["text"], "OK (1 of 1 within bounds)")

    def test_hops(self):
        report = self.report("--hops", "--sweep", "1M:16M:4", "--iters", "5")
        if "peer skipped" in report["meta"]:
            self.skipTest(report["meta"]["peer skipped"])
        sizes = {}
        for row in report["rows"]:
            sizes.setdefault(row["transport"], []).append(row["size"])
            self.assertLess(0, row["least"])
            self.assertLessEqual(row["least"], row["time"])
        self.assertEqual(sizes["peer"], [1 << 20, 4 << 20, 16 << 20])
        if gpu_count() < 2:
            self.assertEqual(list(sizes), ["peer"])

    def test_calibrate(self):
        words = ["--calibrate", "model.json", "--dtype", "bfloat16", "--shape", "1,0,0,8,2,64",
                 "--sweep", "512:1k", "--iters", "2", "--warmup", "1"]
        for mask in [[], ["--causal"]]:
            self.report(*words, *mask)
        model = self.load_json("model.json")
        # The transport that ranks prefer, if it is possible.
        self.assertEqual(model["transport"], "peer" if "peer" in model["transports"] else "nccl")
        self.assertEqual({kernel["mask"] for kernel in model["kernels"]}, {"none", "band"})
        for kernel in model["kernels"]:
            self.assertIn(kernel["implementation"], {*implementations_for("bfloat16"), "native"})


class BadInput(CliTest):
    BENCH = ["bench", "--shape", "1,64,64,4,2,64", "--iters", "1", "--device", "cuda"]

    def test_more_ranks_than_gpus(self):
        ranks = gpu_count() + 1
        self.expect_error(self.annulus(*self.BENCH, ranks=ranks), 2, "--device cuda",
                          f"{ranks} ranks on this node but {gpu_count()} visible GPU",
                          "--share-gpus")

    def test_nccl_on_shared_gpus(self):
        result = self.annulus(*self.BENCH, "--transport", "nccl", "--share-gpus", ranks=2)
        self.expect_error(result, 2, "--transport: got nccl", "--share-gpus")

    def test_implementation_that_cannot(self):
        sdpa = info()["implementations"]["sdpa"]
        if not sdpa.startswith("yes"):
            self.skipTest("sdpa: " + sdpa)
        words = ["--impl", "sdpa", "--dtype", "float32"]
        for ranks in [1, 2]:
            result = self.annulus("bench", "--shape", "1,64,64,4,2,64", "--iters", "1", *words,
                                  *on_gpus(ranks), ranks=ranks)
            self.expect_error(result, 2, "sdpa", "float16 and bfloat16, not float32")
        self.save_operands(dim=64)
        result = self.annulus("run", *OPERANDS, *OUTPUT, *words, *on_gpus(2), ranks=2)
        self.expect_error(result, 2, "sdpa", "float16 and bfloat16, not float32")
        self.expect_no_files("output.npy")


def is_running(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def gpu_holders():
    """Process ids, perhaps of another namespace, of all that compute on a GPU; none where
    nvidia-smi is missing or does not tell."""
    if shutil.which("nvidia-smi") is None:
        return set()
    result = subprocess.run(["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"],
                            capture_output=True, text=True, timeout=TIMEOUT)
    return {int(line) for line in result.stdout.split() if line.isdigit()}


class RankFails(CliTest):
    """One of two ranks dies or stops while both compute."""

    WAITING = 5  # seconds that a rank waits for another one
    GRACE = 15  # seconds beyond, in which all is over
    SETTLING = 10  # seconds in which a rank opens its GPU and begins to compute
    # Both would go on for many minutes: kernels first, then sharded calls; and exchanges alone.
    CALLS = ["--shape", "1,16k,16k,16,16,128", "--dtype", "bfloat16", "--causal", "--iters",
             "1000000"]
    HOPS = ["--hops", "--sweep", "256M:256M", "--iters", "1000000"]

    def transports(self):
        return ["peer", "nccl", "composite"] if gpu_count() > 1 else ["peer"]

    def command(self, words, transport):
        words = ["bench", *words, *on_gpus(2, transport), "--timeout", self.WAITING]
        if transport == "composite":
            return command_on_nodes(*words, nodes=["one", "two"])
        return command(*words, ranks=2)

    def interrupt(self, words, transport, which):
        """Sends rank 1 a signal once both compute, checks that the job is over in time and leaves
        nothing behind, and returns its exit code and messages."""
        held_before = gpu_holders()
        job = self.start(self.command(words, transport))
        ranks = {}
        try:
            self.wait_for(lambda: job.poll() is not None or len(ranks_of(job.pid)) == 2,
                          TIMEOUT / 2, lambda: "ranks do not start")
            ranks = ranks_of(job.pid)
            time.sleep(self.SETTLING)
            if job.poll() is not None:
                self.fail("ended before the signal: " + "".join(job.communicate()))
            # By their numbers where nvidia-smi has the same; else all that came meanwhile.
            holders = gpu_holders()
            held_by_job = holders & set(ranks.values()) or holders - held_before
            end = time.monotonic() + self.WAITING + self.GRACE
            os.kill(ranks[1], which)
            _, messages = job.communicate(timeout=self.WAITING + self.GRACE)
            self.wait_for(lambda: not any(map(is_running, ranks.values())), end - time.monotonic(),
                          lambda: f"ranks are left: {ranks}")
            self.wait_for(lambda: not held_by_job & gpu_holders(), end - time.monotonic(),
                          lambda: f"a GPU is still held by one of {held_by_job}")
            return job.returncode, messages
        finally:
            for process in filter(is_running, {**ranks_of(job.pid), **ranks}.values()):
                os.kill(process, signal.SIGKILL)
            job.kill()
            job.communicate()

    def expect_killed(self, words):
        for transport in self.transports():
            with self.subTest(transport):
                code, messages = self.interrupt(words, transport, signal.SIGKILL)
                self.assertNotEqual(code, 0)
                self.assertIn("signal 9", messages)

    def test_killed(self):
        self.expect_killed(self.CALLS)

    def test_killed_among_hops(self):
        # The other rank's GPU waits for something that never comes; its process must end all the
        # same.
        self.expect_killed(self.HOPS)

    def expect_stopped(self, words):
        for transport in self.transports():
            with self.subTest(transport):
                code, messages = self.interrupt(words, transport, signal.SIGSTOP)
                self.assertEqual(code, 3, messages)
                errors = [line for line in messages.splitlines() if "annulus: error: " in line]
                self.assertEqual(len(errors), 1, messages)
                self.assertRegex(errors[0], r"annulus: error: rank 0: .*(for|from) rank 1\b")

    def test_stopped(self):
        self.expect_stopped(self.CALLS)

    def test_stopped_among_hops(self):
        self.expect_stopped(self.HOPS)


if __name__ == "__main__":
    if gpu_count() == 0:
        print("skipped: annulus info lists no GPU:", info()["machine"]["GPUs"])
        sys.exit(SKIPPED)
    main()
