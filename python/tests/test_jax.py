"""annulus.jax against JAX's own attention, on CPU ranks: every process on arrays of its own, and
all of them in one jax.shard_map."""

import functools
import subprocess
import sys

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec as P  # noqa: E402
from mpi4py import MPI  # noqa: E402

import annulus  # noqa: E402
import annulus.jax  # noqa: E402
from conftest import unlaunched  # noqa: E402
from reference import attention as reference  # noqa: E402

RANKS = MPI.COMM_WORLD.size
B, T, N, K, D = 2, 48, 4, 2, 16
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}


@pytest.fixture
def whole(random):
    """Query, key, value and the gradient of the output, the same on all ranks."""
    return [random.standard_normal((B, T, heads, D)).astype(np.float32) for heads in (N, K, K, N)]


def rows(mesh, layout="contiguous"):
    return annulus.positions((T,), "sp", mesh=mesh, layout=layout, sequence=0)[0]


def shards(mesh, whole, dtype="float32", layout="contiguous"):
    return [jnp.asarray(x[:, rows(mesh, layout)], dtype) for x in whole]


def with_gradients(function, grad):
    """The function's output, LSE and gradients of its arguments, jitted."""
    def run(*arguments):
        (out, lse), pullback = jax.vjp(function, *arguments)
        return (out, lse, *pullback((grad.astype(out.dtype), jnp.zeros_like(lse))))
    return jax.jit(run)


@pytest.mark.parametrize("dtype, theirs, ours", [
    ("float32", {}, {}),
    ("bfloat16", {"is_causal": True}, {"causal": True, "layout": "zigzag"}),
    ("float32", {"is_causal": True, "local_window_size": (9, 0)},
     {"causal": True, "window": (9, 0)}),
    ("bfloat16", {"local_window_size": (3, 11), "scale": 0.3}, {"window": (3, 11), "scale": 0.3}),
    ("float32", {"key_value_seq_lengths": (17, T)}, {"kv_lengths": [17, T]}),
], ids=["full", "causal", "causal+window", "window", "lengths"])
def test_like_jax(sequence, whole, dtype, theirs, ours):
    theirs = dict(theirs)
    if "key_value_seq_lengths" in theirs:
        theirs["key_value_seq_lengths"] = jnp.asarray(theirs["key_value_seq_lengths"])
    q, k, v, grad = (jnp.asarray(x, dtype) for x in whole)
    plain = jax.jit(lambda q, k, v: jax.vjp(
        lambda *x: jax.nn.dot_product_attention(*x, **theirs), q, k, v)[1](grad))
    expected = [jax.nn.dot_product_attention(q, k, v, **theirs), None, *plain(q, k, v)]

    layout = ours.get("layout", "contiguous")
    *local, local_grad = shards(sequence, whole, dtype, layout)
    found = with_gradients(lambda *x: annulus.jax.attention(*x, mesh=sequence, **ours),
                           local_grad)(*local)
    for one, right in zip(found, expected):
        if right is not None:
            assert one.dtype == jnp.dtype(dtype)
            np.testing.assert_allclose(
                np.asarray(one, np.float64),
                np.asarray(right, np.float64)[:, rows(sequence, layout)], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_sinks_bias_mask_and_gradient_of_lse(sequence, whole, random):
    """Against attention in float64; JAX has no sinks."""
    sinks = random.standard_normal((N, 1)).astype(np.float32)
    bias = random.standard_normal((1, N, T, T)).astype(np.float32)
    mask = random.random((B, 1, T, T)) < 0.7
    mask[..., 0] = True
    right = reference(*whole[:3], mask, sinks=sinks, bias=bias, grad=whole[3])
    q, k, v, grad = shards(sequence, whole)
    held = rows(sequence)

    def ours(q, k, v, sinks, bias):
        return annulus.jax.attention(q, k, v, mesh=sequence, sinks=sinks, bias=bias,
                                     mask=jnp.asarray(mask[:, :, held]))

    found = with_gradients(ours, grad)(q, k, v, jnp.asarray(sinks[:, 0]),
                                       jnp.asarray(bias[:, :, held]))
    expected = [right[0][:, held], right[1][:, :, held], *(x[:, held] for x in right[2:5]),
                right[5][:, 0], right[6].sum(0, keepdims=True)[:, :, held]]
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-4)

    # The gradient of the LSE adds its own part, the softmax of the logits.
    by_lse = jax.grad(lambda b: annulus.jax.attention(q, k, v, mesh=sequence, bias=b)[1].sum())(
        jnp.asarray(bias[:, :, held]))
    np.testing.assert_allclose(by_lse.sum(-1), np.full((1, N, len(held)), B), rtol=1e-4)


