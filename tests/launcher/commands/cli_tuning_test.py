"""--tuning: what is measured once is known at the next start, and a lost cache changes no result."""

import json
import os

from cli_support import OPERANDS, OUTPUT, CliTest, main

RANKS = 2
RUN = ["run", *OPERANDS, *OUTPUT, "--lse", "lse.npy", "--causal", "--threads", "1"]
CACHE = ["--tuning-cache", "tuning.json"]
MEASURE = ["--tuning", "measure", *CACHE]


class Tuning(CliTest):
    def setUp(self):
        super().setUp()
        self.save_operands(rows=256)

    def run_it(self, *words, environment=None, ranks=RANKS):
        """The lines of --explain, by key, and the bytes of the results."""
        result = self.succeed(*RUN, *words, "--explain", "--json", "report.json", ranks=ranks,
                              environment={"HOME": self.directory, "XDG_CACHE_HOME": "",
                              **(environment or {})})
        meta = self.load_json("report.json")["meta"]
        results = b"".join(self.read(name) for name in ["output.npy", "lse.npy"])
        return meta, results, result.stderr

    def test_the_second_start_tunes_nothing(self):
        meta, _, errors = self.run_it(*MEASURE)
        self.assertRegex(meta["choice made by"],
                         r"^measurement: timed \d+ of \d+ candidates in .* s, kept in tuning.json: ")
        self.assertIn("is not there", meta["choice not made by cache in file"])
        self.assertGreater(sum("predicted" in text for key, text in meta.items()
                               if key.startswith("candidate of the measurement, ")), 1)
        self.assertNotIn("warning", errors)
        [entry] = self.load_json("tuning.json")["entries"]
        self.assertEqual(entry["key"]["shape"], "B=1 T=256 S=256 N=4 K=2 D=16 Dv=16")
        self.assertEqual(entry["key"]["mesh"], "sp=2")
        kept = self.read("tuning.json")
        for policy in ["measure", "cached"]:
            meta, _, errors = self.run_it("--tuning", policy, *CACHE)
            self.assertRegex(meta["choice made by"],
                             r"^cache in file: tuning.json, tuned on 20\d\d-\d\d-\d\dT.*Z: schedule ")
            self.assertEqual(self.read("tuning.json"), kept)
            self.assertNotIn("warning", errors)

    def test_off_is_the_default_and_knows_no_file(self):
        meta, defaults, _ = self.run_it()
        self.assertEqual(meta["choice made by"], "heuristics: tuning is off")
        self.assertFalse(os.path.exists(self.path(".cache")))
        self.run_it(*MEASURE)
        self.choose_another()
        # Without --tuning, a cache that the environment names has no effect.
        meta, results, _ = self.run_it(environment={"ANNULUS_TUNING_CACHE": "tuning.json"})
        self.assertEqual(meta["choice made by"], "heuristics: tuning is off")
        self.assertEqual(results, defaults)

    def choose_another(self):
        """A cache that chooses what heuristics do not."""
        cache = self.load_json("tuning.json")
        for entry in cache["entries"]:
            used = entry["choice"]["schedule"]
            entry["choice"] = {"schedule": "allgather" if used != "allgather" else "ring"}
        self.write("tuning.json", json.dumps(cache).encode())

    def test_outputs_are_checked_before_anything_is_measured(self):
        for option in ["--output", "--lse", "--trace", "--json", "--csv"]:
            with self.subTest(option):
                files = {"--output": "output.npy", option: "nowhere/file.npy"}
                words = [word for item in files.items() for word in item]
                result = self.annulus("run", *OPERANDS, *words, *MEASURE, ranks=RANKS)
                self.expect_error(result, 2, option + " nowhere/file.npy: cannot be written")
                self.expect_no_files("output.npy", "tuning.json")

    def test_bench_and_verify_tune_too(self):
        shape = ["--shape", "1,128,128,4,2,16", *MEASURE, "--explain", "--threads", "1"]
        for command in [["bench", "--iters", "2"], ["verify"]]:
            result = self.succeed(*command, *shape, ranks=RANKS)
            self.assertIn("choice made by: ", result.stdout)
        self.assertIn("cache in file", result.stdout)

    def test_random_problems_are_right_when_they_are_tuned(self):
        self.succeed("verify", "--random", "12", "--seed", "3", *MEASURE, ranks=RANKS)


if __name__ == "__main__":
    main()
