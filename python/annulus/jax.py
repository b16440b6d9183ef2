"""Attention in programs of JAX, with gradients: on a process's own arrays, or in jax.shard_map."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import TYPE_CHECKING, Any, Mapping, Sequence

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise ImportError(f"annulus.jax needs JAX 0.10 or later ({error})") from error

import numpy as np

from . import _jax_primitive as primitive
from . import _mesh as meshes
from ._attention import Attention, attention_for
from ._jax_primitive import Result
from ._library import UnsupportedError, argument_error
from ._mesh import Mesh, mesh_of
from ._options import Options, unknown

if TYPE_CHECKING:
    from typing_extensions import TypeAlias, Unpack

    AnyMesh: TypeAlias = Mesh | jax.sharding.Mesh | Mapping[str, int] | str | None

# Keywords whose values may come with every call, the operand of each, and their call_arguments.
_PER_CALL = {"query_lengths": ("query_lengths", "lengths"), "kv_lengths": ("kv_lengths", "lengths"),
             "offset": ("offsets", "offsets")}
_DIFFERENTIABLE = ("query", "key", "value", "sinks", "bias")


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static arguments of a call of the operator."""

    key: str
    manual: tuple[str, ...]  # the axes of jax.shard_map, if the call is in one
    tracked: bool  # whether JAX tracks along which of these axes a value varies

    @property
    def attention(self) -> Attention:
        found = primitive.find(self.key)
        if found is None:
            raise UnsupportedError("annulus.jax.attention: its mesh was closed before the backward "
                                   "pass")
        return found


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """The operands whose gradients the loss asks for."""

    names: frozenset[str]


def _varying(x: Any) -> frozenset[str]:
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def _manual_axes() -> tuple[dict[str, int], tuple[str, ...]]:
    """The mesh of jax.shard_map around the call, and its manual axes."""
    found = jax.sharding.get_abstract_mesh()
    return dict(zip(found.axis_names, found.axis_sizes)), tuple(found.manual_axes)


def _mesh(given: "AnyMesh") -> Mesh:
    """The mesh; inside jax.shard_map, its mesh by default."""
    around, manual = _manual_axes()
    if given is None and manual:
        given = around
    elif isinstance(given, jax.sharding.Mesh):
        given = dict(given.shape)
    if not isinstance(given, Mesh) and meshes._settings is None:
        device = jax.config.jax_default_device
        if device is None or isinstance(device, str):  # the name of a platform
            device = jax.local_devices(backend=device)[0]
        meshes.init(device="cpu" if device.platform == "cpu" else device.local_hardware_id)
    on = mesh_of(given)
    if manual:
        ours = {name: size for name, size in on.axes.items() if size > 1}
        theirs = {name: size for name, size in around.items() if size > 1}
        if list(ours.items()) != list(theirs.items()) or not set(ours) <= set(manual):
            raise argument_error(
                "mesh", f"{on.text}, and jax.shard_map over {', '.join(manual)} of {around}",
                "the same axes and sizes in the same order, all of them manual")
    return on


def _text(value: Any) -> str:
    """A text that differs between different values, and is the same in every process."""
    if isinstance(value, (np.ndarray, jax.Array)):
        array = np.asarray(value)
        return f"{array.dtype}{array.shape}{hashlib.sha256(array.tobytes()).hexdigest()}"
    if isinstance(value, (list, tuple)):
        return f"({','.join(map(_text, value))})"
    return repr(value)


def _stand_in(x: Any) -> np.ndarray:
    """An array without memory, of the same shape and dtype."""
    return np.broadcast_to(np.empty((), x.dtype), x.shape)


def _check_operands(made: Attention, arrays: Mapping[str, Any]) -> None:
    dtype = arrays["query"].dtype
    for name, x in arrays.items():
        if name == "seed":
            continue
        shape = made.shape(name)
        if name in ("query_lengths", "kv_lengths", "offsets"):
            right, expected = tuple(x.shape) in ((1,), made.shape("query")[:1]), "[b] or one number"
        else:
            right, expected = tuple(x.shape) == shape, str(list(shape))
        if not right:
            raise argument_error(name, f"shape {list(x.shape)}", expected)
        if name in ("query", "key", "value") and x.dtype != dtype:
            raise argument_error(name, str(x.dtype), f"{dtype}, the query's dtype")


