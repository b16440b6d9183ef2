"""Attention of DTensors: placements become partition specs, and specs of the results become
placements."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ._library import argument_error as refused
from ._mesh import AnyMesh, Mesh, mesh_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

# The dimension of another operand for each dimension of the query [B,T,N,D].
_OF_LSE = {0: 0, 1: 2, 2: 1}  # [B,N,T], and of bias and mask [B,N,T,S]
_OF_SINKS = {2: 0}  # [N] and [N,M]

# The device meshes whose ranks are arranged as in a mesh of ours.
_alike: "weakref.WeakKeyDictionary[Mesh, set[DeviceMesh]]" = weakref.WeakKeyDictionary()


def _coordinates(mesh: Mesh) -> dict[str, int]:
    found, rank = {}, mesh.rank
    for name, size in reversed(mesh.axes.items()):
        rank, found[name] = divmod(rank, size)
    return found


def _mesh_like(device_mesh: "DeviceMesh", given: AnyMesh) -> Mesh:
    """Our mesh for a DeviceMesh, which may be a part of our mesh. Collective for a new DeviceMesh."""
    names = device_mesh.mesh_dim_names
    if names is None:
        raise refused("mesh", "a DeviceMesh without names", "one with mesh_dim_names")
    sizes = dict(zip(names, device_mesh.mesh.shape))
    on = mesh_of(sizes if given is None else given)
    if device_mesh in _alike.setdefault(on, set()):
        return on
    error: Exception | None = None
    if any(on.axes.get(name) != size for name, size in sizes.items()):
        error = refused("mesh", on.text, f"axes {sizes}, as the DeviceMesh has them")
    elif list(device_mesh.get_coordinate() or ()) != [_coordinates(on)[name] for name in names]:
        error = refused("mesh", f"a DeviceMesh with rank {on.rank} at "
                        f"{device_mesh.get_coordinate()}",
                        f"ranks in the order of {on.text}, the last axis fastest")
    on.agree(error)
    _alike[on].add(device_mesh)
    return on


def _sharded(name: str, tensor: DTensor) -> dict[int, list[str]]:
    """The mesh axes that shard each dimension, by the placements."""
    axes: dict[int, list[str]] = {}
    for axis, placement in zip(tensor.device_mesh.mesh_dim_names, tensor.placements):
        if type(placement) is Shard:
            dimension = placement.dim % tensor.ndim
            axes.setdefault(dimension, []).append(axis)
        elif type(placement) is not Replicate:
            raise refused(name, f"{placement} on mesh axis {axis}", "Shard or Replicate")
    sizes = dict(zip(tensor.device_mesh.mesh_dim_names, tensor.device_mesh.mesh.shape))
    for dimension, on in axes.items():
        parts = 1
        for axis in on:
            parts *= sizes[axis]
        if tensor.shape[dimension] % parts:
            raise refused(name, f"a dimension {dimension} of {tensor.shape[dimension]} on {parts} "
                          f"ranks ({'+'.join(on)})", "equal shards")
    return axes


def _spec(name: str, tensor: DTensor) -> str:
    if tensor.ndim != 4:
        raise refused(name, f"{tensor.ndim} dimensions", "[batch, sequence, heads, dim]")
    axes = _sharded(name, tensor)
    if 3 in axes:
        raise refused(name, f"Shard(3) on mesh axis {axes[3][0]}", "a whole last dimension")
    return ",".join("+".join(axes.get(dimension, ["-"])) for dimension in range(4))


def _moved(placements: "Sequence[Placement]", where: Mapping[int, int],
           shape: "Sequence[int]") -> "list[Placement]":
    """The query's placements carried over to an operand that has some of its dimensions, with a
    size of 1 where it is broadcast."""
    return [Shard(where[p.dim]) if isinstance(p, Shard) and shape[where.get(p.dim, 0)] != 1
            and p.dim in where else Replicate() for p in placements]


def _local(name: str, tensor: Any, device_mesh: "DeviceMesh") -> Tensor:
    if not isinstance(tensor, DTensor):
        raise refused(name, type(tensor).__name__, "a DTensor, as the query is one")
    if tensor.device_mesh != device_mesh:
        raise refused(name, str(tensor.device_mesh), f"the query's {device_mesh}")
    # Gradients are complete on every rank that holds the operand.
    return tensor.to_local(grad_placements=tensor.placements)


def attention(compute: Callable[..., tuple[Tensor, Tensor]], query: DTensor, key: Any, value: Any,
              mesh: AnyMesh, sinks: Any, bias: Any, mask: Any, seed: Any,
              options: Mapping[str, Any]) -> tuple[DTensor, DTensor]:
    device_mesh = query.device_mesh
    for name in ("query_spec", "kv_spec", "bias_shape"):
        if options.get(name) is not None:
            raise refused(name, options[name], "none: the placements say it")
    for name in ("layout", "kv_layout"):
        if options.get(name) not in (None, "contiguous"):
            raise refused(name, options[name], "contiguous, as the rows of a DTensor lie in order")
    local = {name: _local(name, tensor, device_mesh)
             for name, tensor in (("query", query), ("key", key), ("value", value))}
    on = _mesh_like(device_mesh, mesh)
    specs = {"query_spec": _spec("query", query), "kv_spec": _spec("key", key)}
    if _spec("value", value) != specs["kv_spec"]:
        raise refused("value", value.placements, f"{key.placements}, as the key")
    placed = [Shard(p.dim % 4) if isinstance(p, Shard) else p for p in query.placements]
    for name, tensor, where in (("sinks", sinks, _OF_SINKS), ("bias", bias, _OF_LSE),
                                ("mask", mask, _OF_LSE)):
        if tensor is None:
            continue
        if not isinstance(tensor, DTensor):
            raise refused(name, type(tensor).__name__, "a DTensor, as the query is one")
        _sharded(name, tensor)
        expected = _moved(placed, where, tensor.shape)
        if [p.dim % tensor.ndim if isinstance(p, Shard) else None for p in tensor.placements] != [
                p.dim if isinstance(p, Shard) else None for p in expected]:
            raise refused(name, tensor.placements, f"{tuple(expected)}, as the query")
        local[name] = _local(name, tensor, device_mesh)
    out, lse = compute(**local, mesh=on, seed=seed,
                       bias_shape=None if bias is None else tuple(bias.shape),
                       **{**options, **specs, "layout": "contiguous", "kv_layout": "contiguous"})
    b, t, n, _ = query.shape
    sizes = (b, t, n, value.shape[3])

    def whole(shard: Tensor, shape: Sequence[int], placements: "Sequence[Placement]") -> DTensor:
        stride = [1]
        for size in reversed(shape[1:]):
            stride.insert(0, stride[0] * size)
        return DTensor.from_local(shard, device_mesh, placements, run_check=False, shape=shape,
                                  stride=tuple(stride))

    return whole(out, sizes, placed), whole(lse, (b, n, t), [
        Shard(_OF_LSE[p.dim]) if isinstance(p, Shard) else p for p in placed])


__all__ = ["DTensor", "attention"]
