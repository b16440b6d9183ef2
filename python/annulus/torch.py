"""Attention as an operator of torch, with gradients: it can be compiled, and checkpointed."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any, Mapping, Optional

try:
    import torch
    from torch import Tensor
except ImportError as error:
    raise ImportError(f"annulus.torch needs PyTorch 2.4 or later ({error})") from error

import numpy as np

from . import _attention
from ._mesh import Mesh, mesh_of
from ._options import Options, unknown

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _plain(value: Any) -> Any:
    """A value for json: lists in place of arrays and tensors."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"got {type(value).__name__}, expected numbers, texts, arrays or tensors")


@functools.lru_cache(maxsize=256)
def _options_of(text: str) -> dict[str, Any]:
    options = json.loads(text)
    ids = options.get("segments")
    if ids is not None:  # many numbers, which are read in every call
        options["segments"] = ([np.asarray(part, np.int32) for part in ids] if np.ndim(ids[0]) == 2
                               else np.asarray(ids, np.int32))
    return options


def _dense(tensor: Tensor) -> Tensor:
    """The same numbers, with the last dimension contiguous, as the library needs it."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@torch.library.custom_op("annulus::attention", mutates_args=())
def _forward(query: Tensor, key: Tensor, value: Tensor, sinks: Optional[Tensor],
             bias: Optional[Tensor], mask: Optional[Tensor], seed: Optional[int], mesh: str,
             options: str) -> tuple[Tensor, Tensor]:
    return _attention.compute(_dense(query), _dense(key), _dense(value), mesh=mesh, sinks=sinks,
                              bias=bias, mask=mask, seed=seed, **_options_of(options))


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    b, t, n, _ = query.shape
    return (query.new_empty((b, t, n, value.shape[3])),
            query.new_empty((b, n, t), dtype=torch.float32))


@torch.library.custom_op("annulus::attention_backward", mutates_args=())
def _backward(grad_output: Tensor, grad_lse: Optional[Tensor], query: Tensor, key: Tensor,
              value: Tensor, output: Tensor, lse: Tensor, sinks: Optional[Tensor],
              bias: Optional[Tensor], mask: Optional[Tensor], seed: Optional[int], grad_sinks: bool,
              grad_bias: bool, mesh: str, options: str) -> list[Tensor]:
    found = _attention.attention_backward(
        _dense(grad_output), _dense(query), _dense(key), _dense(value), output, lse, mesh=mesh,
        grad_lse=grad_lse, sinks=sinks, bias=bias, mask=mask, seed=seed, grad_sinks=grad_sinks,
        grad_bias=grad_bias, **_options_of(options))
    return [gradient for gradient in found if gradient is not None]


@_backward.register_fake
def _(_grad_output: Tensor, _grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor,
      _output: Tensor, _lse: Tensor, sinks: Tensor, bias: Tensor, _mask: Tensor | None,
      _seed: int | None, grad_sinks: bool, grad_bias: bool, *_texts: str) -> list[Tensor]:
    found = [torch.empty(operand.shape, dtype=operand.dtype, device=operand.device)
             for operand in (query, key, value)]
    for wanted, operand in ((grad_sinks, sinks), (grad_bias, bias)):
        if wanted:
            found.append(torch.empty(operand.shape, dtype=operand.dtype, device=operand.device))
    return found


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, sinks, bias, mask, seed, mesh, options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, *output, sinks, bias, mask)
    ctx.seed, ctx.mesh, ctx.options = seed, mesh, options


def _differentiate(ctx: Any, grad_output: Any, grad_lse: Any) -> tuple[Any, ...]:
    query, key, value, output, lse, sinks, bias, mask = ctx.saved_tensors
    needs = ctx.needs_input_grad
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    found = iter(torch.ops.annulus.attention_backward(
        grad_output, grad_lse, query, key, value, output, lse, sinks, bias, mask, ctx.seed,
        needs[3], needs[4], ctx.mesh, ctx.options))
    gradients = [next(found) for _ in range(3)]
    gradients += [next(found) if needed else None for needed in needs[3:5]]
    return (*gradients, None, None, None, None)


torch.library.register_autograd("annulus::attention", _differentiate, setup_context=_save)


def text_of(options: Mapping[str, Any]) -> str:
    """The options as the operator takes them."""
    unknown(options)
    given = {name: value for name, value in options.items() if value is not None}
    return json.dumps(given, default=_plain, sort_keys=True)


@torch.compiler.assume_constant_result
def _texts(mesh: Any, options: dict[str, Any]) -> tuple[str, str]:
    """The mesh and the options as the operator takes them; a constant of compiled code."""
    return mesh_of(mesh).text, text_of(options)


def run_operator(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None,
                 bias: Tensor | None, mask: Tensor | None, seed: int | None, mesh: str,
                 options: str) -> tuple[Tensor, Tensor]:
    """The operator, after autocast's casts."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return torch.ops.annulus.attention(
        query, key, value, None if sinks is None else sinks.float(),
        None if bias is None else bias.float(), mask, seed, mesh, options)


def attention(query: Tensor, key: Tensor, value: Tensor, *,
              mesh: "Mesh | Mapping[str, int] | str | None" = None, sinks: Tensor | None = None,
              bias: Tensor | None = None, mask: Tensor | None = None, seed: int | None = None,
              **options: "Unpack[Options]") -> tuple[Tensor, Tensor]:
    """annulus.attention() as a differentiable operator: output [b,t,n,Dv] and LSE [b,n,t].

    Collective, as is its backward pass: all ranks ask for the same gradients. The mesh must have
    been made before the operator is compiled. Under autocast, query, key and value are cast.
    """
    on, text = _texts(mesh, options)
    return run_operator(query, key, value, sinks, bias, mask, seed, on, text)


__all__ = ["attention"]
