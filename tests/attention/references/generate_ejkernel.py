#!/usr/bin/env python3
"""Makes the fixtures cases/ejkernel_* with the XLA platform of ejkernel, on the CPU.

    python3 -m pip install -r requirements.txt      ejkernel 0.0.80.3, jax 0.10.2, jaxlib 0.10.2
    python3 generate_ejkernel.py

ejkernel has what jax.nn lacks: soft cap, segment ids, sinks, values of another dimension, a ring
over devices, decoding from pages. Of these functions only decode_attention returns the LSE.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

# pylint: disable=wrong-import-position
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ejkernel.kernels._xla.attention._xla_impl_fwd import attention as materialised_attention
from ejkernel.kernels._xla.blocksparse_attention import (
    blocksparse_attention as head_major_blocksparse,
)
from ejkernel.kernels._xla.decode_attention import decode_attention
from ejkernel.kernels._xla.flash_attention import flash_attention
from ejkernel.kernels._xla.ring_attention import ring_attention
from ejkernel.ops import FwdParams
from jax.sharding import PartitionSpec

from devices import device_mesh, sharding
from fixture import Shape, generator, operands, save

# A row that sees nothing has the mean of all values.
EMPTY_ROWS = {"empty_rows": "mean"}
Attend = Callable[..., Any]


def simple(case: str, says: str, shape: Shape, attend: Attend, *, dtype: str = "float32",
           options: dict[str, Any] | None = None, tensors: dict[str, np.ndarray] | None = None,
           differs: dict[str, Any] | None = None, **arguments: Any) -> None:
    """A case of one function, which may return the weights as well."""
    inputs = operands(case, shape, dtype)
    output = attend(*map(jnp.asarray, inputs.values()), **arguments)
    save(case, says, f"ejkernel {attend.__name__}, XLA",
         {**inputs, "output": np.asarray(output), **(tensors or {})}, options=options,
         differs=differs)


def attention(query: jax.Array, key: jax.Array, value: jax.Array, **arguments: Any) -> jax.Array:
    """The function that materialises all the weights, as its registered name calls it, but without
    the check of types, which accepts only one-dimensional sinks. By default it computes in
    bfloat16, whatever the operands are."""
    return materialised_attention(query, key, value, dtype=query.dtype, **arguments)[0]


def blocksparse_attention(query: jax.Array, key: jax.Array, value: jax.Array,
                          **arguments: Any) -> jax.Array:
    """ejkernel's wants [B,N,T,D]."""
    by_head = (x.transpose(0, 2, 1, 3) for x in (query, key, value))
    return head_major_blocksparse(*by_head, **arguments).transpose(0, 2, 1, 3)


def segment_ids(case: str, length: int) -> np.ndarray:
    """Three ascending documents and padding at the end, int32 [2,length]."""
    random = generator("segments of " + case)
    ids = np.sort(random.integers(0, 3, (2, length)), axis=1)
    ids[0, -5:] = -1
    return ids.astype(np.int32)


def materialised() -> None:
    """Soft cap and window, by the function that makes all the weights."""
    simple("ejkernel_soft_cap", "Soft cap, causal, values of another dimension",
           Shape(dim=8, value_dim=12), attention, options={"causal": True, "soft-cap": 1.5},
           causal=True, logits_soft_cap=1.5)
    simple("ejkernel_window", "One number for both sides of the window, scale, one key/value head",
           Shape(kv_heads=1), attention, options={"window": [6], "scale": 0.8}, sliding_window=6,
           softmax_scale=0.8)


def blockwise() -> None:
    """The function that goes through key blocks with an online softmax."""
    simple("ejkernel_flash", "Soft cap, window and scale, several key blocks",
           Shape(rows=43, columns=59), flash_attention,
           options={"window": [20, 8], "soft-cap": 2.0, "scale": 0.9},
           sliding_window=(20, 8), logits_soft_cap=2.0, softmax_scale=0.9,
           fwd_params=FwdParams(q_blocksize=16, kv_blocksize=16))
    queries, keys = segment_ids("flash queries", 43), segment_ids("flash keys", 59)
    simple("ejkernel_flash_segments", "Segment ids with padding", Shape(rows=43, columns=59),
           flash_attention, differs=EMPTY_ROWS,
           tensors={"q_segments": queries, "kv_segments": keys},
           q_segment_ids=jnp.asarray(queries), kv_segment_ids=jnp.asarray(keys))
    simple("ejkernel_flash_bfloat16", "Causal and soft cap in bfloat16, several key blocks",
           Shape(dim=16), flash_attention, dtype="bfloat16",
           options={"causal": True, "soft-cap": 4.0}, causal=True, logits_soft_cap=4.0,
           fwd_params=FwdParams(q_blocksize=16, kv_blocksize=16))


