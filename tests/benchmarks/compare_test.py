"""benchmarks/compare, choices, predictions and several_gpus without GPUs: commands, ratios, table,
plot, failures, options.

The first argument is the folder of benchmarks.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree

BENCHMARKS = os.path.abspath(sys.argv.pop(1))
sys.path.insert(0, BENCHMARKS)

from comparison import results, systems, table  # noqa: E402
from peers.peer_cases import Case  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
CASE = Case(64, 8, True, 8192)

# The beginning of every stub program. Its output follows from its arguments.
BEGINNING = """#!{python}
import json, os, runpy, sys
words = sys.argv[1:]
def lengths():
    begin, end, factor = (int(x) for x in words[words.index("--sweep") + 1].split(":"))
    while begin <= end:
        yield begin
        begin *= factor
"""

# Stands in for every program that compare starts.
STUB = BEGINNING + """
before = any(word.endswith("/before") for word in words)
if "info" in words:
    print("# libraries\\n  NCCL           2.28")
elif "bench" in words:
    rows = []
    for length in lengths():
        rows.append({{"shape": f"1,{{length}},{{length}},64,8,128,128", "verdict": "OK",
                     "time": 1.0 if "nccl" in words and length > 8192 else 2.0 - 0.5 * before,
                     "local": 600.0, "rate": 500000.0}})
        if "--backward" in words:
            rows[-1].update({{"backward": 5.0, "backward rate": 400.0, "backward local": 500.0,
                             "both": 7.0}})
    units = {{"shape": "B,T,S,N,K,D,Dv", "verdict": "", "time": "ms, median",
             "local": "TFLOP/s/GPU", "rate": "GFLOP/s/rank", "backward": "ms, median",
             "both": "ms, median", "backward rate": "GFLOP/s/rank",
             "backward local": "GFLOP/s/rank"}}
    print("a line of the launcher")
    print(json.dumps({{"columns": [{{"name": n, "unit": u}} for n, u in units.items()],
                      "rows": rows}}, indent=2))
elif any(word.endswith("jax_ring.py") for word in words):
    print("RuntimeError: no cuDNN in /opt/some/folder/libcudnn.so", file=sys.stderr)
    sys.exit(1)
else:
    print(json.dumps({{"environment": {{"torch": "2.11", "gpus": ["H200", "H200"]}}}}))
    for case in [b for a, b in zip(words, words[1:]) if a == "--case"]:
        times = {{"forward": 4.0}}
        if "--backward" in words:
            times.update({{"backward": 10.0, "both": 14.0}})
        times = {{name: {{"ms": ms}} for name, ms in times.items()}}
        print(json.dumps({{"system": "pytorch-allgather", "case": case, **times}}))
        print(json.dumps({{"system": "pytorch-alltoall", "case": case,
                          "error": "OutOfMemory: x"}}))
