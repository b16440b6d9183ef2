"""Attention as an operator of torch, with gradients: it can be compiled, captured and checkpointed."""

from __future__ import annotations

import functools
import json
import pathlib
import sys
import warnings
from typing import TYPE_CHECKING, Any, Mapping, Optional, Sequence

try:
    import torch
    from torch import Tensor
    from torch.autograd import forward_ad
except ImportError as error:
    raise ImportError(f"annulus.torch needs PyTorch 2.4 or later ({error})") from error

import numpy as np

from . import _attention, _library
from ._mesh import AnyMesh, mesh_of
from ._options import Options, int32, unknown

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The operators' optional parameters, which follow the operands that every call has.
_EXTRAS = {"sinks": "Tensor?", "bias": "Tensor?", "mask": "Tensor?", "seed": "SymInt?",
           "seed_tensor": "Tensor?", "query_lengths": "Tensor?", "kv_lengths": "Tensor?",
           "offset": "Tensor?"}
_extras = ", ".join(f"{kind} {name}" for name, kind in _EXTRAS.items())

# The parameters and results of the operators.
_SCHEMAS = {
    "attention": f"(Tensor query, Tensor key, Tensor value, {_extras}, str mesh, str options) -> "
                 "(Tensor, Tensor)",
    "attention_backward": "(Tensor grad_output, Tensor? grad_lse, Tensor query, Tensor key, "
                          f"Tensor value, Tensor output, Tensor lse, {_extras}, bool grad_sinks, "
                          "bool grad_bias, str mesh, str options) -> Tensor[]"}

# Registered directly, since the wrappers of custom_op() take longer than the call itself.
_operators = torch.library.Library("annulus", "DEF")
for _name, _schema in _SCHEMAS.items():
    _operators.define(_name + _schema, tags=torch.Tag.pt2_compliant_tag)


