"""Key-value stores of torch.distributed and jax.distributed, which connect ranks without MPI."""

from __future__ import annotations

import ctypes
import datetime
import os
import sys
import time
from typing import Any

from . import _library
from ._library import LibraryError

_NO_VALUE = 1
_FAILED = -1
_LAST_WAIT = 5.0  # seconds that rank 0 waits for the others at exit


class _Torch:
    """torch's Store (TCPStore, PrefixStore, …), or any object with these methods: set(key, value); get(key),
    which returns bytes; wait(keys, timeout), which raises TimeoutError; delete_key(key). check(keys) is optional."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._check = getattr(store, "check", None)

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str, seconds: float) -> bytes | None:
        if self._check is not None:
            # torch's wait() writes a warning to stderr whenever it times out.
            if not self._check([key]):
                time.sleep(seconds)
                if seconds == 0 or not self._check([key]):
                    return None
            return self._store.get(key)
        try:
            self._store.wait([key], datetime.timedelta(seconds=max(seconds, 0.001)))
        except Exception as error:
            # After the timeout, torch's stores raise errors of their own, and others a TimeoutError.
            if isinstance(error, TimeoutError) or str(error).startswith("Wait timeout") or (
                    type(error).__name__ == "DistStoreError" and "wait timeout" in str(error)):
                return None
            raise
        return self._store.get(key)

    def remove(self, key: str) -> None:
        self._store.delete_key(key)


class _Jax:
    """The client of JAX's coordination service."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: bytes) -> None:
        self._client.key_value_set_bytes(key, value, allow_overwrite=True)

    def get(self, key: str, seconds: float) -> bytes | None:
        try:
            if seconds < 0.001:
                return self._client.key_value_try_get_bytes(key)
            return self._client.blocking_key_value_get_bytes(key, int(seconds * 1000))
        except Exception as error:
            if str(error).startswith(("DEADLINE_EXCEEDED", "NOT_FOUND")):
                return None
            raise

    def remove(self, key: str) -> None:
        self._client.key_value_delete(key)


def _is_jax(store: Any) -> bool:
    return hasattr(store, "key_value_set_bytes")


_SET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p,
                        ctypes.c_size_t)
_GET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_double,
                        ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t))
_REMOVE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)


class _Calls(ctypes.Structure):
    _fields_ = [("user", ctypes.c_void_p), ("set", _SET), ("get", _GET), ("remove", _REMOVE)]


class Store:
    """All ranks of a job, which find each other on a store."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.used = False
        calls: Any = _Jax(store) if _is_jax(store) else _Torch(store)
        self._client = calls

        def guarded(body: Any) -> Any:
            def call(_user: Any, key: bytes, *arguments: Any) -> int:
                try:
                    return body(key.decode(), *arguments)
                except Exception as error:
                    _library.note_failure(error)
                    return _FAILED
            return call

        def set_value(key: str, value: int, length: int) -> int:
            calls.set(key, ctypes.string_at(value, length))
            return 0

        def get_value(key: str, seconds: float, memory: int, capacity: int, length: Any) -> int:
            value = calls.get(key, seconds)
            if value is None:
                return _NO_VALUE
            if len(value) > capacity:
                raise LibraryError(f"a value of {len(value)} bytes, expected {capacity} at most")
            ctypes.memmove(memory, value, len(value))
            length[0] = len(value)
            return 0

        def remove(key: str) -> int:
            calls.remove(key)
            return 0

        self._calls = _Calls(None, _SET(guarded(set_value)), _GET(guarded(get_value)),
                             _REMOVE(guarded(remove)))
        self.handle = _library.create("store_create", ctypes.byref(self._calls), rank, size)

    def leave(self) -> None:
        """Lets rank 0, whose process may be that of the store, end after the others' last messages.

        Call it at exit. Rank 0 waits only for a few seconds, since a rank may be lost.
        """
        try:
            if self.rank > 0:
                self._client.set(f"annulus/left/{self.rank}", b"left")
            end = time.monotonic() + _LAST_WAIT
            for rank in range(1, self.size) if self.rank == 0 else ():
                key = f"annulus/left/{rank}"
                while self._client.get(key, 0.01) is None:
                    if time.monotonic() > end:
                        return
                self._client.remove(key)
        except Exception:  # the store has ended
            pass


_stores: dict[tuple[int, int, int], tuple[Any, Store]] = {}


def store_of(store: Any, rank: int | None, size: int | None) -> Store:
    """Returns the one object of a store, so that all ranks number the meshes on the store alike."""
    for name in () if _is_jax(store) else ("set", "get", "wait", "delete_key"):
        if not hasattr(store, name):
            raise TypeError(f"comm: got {type(store).__name__}, expected a communicator of mpi4py, a store "
                            f"of torch.distributed or the client of jax.distributed: it has no {name}()")
    if rank is None or size is None:
        rank, size = _place_in_job(store)
    key = (id(store), rank, size)
    if key not in _stores:
        _stores[key] = (store, Store(store, rank, size))
    return _stores[key][1]


def leave_all() -> None:
    for _, store in _stores.values():
        if store.used:
            store.leave()


def _place_in_job(store: Any) -> tuple[int, int]:
    """This process's number, and the number of processes."""
    state = _jax_state()
    if state is not None and store is state.client:
        return state.process_id, state.num_processes
    torch = _torch_state()
    if torch is not None:
        return torch.get_rank(), torch.get_world_size()
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except KeyError as error:
        raise TypeError("comm: a store needs the arguments rank and size where neither "
                        f"torch.distributed nor the environment has them ({error})") from None


def _torch_state() -> Any:
    """torch.distributed; None unless it has been initialised."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() and module.is_initialized() else None


def _jax_state() -> Any:
    """The state of jax.distributed; None unless it has been initialised."""
    module = sys.modules.get("jax._src.distributed")
    state = None if module is None else module.global_state
    return state if state is not None and state.client is not None else None


def torch_size() -> int:
    """The number of processes that torch.distributed connects; 1 unless it has been initialised."""
    torch = _torch_state()
    return 1 if torch is None else torch.get_world_size()


def of_torch() -> Store:
    """The processes of torchrun, whether or not they have initialised torch.distributed."""
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise LibraryError("torchrun, or the variables RANK, WORLD_SIZE and MASTER_ADDR, have started "
                           f"this process as one of several: install torch to connect them ({error})"
                           ) from error
    if dist.is_initialized():
        return store_of(dist.distributed_c10d._get_default_store(), None, None)
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
               if name not in os.environ]
    if missing:
        raise LibraryError("a launcher has started this process as one of several, but nothing connects "
                           "them: start them by mpirun, srun --mpi=pmix or torchrun, call "
                           "jax.distributed.initialize() before, or set the variables that torch needs; "
                           f"missing: {', '.join(missing)}")
    global _rendezvous
    if _rendezvous is None:
        _rendezvous = next(dist.rendezvous("env://"))
    return store_of(*_rendezvous)


_rendezvous: tuple[Any, int, int] | None = None


def of_jax() -> Store | None:
    """The processes that jax.distributed connects, if it has been initialised for several."""
    state = _jax_state()
    if state is None or state.num_processes == 1:
        return None
    return store_of(state.client, None, None)
