"""Meshes of JAX's virtual devices, and how a fixture describes them."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def device_mesh(**axes: int) -> Mesh:
    """All 8 devices on named axes, the last one fastest."""
    return Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))


def text_of(spec: PartitionSpec) -> str:
    """A spec as annulus writes it."""
    return ",".join(axis or "-" for axis in spec)


def sharding(mesh: Mesh, specs: dict[str, PartitionSpec],
             tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """Mesh, specs, and which part of each array JAX gives each device, as [begin, end) by
    dimension."""
    devices = {}
    for name, spec in specs.items():
        shape = tensors[name].shape
        parts = NamedSharding(mesh, spec).devices_indices_map(shape)
        devices[name] = [[list(part.indices(size)[:2]) for part, size in zip(parts[device], shape)]
                         for device in mesh.devices.flat]
    return {"mesh": ",".join(f"{axis}={size}" for axis, size in mesh.shape.items()),
            "query_spec": text_of(specs["query"]), "kv_spec": text_of(specs["key"]),
            "devices": devices}
