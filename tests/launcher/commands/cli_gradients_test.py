"""The gradients of annulus run, against an independent NumPy computation."""

import os

import numpy as np

from cli_support import OPERANDS, OUTPUT, CliTest, main

GIVEN = ["--grad-output", "grad_output.npy"]
WANTED = ["--grad-query", "dq.npy", "--grad-key", "dk.npy", "--grad-value", "dv.npy"]


def gradients(query, key, value, grad_output, grad_lse, sinks=None, bias=None):
    """Causal attention, in float64; gradients of the sinks, [N,M] or [M], and the bias come last."""
    group = query.shape[2] // key.shape[2]
    q, g = (x.astype(np.float64).transpose(0, 2, 1, 3) for x in (query, grad_output))
    k, v = (x.astype(np.float64).transpose(0, 2, 1, 3).repeat(group, axis=1) for x in (key, value))
    scale = query.shape[3] ** -0.5
    logits = scale * q @ k.swapaxes(2, 3)
    if bias is not None:
        logits = logits + bias
    hidden = np.arange(k.shape[2]) > np.arange(q.shape[2])[:, None]
    logits[..., hidden] = -np.inf
    if sinks is None:
        sinks = np.full((1, 1), -np.inf)
    of_rows = np.broadcast_to(sinks[None, :, None] if sinks.ndim == 2 else sinks,
                              (*logits.shape[:3], sinks.shape[-1]))
    p = np.exp(np.concatenate([logits, of_rows], -1) - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    p, p_sinks = np.split(p, [logits.shape[-1]], -1)
    delta = ((p @ v) * g).sum(-1) - grad_lse
    of_logits = p * (g @ v.swapaxes(2, 3) - delta[..., None])
    ds = scale * of_logits
    shared = tuple(dim for dim in range(4) if bias is not None and bias.shape[dim] == 1)

    def of_keys(x):
        b, n, s, d = x.shape
        return x.reshape(b, n // group, group, s, d).sum(2).transpose(0, 2, 1, 3)

    return ((ds @ k).transpose(0, 2, 1, 3), of_keys(ds.swapaxes(2, 3) @ q),
            of_keys(p.swapaxes(2, 3) @ g),
            -(p_sinks * delta[..., None]).sum((0, 2) if sinks.ndim == 2 else (0, 1, 2)),
            of_logits.sum(shared, keepdims=True))


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
    def check_gradients(self, *options, ranks=None, with_lse=False):
        more = ["--grad-lse", "grad_lse.npy"] if with_lse else []
        result = self.annulus("run", *OPERANDS, *OUTPUT, *GIVEN, *WANTED, *more, "--causal",
                              *options, ranks=ranks)
        self.expect_success(result)
        self.assertIn("# pass: the table is of the forward pass", result.stdout)
        self.assertRegex(result.stdout, r"# backward: \w+ by \w+, [\d.]+ ms, [\d.]+ GFLOP/s, "
                                        r"[\d.]+ MiB moved, [\d.]+ ms waiting")
        given = dict(self.tensors)
        if not with_lse:
            given["grad_lse"] = np.zeros_like(given["grad_lse"])
        for name, truth in zip(["dq", "dk", "dv"], gradients(**given)):
            found = np.load(self.path(name + ".npy"))
            self.assertEqual(found.dtype, np.float32)
            np.testing.assert_allclose(found, truth, rtol=1e-4, atol=2e-5, err_msg=name)

    def test_one_rank_without_mpirun(self):
        self.check_gradients()

    def test_every_planned_schedule(self):
        for schedule in ["auto", "ring", "double_ring", "allgather", "ulysses", "hybrid"]:
            inner = ["--inner-size", "2"] if schedule == "double_ring" else []
            self.check_gradients("--schedule", schedule, *inner, ranks=4, with_lse=True)

    def test_stripes_over_batch_and_sequence(self):
        self.check_gradients("--mesh", "dp=2,sp=2", "--sequence-layout", "striped", ranks=4)

    def test_sinks_and_bias(self):
        random = np.random.default_rng(6)
        sinks, bias = (random.standard_normal(shape, dtype=np.float32)
                       for shape in [(4, 2), (1, 4, 61, 61)])
        np.save(self.path("sinks.npy"), sinks)
        np.save(self.path("bias.npy"), bias)
        self.expect_success(self.annulus(
            "run", *OPERANDS, *OUTPUT, *GIVEN, *WANTED, "--grad-lse", "grad_lse.npy", "--sinks",
            "sinks.npy", "--grad-sinks", "ds.npy", "--bias", "bias.npy", "--grad-bias", "db.npy",
            "--causal", "--mesh", "dp=1,sp=2,tp=2", ranks=4))
        truths = gradients(**self.tensors, sinks=sinks, bias=bias)
        for name, truth in zip(["dq", "dk", "dv", "ds", "db"], truths):
            found = np.load(self.path(name + ".npy"))
            self.assertEqual(found.dtype, np.float32)
            np.testing.assert_allclose(found, truth, rtol=1e-4, atol=5e-5, err_msg=name)

    def test_the_same_bits_on_any_number_of_ranks(self):
        expected = None
        for ranks in [None, 2, 3, 4, 8]:
            result = self.annulus("run", *OPERANDS, *OUTPUT, "--lse", "lse.npy", *GIVEN, *WANTED,
                                  "--causal", "--reproducible", "world", ranks=ranks)
            self.expect_success(result)
            for run in ["forward", "backward"]:
                self.assertRegex(result.stdout, f"# reproducible world, {run}: .* ms.* without it")
            found = {name: np.load(self.path(name + ".npy")).tobytes()
                     for name in ["output", "lse", "dq", "dk", "dv"]}
            expected = expected or found
            self.assertEqual(found, expected, f"{ranks} ranks")

    def test_results_of_the_forward_pass_from_files(self):
        words = [*OPERANDS, "--causal", "--schedule", "ring"]
        wanted = ["dq", "dk", "dv"]
        self.expect_success(self.annulus("run", *words, *OUTPUT, "--lse", "lse.npy", *GIVEN, *WANTED,
                                         ranks=2))
        whole = {name: np.load(self.path(name + ".npy")) for name in wanted}
        forward = ["--forward-output", "output.npy", "--forward-lse", "lse.npy"]
        result = self.annulus("run", *words, *forward, *GIVEN, *WANTED, ranks=2)
        self.expect_success(result)
        self.assertIn("# pass: backward", result.stdout)
        for name in wanted:
            np.testing.assert_array_equal(np.load(self.path(name + ".npy")), whole[name])
        # The files are what the gradients come from.
        np.save(self.path("output.npy"), 2 * np.load(self.path("output.npy")))
        self.expect_success(self.annulus("run", *words, *forward, *GIVEN, *WANTED, ranks=2))
        self.assertFalse(np.array_equal(np.load(self.path("dq.npy")), whole["dq"]))
        np.testing.assert_array_equal(np.load(self.path("dv.npy")), whole["dv"])

    def test_gradients_in_one_file_that_the_checker_agrees_with(self):
        wanted = [f"--grad-{name}" for name in ("query", "key", "value")]
        one_file = [word for option in wanted for word in (option, "g.safetensors")]
        more = ["--grad-lse", "grad_lse.npy", "--causal", "--soft-cap", "3", "--dropout", "0.25"]
        words = [*OPERANDS, *OUTPUT, *GIVEN, *one_file, *more]
        self.expect_success(self.annulus("run", *words, ranks=2))
        code, output = self.checked(*words)
        self.assertEqual(code, 0, output)
        for name in ("query", "key", "value"):
            self.assertRegex(output, rf"grad_{name} +share of its bound 0\.\d+  ok")
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