def _plain(value: Any) -> Any:
    """Converts arrays and tensors to lists, for json."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"got {type(value).__name__}, expected numbers, texts, arrays or tensors")


def text_of(options: Mapping[str, Any]) -> str:
    """Returns the text in which the operator takes the options."""
    unknown(options)
    given = {name: value for name, value in options.items() if value is not None}
    return json.dumps(given, default=_plain, sort_keys=True)


@functools.lru_cache(maxsize=256)
def _options_of(text: str) -> dict[str, Any]:
    options = json.loads(text)
    ids = options.get("segments")
    if ids is not None:  # converted once, since there are many
        options["segments"] = ([np.asarray(part, np.int32) for part in ids] if np.ndim(ids[0]) == 2
                               else np.asarray(ids, np.int32))
    return options


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its last dimension is not contiguous, as the library requires."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


# ---- For both the operators and the eager function -----------------------------------------------


def _keywords(extras: Sequence[Any]) -> dict[str, Any]:
    """The values of _EXTRAS as keywords of Attention.run() and backward()."""
    keywords = dict(zip(_EXTRAS, extras))
    seed_tensor = keywords.pop("seed_tensor")
    if seed_tensor is not None:
        keywords["seed"] = seed_tensor
    return keywords


def _forward(made: _attention.Attention, query: Tensor, key: Tensor, value: Tensor,
             *extras: Any) -> tuple[Tensor, Tensor]:
    return made.run(_dense(query), _dense(key), _dense(value), **_keywords(extras))


def _backward(made: _attention.Attention, grad_output: Optional[Tensor], grad_lse: Optional[Tensor],
              query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor,
              *others: Any) -> _attention.Gradients:
    *extras, grad_sinks, grad_bias = others
    grad_output = torch.zeros_like(output) if grad_output is None else _dense(grad_output)
    return made.backward(grad_output, _dense(query), _dense(key), _dense(value), output, lse,
                         grad_lse=grad_lse, grad_sinks=grad_sinks, grad_bias=grad_bias,
                         **_keywords(extras))


# ---- The operators, for compiled code, modes and subclasses of tensors ---------------------------


def _made(operands: Sequence[Any], mesh: Any, text: str) -> _attention.Attention:
    query, key, value, sinks, bias, mask = operands
    return _attention.attention_for(query, key, value, mesh=mesh, sinks=sinks, bias=bias, mask=mask,
                                    known=text, **_options_of(text))


def _operator(*arguments: Any) -> tuple[Tensor, Tensor]:
    *tensors, mesh, text = arguments
    made = _made(tensors[:6], mesh, text)
    native = _native(made, tensors[4:])
    if native is not None:
        _calls.remember(*tensors[:4], mesh, text, native)
    return _eager(made, *tensors)


def _backward_operator(*arguments: Any) -> list[Tensor]:
    *tensors, mesh, text = arguments
    made = _made([*tensors[2:5], *tensors[7:10]], mesh, text)
    return [gradient for gradient in _backward(made, *tensors) if gradient is not None]


@torch.library.register_fake("annulus::attention", lib=_operators)
def _(query: Tensor, _key: Tensor, value: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    b, t, n, _ = query.shape
    return (query.new_empty((b, t, n, value.shape[3])),
            query.new_empty((b, n, t), dtype=torch.float32))


@torch.library.register_fake("annulus::attention_backward", lib=_operators)
def _(_grad_output: Tensor, _grad_lse: Any, query: Tensor, key: Tensor, value: Tensor,
      _output: Tensor, _lse: Tensor, sinks: Any, bias: Any, *others: Any) -> list[Tensor]:
    grad_sinks, grad_bias, _, _ = others[-4:]
    wanted = [query, key, value] + [sinks] * grad_sinks + [bias] * grad_bias
    return [operand.new_empty(operand.shape) for operand in wanted]


class _Operator(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            output = torch.ops.annulus.attention(*inputs)
        query, key, value, sinks, bias, mask, seed, *values, ctx.mesh, ctx.text = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, *output, sinks, bias, mask, *values)
        ctx.seed = seed
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Any, grad_lse: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if grad_output is None:
            grad_output = torch.zeros_like(saved[3])
        found = iter(torch.ops.annulus.attention_backward(
            grad_output, grad_lse, *saved[:8], ctx.seed, *saved[8:], needs[3], needs[4], ctx.mesh,
            ctx.text))
        gradients = [next(found) for _ in range(3)]
        gradients += [next(found) if needed else None for needed in needs[3:5]]
        return (*gradients, *(None,) * 8)


def _refuse(_ctx: Any, *_gradients: Any) -> Any:
    raise RuntimeError("annulus.torch: attention has no second derivative")


class _BackwardOperator(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(_ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(torch.ops.annulus.attention_backward(*inputs))

    backward = staticmethod(_refuse)


# ---- The eager function, which leaves out torch's dispatcher -------------------------------------


class _Eager(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, made: _attention.Attention, query: Tensor, key: Tensor,
                value: Tensor, sinks: Any, bias: Any, rest: tuple[Any, ...]
                ) -> tuple[Tensor, Tensor]:
        out, lse = _forward(made, query, key, value, sinks, bias, *rest)
        ctx.set_materialize_grads(False)
        ctx.made, ctx.seed = made, rest[1]
        extras = (sinks, bias, rest[0], *rest[2:])
        if all(extra is None for extra in extras):
            extras = ()
        ctx.save_for_backward(query, key, value, out, lse, *extras)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return _gradients(ctx, *gradients)
        # The caller may differentiate the gradients, which is refused. torch's once_differentiable()
        # would not refuse it if grad_output requires no gradient.
        with torch.no_grad():
            found = _gradients(ctx, *gradients)
        return _Once.apply(*(x if x is None else x.requires_grad_() for x in found))


class _Once(torch.autograd.Function):  # type: ignore[misc]
    """Returns gradients that cannot be differentiated again."""

    @staticmethod
    def forward(_ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return tuple(x if x is None else x.view_as(x) for x in gradients)

    backward = staticmethod(_refuse)


def _gradients(ctx: Any, grad_output: Any, grad_lse: Any) -> tuple[Any, ...]:
    query, key, value, out, lse, *extras = ctx.saved_tensors
    sinks, bias, mask, *values = extras or (None,) * 7
    needs = ctx.needs_input_grad
    found = _backward(ctx.made, grad_output, grad_lse, query, key, value, out, lse, sinks, bias,
                      mask, ctx.seed, *values, needs[4], needs[5])
    return (None, *found, None)


# torch does not publish these two functions. In a version without them, eager calls use the operator.
_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_transforms = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


def _is_eager(*operands: Tensor) -> bool:
    """True if no mode, transform or subclass of torch takes part in the call."""
    return not (torch.compiler.is_compiling() or _modes() or _transforms()) and all(
        type(operand) in _PLAIN_TENSORS and (operand.is_cuda or operand.is_cpu)
        for operand in operands)


def _raise(status: int) -> None:
    if status < 0:
        raise _attention.closed_error()
    _library.check(status, None, None)


_operators.define("raise_error(int status) -> ()")
_operators.impl("raise_error", _raise, "CompositeImplicitAutograd")


def _load_calls() -> Any:
    """The operators of torch_calls.cpp; None if it was not built for this version of torch."""
    path = pathlib.Path(_library.path()).with_name(f"libannulus_torch-{torch.__version__}.so")
    if not path.exists():
        return None
    try:
        torch.ops.load_library(path)
    except OSError as error:
        warnings.warn(f"annulus.torch: eager calls go through Python, as their library does not load: {error}")
        return None
    return torch.ops.annulus_calls


_calls = _load_calls()


_NO_FORWARD_MODE = "annulus: attention has no forward-mode derivatives (torch.func.jvp)"


def _register(name: str, kernel: Any, node: Any) -> None:
    """Registers the kernel of an operator, and the autograd function that takes its place with gradients."""
    def with_node(*arguments: Any) -> Any:
        found = node.apply(*arguments)
        return list(found) if name == "attention_backward" else found

    def autograd(*arguments: Any) -> Any:
        if forward_ad._current_level >= 0 and any(
                isinstance(one, Tensor) and forward_ad.unpack_dual(one).tangent is not None
                for one in arguments):
            raise NotImplementedError(_NO_FORWARD_MODE)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            return with_node(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.annulus, name)(*arguments)

    if _calls is None:
        for key, function in {"CPU": kernel, "CUDA": kernel, "Autograd": autograd}.items():
            _operators.impl(name, function, key)
        return
    # The kernels are in torch_calls.cpp, and call these two.
    for suffix, key, function in (("_in_python", "CompositeExplicitAutograd", kernel),
                                  ("_with_node", "CompositeImplicitAutograd", with_node)):
        _operators.define(name + suffix + _SCHEMAS[name])
        _operators.impl(name + suffix, function, key)


_register("attention", _operator, _Operator)
_register("attention_backward", _backward_operator, _BackwardOperator)


class _Native:
    """An attention object's counterpart in torch_calls.cpp."""

    def __init__(self, made: _attention.Attention) -> None:
        self.number = _calls.open(made.handle.value)
        self.calls = functools.partial(_calls.calls, self.number)  # under way
        self.uses = functools.partial(_calls.uses, self.number)  # also backward passes to come
        self.is_within = functools.partial(_calls.is_within, self.number)
        self.forget = functools.partial(_calls.forget, self.number)  # by compiled code


