"""The masks of transformers, which are functions of indices, read as what attention can compute.

transformers.masking_utils builds a function of (batch, head, row, key) out of smaller ones. They
are recognised by name, and their parameters are in their closures. A function of another name is
refused. The meaning of the known functions is checked once, on import.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Callable

import torch
from transformers import masking_utils

from ._library import LibraryError
from ._library import argument_error as refused


@dataclasses.dataclass(frozen=True)
class Mask:
    """The keys that rows of a layer see, apart from documents and padding."""

    causal: bool = False
    left: int = -1  # keys to the left and to the right of a row; -1: no limit
    right: int = -1
    chunk: int | None = None
    # The batch's positions, where transformers takes their jumps for documents.
    positions: torch.Tensor | None = dataclasses.field(default=None, compare=False)

    @property
    def window(self) -> tuple[int, int] | None:
        return None if self.left < 0 and self.right < 0 else (self.left, self.right)

    @property
    def sliding_window(self) -> int | None:
        """The window as the layers of transformers count it."""
        if self.left < 0:
            return None
        return self.left + 1 if self.right < 0 else self.left

    def sees(self, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = torch.ones_like(row + key, dtype=torch.bool)
        if self.causal:
            seen &= key <= row
        if self.left >= 0:
            seen &= key >= row - self.left
        if self.right >= 0:
            seen &= key <= row + self.right
        if self.chunk is not None:
            seen &= row // self.chunk == key // self.chunk
        return seen


def _both(one: Mask, other: Mask) -> Mask:
    """The intersection of two masks."""
    if one.chunk is not None and other.chunk not in (None, one.chunk):
        raise refused("attention_chunk_size", f"{one.chunk} and {other.chunk}", "one of them")

    def narrower(a: int, b: int) -> int:
        return max(a, b) if min(a, b) < 0 else min(a, b)

    return Mask(one.causal or other.causal, narrower(one.left, other.left),
                narrower(one.right, other.right), one.chunk if other.chunk is None else other.chunk,
                one.positions if other.positions is None else other.positions)


def _mask_of(function: Callable[..., Any]) -> Mask:
    name = getattr(function, "__qualname__", type(function).__name__)
    if getattr(function, "__module__", None) != masking_utils.__name__:
        raise refused("mask_function", name, "one of transformers' own")
    name = name.split(".")[0]
    inside = inspect.getclosurevars(function).nonlocals
    if name == "causal_mask_function":
        return Mask(causal=True)
    if name in ("bidirectional_mask_function", "packed_sequence_mask_function"):
        return Mask()  # shard_batch already has the documents of the whole batch
    if name == "and_masks":
        mask = Mask()
        for part in inside["mask_functions"]:
            mask = _both(mask, _mask_of(part))
        return mask
    if name == "sliding_window_overlay":
        return Mask(left=int(inside["sliding_window"]) - 1)
    if name == "sliding_window_bidirectional_overlay":
        return Mask(left=int(inside["sliding_window"]), right=int(inside["sliding_window"]))
    if name == "chunked_overlay":
        return Mask(chunk=int(inside["chunk_size"]))  # without padding, which read() refuses
    if name == "remap_positions_for_packed_sequence":
        return dataclasses.replace(_mask_of(inside["mask_function"]),
                                   positions=inside["position_ids"])
    raise refused("mask_function", name, "causal, bidirectional, sliding windows or chunks")


def read(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
         mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
         attention_mask: torch.Tensor | None = None, **_others: Any) -> Mask:
    """The mask of a layer. Nothing needs _others, which say how to make a mask tensor."""
    if attention_mask is not None:
        raise refused("attention_mask", "one in a model's call", "padding in shard_batch")
    if kv_length != q_length or kv_offset != 0 or int(q_offset) != 0:
        raise refused("use_cache", f"{kv_length} keys for {q_length} queries at {q_offset}",
                      "no cache of keys")
    return _mask_of(mask_function)


def _check_meaning() -> None:
    functions: tuple[Callable[..., Any], ...] = (
        masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_causal_mask_function(3),
        masking_utils.sliding_window_bidirectional_mask_function(2),
        masking_utils.chunked_causal_mask_function(5, torch.zeros(1, dtype=torch.long)))
    index = torch.arange(12)
    nothing = torch.zeros(1, dtype=torch.long)
    for function in functions:
        row, key = index[None, None, :, None], index[None, None, None, :]
        expected = function(nothing[:, None, None, None], nothing[None, :, None, None], row, key)
        mask = _mask_of(function)
        if not torch.equal(mask.sees(row, key), expected.expand(1, 1, 12, 12)):
            raise LibraryError(f"{function.__qualname__} of transformers does not mean {mask}: this "
                               "version of annulus.hf does not fit this version of transformers")


_check_meaning()
