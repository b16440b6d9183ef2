"""Help, options, exit codes, reports: what a user of the command line meets."""

import csv
import io
import json
import os

import numpy as np

from cli_support import OPERANDS, OUTPUT, CliTest, command_on_nodes, main

PLAN = ["plan", "--mesh", "sp=4", "--shape", "1,1k,1k,8,2,64"]


class Help(CliTest):
    def test_printed_once_under_mpirun(self):
        result = self.succeed("run", "--help", ranks=2)
        self.assertEqual(result.stdout.count("usage:"), 1)


class Options(CliTest):
    def test_nothing_given_shows_the_usage(self):
        result = self.annulus()
        self.assertEqual((result.returncode, result.stdout), (2, ""))
        self.assertEqual(result.stderr, self.annulus("--help").stdout)

    def test_the_native_implementation_can_be_forced(self):
        self.save_operands()
        report = self.json("run", *OPERANDS, *OUTPUT, "--impl", "sdpa",
                           environment={"ANNULUS_FORCE_NATIVE": "1"})
        self.assertEqual(report["rows"][0]["impl"], "native")
        for words in [], ["--impl", "vanilla"]:
            result = self.annulus("run", *OPERANDS, *OUTPUT, *words,
                                  environment={"ANNULUS_FORCE_NATIVE": "x"})
            self.expect_error(result, 2, "error: ANNULUS_FORCE_NATIVE: got 'x'")

    def test_schedule_that_cannot(self):
        self.save_operands()
        shape = ["--shape", "1,64,64,4,2,16"]
        for words, ranks in [(["run", *OPERANDS, *OUTPUT], 2),
                             (["plan", "--mesh", "sp=2", *shape], None)]:
            result = self.annulus(*words, "--schedule", "local", ranks=ranks)
            self.expect_error(result, 2, "annulus: error: --schedule: schedule local cannot run: ",
                              "sharded along sp")

    def test_transport_without_gpus(self):
        words = ["bench", "--shape", "1,64,64,4,2,16"]
        nothing = {"CUDA_VISIBLE_DEVICES": "", "ANNULUS_DEVICE": "auto"}
        for named in [["--transport", "nccl"], ["--share-gpus"]]:
            result = self.annulus(*words, *named, ranks=2, environment=nothing)
            self.expect_error(result, 2, " ".join(named) + ": needs GPU ranks")
        result = self.annulus(*words, *named, "--device", "cuda", environment=nothing)
        self.expect_error(result, 2, "--device cuda", "CUDA")

    def test_no_driver_is_called_that(self):
        versions = self.json("info")["libraries"]["CUDA"]
        if not versions.endswith("driver no driver"):
            self.skipTest("CUDA: " + versions)
        result = self.annulus("bench", "--shape", "1,8,8,1,1,8", "--device", "cuda")
        self.expect_error(result, 2, "--device cuda: no CUDA device: no NVIDIA driver")

    def test_one_message_under_mpirun(self):
        self.expect_error(self.annulus("plan", "--mesh", "sp=x", ranks=3), 2, "annulus: error: --shape")
        self.expect_error(self.annulus("run", "--window", "x", ranks=3), 2,
                          "annulus: error: --window: got 'x'")

    def test_unknown_variable_warns(self):
        result = self.succeed(*PLAN, environment={"ANNULUS_CASUAL": "1"})
        self.assertIn("annulus: warning: environment variable ANNULUS_CASUAL is ignored", result.stderr)

    def test_axis_that_shards_nothing_warns_once(self):
        result = self.succeed("plan", "--mesh", "ps=4", "--shape", "1,8,8,1,1,8", ranks=2)
        self.assertEqual(result.stderr.count("annulus: warning: "), 1)
        self.assertIn("annulus: warning: mesh axis ps shards nothing: its 4 ranks do the same work",
                      result.stderr)
        self.assertNotIn("warning", self.annulus(*PLAN).stderr)

    def test_wrong_numbers_are_4(self):
        # The draws are legal: failing to compute them is as bad as computing them wrongly.
        result = self.annulus("verify", "--random", "1", "--impl", "sdpa",
                              environment={"CUDA_VISIBLE_DEVICES": ""}, ranks=2)
        self.assertEqual(result.returncode, 4, result.stdout + result.stderr)
        self.assertIn("# Verdict: FAILED (0 of 1 within bounds, 1 not computed", result.stdout)


