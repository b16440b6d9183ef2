"""Ranks on named axes, and their devices."""

from __future__ import annotations

import atexit
import collections
import ctypes
import math
import sys
import weakref
import zlib
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence, Union

import numpy as np

from . import _library, _store
from ._library import LibraryError, UnsupportedError, UserError, argument_error
from ._store import Store

if TYPE_CHECKING:
    from mpi4py import MPI

# The most bytes that are summed through a store.
_LONGEST_SUM = 2**20

# The most attention objects that a mesh keeps; the least recently used one is dropped first. Calls of
# compiled code do not count as uses.
_MAXIMUM_KEPT = 64


def _check_same_mpi(theirs: str) -> None:
    ours = _library.mpi_library()
    first_line = theirs.strip("\0\n ").splitlines()[0].strip()
    if ours and first_line != ours:  # if ours cannot be loaded, the mesh's constructor says why
        raise UserError(f"MPI of mpi4py: got {first_line}, expected annulus's MPI, {ours}: build "
                        "one of the two again with the other's MPI")


def _world() -> Any:
    """All ranks of the job: a communicator of mpi4py or a Store; None for a process alone."""
    launcher = _library.launcher()
    if launcher == 1:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # without mpi4py, or without its MPI
            raise LibraryError("a launcher has started this process as one of several: "
                               f"install mpi4py and MPI to connect them ({error})") from error
        _library.function("check_connected")(MPI.COMM_WORLD.size)
        return MPI.COMM_WORLD
    if _store.torch_size() > 1:
        return _store.of_torch()
    return _store.of_jax() or (_store.of_torch() if launcher == 2 else None)


def _ranks_of(comm: Any, rank: int | None, size: int | None) -> Any:
    """A communicator of mpi4py as it is, or the ranks on a store."""
    if isinstance(comm, Store):
        return comm
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(comm, mpi.Comm):
        return comm
    return _store.store_of(comm, rank, size)


