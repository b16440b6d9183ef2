#!/usr/bin/env python3
"""Makes the fixtures gradients/jax_*: gradients that JAX computes on the CPU.

    python3 -m pip install -r requirements.txt
    python3 generate_jax_gradients.py

The cases nn_* are those in which JAX's own tests of jax.nn.dot_product_attention (tests/nn_test.py)
take gradients, with shorter sequences. Soft cap and sinks, which it lacks, and the LSE, whose
gradient it stops, are differentiated in plain jax.numpy, in float64. `grad_output` and `grad_lse`
are the gradients of the loss by output and LSE, `grad_query` and so on those by the operands.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_X64"] = "1"

# pylint: disable=wrong-import-position
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fixture
from fixture import DTYPES, HERE, Shape, generator, operands, positions, save

fixture.CASES = HERE / "gradients"
NN = "jax.vjp of jax.nn.dot_product_attention"
PLAIN = "jax.vjp of attention in jax.numpy, float64"
SHAPE = Shape(rows=24, kv_heads=4)


def upstream(case: str, shape: Shape, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The gradients of the loss by the output [B,T,N,Dv] and the LSE [B,N,T]."""
    random = generator(case + " upstream")
    width = shape.value_dim or shape.dim
    output = random.standard_normal((shape.batch, shape.rows, shape.heads, width))
    lse = random.standard_normal((shape.batch, shape.heads, shape.rows))
    return output.astype(DTYPES[dtype]), lse.astype(np.float32)


def named(gradients: tuple[Any, ...], names: list[str]) -> dict[str, np.ndarray]:
    """The gradients by the tensors of these names; float64 ones are rounded."""
    arrays = {f"grad_{name}": np.asarray(gradient) for name, gradient in zip(names, gradients)}
    return {name: array.astype(np.float32) if array.dtype == np.float64 else array
            for name, array in arrays.items()}


