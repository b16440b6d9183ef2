"""Arrays of NumPy and tensors of torch as the library sees them: memory, dtype, shape and strides."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from . import _library
from ._library import argument_error

HOST = -1

_DTYPES = {"bool": 0, "uint8": 1, "int32": 2, "float16": 3, "bfloat16": 4, "float32": 5,
           "float64": 6}

OPERANDS = {name: number for number, name in enumerate((
    "query", "key", "value", "output", "lse", "bias", "mask", "maximum", "sum", "weights",
    "query_lengths", "kv_lengths", "offsets", "sinks", "grad_output", "grad_lse", "grad_query",
    "grad_key", "grad_value", "grad_sinks", "grad_bias"))}


class View(NamedTuple):
    address: int
    dtype: int
    place: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # in elements; None: contiguous


def dtype_number(name: str) -> int:
    """The library's number of a dtype; TypeError for one that it lacks."""
    if name not in _DTYPES:
        raise TypeError(f"dtype {name}: expected one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


@functools.lru_cache(maxsize=None)
def _name_of(dtype: Any) -> str:
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype).split(".")[-1]


@functools.lru_cache(maxsize=None)
def _number_of(dtype: Any) -> int:
    if not getattr(dtype, "isnative", True):
        raise TypeError(f"dtype {dtype}: expected the byte order of this machine")
    return dtype_number(_name_of(dtype))


def dtype_name(array: Any) -> str:
    """"float32", "bfloat16", …"""
    return _name_of(array.dtype)


def check_array(array: Any, name: str) -> None:
    """TypeError unless it is an array or a tensor."""
    if not isinstance(array, np.ndarray) and not hasattr(array, "data_ptr"):
        raise TypeError(f"{name}: got {type(array).__name__}, expected a NumPy array or a torch "
                        "tensor")


def place_of(array: Any, name: str) -> int:
    if isinstance(array, np.ndarray) or array.device.type == "cpu":
        return HOST
    if array.device.type != "cuda":
        raise TypeError(f"{name}: on {array.device}, expected the CPU or a CUDA device")
    return array.device.index


def view(array: Any, name: str) -> View:
    """The view of an array or a tensor, without a copy."""
    check_array(array, name)
    if not isinstance(array, np.ndarray):
        return View(array.data_ptr(), _number_of(array.dtype), place_of(array, name),
                    tuple(array.shape), None if array.is_contiguous() else array.stride())
    strides = None
    if not array.flags.c_contiguous:
        size = array.itemsize
        if any(stride % size for stride in array.strides):
            raise argument_error(name, f"strides of {array.strides} bytes", "whole elements")
        strides = tuple(stride // size for stride in array.strides)
    return View(array.ctypes.data, _number_of(array.dtype), HOST, array.shape, strides)


def empty(like: Any, shape: tuple[int, ...], dtype: str | None = None) -> Any:
    """New memory of the same kind and place as `like`, with its dtype unless another is given."""
    if isinstance(like, np.ndarray):
        return np.empty(shape, like.dtype if dtype is None else dtype)
    if dtype is None:
        return like.new_empty(shape)
    import torch

    return like.new_empty(shape, dtype=getattr(torch, dtype))


_set = _library.function("tensors_set")


class Tensors:
    """The operands of one call."""

    def __init__(self) -> None:
        self.handle = _library.create("tensors_create")
        self._kept: list[Any] = []

    def set(self, name: str, array: Any) -> None:
        seen = view(array, name)
        self._kept.append(array)
        _set(self.handle, OPERANDS[name], seen.address, seen.dtype, seen.place, len(seen.shape),
             _library.int64s(seen.shape),
             None if seen.strides is None else _library.int64s(seen.strides))

    def set_seed(self, seed: int) -> None:
        _library.function("tensors_set_dropout_seed")(self.handle, seed)

    def __del__(self) -> None:
        _library.function("tensors_destroy")(self.handle)