def _plan(on: Mesh, arrays: dict[str, Any], options: dict[str, Any]) -> tuple[str, Attention]:
    """The object for a call with such operands, and its key. Collective when it is made."""
    described = [on.text, str(on.size),
                 *(f"{name}:{x.dtype}{list(x.shape)}" for name, x in arrays.items()),
                 *(f"{name}={_text(value)}" for name, value in sorted(options.items()))]
    key = f"annulus {on.text} " + hashlib.sha256(" ".join(described).encode()).hexdigest()[:32]
    made = primitive.find(key)
    if made is not None:
        if made.mesh is not on:
            raise UnsupportedError(f"annulus.jax.attention: got a second mesh {on.text}, expected "
                                   "one, or the first one closed")
        primitive.forget_failure()
        return key, made
    primitive.finish_calls(on.device)
    made = attention_for(mesh=on, **{name: _stand_in(x) for name, x in arrays.items() if name in
                                     (*_DIFFERENTIABLE, "mask")}, **options)
    error: Exception | None = None
    try:
        _check_operands(made, arrays)
    except ValueError as caught:
        error = caught
    on.agree(error)
    primitive.keep(key, made)
    return key, made


def _copies(made: Attention, operand: str, axes: Sequence[str]) -> dict[str, int]:
    """For each axis, how many ranks along it hold the rank's part of an operand."""
    on = made.mesh

    def part(rank: int) -> list[np.ndarray]:
        if operand == "sinks":  # the sinks of the rank's heads
            return made.positions("query", rank)[2:3]
        return made.positions(operand, rank)

    sizes = list(on.axes.values())
    mine = part(on.rank)
    found = {}
    for axis in axes:
        step = int(np.prod(sizes[list(on.axes).index(axis) + 1:]))
        first = on.rank - on.rank // step % on.axes[axis] * step
        found[axis] = sum(all(map(np.array_equal, part(first + i * step), mine))
                          for i in range(on.axes[axis]))
    return found


def _shared(call: _Call, operand: str, x: Any) -> dict[str, int]:
    """The axes along which ranks hold the same part, while JAX assumes different parts."""
    axes = [axis for axis in call.manual if not call.tracked or axis in _varying(x)]
    return {axis: copies for axis, copies in _copies(call.attention, operand, axes).items()
            if copies > 1}


def _forward(call: _Call, arrays: dict[str, Any]) -> tuple[Any, Any]:
    made = call.attention
    out, lse = primitive.call(
        made, call.key, arrays,
        [Result("output", made.shape("output"), arrays["query"].dtype, "query"),
         Result("lse", made.shape("lse"), np.dtype(np.float32), "query")], backward=False)
    return out, lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: _Call, arrays: dict[str, Any]) -> tuple[Any, Any]:
    return _forward(call, arrays)


def _keep(call: _Call, given: dict[str, Any]) -> tuple[Any, Any]:
    arrays = {name: x.value for name, x in given.items()}
    wanted = frozenset(name for name in _DIFFERENTIABLE if name in given and given[name].perturbed)
    out, lse = _forward(call, arrays)
    return (out, lse), (_Wanted(wanted), arrays, out, lse)


def _differentiate(call: _Call, residuals: Any, gradients: Any) -> tuple[Any]:
    wanted, arrays, out, lse = residuals
    grad_output, grad_lse = gradients
    zero = jax.custom_derivatives.SymbolicZero
    made = call.attention
    # Ranks that share a row hold one row for the library, but separate rows for JAX.
    shared = tuple(_shared(call, "query", arrays["query"]))

    def whole(x: Any) -> Any:
        return jax.lax.psum(x, shared) if shared else x

    given = {**arrays, "output": out, "lse": lse}
    given["grad_output"] = (jnp.zeros(out.shape, out.dtype) if isinstance(grad_output, zero)
                            else whole(grad_output))
    if not isinstance(grad_lse, zero):
        given["grad_lse"] = whole(grad_lse)
    if "bias" in wanted.names and not call.manual:  # jax.shard_map knows which ranks share a bias
        made.check_bias_gradient()
    names = [name for name in _DIFFERENTIABLE
             if name in ("query", "key", "value") or name in wanted.names]
    found = primitive.call(
        made, call.key, given,
        [Result("grad_" + name, given[name].shape, given[name].dtype, name)
         for name in names], backward=True)
    results: dict[str, Any] = dict.fromkeys(arrays)
    for name, gradient in zip(names, found):
        copies = _shared(call, name, arrays[name])
        # JAX adds the gradients of all ranks that hold the part.
        scale = int(np.prod(list(copies.values())))
        results[name] = gradient if scale == 1 else gradient / np.asarray(scale, gradient.dtype)
    return (results,)


