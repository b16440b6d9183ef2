"""annulus plan --simulate, --recommend and --scaling, and bench --scaling."""

import csv
import io
import json
import os
import re
import subprocess
import sys

import numpy as np

from cli_support import PROGRAM, CliTest, main

PLAN = ["plan", "--mesh", "sp=4", "--shape", "1,1k,1k,8,2,64"]


def without_options(report):
    return [{**row, "options": None} for row in report["rows"]]


class Backward(CliTest):
    def planned(self, *words):
        return self.json("plan", "--shape", "1,1k,1k,8,2,64", *words)

    def test_plans_the_backward_pass(self):
        for words in [["--mesh", "sp=4"], ["--mesh", "sp=256"]]:  # with tasks and without
            with self.subTest(words):
                forward = self.planned(*words)
                backward = self.planned(*words, "--backward")
                self.assertNotEqual(forward.get("pass"), "backward")
                self.assertEqual(backward["pass"], "backward")
                # 5 products in place of 2, of each pair.
                self.assertAlmostEqual(backward["layouts"][0]["work"],
                                       2.5 * forward["layouts"][0]["work"], delta=0.002)
                self.assertGreater(backward["predicted_ms"]["compute"],
                                   2 * forward["predicted_ms"]["compute"])
        self.assertEqual(backward["tasks_left_out"], True)

    def test_plans_the_gradients_of_sinks_and_bias(self):
        words = ["--mesh", "sp=4", "--backward"]
        for more, names in [(["--sinks", "random:2"], ["grad_sinks"]),
                            (["--bias", "random:1"], ['"grad bias"', '"grad_bias"'])]:
            plain, plan = (json.dumps(self.planned(*words, *some)) for some in [[], more])
            self.assertNotIn(names[0], plain)
            for name in names:
                self.assertIn(name, plan)

    def test_table(self):
        words = [*PLAN, "--backward"]
        for form in [[], ["--simulate"]]:
            result = self.succeed(*words, *form)
            self.assertIn("# pass: backward", result.stdout)
        self.assertIn("native (assumed)", self.annulus(*words).stdout)
        self.assertIn("# implementation passed over, sdpa: ", self.succeed(*words, "--explain").stdout)

    def test_gradients_in_half_the_bytes(self):
        words = [*PLAN, "--backward", "--dtype", "bfloat16", "--schedule", "ring"]
        rounded = self.succeed(*words, "--grad-wire", "bfloat16")
        self.assertIn("# pass: backward, parts of gradients sent in bfloat16", rounded.stdout)
        self.assertNotIn("sent in bfloat16", self.annulus(*words).stdout)
        for wire in ["bfloat16", "float32"]:
            buffers = self.json(*words, "--grad-wire", wire)["ranks"][0]["buffers"]
            self.assertEqual({buffer["dtype"] for buffer in buffers if buffer["kind"] == "exchange"
                              and "grad key" in buffer["contents"]},
                             {"float32", "bfloat16"} if wire == "bfloat16" else {"float32"})

    def test_says_which_options_have_no_effect(self):
        words = [*PLAN, "--backward", "--dtype", "bfloat16", "--grad-wire", "bfloat16", "--schedule"]
        for schedule, warned in [("pass_q", True), ("ring", False)]:
            result = self.annulus(*words, schedule)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual("--grad-wire bfloat16: has no effect" in result.stderr, warned, result.stderr)

    def test_says_why_not(self):
        words = [*PLAN, "--backward", "--grad-wire", "bfloat16", "--dtype", "bfloat16", "--schedule",
                 "hybrid", "--ulysses-degree", "2"]
        self.expect_error(self.annulus(*words), 2, "it sums gradients along their way")
        world = ["plan", "--mesh", "sp=2", "--shape", "1,3k,3k,8,2,64", "--device", "cuda", "--granule", "384",
                 "--sequence-layout", "zigzag", "--backward", "--reproducible", "world", "--dtype"]
        self.succeed(*world, "bfloat16")
        self.expect_error(self.annulus(*world, "float16"), 2, "scales float16 gradients")

    def test_kernels_that_cannot_sum_the_gradient_of_a_bias_are_not_planned(self):
        np.save(self.path("bias.npy"), np.zeros((1, 8, 1024, 1024), np.float32))
        words = ["plan", "--shape", "4,1k,1k,8,2,64", "--mesh", "sp=1", "--device", "cuda", "--dtype",
                 "bfloat16", "--backward", "--bias", "bias.npy"]
        times = [self.json(*words, *more)["predicted_ms"]["finish"] for more in ([], ["--deterministic"])]
        self.assertGreater(times[1], 20 * times[0])
        warning = "only the plain kernel (native) takes this problem"
        result = self.annulus(*words)
        self.assertIn("# pass: backward, with the bias's gradient\n", result.stdout)
        self.assertNotIn(warning, result.stderr)
        self.assertIn(warning, self.annulus(*words, "--deterministic").stderr)
        self.expect_error(self.annulus(*words, "--deterministic", "--impl", "flash_attn2"), 2,
                          "the bias's gradient is a sum over batches, heads or rows")


