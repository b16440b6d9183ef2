"""The shared library behind the package: its functions by ctypes, its errors as exceptions."""

from __future__ import annotations

import builtins
import ctypes
import importlib.util
import os
import pathlib
from typing import Any

Handle = ctypes.c_void_p


class Error(Exception):
    """Root of the exceptions that the library throws, with its text."""


class UserError(Error):
    """The caller's input is wrong. All ranks raise it if one rank is at fault."""


class ArgumentError(UserError, ValueError):
    """The argument named by `argument` is wrong."""

    argument: str = ""


class UnsupportedError(UserError):
    """A valid request that this build or implementation refuses."""


class FileError(UserError):
    """An input file is missing or malformed."""


class LibraryError(Error):
    """The job cannot continue and can only be ended."""


class TimeoutError(LibraryError, builtins.TimeoutError):  # noqa: A001
    """A rank did not answer in time."""


class SystemError(LibraryError):  # noqa: A001
    """A call of the operating system failed."""


class MpiError(LibraryError):
    """A call of MPI failed."""


class InternalError(LibraryError):
    """A bug of the library."""


class MemoryError(LibraryError, builtins.MemoryError):  # noqa: A001
    """The library ran out of memory."""


_ERRORS: dict[int, type[Error]] = {
    1: UserError,
    2: ArgumentError,
    3: UnsupportedError,
    4: FileError,
    16: LibraryError,
    17: TimeoutError,
    18: SystemError,
    19: MpiError,
    20: InternalError,
    21: MemoryError,
}

_INTERRUPTED = 22

_I64 = ctypes.c_int64
_PI64 = ctypes.POINTER(ctypes.c_int64)
_INT = ctypes.c_int
_PINT = ctypes.POINTER(ctypes.c_int)
_TEXT = ctypes.c_char_p
_SIZE = ctypes.c_size_t
_REAL = ctypes.c_double
_DATA = ctypes.c_void_p
_NUMBERS = [_DATA, _SIZE]

_OPTIONS = "annulus_attention_options_set_"

# The parameters of every function that returns a status.
_SIGNATURES: dict[str, list[Any]] = {
    "annulus_check_connected": [_INT],
    "annulus_context_options_create": [ctypes.POINTER(Handle)],
    "annulus_context_options_set_mesh": [Handle, _TEXT],
    "annulus_context_options_set_place": [Handle, ctypes.c_int32],
    "annulus_context_options_set_threads": [Handle, _INT],
    "annulus_context_options_set_timeout": [Handle, _REAL],
    "annulus_context_options_set_share_gpus": [Handle, _INT],
    "annulus_context_options_set_transport": [Handle, _TEXT],
    "annulus_context_create": [_DATA, Handle, ctypes.POINTER(Handle)],
    "annulus_context_create_on_store": [Handle, Handle, ctypes.POINTER(Handle)],
    "annulus_context_gather": [Handle, _DATA, _SIZE, _DATA],
    "annulus_context_sum": [Handle, _DATA, _SIZE],
    "annulus_store_create": [_DATA, _INT, _INT, ctypes.POINTER(Handle)],
    "annulus_context_axis_size": [Handle, _TEXT, _PINT],
    "annulus_context_agree": [Handle, _TEXT],
    "annulus_context_positions": [Handle, _TEXT, _INT, _PI64, _INT, _TEXT, _I64, _INT, _INT,
                                  _DATA, _I64, _PI64],
    "annulus_attention_options_create": [ctypes.POINTER(Handle)],
    _OPTIONS + "text": [Handle, _TEXT, _TEXT],
    _OPTIONS + "integer": [Handle, _TEXT, _I64],
    _OPTIONS + "real": [Handle, _TEXT, _REAL],
    _OPTIONS + "shape": [Handle, _PI64],
    _OPTIONS + "local_shape": [Handle, _PI64],
    _OPTIONS + "dtype": [Handle, _INT],
    _OPTIONS + "softmax_dtype": [Handle, _INT],
    _OPTIONS + "window": [Handle, _I64, _I64],
    _OPTIONS + "offsets": [Handle, *_NUMBERS],
    _OPTIONS + "prefixes": [Handle, *_NUMBERS],
    _OPTIONS + "query_lengths": [Handle, *_NUMBERS],
    _OPTIONS + "kv_lengths": [Handle, *_NUMBERS],
    _OPTIONS + "segments": [Handle, *_NUMBERS, *_NUMBERS],
    _OPTIONS + "cu_seqlens": [Handle, *_NUMBERS],
    _OPTIONS + "packings": [Handle, *_NUMBERS, *_NUMBERS, _TEXT],
    _OPTIONS + "block_mask": [Handle, _INT, _PI64, _DATA, _I64, _I64],
    _OPTIONS + "dropout": [Handle, _REAL, ctypes.c_uint64],
    _OPTIONS + "bias": [Handle, _PINT],
    _OPTIONS + "dense_mask": [Handle, _PINT],
    "annulus_tensors_create": [ctypes.POINTER(Handle)],
    "annulus_tensors_set": [Handle, _INT, _DATA, _INT, ctypes.c_int32, _INT, _PI64, _PI64],
    "annulus_tensors_set_data": [Handle, _INT, _PINT, ctypes.POINTER(_DATA)],
    "annulus_tensors_set_dropout_seed": [Handle, ctypes.c_uint64],
    "annulus_tensors_set_device_dropout_seed": [Handle, _DATA],
    "annulus_attention_create": [Handle, Handle, ctypes.POINTER(Handle)],
    "annulus_attention_run": [Handle, Handle, _DATA],
    "annulus_attention_backward": [Handle, Handle, _INT, _DATA],
    "annulus_attention_wait": [Handle],
    "annulus_attention_shape": [Handle, _INT, _PI64, _PINT],
    "annulus_attention_positions": [Handle, _INT, _INT, _INT, _DATA, _I64, _PI64],
    "annulus_attention_plan_text": [Handle, _INT, ctypes.POINTER(_TEXT)],
    "annulus_attention_explanation": [Handle, ctypes.POINTER(_TEXT)],
}