_attend.defvjp(_keep, _differentiate, symbolic_zeros=True)


def _halves(seed: Any) -> Any:
    """A seed as two numbers of 32 bits, the lower first."""
    if isinstance(seed, jax.Array):
        if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
            seed = jax.random.key_data(seed)
        if seed.shape == (2,) and seed.dtype == jnp.uint32:
            return seed
        if seed.shape != () or not jnp.issubdtype(seed.dtype, jnp.integer):
            raise argument_error("seed", f"{seed.dtype}{list(seed.shape)}", "an integer or a key")
        low = seed.astype(jnp.uint32)
        high = ((seed >> 32).astype(jnp.uint32) if seed.dtype.itemsize == 8
                else jnp.zeros((), jnp.uint32))
        return jnp.stack([low, high])
    number = int(seed)
    return np.array([number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF], np.uint32)


def _call_values(options: dict[str, Any]) -> dict[str, Any]:
    """Takes the values that come with every call out of the options."""
    varying = set(options.get("call_arguments") or ())
    given = {name: options[name] for name in _PER_CALL if options.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, jax.Array):
            varying.add(_PER_CALL[name][1])
    values = {}
    for name, value in given.items():
        operand, argument = _PER_CALL[name]
        if argument not in varying or isinstance(value, str):
            continue
        if not np.issubdtype(value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype,
                             np.integer):
            raise TypeError(f"{name}: got {value}, expected integers")
        values[operand] = jnp.atleast_1d(jnp.asarray(value, jnp.int32))
        del options[name]
    if varying:
        options["call_arguments"] = tuple(sorted(varying))
    return values


def attention(query: jax.Array, key: jax.Array, value: jax.Array, *, mesh: "AnyMesh" = None,
              sinks: jax.Array | None = None, bias: jax.Array | None = None,
              mask: jax.Array | None = None, seed: Any = None,
              **options: "Unpack[Options]") -> tuple[jax.Array, jax.Array]:
    """annulus.attention() in JAX, with gradients: output [b,t,n,Dv] and LSE [b,n,t].

    Each process calls it on its own arrays, or all processes call it in one jax.shard_map, whose mesh is
    then the default. Tracing it for new shapes or options is collective, and so is running it. All ranks
    run the same programs in the same order.

    - layout: "contiguous" by default, like the arrays of jax.shard_map.
    - query_lengths, kv_lengths, offset: a jax.Array ([b] for the rank's batches, or one number for
      all) may change from call to call; other values are part of the plan.
    - seed: an integer or a key, the same on all ranks.
    """
    unknown(options)
    given: dict[str, Any] = {name: x for name, x in options.items() if x is not None}
    given.setdefault("layout", "contiguous")
    on = _mesh(mesh)
    arrays: dict[str, Any] = {"query": query, "key": key, "value": value}
    for name, x in arrays.items():
        if not isinstance(x, (jax.Array, np.ndarray)):
            raise TypeError(f"{name}: got {type(x).__name__}, expected a jax.Array")
    if sinks is not None:
        sinks = jnp.asarray(sinks, jnp.float32)
        arrays["sinks"] = sinks[:, None] if sinks.ndim == 1 else sinks
    if bias is not None:
        arrays["bias"] = jnp.asarray(bias, jnp.float32)
    if mask is not None:
        arrays["mask"] = jnp.asarray(mask)
    if seed is not None:
        arrays["seed"] = _halves(seed)
    elif "dropout" in given:
        raise TypeError("seed: expected one in every call with dropout")
    arrays |= _call_values(given)
    text, made = _plan(on, arrays, given)

    _, manual = _manual_axes()
    manual = tuple(axis for axis in manual if on.axes.get(axis, 1) > 1)
    tracked = bool(manual) and bool(_varying(jax.lax.axis_index(manual[0])))
    if tracked:
        for name in _DIFFERENTIABLE:
            if name not in arrays:
                continue
            # Where parts differ between ranks, JAX must treat them as different.
            copies = _copies(made, name, manual)
            missing = tuple(axis for axis in manual if copies[axis] < on.axes[axis]
                            and axis not in _varying(arrays[name]))
            if missing:
                arrays[name] = jax.lax.pcast(arrays[name], missing, to="varying")
    return _attend(_Call(text, manual, tracked), arrays)


__all__ = ["attention"]