class Simulate(CliTest):
    def simulated(self, *words):
        report = self.json(*PLAN, "--simulate", *words)
        self.assertEqual(report["schema"], "annulus.plan.simulate")
        return report

    def test_agrees_with_the_prediction(self):
        for words in [[], ["--causal"], ["--causal", "--sequence-layout", "contiguous"],
                      ["--ranks-per-node", "2"], ["--device", "cuda", "--dtype", "bfloat16"],
                      ["--schedule", "ulysses"], ["--schedule", "hybrid", "--ulysses-degree", "2"],
                      ["--schedule", "double_ring", "--ranks-per-node", "2"],
                      ["--schedule", "pass_q"], ["--backward", "--causal"],
                      ["--backward", "--schedule", "allgather"],
                      ["--backward", "--schedule", "ulysses"],
                      ["--backward", "--schedule", "pass_q"]]:
            with self.subTest(words):
                plan = self.json(*PLAN, *words)
                rows = self.simulated(*words)["rows"]
                self.assertEqual([row["rank"] for row in rows], [0, 1, 2, 3])
                for row, rank in zip(rows, plan["ranks"]):
                    for name in ["compute", "transfer", "wait", "finish"]:
                        known = rank["predicted_ms"][name]
                        self.assertAlmostEqual(row[name], known, delta=0.0006 + 0.006 * known)

    def test_table(self):
        result = self.succeed(*PLAN, "--simulate", "--ranks-per-node", "2")
        self.assertIn("# simulated: 4 ranks on 2 nodes", result.stdout)
        self.assertIn("ms, of the slowest rank", result.stdout)
        rows = [line.split() for line in result.stdout.splitlines() if not line.startswith("#") and line]
        self.assertEqual([row[:2] for row in rows], [["0", "0"], ["1", "0"], ["2", "1"], ["3", "1"]])

    def test_an_axis_called_node_says_who_shares_one(self):
        words = ["plan", "--simulate", "--mesh", "node=2,gpu=2", "--shape", "1,1k,1k,8,2,64",
                 "--query-spec", "-,node+gpu", "--kv-spec", "-,node+gpu"]
        self.assertIn("4 ranks on 2 nodes", self.annulus(*words).stdout)
        self.assertIn("4 ranks on 1 node\n", self.annulus(*words, "--ranks-per-node", "4").stdout)

    def test_rows_of_a_double_ring_are_nodes(self):
        words = ["--schedule", "double_ring", "--device", "cuda", "--dtype", "bfloat16"]
        rows = {inner: without_options(self.simulated(*words, "--ranks-per-node", "2", *inner))
                for inner in [(), ("--inner-size", "2"), ("--inner-size", "4")]}
        self.assertEqual(rows[()], rows[("--inner-size", "2")])
        self.assertNotEqual(rows[()], rows[("--inner-size", "4")])

    def test_stragglers(self):
        even = self.simulated("--schedule", "ring")["rows"]
        slow, again, other = (
            self.simulated("--schedule", "ring", "--straggler-percent", "50", "--straggler-seed", seed)
            for seed in (0, 0, 1))
        self.assertIn("up to 50 % longer, seed 0", slow["meta"]["stragglers"])
        longer = [b["compute"] / a["compute"] for a, b in zip(even, slow["rows"])]
        self.assertEqual(len(set(longer)), 4)
        self.assertTrue(all(1 <= factor <= 1.5 for factor in longer), longer)
        self.assertEqual(again["rows"], slow["rows"])
        self.assertNotEqual(other["rows"], slow["rows"])

    def test_trace(self):
        result = self.succeed(*PLAN, "--schedule", "ring", "--simulate", "--trace", "trace.json")
        trace = self.load_json("trace.json")
        self.assertIn("--simulate=true", trace["otherData"]["options"])
        events = trace["traceEvents"]
        self.assertEqual({event["pid"] for event in events}, {0, 1, 2, 3})
        kernels = [event for event in events if event.get("cat") == "kernel"]
        self.assertEqual(len(kernels), 16)
        # Each of four ranks sends three messages, and an arrow shows each.
        self.assertEqual(sum(event["ph"] == "s" for event in events), 12)
        self.expect_no_files()

    @staticmethod
    def many(nodes):
        return ["plan", "--simulate", "--mesh", f"node={nodes},gpu=8", "--query-spec", "-,node+gpu",
                "--kv-spec", "-,node+gpu", "--dtype", "bfloat16", "--device", "cuda"]

    def test_thousand_ranks_take_seconds(self):
        with self.within(4):  # about 1 s, and up to three times as long on a core that others share
            result = self.succeed(*self.many(128), "--shape", "1,1M,1M,64,8,128", "--causal", "--schedule",
                                  "ring")
        self.assertIn("# simulated: 1024 ranks on 128 nodes, by 24 of them on 3 nodes (--show-ranks 1024: by all)",
                      result.stdout)

    # A window, so that each rank exchanges with few.
    WINDOW = ["--shape", "1,256k,256k,8,8,64", "--causal", "--window", "4k,0", "--sequence-layout",
              "contiguous"]
    FILES = ["--trace", "trace.json"]

    def traced_ranks(self):
        return sorted({event["pid"] for event in self.load_json("trace.json")["traceEvents"]})

    def test_files_of_many_ranks_hold_some(self):
        result = self.succeed(*self.many(32), *self.WINDOW, *self.FILES)
        self.assertIn("… 224 more ranks (--show-ranks 256)", result.stdout)
        self.assertIn("# traced: 64 of 256 ranks", result.stdout)
        ranks = self.traced_ranks()
        self.assertEqual((len(ranks), ranks[0], ranks[-1]), (64, 0, 255))

    def test_files_hold_the_ranks_that_stand_for_all(self):
        result = self.succeed(*self.many(128), *self.WINDOW, *self.FILES)
        ranks = self.traced_ranks()
        self.assertEqual((len(ranks), ranks[0], ranks[-1]), (24, 0, 511))
        result = self.succeed(*self.many(128), *self.WINDOW, *self.FILES, "--show-ranks", "1024")
        self.assertIn("# simulated: 1024 ranks on 128 nodes\n", result.stdout)

    def test_the_same_plan_has_the_same_time(self):
        for ranks, words in [(16, ["--shape", "1,256k,256k,64,8,128", "--causal"]),
                             (128, ["--shape", "1,256k,256k,64,8,128", "--causal"]),
                             (256, ["--shape", "1,128,1M,64,8,128", "--causal"]),
                             (512, ["--shape", "1,512k,512k,32,32,128"])]:
            given = ["plan", "--mesh", f"sp={ranks}", "--ranks-per-node", "8", "--dtype", "bfloat16", "--device",
                     "cuda", "--sequence-layout", "zigzag", *words]
            plan = self.json(*given)
            chosen = next(one for one in plan["schedules"] if one["chosen"])
            simulated = self.json(*given, "--simulate")
            finish = max(row["finish"] for row in simulated["rows"])
            self.assertAlmostEqual(chosen["predicted_ms"], finish, delta=0.006 * finish)
            self.assertAlmostEqual(plan["predicted_ms"]["finish"], chosen["predicted_ms"], delta=1e-9)
            if ranks > 16:
                continue
            scaling = self.json("plan", "--scaling", "--ranks", f"{ranks}", *given[3:])
            (row,) = [row for row in scaling["rows"] if (row["scaling"], row["ranks"]) == ("strong", ranks)]
            self.assertEqual(row["schedule"], chosen["name"])
            self.assertAlmostEqual(row["time"], finish, delta=0.006 * finish)

    def test_errors(self):
        words = ["plan", "--simulate", "--shape", "1,64k,64k,8,2,64"]
        with self.within(2):  # not planned before it is refused
            self.expect_error(self.annulus(*words, "--mesh", "sp=8192"), 2,
                              "--simulate: got 8192 ranks, expected at most 4096")
        self.expect_no_files()