class Mesh:
    """Ranks on named axes. Made by `annulus.mesh()`; collective over its communicator.

    `rank` is this process's, `size` the number of ranks, and `axes` the size of each axis by name.
    """

    def __init__(self, axes: str, comm: Any, *, device: str | int | None = None, threads: int = 0,
                 timeout: float | None = None, share_gpus: bool = False,
                 transport: str = "auto") -> None:
        self._handle: Any = None
        self._mpi: Any = None  # mpi4py's, if it connects the ranks
        self.comm = comm if comm is None else _ranks_of(comm, None, None)
        self.text = axes
        self.attention: weakref.WeakSet[Any] = weakref.WeakSet()  # what close() must end first
        self._kept: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        self._quick: dict[Any, Any] = {}
        self._dropped: list[Any] = []  # kept until their last call and backward pass
        options = _library.create("context_options_create")
        try:
            given = {"mesh": axes.encode(), "place": _place(device), "threads": threads,
                     "timeout": timeout, "share_gpus": int(share_gpus),
                     "transport": transport.encode()}
            for name, value in given.items():
                if value is not None:
                    _library.function("context_options_set_" + name)(options, value)
            if isinstance(self.comm, Store):
                self._handle = _library.create("context_create_on_store", self.comm.handle, options)
                self.comm.used = True
            else:
                address = None
                if self.comm is not None:
                    from mpi4py import MPI

                    self._mpi = MPI
                    self._check_mpi()
                    _check_same_mpi(MPI.Get_library_version())
                    address = MPI._addressof(self.comm)
                self._handle = _library.create("context_create", address, options)
        finally:
            _library.function("context_options_destroy")(options)
        names = [axis.split("=")[0].strip() for axis in axes.split(",") if axis.strip()]
        self.axes: dict[str, int] = {name: self.axis_size(name) for name in names}
        self.rank: int = _library.function("context_rank")(self._handle)
        self.size: int = _library.function("context_size")(self._handle)
        _meshes.append(self)

    @property
    def handle(self) -> Any:
        if self._handle is None:
            raise UserError(f"mesh {self.text}: it was closed, by close() or a later annulus.init()")
        self._check_mpi()
        return self._handle

    def _check_mpi(self) -> None:
        if self._mpi is not None and self._mpi.Is_finalized():
            raise UserError(f"mesh {self.text}: got a call after MPI.Finalize(), expected one before")

    @property
    def device(self) -> str:
        """"cpu" or "cuda:0"."""
        place = _library.function("context_place")(self.handle)
        return "cpu" if place < 0 else f"cuda:{place}"

    def axis_size(self, axis: str) -> int:
        """The number of ranks along an axis."""
        size = ctypes.c_int()
        _library.function("context_axis_size")(self.handle, axis.encode(), ctypes.byref(size))
        return size.value

    def agree(self, error: BaseException | None) -> None:
        """Raises on all ranks if one has an error: its own error there, a UserError elsewhere."""
        text = None if error is None else f"{type(error).__name__}: {error}".encode()
        try:
            _library.function("context_agree")(self.handle, text)
        except UserError:
            if error is None:
                raise
        if error is not None:
            raise error

    def find_quickly(self, quick: Any) -> Any:
        """Like find(), by a second key of the same attention, which callers make more quickly."""
        key = self._quick.get(quick)
        return None if key is None else self.find(key)

    def find(self, key: Any, quick: Any = None) -> Any:
        """The attention that was kept under this key."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        self._kept.move_to_end(key)
        self._remember(quick, kept[0])
        return kept[1]

    def keep(self, key: Any, attention: Any, quick: Any = None) -> None:
        self._kept[key] = (key, attention)
        self._remember(quick, key)
        while len(self._kept) > _MAXIMUM_KEPT:
            _, (_, dropped) = self._kept.popitem(last=False)
            if dropped.native is not None:  # its backward passes may keep it on some ranks
                dropped.native.forget()
            self._dropped = [one for one in (*self._dropped, dropped)
                             if one.native is not None and one.native.uses()]

    def _remember(self, quick: Any, key: Any) -> None:
        if quick is not None:
            if len(self._quick) >= 4 * _MAXIMUM_KEPT:
                self._quick.clear()
            self._quick[quick] = key  # the key object of _kept itself, so that long keys compare fast

    def positions(self, shape: Sequence[int], spec: str, *, layout: str = "contiguous",
                  sequence: int = 1, granule: int = 1,
                  rank: int | None = None) -> list[np.ndarray]:
        """The global positions that a rank holds of each dimension of an array."""
        shown = self.rank if rank is None else rank
        sizes = _library.int64s(shape)

        def read(dimension: int, memory: Any, capacity: int, count: Any) -> None:
            _library.function("context_positions")(
                self.handle, spec.encode(), len(shape), sizes,
                sequence if sequence < len(shape) else -1, layout.encode(), granule, shown,
                dimension, memory, capacity, count)

        return [read_positions(read, dimension) for dimension in range(len(shape))]

    def gather(self, local: np.ndarray, shape: Sequence[int],
               positions: Callable[[int], list[np.ndarray]]) -> np.ndarray:
        """The whole array, from the shards of all ranks, on all ranks. Collective."""
        local = np.ascontiguousarray(local)
        held = tuple(map(len, positions(self.rank)))
        self.agree(None if local.shape == held else argument_error(
            "local", local.shape, f"{held}, this rank's part of {tuple(shape)}"))
        if self.comm is None:
            shards = [local]
        elif isinstance(self.comm, Store):
            shards = self._gather_on_store(local, positions)
        else:
            shards = self.comm.allgather(local)
        whole = np.empty(tuple(shape), local.dtype)
        for rank, shard in enumerate(shards):
            whole[np.ix_(*positions(rank))] = shard
        return whole

    def sum(self, array: np.ndarray) -> None:
        """Sums an array of float32 or float64 over all ranks, in place. Collective."""
        if isinstance(self.comm, Store):
            if array.nbytes > _LONGEST_SUM:
                raise UnsupportedError(f"sum of {array.nbytes} bytes: a key-value store connects the ranks, and "
                                       f"sums of more than {_LONGEST_SUM} need MPI or torch.distributed")
            total = array.astype(np.float64, order="C")
            _library.function("context_sum")(self.handle, total.ctypes.data, total.size)
            array[...] = total
        elif self.comm is not None:
            from mpi4py import MPI

            self.comm.Allreduce(MPI.IN_PLACE, array)

    def differing(self, parts: Mapping[str, Any]) -> str | None:
        """The first part that is not the same on all ranks, by checksums of integer arrays and of other
        parts' text. Collective."""
        def checksum(part: Any) -> int:
            if not isinstance(part, np.ndarray):
                return zlib.crc32(repr(part).encode())
            return zlib.crc32(np.ascontiguousarray(part, np.int64).data,
                              zlib.crc32(str(part.shape).encode()))

        mine = np.array([checksum(part) for part in parts.values()])
        every = np.empty((self.size, len(parts)), mine.dtype)
        _library.function("context_gather")(self.handle, mine.ctypes.data, mine.nbytes,
                                            every.ctypes.data)
        same = (every == every[0]).all(axis=0)
        return next((name for name, alike in zip(parts, same) if not alike), None)

    def _gather_on_store(self, local: np.ndarray,
                         positions: Callable[[int], list[np.ndarray]]) -> list[np.ndarray]:
        shapes = [tuple(map(len, positions(rank))) for rank in range(self.size)]
        most = max(math.prod(shape) for shape in shapes)
        mine = np.zeros(most, local.dtype)
        mine[:local.size] = local.ravel()
        every = np.empty((self.size, most), local.dtype)
        _library.function("context_gather")(self.handle, mine.ctypes.data, mine.nbytes,
                                            every.ctypes.data)
        return [every[rank, :math.prod(shape)].reshape(shape) for rank, shape in enumerate(shapes)]

    def close(self) -> None:
        """Ends the mesh and its attention. Collective; done at exit otherwise."""
        if self._handle is None:
            return
        attention = list(self.attention)
        for one in attention:
            one.refuse_close_within_call()
        for one in attention:
            one.close()
        self._kept.clear()
        self._quick.clear()
        self._dropped.clear()
        handle, self._handle = self._handle, None
        _meshes.remove(self)
        for key, mesh in list(_by_axes.items()):
            if mesh is self:
                del _by_axes[key]
        _library.function("context_destroy")(handle)

    def __repr__(self) -> str:
        where = "closed" if self._handle is None else self.device
        axes = ",".join(f"{name}={size}" for name, size in self.axes.items())
        return f"annulus.Mesh({axes!r}, rank {self.rank} of {self.size}, {where})"


