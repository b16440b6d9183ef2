"""annulus.jax on GPUs, against attention in float64 on the CPU. See conftest.py."""

import functools

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec as P  # noqa: E402

import annulus  # noqa: E402
import annulus.jax  # noqa: E402
from reference import attention, logits_mask  # noqa: E402

LENGTH, HEADS, KV_HEADS, DIM = 512, 4, 2, 64
# Rounding of P and dS to half precision in a product of LENGTH terms of size 1.
TOLERANCE = {"bfloat16": 4e-2, "float32": 2e-4}


@pytest.fixture(scope="module", autouse=True)
def device():
    """The rank's GPU; JAX sees all of them."""
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX sees no GPU")
    gpu = jax.local_devices()[int(annulus.mesh().device.partition(":")[2])
                              % jax.local_device_count()]
    with jax.default_device(gpu):
        yield gpu


@pytest.fixture
def whole():
    random = np.random.default_rng(7)
    return [random.standard_normal((2, LENGTH, heads, DIM)).astype(np.float32)
            for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]


def rows(mesh):
    return annulus.positions((LENGTH,), "sp", mesh=mesh, layout="zigzag", sequence=0)[0]


def shards(mesh, whole, dtype):
    return [jnp.asarray(x[:, rows(mesh)], dtype) for x in whole]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", [
    {"causal": True}, {"causal": True, "window": (100, 0), "sinks": True}, {"soft_cap": 2.0}],
    ids="+".join)
def test_output_and_gradients(sequence, whole, dtype, options):
    options = dict(options)
    sinks = jnp.linspace(-1, 1, HEADS) if options.pop("sinks", False) else None
    q, k, v, grad = shards(sequence, whole, dtype)

    @jax.jit
    def step(q, k, v, sinks):
        (out, lse), pullback = jax.vjp(lambda *x: annulus.jax.attention(
            *x[:3], sinks=x[3], mesh=sequence, layout="zigzag", **options), q, k, v, sinks)
        return (out, lse, *pullback((grad, jnp.zeros_like(lse))))

    found = step(q, k, v, sinks)
    seen = logits_mask(LENGTH, LENGTH, options.get("causal", False), 0, options.get("window"),
                       batch=2)
    rounded = [np.asarray(jnp.asarray(x, dtype), np.float64) for x in whole]
    right = attention(*rounded[:3], seen, soft_cap=options.get("soft_cap"), grad=rounded[3],
                      sinks=None if sinks is None else np.asarray(sinks)[:, None])
    held = rows(sequence)
    expected = [right[0][:, held], right[1][:, :, held], *(x[:, held] for x in right[2:5])]
    for one, other in zip(found, expected):
        np.testing.assert_allclose(np.asarray(one, np.float64), other, atol=TOLERANCE[dtype],
                                   rtol=TOLERANCE[dtype])
    if sinks is not None:
        np.testing.assert_allclose(found[5], right[5][:, 0], rtol=TOLERANCE[dtype],
                                   atol=20 * TOLERANCE[dtype])


def test_late_operands_and_other_values(sequence, whole):
    """XLA's work before and after the call is ordered with it; nothing is traced again."""
    q, k, v, _ = shards(sequence, whole, "bfloat16")
    w = jnp.eye(DIM, dtype=jnp.bfloat16)
    traces = []

    @jax.jit
    def layers(q, w, length, seed):
        traces.append(1)
        for _ in range(4):
            q = annulus.jax.attention((q @ w) @ w, k, v, mesh=sequence, layout="zigzag",
                                      kv_lengths=length, dropout=0.1, seed=seed)[0] @ w
        return q

    for length, seed in ((100, 1), (LENGTH, 2), (7, 2)):
        found = layers(q, w, jnp.array(length), jnp.array(seed))
        expected = q
        for _ in range(4):
            expected = annulus.jax.attention(expected, k, v, mesh=sequence, layout="zigzag",
                                             kv_lengths=jnp.array(length), dropout=0.1,
                                             seed=seed)[0]
        assert jnp.array_equal(found, expected)
    assert len(traces) == 1


def test_a_training_step_lowers_the_loss(sequence, whole):
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, LENGTH, 64))[:, rows(sequence)],
                    jnp.bfloat16)
    keys = jax.random.split(jax.random.key(0), 2)
    weights = [jax.random.normal(keys[0], (64, HEADS * 3 * DIM)) / 8,
               jax.random.normal(keys[1], (HEADS * DIM, 64)) / 16]

    @jax.checkpoint
    def loss_of(weights, x):
        q, k, v = jnp.split((x @ weights[0].astype(x.dtype)).reshape(2, -1, HEADS, 3 * DIM), 3, -1)
        out, _ = annulus.jax.attention(q, k, v, mesh=sequence, causal=True, layout="zigzag")
        return jnp.square((out.reshape(2, -1, HEADS * DIM) @ weights[1].astype(x.dtype) - x)
                          .astype(jnp.float32)).mean()

    @jax.jit
    def step(weights):
        loss, gradients = jax.value_and_grad(loss_of)(weights, x)
        return loss, [w - 2 * g for w, g in zip(weights, gradients)]

    losses = []
    for _ in range(6):
        loss, weights = step(weights)
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.98 * losses[0]


def test_a_mesh_of_another_device(sequence, whole):
    q, k, v, _ = (jax.device_put(x, jax.devices("cpu")[0])
                  for x in shards(sequence, whole, "float32"))
    with pytest.raises(annulus.UnsupportedError, match="computes on cuda"):
        jax.jit(lambda *x: annulus.jax.attention(*x, mesh=sequence)[0])(q, k, v)


def test_in_shard_map(whole):
    """Among XLA's own collectives, each of which depends on the attention before it."""
    ranks = annulus.mesh().size
    if jax.process_count() != ranks:
        pytest.skip("ranks share GPUs")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:ranks]), ("sp",))
    spec = P(None, "sp")
    q, k, v, grad = (jax.make_array_from_callback(
        x.shape, NamedSharding(mesh, spec), lambda index, x=x: x[index]) for x in whole)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec, spec, spec, P()), out_specs=spec)
    def attend(q, k, v, w):
        for _ in range(2):
            q = annulus.jax.attention(q, k, v, causal=True)[0] @ w
            q -= jax.lax.pmean(q.mean(1, keepdims=True), "sp")
        return q

    def plain(q, k, v, w):
        for _ in range(2):
            q = jax.nn.dot_product_attention(q, k, v, is_causal=True) @ w
            q -= q.mean(1, keepdims=True)
        return q

    w = np.eye(DIM, dtype=np.float32) + 0.1
    found = jax.jit(lambda grad, *x: jax.vjp(attend, *x)[1](grad))(grad, q, k, v, w)
    with jax.default_device(jax.local_devices()[0]):
        expected = jax.jit(lambda *x: jax.vjp(plain, *x)[1](whole[3]))(*whole[:3], w)
    rank = annulus.mesh().rank
    share = slice(rank * LENGTH // ranks, (rank + 1) * LENGTH // ranks)
    for one, right in zip(found[:3], expected[:3]):
        np.testing.assert_allclose(one.addressable_data(0), right[:, share], atol=2e-3, rtol=2e-3)
    # JAX's products with w are of TF32, so an entry's error grows with the largest.
    np.testing.assert_allclose(found[3].addressable_data(0), expected[3], rtol=2e-3,
                               atol=2e-3 * float(np.abs(expected[3]).max()))