def _native(made: _attention.Attention, extras: Sequence[Any]) -> int | None:
    """The number of the object in torch_calls.cpp. None if torch_calls.cpp cannot compute the call, for
    example if it has operands after the sinks."""
    if _calls is None or made.drops or any(extra is not None for extra in extras):
        return None
    if made.native is None:
        with made.lock:  # close() is over, or has to wait
            if made.native is None:
                native = _Native(made)
                made.at_close.append(functools.partial(_calls.close, native.number))
                made.native = native
    return made.native.number


def _eager(made: _attention.Attention, *arguments: Any) -> tuple[Tensor, Tensor]:
    native = _native(made, arguments[4:])
    if native is not None:
        return _calls.attention.default(*arguments[:4], native)
    if torch.is_grad_enabled():
        for operand in arguments[:5]:
            if operand is not None and operand.requires_grad:
                return _Eager.apply(made, *arguments[:5], arguments[5:])
    return _forward(made, *arguments)


# ---- The public face -----------------------------------------------------------------------------


@torch.compiler.assume_constant_result
def _texts(mesh: Any, options: dict[str, Any]) -> tuple[str, str]:
    """The texts of the mesh and the options. They are constants of compiled code."""
    return mesh_of(mesh).text, text_of(options)


def _check_tensors(query: Any, key: Any, value: Any) -> None:
    """Raises TypeError for an operand that is no tensor or is on another device than the query."""
    for name, operand in (("query", query), ("key", key), ("value", value)):
        if not isinstance(operand, Tensor):
            raise TypeError(f"{name}: got {type(operand).__name__}, expected a torch tensor")
        if operand.device.type not in ("cpu", "cuda"):
            raise TypeError(f"{name}: on {operand.device}, expected the CPU or a CUDA device")
        if operand.device != query.device:
            raise TypeError(f"{name}: on {operand.device}, expected {query.device}, as the query")


