"""annulus bench --hops and --calibrate, and what --cost-model does with the result."""

import json
import os

import numpy as np

from cli_support import CliTest, command_on_nodes, main

PLAN = ["plan", "--mesh", "sp=4", "--shape", "1,8k,8k,8,2,64"]
CALIBRATE = ["bench", "--device", "cpu", "--calibrate", "model.json", "--shape", "1,0,0,4,2,32",
             "--causal", "--sweep", "32:128:2", "--iters", "2", "--warmup", "1"]


class Hops(CliTest):
    HOPS = ["bench", "--device", "cpu", "--hops", "--sweep", "1k:64k:4", "--iters", "3"]

    def test_every_size_once(self):
        for ranks in [2, 3]:
            report = self.json(*self.HOPS, ranks=ranks)
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
        result = self.succeed(*self.HOPS, ranks=2)
        self.assertIn("# mesh: sp=2: 2 ranks on 1 node", result.stdout)
        self.assertEqual(sum(not line.startswith("#") for line in result.stdout.splitlines()), 4)

    def test_one_rank_has_no_ring(self):
        self.expect_error(self.annulus(*self.HOPS), 2, "--hops: got 1 rank")


class Calibrate(CliTest):
    @staticmethod
    def class_of(kernel):
        return tuple(kernel[key] for key in ["implementation", "dtype", "head_dim", "value_dim",
                                             "mask", "soft_cap"])

    def kernels(self):
        return {self.class_of(kernel): kernel for kernel in self.load_json("model.json")["kernels"]}

    def rate_in(self, *words):
        """The rate of native that plan --explain shows."""
        result = self.succeed("plan", "--mesh", "sp=4", "--cost-model", "model.json", "--explain", *words)
        (line,) = [line for line in result.stdout.splitlines() if "rate of native" in line]
        return line.removeprefix("# rate of native: ")

    def test_writes_a_model_that_can_be_used(self):
        result = self.succeed(*CALIBRATE, ranks=2)
        model = self.load_json("model.json")
        self.assertEqual((model["schema"], model["version"]), ("annulus.cost_model", 7))
        self.assertEqual(model["device"], "cpu")
        (kernel,) = model["kernels"]
        # Small blocks, which are mostly calls, may be left out.
        rows = [point["rows"] for point in kernel["rates"]]
        self.assertEqual(rows, [32, 64, 128][-len(rows):])
        self.assertEqual(self.class_of(kernel), ("native", "float32", 32, 32, "band", False))
        self.assertGreater(kernel["call_latency_seconds"], 0)
        self.assertGreater(model["read_bytes_per_second"], 1e7)
        self.assertIn("# reading: one row, by native\n", result.stdout)
        for text in ["native: B=1 N=4 K=2", "causal", "2 times after 1 to warm up", "commit "]:
            self.assertIn(text, kernel["source"])
        self.assertEqual(model["transport"], "mpi")
        self.assertEqual(list(model["transports"]), ["mpi"])
        # One node says nothing about networks.
        self.assertEqual(model["assumed"], ["launch_seconds", "network_hops",
                                            "node_bytes_per_second", "transfer_share"])
        self.assertIn("# assumed: launch_seconds, network_hops, ", result.stdout)
        hops = model["transports"]["mpi"]
        self.assertGreater(hops[-1]["seconds"], hops[0]["seconds"])
        self.assertRegex(model["source"], "^measured: 2 ranks on 1 node .*, . threads? per rank")
        self.expect_no_files()
        for words in [PLAN, ["bench", "--shape", "1,64,64,4,2,16", "--iters", "1"],
                      ["verify", "--shape", "1,64,64,4,2,16", "--explain"]]:
            result = self.succeed(*words, "--cost-model", "model.json", ranks=None if words is PLAN else 2)
            if "bench" not in words:
                self.assertIn("measured: 2 ranks", result.stdout)

    def test_refusals(self):
        self.expect_error(self.annulus(*CALIBRATE), 2, "--calibrate: got 1 rank")
        self.expect_error(self.annulus("bench", "--calibrate", "model.json", ranks=2), 2,
                          "--shape: got nothing")
        words = [word.replace("model.json", "no/model.json") for word in CALIBRATE]
        self.expect_error(self.annulus(*words, ranks=2), 2, "--calibrate no/model.json: ")
        self.expect_no_files("model.json")

    def test_classes_are_added_and_refreshed(self):
        wide = ("native", "float32", 32, 32, "band", False)
        half = ("native", "bfloat16", 32, 32, "band", False)
        self.succeed(*CALIBRATE, ranks=2)
        first = self.kernels()
        self.assertEqual(list(first), [wide])
        self.succeed(*CALIBRATE, "--dtype", "bfloat16", ranks=2)
        second = self.kernels()
        self.assertEqual(set(second), {wide, half})
        self.assertEqual(second[wide], first[wide])
        sweep = [word.replace("32:128:2", "16:32") for word in CALIBRATE]
        self.succeed(*sweep, ranks=2)
        third = self.kernels()
        self.assertEqual(set(third), {wide, half})
        self.assertEqual(third[half], second[half])
        self.assertEqual(third[wide]["rates"][-1]["rows"], 32)

        # A plan says which figures are its own.
        shape = ["--shape", "1,8k,8k,8,2,32"]
        for words, text in [([], "measured for float32 D=32 Dv=32, mask band (native: B=1 N=4 K=2"),
                            (["--dtype", "float16"],
                             "nearest measured class: bfloat16 D=32 Dv=32, mask band")]:
            said = self.rate_in(*shape, "--causal", *words)
            self.assertTrue(said.startswith(text), said)
        result = self.succeed("verify", "--shape", "1,64,64,4,2,32", "--causal", "--explain",
                              "--cost-model", "model.json", ranks=2)
        self.assertIn("# rate of native: measured for float32 D=32 Dv=32", result.stdout)
        report = self.json(*PLAN, "--cost-model", "model.json")
        self.assertIn("mask band", report["rates"]["native"])
        self.assertRegex(report["predicted_by"], "^measured: 2 ranks .*; rates: native nearest$")
        result = self.succeed(*PLAN, "--cost-model", "model.json", "--impl", "vanilla")
        self.assertRegex(result.stdout, "predicted by: measured: .*: vanilla \\(assumed\\) 1 GFLOP")

    def test_the_backward_pass(self):
        for words in [[], ["--backward"]]:
            self.succeed(*CALIBRATE, *words, ranks=2)
        kernels = [kernel for kernel in self.load_json("model.json")["kernels"]
                   if kernel["implementation"] == "native"]
        self.assertEqual([kernel["pass"] for kernel in kernels], ["forward", "backward"])
        self.assertGreater(kernels[1]["rates"][-1]["flops_per_second"], 1e6)
        shape = ["--shape", "1,8k,8k,8,2,32", "--causal"]
        self.assertIn("measured for float32 D=32 Dv=32, mask band, backward (native: B=1 N=4 K=2",
                      self.rate_in(*shape, "--backward"))
        self.assertIn("measured for float32 D=32 Dv=32, mask band (native: B=1 N=4 K=2",
                      self.rate_in(*shape))

    def test_every_kind_of_mask(self):
        np.save(self.path("bias.npy"), np.zeros([1, 128], np.float32))
        plain = [word for word in CALIBRATE if word != "--causal"]
        for words in [[], ["--block-mask", "random:0.5", "--block-size", "16,16"],
                      ["--bias", "bias.npy"], ["--dropout", "0.1", "--soft-cap", "5"]]:
            self.succeed(*plain, *words, ranks=2)
        found = [(shape[4], shape[5]) for shape in self.kernels()]
        self.assertEqual(sorted(found), [("blocks", False), ("general", False), ("general", True),
                                         ("none", False)])

    def test_named_implementation(self):
        self.succeed(*CALIBRATE, "--impl", "vanilla", ranks=2)
        self.assertEqual([shape[0] for shape in self.kernels()], ["vanilla"])

    def test_several_nodes(self):
        def calibrate(path, *nodes):
            words = [word.replace("model.json", path) for word in CALIBRATE]
            result = self.expect_success(self.execute(command_on_nodes(*words, nodes=nodes)))
            return self.load_json(path), result.stdout

        # Hops between the nodes say nothing of those inside.
        model, _ = calibrate("two.json", "a", "a", "b", "b")
        self.assertEqual(model["assumed"],
                         ["launch_seconds", "node_bytes_per_second", "transfer_share"])
        self.assertEqual(model["transport"], "mpi")
        inside = model["transports"]["mpi"]
        self.assertEqual([hop["bytes"] for hop in inside],
                         [hop["bytes"] for hop in model["network_hops"]])
        self.assertNotEqual(inside, model["network_hops"])
        for path, nodes in [("one.json", ["a", "b"]), ("uneven.json", ["a", "a", "b"])]:
            model, shown = calibrate(path, *nodes)
            self.assertEqual(model["assumed"], ["launch_seconds", "node_bytes_per_second",
                                                "transfer_share", "transports"])
            self.assertIn("# transports inside nodes: not measured: ", shown)

    def test_other_files_are_left_alone(self):
        self.succeed(*CALIBRATE, ranks=2)
        text = self.read("model.json")

        def refused(content, *expected, ranks=2):
            self.write("model.json", content)
            self.expect_error(self.annulus(*CALIBRATE, ranks=ranks), 2,
                              "--calibrate model.json: ", *expected)
            self.assertEqual(self.read("model.json"), content)
        refused(text, "got 'measured: 2 ranks", "expected 'measured: 3 ranks", "another file",
                ranks=3)
        refused(text.replace(b"measured: 2 ranks on 1 node", b"measured: 2 ranks on 7 nodes"),
                "7 nodes")
        refused(b"", "is not JSON")
        self.expect_no_files()


