"""The gradients of annulus run, against an independent NumPy computation."""

import os

import numpy as np

from cli_support import OPERANDS, OUTPUT, CliTest, main

GIVEN = ["--grad-output", "grad_output.npy"]
WANTED = ["--grad-query", "dq.npy", "--grad-key", "dk.npy", "--grad-value", "dv.npy"]


class GradientTest(CliTest):
    def setUp(self):
        super().setUp()
        random = np.random.default_rng(5)
        shapes = {"query": (2, 61, 4, 16), "key": (2, 61, 2, 16), "value": (2, 61, 2, 8),
                  "grad_output": (2, 61, 4, 8), "grad_lse": (2, 4, 61)}
        self.tensors = {name: random.standard_normal(shape, dtype=np.float32)
                        for name, shape in shapes.items()}
        for name, tensor in self.tensors.items():
            np.save(self.path(name + ".npy"), tensor)


class Numbers(GradientTest):
    def check_gradients(self, *options, ranks=None, more=()):
        """Runs with options that say how, and `more` that the checker gets too."""
        words = [*OPERANDS, *OUTPUT, *GIVEN, *WANTED, "--causal", *more]
        result = self.succeed("run", *words, *options, ranks=ranks)
        self.assertIn("# pass: the table is of the forward pass", result.stdout)
        self.assertRegex(result.stdout, r"# backward: \w+ by \w+, [\d.]+ ms, [\d.]+ GFLOP/s, "
                                        r"[\d.]+ MiB moved, [\d.]+ ms waiting")
        code, output = self.checked(*words)
        self.assertEqual(code, 0, output)
        for name in ("query", "key", "value"):
            self.assertRegex(output, rf"grad_{name} +share of its bound 0\.\d+  ok")

    def test_one_rank_without_mpirun(self):
        self.check_gradients()

    def test_stripes_over_batch_and_sequence(self):
        self.check_gradients("--mesh", "dp=2,sp=2", "--sequence-layout", "striped", ranks=4,
                             more=["--grad-lse", "grad_lse.npy"])

    def test_sinks_and_bias(self):
        random = np.random.default_rng(6)
        for name, shape in [("sinks", (4, 2)), ("bias", (1, 4, 61, 61))]:
            np.save(self.path(name + ".npy"), random.standard_normal(shape, dtype=np.float32))
        found = []
        for ranks, mesh in [(None, "sp=1"), (4, "dp=1,sp=2,tp=2")]:
            self.check_gradients("--grad-sinks", "ds.npy", "--grad-bias", "db.npy", "--mesh", mesh,
                                 ranks=ranks, more=["--sinks", "sinks.npy", "--bias", "bias.npy"])
            found.append([np.load(self.path(name)) for name in ["ds.npy", "db.npy"]])
        for alone, together in zip(*found):
            self.assertEqual(together.dtype, np.float32)
            self.assertTrue(alone.any())
            np.testing.assert_allclose(together, alone, rtol=1e-4, atol=5e-5)

    def test_the_same_bits_on_any_number_of_ranks(self):
        expected = None
        for ranks in [None, 2, 3, 4, 8]:
            result = self.succeed("run", *OPERANDS, *OUTPUT, "--lse", "lse.npy", *GIVEN, *WANTED,
                                  "--causal", "--reproducible", "world", ranks=ranks)
            for run in ["forward", "backward"]:
                self.assertRegex(result.stdout, f"# reproducible world, {run}: .* ms.* without it")
            found = {name: np.load(self.path(name + ".npy")).tobytes()
                     for name in ["output", "lse", "dq", "dk", "dv"]}
            expected = expected or found
            self.assertEqual(found, expected, f"{ranks} ranks")

    def test_explains_both_passes(self):
        result = self.succeed("run", *OPERANDS, *OUTPUT, *GIVEN, *WANTED, "--explain", ranks=2)
        for line in ["schedule chosen", "implementation chosen", "implementation passed over, sdpa"]:
            self.assertIn(f"# {line}: ", result.stdout)
            self.assertIn(f"# backward {line}: ", result.stdout)

    def test_a_dry_run_counts_the_backward_pass(self):
        words = [*OPERANDS, *GIVEN, *WANTED, "--causal", "--dry-run"]
        forward = self.succeed("run", *words, *OUTPUT, ranks=2).stdout
        self.assertRegex(forward, r"# would run: \w+ by native")
        self.assertRegex(forward, r"# would run backward: \w+ by native")
        self.assertRegex(forward, r"# memory: .*, grad_output .*, grad_query .*, grad_key .*, "
                                  r"grad_value .*, backward buffers ")
        self.save("o.npy", self.random(2, 61, 4, 8, seed=7))
        self.save("lse.npy", self.random(2, 4, 61, seed=8))
        alone = self.succeed("run", *words, "--forward-output", "o.npy", "--forward-lse", "lse.npy",
                             ranks=2).stdout
        self.assertNotIn("# would run:", alone)
        self.assertIn("# would run backward: ", alone)

    def test_verify_says_which_options_have_no_effect(self):
        words = ["verify", "--shape", "1,64,64,4,2,16", "--dtype", "bfloat16", "--backward", "--grad-wire",
                 "bfloat16", "--mesh", "sp=2", "--schedule"]
        for schedule, warned in [("pass_q", True), ("ring", False)]:
            result = self.succeed(*words, schedule, ranks=2)
            self.assertEqual("--grad-wire bfloat16: has no effect" in result.stderr, warned, result.stderr)

    def test_bench_says_once_that_parts_of_gradients_were_rounded(self):
        result = self.succeed("bench", "--shape", "1,64,64,4,2,16", "--sweep", "64:128:2", "--dtype", "bfloat16",
                              "--backward", "--grad-wire", "bfloat16", "--mesh", "sp=2", "--schedule", "ring",
                              "--iters", "1", "--warmup", "0", ranks=2)
        self.assertEqual(result.stdout.count("# gradients: parts of keys and values sent in bfloat16"), 1)

    def test_results_of_the_forward_pass_from_files(self):
        words = [*OPERANDS, "--causal", "--schedule", "ring"]
        wanted = ["dq", "dk", "dv"]
        self.succeed("run", *words, *OUTPUT, "--lse", "lse.npy", *GIVEN, *WANTED, ranks=2)
        whole = {name: np.load(self.path(name + ".npy")) for name in wanted}
        forward = ["--forward-output", "output.npy", "--forward-lse", "lse.npy"]
        result = self.succeed("run", *words, *forward, *GIVEN, *WANTED, ranks=2)
        self.assertIn("# pass: backward", result.stdout)
        for name in wanted:
            np.testing.assert_array_equal(np.load(self.path(name + ".npy")), whole[name])
        # The files are what the gradients come from.
        np.save(self.path("output.npy"), 2 * np.load(self.path("output.npy")))
        self.succeed("run", *words, *forward, *GIVEN, *WANTED, ranks=2)
        self.assertFalse(np.array_equal(np.load(self.path("dq.npy")), whole["dq"]))
        np.testing.assert_array_equal(np.load(self.path("dv.npy")), whole["dv"])

    def test_gradients_in_one_file(self):
        one_file = [word for name in ("query", "key", "value")
                    for word in (f"--grad-{name}", "g.safetensors")]
        words = [*OPERANDS, *OUTPUT, *GIVEN, *one_file, "--causal", "--soft-cap", "3", "--dropout",
                 "0.25"]
        self.succeed("run", *words, ranks=2)
        code, output = self.checked(*words)
        self.assertEqual(code, 0, output)
        with open(self.path("g.safetensors"), "r+b") as file:
            file.seek(-3, os.SEEK_END)  # the exponent of the last number
            file.write(b"\x40\x40\x40")
        self.assertEqual(self.checked(*words)[0], 4)