def test_values_of_a_call_compile_nothing(sequence, whole):
    q, k, v, _ = shards(sequence, whole)
    traces = []

    @jax.jit
    def step(q, k, v, lengths, offset, seed):
        traces.append(1)
        return annulus.jax.attention(q, k, v, mesh=sequence, causal=True, kv_lengths=lengths,
                                     offset=offset, dropout=0.25, seed=seed)[0]

    for lengths, offset, seed in (((5, T), 0, 1), ((T, 9), 3, 2), ((T, 9), 3, 1)):
        found = step(q, k, v, jnp.array(lengths), jnp.array(offset), jnp.array(seed))
        expected, _ = annulus.attention(
            *map(np.asarray, (q, k, v)), mesh=sequence, causal=True, kv_lengths=lengths,
            offset=offset, dropout=0.25, seed=seed, layout="contiguous",
            call_arguments=("lengths", "offsets"))
        assert np.array_equal(found, expected)
    assert len(traces) == 1
    from_key = annulus.jax.attention(q, k, v, mesh=sequence, dropout=0.25, seed=jax.random.key(7))
    from_halves = annulus.jax.attention(q, k, v, mesh=sequence, dropout=0.25,
                                        seed=jax.random.key_data(jax.random.key(7)))
    assert np.array_equal(from_key[0], from_halves[0])


def test_donated_checkpointed_and_in_loops(sequence, whole):
    q, k, v, grad = shards(sequence, whole)

    def layer(x, _=None):
        return annulus.jax.attention(x, k, v, mesh=sequence, causal=True)[0] + x, None

    def loss(x, wrap):
        for _ in range(3):
            x, _ = wrap(x)
        return (x * grad).sum()

    plain = jax.jit(jax.grad(lambda x: loss(x, layer)))(q)
    checkpointed = jax.jit(jax.grad(lambda x: loss(x, jax.checkpoint(layer))),
                           donate_argnums=0)(q + 0)
    scanned = jax.jit(jax.grad(lambda x: (jax.lax.scan(layer, x, length=3)[0] * grad).sum()))(q)
    for found in (checkpointed, scanned):
        np.testing.assert_allclose(found, plain, atol=1e-5, rtol=1e-5)


def test_independent_calls_take_turns(sequence, random):
    """XLA would run them as soon as their operands are ready, in an order that differs between ranks."""
    x = random.standard_normal((256, 256)).astype(np.float32) / 16
    calls = range(20)

    def heads(x):
        return x.reshape(1, 256, 4, 64)

    @jax.jit
    def many(x):
        queries = [heads(jnp.sin(x * (i + 1)) @ x) for i in calls]
        # XLA would give dropped results one buffer, for which the calls would wait.
        return queries, [annulus.jax.attention(q, heads(x), heads(i * x), mesh=sequence)
                         for i, q in enumerate(queries)]

    signs = (1, -1)  # programs that do not wait for each other
    results = jax.block_until_ready([many(sign * jnp.asarray(x)) for sign in signs])
    for sign, (queries, found) in zip(signs, results):
        for i, (q, (out, _)) in enumerate(zip(queries, found)):
            expected, _ = annulus.attention(np.asarray(q), heads(sign * x), heads(i * sign * x),
                                            mesh=sequence, layout="contiguous")
            np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("chosen", ["None", "'cpu'", "jax.devices()[0]"])