"""


def recorded():
    """Two lengths of one shape: at 8k a peer is ahead of us, at 32k one fails."""
    found = results.Results({"gpus": 4, "rounds": 3, "iters": 20, "warmup": 5, "batch": 1,
                             "dtype": "bfloat16"},
                            {"pytorch": {"gpus": ["H200"] * 4}})
    times = lambda *all_ms: [results.Round(ms) for ms in all_ms]  # noqa: E731
    found.cases = [
        results.CaseResults(CASE, {
            "annulus": times(1.2, 1.0, 0.9), "local-kernel": times(0.5, 0.5, 0.5),
            "pytorch-allgather": times(2.0, 2.0, 2.0), "pytorch-alltoall": times(4.0, 4.0, 4.0),
            "jax-ring": times(0.8, 0.8, 0.8)}),
        results.CaseResults(Case(64, 8, True, 32768), {
            "annulus": times(10.0, 10.0, 10.0), "local-kernel": times(8.0, 8.0, 8.0),
            "pytorch-allgather": [*times(20.0, 20.0), results.Round(error="did not end")],
            "pytorch-alltoall": times(16.0, 16.0, 16.0),
            "jax-ring": [results.Round(error="XlaRuntimeError: out of memory")] * 3})]
    return found


def rows_of(markdown):
    """The cells of each row of the table."""
    return [[cell.strip() for cell in line.strip("|").split("|")]
            for line in markdown.splitlines() if line.startswith("|")]


def cells(markdown, row):
    """The cells of a row of the table, by column."""
    rows = rows_of(markdown)
    return dict(zip(rows[0], rows[2 + row]))


class CompareTest(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.directory = holder.name

    def path(self, *names):
        return os.path.join(self.directory, *names)

    def tool(self, name, *words):
        """Runs one of the programs."""
        return subprocess.run([sys.executable, os.path.join(BENCHMARKS, name), *words],
                              cwd=self.directory, capture_output=True, text=True, timeout=60)

    def compare(self, *words):
        return self.tool("compare", *words)

    def stub(self, text=STUB, name="stub", **values):
        """A program of this text, in which {python} and the values are filled in."""
        path = self.path(name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text.format(python=sys.executable, **values))
        os.chmod(path, 0o755)
        return path

    def expect_success(self, result):
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result

    def read(self, *names):
        with open(self.path(*names), encoding="utf-8") as file:
            return file.read()


class Numbers(CompareTest):
    def test_rates_and_ratios(self):
        found = recorded()
        # 4·64·8192²·128/2 operations in 1 ms on 4 GPUs.
        self.assertAlmostEqual(found.rate(found.cases[0], "annulus"), 274.877906944, places=6)
        first = cells(table.markdown(found), 0)
        self.assertEqual(first["Annulus"], "275")
        self.assertEqual(first["PyTorch all-gather"], "137")
        self.assertEqual(first["JAX ring"], "344")
        self.assertEqual(first["ours / best peer"], "0.80")
        self.assertEqual(first["local kernel"], "550")
        self.assertEqual(first["ours / local kernel"], "0.50")

    def test_full_mask_counts_twice(self):
        full = Case(64, 8, False, 8192)
        self.assertEqual(full.operations(2), 2 * CASE.operations(2))
        self.assertEqual(full.operations(1), 4 * 64 * 8192**2 * 128)

    def test_backward_counts_five_products_for_two(self):
        case = Case(16, 16, False, 1024, 256)
        self.assertEqual(case.operations(1, "backward"), 10 * 16 * 1024**2 * 256)
        self.assertEqual(case.operations(1, "both"), 14 * 16 * 1024**2 * 256)
        self.assertEqual(str(case), "16/16/256:full:1024")

    def test_failed_peer_is_shown(self):
        second = cells(table.markdown(recorded()), 1)
        self.assertEqual(second["JAX ring"], "failed")
        self.assertEqual(second["PyTorch all-gather"], "220 (2 of 3 rounds)")
        self.assertEqual(second["ours / best peer"], "1.60")
        self.assertIn("- JAX ring, 64/8 causal 32k: `XlaRuntimeError: out of memory`",
                      table.markdown(recorded()))

    def test_lengths_that_no_sweep_covers(self):
        setup = systems.Setup("annulus", [], ["mpirun"], "python3", 4, 1, 20, 5, 60)
        cases = [Case(64, 8, True, length) for length in (8192, 16384, 32768, 49152)]
        starts = [start for start in systems.starts_of_round(setup, cases)
                  if start.system == "annulus"]
        self.assertEqual([len(start.cases) for start in starts], [3, 1])
        self.assertIn("8192:32768:2", starts[0].words)
        self.assertNotIn("--sweep", starts[1].words)


class Files(CompareTest):
    def draw(self, found):
        with open(self.path("in.json"), "w", encoding="utf-8") as file:
            json.dump(found.to_json(), file)
        return self.compare("--from-json", "in.json", "--output-dir", "out")

    def test_round_trip(self):
        self.expect_success(self.draw(recorded()))
        self.assertEqual(self.read("out", "comparison.md"), table.markdown(recorded()))
        self.assertEqual(results.load(self.path("in.json")).to_json(), recorded().to_json())

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "needs Matplotlib")
    def test_plot(self):
        found = recorded()
        self.expect_success(self.draw(found))
        root = ElementTree.fromstring(self.read("out", "comparison.svg"))
        texts = ["".join(text.itertext()).strip() for text in root.iter(SVG + "text")]
        self.assertLessEqual({"Annulus", "PyTorch all-gather", "PyTorch all-to-all", "JAX ring",
                              "local kernel", "64/8 heads, causal", "8k", "32k"}, set(texts))
        found.settings["backward"] = True
        self.expect_success(self.draw(found))
        self.assertTrue("64/8 heads, causal, backward" in self.read("out", "comparison.svg"))

    def test_nothing_measured(self):
        found = recorded()
        for entry in found.cases:
            entry.systems = {"annulus": [results.Round(error="no GPU")]}
        self.expect_success(self.draw(found))
        self.assertEqual(cells(self.read("out", "comparison.md"), 0)["Annulus"], "failed")

    def test_damaged_file(self):
        for change, text in [(lambda data: data.pop("cases"), "lacks 'cases'"),
                             (lambda data: data.update(version=9), "version 9"),
                             (lambda data: data["settings"].update(gpus=0), "gpus"),
                             (lambda data: data.update(cases=[3]), "not a results file")]:
            with self.subTest(text):
                data = recorded().to_json()
                change(data)
                with open(self.path("bad.json"), "w", encoding="utf-8") as file:
                    json.dump(data, file)
                result = self.compare("--from-json", "bad.json")
                self.assertEqual(result.returncode, 2)
                self.assertIn("--from-json: bad.json: ", result.stderr)
                self.assertIn(text, result.stderr)
        self.assertEqual(self.compare("--from-json", "none.json").returncode, 2)


class Runs(CompareTest):
    """Programs that only pretend to measure."""

    def run_stub(self, *words):
        stub = self.stub()
        return self.compare("--annulus", stub, "--mpirun", stub, "--python", stub, "--gpus", "2",
                            "--heads", "64/8", "--masks", "causal", "--seq", "8k,32k",
                            "--rounds", "2", "--output-dir", "out", *words)

    def test_all_is_recorded(self):
        result = self.expect_success(self.run_stub())
        data = json.loads(self.read("out", "comparison.json"))
        self.assertEqual(data["schema"], "annulus.comparison")
        self.assertEqual(data["environment"]["annulus"], {"NCCL": "2.28"})
        self.assertEqual(data["environment"]["pytorch"]["torch"], "2.11")
        self.assertEqual([entry["length"] for entry in data["cases"]], [8192, 32768])
        for entry in data["cases"]:
            series = entry["systems"]
            self.assertEqual(series["annulus"], [{"ms": 2.0}] * 2)
            self.assertAlmostEqual(series["local-kernel"][0]["ms"], 2.0 * 500 / 600)
            self.assertEqual(series["pytorch-allgather"], [{"ms": 4.0}] * 2)
            self.assertEqual(series["pytorch-alltoall"], [{"error": "OutOfMemory: x"}] * 2)
            self.assertEqual(series["jax-ring"], [
                {"error": "exit code 1: RuntimeError: no cuDNN in libcudnn.so"}] * 2)
        self.assertNotIn(self.directory, self.read("out", "comparison.json"))
        self.assertEqual(cells(result.stdout, 0)["ours / best peer"], "2.00")
        # Rounds interleave the systems.
        order = [line.split()[1:4] for line in result.stderr.splitlines() if line.startswith("# ")]
        self.assertEqual(order[:3], order[3:])

    def test_ours_failing_is_told_by_the_exit_code(self):
        self.run_stub()
        result = self.run_stub("--annulus-options=--broken", "--mpirun", "false")
        self.assertEqual(result.returncode, 3, result.stderr)
        self.assertEqual(cells(result.stdout, 0)["Annulus"], "failed")
        self.assertEqual(cells(result.stdout, 0)["PyTorch all-to-all"], "failed")

    def test_what_cannot_be_is_said_before_anything_runs(self):
        for option, value in [("--output-dir", self.path("stub", "below-a-file")),
                              ("--annulus", self.path("missing"))]:
            with self.subTest(option):
                result = self.run_stub(option, value)
                self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
                self.assertIn(f"argument {option}: ", result.stderr)
                self.assertNotIn("# ", result.stderr)

    def test_dry_run(self):
        result = self.expect_success(self.run_stub("--dry-run", "--annulus-options=--schedule ring"))
        bench, pytorch, jax = result.stdout.splitlines()
        self.assertIn("--sweep 8192:32768:4 --causal", bench)
        self.assertIn("--schedule ring", bench)
        self.assertIn("benchmarks/peers/pytorch_context_parallel.py --case 64/8:causal:8192 "
                      "--case 64/8:causal:32768", pytorch)
        self.assertIn("benchmarks/peers/jax_ring.py --gpus 2", jax)
        self.assertNotIn(self.directory, result.stdout)
        self.assertFalse(os.path.exists(self.path("out")))

    def test_backward(self):
        result = self.run_stub("--backward", "--cases", "64/8:causal:8k,32k",
                               "--gradients", "none")
        self.expect_success(result)
        data = json.loads(self.read("out", "comparison.json"))
        self.assertEqual(data["cases"][0]["systems"]["annulus"],
                         [{"ms": 2.0, "backward_ms": 5.0, "both_ms": 7.0}] * 2)
        self.assertEqual(data["cases"][0]["systems"]["local-kernel"][0]["backward_ms"], 4.0)
        forward, backward, both = result.stdout.split("TFLOP/s per GPU on 2 GPUs")[1:]
        self.assertEqual(cells(forward, 0)["ours / best peer"], "2.00")
        self.assertEqual(cells(backward, 0)["ours / best peer"], "2.00")
        self.assertEqual(cells(backward, 0)["ours / local kernel"], "0.80")
        # 14·64·8192²·128/2 operations in 7 ms on 2 GPUs.
        self.assertEqual(cells(both, 0)["Annulus"], "275")
        self.assertEqual(cells(both, 0)["JAX ring"], "failed")

    def test_cases_and_warming_of_backward(self):
        result = self.expect_success(self.compare("--dry-run", "--gpus", "2", "--backward"))
        *ours, pytorch, jax = result.stdout.splitlines()
        self.assertEqual(len(ours), 3)
        for line in result.stdout.splitlines():
            self.assertIn("--warm-seconds 0.4 --backward", line)
        for line in (pytorch, jax):
            self.assertIn("--case 64/8:causal:131072 --case 32/32:causal:8192", line)
            self.assertIn("--case 16/16/256:causal:32768", line)
        self.assertIn("1,32768,32768,16,16,256", ours[2])

    def test_another_build_takes_turns_in_place_of_the_peers(self):
        result = self.expect_success(self.run_stub("--against", self.stub(name="before")))
        data = json.loads(self.read("out", "comparison.json"))
        self.assertEqual(data["cases"][0]["systems"]["annulus"], [{"ms": 2.0}] * 2)
        self.assertEqual(data["cases"][0]["systems"]["annulus-before"], [{"ms": 1.5}] * 2)
        self.assertEqual(set(data["commands"]), {"annulus", "annulus-before"})
        first = cells(result.stdout, 0)
        self.assertEqual(first["time / before"], "1.333")
        self.assertNotIn("JAX ring", first)
        order = [line.count(" before bench") for line in result.stderr.splitlines()
                 if line.startswith("# ")]
        self.assertEqual(order, [0, 1] * 2)

    def test_chosen_cases(self):
        result = self.run_stub("--dry-run", "--cases", "32/32:full:1k", "--cases", "8/2:causal:4k")
        self.expect_success(result)
        self.assertIn("--case 32/32:full:1024 --case 8/2:causal:4096 --batch", result.stdout)
        self.assertNotIn("64/8", result.stdout)


class Choices(CompareTest):
    def choices(self, *words, mpirun=None):
        stub = self.stub()
        return self.tool("choices", "--annulus", stub, "--mpirun", mpirun or stub, "--case",
                         "64/8:causal:8192", "--case", "64/8:causal:16k", "--output",
                         "choices.json", *words)

    def test_a_better_choice_is_told_by_the_exit_code(self):
        result = self.choices("--rounds", "2")
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        first, second = cells(result.stdout, 0), cells(result.stdout, 1)
        self.assertEqual(first["auto / best"], "1.000")
        self.assertEqual(second["auto / best"], "2.000")
        self.assertEqual(second["ring, nccl"], "1.000")
        cases = json.loads(self.read("choices.json"))["cases"]
        self.assertEqual(cases["64/8 causal 16k"]["allgather, nccl"], [{"ms": 1.0}] * 2)
        self.expect_success(self.choices("--within", "1.01"))

    def test_an_interruption_keeps_what_was_measured(self):
        killer = self.stub(BEGINNING + """