class Transport(CliTest):
    """Plans of several nodes take the transport that real ranks there would take."""

    ACROSS = ["--mesh", "node=2,gpu=8", "--query-spec", "-,node+gpu", "--kv-spec", "-,node+gpu"]
    INSIDE = ["--mesh", "node=2,gpu=8", "--query-spec", "node,gpu", "--kv-spec", "node,gpu"]
    LONE = ["--mesh", "node=8", "--query-spec", "-,node", "--kv-spec", "-,node"]
    CASE = ["--shape", "2,64k,64k,64,8,128", "--dtype", "bfloat16", "--causal"]
    GPUS = [*CASE, "--device", "cuda"]

    def plan(self, *words):
        result = self.succeed("plan", *words, "--schedule", "allgather", "--show-ranks", "1")
        line = [line for line in result.stdout.splitlines() if line.startswith("# predicted by")][0]
        return line.split("64 MiB by ")[1].split()[0], result.stdout.count("awaits tokens")

    def test_fits_the_nodes_of_a_group(self):
        self.assertEqual(self.plan(*self.ACROSS, *self.GPUS), ("composite", 0))
        transport, awaited = self.plan(*self.INSIDE, *self.GPUS)
        self.assertEqual(transport, "peer")
        self.assertGreater(awaited, 0)
        self.assertEqual(self.plan(*self.LONE, *self.GPUS), ("nccl", 0))
        self.assertEqual(self.plan("--mesh", "sp=16", "--ranks-per-node", "8", *self.GPUS), ("composite", 0))
        self.assertEqual(self.plan("--mesh", "sp=16", "--ranks-per-node", "16", *self.GPUS)[0], "peer")
        self.assertEqual(self.plan(*self.ACROSS, *self.CASE)[0], "mpi")

    def test_a_named_one_stays(self):
        self.assertEqual(self.plan(*self.ACROSS, *self.GPUS, "--transport", "nccl"), ("nccl", 0))
        self.assertEqual(self.plan(*self.INSIDE, *self.GPUS, "--transport", "composite"), ("composite", 0))

    def test_copies_do_not_leave_a_node(self):
        for words in [[], ["--simulate"]]:
            self.expect_error(self.annulus("plan", *words, *self.ACROSS, *self.GPUS, "--transport", "peer"), 2,
                              "--transport: got peer, expected auto, composite or nccl: ranks along node+gpu "
                              "are on different nodes")
        self.assertEqual(self.plan(*self.INSIDE, *self.GPUS, "--transport", "peer")[0], "peer")

    def test_a_simulation_pays_for_the_network(self):
        def report(*words):
            return self.json("plan", "--simulate", "--schedule", "ring", *words)
        across = report(*self.ACROSS, *self.GPUS)
        self.assertIn(", composite, between nodes 44 GB/s per rank and 360 GB/s per node (assumed)",
                      across["meta"]["predicted by"])
        def times(one):
            return [[row[key] for key in ["compute", "transfer", "wait", "finish"]] for row in one["rows"]]
        self.assertEqual(times(across), times(report(*self.ACROSS, *self.GPUS, "--transport", "composite")))

    def test_every_number_of_ranks_and_every_mesh_has_its_own(self):
        case = ["--ranks", "8", "--device", "cuda", "--shape", "1,64k,64k,8,8,128", "--dtype", "bfloat16"]
        for words, transports in [(["--scaling", "--ranks-per-node", "4"], "composite and peer"),
                                  (["--scaling", "--ranks-per-node", "8"], "peer"),
                                  (["--recommend", "--nodes", "2"], "composite and nccl and peer"),
                                  (["--recommend", "--nodes", "1"], "peer")]:
            with self.subTest(words):
                result = self.succeed("plan", *words, *case)
                self.assertIn(f"# predicted by: assumed: one H200 per rank, NVLink, {transports}",
                              result.stdout)