def of_nn(case: str, says: str, shape: Shape = SHAPE, *, dtype: str = "float32",
          options: dict[str, Any] | None = None, tensors: dict[str, np.ndarray] | None = None,
          bias: np.ndarray | None = None, hidden_rows: np.ndarray | None = None,
          **arguments: Any) -> None:
    """A case of jax.nn.dot_product_attention. Rows that see nothing, where JAX means something else,
    are `hidden_rows` [B,T]: their output has no part in the loss."""
    inputs = operands(case, shape, dtype)
    if bias is not None:
        inputs["bias"] = bias
    grad_output, _ = upstream(case, shape, dtype)
    if hidden_rows is not None:
        grad_output[hidden_rows] = 0

    def attend(*args: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(*args, implementation="xla", **arguments)

    output, pullback = jax.vjp(attend, *map(jnp.asarray, inputs.values()))
    gradients = pullback(jnp.asarray(grad_output))
    save(case, says, NN, {**inputs, **(tensors or {}), "output": np.asarray(output),
                          "grad_output": grad_output, **named(gradients, list(inputs))},
         options=options)


def of_plain(case: str, says: str, shape: Shape, *, options: dict[str, Any],
             bias: np.ndarray | None = None, sinks: np.ndarray | None = None,
             soft_cap: float | None = None, seen: np.ndarray | None = None) -> None:
    """A case with soft cap or sinks."""
    inputs = operands(case, shape)
    extra = {name: tensor for name, tensor in (("bias", bias), ("sinks", sinks))
             if tensor is not None}
    grad_output, grad_lse = upstream(case, shape, "float32")
    group = shape.heads // shape.kv_heads

    def attend(tensors: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        key, value = (jnp.repeat(tensors[name], group, axis=2) for name in ("key", "value"))
        logits = jnp.einsum("btnd,bsnd->bnts", tensors["query"], key) / np.sqrt(shape.dim)
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        if bias is not None:
            logits = logits + tensors["bias"]
        if seen is not None:
            logits = jnp.where(seen, logits, -jnp.inf)
        every = logits
        if sinks is not None:
            beside = jnp.broadcast_to(tensors["sinks"], (shape.heads, sinks.shape[-1]))
            beside = jnp.broadcast_to(beside[None, :, None],
                                      (*logits.shape[:3], sinks.shape[-1]))
            every = jnp.concatenate([logits, beside], axis=-1)
        lse = jax.nn.logsumexp(every, axis=-1)
        weights = jnp.exp(logits - lse[..., None])
        return jnp.einsum("bnts,bsnd->btnd", weights, value), lse

    all_inputs = {**inputs, **extra}
    wide = {name: jnp.asarray(tensor, jnp.float64) for name, tensor in all_inputs.items()}
    (output, _), pullback = jax.vjp(attend, wide)
    (gradients,) = pullback((jnp.asarray(grad_output, jnp.float64),
                             jnp.asarray(grad_lse, jnp.float64)))
    save(case, says, PLAIN,
         {**all_inputs, "output": np.asarray(output).astype(np.float32),
          "grad_output": grad_output, "grad_lse": grad_lse,
          **named(tuple(gradients[name] for name in all_inputs), list(all_inputs))},
         options=options)


def grouped_heads() -> None:
    """testDotProductAttention: groups of 1, 2 and 4 query heads, bfloat16 and float16."""
    for group in (1, 2, 4):
        of_nn(f"jax_nn_group_{group}", f"Groups of {group} query heads",
              Shape(rows=24, kv_heads=4 // group))
        for dtype in ("bfloat16", "float16"):
            of_nn(f"jax_nn_group_{group}_{dtype}", f"Groups of {group} query heads",
                  Shape(rows=24, kv_heads=4 // group), dtype=dtype)


def masks() -> None:
    """testDotProductAttentionMask: all its modes."""
    i, j = positions(SHAPE)
    bias = generator("bias").standard_normal((1, 4, 24, 24)).astype(np.float32)
    rows, columns = np.array([12, 6], np.int32), np.array([6, 12], np.int32)
    lengths = {"tensors": {"q_lengths": rows, "kv_lengths": columns},
               "query_seq_lengths": rows, "key_value_seq_lengths": columns,
               "hidden_rows": np.arange(24)[None] >= rows[:, None]}
    custom = (j <= i)[None, None]
    of_nn("jax_nn_bias", "A bias by head", bias=bias)
    of_nn("jax_nn_causal", "Causal", options={"causal": True}, is_causal=True)
    of_nn("jax_nn_padding", "Lengths of queries and keys", **lengths)
    of_nn("jax_nn_custom", "A dense mask", tensors={"mask": custom}, mask=custom)
    of_nn("jax_nn_causal_padding", "Causal with lengths", options={"causal": True},
          is_causal=True, **lengths)
    with_mask = {**lengths, "tensors": {**lengths["tensors"], "mask": custom}}
    of_nn("jax_nn_custom_padding", "A dense mask with lengths", mask=custom, **with_mask)
    of_nn("jax_nn_bias_causal", "A bias, causal", options={"causal": True}, bias=bias,
          is_causal=True)
    of_nn("jax_nn_causal_window", "A window, causal", options={"causal": True, "window": [3, 2]},
          is_causal=True, local_window_size=(3, 2))


def biases() -> None:
    """testDotProductAttentionBiasGradient: a bias of one batch and of several; and broadcast ones."""
    for batch, shape in ((1, (1, 4, 24, 24)), (2, (2, 4, 24, 24)), (2, (2, 1, 1, 24)),
                         (2, (1, 1, 24, 24))):
        bias = generator(f"bias {shape}").standard_normal(shape).astype(np.float32)
        case = "jax_nn_bias_" + "_".join(map(str, shape))
        of_nn(case, "The gradient of a bias " + str(list(shape)),
              Shape(batch=batch, rows=24, kv_heads=2), bias=bias)


def others() -> None:
    """Cases that JAX's tests lack."""
    of_nn("jax_scale", "A scale, more keys than queries, another value head",
          Shape(rows=19, columns=30), options={"causal": True, "causal-offset": 11, "scale": 0.7},
          mask=(positions(Shape(rows=19, columns=30))[1]
                <= positions(Shape(rows=19, columns=30))[0] + 11)[None, None], scale=0.7)
    shape = Shape(rows=17, columns=23, value_dim=5)
    i, j = positions(shape)
    bias = generator("others").standard_normal((2, 4, 1, 23)).astype(np.float32)
    by_head = generator("sinks").standard_normal((4, 2)).astype(np.float32)
    shared = by_head[0]
    of_plain("jax_plain_soft_cap", "A soft cap, causal", shape, soft_cap=1.5, seen=j <= i,
             options={"causal": True, "soft-cap": 1.5})
    of_plain("jax_plain_sinks", "Sinks by head, causal", shape, sinks=by_head, seen=j <= i,
             options={"causal": True})
    of_plain("jax_plain_sinks_shared", "Sinks of all heads, and a bias", shape, sinks=shared,
             bias=bias, options={})
    of_plain("jax_plain_all", "Soft cap, bias, sinks and a window", shape, sinks=by_head,
             bias=bias, soft_cap=2.0, seen=(j <= i + 3) & (j >= i - 9),
             options={"soft-cap": 2.0, "window": [9, 3]})


def main() -> None:
    """All cases."""
    fixture.CASES.mkdir(exist_ok=True)
    grouped_heads()
    masks()
    biases()
    others()


if __name__ == "__main__":
    main()