def _cast(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Casts query, key and value as autocast says, and sinks and bias to float32."""
    query, key, value, sinks, bias = tensors
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return (query, key, value, None if sinks is None else sinks.float(),
            None if bias is None else bias.float())


def run_operator(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None,
                 bias: Tensor | None, mask: Tensor | None, seed: int | None, mesh: str,
                 options: str) -> tuple[Tensor, Tensor]:
    """attention(), given its mesh and options as texts."""
    operands = _cast((query, key, value, sinks, bias))
    rest = (mask, seed, None, None, None, None)
    if _is_eager(query, key, value):
        return _eager(_made([*operands, mask], mesh, options), *operands, *rest)
    return torch.ops.annulus.attention(*operands, *rest, mesh, options)


def _value(values: Any, name: str) -> Tensor | None:
    """Converts lengths or offsets of a call to a tensor."""
    if values is None or isinstance(values, Tensor):
        return values
    return torch.from_numpy(np.atleast_1d(int32(values, name)).copy())


def attention(query: Tensor, key: Tensor, value: Tensor, *, mesh: AnyMesh = None,
              sinks: Tensor | None = None, bias: Tensor | None = None, mask: Tensor | None = None,
              seed: int | Tensor | None = None,
              **options: "Unpack[Options]") -> tuple[Tensor, Tensor]:
    """annulus.attention() as a differentiable operator: output [b,t,n,Dv] and LSE [b,n,t].

    Collective, as is its backward pass: all ranks ask for the same gradients. The mesh must have
    been made before the operator is compiled. Under autocast, query, key and value are cast.

    If the query is a DTensor, all operands must be DTensors, and so are the results. Their placements
    say how they are sharded. The rows of a DTensor are in order, so the layout is contiguous. `mesh`,
    if given, must have the axes of their DeviceMesh.

    seed: a number, or a tensor of one number. A captured graph reads the tensor anew at every replay.
    It also reads tensors of the lengths and offsets that call_arguments names.
    """
    if type(query) not in _PLAIN_TENSORS and "torch.distributed.tensor" in sys.modules:
        from . import _dtensor

        if isinstance(query, _dtensor.DTensor):
            return _dtensor.attention(attention, query, key, value, mesh, sinks, bias, mask, seed,
                                      options)
    eager = _is_eager(query, key, value)
    if not eager:
        _check_tensors(query, key, value)
    values = _attention.call_values(options)
    for name in values:
        options.pop(name, None)  # type: ignore[misc]
    operands = _cast((query, key, value, sinks, bias))
    number, tensor = (None, seed) if isinstance(seed, Tensor) else (seed, None)
    rest = (mask, number, tensor, *(_value(values.get(name), name)
                                    for name in ("query_lengths", "kv_lengths", "offset")))
    if eager:
        made = _attention.attention_for(*operands[:3], mesh=mesh, sinks=operands[3],
                                        bias=operands[4], mask=mask, **options)
        return _eager(made, *operands, *rest)
    on, text = _texts(mesh, options)
    return torch.ops.annulus.attention(*operands, *rest, on, text)


__all__ = ["attention"]