_OTHERS: dict[str, tuple[Any, list[Any]]] = {
    "annulus_error_message": (_TEXT, []),
    "annulus_error_argument": (_TEXT, []),
    "annulus_version": (_TEXT, []),
    "annulus_mpi_library": (_TEXT, []),
    "annulus_is_launched": (_INT, []),
    "annulus_store_destroy": (None, [Handle]),
    "annulus_store_set_error": (None, [_TEXT]),
    "annulus_context_options_destroy": (None, [Handle]),
    "annulus_context_destroy": (None, [Handle]),
    "annulus_context_rank": (_INT, [Handle]),
    "annulus_context_size": (_INT, [Handle]),
    "annulus_context_place": (ctypes.c_int32, [Handle]),
    "annulus_attention_options_destroy": (None, [Handle]),
    "annulus_tensors_destroy": (None, [Handle]),
    "annulus_attention_destroy": (None, [Handle]),
}


def path() -> str:
    """The library's file. ANNULUS_PYTHON_LIBRARY names one in a build folder, for the sources."""
    return os.environ.get("ANNULUS_PYTHON_LIBRARY") or str(
        pathlib.Path(__file__).with_name("libannulus.so"))


def _of_packages(library: str) -> str | None:
    """The library's file among NVIDIA's packages, which torch and JAX bring, or None."""
    spec = importlib.util.find_spec("nvidia")
    found = (file for folder in (spec and spec.submodule_search_locations) or ()
             for file in pathlib.Path(folder).glob(f"*/lib/{library}"))
    return str(next(found, "")) or None


def _open() -> ctypes.CDLL:
    missing = None
    while True:
        try:
            return ctypes.CDLL(path())
        except OSError as error:
            name = str(error).partition(":")[0]
            file = None if name == missing else _of_packages(name)
            if file is None:
                raise ImportError(
                    f"annulus: {error}. The package needs its own library, {path()}: build it with "
                    "`pip install .` in a checkout, or set ANNULUS_PYTHON_LIBRARY to its path. It also "
                    "needs the libraries that it was built against: OpenBLAS, fmt and Highway, and in "
                    "a build for GPUs NCCL, cuDNN and NVRTC. Install these for the system or by pip "
                    "(nvidia-nccl-cu13, nvidia-cudnn-cu13, nvidia-cuda-nvrtc), as torch and JAX "
                    "do") from error
            missing = name
            ctypes.CDLL(file)