class Layouts(CliTest):
    def test_plan_run_and_bench_choose_alike(self):
        self.save("cu.npy", np.array([0, 100, 5000, 5100, 8192], np.int32))
        words = ["--mesh", "sp=2", "--causal", "--cu-seqlens", "cu.npy", "--threads", "3"]
        shape = ["--shape", "1,8k,8k,2,1,16"]
        result = self.succeed("plan", *words, *shape, "--device", "cpu")
        chosen = re.search(r"^# layout: (\w+: predicted .*)$", result.stdout, re.MULTILINE).group(1)
        tensors = {name: np.zeros((1, 8192, heads, 16), np.float32)
                   for name, heads in [("q", 2), ("k", 1), ("v", 1)]}
        for name, tensor in tensors.items():
            self.save(name + ".npy", tensor)
        files = ["--query", "q.npy", "--key", "k.npy", "--value", "v.npy", "--output", "o.npy"]
        for command in [["bench", *shape, "--iters", "1", "--warmup", "0"], ["run", *files]]:
            result = self.succeed(*command, *words, "--explain", ranks=2)
            self.assertIn(f"# layout chosen: {chosen}\n", result.stdout)
        named = self.annulus("plan", *words, *shape, "--sequence-layout", "zigzag")
        self.assertIn("# layout: zigzag: as asked\n", named.stdout)

    def test_a_granule_is_for_layouts_that_take_one(self):
        layouts = self.json(*PLAN, "--granule", "64")["layouts"]
        self.assertNotIn("striped", [row["layout"] for row in layouts])
        self.assertIn("zigzag", [row["layout"] for row in layouts])


