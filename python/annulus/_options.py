"""The keywords of attention as a list of calls of the C interface, which is also the cache's key."""

from __future__ import annotations

import ctypes
import difflib
from typing import Any, Iterable, Literal, Sequence, TypedDict, Union

import numpy as np

from . import _library
from ._library import argument_error
from ._tensors import float_number

Numbers = Union[Sequence[int], np.ndarray]


class Options(TypedDict, total=False):
    """The problem apart from its tensors, its place on the mesh, and choices.

    Positions and ids cover the whole sequence, on every rank.
    """

    causal: bool  # a row sees the keys up to its own position
    offset: Union[int, Numbers, Literal["bottom-right"]]  # of the diagonal; one per batch
    window: tuple[int, int]  # keys to the left and to the right; -1: no limit
    prefix: Union[int, Numbers]  # keys that causal, window and chunk do not hide; one per batch
    sink_tokens: int  # first keys that stay visible beyond window and chunk
    chunk: int  # rows see keys of their own chunk of this many positions only
    segments: Any  # ids [B,T], or a pair of ids [B,T] and [B,S]; -1: padding
    cu_seqlens: Any  # prefix sums of packed documents, or a pair for queries and keys
    alignment: Literal["top-left", "bottom-right"]  # for a pair of cu_seqlens
    query_lengths: Numbers  # rows of each batch that are not padding, [B]
    kv_lengths: Numbers  # keys of each batch that are not padding, [B]
    block_mask: Any  # 0 or 1 per block, up to [B,N,blocks,blocks]
    block_size: tuple[int, int]  # of block_mask: rows and keys of a block; (128, 128) by default
    scale: float  # of the logits; 1/√D by default
    soft_cap: float  # bounds the logits: cap · tanh(logit / cap)
    dropout: float  # probability; every call then needs a seed
    softmax_dtype: str  # "float32", or "float64" with the implementation "vanilla"
    bias_policy: str  # for mask and bias: "combine", "bias_wins" or "bias_disables_causal"
    call_arguments: Sequence[str]  # "lengths", "offsets": they change without a new plan
    mode: str  # "train", "prefill", "autoregressive" or "insert": selects the default specs
    query_spec: str  # the mesh axes of each dimension of query and output, "dp,sp,tp,-"
    kv_spec: str  # the mesh axes of each dimension of key and value
    layout: str  # "contiguous", "zigzag", "striped" or "balanced"
    kv_layout: str  # the keys' layout, if it is another one
    granule: int  # the layout cuts the sequence at multiples of it
    schedule: str  # "auto", or a schedule by name
    implementation: str  # "auto", or a kernel by name
    transport: str  # of GPUs: "auto", "composite", "nccl" or "peer"
    tuning: str  # "off", "cached" or "measure"
    ulysses_degree: int  # ranks that share heads, under the schedule "hybrid"
    inner_size: int  # ranks of an inner ring, under the schedule "double_ring"
    backward_schedule: str  # likewise, of the backward pass
    backward_implementation: str  # likewise
    reproducible: Literal["no", "run", "world"]  # which calls repeat every bit
    query_length: int  # of the whole sequence, where shards are uneven
    kv_length: int  # likewise
    kv_heads: int  # key/value heads of the whole problem, if they do not follow from the shards
    bias_shape: Sequence[int]  # of the whole bias [B,N,T,S], for its gradient where a rank has one entry


_TEXTS = ("bias_policy", "mode", "query_spec", "kv_spec", "layout", "kv_layout", "schedule",
          "implementation", "transport", "tuning", "reproducible", "backward_schedule",
          "backward_implementation")
_INTEGERS = ("causal", "sink_tokens", "chunk", "granule", "ulysses_degree", "inner_size",
             "query_length", "kv_length", "kv_heads")
_REALS = ("scale", "soft_cap")

# One call of a setter: its name and its arguments, with arrays as bytes.
Call = tuple[Any, ...]


