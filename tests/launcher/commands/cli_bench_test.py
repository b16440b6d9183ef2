"""annulus bench --hops and --calibrate, and what --cost-model does with the result."""

import json
import os

from cli_support import CliTest, main

PLAN = ["plan", "--mesh", "sp=4", "--shape", "1,8k,8k,8,2,64"]
CALIBRATE = ["bench", "--device", "cpu", "--calibrate", "model.json", "--shape", "1,0,0,4,2,32",
             "--causal", "--sweep", "32:128:2", "--iters", "2", "--warmup", "1"]


class Hops(CliTest):
    def hops(self, *words, ranks=2):
        return self.annulus("bench", "--device", "cpu", "--hops", "--sweep", "1k:64k:4", "--iters",
                            "3", *words, ranks=ranks)

    def test_every_size_once(self):
        for ranks in [2, 3]:
            result = self.hops("--json", "-", ranks=ranks)
            self.expect_success(result)
            report = json.loads(result.stdout)
            self.assertEqual(report["schema"], "annulus.bench.hops")
            self.assertEqual([row["size"] for row in report["rows"]], [1024, 4096, 16384, 65536])
            units = {column["name"]: column["unit"] for column in report["columns"]}
            self.assertEqual(units["time"], "µs, median")
            for row in report["rows"]:
                self.assertEqual(row["transport"], "mpi")
                self.assertLessEqual(row["least"], row["time"])
                self.assertLessEqual(row["time"], row["most"])
                # Both are rounded to two digits.
                self.assertAlmostEqual(row["rate"], row["size"] / row["time"] * 1e-3,
                                       delta=0.006 + row["rate"] * 0.006 / row["time"])

    def test_table(self):
        result = self.hops()
        self.expect_success(result)
        self.assertIn("# mesh: sp=2: 2 ranks on 1 node", result.stdout)
        self.assertEqual(sum(not line.startswith("#") for line in result.stdout.splitlines()), 4)

    def test_refusals(self):
        self.expect_error(self.hops(ranks=None), 2, "--hops: got 1 rank")
        self.expect_error(self.hops("--calibrate", "m.json"), 2, "--hops: --calibrate")
        self.expect_error(self.annulus("run", "--hops"), 2, "not of annulus run")


class Calibrate(CliTest):
    def test_writes_a_model_that_can_be_used(self):
        result = self.annulus(*CALIBRATE, ranks=2)
        self.expect_success(result)
        with open(self.path("model.json")) as file:
            model = json.load(file)
        self.assertEqual((model["schema"], model["version"]), ("annulus.cost_model", 2))
        self.assertEqual([point["rows"] for point in model["kernels"]["native"]], [32, 64, 128])
        self.assertEqual(model["transport"], "mpi")
        self.assertEqual(list(model["transports"]), ["mpi"])
        hops = model["transports"]["mpi"]
        self.assertGreater(hops[-1]["seconds"], hops[0]["seconds"])
        for text in ["measured: 2 ranks", "N=4 K=2 D=32", "causal", "native"]:
            self.assertIn(text, model["source"])
        self.expect_no_files()
        for words in [PLAN, ["bench", "--shape", "1,64,64,4,2,16", "--iters", "1"],
                      ["verify", "--shape", "1,64,64,4,2,16", "--explain"]]:
            result = self.annulus(*words, "--cost-model", "model.json",
                                  ranks=None if words is PLAN else 2)
            self.expect_success(result)
            if "bench" not in words:
                self.assertIn("measured: 2 ranks", result.stdout)

    def test_refusals(self):
        self.expect_error(self.annulus(*CALIBRATE), 2, "--calibrate: got 1 rank")
        self.expect_error(self.annulus("bench", "--calibrate", "model.json", ranks=2), 2,
                          "--shape: got nothing")
        words = [word.replace("model.json", "no/model.json") for word in CALIBRATE]
        self.expect_error(self.annulus(*words, ranks=2), 2, "--calibrate no/model.json: ")
        self.expect_error(self.annulus(*CALIBRATE, "--json", "model.json", ranks=2), 2,
                          "--json model.json: is the same file as --calibrate")
        self.expect_no_files("model.json")