if "--schedule" in words:
    os.kill(os.getppid(), 9)
""" + STUB, name="killer")
        self.assertEqual(self.choices(mpirun=killer).returncode, -9)
        by_choice = json.loads(self.read("choices.json"))["cases"]["64/8 causal 16k"]
        self.assertEqual(by_choice["auto"], [{"ms": 2.0}])
        self.assertEqual(by_choice["ring, peer"], [])

    def test_chosen_schedules(self):
        result = self.expect_success(self.choices("--schedules", "ulysses,hybrid", "--transports", "peer"))
        self.assertEqual({name for name in cells(result.stdout, 0) if "," in name},
                         {"ulysses, peer", "hybrid, peer"})

    def test_what_cannot_be_is_said_before_anything_runs(self):
        for option, value in [("--output", self.path("missing", "choices.json")),
                              ("--annulus", self.path("missing")), ("--case", "64/8:causal")]:
            with self.subTest(option):
                result = self.choices(option, value)
                self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
                self.assertIn(f"argument {option}: ", result.stderr)

    def test_a_run_that_fails(self):
        result = self.choices(mpirun="false")
        self.assertEqual(result.returncode, 3, result.stderr)
        self.assertEqual(cells(result.stdout, 0)["auto"], "failed")


class SeveralGpus(CompareTest):
    """Every program is a stub, which answers as annulus, as mpirun and as Python would."""

    STEPS = ["compare", "choices", "decode", "strong", "two_nodes", "random", "million",
             "failures"]
    STUB = BEGINNING + """
