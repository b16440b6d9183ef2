"""The primitive behind annulus.jax: a call of the library in a program that XLA compiles."""

from __future__ import annotations

import functools
import threading
from typing import Any, Callable, NamedTuple, Sequence

import jax
import jax.extend.core
import numpy as np
from jax._src import core, dispatch, effects  # JAX has no public face of ordered effects.
from jax.interpreters import ad, batching, mlir, xla

from . import _library
from ._attention import Attention
from ._library import UnsupportedError, argument_error
from ._mesh import close_at_exit
from ._tensors import OPERANDS

SEED = -1  # in place of an operand's number

_TARGET = "annulus_attention"


def _register() -> None:
    try:
        handlers = {"cpu": _library.function("jax_cpu"), "CUDA": _library.function("jax_cuda")}
    except AttributeError:
        raise ImportError(
            "annulus.jax: this build of annulus has no handlers for XLA, since it did not find the "
            "headers of jaxlib: install jax, then build and install annulus again") from None
    for platform, handler in handlers.items():
        jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(handler), platform=platform)


_register()
close_at_exit()  # before JAX's own exit function


class _Order(effects.Effect):  # type: ignore[misc]
    """Calls on CPUs run in the order of the program on every rank.

    XLA runs independent calls in any order, or at the same time, but all ranks must call in the same order.
    """

    def __str__(self) -> str:
        return "annulus"


_order = _Order()
for _set in (effects.lowerable_effects, effects.ordered_effects, effects.shardable_ordered_effects,
             effects.control_flow_allowed_effects, effects.custom_derivatives_allowed_effects,
             effects.remat_allowed_effects):
    _set.add_type(_Order)


class Result(NamedTuple):
    operand: str
    shape: tuple[int, ...]
    dtype: Any
    like: Any  # the argument, by name or index, along whose mesh axes alone the result varies


_kept: dict[str, Attention] = {}


def find(key: str) -> Attention | None:
    return _kept.get(key)


def keep(key: str, attention: Attention) -> None:
    """Makes an object known to calls by this key, until it is closed."""
    device = attention.mesh.device

    def drop() -> None:
        finish_calls(device)
        _library.function("jax_drop")(key.encode())
        _kept.pop(key, None)

    with attention.lock:  # close() is over, or has to wait
        _library.function("jax_keep")(key.encode(), attention.handle,
                                      _library.function("context_place")(attention.mesh.handle))
        _kept[key] = attention
        attention.at_close.append(drop)


def _wait_or_forget(wait: Callable[[], Any]) -> None:
    """Waits for earlier calls, and drops the error of a failed call. Otherwise all later calls would fail
    with it; the failed call's results have the error too."""
    try:
        wait()
    except jax.errors.JaxRuntimeError:
        dispatch.runtime_tokens.clear()


def forget_failure() -> None:
    """Lets later calls run after a call has failed."""
    token = dispatch.runtime_tokens.current_tokens.get(_order)
    if token is not None and token._buf.is_ready():
        _wait_or_forget(token.block_until_ready)


def finish_calls(device: str) -> None:
    """Returns when all programs that this thread has started have finished their calls of the library."""
    _wait_or_forget(jax.effects_barrier)

    def run_last() -> None:  # a GPU starts its programs one after the other
        for gpu in jax.local_devices():
            if f"cuda:{gpu.local_hardware_id}" == device:
                jax.block_until_ready(jax.device_put(np.zeros(()), gpu) + 1)

    if device != "cpu":
        # On a thread of its own, which is not tracing.
        thread = threading.Thread(target=run_last)
        thread.start()
        thread.join()


def _aval(result: Result, arguments: Sequence[Any]) -> Any:
    like = arguments[result.like]
    spec = jax.sharding.PartitionSpec(*[None] * len(result.shape))
    return like.update(shape=result.shape, dtype=np.dtype(result.dtype), weak_type=False,
                       sharding=like.sharding.update(spec=spec))