_library = _open()


# The keywords of arguments that the library calls otherwise.
_KEYWORDS = {"sequence layout": "layout", "sequence granule": "granule", "causal offset": "offset",
             "segment ids": "segments", "query segment ids": "segments (query)",
             "kv segment ids": "segments (keys)", "sink tokens": "sink_tokens",
             "block mask": "block_mask", "block size": "block_size", "dense mask": "mask",
             "soft cap": "soft_cap", "softmax dtype": "softmax_dtype", "bias policy": "bias_policy",
             "call arguments": "call_arguments", "q_lengths": "query_lengths",
             "query spec": "query_spec", "kv spec": "kv_spec", "kv layout": "kv_layout",
             "dropout seed": "seed", "LSE": "lse", "grad output": "grad_output",
             "grad LSE": "grad_lse", "grad query": "grad_query", "grad key": "grad_key",
             "grad value": "grad_value", "grad sinks": "grad_sinks", "grad bias": "grad_bias"}


def check(status: int, _function: Any, _arguments: Any) -> None:
    """Raises the exception of a status."""
    if status == 0:
        return
    if status == _INTERRUPTED:
        _with_lock.annulus_python_raise()  # the exception of a signal handler, as KeyboardInterrupt
    kind = _ERRORS.get(status, LibraryError if status >= 16 else UserError)
    name = _library.annulus_error_argument().decode() if issubclass(kind, ArgumentError) else ""
    bare = name.partition("[")[0]  # without an index
    keyword = _KEYWORDS.get(bare, bare)
    error = kind(keyword + _library.annulus_error_message().decode().removeprefix(bare))
    if isinstance(error, ArgumentError):
        error.argument = keyword.partition(" (")[0] + name.removeprefix(bare)
    if _failures and str(_failures[-1]) in str(error):
        raise error from _failures.pop()
    raise error


_failures: list[Exception] = []  # the last exception of a store


def note_failure(error: Exception) -> None:
    """Records the exception that makes an operation of a store fail."""
    _failures[:] = [error]
    _library.annulus_store_set_error(f"{type(error).__name__}: {error}".encode())


for _name, (_result, _parameters) in _OTHERS.items():
    _function = getattr(_library, _name)
    _function.restype, _function.argtypes = _result, _parameters
for _name, _parameters in _SIGNATURES.items():
    _function = getattr(_library, _name)
    _function.restype, _function.argtypes, _function.errcheck = _INT, _parameters, check


_calls_of_python = (ctypes.c_void_p * 6)(*(
    ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in (
        "PyGILState_Ensure", "PyGILState_Release", "PyErr_CheckSignals", "PyErr_Fetch",
        "PyErr_Restore", "Py_AddPendingCall")))
_library.annulus_python_watch_signals.restype = None
_library.annulus_python_watch_signals(_calls_of_python)
_with_lock = ctypes.PyDLL(None, handle=_library._handle)
_with_lock.annulus_python_raise.restype = None


def function(name: str) -> Any:
    """The C function. If it returns a status, the Python function raises an exception instead."""
    return getattr(_library, "annulus_" + name)


def create(name: str, *arguments: Any) -> Handle:
    """A new handle, which the function stores in its last parameter."""
    handle = Handle()
    function(name)(*arguments, ctypes.byref(handle))
    return handle


def argument_error(name: str, got: Any, expected: str) -> ArgumentError:
    error = ArgumentError(f"{name}: got {got}, expected {expected}")
    error.argument = name
    return error


def int64s(values: Any) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def version() -> str:
    """The version of the library."""
    return _library.annulus_version().decode()


def mpi_library() -> str:
    """The MPI library that annulus uses; "" if it cannot be loaded."""
    return _library.annulus_mpi_library().decode()


def launcher() -> int:
    """1 if an MPI launcher has started this process as one of several, 2 if another launcher has, else 0."""
    return _library.annulus_is_launched()