tools = [i for i, word in enumerate(words) if os.path.basename(word) in ("compare", "choices")]
if "info" in words:
    print("  GPU 0  NVIDIA H200, compute capability 9.0")
elif tools:
    sys.argv = words[tools[0]:]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
elif {broken!r} in words:
    print("error: broken", file=sys.stderr)
    sys.exit(3)
elif "plan" in words:
    peers = [1, 2, 3, 0] if "ring" in words else [2, 3, 0, 1]
    print(json.dumps({{"ranks": [{{"rank": rank, "groups": [{{"ranks": [0, 1, 2, 3]}}], "tasks": [
        {{"group": 0, "sends": [{{"peer": peer, "bytes": 3 if "ring" in words else 1}}]}}]}}
        for rank, peer in enumerate(peers)]}}))
elif "verify" in words:
    print(json.dumps({{"meta": {{}}, "verdict": {{"passed": "nccl" not in words}}}}))
elif "bench" in words:
    shape = words[words.index("--shape") + 1]
    sizes = [size.replace("k", "K") for size in shape.split(",")]
    ranks = int(words[words.index("-np") + 1]) if "-np" in words else 1
    rows = [{{"shape": ",".join([sizes[0], str(length), str(length), *sizes[3:]]), "verdict": "OK",
              "time": 8.0 / ranks, "rate": 1.0, "local": 1.0}}
            for length in (lengths() if "--sweep" in words else [sizes[1]])]
    print(json.dumps({{"columns": [{{"name": "shape", "unit": "B,T,S,N,K,D,Dv"}},
                                   {{"name": "time", "unit": "ms, median"}}], "rows": rows}}))
