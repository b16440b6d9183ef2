"""scripts/annulus_picture: what it reads from files and commands, and, where Matplotlib is, pictures."""

import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest

SCRIPT = sys.argv.pop(1)
loader = importlib.machinery.SourceFileLoader("annulus_picture", SCRIPT)
picture = importlib.util.module_from_spec(importlib.util.spec_from_loader("annulus_picture", loader))
loader.exec_module(picture)


def span(rank, kind, begin, length):
    return {"ph": "X", "pid": rank, "cat": kind, "ts": begin, "dur": length}


TRACE = {"otherData": {"schedule": "ring"},
         "traceEvents": [span(0, "call", 0, 9), span(0, "kernel", 0, 4), span(0, "merge", 4, 1),
                         span(0, "other", 5, 1), span(1, "transfer", 1, 2), span(1, "wait", 1, 2),
                         {"ph": "s", "pid": 0, "cat": "transfer", "ts": 3}]}
REPORT = {"schema": "annulus.plan.scaling", "meta": {"problem": "a problem"},
          "rows": [{"scaling": scaling, "ranks": ranks, "time": 8 / ranks, "rate": rate}
                   for scaling, rate in (("strong", 2), ("weak", None)) for ranks in (1, 2, 4)]}


class AnnulusPicture(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.directory = holder.name

    def path(self, name, content=None):
        path = os.path.join(self.directory, name)
        if content is not None:
            with open(path, "w") as file:
                json.dump(content, file)
        return path

    def draw(self, *words, **variables):
        return subprocess.run([SCRIPT, *words], capture_output=True, text=True, check=False,
                              env=os.environ | variables)

    def test_spans_are_those_of_ranks_by_kind(self):
        ranks = picture.timeline_of(TRACE)
        found = {(rank, name): [x for span in spans for x in span]
                 for rank, kinds in ranks.items() for (name, _), spans in kinds.items()}
        self.assertEqual(found, {(0, "kernels"): [0, 4], (0, "copies and reductions"): [4, 1, 5, 1],
                                 (1, "messages moving"): [1, 2], (1, "waiting for messages"): [1, 2]})

    def test_curves_leave_out_what_has_no_value(self):
        self.assertEqual(picture.curves_of(REPORT, "time")["weak"], [(1, 8), (2, 4), (4, 2)])
        self.assertEqual(picture.curves_of(REPORT, "rate"), {"strong": [(1, 2), (2, 2), (4, 2)], "weak": []})

    def test_a_command_writes_the_file_that_is_drawn(self):
        write = "import sys; open(sys.argv[-1], 'w').write(sys.argv[-2])"
        for words, option in [(["--simulate"], "--trace"), (["--scaling"], "--json")]:
            with open(picture.written_by([sys.executable, "-c", write, *words], self.directory)) as file:
                self.assertEqual(file.read(), option)
        self.assertEqual(self.draw("p.svg", sys.executable, "-c", "exit(3)").returncode, 3)

    def test_bad_input_is_named(self):
        for words in [[], ["p.svg"], ["p.svg", self.path("none.json")], ["p.svg", self.path("a.json", {})]]:
            self.assertEqual(self.draw(*words).returncode, 2, words)
        self.assertIn("none.json", self.draw("p.svg", self.path("none.json")).stderr)

    def test_the_message_without_matplotlib_says_how_to_install_it(self):
        with open(self.path("matplotlib.py"), "w") as file:
            file.write("raise ImportError('not here')")
        found = self.draw("p.svg", self.path("in.json", TRACE), PYTHONPATH=self.directory)
        self.assertEqual(found.returncode, 2)
        self.assertIn("pip install matplotlib", found.stderr)

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "no Matplotlib")
    def test_pictures(self):
        empty = {**REPORT, "rows": [{**row, "time": None, "rate": None} for row in REPORT["rows"]]}
        for content in [TRACE, REPORT, empty]:
            target = self.path("p.svg")
            result = self.draw(target, self.path("in.json", content))
            self.assertEqual(result.returncode, 0, result.stderr)
            with open(target) as file:
                self.assertIn("</svg>", file.read())
            os.remove(target)


if __name__ == "__main__":
    unittest.main(argv=sys.argv, verbosity=2)
