#!/usr/bin/env python3
"""Makes the fixtures cases/jax_* with jax.nn.dot_product_attention, XLA on the CPU.

    python3 -m pip install -r requirements.txt      jax 0.10.2, jaxlib 0.10.2, numpy 2.4.6
    python3 generate_jax.py

JAX knows causal (top-left), window, lengths, dense mask, bias, scale, grouped heads and LSE.
Offsets, segments, packed documents and block masks are passed to it as equivalent dense
masks, made here from docs/semantics.md; it has no soft cap and no sinks (see generate_ejkernel.py).
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

# pylint: disable=wrong-import-position
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from devices import device_mesh, sharding
from fixture import Shape, generator, operands, positions, save

REFERENCE = "jax.nn.dot_product_attention"
# A row that sees nothing has the mean of all values, and −0.7 × the largest float32 as its LSE.
EMPTY_ROWS = {"empty_rows": "mean"}


def attention(tensors: dict[str, np.ndarray], **arguments: Any) -> dict[str, np.ndarray]:
    """The tensors with the output and the LSE [B,N,T] of JAX."""
    output, lse = jax.nn.dot_product_attention(
        tensors["query"], tensors["key"], tensors["value"], implementation="xla",
        return_residual=True, **arguments)
    return {**tensors, "output": np.asarray(output),
            "lse": np.asarray(lse).astype(np.float32).transpose(0, 2, 1)}


def simple(case: str, says: str, shape: Shape = Shape(), *, dtype: str = "float32",
           options: dict[str, Any] | None = None, tensors: dict[str, np.ndarray] | None = None,
           differs: dict[str, Any] | None = None, sharpness: float = 1,
           **arguments: Any) -> None:
    """A case whose options JAX has, or gets as `mask`."""
    inputs = operands(case, shape, dtype, sharpness)
    if dtype != "float32":
        differs = {**(differs or {}), "lse_rounded_to": dtype}
    save(case, says, REFERENCE, {**attention(inputs, **arguments), **(tensors or {})},
         options=options, differs=differs)


def bands() -> None:
    """Causal and window."""
    simple("jax_full", "No mask, as many key/value heads as query heads",
           Shape(heads=3, kv_heads=3, dim=16))
    simple("jax_causal", "Causal, grouped heads", options={"causal": True}, is_causal=True)
    simple("jax_causal_bfloat16", "Causal, one key/value head", Shape(kv_heads=1, dim=16),
           dtype="bfloat16", options={"causal": True}, is_causal=True)
    simple("jax_causal_float16", "Causal, grouped heads", Shape(dim=16), dtype="float16",
           options={"causal": True}, is_causal=True)
    simple("jax_causal_wide", "Causal from the top left, more keys than queries",
           Shape(rows=24, columns=50), options={"causal": True}, is_causal=True)
    simple("jax_causal_tall", "Causal from the top left, more queries than keys",
           Shape(rows=50, columns=24), options={"causal": True}, is_causal=True)
    simple("jax_window", "A window wider to the left", options={"window": [9, 4]},
           local_window_size=(9, 4))
    simple("jax_window_number", "One number for both sides of the window",
           options={"window": [5]}, local_window_size=5)
    simple("jax_window_causal", "Causal cuts off the window's right side",
           options={"causal": True, "window": [7, 3]}, is_causal=True, local_window_size=(7, 3))
    simple("jax_window_past_the_keys", "The last rows' windows lie past the last key",
           Shape(rows=43, columns=20), options={"window": [6, 2]}, differs=EMPTY_ROWS,
           local_window_size=(6, 2))
    simple("jax_scale", "A scale of its own", options={"causal": True, "scale": 0.7},
           is_causal=True, scale=0.7)
    simple("jax_sharp", "Large logits: softmax is nearly one-hot", options={"causal": True},
           sharpness=12, is_causal=True)
    simple("jax_long", "Causal, 512 positions", Shape(batch=1, rows=512, heads=2, kv_heads=1),
           options={"causal": True}, is_causal=True)
    simple("jax_long_bfloat16", "Causal, 512 positions",
           Shape(batch=1, rows=512, heads=2, kv_heads=1), dtype="bfloat16",
           options={"causal": True}, is_causal=True)

    wide = Shape(rows=24, columns=50)
    i, j = positions(wide)
    simple("jax_bottom_right", "Causal from the bottom right; JAX gets a dense mask", wide,
           options={"causal": True, "causal-offset": 26}, mask=(j <= i + 26)[None, None])
    simple("jax_window_offset", "A window shifted by an offset; JAX gets a dense mask", wide,
           options={"causal-offset": 15, "window": [8, 2]},
           mask=((j >= i + 7) & (j <= i + 17))[None, None])


def lengths() -> None:
    """Padding at the ends of the sequences."""
    rows, columns = np.array([43, 20], np.int32), np.array([30, 43], np.int32)
    simple("jax_kv_lengths", "Padded keys", options={"causal": True},
           tensors={"kv_lengths": columns}, is_causal=True, key_value_seq_lengths=columns)
    simple("jax_kv_lengths_bfloat16", "Padded keys", dtype="bfloat16",
           tensors={"kv_lengths": columns}, key_value_seq_lengths=columns)
    simple("jax_lengths", "Padded queries and keys; rows of padding are 0 in JAX too",
           differs=EMPTY_ROWS, tensors={"q_lengths": rows, "kv_lengths": columns},
           query_seq_lengths=rows, key_value_seq_lengths=columns)
    none = np.array([0, 17], np.int32)
    simple("jax_no_keys", "A batch entry without keys", differs=EMPTY_ROWS,
           tensors={"kv_lengths": none}, key_value_seq_lengths=none)


def documents() -> None:
    """Segments and packed documents; JAX gets dense masks."""
    shape = Shape()
    i, j = positions(shape)
    random = generator("segments")
    queries, keys = (np.sort(random.integers(-1, 4, (2, 43)), axis=1).astype(np.int32)
                     for _ in range(2))
    same = (queries[:, :, None] == keys[:, None, :]) & (queries[:, :, None] >= 0)
    simple("jax_segments", "Segment ids with padding (−1); JAX gets a dense mask",
           differs=EMPTY_ROWS, tensors={"q_segments": queries, "kv_segments": keys},
           mask=same[:, None])
    bounds = np.array([0, 7, 7, 30, 43], np.int32)
    ids = np.repeat(np.arange(4), np.diff(bounds))
    simple("jax_packed", "Packed documents, one of them empty; JAX gets a dense mask",
           options={"causal": True}, tensors={"cu_seqlens": bounds},
           mask=((ids[:, None] == ids[None, :]) & (j <= i))[None, None])


def blocks() -> None:
    """Block masks; JAX gets dense masks."""
    shape = Shape()
    i, j = positions(shape)
    random = generator("blocks")
    visible = random.random((4, 6, 3)) < 0.6
    of_pairs = visible[:, i // 8, j // 16]
    simple("jax_block_mask", "A block mask by head, blocks of 8 × 16; JAX gets a dense mask",
           differs=EMPTY_ROWS, options={"block-size": [8, 16]}, tensors={"block_mask": visible},
           mask=of_pairs[None])
    ids = np.sort(random.integers(0, 3, (2, 43)), axis=1).astype(np.int32)
    seen = ((j <= i + 2) & (j >= i - 18) & (ids[:, :, None] == ids[:, None, :]))[:, None]
    columns = np.array([43, 31], np.int32)
    seen = seen & of_pairs[None] & (j < columns[:, None, None])[:, None]
    simple("jax_all_parts",
           "Causal, offset, window, segments, lengths and blocks together; JAX gets a dense mask",
           differs=EMPTY_ROWS,
           options={"causal": True, "causal-offset": 2, "window": [20, 4], "block-size": [8, 16]},
           tensors={"q_segments": ids, "kv_segments": ids, "kv_lengths": columns,
                    "block_mask": visible}, mask=seen)


def masks_and_biases() -> None:
    """Dense masks and biases, broadcast in several ways."""
    shape = Shape(rows=29, columns=37)
    random = generator("masks")
    by_head = random.random((2, 4, 29, 37)) < 0.5
    simple("jax_mask", "A dense mask by batch and head", shape, tensors={"mask": by_head},
           mask=by_head)
    shared = random.random((1, 1, 29, 37)) < 0.5
    simple("jax_mask_shared", "One dense mask for all heads, and causal", shape,
           differs=EMPTY_ROWS, options={"causal": True}, tensors={"mask": shared},
           is_causal=True, mask=shared)
    biases = [random.standard_normal(size).astype(np.float32)
              for size in ((1, 4, 29, 37), (2, 1, 1, 37))]
    simple("jax_bias", "A bias by head", shape, tensors={"bias": biases[0]}, bias=biases[0])
    simple("jax_bias_of_keys", "A bias by batch and key, and causal, bfloat16 operands", shape,
           dtype="bfloat16", options={"causal": True}, tensors={"bias": biases[1]},
           is_causal=True, bias=biases[1])
    simple("jax_bias_and_mask", "A bias and a dense mask: both apply", shape,
           options={"window": [30, 11]}, tensors={"bias": biases[0], "mask": by_head},
           local_window_size=(30, 11), bias=biases[0], mask=by_head)


def save_sharded(case: str, says: str, mesh: Mesh, spec: PartitionSpec, kv_spec: PartitionSpec,
                 tensors: dict[str, Any], options: dict[str, Any] | None = None) -> None:
    """A case that shard_map computed."""
    specs = {"query": spec, "key": kv_spec, "lse": PartitionSpec(spec[0], spec[2], spec[1])}
    save(case, says, REFERENCE + " under jax.shard_map, 8 devices", tensors, options=options,
         sharding=sharding(mesh, specs, tensors))


def local_attention(query: jax.Array, key: jax.Array, value: jax.Array,
                    **arguments: Any) -> tuple[jax.Array, jax.Array]:
    """Output and LSE [B,N,T] of one device's shards."""
    output, lse = jax.nn.dot_product_attention(query, key, value, implementation="xla",
                                               return_residual=True, **arguments)
    return output, lse.transpose(0, 2, 1)


