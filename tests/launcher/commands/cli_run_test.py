"""annulus run from files to files, against an independent NumPy computation."""

import os

import numpy as np

from cli_support import OPERANDS, OUTPUT, CliTest, as_bfloat16, as_float16, main


class Numbers(CliTest):
    # Operands, the options that decide what is computed, ranks, and the options that decide how.
    CASES = [
        ({"batch": 2, "rows": 97}, "--causal", None, ""),
        ({"rows": 997, "convert": as_float16}, "--causal", 4, "--mesh tp=2,sp=2"),
        ({"batch": 2, "rows": 997}, "--causal", 8, "--mesh dp=2,sp=2,tp=2"),
        ({"rows": 997}, "--causal", 3, "--schedule ring --sequence-layout striped"),
        ({"rows": 97, "columns": 1200}, "--window 1k,-1 --causal-offset 1e2", 2, ""),
        ({"batch": 2, "rows": 997}, "--causal --cu-seqlens cu.npy", 4, "--mesh dp=2,sp=2"),
        ({"rows": 997}, "--causal --cu-seqlens cu.npy", 3,
         "--schedule ring --sequence-layout balanced"),
        ({"rows": 60, "columns": 997}, "--causal --causal-offset bottom-right", 3,
         "--sequence-layout balanced"),
        ({"rows": 97}, "--causal --cu-seqlens cu64.npy --kv-lengths length64.npy", 2, ""),
        ({"batch": 2, "rows": 60, "columns": 45},
         "--q-segments q_segments.npy --kv-segments kv_segments.npy", 3, ""),
        ({"batch": 3, "rows": 97, "columns": 120},
         "--kv-lengths kv_lengths.npy --q-lengths q_lengths.npy", 4, ""),
        ({"batch": 2, "rows": 197, "columns": 120},
         "--causal --causal-offset bottom-right --block-mask blocks.npy --block-size 16,32", 4,
         "--mesh sp=2,tp=2"),
        ({"rows": 301}, "--causal --soft-cap 5 --scale 0.7", 2, ""),
        ({"rows": 301}, "--causal --sinks sinks.npy", 4, "--mesh sp=2,tp=2"),
        ({"batch": 2, "rows": 301, "columns": 410}, "--dropout 0.3 --seed 4294967299", 4,
         "--mesh dp=2,tp=2"),
        ({"batch": 2, "rows": 1, "columns": 997}, "--causal --causal-offset 996", 4, ""),
        ({"rows": 7, "columns": 997}, "", 4, "--query-spec - --kv-spec -,sp"),
        ({"rows": 97, "value_dim": 40}, "--causal", 2, ""),
        ({"batch": 2, "rows": 97, "bhtd": True}, "--causal --layout bhtd", 4, "--mesh sp=2,tp=2"),
        ({"rows": 97, "convert": as_bfloat16}, "--causal", 2, "--dtype bfloat16"),
        # As ml_dtypes writes it.
        ({"rows": 97, "convert": lambda array: as_bfloat16(array).view("V2")}, "--causal", 2,
         "--dtype bfloat16"),
        ({"batch": 3, "rows": 97, "columns": 120}, "--causal --prefix 30", 3, "--sequence-layout zigzag"),
        ({"batch": 3, "rows": 97, "columns": 120},
         "--causal --causal-offset offsets.npy --prefix prefixes.npy", 3, "--sequence-layout zigzag"),
        ({"batch": 3, "rows": 97, "columns": 120},
         "--causal --causal-offset offsets.npy --window 9 --sink-tokens 4", 3, "--sequence-layout zigzag"),
        ({"batch": 3, "rows": 97, "columns": 120}, "--causal --causal-offset bottom-right --chunk 16", 3,
         "--sequence-layout zigzag"),
        ({"batch": 3, "rows": 97, "columns": 120}, "--chunk 32 --prefix prefixes.npy --sink-tokens 7", 3,
         "--sequence-layout zigzag")]

    def test_cases(self):
        random = np.random.default_rng(5)
        arrays = {"cu": [0, 1, 300, 300, 611, 997], "kv_lengths": [120, 0, 33],
                  "q_lengths": [97, 97, 50], "offsets": [-5, 0, 23], "prefixes": [0, 40, 120],
                  "q_segments": random.integers(-1, 3, (2, 60)),
                  "kv_segments": random.integers(-1, 3, (2, 45))}
        for name, array in arrays.items():
            self.save(name + ".npy", np.array(array, np.int32))
        self.save("cu64.npy", np.array([0, 1, 30, 97], np.int64))
        self.save("length64.npy", np.array([90], np.int64))
        self.save("blocks.npy", random.random((4, 13, 4)) < 0.5)
        self.save("sinks.npy", random.normal(size=(4, 2)).astype(np.float32))
        for operands, meaning, ranks, how in self.CASES:
            with self.subTest(meaning, operands=operands, ranks=ranks, how=how):
                self.save_operands(**operands)
                self.check(meaning.split(), ranks=ranks, how=how.split())

    def test_a_rank_without_work_is_not_what_is_reported(self):
        self.save_operands(rows=128)
        report = self.json("run", *OPERANDS, *OUTPUT, "--causal", "--causal-offset", "-64",
                           "--sequence-layout", "contiguous", ranks=2)
        self.assertEqual(report["rows"][0]["impl"], "native")

    def test_two_packings(self):
        self.save_operands(batch=2, rows=97, columns=120)
        self.save("q.npy", np.array([0, 10, 10, 60, 97], np.int32))
        self.save("kv.npy", np.array([0, 40, 50, 80, 120], np.int32))
        packings = ["--cu-seqlens-q", "q.npy", "--cu-seqlens-kv", "kv.npy"]
        for alignment in ["top-left", "bottom-right"]:
            for given in [["--causal"], ["--causal", "--window", "5", "--sink-tokens", "2"],
                          ["--causal", "--chunk", "8", "--prefix", "3"]]:
                with self.subTest(alignment=alignment, given=given):
                    self.check([*packings, *given, "--causal-offset", alignment], ranks=2)

    def save_scores(self, batch, heads, rows, columns):
        """A bias by head, with -inf and a NaN that causal hides, and a mask by batch."""
        random = np.random.default_rng(6)
        bias = random.normal(size=(heads, rows, columns)).astype(np.float32)
        bias[random.random(bias.shape) < 0.1] = -np.inf
        bias[:, 0, 1:] = np.nan
        self.save("bias.npy", bias)
        self.save("mask.npy", random.random((batch, 1, rows, columns)) < 0.8)
        self.save("keys.npy", (random.random((columns,)) < 0.8).astype(np.uint8))

    def test_bias_and_mask(self):
        self.save_operands(batch=2, rows=301)
        self.save_scores(2, 4, 301, 301)
        self.check(["--causal", "--bias", "bias.npy"])
        self.check(["--causal", "--bias", "bias.npy", "--mask", "mask.npy"], ranks=4,
                   how=["--mesh", "dp=2,tp=2"])
        self.check(["--causal", "--bias", "bias.npy", "--mask", "keys.npy", "--soft-cap", "5"],
                   ranks=3, how=["--schedule", "ring", "--sequence-layout", "striped"])
        self.check(["--mask", "mask.npy"], ranks=4, how=["--mesh", "sp=2,tp=2"])

    def test_tensors_of_the_input_file(self):
        tensors = self.save_operands(batch=2, rows=300)
        random = np.random.default_rng(2)
        more = {"block_mask": (random.random((3, 3)) < 0.6).astype(np.uint8),
                "sinks": np.array([0.5, -1, 2], np.float32),
                "kv_lengths": np.array([300, 20], np.int32),
                "bias": random.normal(size=(4, 300, 300)).astype(np.float32),
                "mask": random.random((2, 1, 300, 300)) < 0.8}
        self.save_safetensors("in.safetensors", {**tensors, **more})
        self.check([word for name, array in more.items()
                    for word in ("--" + name.replace("_", "-"), self.save(name + ".npy", array))])
        expected = np.load(self.path("output.npy"))
        self.succeed("run", "--input", "in.safetensors", *OUTPUT, ranks=2)
        np.testing.assert_allclose(np.load(self.path("output.npy")), expected, rtol=0, atol=1e-5)

    def test_output_through_a_link(self):
        self.save_operands()
        os.mkdir(self.path("scratch"))
        os.symlink("scratch/real.npy", self.path("output.npy"))
        self.check(["--causal"], ranks=2)
        self.assertEqual(os.readlink(self.path("output.npy")), "scratch/real.npy")
        self.assertEqual(np.load(self.path("scratch/real.npy")).shape, (1, 64, 4, 16))

    def test_safetensors(self):
        tensors = self.save_operands(rows=97, convert=as_float16)
        given = ["--input", self.save_safetensors("in.safetensors", tensors)]
        both = "out.safetensors"
        self.check(["--causal"], ranks=2, files=[*given, "--output", both, "--lse", both])

    UNNORMALISED = ["--normalize-output", "false"]
    ROWS = ["--maximum", "maximum.npy", "--sum", "sum.npy"]

    def test_unnormalised_outputs(self):
        self.save_operands(batch=2, rows=201, columns=150)
        self.save("sinks.npy", np.array([0.5, -1], np.float32))
        self.save("lengths.npy", np.array([150, 0], np.int32))
        files = [*OPERANDS, *OUTPUT, *self.ROWS]
        self.check(["--causal", *self.UNNORMALISED], files=files)
        maximum, total = (np.load(self.path(f"{name}.npy")) for name in ["maximum", "sum"])
        self.assertEqual((maximum.shape, maximum.dtype), ((2, 4, 201), np.float32))
        self.assertTrue(np.all(total >= 1))
        for schedule in ["ring", "allgather"]:
            self.check(["--kv-lengths", "lengths.npy", *self.UNNORMALISED], ranks=3, files=files,
                       how=["--schedule", schedule])
            self.assertTrue(np.all(np.load(self.path("maximum.npy"))[1] == -np.inf))
            self.assertTrue(np.all(np.load(self.path("sum.npy"))[1] == 0))
            self.assertTrue(np.all(np.load(self.path("output.npy"))[1] == 0))
            self.check(["--causal", "--sinks", "sinks.npy", "--dropout", "0.2", "--seed", "4",
                        *self.UNNORMALISED], ranks=4, files=files,
                       how=["--mesh", "dp=2,sp=2", "--schedule", schedule])
        self.check(["--causal", *self.UNNORMALISED], ranks=2, files=files, how=["--impl", "vanilla"])

    def test_unnormalised_outputs_in_one_safetensors_file(self):
        self.save_operands(rows=97, convert=as_float16)
        both = "out.safetensors"
        self.check(["--causal", *self.UNNORMALISED], ranks=2,
                   files=[*OPERANDS, "--output", both, "--maximum", both, "--sum", both])

    def test_a_wrong_maximum_or_sum_is_found(self):
        self.save_operands(rows=30)
        files = [*OPERANDS, *OUTPUT, *self.ROWS, *self.UNNORMALISED]
        self.succeed("run", *files)
        for name in ["maximum", "sum", "output"]:
            right = np.load(self.path(f"{name}.npy"))
            self.save(f"{name}.npy", right * np.float32(1.01))
            self.assertEqual(self.checked(*files)[0], 4, name)
            self.save(f"{name}.npy", right)

    def test_nothing_to_see(self):
        self.save_operands(rows=5, columns=0)
        self.succeed("run", *OPERANDS, *OUTPUT, "--lse", "lse.npy", ranks=2)
        self.assertTrue(np.all(np.load(self.path("output.npy")) == 0))
        self.assertTrue(np.all(np.load(self.path("lse.npy")) == -np.inf))

    def test_no_queries(self):
        self.save_operands(rows=0, columns=5)
        self.succeed("run", *OPERANDS, *OUTPUT, ranks=2)
        self.assertEqual(np.load(self.path("output.npy")).shape, (1, 0, 4, 16))