"""

    def several(self, *words, broken="nothing"):
        stub = self.stub(self.STUB, broken=broken)
        return self.tool("several_gpus", "--annulus", stub, "--mpirun", stub, "--python", stub,
                         "--output-dir", "out", *words)

    def figures(self, result):
        """The cells of the rows by step and name."""
        return {(step, what): rest for step, what, *rest in rows_of(result.stdout)[2:]}

    def test_all_steps(self):
        result = self.several("--rounds", "2")
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)  # nccl is wrong
        figures = self.figures(result)
        self.assertEqual({step for step, _ in figures}, set(self.STEPS))
        self.assertIn("compare_4x_h200.md", os.listdir(self.path("out")))
        self.assertEqual({name for name in os.listdir(self.path("out")) if ".json" in name}, set(
            f"{name}_4x_h200.json" for name in
            ["choices", "compare", "decode", "failures", "random", "ring_1m",
             "strong_128k", "two_nodes"]))
        for timed in ("forward", "backward"):
            self.assertIn(("compare", f"64/8 causal 8k, {timed}, × best peer"), figures)
        self.assertEqual(figures["decode", "1,1,1M,64,8,128, share of 4 × one GPU's rate"],
                         ["1", "≥ 0.8", "yes"])
        self.assertEqual(figures["two_nodes", "double_ring ÷ ring, bytes between nodes"],
                         ["0.667", "≤ 0.667", "yes"])
        self.assertEqual(figures["random", "verify --random 200, nccl: right"],
                         ["0", "≥ 1", "**no**"])
        self.assertEqual(figures["choices", "64/8 causal 8k, auto ÷ best by hand"],
                         ["1", "≤ 1.03", "yes"])
        self.assertEqual(len(json.loads(self.read("out", "strong_128k_4x_h200.json"))), 6)
        self.assertNotIn(self.directory, self.read("out", "compare_4x_h200.json"))

    def test_a_failed_step_keeps_no_other_from_running(self):
        result = self.several("--steps", "decode,random,million", broken="--once")
        self.assertEqual(result.returncode, 3, result.stdout + result.stderr)
        self.assertIn("- million: `exit code 3: error: broken`", result.stdout)
        self.assertEqual({step for step, _ in self.figures(result)}, {"decode", "random"})

    def test_a_step_keeps_what_it_has(self):
        shape = "16,1,128k,64,8,128"
        result = self.several("--steps", "decode", broken=shape)
        self.assertEqual(result.returncode, 3, result.stdout + result.stderr)
        self.assertEqual(self.figures(result)["decode", f"{shape}, share of 4 × one GPU's rate"],
                         ["-", "≥ 0.8", "**no**"])
        self.assertEqual(len(json.loads(self.read("out", "decode_4x_h200.json"))), 4)

    def test_a_check_that_was_cut_off_has_no_result(self):
        result = self.several("--steps", "random,failures", "--budget", "1e-9")
        self.assertEqual(result.returncode, 3, result.stdout + result.stderr)
        self.assertEqual({measured for measured, *_ in self.figures(result).values()}, {"-"})
        self.assertEqual(os.listdir(self.path("out")), [])

    def test_a_step_without_time(self):
        result = self.several("--steps", "decode", "--budget", "1e-9")
        self.assertEqual(result.returncode, 3, result.stdout + result.stderr)
        self.assertIn("- decode: `no time left", result.stdout)
        self.assertEqual(os.listdir(self.path("out")), [])

    def test_dry_run(self):
        for words in ([], ["--gpus", "2"], ["--gpus", "8"], ["--device", "cpu", "--small"]):
            with self.subTest(words):
                result = self.expect_success(self.several("--dry-run", *words))
                lines = result.stdout.splitlines()
                steps = [line.split()[1].rstrip(":") for line in lines if line.startswith("# ")]
                self.assertEqual(steps, [*self.STEPS, "all"])
                self.assertLess(float(lines[-1].split()[2]), 600)
                self.assertFalse(os.path.exists(self.path("out")))
        two = self.several("--dry-run", "--gpus", "2", "--steps", "two_nodes").stdout
        self.assertIn("--share-gpus", two)

    def test_bad_values_name_the_option(self):
        for option, value in [("--steps", "compare,backwards"), ("--gpus", "3"),
                              ("--annulus", self.path("missing")), ("--python", "missing"),
                          ("--mpirun", "missing --bind-to none"), ("--rounds", "0"),
                          ("--budget", "nan"), ("--budget", "-1"),
                          ("--output-dir", __file__)]:
            result = self.several(option, value)
            self.assertEqual(result.returncode, 2)
            self.assertIn(f"argument {option}: ", result.stderr)


class Gradients(CompareTest):
    @unittest.skipUnless(importlib.util.find_spec("numpy"), "needs NumPy")
    def test_exact_ones_have_no_error(self):
        import numpy as np

        from comparison import gradients
        from peers import gradient_files

        case = Case(4, 2, True, 6, 8)
        gradients.write_operands(self.directory, case, 2)
        operands = gradient_files.read_operands(self.directory)
        self.assertEqual(operands["key"].shape, (2, 6, 2, 8))
        exact = gradients.exact_gradients(case, operands)

        def loss(changed):
            total = 0.0
            for b, n, row in np.ndindex(2, 4, 6):
                seen = np.s_[b, :row + 1, n // 2]
                logits = changed["key"][seen] @ changed["query"][b, row, n] / np.sqrt(8)
                weights = np.exp(logits) / np.exp(logits).sum()
                total += weights @ changed["value"][seen] @ changed["grad_output"][b, row, n]
            return total

        for name, gradient in zip(("query", "key", "value"), exact):
            for at in [(0, 0, 0, 0), (1, 3, 1, 5), (1, 5, 0, 7)]:
                ends = []
                for step in (1e-5, -1e-5):
                    changed = {key: one.astype(np.float64) for key, one in operands.items()}
                    changed[name][at] += step
                    ends.append(loss(changed))
                self.assertAlmostEqual(gradient[at], (ends[0] - ends[1]) / 2e-5, places=7)
        self.assertEqual(gradients.errors(exact, exact), [0, 0, 0])
        self.assertAlmostEqual(gradients.errors([1.01 * one for one in exact], exact)[0], 0.01)

    def test_errors_are_shown_beside_ours_on_one_rank(self):
        found = recorded()
        found.gradients = {"case": "8/2:causal:4096", "entries": [
            {"series": "annulus", "ranks": 1, "errors": [1e-3, 2e-3, 1e-3]},
            {"series": "annulus", "ranks": 8, "errors": [1e-3, 2.2e-3, 1e-3]},
            {"series": "jax-ring", "ranks": 2, "error": "exit code 1"}]}
        text = table.markdown(found)
        rows = [line for line in text.splitlines() if "e-03" in line]
        self.assertTrue(rows[1].endswith("| 8 | 1.00e-03 | 2.20e-03 | 1.00e-03 | 1.10 |"), rows)
        self.assertIn("- JAX ring, 2 ranks: `exit code 1`", text)


class Predictions(CompareTest):
    def test_passes_of_a_report_of_bench(self):
        stub = self.stub("#!{python}\nimport json, sys\n"
                         "print(' '.join(sys.argv[1:]), file=sys.stderr)\n"
                         "finish = 4.2 if '--backward' in sys.argv else 3.0\n"
                         "print(json.dumps({{'predicted_ms': {{'finish': finish}}}}))\n")
        report = self.path("bench.json")
        with open(report, "w", encoding="utf-8") as file:
            json.dump([{"schema": "annulus.bench", "rows": [{
                "shape": "1,8192,8192,64,8,128,128", "mask": "causal", "layout": "zigzag",
                "transport": "peer", "ranks": 2, "schedule": "allgather", "impl": "flash_attn2",
                "options": "--device=cuda --causal=true --window=64,0 --cu-seqlens=in/ends.npy "
                           "--iters=3 --backward=true",
                "time": 2.0, "backward schedule": "ring", "backward impl": "sdpa",
                "backward": 4.0}]}], file)
        result = self.expect_success(self.tool("predictions", report, "--annulus", stub))
        forward, backward = cells(result.stdout, 0), cells(result.stdout, 1)
        self.assertEqual(forward["predicted ÷ measured"], "1.500")
        self.assertEqual(backward["predicted ÷ measured"], "1.050")
        self.assertEqual(backward["case"], "64/8 D=128 causal 8k, backward")
        self.assertEqual(backward["schedule"], "ring")
        self.assertIn("1 of 2 within 10%", result.stdout)
        planned = result.stderr.splitlines()
        ends = os.path.join(os.path.dirname(report), "ends.npy")
        problem = ("--shape 1,8192,8192,64,8,128,128 --sequence-layout zigzag --causal=true "
                   f"--window=64,0 --cu-seqlens={ends} --transport peer")
        self.assertTrue(planned[0].endswith(
            f"--schedule allgather {problem} --impl flash_attn2 --json -"), planned[0])
        self.assertTrue(planned[1].endswith(
            f"--schedule ring {problem} --backward --impl sdpa --json -"), planned[1])
        only = self.tool("predictions", report, "--annulus", stub, "--pass", "backward")
        self.assertIn("1 of 1 within 10%", only.stdout)
        self.assertEqual(cells(only.stdout, 0)["schedule"], "ring")


class Options(CompareTest):
    def test_bad_values_name_the_option(self):
        for option, value in [("--seq", "8x"), ("--seq", "0"), ("--seq", "8191"),
                              ("--heads", "64"), ("--heads", "8/3"), ("--masks", "half"),
                              ("--cases", "64/8:causal"), ("--cases", "64/8:none:8k"),
                              ("--cases", "64/8/0:causal:8k"), ("--gradients", "8/2:causal"),
                              ("--rounds", "0"), ("--gpus", "-1"), ("--iters", "many")]:
            with self.subTest(f"{option} {value}"):
                result = self.compare("--dry-run", f"{option}={value}")
                self.assertEqual(result.returncode, 2)
                self.assertIn(f"argument {option}: got ", result.stderr)

    def test_unknown_option(self):
        result = self.compare("--round", "2", "--dry")
        self.assertEqual(result.returncode, 2)
        self.assertIn("--round", result.stderr)


class PeerPrograms(CompareTest):
    def test_they_are_python(self):
        for name in ["gradient_files.py", "peer_cases.py", "pytorch_context_parallel.py",
                     "jax_ring.py"]:
            with open(os.path.join(BENCHMARKS, "peers", name), encoding="utf-8") as file:
                compile(file.read(), name, "exec")


if __name__ == "__main__":
    unittest.main(verbosity=2)