def over_batch_and_heads() -> None:
    """No device needs data of another."""
    case, mesh = "jax_shard_map_heads", device_mesh(dp=2, tp=4)
    tensors = operands(case, Shape(rows=21, heads=8, kv_heads=4))
    spec = PartitionSpec("dp", None, "tp", None)
    mapped = jax.shard_map(lambda *shards: local_attention(*shards, is_causal=True), mesh=mesh,
                           in_specs=(spec,) * 3, out_specs=(spec, PartitionSpec("dp", "tp", None)))
    output, lse = mapped(*map(jnp.asarray, tensors.values()))
    save_sharded(case, "Batch and heads sharded, causal", mesh, spec, spec,
                 {**tensors, "output": np.asarray(output), "lse": np.asarray(lse)},
                 {"causal": True})


def gathered_keys() -> None:
    """Keys and values are gathered along the sequence; a device masks by global position."""
    case, mesh = "jax_shard_map_gathered", device_mesh(dp=2, sp=2, tp=2)
    tensors = operands(case, Shape(rows=48))
    spec = PartitionSpec("dp", "sp", "tp", None)

    def body(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        key, value = (lax.all_gather(x, "sp", axis=1, tiled=True) for x in (key, value))
        rows = lax.axis_index("sp") * query.shape[1] + jnp.arange(query.shape[1])
        columns = jnp.arange(key.shape[1])
        return local_attention(query, key, value,
                               mask=(columns[None, :] <= rows[:, None])[None, None])

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec,) * 3,
                           out_specs=(spec, PartitionSpec("dp", "tp", "sp")))
    output, lse = mapped(*map(jnp.asarray, tensors.values()))
    save_sharded(case, "Batch, sequence and heads sharded, keys gathered, causal", mesh, spec, spec,
                 {**tensors, "output": np.asarray(output), "lse": np.asarray(lse)},
                 {"causal": True})