class Recommend(CliTest):
    WORDS = ["plan", "--recommend", "--ranks", "8", "--nodes", "2", "--shape", "2,32k,32k,8,2,128",
             "--dtype", "bfloat16", "--causal", "--device", "cuda"]

    def report(self, *words):
        report = self.json(*self.WORDS, *words)
        self.assertEqual(report["schema"], "annulus.plan.recommend")
        return report

    @staticmethod
    def sizes(row):
        axes = dict(axis.split("=") for axis in row["mesh"].split(","))
        return tuple(int(axes[name]) for name in ["dp", "tp", "sp"])

    @staticmethod
    def total(row):
        return row["time"] + (row["projection"] or 0)

    def test_best_of_each_tensor_parallel_size_first(self):
        rows = self.report()["rows"]
        best = [row for row in rows if row["why not"] is None]
        self.assertEqual(rows[:len(best)], best)
        self.assertEqual(sorted(self.sizes(row)[1] for row in best), [1, 2, 4, 8])
        totals = [self.total(row) for row in best]
        self.assertLess(totals[0], min(totals) * 1.03)  # of equals, the one with the smallest tp
        self.assertEqual(totals[1:], sorted(totals[1:]))
        meshes = {self.sizes(row) for row in rows}
        # Batches and heads are divided where they divide.
        self.assertLessEqual({(1, 1, 8), (2, 1, 4), (1, 2, 4), (1, 8, 1), (2, 4, 1)}, meshes)
        self.assertTrue(all(dp * tp * sp == 8 and dp <= 2 for dp, tp, sp in meshes))
        for row in rows:
            (chosen,) = [one for one in best if self.sizes(one)[1] == self.sizes(row)[1]]
            reason = row["why not"] or ""
            if reason.startswith("ties with "):
                self.assertLess(self.total(row), self.total(chosen) * 1.03)
                self.assertGreaterEqual(row["memory"], chosen["memory"])
                self.assertIn(chosen["mesh"], reason)
            elif reason.startswith("slower: takes "):
                self.assertGreater(float(reason.split()[2]), self.total(chosen) * 0.99)
        (reason,) = {row["why not"] for row in rows
                     if row["mesh"] == "dp=1,tp=1,sp=8" and row["schedule"] == "pass_q"}
        self.assertTrue(reason.startswith("not worthwhile: queries and their results would be more"), reason)
        (reason,) = {row["why not"] for row in rows
                     if row["mesh"] == "dp=1,tp=1,sp=8" and row["schedule"] == "local"}
        self.assertTrue(reason.startswith("cannot run: the key/value sequence is sharded"), reason)
        self.assertLessEqual({(2, "hybrid"), (4, "hybrid"), (4, "double_ring"), (None, "ring")},
                             {(row["split"], row["schedule"]) for row in rows})
        # A causal mask needs no other layouts, and no row comes twice.
        self.assertEqual({row["layout"] for row in rows}, {"zigzag", None})
        names = [tuple(row[key] for key in ["mesh", "layout", "schedule", "split"]) for row in rows]
        self.assertEqual(len(names), len(set(names)))
        for row in best:
            self.assertLessEqual(row["across"], row["moved"])
            self.assertAlmostEqual(row["memory"], row["shards"] + row["buffers"], delta=0.2)
            # Only divided heads need sums. Whole sequences need no messages.
            self.assertEqual(row["projection"] is None, self.sizes(row)[1] == 1)
            if self.sizes(row)[2] == 1:
                self.assertEqual(row["moved"], 0)
        # tp inside nodes is compared too.
        self.assertIn("dp=1,sp=2,tp=4", {row["mesh"] for row in rows})

    def test_the_answer_comes_first_and_runs(self):
        result = self.succeed(*self.WORDS)
        lines = result.stdout.splitlines()
        self.assertRegex(lines[0], r"^# run: mpirun -np 8 --map-by ppr:4:node annulus bench --mesh \S+ ")
        self.assertRegex(lines[1], r"^# why: predicted [\d.]+ ms.* GiB per rank")
        self.assertIn("--shape 2,32k,32k,8,2,128 ", lines[0])
        words = ["plan", "--recommend", "--ranks", "2", "--shape", "1,1k,1k,4,2,16", "--causal"]
        answer = self.succeed(*words, environment={"ANNULUS_DEVICE": "auto"})
        lines = answer.stdout.splitlines()
        self.assertTrue(lines[0].startswith("# device: cpu"), lines[0])
        command = lines[1].removeprefix("# run: mpirun -np 2 annulus ").split()
        self.succeed(*command, "--iters", "1", "--warmup", "0", ranks=2)

    def test_answers_for_a_training_step(self):
        both = self.report("--backward")
        rows = [row for row in both["rows"] if row["why not"] is None]
        self.assertEqual(both["meta"]["why"].count(" backward by "), 1)
        times = [self.total(row) + row["backward time"] for row in rows[1:]]
        self.assertEqual(times, sorted(times))
        for row in rows:
            self.assertGreater(row["backward time"], row["time"])
        best = rows[0]
        words = ["--mesh", best["mesh"], "--sequence-layout", best["layout"] or "auto"]
        options = [word for word in self.WORDS if word != "--recommend"]
        options = options[:options.index("--ranks")] + options[options.index("--ranks") + 2:]
        plan = self.json(*options, *words, "--backward")
        self.assertAlmostEqual(best["backward time"], plan["predicted_ms"]["finish"],
                               delta=0.02 * best["backward time"])
        command = both["meta"]["run"]
        self.assertIn(" --backward", command)
        self.assertEqual(" --schedule " in command, best["backward"] == best["schedule"])
        words = ["plan", "--recommend", "--backward", "--ranks", "2", "--shape", "1,1k,1k,4,2,16", "--causal"]
        answer = self.succeed(*words)
        command = re.search(r"# run: mpirun -np 2 annulus (.*)", answer.stdout).group(1).split()
        self.succeed(*command, "--iters", "1", "--warmup", "0", ranks=2)

    def test_both_spellings_of_nodes(self):
        shape = ["--shape", "2,32k,32k,8,2,128", "--dtype", "bfloat16", "--causal", "--device", "cuda"]
        def rows(*words):
            return without_options(self.json("plan", "--recommend", *words, *shape))
        first = rows("--ranks", "8", "--nodes", "2")
        self.assertEqual(first, rows("--ranks", "8", "--ranks-per-node", "4"))
        self.assertEqual(first, rows("--nodes", "2", "--ranks-per-node", "4"))
        def plan(*words):
            return self.json("plan", *words, *shape)["predicted_ms"]
        self.assertEqual(plan("--mesh", "sp=8", "--nodes", "2"), plan("--mesh", "sp=8", "--ranks-per-node", "4"))
        self.assertEqual(plan("--mesh", "sp=8", "--nodes", "2"), plan("--mesh", "sp=-1", "--ranks", "8", "--nodes", "2"))
        self.assertEqual(plan("--mesh", "sp=8", "--nodes", "2"), plan("--nodes", "2", "--ranks-per-node", "4"))

    def test_the_model_fixes_its_mesh(self):
        rows = self.report("--mesh", "tp=4,sp=-1")["rows"]
        self.assertEqual({row["mesh"] for row in rows}, {"tp=4,sp=2"})
        rows = self.report("--max-tp", "2")["rows"]
        self.assertEqual({self.sizes(row)[1] for row in rows}, {1, 2})

    def test_a_step_of_decoding_is_one_row(self):
        result = self.succeed("plan", "--recommend", "--ranks", "8", "--shape", "32,1,128k,64,8,128",
                              "--dtype", "bfloat16", "--device", "cuda", "--causal")
        table = [line for line in result.stdout.splitlines() if not line.startswith("#")]
        self.assertEqual(len(table), 1)
        self.assertIn("ranks send nothing to each other", result.stdout)
        self.assertIn("--causal-offset bottom-right", result.stderr)

    def test_a_gpu_without_a_dtype_is_a_warning(self):
        words = ["plan", "--ranks", "2", "--shape", "1,1k,1k,8,2,64"]
        for more, warned in [(["--recommend", "--device", "cuda"], True), (["--device", "cuda"], True),
                             (["--device", "cuda", "--dtype", "bf16"], False), (["--device", "cpu"], False)]:
            with self.subTest(more):
                result = self.succeed(*words, *more)
                self.assertEqual("--dtype bfloat16" in result.stderr, warned, result.stderr)

    def test_the_plain_kernel_on_gpus_is_a_warning(self):
        for dim, more, warned in [(128, [], False), (512, [], True), (512, ["--backward"], True),
                                  (512, ["--impl", "native"], False)]:
            with self.subTest(dim=dim, more=more):
                result = self.succeed("plan", "--shape", f"1,4k,4k,8,8,{dim}", "--mesh", "sp=2",
                                      "--device", "cuda", "--dtype", "bfloat16", *more)
                self.assertEqual("only the plain kernel" in result.stderr, warned, result.stderr)

    def test_a_number_without_unit_is_in_bytes(self):
        result = self.annulus("plan", "--recommend", "--ranks", "2", "--shape", "1,1k,1k,8,2,64", "--memory", "80")
        self.expect_error(result, 2, "--memory: got 80 bytes")

    def test_names_all_that_decides(self):
        words = ["plan", "--recommend", "--ranks", "2", "--shape", "1,512,512,8,2,64", "--dtype", "float16",
                 "--causal", "--window", "64", "--soft-cap", "20", "--reproducible", "world"]
        result = self.succeed(*words)
        self.assertIn("# problem: B=1 T=512 S=512 N=8 K=2 D=64 Dv=64 float16, causal, window 64,64, "
                      "soft cap 20, reproducible world\n", result.stdout)
        self.assertRegex(result.stdout, "# options: .*--window=64.*--reproducible=world")

    def test_a_query_goes_to_the_keys(self):
        report = self.json("plan", "--recommend", "--ranks", "8", "--shape", "1,1,1M,8,1,128", "--dtype",
                           "bfloat16", "--device", "cuda")
        (best,) = [row for row in report["rows"]
                   if row["why not"] is None and self.sizes(row)[1] == 1]
        self.assertEqual((best["mesh"], best["schedule"]), ("dp=1,tp=1,sp=8", "pass_q"))

    def test_says_what_plan_says(self):
        (row,) = self.report("--schedule", "ring", "--mesh", "sp=8")["rows"]
        plan = self.json("plan", "--mesh", "sp=8", "--ranks-per-node", "4", "--schedule", "ring",
                         *self.WORDS[6:])
        self.assertAlmostEqual(row["time"], plan["predicted_ms"]["finish"], delta=0.006 * row["time"])
        self.assertAlmostEqual(row["moved"], sum(rank["bytes_received"] for rank in plan["ranks"]) / 2**20,
                               delta=0.1)

    def test_too_little_memory_is_a_reason(self):
        free = self.report()["rows"]
        limit = sorted(row["memory"] for row in free if row["memory"])[len(free) // 3]
        rows = self.report("--memory", f"{int(limit)}M")["rows"]
        refused = [row for row in rows if row["why not"] and "MiB per rank, of" in row["why not"]]
        self.assertTrue(refused)
        for row in rows:
            if row["why not"] is None:
                self.assertLessEqual(row["memory"], int(limit))
        for row in refused:
            self.assertGreater(row["memory"], int(limit))

    def test_nothing_to_recommend_is_an_error(self):
        self.expect_error(self.annulus(*self.WORDS, "--memory", "1MB"), 2, "--memory: got 1MB, expected at "
                          "least ", " MiB per rank, which ", "dp=")
        self.expect_error(self.annulus(*self.WORDS, "--impl", "vanilla"), 2,
                          "implementation vanilla: computes on CPUs only")
        self.expect_error(self.annulus(*self.WORDS, "--mesh", "sp=8", "--schedule", "local"), 2,
                          "--recommend: none of ", " can run on 8 ranks: ", "local")

    def test_says_that_it_looks_at_some_ranks(self):
        words = [*self.WORDS, "--schedule", "double_ring", "--sequence-layout", "zigzag"]
        words[3:6] = ["1024", "--nodes", "128"]
        result = self.succeed(*words)
        self.assertIn("# simulated: at most 24 of 1024 ranks of each candidate, which stand for the others",
                      result.stdout)
        self.assertNotIn("# simulated", self.annulus(*self.WORDS).stdout)

    def test_a_mesh_of_the_environment_is_for_other_commands(self):
        words = ["plan", "--recommend", "--ranks", "2", "--shape", "1,64,64,8,2,64"]
        other = {"ANNULUS_MESH": "x=16", "ANNULUS_QUERY_SPEC": "-,x", "ANNULUS_KV_SPEC": "-,x"}
        for more in [[], ["--mode", "prefill", "--sequence-axis", "ctx"]]:
            self.assertEqual(without_options(self.json(*words, *more, environment=other)),
                             without_options(self.json(*words, *more)))

    def test_choices_of_the_user_stand(self):
        rows = self.report("--schedule", "ring", "--sequence-layout", "zigzag")["rows"]
        self.assertEqual({(row["layout"], row["schedule"]) for row in rows},
                         {("zigzag", "ring"), (None, "ring")})
        result = self.succeed(*self.WORDS, "--sequence-layout", "zigzag,contiguous")
        self.assertRegex(result.stdout, "# run: .* --sequence-layout zigzag,contiguous ")

    def test_table_and_csv(self):
        result = self.succeed(*self.WORDS)
        self.assertIn("# ranks: 8 ranks on 2 nodes", result.stdout)
        self.assertIn("between nodes", result.stdout)
        lines = list(csv.DictReader(io.StringIO(self.annulus(*self.WORDS, "--csv", "-").stdout)))
        self.assertEqual([line["mesh"] for line in lines],
                         [row["mesh"] for row in self.report()["rows"]])
        for line in lines:
            self.assertEqual((line["dtype"], line["device"], line["mask"]), ("bfloat16", "cuda", "causal"))
            self.assertIn("--shape=2,32k,32k,8,2,128", line["options"])

    def test_errors(self):
        words = ["plan", "--recommend", "--shape", "1,64,64,8,2,64"]
        self.expect_error(self.annulus(*words), 2, "--ranks: got nothing")
        self.expect_error(self.annulus(*words[:2], "--ranks", "2"), 2, "--shape: got nothing")
        self.expect_error(self.annulus(*words, "--ranks", "6", "--nodes", "4"), 2,
                          "--nodes: got 4, expected a divisor of 6 ranks")
        self.expect_error(self.annulus(*words, "--ranks", "2", "--mesh", "sp=4"), 2, "--mesh: got", "sp=4")
        self.expect_error(self.annulus(*words, "--ranks", "6", "--ranks-per-node", "4"), 2,
                          "--ranks-per-node: got 4, expected a divisor of 6 ranks")
        self.expect_error(self.annulus(*words, "--ranks", "6", "--nodes", "2", "--ranks-per-node", "4"), 2,
                          "--nodes: got 2, expected --ranks 6 divided by --ranks-per-node 4")
        self.expect_error(self.annulus(*words, "--ranks", "2", "--simulate"), 2, "one at a time")


class Scaling(CliTest):
    def check(self, report, ranks, tokens, queries=1, keys=1):
        rows = report["rows"]
        half = len(rows) // 2
        for scaling, some in [("strong", rows[:half]), ("weak", rows[half:])]:
            self.assertEqual({row["scaling"] for row in some}, {scaling})
            self.assertEqual([row["ranks"] for row in some], ranks)
            self.assertEqual(some[0]["efficiency"], 100)
            for row in some:
                self.assertGreater(row["time"], 0)
                # Both rates are rounded to four digits.
                self.assertAlmostEqual(row["efficiency"], row["rate"] / some[0]["rate"] * 100,
                                       delta=0.1 + (100 + row["efficiency"]) * 5e-4)
        self.assertEqual(len({row["S"] for row in rows[:half]}), 1)
        self.assertEqual([row["S"] for row in rows[half:]], [tokens * count for count in ranks])
        for row in rows:
            self.assertEqual(row["T"], max(1, row["S"] * queries // keys))

    def test_predicted(self):
        words = ["plan", "--scaling", "--ranks", "24", "--ranks-per-node", "8", "--shape",
                 "1,96k,96k,64,8,128", "--dtype", "bfloat16", "--causal", "--device", "cuda"]
        report = self.json(*words)
        self.assertEqual(report["schema"], "annulus.plan.scaling")
        self.check(report, [1, 2, 4, 8, 16, 24], 4096)
        self.assertEqual([row["nodes"] for row in report["rows"][:6]], [1, 1, 1, 1, 2, 3])
        self.assertEqual(report["rows"][0]["schedule"], "local")
        # The largest weak problem is the strong one.
        self.assertEqual(report["rows"][5]["time"], report["rows"][11]["time"])
        again = self.json(*words, "--tokens-per-rank", "1k")
        self.check(again, [1, 2, 4, 8, 16, 24], 1024)

    def test_names_all_that_decides(self):
        words = ["--scaling", "--shape", "1,512,512,8,2,64", "--dtype", "float16", "--causal", "--window", "64",
                 "--impl", "native"]
        for how, ranks in [(["plan", "--ranks", "2", *words], None),
                           (["bench", *words, "--iters", "1", "--warmup", "0"], 2)]:
            result = self.succeed(*how, ranks=ranks)
            problem = "B=1 T=512 S=512 N=8 K=2 D=64 Dv=64 float16, causal, window 64,64"
            self.assertIn(f"# problem: {problem}\n", result.stdout)
            self.assertRegex(result.stdout, "# options: .*--impl=native")

    def test_queries_grow_in_proportion_to_keys(self):
        words = ["plan", "--scaling", "--ranks", "8", "--dtype", "bfloat16", "--device", "cuda"]
        for queries, keys in [(4096, 65536), (1, 65536)]:
            report = self.json(*words, "--shape", f"1,{queries},{keys},16,8,64")
            self.check(report, [1, 2, 4, 8], keys // 8, queries, keys)

    def test_nodes_are_filled(self):
        words = ["plan", "--scaling", "--ranks-per-node", "6", "--shape", "1,48k,48k,12,12,64"]
        rows = self.json(*words, "--ranks", "36")["rows"]
        self.assertEqual([(row["ranks"], row["nodes"]) for row in rows[:7]],
                         [(1, 1), (2, 1), (4, 1), (6, 1), (12, 2), (24, 4), (36, 6)])
        self.expect_error(self.annulus(*words, "--ranks", "32"), 2,
                          "--ranks-per-node: got 6, expected a divisor of the mesh's 32 ranks")

    def test_every_schedule_scales(self):
        words = ["plan", "--scaling", "--ranks", "8", "--ranks-per-node", "2", "--shape", "1,16k,16k,16,8,64",
                 "--dtype", "bfloat16", "--device", "cuda"]
        for schedule in ["ring", "double_ring", "allgather", "ulysses", "hybrid", "pass_q"]:
            with self.subTest(schedule):
                report = self.json(*words, "--schedule", schedule)
                self.check(report, [1, 2, 4, 8], 2048)
                self.assertEqual({row["schedule"] for row in report["rows"]}, {schedule})

    def test_measured(self):
        words = ["bench", "--scaling", "--shape", "1,96,96,4,2,16", "--iters", "1", "--warmup", "0"]
        report = self.json(*words, ranks=3)
        self.assertEqual(report["schema"], "annulus.bench.scaling")
        self.check(report, [1, 2, 3], 32)
        self.assertEqual(report["rows"][0]["device"], "cpu")
        alone = self.json(*words)
        self.check(alone, [1], 96)

    def test_problems_without_visible_pairs_have_no_efficiency(self):
        for shape in ["1,128,0,4,4,64", "1,0,64,4,4,8", "0,64,64,4,4,8"]:
            for words, ranks in [(["plan", "--ranks", "2"], 1), (["bench", "--iters", "1", "--warmup", "0"], 2)]:
                with self.subTest(shape, command=words[0]):
                    for row in self.json(*words, "--scaling", "--shape", shape, ranks=ranks)["rows"]:
                        self.assertIsNone(row["efficiency"])
                        self.assertIn(row["rate"], [None, 0])

    def test_errors(self):
        words = ["plan", "--scaling", "--shape", "1,64,64,8,2,64"]
        self.expect_error(self.annulus(*words), 2, "--ranks: got nothing")
        self.expect_error(self.annulus(*words[:2], "--ranks", "2"), 2, "--shape: got nothing")
        self.expect_error(self.annulus("bench", "--scaling", ranks=2), 2, "--shape: got nothing")
        self.expect_error(self.annulus("bench", "--scaling", "--hops", ranks=2), 2, "--scaling: ")
        # A failure on some ranks ends all.
        self.expect_error(self.annulus("bench", "--scaling", "--shape", "1,96,96,4,2,16", "--impl", "sdpa",
                                       ranks=2), 2, "sdpa")
        self.expect_no_files()


class Predictions(CliTest):
    ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..")

    def test_beside_measured_times(self):
        results = [os.path.join(self.ROOT, "benchmarks", "results", f"schedules_{gpus}x_h200.json")
                   for gpus in (4, 2)]
        words = [sys.executable, os.path.join(self.ROOT, "benchmarks", "predictions"), "--annulus", PROGRAM]
        result = subprocess.run([*words, *results], stdout=subprocess.PIPE, encoding="utf-8", check=False)
        self.assertEqual(result.returncode, 0)
        rows = [[cell.strip(" *") for cell in line.strip("|\n").split("|")]
                for line in result.stdout.splitlines() if line.startswith("| ")][1:]
        self.assertEqual(len(rows), 48)
        self.assertEqual({row[2] for row in rows}, {"ring", "allgather", "ulysses", "hybrid", "pass_q"})
        for row in rows:
            off = float(row[5]) / float(row[4]) - 1
            self.assertLess(abs(off), 0.3, row)
            self.assertAlmostEqual(float(row[6]), off + 1, delta=0.01)
            shown = float(row[7].replace("\u2212", "-").removesuffix(" %"))
            self.assertAlmostEqual(shown, off * 100, delta=1)
        near = [row for row in rows if abs(float(row[5]) / float(row[4]) - 1) <= 0.1]
        self.assertGreaterEqual(len(near), 44)
        choices = os.path.join(self.ROOT, "benchmarks", "results", "choices_2x_third_h200.json")
        result = subprocess.run([*words, choices], stdout=subprocess.PIPE, encoding="utf-8", check=False)
        self.assertEqual(result.returncode, 0)
        right, total = re.search(r"^(\d+) of (\d+) within 10%", result.stdout, re.MULTILINE).groups()
        self.assertEqual(int(total), 18)
        self.assertGreaterEqual(int(right), 15)
        missing = subprocess.run([*words, self.path("none.json")], stderr=subprocess.PIPE, check=False)
        self.assertNotEqual(missing.returncode, 0)


if __name__ == "__main__":
    main()
