"""Arrays of NumPy and tensors of torch as the library sees them: memory, dtype, shape and strides."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any, Mapping

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


def dtype_number(name: str) -> int:
    """The library's number of a dtype; TypeError for one that it lacks."""
    if name not in _DTYPES:
        raise TypeError(f"dtype {name}: expected one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def float_number(name: str, operand: str) -> int:
    """The number of a dtype that attention computes in; for any other, a TypeError that names the operand."""
    if name not in ("float16", "bfloat16", "float32", "float64"):
        raise TypeError(f"{operand}: got {name}, expected float16, bfloat16, float32 or float64")
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
    """Raises TypeError unless the value is an array or a tensor."""
    if not isinstance(array, np.ndarray) and not hasattr(array, "data_ptr"):
        raise TypeError(f"{name}: got {type(array).__name__}, expected a NumPy array or a torch "
                        "tensor")


def place_of(array: Any, name: str) -> int:
    if isinstance(array, np.ndarray) or array.device.type == "cpu":
        return HOST
    if array.device.type != "cuda":
        raise TypeError(f"{name}: on {array.device}, expected the CPU or a CUDA device")
    return array.device.index


def stream_of(array: Any) -> int | None:
    """torch's current stream on the device of a tensor."""
    place = place_of(array, "query")
    if place == HOST:
        return None
    torch = sys.modules["torch"]
    # The public function makes objects, which takes longer than handling all other arguments.
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return torch.cuda.current_stream(place).cuda_stream if raw is None else raw(place)


def empty(like: Any, shape: tuple[int, ...], dtype: str | None = None) -> Any:
    """New memory of the same kind and place as `like`, with its dtype unless another is given."""
    if isinstance(like, np.ndarray):
        return np.empty(shape, like.dtype if dtype is None else dtype)
    if dtype is None:
        return like.new_empty(shape)
    return like.new_empty(shape, dtype=getattr(sys.modules["torch"], dtype))


def _strides(array: Any, name: str) -> tuple[int, ...] | None:
    """Strides in elements; None: contiguous."""
    if not isinstance(array, np.ndarray):
        return None if array.is_contiguous() else array.stride()
    if array.flags.c_contiguous:
        return None
    size = array.itemsize
    if any(stride % size for stride in array.strides):
        raise argument_error(name, f"strides of {array.strides} bytes", "whole elements")
    return tuple(stride // size for stride in array.strides)


class Tensors:
    """The operands of a call. Later calls reuse it and set only the memory of their operands."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.handle = _library.create("tensors_create")
        self._said: list[Any] = [None] * len(names)
        self._numbers = (ctypes.c_int * len(names))(*(OPERANDS[name] for name in names))
        self._memory = (ctypes.c_void_p * len(names))()

    def fill(self, operands: Mapping[str, Any]) -> None:
        """Hands over the operands, in the order of the names."""
        memory, said = self._memory, self._said
        i = 0
        about: tuple[Any, ...]
        for name, array in operands.items():
            if isinstance(array, np.ndarray):
                memory[i] = array.__array_interface__["data"][0]
                about = (array.dtype, array.shape, array.strides)
            else:
                try:
                    memory[i] = array.data_ptr()
                except AttributeError:
                    check_array(array, name)
                    raise
                about = (array.dtype, array.shape, array.stride(), array.device)
            if about != said[i]:
                self._describe(name, array, memory[i])
                said[i] = about
            i += 1
        _set_data(self.handle, len(said), self._numbers, memory)

    def _describe(self, name: str, array: Any, address: int | None) -> None:
        strides = _strides(array, name)
        _set(self.handle, OPERANDS[name], address, _number_of(array.dtype), place_of(array, name),
             array.ndim, _library.int64s(array.shape),
             None if strides is None else _library.int64s(strides))

    def set_seed(self, seed: Any) -> None:
        """Sets a number, or a tensor of one integer, which is read when the call is computed."""
        if isinstance(seed, (int, np.integer)):
            _set_seed(self.handle, int(seed))
            return
        if not hasattr(seed, "data_ptr"):
            raise TypeError(f"seed: got {seed!r}, expected an integer, or a tensor of one")
        if seed.numel() != 1 or dtype_name(seed) not in ("int64", "uint64"):
            raise argument_error("seed", f"{dtype_name(seed)} {tuple(seed.shape)}",
                                 "one number, or an int64 or uint64 tensor of one")
        if place_of(seed, "seed") == HOST:
            _set_seed(self.handle, int(seed))
        else:
            _set_device_seed(self.handle, seed.data_ptr())

    def __del__(self) -> None:
        _library.function("tensors_destroy")(self.handle)


_set = _library.function("tensors_set")
_set_data = _library.function("tensors_set_data")
_set_seed = _library.function("tensors_set_dropout_seed")
_set_device_seed = _library.function("tensors_set_device_dropout_seed")