def int32(values: Any, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: got {array.dtype}, expected integers")
    info = np.iinfo(np.int32)
    if array.size and (array.min() < info.min or array.max() > info.max):
        raise argument_error(name, f"{array.min()} to {array.max()}", "32-bit integers")
    return np.ascontiguousarray(array, np.int32)


def _number(name: str, value: Any, kind: type, expected: str = "a number") -> Any:
    """Converts the value to a number of Python; TypeError for a string, None and the like."""
    if not isinstance(value, str):
        try:
            return kind(value)
        except (TypeError, ValueError):
            pass
    raise TypeError(f"{name}: got {value!r}, expected {expected}")


def _bytes(values: Any, name: str) -> bytes:
    return int32(values, name).tobytes()


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and np.ndim(value[0]) > 0


def one_of(names: Iterable[str], got: str, others: Iterable[str] = ()) -> str:
    """The names expected in place of `got`. A near one, even of `others`, comes first."""
    near = difflib.get_close_matches(got, [*names, *others], 1)
    return f"{f'{near[0]!r}, or ' if near else ''}one of {', '.join(sorted(names))}"


# Other libraries, and annulus's own program, call these keywords by other names.
_ELSEWHERE = {"deterministic": "reproducible", "softmax_scale": "scale", "sm_scale": "scale"}


def unknown(names: Iterable[str]) -> None:
    """Raises TypeError if one of the keywords is not in Options."""
    for name in names:
        if name not in Options.__annotations__:
            operands = ("mesh", "sinks", "bias", "mask", "seed")
            expected = one_of(Options.__annotations__, _ELSEWHERE.get(name, name), operands)
            raise TypeError(f"unknown keyword {name!r}; expected {expected}")


def calls_of(options: dict[str, Any]) -> list[Call]:
    """The setters to call; raises TypeError or ValueError for values that no setter takes."""
    unknown(options)
    given = {name: value for name, value in options.items() if value is not None}
    calls: list[Call] = []
    for name in _TEXTS:
        if name in given:
            if not isinstance(given[name], str):
                raise TypeError(f"{name}: got {given[name]!r}, expected a text")
            calls.append(("text", name, given[name]))
    for name in _INTEGERS:
        if name in given:
            expected = "True or False" if name == "causal" else "a number"
            calls.append(("integer", name, _number(name, given[name], int, expected)))
    for name in _REALS:
        if name in given:
            calls.append(("real", name, _number(name, given[name], float)))
    if "softmax_dtype" in given:
        calls.append(("softmax_dtype", float_number(str(given["softmax_dtype"]), "softmax_dtype")))
    if "window" in given:
        if np.shape(given["window"]) != (2,):
            raise argument_error("window", repr(given["window"]), "(left, right), -1 for no limit")
        left, right = given["window"]
        calls.append(("window", _number("window", left, int), _number("window", right, int)))
    if "dropout" in given:
        calls.append(("dropout", _number("dropout", given["dropout"], float), 0))
        calls.append(("integer", "call_dropout_seed", 1))

    varying = tuple(given.get("call_arguments", ()))
    for name in varying:
        if name not in ("lengths", "offsets"):
            raise argument_error("call_arguments", repr(name), '"lengths" or "offsets"')
        calls.append(("integer", f"call_{name}", 1))
    if "lengths" not in varying:
        for name in ("query_lengths", "kv_lengths"):
            if name in given:
                calls.append((name, _bytes(given[name], name)))
    if "offset" in given and not ("offsets" in varying and given["offset"] != "bottom-right"):
        calls.append(_one_or_each("offset", "offsets", given["offset"]))
    if "prefix" in given:
        calls.append(_one_or_each("prefix", "prefixes", given["prefix"]))

    if "segments" in given:
        ids = given["segments"]
        query, keys = ids if _is_pair(ids) and np.ndim(ids[0]) == 2 else (ids, ids)
        calls.append(("segments", _bytes(query, "segments"), _bytes(keys, "segments")))
    if "cu_seqlens" in given:
        sums = given["cu_seqlens"]
        if _is_pair(sums):
            calls.append(("packings", _bytes(sums[0], "cu_seqlens"), _bytes(sums[1], "cu_seqlens"),
                          given.get("alignment", "")))
        else:
            calls.append(("cu_seqlens", _bytes(sums, "cu_seqlens")))
    if "alignment" in given and not _is_pair(given.get("cu_seqlens")):
        raise argument_error("alignment", "one without a pair of cu_seqlens", "none")
    if "block_mask" in given:
        blocks = np.ascontiguousarray(np.asarray(given["block_mask"]).astype(np.uint8, casting="unsafe"))
        query_size, kv_size = given.get("block_size", (128, 128))
        calls.append(("block_mask", blocks.shape, blocks.tobytes(), int(query_size), int(kv_size)))
    elif "block_size" in given:
        raise argument_error("block_size", "one without a block_mask", "none")
    if "bias_shape" in given:
        raise argument_error("bias_shape", "one without a bias", "none")
    return calls


def _one_or_each(one: str, each: str, value: Any) -> Call:
    if isinstance(value, str):
        return ("text", one, value)
    if np.ndim(value) == 0:
        return ("integer", one, int(value))
    return (each, _bytes(value, one))


def make_options(calls: Iterable[Call]) -> Any:
    """A handle of the options that these calls make."""
    handle = _library.create("attention_options_create")
    for name, *values in calls:
        arguments: list[Any] = []
        for value in values:
            if isinstance(value, str):
                arguments.append(value.encode())
            elif isinstance(value, bytes):
                arguments.append(value)
                if name != "block_mask":
                    arguments.append(len(value) // 4)
            elif isinstance(value, tuple):
                if name == "block_mask":
                    arguments.append(len(value))
                if name in ("bias", "dense_mask"):
                    arguments.append((ctypes.c_int * len(value))(*value))
                else:
                    arguments.append(_library.int64s(value))
            else:
                arguments.append(value)
        _library.function("attention_options_set_" + name)(handle, *arguments)
    return handle