class CostModel(CliTest):
    MODEL = {"schema": "annulus.cost_model", "version": 2, "source": "a test",
             "kernels": {"native": [{"rows": 1024, "flops_per_second": 1e12}]},
             "call_latency_seconds": 0,
             "merge_bytes_per_second": 1e15, "transport": "nccl",
             "transports": {"nccl": [{"bytes": 1, "seconds": 0.25}],
                            "peer": [{"bytes": 1, "seconds": 1e-9}]}}

    def plan(self, *words, **changes):
        with open(self.path("model.json"), "w") as file:
            json.dump({**self.MODEL, **changes}, file)
        return self.annulus(*PLAN, "--cost-model", "model.json", *words)

    def plan_ring(self, **changes):
        return self.plan("--schedule", "ring", **changes)

    def predicted_ms(self, result):
        """Wait and time of the layout that was chosen."""
        self.expect_success(result)
        (row,) = [line.split() for line in result.stdout.splitlines()
                  if line.split()[1:2] == ["yes"]]
        return float(row[-2]), float(row[-1])

    def test_unreadable_file(self):
        os.mkdir(self.path("folder"))
        self.expect_error(self.annulus(*PLAN, "--cost-model", "folder"), 2,
                          "--cost-model folder: cannot be read: Is a directory")
        with open(self.path("huge.json"), "w") as file:
            file.write('{"call_latency_seconds": 1e400}')
        self.expect_error(self.annulus(*PLAN, "--cost-model", "huge.json"), 2,
                          "--cost-model huge.json: has a number beyond")
        self.expect_error(self.plan(call_latency_seconds=1e308), 2,
                          "--cost-model model.json: call_latency_seconds is 1e+308")

    def test_plan_predicts_by_it(self):
        # Three hops of 250 ms, and 34.36 GFLOP at 1 TFLOP/s in four equal steps, three of them under
        # the hops.
        wait, time = self.predicted_ms(self.plan_ring())
        self.assertAlmostEqual(time, 3 * 250 + 34.36 / 4, delta=0.02)
        self.assertAlmostEqual(wait, 3 * (250 - 34.36 / 4), delta=0.02)

    def test_transport_in_use_decides(self):
        wait, time = self.predicted_ms(self.plan_ring(transport="peer"))
        self.assertEqual(wait, 0)
        self.assertAlmostEqual(time, 34.36, delta=0.02)

    def test_schedule_auto_rests_on_it(self):
        result = self.plan("--explain")
        self.expect_success(result)
        (reason,) = [line for line in result.stdout.splitlines()
                     if line.startswith("# schedule passed over") and "predicted" in line]
        self.assertIn("(a test)", reason)

    def test_defaults_follow_the_device(self):
        for device, text in [("cpu", "one CPU core per rank"), ("auto", "one CPU core per rank"),
                             ("cuda", "one Hopper GPU per rank, NVLink")]:
            result = self.annulus(*PLAN, "--device", device)
            self.expect_success(result)
            self.assertIn("assumed: " + text, result.stdout)

    def test_damaged_files(self):
        self.expect_error(self.plan(speed=3), 2, "--cost-model model.json: speed is no key")
        self.expect_error(self.plan(version=3), 2, "--cost-model model.json: ", "version 3")
        self.expect_error(self.plan(kernels={"native": [{"rows": 1}]}), 2,
                          "kernels.native[0].flops_per_second is missing")
        self.expect_error(self.annulus(*PLAN, "--cost-model", "none.json"), 2,
                          "--cost-model none.json: cannot be opened: No such file")
        with open(self.path("model.json"), "w") as file:
            file.write("{")
        result = self.annulus("verify", "--shape", "1,8,8,1,1,8", "--cost-model", "model.json",
                              ranks=2)
        self.expect_error(result, 2, "--cost-model model.json: is not JSON")


if __name__ == "__main__":
    main()