class CostModel(CliTest):
    MODEL = {"schema": "annulus.cost_model", "version": 6, "source": "a test", "device": "cuda",
             "kernels": [{"implementation": "native", "dtype": "float32", "head_dim": 64,
                          "value_dim": 64, "mask": "none", "soft_cap": False, "source": "a test",
                          "call_latency_seconds": 0,
                          "rates": [{"rows": 1024, "flops_per_second": 1e12}]}],
             "merge_bytes_per_second": 1e15, "transfer_share": 0, "launch_seconds": 0,
             "network_hops": [{"bytes": 1, "seconds": 0.5}], "node_bytes_per_second": 1e15,
             "assumed": [], "transport": "nccl",
             "transports": {"nccl": [{"bytes": 1, "seconds": 0.25}],
                            "peer": [{"bytes": 1, "seconds": 1e-9}]}}

    def plan(self, *words):
        self.write("model.json", json.dumps(self.MODEL).encode())
        # Enough tiles for every GPU.
        return self.annulus("plan", "--mesh", "sp=4", "--shape", "1,8k,8k,16,2,64", "--device", "cuda",
                            "--impl", "native", "--cost-model", "model.json", *words)

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

    def test_plan_predicts_by_it(self):
        # Three hops of 250 ms, or 500 ms between nodes, and 68.72 GFLOP at 1 TFLOP/s in four equal steps,
        # three of them under the hops.
        for words, hop in [([], 250), (["--ranks-per-node", "2"], 500)]:
            wait, time = self.predicted_ms(self.plan("--schedule", "ring", *words))
            self.assertAlmostEqual(time, 3 * hop + 68.72 / 4, delta=0.51)
            self.assertAlmostEqual(wait, 3 * (hop - 68.72 / 4), delta=0.51)

    def test_schedule_auto_rests_on_it(self):
        result = self.expect_success(self.plan("--explain"))
        reasons = [line for line in result.stdout.splitlines()
                   if line.startswith("# schedule passed over") and "predicted" in line]
        self.assertGreater(len(reasons), 1)
        for reason in reasons:
            self.assertIn("(a test)", reason)

    def test_defaults_follow_the_device(self):
        for device, text in [("cpu", "one CPU core per rank"), ("auto", "one CPU core per rank"),
                             ("cuda", "one H200 per rank, NVLink")]:
            result = self.succeed(*PLAN, "--device", device)
            self.assertIn("assumed: " + text, result.stdout)

    def test_threads_of_a_rank_count(self):
        words = ["plan", "--mesh", "tp=4", "--shape", "1,4k,4k,8,8,64"]
        one, four = (self.json(*words, *more)["predicted_ms"]["finish"]
                     for more in ([], ["--threads", "4"]))
        self.assertAlmostEqual(one, 4 * four, delta=0.02 * one)
        result = self.annulus(*words, "--threads", "4", environment={"ANNULUS_DEVICE": "auto"})
        self.assertTrue(result.stdout.startswith("# device: cpu, 4 threads per rank, assumed"), result.stdout)


if __name__ == "__main__":
    main()