def merged_results() -> None:
    """Queries on every device, keys sharded, partial results merged by their LSE."""
    case, mesh = "jax_shard_map_merged", device_mesh(sp=8)
    tensors = operands(case, Shape(rows=5, columns=64))
    kv_lengths = np.array([64, 19], np.int32)
    whole, cut = PartitionSpec(None, None, None, None), PartitionSpec(None, "sp", None, None)

    def body(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        begin = lax.axis_index("sp") * key.shape[1]
        here = jnp.clip(kv_lengths - begin, 0, key.shape[1]).astype(jnp.int32)
        output, lse = local_attention(query, key, value, key_value_seq_lengths=here)
        largest = lax.pmax(lse, "sp")
        weight = jnp.exp(lse - largest)
        total = lax.psum(weight, "sp")
        share = (weight / total).transpose(0, 2, 1)[..., None]
        return lax.psum(share * output, "sp"), largest + jnp.log(total)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(whole, cut, cut),
                           out_specs=(whole, PartitionSpec(None, None, None)))
    output, lse = mapped(*map(jnp.asarray, tensors.values()))
    save_sharded(case, "Keys sharded, queries on every device, partial results merged by psum",
                 mesh, whole, cut, {**tensors, "kv_lengths": kv_lengths,
                                    "output": np.asarray(output), "lse": np.asarray(lse)})


def main() -> None:
    """All cases, in the order of docs/semantics.md."""
    bands()
    lengths()
    documents()
    blocks()
    masks_and_biases()
    over_batch_and_heads()
    gathered_keys()
    merged_results()


if __name__ == "__main__":
    main()