class Reports(CliTest):
    NUMBERS = ["time", "rate", "moved", "wait", "bookkeeping", "memory"]

    def run_reported(self, *words, **arguments):
        self.save_operands()
        result = self.succeed("run", *OPERANDS, *OUTPUT, "--causal", *words, **arguments)
        return result

    def check_report(self, report):
        self.assertEqual(report["schema"], "annulus.run")
        self.assertEqual(report["version"], 2)
        (row,) = report["rows"]
        self.assertEqual(set(row), {column["name"] for column in report["columns"]})
        self.assertEqual(row["shape"], "1,64,64,4,2,16,16")
        self.assertEqual(row["dtype"], "float32")
        self.assertEqual(row["impl"], "native")
        for name in self.NUMBERS:
            self.assertIsInstance(row[name], (int, float), name)
        self.assertGreater(row["time"], 0)
        # The row is self-contained.
        self.assertRegex(row["date"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
        self.assertRegex(row["commit"], r"^([0-9a-f]{10,}(-dirty)?|unknown)$")
        self.assertIn("MPI", row["libraries"])
        self.assertIn("--causal=true", row["options"])
        self.assertEqual((row["mask"], row["device"], row["nodes"]), ("causal", "cpu", 1))
        for name in ["version", "device name", "transport"]:
            self.assertTrue(row[name], name)
        return row

    def test_table(self):
        result = self.run_reported()
        lines = result.stdout.splitlines()
        self.assertTrue(lines[0].startswith("#"))
        self.assertIn("GFLOP/s", result.stdout)
        self.assertEqual(sum(not line.startswith("#") for line in lines), 1)
        self.assertLess(len(lines), 9)
        self.assertNotIn("visible pair", result.stdout)

    def test_tables_fit_unless_wide(self):
        shape = ["--shape", "1,96,96,4,2,16", "--causal"]
        self.save_operands()

        def width(*words, ranks=2):
            result = self.succeed(*words, ranks=ranks)
            lines = result.stdout.splitlines()
            return max(len(line) for line in lines[lines.index("#"):]
                       if not line.startswith("# Verdict"))

        for words in [["run", *OPERANDS, *OUTPUT], ["verify", "--random", "5"],
                      ["bench", *shape, "--iters", "1"]]:
            with self.subTest(words):
                self.assertLessEqual(width(*words), 120)
        self.assertLessEqual(width("plan", "--mesh", "sp=4", *shape, ranks=None), 120)
        self.assertGreater(width("verify", *shape, "--wide"), 120)

    def test_json_and_csv_files(self):
        self.run_reported("--json", "report.json", "--csv", "report.csv", ranks=2)
        row = self.check_report(self.load_json("report.json"))
        self.assertEqual((row["mesh"], row["schedule"], row["layout"]), ("sp=2", "ring", "zigzag"))
        self.assertEqual((row["ranks"], row["transport"]), (2, "mpi"))
        # Every rank needs one half of the other's 32 keys or all of them: K + V, 2 heads of 16.
        self.assertGreater(row["moved"], 0)
        with open(self.path("report.csv"), newline="") as file:
            (line,) = csv.DictReader(file)
        self.assertEqual(line["schema"], "annulus.run/2")
        self.assertEqual(line["mesh"], "sp=2")
        self.assertEqual(float(line["time (ms)"]), row["time"])
        for name in ["date", "commit", "libraries", "options", "ranks", "device name"]:
            self.assertEqual(line[name], str(row[name]))

    def test_repeated_calls_have_a_median_and_a_spread(self):
        self.save_operands()
        (row,) = self.json("run", *OPERANDS, *OUTPUT, "--repeat", "5")["rows"]
        self.assertLessEqual(row["least"], row["time"])
        self.assertLessEqual(row["time"], row["most"])

    def test_a_dry_run_computes_and_writes_nothing(self):
        self.save_operands()
        result = self.succeed("run", *OPERANDS, *OUTPUT, "--causal", "--dry-run", ranks=2)
        self.assertRegex(result.stdout, r"# would run: \w+ by native, transport \w+")
        self.assertRegex(result.stdout, r"# memory: [\d.]+ \w+ of rank 0, without the workspace of "
                                        r"kernels: query ")
        self.assertIn("# Verdict: dry run: nothing was computed or written", result.stdout)
        self.assertFalse(os.path.exists(self.path("output.npy")))
        wrong = ["--mesh", "dp=1", "--schedule", "ring"]
        self.expect_error(self.annulus("run", *OPERANDS, *OUTPUT, "--dry-run", *wrong), 2,
                          "--schedule: schedule ring cannot run")

    def test_explain_leads_with_the_choice_and_is_short(self):
        self.save_operands()
        result = self.succeed("run", *OPERANDS, *OUTPUT, "--explain", ranks=2)
        order = [result.stdout.index(text) for text in
                 ("# implementation chosen: ", "# schedule chosen: ", "# schedule chosen because: ",
                  "# schedule passed over, ", "# implementation passed over, ", "GFLOP/s")]
        self.assertEqual(order, sorted(order))
        self.assertNotIn("# rank 0", result.stdout)
        self.assertNotIn("# backward ", result.stdout)
        result = self.succeed("run", *OPERANDS, *OUTPUT, "--show-ranks", "1", ranks=2)
        self.assertIn("# rank 0", result.stdout)
        self.assertNotIn("# rank 1", result.stdout)

    def test_standard_output(self):
        row = self.check_report(json.loads(self.run_reported("--json", "-").stdout))
        self.assertEqual((row["least"], row["most"]), (row["time"], row["time"]))
        (line,) = csv.DictReader(io.StringIO(self.run_reported("--csv", "-").stdout))
        self.assertEqual(line["schedule"], "local")

    def test_trace(self):
        self.run_reported("--trace", "trace.json", ranks=3)
        events = self.load_json("trace.json")["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        self.assertEqual({event["pid"] for event in spans}, {0, 1, 2})
        self.assertEqual(min(event["ts"] for event in spans), 0)
        self.assertLessEqual({"kernel", "transfer", "call", "file"}, {event["cat"] for event in spans})
        self.check_arrows(events)
        self.expect_no_files()

    def check_arrows(self, events):
        """From every message that was sent to where it was received."""
        spans = [event for event in events if event["ph"] == "X"]
        sent = sum(len(span["args"].get("to", [])) for span in spans)
        self.assertGreater(sent, 0)
        ends = {phase: {event["id"]: event for event in events if event["ph"] == phase}
                for phase in "sf"}
        self.assertEqual(len(ends["s"]), sent)
        self.assertEqual(set(ends["s"]), set(ends["f"]))
        for identifier, start in ends["s"].items():
            finish = ends["f"][identifier]
            self.assertLessEqual(start["ts"], finish["ts"])
            self.assertEqual(start["pid"], start["args"]["from"])
            self.assertEqual(finish["pid"], finish["args"]["to"])
            for end in start, finish:
                around = [span for span in spans if span["cat"] == "transfer"
                          and (span["pid"], span["tid"]) == (end["pid"], end["tid"])
                          and span["ts"] <= end["ts"] <= span["ts"] + span["dur"]]
                self.assertTrue(around)

    def test_trace_of_bench(self):
        result = self.succeed("bench", "--sweep", "32:64", "--iters", "2", "--trace", "trace.json", ranks=2)
        events = self.load_json("trace.json")["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        for shape in "1,32,32,8,8,64,64", "1,64,64,8,8,64,64":
            self.assertEqual(sum(span["name"] == shape for span in spans), 2)
        self.assertEqual(sum(span["cat"] == "call" for span in spans), 2 * 2 * 2)
        self.check_arrows(events)


class Log(CliTest):
    """ANNULUS_LOG_LEVEL."""

    def log_of(self, level, *words, ranks):
        self.save_operands()
        result = self.succeed("run", *OPERANDS, *OUTPUT, *words, ranks=ranks,
                              environment={"ANNULUS_LOG_LEVEL": level})
        return [line for line in result.stderr.splitlines() if line.startswith("[annulus ")]

    def test_info_tells_the_story(self):
        lines = self.log_of("info", "--causal", ranks=2)
        story = ["mesh sp=2: 2 ranks on 1 node", "computes on cpu", "problem B=1 T=64", "shards: ",
                 "schedule ring", "schedule local passed over: ", "implementation native",
                 "transport mpi", "computed in ", "wrote output.npy"]
        found = [next((i for i, line in enumerate(lines) if text in line), None) for text in story]
        self.assertNotIn(None, found, (story, lines))
        self.assertEqual(found, sorted(found))
        self.assertTrue(all(" rank 0 info] " in line for line in lines), lines)

    def test_debug_tells_every_choice_on_every_rank(self):
        lines = self.log_of("debug", ranks=2)
        for rank in 0, 1:
            of_rank = [line for line in lines if f" rank {rank} debug] " in line]
            self.assertTrue(any("holds queries " in line for line in of_rank), lines)
            self.assertTrue(any("implementation sdpa passed over: " in line for line in of_rank), lines)


class Plan(CliTest):
    def test_large_meshes_take_seconds(self):
        gpus = ["--causal", "--dtype", "bfloat16", "--device", "cuda"]
        with self.within(4):  # 1.2 s, and up to three times as long on a core that others share
            result = self.succeed("plan", "--mesh", "sp=4096", "--shape", "8,1M,1M,64,8,128", *gpus)
        self.assertIn("of 4096 ranks planned", result.stdout)
        with self.within(5):  # 1.7 s
            result = self.succeed("plan", "--recommend", "--ranks", "1024", "--ranks-per-node", "8", "--shape",
                                  "1,8M,8M,64,8,128", *gpus)
        self.assertIn("# run: mpirun -np 1024 ", result.stdout)

    def test_sequences_too_long_to_balance(self):
        result = self.succeed("plan", "--mesh", "sp=4", "--shape", "1,256M,256M,8,8,64", "--causal")
        self.assertNotIn("balanced", result.stdout)

    def test_long_sequence_takes_under_a_second(self):
        with self.within(1):
            result = self.succeed("plan", "--mesh", "sp=8", "--shape", "1,1M,1M,64,8,128", "--causal")
        rows = [line.split() for line in result.stdout.splitlines() if "zigzag" in line]
        (chosen,) = [row for row in rows if row[:2] == ["zigzag", "yes"]]
        self.assertLess(float(chosen[3]), 1)  # imbalance, %
        (contiguous,) = [line.split() for line in result.stdout.splitlines()
                         if line.split()[:1] == ["contiguous"]]
        self.assertGreater(float(contiguous[3]), 50)

    def test_json(self):
        plan = self.json(*PLAN)
        self.assertEqual((plan["schema"], plan["version"]), ("annulus.plan", 3))
        self.assertEqual(len(plan["ranks"]), 4)
        self.assertFalse(plan["tasks_left_out"])
        finishes = []
        for rank in plan["ranks"]:
            self.assertTrue(rank["tasks"])
            times = rank["predicted_ms"]
            self.assertGreater(times["compute"], 0)
            self.assertGreaterEqual(times["finish"], times["compute"])
            finishes.append(times["finish"])
        self.assertEqual(plan["predicted_ms"]["finish"], max(finishes))
        self.assertIn("assumed", plan["predicted_by"])
        self.assertEqual({one["name"] for one in plan["schedules"]}, {"local", "ring", "double_ring", "allgather", "ulysses", "hybrid", "pass_q"})
        self.assertEqual([one["name"] for one in plan["schedules"] if one["chosen"]], [plan["schedule"]])
        for one in plan["schedules"]:
            self.assertNotEqual(one["chosen"], "passed_over" in one)
        # The same comparison as in the text.
        self.assertEqual([row["layout"] for row in plan["layouts"]],
                         ["contiguous", "zigzag", "striped", "balanced"])
        (chosen,) = [row for row in plan["layouts"] if row["chosen"] == "yes"]
        self.assertAlmostEqual(chosen["time"], plan["predicted_ms"]["finish"], delta=0.006 * chosen["time"])
        self.annulus(*PLAN, "--json", "plan.json")
        again = self.load_json("plan.json")
        self.assertIn("--json=plan.json", again["options"])
        for one in [plan, again, *plan["layouts"], *again["layouts"]]:
            self.assertEqual(one["device"], "cpu")
            del one["options"]
        self.assertEqual(again, plan)
        self.assertEqual({one["name"]: one["unit"] for one in plan["layout_columns"]}["time"], "ms, predicted")

    def test_imbalance_and_traffic_of_every_layout(self):
        layouts = {row["layout"]: row for row in self.json(*PLAN, "--causal")["layouts"]}
        for measure in "imbalance", "tiles":
            self.assertGreater(layouts["contiguous"][measure], 50)
            self.assertLess(layouts["zigzag"][measure], 3)
            self.assertLess(layouts["balanced"][measure], 3)
        self.assertGreater(layouts["striped"]["of dense"], 99)
        self.assertEqual(layouts["contiguous"]["of dense"], 50)

    def test_many_documents_take_a_second(self):
        edges = np.unique(np.random.default_rng(3).integers(1, 1 << 17, 1999))
        self.save("cu.npy", np.array([0, *edges, 1 << 17], np.int32))
        with self.within(2):
            plan = self.json("plan", "--mesh", "sp=8", "--shape", "1,128k,128k,64,8,128", "--causal",
                             "--cu-seqlens", "cu.npy", "--sequence-layout", "balanced", "--device", "cuda",
                             "--dtype", "bfloat16")
        (chosen,) = [row for row in plan["layouts"] if row["chosen"] == "yes"]
        self.assertEqual((plan["layout"], chosen["layout"]), ("balanced", "balanced"))
        self.assertLess(chosen["tiles"], 3)
        self.assertLess(chosen["of dense"], 10)
        self.assertLessEqual(chosen["messages"], 8 * 7)

    def test_json_of_many_ranks_is_short(self):
        for ranks, listed in [(65, 65), (513, 24)]:
            with self.subTest(ranks):
                result = self.succeed("plan", "--mesh", f"sp={ranks}", "--shape", "1,64k,64k,8,2,64",
                                      "--json", "-")
                plan = json.loads(result.stdout)
                self.assertTrue(plan["tasks_left_out"])
                self.assertEqual(plan["ranks_left_out"], listed < ranks)
                numbers = [rank["rank"] for rank in plan["ranks"]]
                self.assertEqual(numbers, sorted(set(numbers)))
                self.assertLessEqual(len(numbers), listed)
                self.assertGreater(plan["ranks"][-1]["bytes_received"], 0)
                self.assertGreater(plan["ranks"][-1]["predicted_ms"]["finish"], 0)
                self.assertNotIn("tasks", plan["ranks"][0])
                self.assertLess(len(result.stdout), 65 * 1000)

    def test_steps_and_explanation(self):
        result = self.succeed(*PLAN, "--show-ranks", "2", "--explain")
        self.assertIn("schedule passed over, local", result.stdout)
        self.assertIn("# rank 1\n", result.stdout)
        self.assertNotIn("# rank 2\n", result.stdout)
        self.assertIn("assumed", result.stdout)

    def test_more_ranks_on_demand(self):
        words = ["plan", "--mesh", "sp=40", "--shape", "1,1M,1M,64,8,128"]
        short = self.annulus(*words).stdout
        self.assertIn("8 more ranks (--show-ranks 40)", short)
        full = self.annulus(*words, "--show-ranks", "40").stdout
        self.assertNotIn("more ranks", full)
        ranks = [line.split()[0] for line in full.splitlines() if not line.startswith("#") and line]
        self.assertEqual(ranks[4:], [str(rank) for rank in range(40)])
        self.assertIn("(s, predicted)", full)

    # Variables that launchers set for the second of four processes; True for launchers of MPI. Others
    # are recognised in tests/mesh/launcher_detection_test.cpp.
    LAUNCHERS = [({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}, False),
                 ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "PMI_RANK": "1", "PMI_SIZE": "4"}, True)]

    def test_one_of_several_processes_plans(self):
        alone = self.annulus(*PLAN).stdout
        words = [*PLAN, "--json", "plan.json"]
        result = self.annulus(*words, ranks=3)
        self.assertEqual(result.stdout, alone)
        self.assertEqual(result.stderr.count(": process 0 does this for all\n"), 2)
        self.assertEqual(self.annulus(*PLAN, ranks=3).stderr.count("process 0"), 0)
        help_text = self.annulus("run", "--help").stdout
        for second, of_mpi in self.LAUNCHERS:
            with self.subTest(second):
                os.remove(self.path("plan.json"))
                result = self.annulus(*words, environment=second)
                shown = self.succeed("run", "--help", environment=second)
                if of_mpi:
                    self.expect_success(result)
                    self.assertEqual(result.stderr, "annulus: PMI_RANK=1: process 0 does this for all\n")
                    self.assertEqual(shown.stdout, "")
                else:
                    self.expect_error(result, 2, "SLURM_PROCID=1: process 0 does this for all; unset "
                                                 "SLURM_PROCID")
                    self.assertEqual(shown.stdout, help_text)
                self.assertEqual(result.stdout, "")
                self.expect_no_files("plan.json")
                first = {name: "0" if value == "1" else value for name, value in second.items()}
                result = self.succeed(*words, environment=first)
                self.assertEqual(result.stdout, alone)
                self.assertTrue(os.path.exists(self.path("plan.json")))

    def test_what_needs_ranks_does_not_run_on_unconnected_ones(self):
        for second, _ in self.LAUNCHERS:
            with self.subTest(second):
                self.expect_error(self.annulus("verify", "--shape", "1,8,8,1,1,8", environment=second),
                                  3, " 4 ", "mpirun")

    def test_a_plan_starts_no_mpi(self):
        # Left over from a job that has ended: MPI_Init would fail.
        gone = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "gone", "PMIX_SERVER_URI2": "gone.0;tcp4://127.0.0.1:1",
                "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
        result = self.succeed(*PLAN, environment=gone)
        self.assertEqual(result.stdout, self.annulus(*PLAN).stdout)

    def test_errors(self):
        self.expect_error(self.annulus("plan", "--mesh", "sp=4"), 2, "--shape: got nothing")
        self.expect_error(self.annulus(*PLAN, "--ranks-per-node", "3"), 2,
                          "--ranks-per-node: got 3, expected a divisor of the mesh's 4 ranks")


class Info(CliTest):
    def test_text_and_json(self):
        result = self.succeed("info", ranks=2)
        for text in ["OpenBLAS", "Highway", "MPI", "2 on 1 node,", "native", "allgather",
                     "ANNULUS_LOG_LEVEL", "CUDA", "NCCL", "cuDNN"]:
            self.assertIn(text, result.stdout)
        self.assertNotIn("\0", result.stdout)
        info = self.json("info")
        self.assertEqual(info["implementations"]["native"], "yes")
        self.assertEqual(info["schedules"]["ulysses"], "yes")
        self.assertTrue(info["implementations"]["sdpa"].startswith("no: "))


class Nodes(CliTest):
    """Several nodes on one machine, by ANNULUS_NODE; mpirun's ranks 0 and 2 are on the first."""

    def on_nodes(self, *words, nodes=("one", "two", "one", "two"), **arguments):
        return self.execute(command_on_nodes(*words, nodes=nodes), **arguments)

    def test_ranks_of_a_node_follow_each_other(self):
        result = self.expect_success(self.on_nodes("info"))
        self.assertIn("4 on 2 nodes,", result.stdout)
        self.assertRegex(result.stdout, r"node 0 +one, 2 ranks: 0, 1 \(mpirun's 0, 2\)\n")
        self.assertRegex(result.stdout, r"node 1 +two, 2 ranks: 2, 3 \(mpirun's 1, 3\)\n")

    def test_mpiruns_order_on_demand(self):
        result = self.on_nodes("info", "--rank-order", "mpirun")
        self.assertRegex(result.stdout, r"node 0 +one, 2 ranks: 0, 2\n")
        result = self.on_nodes("verify", "--shape", "1,64,64,4,4,8", "--rank-order", "mpirun")
        self.expect_success(result)
        self.assertNotIn("rank order", result.stdout)

    def test_schedules(self):
        result = self.on_nodes("verify", "--shape", "1,96,96,4,4,8", "--schedule", "hybrid", "--causal")
        self.expect_success(result)
        self.assertIn("# rank order: by node: mpirun's ranks 0, 2, 1, 3\n", result.stdout)

    def test_files_do_not_depend_on_the_order(self):
        self.save_operands(rows=100, heads=4, kv_heads=4)
        outputs = []
        for order in ["node", "mpirun"]:
            self.expect_success(self.on_nodes("run", *OPERANDS, *OUTPUT, "--causal", "--schedule",
                                              "ring", "--rank-order", order))
            self.expect_right_files([*OPERANDS, *OUTPUT], ["--causal"])
            outputs.append(self.read("output.npy"))
        self.assertEqual(*outputs)


if __name__ == "__main__":
    main()
