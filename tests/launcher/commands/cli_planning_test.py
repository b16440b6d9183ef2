"""annulus plan --simulate."""

import json
import os
import resource
import xml.etree.ElementTree

from cli_support import CliTest, main

PLAN = ["plan", "--mesh", "sp=4", "--shape", "1,1k,1k,8,2,64"]


class Simulate(CliTest):
    def simulated(self, *words):
        result = self.annulus(*PLAN, "--simulate", *words, "--json", "-")
        self.expect_success(result)
        report = json.loads(result.stdout)
        self.assertEqual(report["schema"], "annulus.plan.simulate")
        return report

    def test_agrees_with_the_prediction(self):
        for words in [[], ["--causal"], ["--causal", "--sequence-layout", "contiguous"],
                      ["--ranks-per-node", "2"], ["--device", "cuda", "--dtype", "bfloat16"]]:
            with self.subTest(words):
                plan = json.loads(self.annulus(*PLAN, *words, "--json", "-").stdout)
                rows = self.simulated(*words)["rows"]
                self.assertEqual([row["rank"] for row in rows], [0, 1, 2, 3])
                for row, rank in zip(rows, plan["ranks"]):
                    for name in ["compute", "transfer", "wait", "finish"]:
                        self.assertAlmostEqual(row[name], rank["predicted_ms"][name], delta=0.0006)

    def test_table(self):
        result = self.annulus(*PLAN, "--simulate", "--ranks-per-node", "2")
        self.expect_success(result)
        self.assertIn("# simulated: 4 ranks on 2 nodes", result.stdout)
        self.assertIn("ms, of the slowest rank", result.stdout)
        rows = [line.split() for line in result.stdout.splitlines() if not line.startswith("#") and line]
        self.assertEqual([row[:2] for row in rows], [["0", "0"], ["1", "0"], ["2", "1"], ["3", "1"]])

    def test_an_axis_called_node_says_who_shares_one(self):
        words = ["plan", "--simulate", "--mesh", "node=2,gpu=2", "--shape", "1,1k,1k,8,2,64",
                 "--query-spec", "-,node+gpu", "--kv-spec", "-,node+gpu"]
        self.assertIn("4 ranks on 2 nodes", self.annulus(*words).stdout)
        self.assertIn("4 ranks on 1 node\n", self.annulus(*words, "--ranks-per-node", "4").stdout)

    def test_stragglers(self):
        even = self.simulated("--schedule", "ring")["rows"]
        slow = self.simulated("--schedule", "ring", "--straggler-percent", "50")
        self.assertIn("up to 50 % longer, seed 0", slow["meta"]["stragglers"])
        longer = [b["compute"] / a["compute"] for a, b in zip(even, slow["rows"])]
        self.assertEqual(len(set(longer)), 4)
        for factor in longer:
            self.assertTrue(1 <= factor <= 1.5, longer)
        again = self.simulated("--schedule", "ring", "--straggler-percent", "50")
        self.assertEqual(again["rows"], slow["rows"])
        other = self.simulated("--schedule", "ring", "--straggler-percent", "50", "--straggler-seed", "1")
        self.assertNotEqual(other["rows"], slow["rows"])

    def test_trace_and_picture(self):
        result = self.annulus(*PLAN, "--schedule", "ring", "--simulate", "--trace", "trace.json", "--picture",
                              "picture.svg")
        self.expect_success(result)
        with open(self.path("trace.json")) as file:
            trace = json.load(file)
        self.assertIn("--simulate=true", trace["otherData"]["options"])
        events = trace["traceEvents"]
        self.assertEqual({event["pid"] for event in events}, {0, 1, 2, 3})
        kernels = [event for event in events if event.get("cat") == "kernel"]
        self.assertEqual(len(kernels), 16)
        # Each of four ranks sends three messages, and an arrow shows each.
        self.assertEqual(sum(event["ph"] == "s" for event in events), 12)
        picture = xml.etree.ElementTree.parse(self.path("picture.svg")).getroot()
        self.assertEqual(picture.tag, "{http://www.w3.org/2000/svg}svg")
        looks = {element.get("class") for element in picture.iter()}
        self.assertLessEqual({"kernel", "wait", "transfer"}, looks)
        self.expect_no_files()

    def test_thousand_ranks_take_seconds(self):
        mesh = ["--mesh", "node=128,gpu=8", "--query-spec", "-,node+gpu", "--kv-spec", "-,node+gpu"]
        words = ["plan", "--simulate", *mesh, "--shape", "1,1M,1M,64,8,128", "--dtype", "bfloat16",
                 "--causal", "--device", "cuda", "--picture", "picture.svg", "--trace", "trace.json"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = self.annulus(*words)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.expect_success(result)
        # Half of this, but for other work on the machine.
        self.assertLess(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 20)
        self.assertIn("# simulated: 1024 ranks on 128 nodes", result.stdout)
        self.assertIn("# traced: 64 of 1024 ranks", result.stdout)
        self.assertIn("… 992 more ranks (--show-ranks 1024)", result.stdout)
        self.assertLess(os.path.getsize(self.path("picture.svg")), 4 << 20)

    def test_errors(self):
        words = ["plan", "--simulate", "--shape", "1,64k,64k,8,2,64"]
        self.expect_error(self.annulus(*words, "--mesh", "sp=8192"), 2,
                          "--simulate: got 8192 ranks, expected at most 4096")
        for option, value in [("--trace", "t.json"), ("--picture", "p.svg"), ("--csv", "-"),
                              ("--straggler-percent", "5")]:
            self.expect_error(self.annulus(*PLAN, option, value), 2, f"{option}: needs --simulate")
        self.expect_error(self.annulus(*PLAN, "--simulate", "--straggler-percent", "-1"), 2,
                          "--straggler-percent: got -1")
        self.expect_error(self.annulus(*PLAN, "--simulate", "--picture", "no/p.svg"), 2,
                          "--picture no/p.svg: ")
        self.expect_error(self.annulus(*PLAN, "--simulate", "--picture", "a", "--trace", "a"), 2,
                          "--picture a: is the same file as --trace a")
        self.expect_no_files()


if __name__ == "__main__":
    main()