def _evaluate(*arguments: Any, results: Sequence[Result], on_cpu: bool,
              **_parameters: Any) -> tuple[tuple[Any, ...], set[Any]]:
    return tuple(_aval(result, arguments) for result in results), {_order} if on_cpu else set()


def _check_place(context: Any, mesh: Any, platform: str) -> None:
    """Refuses programs whose devices are not the ranks of the mesh, in the same order."""
    if mesh.device.split(":")[0] != platform:
        raise UnsupportedError(
            f"mesh {mesh.text}: it computes on {mesh.device}, but the program on {platform}: "
            f'call annulus.init(device="{platform}"), or pass other arrays')
    devices = getattr(context, "num_devices", None)
    if devices is not None:
        if devices > 1:
            raise UnsupportedError(
                f"annulus.jax.attention: got a program for {devices} devices, expected "
                "jax.shard_map around the call, or arrays of this process alone")
        return
    try:
        array = context.mesh.devices
    except ValueError:  # of an abstract mesh
        return
    if isinstance(array, np.ndarray) and array.size > 1:
        holder = array.flat[mesh.rank].process_index
        if holder != jax.process_index():
            raise argument_error(
                "mesh", f"process {holder} in the place of rank {mesh.rank}",
                f"process {jax.process_index()}: one device per process, in the order of ranks")


def _lower(platform: str, context: Any, *arguments: Any, key: str, backward: bool,
           operands: tuple[int, ...], results: tuple[Result, ...], on_cpu: bool) -> Any:
    attention = _kept.get(key)
    if attention is None:
        raise _library.UserError("annulus.jax: the mesh that this program was traced for was "
                                 "closed")
    _check_place(context.module_context.axis_context, attention.mesh, platform)
    attributes = {"attention": key, "backward": backward,
                  "operands": np.array(operands, np.int64),
                  "results": np.array([OPERANDS[result.operand] for result in results], np.int64)}
    if not on_cpu:
        return jax.ffi.ffi_lowering(_TARGET)(context, *arguments, **attributes)
    with_token = context.replace(avals_in=[*context.avals_in, core.abstract_token],
                                 avals_out=[*context.avals_out, core.abstract_token])
    *found, after = jax.ffi.ffi_lowering(_TARGET, has_side_effect=True)(
        with_token, *arguments, context.tokens_in.get(_order), **attributes)
    tokens = type(context.tokens_in)({_order: after})
    context.set_tokens_out(context.tokens_in.update_tokens(tokens))
    return found


def _refuse_vmap(*_arguments: Any, **_parameters: Any) -> Any:
    raise UnsupportedError("annulus.jax.attention: vmap of it, which would change the problem that "
                           "all ranks have agreed on; expected the batch as the first dimension of "
                           "the operands")


def _refuse_derivatives(*_arguments: Any, **_parameters: Any) -> Any:
    raise UnsupportedError("annulus.jax.attention: derivatives of its gradients, or by jax.jvp; "
                           "only the gradients are supported, by jax.grad and jax.vjp")


_primitive = jax.extend.core.Primitive("annulus_attention")
_primitive.multiple_results = True
_primitive.def_impl(functools.partial(xla.apply_primitive, _primitive))
_primitive.def_effectful_abstract_eval(_evaluate)
batching.primitive_batchers[_primitive] = _refuse_vmap
ad.primitive_jvps[_primitive] = _refuse_derivatives
for _platform in ("cpu", "cuda"):
    mlir.register_lowering(_primitive, functools.partial(_lower, _platform), platform=_platform)


def call(attention: Attention, key: str, arguments: dict[str, Any], results: Sequence[Result], *,
         backward: bool) -> list[Any]:
    """Calls the library. The names of the arguments are operands, or "seed"."""
    numbers = tuple(SEED if name == "seed" else OPERANDS[name] for name in arguments)
    placed = tuple(result._replace(like=list(arguments).index(result.like)) for result in results)
    return _primitive.bind(*arguments.values(), key=key, backward=backward, operands=numbers,
                           results=placed, on_cpu=attention.mesh.device == "cpu")