def read_positions(read: Callable[[int, Any, int, Any], None], dimension: int) -> np.ndarray:
    count = ctypes.c_int64()
    read(dimension, None, 0, ctypes.byref(count))
    positions = np.empty(count.value, np.int64)
    read(dimension, positions.ctypes.data, count.value, ctypes.byref(count))
    return positions


def _place(device: str | int | None) -> int | None:
    if device is None:
        return None
    if device == "cpu":
        return -1
    if isinstance(device, int):
        return device
    if device == "cuda":
        return -2  # ANNULUS_CURRENT_CUDA_DEVICE
    kind, _, number = device.partition(":")
    if kind == "cuda" and number.isdigit():
        return int(number)
    raise argument_error("device", repr(device), '"cpu", "cuda", "cuda:N" or N')


_meshes: list[Mesh] = []
_by_axes: dict[str, Mesh] = {}
_settings: dict[str, Any] | None = None


def init(comm: "MPI.Comm | Any | None" = None, *, rank: int | None = None, size: int | None = None,
         device: str | int | None = None, threads: int = 0, timeout: float | None = None,
         share_gpus: bool = False, transport: str = "auto") -> None:
    """Sets the ranks that compute, and their devices; closes earlier meshes. Collective.

    - comm: a communicator of mpi4py, or a key-value store. A store is torch.distributed's,
      jax.distributed's client, or an object with set(key, value), get(key), wait(keys, timeout) and
      delete_key(key). Without MPI, ranks exchange data between GPUs only. None: the first of these that
      has several processes: mpirun, torch.distributed, jax.distributed, torchrun; if none has, this
      process alone.
    - rank, size: the rank of this process on a store and the number of ranks, if torch.distributed,
      jax.distributed and the environment do not have them.
    - device: "cpu", "cuda:N", or "cuda", the CUDA device that is current. None: likewise, or the CPU where
      there is none.
    - threads: number of CPU threads of a rank's kernels; 0: its share of the cores.
    - timeout: seconds of silence after which a wait for other ranks fails.
    """
    global _settings
    _place(device)
    _close_all()
    ranks = _world() if comm is None else _ranks_of(comm, rank, size)
    _settings = {"comm": ranks, "device": device, "threads": threads,
                 "timeout": timeout, "share_gpus": share_gpus, "transport": transport}
    close_at_exit()


def mesh(axes: "Mapping[str, int] | str | None" = None) -> Mesh:
    """Ranks on named axes, the last one fastest: {"dp": 2, "sp": 4}, or "dp=2,sp=4".

    One size may be -1. None: {"sp": -1}, all ranks share the sequence. Collective for new axes; the
    same axes return the same mesh.
    """
    if _settings is None:
        init()
    assert _settings is not None
    if axes is None:
        axes = "sp=-1"
    if not isinstance(axes, (str, Mapping)):
        raise argument_error("mesh", repr(axes), 'names with sizes, {"sp": 4}, or a text, "sp=4"')
    text = axes if isinstance(axes, str) else ",".join(f"{name}={size}" for name, size in axes.items())
    found = _by_axes.get(text)
    if found is None:
        found = _by_axes[text] = Mesh(text, **_settings)
    return found


# A mesh, or an argument of mesh().
AnyMesh = Union[Mesh, Mapping[str, int], str, None]


def mesh_of(given: AnyMesh) -> Mesh:
    return given if isinstance(given, Mesh) else mesh(given)


def _close_all() -> None:
    for one in list(_meshes):
        one.close()


def _at_exit() -> None:
    try:
        _close_all()
    finally:
        _store.leave_all()


def close_at_exit() -> None:
    """Ends all meshes at exit, before the modules that have been imported so far end."""
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


# mpi4py ends MPI after all of Python's own exit functions.
close_at_exit()
