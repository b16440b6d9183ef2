"""annulus.torch on DTensors, against attention in float64, on CPU ranks or on GPUs. See conftest.py."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.tensor")

import annulus  # noqa: E402
import annulus.torch  # noqa: E402
from conftest import ON_GPUS, refused  # noqa: E402
from reference import attention, logits_mask  # noqa: E402
from torch import distributed  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import (DTensor, Partial, Replicate, Shard,  # noqa: E402
                                      distribute_tensor)

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 2, 24, 4, 2, 8
DEVICE, BACKEND = ("cuda", "nccl") if ON_GPUS else ("cpu", "gloo")


@pytest.fixture(scope="module", autouse=True)
def processes(tmp_path_factory):
    mesh = annulus.mesh({"sp": -1})
    if ON_GPUS and mesh.size > torch.cuda.device_count():
        pytest.skip("ranks share GPUs, which NCCL refuses")
    method = f"file://{tmp_path_factory.mktemp('store') / 'store'}"
    if mesh.comm is not None:
        method = mesh.comm.bcast(method) if hasattr(mesh.comm, "bcast") else "env://"  # torchrun's
    distributed.init_process_group(BACKEND, init_method=method, rank=mesh.rank, world_size=mesh.size)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def whole(random):
    """Query, key, value, gradient of the output, sinks, bias; the same on all ranks."""
    shapes = [(BATCH, LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [random.standard_normal(shape).astype(np.float32)
            for shape in (*shapes, (HEADS,), (1, HEADS, LENGTH, LENGTH))]


def meshes():
    """Axes, with the placements of query, key, sinks and bias on each."""
    size = annulus.mesh({"sp": -1}).size
    shard, same = (Shard(1), Shard(1), Replicate(), Shard(2)), (Replicate(),) * 4
    batch = (Shard(0), Shard(0), Replicate(), Replicate())
    heads = (Shard(2), Shard(2), Shard(0), Shard(1))
    keys = (Replicate(), Shard(1), Replicate(), Replicate())
    found = [((size,), ("sp",), [shard]), ((size,), ("copies",), [same]), ((size,), ("kv",), [keys])]
    if size == 2:
        found += [((2,), ("dp",), [batch]), ((1, 2), ("sp", "tp"), [shard, heads])]
    if size == 4:
        found += [((2, 2), ("dp", "sp"), [batch, shard]), ((2, 2), ("sp", "tp"), [shard, heads]),
                  ((2, 2), ("outer", "inner"), [shard, shard]), ((2, 2), ("sp", "copies"), [shard, same])]
    return found


def distributed_leaves(mesh, whole, placements):
    q, k, v, grad, sinks, bias = (torch.from_numpy(x).to(DEVICE) for x in whole)
    of_q, of_k, of_sinks, of_bias = zip(*placements)
    leaves = [distribute_tensor(x, mesh, list(p)).requires_grad_() for x, p in (
        (q, of_q), (k, of_k), (v, of_k), (sinks, of_sinks), (bias, of_bias))]
    return leaves, distribute_tensor(grad, mesh, list(of_q))


def test_placements_are_read_and_returned(whole):
    for sizes, names, placements in meshes():
        mesh = init_device_mesh(DEVICE, sizes, mesh_dim_names=names)
        (q, k, v, sinks, bias), grad = distributed_leaves(mesh, whole, placements)
        out, lse = annulus.torch.attention(q, k, v, causal=True, window=(9, 0), sinks=sinks,
                                           bias=bias)
        assert isinstance(out, DTensor) and out.placements == q.placements, names
        seen = logits_mask(LENGTH, LENGTH, True, window=(9, 0))
        expected = attention(*whole[:3], seen, sinks=whole[4][:, None], bias=whole[5],
                             grad=whole[3])
        (out * grad).sum().full_tensor().backward()
        biases = expected[6].sum(0, keepdims=True)
        for name, found, right in (
                ("out", out, expected[0]), ("lse", lse, expected[1]), ("dq", q.grad, expected[2]),
                ("dk", k.grad, expected[3]), ("dv", v.grad, expected[4]),
                ("dsinks", sinks.grad, expected[5][:, 0]), ("dbias", bias.grad, biases)):
            np.testing.assert_allclose(found.full_tensor().detach().cpu().numpy(), right, atol=2e-5,
                                       rtol=2e-5, err_msg=f"{name} on {names}")
        for leaf in (q, k, v, sinks, bias):
            assert leaf.grad.placements == leaf.placements, names


def test_refusals_name_the_operand(whole):
    size = annulus.mesh({"sp": -1}).size
    mesh = init_device_mesh(DEVICE, (size,), mesh_dim_names=("sp",))
    other = init_device_mesh(DEVICE, (size,), mesh_dim_names=("other",))
    unnamed = init_device_mesh(DEVICE, (size,))
    q, k, v, _, sinks, _ = (torch.from_numpy(x).to(DEVICE) for x in whole)

    def on(tensor, placement, where=mesh):
        return DTensor.from_local(tensor, where, [placement], run_check=False)

    good = {"query": on(q, Shard(1)), "key": on(k, Shard(1)), "value": on(v, Shard(1))}
    odd = distribute_tensor(torch.ones(BATCH, 4 * size - 1, HEADS, DIM, device=DEVICE), mesh, [Shard(1)])
    cases = [("query", {"query": on(q, Partial())}), ("key", {"key": on(k, Shard(3))}),
             ("value", {"value": on(v, Replicate())}), ("key", {"key": k}),
             ("key", {"key": on(k, Shard(1), other)}), ("sinks", {"sinks": sinks}),
             ("sinks", {"sinks": on(sinks, Shard(0))}), ("layout", {"layout": "zigzag"}),
             ("query_spec", {"query_spec": "-,sp,-,-"}), ("mesh", {"mesh": f"dp={size}"}),
             ("mesh", {name: on(x, Shard(1), unnamed) for name, x in
                       (("query", q), ("key", k), ("value", v))})]
    if size > 1:
        cases.append(("query", {"query": odd}))
        backwards = torch.distributed.device_mesh.DeviceMesh(
            DEVICE, list(reversed(range(size))), mesh_dim_names=("sp",))
        cases.append(("mesh", {name: on(x, Shard(1), backwards) for name, x in
                               (("query", q), ("key", k), ("value", v))}))
    for argument, changes in cases:
        with refused(argument, changes):
            annulus.torch.attention(**{**good, **changes})