def test_the_device_that_jax_computes_on_by_default(chosen):
    if RANKS > 1:
        pytest.skip("one rank is enough")
    subprocess.run([sys.executable, "-c", f"""
import jax, jax.numpy as jnp
import annulus.jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_default_device", {chosen})
x = jnp.ones((1, 8, 2, 16))
assert annulus.jax.attention(x, x, x)[0].shape == x.shape and annulus.mesh().device == "cpu"
"""], check=True, env=unlaunched())


def test_what_is_refused(sequence, whole):
    q, k, v, _ = shards(sequence, whole)
    call = jax.jit(lambda *x, **options: annulus.jax.attention(*x, mesh=sequence, **options))
    with pytest.raises(annulus.UnsupportedError, match="vmap"):
        jax.vmap(lambda q: annulus.jax.attention(q, k, v, mesh=sequence)[0])(q[None])
    with pytest.raises(annulus.UnsupportedError, match="derivatives"):
        jax.hessian(lambda x: annulus.jax.attention(q * x, k, v, mesh=sequence)[0].sum())(1.0)
    with pytest.raises(annulus.ArgumentError, match="key: got bfloat16, expected float32"):
        call(q, k.astype(jnp.bfloat16), v)
    with pytest.raises(annulus.ArgumentError, match=r"value: got shape .*, expected"):
        call(q, k, v[:, 1:])
    with pytest.raises(annulus.ArgumentError, match="sinks: got shape"):
        call(q, k, v, sinks=jnp.zeros(3))
    with pytest.raises(annulus.UserError, match="heads"):
        call(q[:, :, :3], k, v)
    with pytest.raises(TypeError, match="is_causal"):
        annulus.jax.attention(q, k, v, mesh=sequence, is_causal=True)
    with pytest.raises(TypeError, match="seed"):
        annulus.jax.attention(q, k, v, mesh=sequence, dropout=0.5)
    with pytest.raises(TypeError, match="query: got list"):
        annulus.jax.attention([1.0], k, v, mesh=sequence)
    with pytest.raises(jax.errors.JaxRuntimeError, match="kv_lengths"):  # known when it runs
        jax.block_until_ready(jax.jit(lambda n: annulus.jax.attention(
            q, k, v, mesh=sequence, kv_lengths=n))(jnp.array([T + 1, 2])))


def test_a_failed_call_does_not_stop_later_ones(whole):
    """It may fail after it has returned, while later calls are planned or its mesh is closed."""
    mesh = annulus.Mesh("sp=-1,fails=1", annulus.mesh().comm, device="cpu", threads=1, timeout=60)
    q, k, v, _ = shards(mesh, whole)
    x = jnp.ones((1000, 1000))

    @jax.jit
    def call(lengths, x):
        late = (x @ x @ x @ x @ x)[0, :2] * 0
        return annulus.jax.attention(q, k, v, mesh=mesh, kv_lengths=lengths + late.astype(jnp.int32))[0]

    right, wrong = jnp.array([T, T // 2]), jnp.array([T + 1, 2])
    expected = jax.block_until_ready(call(right, x))
    for window in (3, 5):
        failed = call(wrong, x)
        jax.block_until_ready(annulus.jax.attention(q, k, v, mesh=mesh, window=(window, 0)))
        with pytest.raises(jax.errors.JaxRuntimeError, match="kv_lengths"):
            jax.block_until_ready(failed)
    np.testing.assert_array_equal(call(right, x), expected)
    with pytest.raises(jax.errors.JaxRuntimeError, match="kv_lengths"):
        jax.block_until_ready(call(wrong, x))
    again = annulus.jax.attention(q, k, v, mesh=mesh, kv_lengths=right)[0]  # has a plan
    np.testing.assert_array_equal(again, expected)
    failed = call(wrong, x)
    mesh.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match="kv_lengths"):
        jax.block_until_ready(failed)
    jax.effects_barrier()


def test_a_program_of_a_closed_mesh(whole):
    mesh = annulus.Mesh("sp=-1,tp=1", annulus.mesh().comm, device="cpu", threads=1, timeout=60)
    q, k, v, _ = shards(mesh, whole)
    step = jax.jit(lambda q: annulus.jax.attention(q, k, v, mesh=mesh)[0])
    jax.block_until_ready(step(q))
    mesh.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match="closed"):
        jax.block_until_ready(step(q))