class BadInput(GradientTest):
    def expect_refused(self, words, *texts, ranks=None):
        self.expect_error(self.annulus("run", *OPERANDS, *OUTPUT, *words, ranks=ranks), 2, *texts)
        for name in ["output", "dq", "dk", "dv"]:
            self.assertFalse(os.path.exists(self.path(name + ".npy")))

    def test_gradient_of_a_bias_that_is_not_there(self):
        self.expect_refused(GIVEN + WANTED + ["--grad-bias", "db.npy"], "--grad-bias db.npy",
                            "there is no bias")

    def test_gradients_that_do_not_fit(self):
        np.save(self.path("grad_output.npy"), self.tensors["query"])
        self.expect_refused(GIVEN + WANTED, "--grad-output grad_output.npy",
                            "shape [2, 61, 4, 16]", "expected [2, 61, 4, 8]", ranks=2)

    def test_forward_results_that_do_not_fit(self):
        forward = ["--forward-output", "grad_output.npy", "--forward-lse", "query.npy"]
        self.expect_error(self.annulus("run", *OPERANDS, *forward, *GIVEN, *WANTED), 2,
                          "--forward-lse query.npy", "shape [2, 61, 4, 16]", "expected [2, 4, 61]")

    def test_what_depends_on_the_number_of_ranks(self):
        for words in [["--schedule", "ring"], ["--sequence-layout", "striped"]]:
            self.expect_refused(GIVEN + WANTED + ["--reproducible", "world", *words],
                                "reproducible world", "are not all 61 in order", ranks=2)


if __name__ == "__main__":
    main()