def blocksparse() -> None:
    """The function for packed documents. Rows that see nothing are 0."""
    ids = segment_ids("blocksparse", 43)
    simple("ejkernel_blocksparse", "Causal, window, soft cap and segments; padded rows are 0",
           Shape(), blocksparse_attention,
           options={"causal": True, "window": [12, 3], "soft-cap": 2.5},
           tensors={"q_segments": ids, "kv_segments": ids}, causal=True, sliding_window=(12, 3),
           logits_soft_cap=2.5, q_segment_ids=jnp.asarray(ids), kv_segment_ids=jnp.asarray(ids))


def decoding() -> None:
    """One query of each of four sequences against pages of keys that lie in no order; with LSE."""
    case, page = "ejkernel_decode", 4
    shape = Shape(batch=4, rows=1, columns=64)
    tensors = operands(case, shape)
    lengths = np.array([64, 0, 37, 1], np.int32)
    pages = generator("pages").permutation(4 * 64 // page).reshape(4, -1).astype(np.int32)
    buffers = []
    for name in ("key", "value"):
        buffer = np.empty((4 * 64 // page, page, *tensors[name].shape[2:]), np.float32)
        buffer[pages] = tensors[name].reshape(4, -1, page, *tensors[name].shape[2:])
        buffers.append(jnp.asarray(buffer.reshape(-1, *buffer.shape[2:])))
    output, lse = decode_attention(jnp.asarray(tensors["query"][:, 0]), *buffers,
                                   jnp.asarray(pages), jnp.asarray(lengths), page_size=page,
                                   logits_soft_cap=3.0)
    save(case, "Decoding from pages, soft cap, lengths; a sequence without keys has 0 and −∞",
         "ejkernel decode_attention, XLA",
         {**tensors, "kv_lengths": lengths, "output": np.asarray(output)[:, None],
          "lse": np.asarray(lse)[..., None]}, options={"soft-cap": 3.0})


def ring(case: str, says: str, shape: Shape, *, dtype: str = "float32",
         options: dict[str, Any] | None = None, segments: np.ndarray | None = None,
         tensors: dict[str, np.ndarray] | None = None, **arguments: Any) -> None:
    """A case of ring_attention over 8 devices. It has no grouped heads."""
    mesh, spec = device_mesh(sp=8), PartitionSpec(None, "sp", None, None)
    inputs = operands(case, shape, dtype)
    shards, specs = [jnp.asarray(x) for x in inputs.values()], [spec] * 3
    extra = dict(tensors or {})
    if segments is not None:
        shards.append(jnp.asarray(segments))
        specs.append(PartitionSpec(None, "sp"))
        extra.update(q_segments=segments, kv_segments=segments)

    def body(query: jax.Array, key: jax.Array, value: jax.Array, *ids: jax.Array) -> jax.Array:
        for name in ("q_segment_ids", "kv_segment_ids") if ids else ():
            arguments[name] = ids[0]
        return ring_attention(query, key, value, axis_name="sp", **arguments)

    # Its scan carries values that vary by device from constants that do not: no check of that.
    output = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=tuple(specs), out_specs=spec,
                                   check_vma=False))(*shards)
    save(case, says, "ejkernel ring_attention under jax.shard_map, 8 devices, XLA",
         {**inputs, **extra, "output": np.asarray(output)}, options=options,
         sharding=sharding(mesh, {"query": spec, "key": spec}, inputs))


def rings() -> None:
    """Key/value blocks are sent from device to device. Rows that see nothing are 0."""
    shape = Shape(rows=48, heads=3, kv_heads=3)
    ring("ejkernel_ring", "Causal, soft cap and scale", shape,
         options={"causal": True, "soft-cap": 2.0, "scale": 0.6}, causal=True,
         logits_soft_cap=2.0, softmax_scale=0.6)
    ring("ejkernel_ring_segments", "Causal and segment ids; padded rows are 0", shape,
         options={"causal": True}, segments=segment_ids("ring", 48), causal=True)
    ring("ejkernel_ring_window_bfloat16", "A window over several devices",
         Shape(rows=64, heads=2, kv_heads=2, dim=16), dtype="bfloat16",
         options={"window": [11, 5]}, sliding_window=(11, 5))
    simple("ejkernel_ring_single_keys", "Causal in blocks of one key, the edges of which get lost",
           Shape(heads=3, kv_heads=3), ring_attention, options={"causal": True},
           differs={"says": "In blocks of one key, as for a prime length above 512, the causal "
                            "test drops the diagonal's blocks: no row sees its own position.",
                    "equals_with": {"options": {"causal-offset": -1}}},
           causal=True, chunk_size=1)


def sinks() -> None:
    """Logits that have no value."""
    shape = Shape()
    random = generator("sinks")
    three = random.standard_normal(3).astype(np.float32)
    causal: dict[str, Any] = {"options": {"causal": True}, "causal": True,
                              "softmax_aux": jnp.asarray(three)}
    simple("ejkernel_sinks", "Three sinks for all heads", shape, attention,
           tensors={"sinks": three}, **causal)
    by_head = random.standard_normal((4, 2)).astype(np.float32)
    simple("ejkernel_sinks_by_head", "Two sinks for each head, soft cap", shape,
           attention, options={"soft-cap": 1.5}, tensors={"sinks": by_head},
           logits_soft_cap=1.5, softmax_aux=jnp.asarray(by_head))
    four = random.standard_normal(4).astype(np.float32)
    simple("ejkernel_sinks_as_many_as_heads", "Four sinks for all heads", shape, attention,
           tensors={"sinks": four, "sinks_as_taken": four[:, None]},
           differs={"says": "As many sinks as heads are taken for one sink of each head.",
                    "equals_with": {"tensors": {"sinks": "sinks_as_taken"}}},
           softmax_aux=jnp.asarray(four))
    simple("ejkernel_flash_sinks", "Three sinks for all heads, one key block", shape,
           flash_attention, tensors={"sinks": three}, **causal)
    simple("ejkernel_flash_sinks_by_block", "Three sinks for all heads, three key blocks", shape,
           flash_attention,
           tensors={"sinks": three, "sinks_as_taken": (three + np.log(3)).astype(np.float32)},
           differs={"says": "The sinks are counted once for each of the three key blocks.",
                    "equals_with": {"tensors": {"sinks": "sinks_as_taken"}}},
           fwd_params=FwdParams(q_blocksize=16, kv_blocksize=16), **causal)
    ids = segment_ids("sinks", 43)
    simple("ejkernel_blocksparse_sinks", "Rows of padding see nothing but the sinks: they are 0",
           shape, blocksparse_attention,
           tensors={"sinks": three, "q_segments": ids, "kv_segments": ids},
           q_segment_ids=jnp.asarray(ids), kv_segment_ids=jnp.asarray(ids), **causal)
    ring("ejkernel_ring_sinks", "Three sinks for all heads, counted once over 8 devices",
         Shape(rows=48, heads=3, kv_heads=3), tensors={"sinks": three}, **causal)


def biases() -> None:
    """Where a bias acts."""
    shape = Shape(rows=29, columns=37)
    random = generator("biases")
    bias = random.standard_normal((2, 4, 29, 37)).astype(np.float32)
    mask = random.random((2, 1, 29, 37)) < 0.5
    simple("ejkernel_bias", "Causal, a bias after the soft cap", shape, attention,
           options={"causal": True, "soft-cap": 1.5}, tensors={"bias": bias}, causal=True,
           logits_soft_cap=1.5, bias=jnp.asarray(bias))
    simple("ejkernel_bias_wins", "A bias and a mask", shape, attention,
           tensors={"bias": bias, "mask": mask},
           differs={"says": "The mask is ignored where there is a bias: our policy `bias_wins`.",
                    "equals_with": {"tensors": {"mask": None}}},
           bias=jnp.asarray(bias), attention_mask=jnp.asarray(mask))


def bias_before_cap() -> None:
    """The blockwise function adds the bias before the soft cap."""
    case, shape, cap = "ejkernel_flash_bias_before_cap", Shape(batch=1, rows=29, columns=37), 1.5
    bias = generator("bias before cap").standard_normal((1, 4, 29, 37)).astype(np.float32)
    inputs = operands(case, shape)
    keys = np.repeat(inputs["key"].astype(np.float64), 2, axis=2)
    logits = np.einsum("btnd,bsnd->bnts", inputs["query"], keys) / np.sqrt(shape.dim)
    taken = cap * (np.tanh((logits + bias) / cap) - np.tanh(logits / cap))
    simple(case, "A bias and a soft cap", shape, flash_attention, options={"soft-cap": cap},
           tensors={"bias": bias, "bias_as_taken": taken.astype(np.float32)},
           differs={"says": "The bias is added before the soft cap, not after it.",
                    "equals_with": {"tensors": {"bias": "bias_as_taken"}}},
           bias=jnp.asarray(bias), logits_soft_cap=cap)


def main() -> None:
    """All cases."""
    materialised()
    blockwise()
    blocksparse()
    decoding()
    rings()
    sinks()
    biases()
    bias_before_cap()


if __name__ == "__main__":
    main()