def on_mesh(mesh, spec, array):
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec),
                                        lambda index: np.asarray(array)[index])


def local(array):
    return np.asarray(array.addressable_data(0))


def check_on_mesh(mesh, specs, out_spec, arrays, keywords, seen, check_vma):
    """Output and gradients in jax.shard_map of query, key, value and sinks, against float64."""
    *operands, sinks, grad = arrays
    lse_spec = P(*(out_spec[i] if i < len(out_spec) else None for i in (0, 2, 1)))
    attend = jax.shard_map(
        lambda q, k, v, sinks: annulus.jax.attention(q, k, v, sinks=sinks, **keywords), mesh=mesh,
        in_specs=(*specs, P()), out_specs=(out_spec, lse_spec), check_vma=check_vma)
    given = [on_mesh(mesh, spec, x) for spec, x in zip((*specs, P(), out_spec), arrays)]

    @jax.jit
    def run(*operands):
        out, pullback = jax.vjp(lambda *x: attend(*x)[0], *operands[:-1])
        return (out, *pullback(operands[-1]))

    expected = reference(*operands, seen, sinks=sinks[:, None], grad=grad)
    right = (expected[0], *expected[2:5], expected[5][:, 0])
    for found, spec, whole in zip(run(*given), (out_spec, *specs, P()), right):
        np.testing.assert_allclose(local(found), local(on_mesh(mesh, spec, whole)), atol=1e-4)


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map(whole, random, check_vma):
    sinks = random.standard_normal(N).astype(np.float32)
    causal = np.tril(np.ones((1, 1, T, T), bool))
    arrays = [*whole[:3], sinks, whole[3]]
    check = functools.partial(check_on_mesh, check_vma=check_vma)
    sequence = jax.make_mesh((RANKS,), ("sp",))
    check(sequence, [P(None, "sp")] * 3, P(None, "sp"), arrays, {"causal": True}, causal)
    # Every rank has all queries.
    one = [whole[0][:, :1], *whole[1:3], sinks, whole[3][:, :1]]
    check(sequence, [P(), P(None, "sp"), P(None, "sp")], P(), one,
          {"query_spec": "-,-,-,-", "kv_spec": "-,sp,-,-"}, np.ones((1, 1, 1, T), bool))
    if RANKS > 1:
        both = jax.make_mesh((2, RANKS // 2), ("dp", "sp"))
        spec = P("dp", "sp")
        check(both, [spec] * 3, spec, arrays, {"causal": True, "mesh": both}, causal)


def test_what_is_refused_on_a_mesh(whole):
    if RANKS == 1:
        pytest.skip("needs several ranks")
    mesh = jax.make_mesh((RANKS,), ("sp",))
    q, k, v, _ = (on_mesh(mesh, P(None, "sp"), x) for x in whole)
    with pytest.raises(annulus.UnsupportedError, match="shard_map"):
        jax.jit(lambda *x: annulus.jax.attention(*x, mesh=mesh))(q, k, v)

    def attend(over, **keywords):
        return jax.jit(jax.shard_map(lambda *x: annulus.jax.attention(*x, **keywords)[0], mesh=over,
                                     in_specs=P(None, "sp"), out_specs=P(None, "sp")))

    with pytest.raises(annulus.ArgumentError, match="mesh: got tp"):
        attend(mesh, mesh={"tp": -1})(q, k, v)
    turned = jax.sharding.Mesh(mesh.devices[::-1], ("sp",))
    with pytest.raises(annulus.ArgumentError, match="order of ranks"):
        attend(turned)(*(on_mesh(turned, P(None, "sp"), x) for x in whole[:3]))