class Weights(CliTest):
    """Attention weights and float64, which only vanilla computes."""

    def expected(self, query, key, value, scale):
        key, value = (np.repeat(array, query.shape[2] // array.shape[2], axis=2)
                      for array in (key, value))
        logits = np.einsum("btnd,bsnd->bnts", query, key) * scale
        logits[..., np.triu(np.ones(logits.shape[2:], bool), 1)] = -np.inf
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return weights, np.einsum("bnts,bsnd->btnd", weights, value)

    def test_weights(self):
        operands = self.save_operands(rows=33)
        weights, output = self.expected(*(array.astype(np.float64) for array in operands.values()),
                                        scale=0.25)
        for ranks, mesh in [(None, "sp=1"), (4, "tp=2,sp=2"), (3, "sp=3")]:
            report = self.json("run", *OPERANDS, *OUTPUT, "--weights", "weights.npy", "--mesh", mesh,
                               "--causal", ranks=ranks)
            self.assertEqual(report["rows"][0]["impl"], "vanilla")
            found = np.load(self.path("weights.npy"))
            self.assertEqual(found.dtype, np.float32)
            self.assertLess(np.abs(found - weights).max(), 1e-6)
            self.assertLess(np.abs(np.load(self.path("output.npy")) - output).max(), 2e-6)

    def test_float64(self):
        operands = self.save_operands(rows=33, convert=lambda array: array.astype(np.float64) / 3)
        weights, output = self.expected(*operands.values(), scale=0.25)
        for schedule in ["ring", "allgather"]:
            result = self.succeed("run", *OPERANDS, *OUTPUT, "--weights", "weights.npy", "--causal",
                                  "--schedule", schedule, ranks=3)
            for name, truth in [("weights.npy", weights), ("output.npy", output)]:
                found = np.load(self.path(name))
                self.assertEqual(found.dtype, np.float64)
                self.assertLess(np.abs(found - truth).max(), 1e-14)
        self.check(["--causal"], ranks=3, how=["--dtype", "float64"])
        result = self.annulus("run", *OPERANDS, *OUTPUT, "--impl", "native")
        self.expect_error(result, 2, "--impl native", "does not honour float64")

    def test_float64_softmax(self):
        operands = self.save_operands(rows=33)
        weights, _ = self.expected(*(array.astype(np.float64) for array in operands.values()),
                                   scale=0.25)
        result = self.succeed("run", *OPERANDS, *OUTPUT, "--weights", "weights.npy", "--softmax-dtype",
                              "float64", "--causal", ranks=2)
        found = np.load(self.path("weights.npy"))
        self.assertEqual(found.dtype, np.float64)
        self.assertLess(np.abs(found - weights).max(), 1e-14)
        self.assertEqual(np.load(self.path("output.npy")).dtype, np.float32)


class BadInput(CliTest):
    def expect_refused(self, *texts, words=(), ranks=2):
        result = self.annulus("run", *OPERANDS, *OUTPUT, "--lse", "lse.npy", *words, ranks=ranks)
        self.expect_error(result, 2, *texts)
        self.expect_no_files("output.npy", "lse.npy")

    def test_missing_file(self):
        self.save_operands()
        os.remove(self.path("key.npy"))
        self.expect_refused("key.npy")

    def test_damaged_file(self):
        self.save_operands()
        with open(self.path("value.npy"), "r+b") as file:
            file.truncate(200)
        self.expect_refused("value.npy")

    def test_heads_and_positions_that_look_swapped(self):
        self.save_operands(rows=100, heads=4, kv_heads=4, bhtd=True)
        result = self.succeed("run", *OPERANDS, *OUTPUT, "--layout", "bthd")
        self.assertIn("annulus: warning: 100 heads and 4 positions of query look swapped: files of "
                      "[B,N,T,D] need --layout bhtd", result.stderr)


if __name__ == "__main__":
    main()
