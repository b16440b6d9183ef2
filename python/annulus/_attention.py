"""Attention over shards of arrays, and the functions that make and keep the objects it needs."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, Mapping, NamedTuple, Sequence

import numpy as np

from . import _library
from ._library import argument_error
from ._mesh import AnyMesh, Mesh, mesh_of, read_positions
from ._options import Call, Options, calls_of, int32, make_options
from ._tensors import (HOST, OPERANDS, Tensors, check_array, dtype_name, empty, float_number,
                       place_of, stream_of)

if TYPE_CHECKING:
    from typing_extensions import Unpack

_PER_CALL = ("query_lengths", "kv_lengths")


class Gradients(NamedTuple):
    """Gradients of the loss, each with the shape of its operand; None: not requested."""

    query: Any
    key: Any
    value: Any
    sinks: Any = None
    bias: Any = None


def _rows(sinks: Any) -> Any:
    """Returns sinks [n] (one per head) or [n,M] as [n,M]."""
    return sinks[:, None] if sinks.ndim == 1 else sinks


def closed_error() -> Exception:
    return _library.UserError("attention: it was closed")


class Attention:
    """Attention planned once, for calls on the shards of a rank: query [b,t,n,D], key [b,s,k,D],
    value [b,s,k,Dv]. Collective over the mesh, as are run() and backward().

    - shape: (B, T, S, N, K, D, Dv) of the whole problem.
    - sinks: the number of sinks per head that every call passes.
    - bias, mask: shapes of the whole bias and the whole dense mask, [B,N,T,S], 1 where broadcast.
    """

    native: Any = None  # the object's counterpart in torch_calls.cpp, if it has one

    _handle: Any = None
    _ending: Any = None  # the handle, from the beginning of close() to its end
    _closer: int | None = None  # the thread within close()

    # Dimensions of the bias in which it may be broadcast, for all that its shape on this rank says.
    unsaid: tuple[int, ...] = ()

    def __init__(self, shape: Sequence[int], dtype: str = "float32", *, mesh: AnyMesh = None,
                 sinks: int = 0, bias: Sequence[int] | None = None,
                 mask: Sequence[int] | None = None, **options: "Unpack[Options]") -> None:
        on = mesh_of(mesh)
        calls: list[Call] = []
        error: Exception | None = None
        try:
            if len(shape) != 7:
                raise argument_error("shape", tuple(shape), "(B, T, S, N, K, D, Dv)")
            calls = [("shape", tuple(int(size) for size in shape)),
                     ("dtype", float_number(dtype, "dtype"))]
            for name, whole in (("bias", bias), ("dense_mask", mask)):
                if whole is not None:
                    sizes = (shape[0], shape[3], shape[1], shape[2])
                    if len(whole) != 4 or any(a not in (1, b) for a, b in zip(whole, sizes)):
                        raise argument_error(name, tuple(whole), f"{sizes} or 1")
                    calls.append((name, tuple(int(a == b) for a, b in zip(whole, sizes))))
            if sinks:
                calls.append(("integer", "call_sinks", sinks))
            calls += calls_of(dict(options))
        except (TypeError, ValueError) as caught:
            error = caught
        on.agree(error)
        self._open(on, calls)

    def _open(self, mesh: Mesh, calls: Sequence[Call]) -> None:
        self.mesh = mesh
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._positions: dict[tuple[str, int | None], list[np.ndarray]] = {}
        self._idle: dict[tuple[str, ...], list[Tensors]] = {}
        self._calls: dict[object, int] = {}  # calls of the library under way, and their threads
        # Also held while parts of the object are made. Signal handlers may need it again.
        self.lock = threading.RLock()
        self.at_close: list[Callable[[], None]] = []  # called before the object ends
        handle = make_options(calls)
        try:
            self._handle = _library.create("attention_create", mesh.handle, handle)
        finally:
            _library.function("attention_options_destroy")(handle)
        self._varies = {call[1] for call in calls if call[0] == "integer" and call[2]}
        self.drops = any(call[0] == "dropout" for call in calls)
        mesh.attention.add(self)

    @classmethod
    def _of_calls(cls, mesh: Mesh, calls: Sequence[Call]) -> "Attention":
        made = cls.__new__(cls)
        made._open(mesh, calls)
        return made

    @property
    def handle(self) -> Any:
        if self._handle is None:
            raise closed_error()
        return self._handle

    def refuse_close_within_call(self) -> None:
        """Raises UserError in a signal handler within a call, or within close(), on this thread."""
        thread = threading.get_ident()
        within = self._closer == thread or thread in list(self._calls.values())
        if within or (self.native is not None and self.native.is_within()):
            raise _library.UserError("attention: got close() within a call, expected it after the "
                                     "call")

    def close(self) -> None:
        """Waits for calls under way, on any thread, and frees the object.

        Later calls raise UserError, as does close() in a signal handler within a call. If an exception of a
        signal handler interrupts close(), the next close() goes on from there.
        """
        if self._handle is None and self._ending is None:
            return
        self.refuse_close_within_call()
        with self.lock:  # which close() on another thread may hold
            self._closer = threading.get_ident()
            try:
                self._end()
            finally:
                self._closer = None

    def _end(self) -> None:
        if self._handle is not None:
            self._ending, self._handle = self._handle, None
        if self._ending is None:
            return
        error: Exception | None = None
        while self.at_close:
            try:
                self.at_close[0]()
            except Exception as caught:  # the object must end all the same
                error = error or caught
            self.at_close.pop(0)
        while self._calls or (self.native is not None and self.native.calls()):
            time.sleep(0.001)
        handle, self._ending = self._ending, None
        _library.function("attention_destroy")(handle)
        if error is not None:
            raise error

    def _library_call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the library; close() waits for the call."""
        call = object()
        try:
            self._calls[call] = threading.get_ident()
            _library.function("attention_" + name)(self.handle, *arguments)
        finally:
            self._calls.pop(call, None)

    def __del__(self) -> None:
        self.close()

    def shape(self, operand: str) -> tuple[int, ...]:
        """The shape of the rank's shard: of "query", "key", "value", "output", "lse", "bias", …"""
        found = self._shapes.get(operand)
        if found is None:
            sizes = (ctypes.c_int64 * 6)()
            count = ctypes.c_int()
            self._library_call("shape", _operand(operand), sizes, ctypes.byref(count))
            found = self._shapes[operand] = tuple(sizes[:count.value])
        return found

    def positions(self, operand: str = "query", rank: int | None = None) -> list[np.ndarray]:
        """The global positions that a rank holds of every dimension of an operand."""
        known = self._positions.get((operand, rank))
        if known is not None:
            return known
        number = _operand(operand)
        shown = self.mesh.rank if rank is None else rank

        def read(dimension: int, memory: Any, capacity: int, count: Any) -> None:
            self._library_call("positions", number, shown, dimension, memory, capacity, count)

        found = [read_positions(read, dimension)
                 for dimension in range(len(self.shape(operand)))]
        self._positions[operand, rank] = found
        return found

    def shard(self, whole: np.ndarray, operand: str = "query") -> np.ndarray:
        """The rank's shard of a whole array."""
        return whole[np.ix_(*self.positions(operand))]

    def unshard(self, local: np.ndarray, operand: str = "output") -> np.ndarray:
        """The whole array, on every rank. Collective."""
        held = [self.positions(operand, rank) for rank in range(self.mesh.size)]
        shape = [1 + max(int(of_rank[d].max(initial=-1)) for of_rank in held)
                 for d in range(len(held[0]))]
        return self.mesh.gather(local, shape, held.__getitem__)

    def plan(self, ranks: int = 0) -> str:
        """The plan of every rank, with the tasks of this many ranks."""
        return self._text("plan_text", ranks)

    def explain(self) -> str:
        """The reasons of the plan; only rank 0 knows why schedules were passed over."""
        return self._text("explanation")

    def _text(self, name: str, *arguments: Any) -> str:
        text = ctypes.c_char_p()
        with self.lock:  # the next text takes the place of this one
            self._library_call(name, *arguments, ctypes.byref(text))
            assert text.value is not None
            return text.value.decode()

    def _numbers(self, values: Any, name: str) -> Any:
        """Lengths or offsets of this rank's batches; values on a GPU are read there."""
        if ("call_offsets" if name == "offsets" else "call_lengths") not in self._varies:
            raise TypeError(f"{name}: call_arguments does not name them")
        on_gpu = hasattr(values, "data_ptr") and place_of(values, name) != HOST
        if on_gpu:
            numbers = values.reshape(-1).to(sys.modules["torch"].int32)
        else:
            numbers = np.atleast_1d(int32(values, name))
        local = self.positions("query")[0]
        if len(numbers) > 1 and len(local) != len(numbers):
            # A copy of the positions to the GPU would wait for it.
            numbers = (numbers[int(local[0]):int(local[-1]) + 1]
                       if len(local) and local[-1] - local[0] + 1 == len(local)
                       else numbers[local.tolist()])
        return numbers

    def _call(self, function: str, operands: dict[str, Any], seed: Any, sinks: Any, bias: Any,
              mask: Any, values: Mapping[str, Any], *arguments: Any) -> None:
        """Calls the library with these operands, of which the first is the query."""
        if sinks is not None:
            operands["sinks"] = _rows(sinks)
        if bias is not None:
            operands["bias"] = bias
        if mask is not None:
            operands["mask"] = mask
        for name, numbers in values.items():
            if numbers is not None:
                operands[name] = self._numbers(numbers, name)
        if seed is None and self.drops:
            raise TypeError("seed: expected one in every call with dropout")
        # Descriptions of operands are kept for the next call; concurrent calls need their own.
        names = (*operands, "" if seed is None else type(seed).__name__)
        idle = self._idle.setdefault(names, [])
        try:
            tensors = idle.pop()
        except IndexError:
            tensors = Tensors(names[:-1])
        tensors.fill(operands)
        if seed is not None:
            tensors.set_seed(seed)
        self._library_call(function, tensors.handle, *arguments)
        idle.append(tensors)

    def run(self, query: Any, key: Any, value: Any, *, sinks: Any = None, bias: Any = None,
            mask: Any = None, seed: int | None = None, query_lengths: Any = None,
            kv_lengths: Any = None, offset: Any = None, out: Any = None,
            stream: int | None = None) -> tuple[Any, Any]:
        """Output [b,t,n,Dv] and LSE [b,n,t]. Collective.

        - stream: of a GPU, where the work is enqueued; by default torch's current one.
        - bias, mask: the rank's rows, and all keys.
        - sinks: of the rank's heads, [n] or [n,M].
        - query_lengths, kv_lengths, offset: of all batches, [B], if they are call_arguments.
        """
        check_array(query, "query")
        if out is None:
            out = empty(query, self.shape("output"))
        elif isinstance(out, np.ndarray) and not out.flags.writeable:
            raise argument_error("out", "an array that is read only", "one to write to")
        elif tuple(out.shape) != self.shape("output") or out.dtype != query.dtype:
            raise argument_error("out", f"{dtype_name(out)} {tuple(out.shape)}",
                                 f"{dtype_name(query)} {self.shape('output')}")
        lse = empty(query, self.shape("lse"), "float32")
        self._call("run",
                   {"query": query, "key": key, "value": value, "output": out, "lse": lse}, seed,
                   sinks, bias, mask, {"query_lengths": query_lengths, "kv_lengths": kv_lengths,
                                       "offsets": offset},
                   stream_of(query) if stream is None else stream)
        return out, lse

    def backward(self, grad_output: Any, query: Any, key: Any, value: Any, output: Any, lse: Any, *,
                 grad_lse: Any = None, sinks: Any = None, bias: Any = None, mask: Any = None,
                 seed: int | None = None, query_lengths: Any = None, kv_lengths: Any = None,
                 offset: Any = None, grad_sinks: bool | None = None, grad_bias: bool = False,
                 stream: int | None = None) -> Gradients:
        """The gradients, from the arguments and results of run(). Collective.

        grad_sinks: whether to compute the gradient of the sinks; None: if there are sinks.
        """
        check_array(query, "query")
        found = {"query": empty(query, query.shape), "key": empty(key, key.shape),
                 "value": empty(value, value.shape)}
        if sinks is not None if grad_sinks is None else grad_sinks:
            found["sinks"] = empty(query, self.shape("sinks"), "float32")
        if grad_bias:
            if not self.shape("bias"):
                raise argument_error("grad_bias", True, "False without a bias")
            self.check_bias_gradient()
            found["bias"] = empty(query, self.shape("bias"), "float32")
        operands = {"query": query, "key": key, "value": value, "output": output, "lse": lse,
                    "grad_output": grad_output}
        if grad_lse is not None:
            operands["grad_lse"] = grad_lse
        for name, array in found.items():
            operands["grad_" + name] = array
        self._call("backward", operands, seed, sinks, bias, mask,
                   {"query_lengths": query_lengths, "kv_lengths": kv_lengths, "offsets": offset},
                   0, stream_of(query) if stream is None else stream)
        if "sinks" in found and sinks is not None:
            found["sinks"] = found["sinks"].reshape(tuple(sinks.shape))
        return Gradients(**found)

    def check_bias_gradient(self) -> None:
        """Refuses the gradient of a bias if its shape does not tell whether all ranks share it."""
        held = ([self.positions("bias", rank) for rank in range(self.mesh.size)] if self.unsaid else [])
        if any(len({tuple(of_rank[d]) for of_rank in held}) > 1 for d in self.unsaid):
            raise argument_error("bias_shape", None, "the shape [B,N,T,S] of the whole bias: one entry on "
                                 "every rank may be the same one or not, and a shared one gets the sum")
        self.unsaid = ()

    def wait(self) -> None:
        """Returns when all calls are done."""
        self._library_call("wait")


