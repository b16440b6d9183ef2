#!/usr/bin/env python3
"""Makes the fixtures gradients/torch_*: gradients that PyTorch computes on the CPU.

    python3 -m pip install -r requirements.txt
    python3 generate_torch_gradients.py

The cases sdpa_* differentiate scaled_dot_product_attention: in the dtype of the operands, where
PyTorch has a kernel of its own on CPUs, else in float64. Soft cap, sinks and the LSE, which it
lacks, are differentiated in tensor operations, in float64. The tensors are named as in
generate_jax_gradients.py.
"""

from typing import Any, Callable

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as functional

import fixture
from fixture import DTYPES, HERE, Shape, generator, operands, positions, save

fixture.CASES = HERE / "gradients"
SDPA = "torch.autograd of scaled_dot_product_attention"
PLAIN = "torch.autograd of attention in torch operations, float64"
SHAPE = Shape(batch=1, rows=13, dim=4)

Tensors = dict[str, torch.Tensor]


def as_torch(array: np.ndarray, dtype: torch.dtype | None = None) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.tensor(array.astype(np.float32)).to(dtype or torch.bfloat16)
    return torch.tensor(array).to(dtype) if dtype else torch.tensor(array)


def as_numpy(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    return tensor.detach().to(torch.float64).numpy().astype(DTYPES[dtype])


def differentiate(case: str, says: str, reference: str, inputs: dict[str, np.ndarray],
                  attend: Callable[[Tensors], dict[str, torch.Tensor]], *, dtype: str = "float32",
                  computed_in: torch.dtype | None = torch.float64,
                  tensors: dict[str, np.ndarray] | None = None,
                  hidden_rows: np.ndarray | None = None,
                  options: dict[str, Any] | None = None) -> None:
    """Saves a case. `attend` returns the output [B,T,N,Dv], and the LSE [B,N,T] if its gradient is
    wanted. Output rows that are `hidden_rows` [B,T] have no part in the loss."""
    random = generator(case + " upstream")
    leaves = {name: as_torch(array, computed_in).requires_grad_() for name, array in inputs.items()}
    results = attend(leaves)
    upstream = {}
    for name, result in results.items():
        numbers = random.standard_normal(tuple(result.shape))
        upstream[name] = numbers.astype(DTYPES[dtype] if name == "output" else np.float32)
    if hidden_rows is not None:
        upstream["output"][hidden_rows] = 0
    gradients = torch.autograd.grad(
        list(results.values()), list(leaves.values()),
        [as_torch(upstream[name]).to(result.dtype) for name, result in results.items()])
    found = {f"grad_{name}": as_numpy(gradient, "float32" if name in ("bias", "sinks") else dtype)
             for name, gradient in zip(leaves, gradients)}
    save(case, says, reference,
         {**inputs, **(tensors or {}), "output": as_numpy(results["output"], dtype),
          **{f"grad_{name}": array for name, array in upstream.items()}, **found}, options=options)


def of_sdpa(case: str, says: str, shape: Shape = SHAPE, *, dtype: str = "float32",
            bias: np.ndarray | None = None, seen: np.ndarray | None = None,
            scale: float | None = None, causal: bool = False, **fields: Any) -> None:
    """A case of scaled_dot_product_attention; `seen` is its boolean mask."""
    inputs = operands(case, shape, dtype)
    if bias is not None:
        inputs["bias"] = bias

    def attend(tensors: Tensors) -> dict[str, torch.Tensor]:
        by_head = [tensors[name].transpose(1, 2) for name in ("query", "key", "value")]
        mask = tensors.get("bias") if seen is None else torch.tensor(seen)
        output = functional.scaled_dot_product_attention(
            *by_head, attn_mask=mask, is_causal=causal, scale=scale,
            enable_gqa=shape.heads != shape.kv_heads)
        return {"output": output.transpose(1, 2)}

    differentiate(case, says, SDPA, inputs, attend, dtype=dtype, **fields)


def of_plain(case: str, says: str, shape: Shape, *, bias: np.ndarray | None = None,
             sinks: np.ndarray | None = None, soft_cap: float | None = None,
             seen: np.ndarray | None = None, **fields: Any) -> None:
    """A case with soft cap or sinks; its loss depends on the LSE, too."""
    inputs = operands(case, shape)
    inputs |= {name: array for name, array in (("bias", bias), ("sinks", sinks))
               if array is not None}
    group = shape.heads // shape.kv_heads

    def attend(tensors: Tensors) -> dict[str, torch.Tensor]:
        key, value = (tensors[name].repeat_interleave(group, dim=2) for name in ("key", "value"))
        logits = torch.einsum("btnd,bsnd->bnts", tensors["query"], key) * shape.dim**-0.5
        if soft_cap is not None:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        if bias is not None:
            logits = logits + tensors["bias"]
        if seen is not None:
            logits = logits.masked_fill(~torch.tensor(seen), -torch.inf)
        every = logits
        if sinks is not None:
            beside = tensors["sinks"].expand(shape.heads, -1)[None, :, None]
            every = torch.cat([logits, beside.expand(*logits.shape[:3], -1)], dim=-1)
        lse = torch.logsumexp(every, dim=-1)
        weights = torch.exp(logits - lse[..., None])
        return {"output": torch.einsum("bnts,bsnd->btnd", weights, value), "lse": lse}

    differentiate(case, says, PLAIN, inputs, attend, **fields)


def kernels() -> None:
    """By PyTorch's CPU kernel, in the operands' dtype."""
    same_heads = Shape(batch=1, rows=13, heads=2, dim=4)
    of_sdpa("torch_sdpa_full", "No mask", same_heads, computed_in=None)
    of_sdpa("torch_sdpa_causal", "Causal, grouped heads", causal=True, computed_in=None,
            options={"causal": True})
    of_sdpa("torch_sdpa_causal_bfloat16", "Causal, bfloat16", same_heads, dtype="bfloat16",
            causal=True, computed_in=None, options={"causal": True})


def masks() -> None:
    """Boolean masks of PyTorch, of which Annulus knows the reason."""
    i, j = positions(SHAPE)
    of_sdpa("torch_sdpa_window", "A window, not causal", seen=(j >= i - 4) & (j <= i + 2),
            options={"window": [4, 2]})
    of_sdpa("torch_sdpa_causal_window", "A window, causal", seen=(j >= i - 4) & (j <= i),
            options={"causal": True, "window": [4, 4]})
    shown = generator("shown").random((2, 4, 13, 13)) < 0.6
    shown |= (i == j)[None, None]
    of_sdpa("torch_sdpa_mask", "A dense mask", Shape(batch=2, rows=13, dim=4), seen=shown,
            tensors={"mask": shown})
    ids = np.array([[0] * 5 + [1] * 2 + [2] * 6], np.int32)
    of_sdpa("torch_sdpa_segments", "Segments", seen=(ids[:, :, None] == ids[:, None, :])[:, None],
            tensors={"q_segments": ids, "kv_segments": ids})
    wide = Shape(batch=1, rows=9, columns=16, dim=4, value_dim=6)
    i, j = positions(wide)
    of_sdpa("torch_sdpa_bottom_right", "More keys than queries, causal from the end, a scale", wide,
            seen=j <= i + 7, scale=-0.8,
            options={"causal": True, "causal-offset": 7, "scale": -0.8})
    rows, columns = np.array([13, 6], np.int32), np.array([4, 11], np.int32)
    two = Shape(batch=2, rows=13, dim=4)
    _, j = positions(two)
    of_sdpa("torch_sdpa_lengths", "Lengths of queries and keys", two,
            seen=(j < columns[:, None, None])[:, None],
            hidden_rows=np.arange(13)[None] >= rows[:, None],
            tensors={"q_lengths": rows, "kv_lengths": columns})


def biases() -> None:
    """Float masks of PyTorch, with their gradients."""
    for shape in ((1, 4, 13, 13), (1, 1, 1, 13)):
        bias = generator(f"torch bias {shape}").standard_normal(shape).astype(np.float32)
        of_sdpa("torch_sdpa_bias_" + "_".join(map(str, shape)),
                "The gradient of a bias " + str(list(shape)), bias=bias)


def modifiers() -> None:
    """Soft cap and sinks."""
    i, j = positions(SHAPE)
    random = generator("torch modifiers")
    by_head = random.standard_normal((4, 2)).astype(np.float32)
    bias = random.standard_normal((1, 4, 1, 13)).astype(np.float32)
    shown = random.random((1, 1, 13, 13)) < 0.7
    of_plain("torch_plain_soft_cap", "A soft cap, causal", SHAPE, soft_cap=1.3, seen=j <= i,
             options={"causal": True, "soft-cap": 1.3})
    of_plain("torch_plain_sinks", "Sinks by head in a window: some rows see little else", SHAPE,
             sinks=by_head, seen=(j <= i - 1) & (j >= i - 3),
             options={"causal": True, "causal-offset": -1, "window": [2, 2]})
    of_plain("torch_plain_all", "Soft cap, bias, sinks of all heads and a dense mask", SHAPE,
             soft_cap=2.5, bias=bias, sinks=by_head[1], seen=shown,
             tensors={"mask": shown}, options={"soft-cap": 2.5})


def main() -> None:
    """All cases."""
    fixture.CASES.mkdir(exist_ok=True)
    kernels()
    masks()
    biases()
    modifiers()


if __name__ == "__main__":
    main()