def _operand(name: str) -> int:
    if name not in OPERANDS:
        raise argument_error("operand", repr(name), f"one of {', '.join(OPERANDS)}")
    return OPERANDS[name]


def _scores(array: Any, name: str, local: Sequence[int], whole: Any = None) -> tuple[int, ...]:
    """The dimensions of [B,N,T,S] that a bias or a mask has.

    Without the shape of the whole bias or mask, a dimension counts as broadcast if the rank's part has
    size 1 in it and the query does not.
    """
    if array.ndim != 4:
        raise argument_error(name, f"{array.ndim} dimensions", "[b,n,t,S], 1 where broadcast")
    has = [int(size != 1 or held == 1) for size, held in zip(array.shape, (*local, 0))]
    if whole is not None:
        if len(whole) != 4 or any(all_of == 1 != size for all_of, size in zip(whole, array.shape)):
            raise argument_error(f"{name}_shape", tuple(whole),
                                 f"[B,N,T,S] of which {tuple(array.shape)} is a part, 1 where broadcast")
        has = [int(all_of != 1) for all_of in whole]
    return tuple(has)


_PLAIN = frozenset({int, float, bool, str, type(None)})


def _cheap(options: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Makes a key quickly; None if the values may be mutable or long."""
    for value in options.values():
        kind = type(value)
        if kind not in _PLAIN and not (
                isinstance(value, tuple) and all(type(x) in _PLAIN for x in value)):
            return None
    return tuple(options.items())


def attention_for(query: Any, key: Any, value: Any, *, mesh: AnyMesh = None, sinks: Any = None,
                  bias: Any = None, mask: Any = None, known: Any = None,
                  **options: Any) -> Attention:
    """The cached object for calls with such shards and options; collective when it is made.

    known: a key in place of the options, if the caller has one.
    """
    on = mesh_of(mesh)
    error: Exception | None = None
    calls: list[Call] = []
    kinds: Any = None
    quick: Any = None
    unsaid: tuple[int, ...] = ()
    try:
        if known is None:
            known = _cheap(options)
        if known is not None:
            try:
                quick = (known, query.shape, key.shape, value.shape, query.dtype, key.dtype,
                         value.dtype, None if sinks is None else (sinks.shape, sinks.dtype),
                         None if bias is None else (bias.shape, bias.dtype),
                         None if mask is None else (mask.shape, mask.dtype))
                found = on.find_quickly(quick)
                if found is not None:
                    return found
            except AttributeError:
                pass  # a later check names an operand that is no array
        operands = {"query": query, "key": key, "value": value, "sinks": sinks, "bias": bias,
                    "mask": mask}
        for name, array in operands.items():
            if array is not None or name in ("query", "key", "value"):
                check_array(array, name)
            if name in ("query", "key", "value") and array.ndim != 4:
                raise argument_error(name, f"{array.ndim} dimensions",
                                     "[batch, sequence, heads, dim]")
        # An object may refuse all of this in its first call, where ranks agree on errors.
        kinds = tuple(array if array is None else (tuple(array.shape), dtype_name(array))
                      for array in operands.values())
        (b, t, n, d), (_, s, k, _), (*_, dv) = query.shape, key.shape, value.shape
        calls = [("local_shape", (b, t, s, n, k, d, dv)),
                 ("dtype", float_number(dtype_name(query), "query"))]
        if sinks is not None:
            calls.append(("integer", "call_sinks", _rows(sinks).shape[1]))
        if bias is not None:
            whole = options.pop("bias_shape", None)
            calls.append(("bias", _scores(bias, "bias", (b, n, t), whole)))
            kinds = (*kinds, whole is None)
            if whole is None:
                unsaid = tuple(d for d, size in enumerate((b, n, t)) if bias.shape[d] == size == 1)
        if mask is not None:
            calls.append(("dense_mask", _scores(mask, "mask", (b, n, t))))
        calls += calls_of(options)
        found = on.find((tuple(calls), kinds), quick)
        if found is not None:
            return found
    except (TypeError, ValueError) as caught:
        error = caught
    on.agree(error)
    made = Attention._of_calls(on, calls)
    if bias is not None:  # uneven shards have one entry on some ranks only
        of_all = np.zeros(3)
        of_all[list(unsaid)] = 1
        on.sum(of_all)
        made.unsaid = tuple(np.flatnonzero(of_all))
    on.keep((tuple(calls), kinds), made, quick)
    return made


def call_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options whose values come with each call."""
    varying = options.get("call_arguments")
    if not varying:
        return {}
    values: dict[str, Any] = {}
    if "lengths" in varying:
        values |= {name: options.get(name) for name in _PER_CALL}
    if "offsets" in varying and not isinstance(options.get("offset"), str):
        values["offset"] = options.get("offset")
    return values


def _refuse_gradients(**arrays: Any) -> None:
    """Raises TypeError for a tensor whose gradients would be lost silently."""
    for name, array in arrays.items():
        if getattr(array, "requires_grad", False) and sys.modules["torch"].is_grad_enabled():
            raise TypeError(f"{name}: a tensor that requires gradients, which only "
                            "annulus.torch.attention() passes on; expected one without, or "
                            "torch.no_grad()")


def prepare(query: Any, key: Any, value: Any, *, mesh: AnyMesh = None, sinks: Any = None,
            bias: Any = None, mask: Any = None,
            **options: Any) -> tuple[Attention, dict[str, Any]]:
    """The result of attention_for(), and the values that come with the call."""
    values = call_values(options)
    for name in values:
        options.pop(name, None)
    return attention_for(query, key, value, mesh=mesh, sinks=sinks, bias=bias, mask=mask,
                         **options), values


def attention(query: Any, key: Any, value: Any, *, mesh: AnyMesh = None, sinks: Any = None,
              bias: Any = None, mask: Any = None, seed: int | None = None, out: Any = None,
              stream: int | None = None, **options: "Unpack[Options]") -> tuple[Any, Any]:
    """Exact attention over the shards of all ranks: output [b,t,n,Dv] and LSE [b,n,t]. Collective.

    query [b,t,n,D], key [b,s,k,D], value [b,s,k,Dv]: this rank's shards, NumPy arrays or torch
    tensors, of any strides that leave the last dimension contiguous. `Options` lists the keywords.
    A repeated call plans nothing.
    """
    _refuse_gradients(query=query, key=key, value=value, sinks=sinks, bias=bias)
    made, values = prepare(query, key, value, mesh=mesh, sinks=sinks, bias=bias, mask=mask,
                           **options)
    return made.run(query, key, value, sinks=sinks, bias=bias, mask=mask, seed=seed, out=out,
                    stream=stream, **values)


def attention_backward(grad_output: Any, query: Any, key: Any, value: Any, output: Any, lse: Any, *,
                       mesh: AnyMesh = None, grad_lse: Any = None, sinks: Any = None,
                       bias: Any = None, mask: Any = None, seed: int | None = None,
                       grad_sinks: bool | None = None, grad_bias: bool = False,
                       stream: int | None = None, **options: "Unpack[Options]") -> Gradients:
    """The gradients of attention() with the same keywords. Collective."""
    made, values = prepare(query, key, value, mesh=mesh, sinks=sinks, bias=bias, mask=mask,
                           **options)
    return made.backward(grad_output, query, key, value, output, lse, grad_lse=grad_lse, sinks=sinks,
                         bias=bias, mask=mask, seed=seed, grad_sinks=grad_sinks,
                         grad_bias=grad_bias, stream=stream, **values)


def plan(query: Any, key: Any, value: Any, *, ranks: int = 0, **keywords: Any) -> str:
    """The plan of every rank in attention() with these keywords. Collective."""
    return attention_for(query, key, value, **keywords).plan(ranks)


def explain(query: Any, key: Any, value: Any, **keywords: Any) -> str:
    """The reasons of the plan that plan() returns. Collective."""
    return attention_for(query, key, value, **keywords).explain()


def positions(shape: Sequence[int], spec: str, *, mesh: AnyMesh = None,
              layout: str = "contiguous", sequence: int = 1, granule: int = 1,
              rank: int | None = None) -> list[np.ndarray]:
    """The global positions that a rank holds of every dimension of an array.

    - spec: the mesh axes of each dimension, "dp,sp,tp,-".
    - layout: how dimension `sequence` is distributed: "contiguous", "zigzag" or "striped".
    """
    return mesh_of(mesh).positions(shape, spec, layout=layout, sequence=sequence, granule=granule,
                                   rank=rank)


def shard(whole: np.ndarray, spec: str, *, mesh: AnyMesh = None, layout: str = "contiguous",
          sequence: int = 1, granule: int = 1) -> np.ndarray:
    """The rank's shard of a whole array. Arguments as in positions()."""
    check_array(whole, "whole")
    return whole[np.ix_(*positions(whole.shape, spec, mesh=mesh, layout=layout, sequence=sequence,
                                   granule=granule))]


def unshard(local: np.ndarray, spec: str, shape: Sequence[int], *, mesh: AnyMesh = None,
            layout: str = "contiguous", sequence: int = 1, granule: int = 1) -> np.ndarray:
    """The whole array of this shape, on every rank. Collective. Arguments as in positions()."""
    on = mesh_of(mesh)
    return on.gather(local, shape, lambda rank: on.positions(
        shape, spec, layout=layout, sequence=sequence, granule=granule, rank=rank))
