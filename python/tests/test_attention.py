"""annulus.attention and its gradients on NumPy arrays against float64."""

import threading

import ml_dtypes
import numpy as np
import pytest
import reference

import annulus
from conftest import refused

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 2, 48, 4, 2, 16
QUERY = "-,sp,-,-"
LSE = "-,-,sp"
BOUNDS = {"float64": 1e-12, "float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}


def error(found, expected):
    return np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected)


def operands(random, dtype="float32", length=LENGTH):
    kind = np.dtype(getattr(ml_dtypes, dtype)) if dtype == "bfloat16" else np.dtype(dtype)
    return [random.standard_normal((BATCH, length, heads, DIM)).astype(kind)
            for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]


class Sharded:
    """Arrays to and from the shards of a zigzag layout."""

    def __init__(self, mesh, layout="zigzag"):
        self.mesh, self.layout = mesh, layout

    def shard(self, x, spec=QUERY, sequence=1):
        return annulus.shard(x, spec, mesh=self.mesh, layout=self.layout, sequence=sequence)

    def whole(self, x, shape, spec=QUERY, sequence=1):
        return annulus.unshard(x, spec, shape, mesh=self.mesh, layout=self.layout,
                               sequence=sequence)

    def check(self, arrays, seen, keywords, **of_reference):
        """Compares output and gradients with float64. Returns the gradients, and the expected
        gradients of sinks and logits."""
        q, k, v, g = map(self.shard, arrays)
        keywords = {"mesh": self.mesh, "layout": self.layout, **keywords}
        out, lse = annulus.attention(q, k, v, **keywords)
        found = annulus.attention_backward(g, q, k, v, out, lse, grad_bias="bias" in keywords,
                                           **keywords)
        expected, _, *gradients, of_sinks, of_logits = reference.attention(
            *arrays[:3], seen, grad=arrays[3], **of_reference)
        assert error(self.whole(out, expected.shape), expected) < 2e-6
        for gradient, right in zip(found[:3], gradients):
            assert error(self.whole(gradient, right.shape), right) < 5e-6
        return found, of_sinks, of_logits


@pytest.mark.parametrize("dtype", BOUNDS)
def test_dtypes(sequence, random, dtype):
    q, k, v, _ = operands(random, dtype)
    shards = Sharded(sequence)
    out, lse = annulus.attention(*(shards.shard(x) for x in (q, k, v)), mesh=sequence, causal=True,
                                 layout="zigzag")
    assert out.dtype == q.dtype and lse.dtype == np.float32
    seen = reference.logits_mask(LENGTH, LENGTH, causal=True)
    expected, expected_lse = reference.attention(q, k, v, seen)
    assert error(shards.whole(out, q.shape), expected) < BOUNDS[dtype]
    whole = shards.whole(lse, expected_lse.shape, LSE, 2)
    assert error(whole, expected_lse) < max(BOUNDS[dtype], 1e-6)


SEGMENTS = np.repeat([[0, 1, 2], [0, 0, 1]], LENGTH // 3, axis=1).astype(np.int32)


@pytest.mark.parametrize("mask", [
    {},
    {"causal": True, "window": (7, 0)},
    {"window": (5, 3)},
    {"causal": True, "segments": SEGMENTS},
    {"kv_lengths": np.array([LENGTH, 20])},
    {"causal": True, "offset": 3},
])
@pytest.mark.parametrize("schedule", ["ring", "allgather", "auto"])
def test_masks(sequence, random, mask, schedule):
    seen = reference.logits_mask(LENGTH, LENGTH, batch=BATCH, **mask)
    Sharded(sequence).check(operands(random), seen, {"schedule": schedule, **mask})


def test_sinks_soft_cap_and_scale(sequence, random):
    arrays = operands(random)
    sinks = random.standard_normal(HEADS).astype(np.float32)
    options = {"soft_cap": 2.0, "scale": 0.4}
    seen = reference.logits_mask(LENGTH, LENGTH, causal=True)
    for logits in (sinks, 2 * sinks):  # other sinks need no other object
        found, dsinks, _ = Sharded(sequence).check(
            arrays, seen, {"causal": True, "sinks": logits, **options}, sinks=logits[:, None],
            **options)
        assert found.sinks.shape == (HEADS,)
        assert error(found.sinks, dsinks[:, 0]) < 5e-6


def test_the_gradient_of_a_bias_with_one_entry_on_a_rank(sequence, random):
    """A shared one gets the sum over the ranks, and only its whole shape says that it is shared."""
    size = sequence.size
    mesh = annulus.mesh({"dp": size})
    q, k, v, g = (x[:1] for x in operands(random))
    bias = random.standard_normal((1, HEADS, LENGTH, LENGTH)).astype(np.float32)
    out, lse = annulus.attention(q, k, v, mesh=mesh, bias=bias)

    def gradient(**keywords):
        return annulus.attention_backward(g, q, k, v, out, lse, mesh=mesh, bias=bias, grad_bias=True,
                                          **keywords).bias

    if size > 1:
        with refused("bias_shape"):
            gradient()
    own = gradient(bias_shape=(size, *bias.shape[1:]))
    assert error(gradient(bias_shape=bias.shape), size * own) < BOUNDS["float32"]
    for wrong in ((1, 1, LENGTH, LENGTH), (1, HEADS)):
        with pytest.raises(annulus.UserError):
            gradient(bias_shape=wrong)


def test_bias_and_dense_mask(sequence, random):
    arrays = operands(random)
    bias = random.standard_normal((1, HEADS, LENGTH, LENGTH)).astype(np.float32)
    dense = random.random((BATCH, 1, LENGTH, LENGTH)) < 0.7
    dense[..., 0] = True
    shards = Sharded(sequence)
    rows = {"bias": shards.shard(bias, "-,-,sp,-", 2), "mask": shards.shard(dense, "-,-,sp,-", 2)}
    found, _, ds = shards.check(arrays, dense, rows, bias=bias)
    whole = shards.whole(found.bias, bias.shape, "-,-,sp,-", 2)
    assert error(whole, ds.sum(0, keepdims=True)) < 5e-6


def test_strides_are_read_in_place(sequence, random):
    q, k, v, _ = operands(random)
    shards = Sharded(sequence)
    plain = [shards.shard(x) for x in (q, k, v)]
    # [b,n,t,d] in memory, seen as [b,t,n,d].
    turned = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in plain]
    keywords = {"mesh": sequence, "causal": True, "layout": "zigzag"}
    expected, _ = annulus.attention(*plain, **keywords)
    target = np.empty((BATCH, HEADS, plain[0].shape[1], DIM), np.float32).transpose(0, 2, 1, 3)
    out, _ = annulus.attention(*turned, out=target, **keywords)
    assert out is target
    assert np.allclose(out, expected, atol=1e-6)


def test_a_second_call_plans_nothing(sequence, random):
    shards = Sharded(sequence)
    q, k, v, _ = (shards.shard(x) for x in operands(random))
    keywords = {"mesh": sequence, "segments": SEGMENTS, "layout": "zigzag"}
    annulus.attention(q, k, v, **keywords)
    before = len(sequence._kept)
    first = annulus._attention.attention_for(q, k, v, **keywords)
    assert annulus._attention.attention_for(q, k, v, **{**keywords, "segments": SEGMENTS.copy()}) is first
    assert len(sequence._kept) == before
    other = SEGMENTS.copy()
    other[0, 0] = 7
    assert annulus._attention.attention_for(q, k, v, **{**keywords, "segments": other}) is not first


def test_lengths_and_offsets_of_a_call(sequence, random):
    q, k, v, _ = operands(random)
    shards = Sharded(sequence, "contiguous")
    q_, k_, v_ = (shards.shard(x) for x in (q, k, v))
    kept = set()
    for lengths, offset in (((LENGTH, 9), 0), ((11, 30), 4)):
        keywords = {"mesh": sequence, "layout": "contiguous", "causal": True, "offset": offset,
                    "kv_lengths": lengths, "call_arguments": ("lengths", "offsets")}
        out, _ = annulus.attention(q_, k_, v_, **keywords)
        kept.add(id(annulus._attention.attention_for(q_, k_, v_, **keywords)))
        seen = reference.logits_mask(LENGTH, LENGTH, causal=True, offset=offset, batch=BATCH,
                                     kv_lengths=lengths)
        expected, _ = reference.attention(q, k, v, seen)
        assert error(shards.whole(out, q.shape), expected) < 2e-6
    assert len(kept) == 1


def test_a_seed_replaces_the_earlier_one(random):
    """A number that of a device's memory, which the CPU refuses."""
    q, k, v, _ = operands(random)
    made = annulus.Attention((BATCH, LENGTH, LENGTH, HEADS, KV_HEADS, DIM, DIM), dropout=0.5,
                             mesh={"copies": -1})
    expected, _ = made.run(q, k, v, seed=5)
    (tensors,), = made._idle.values()
    annulus._library.function("tensors_set_device_dropout_seed")(tensors.handle, q.ctypes.data)
    found, _ = made.run(q, k, v, seed=5)
    assert np.array_equal(found, expected)


def test_dropout_is_the_same_under_every_sharding(sequence, random):
    q, k, v, _ = operands(random)
    results = []
    for layout in ("contiguous", "zigzag"):
        shards = Sharded(sequence, layout)
        out, _ = annulus.attention(*(shards.shard(x) for x in (q, k, v)), mesh=sequence,
                                   layout=layout, dropout=0.5, seed=7)
        results.append(shards.whole(out, q.shape))
    assert np.allclose(*results, atol=1e-5)
    plain, _ = reference.attention(q, k, v, reference.logits_mask(LENGTH, LENGTH))
    assert error(results[0], plain) > 0.1


def test_uneven_shards_by_an_object_for_the_whole_shape(sequence, random):
    length = 37
    q, k, v, g = operands(random, length=length)
    attention = annulus.Attention((BATCH, length, length, HEADS, KV_HEADS, DIM, DIM), mesh=sequence,
                                  causal=True)
    q_, k_, v_, g_ = (attention.shard(x, name) for x, name in
                      ((q, "query"), (k, "key"), (v, "value"), (g, "output")))
    assert q_.shape == attention.shape("query")
    out, lse = attention.run(q_, k_, v_)
    found = attention.backward(g_, q_, k_, v_, out, lse)
    expected, expected_lse, dq, dk, dv, *_ = reference.attention(
        q, k, v, reference.logits_mask(length, length, causal=True), grad=g)
    assert error(attention.unshard(out), expected) < 2e-6
    assert error(attention.unshard(lse, "lse"), expected_lse) < 1e-6
    for gradient, right, name in zip(found, (dq, dk, dv), ("query", "key", "value")):
        assert error(attention.unshard(gradient, name), right) < 5e-6
    assert "rank 0" in attention.plan(ranks=1)
    assert "schedule chosen" in attention.explain()
    attention.close()
    with pytest.raises(annulus.UserError):
        attention.run(q_, k_, v_)


def test_heads_and_batches_on_other_axes(random):
    size = annulus.mesh({"sp": -1}).size
    axes = {1: "dp=1,sp=1,tp=1", 2: "dp=1,sp=1,tp=2", 4: "dp=2,sp=1,tp=2"}[size]
    mesh = annulus.mesh(axes)
    q, k, v, _ = operands(random)
    out, _ = annulus.attention(*(annulus.shard(x, "dp,sp,tp,-", mesh=mesh) for x in (q, k, v)),
                               mesh=mesh, causal=True, layout="contiguous")
    expected, _ = reference.attention(q, k, v, reference.logits_mask(LENGTH, LENGTH, causal=True))
    assert error(annulus.unshard(out, "dp,sp,tp,-", q.shape, mesh=mesh), expected) < 2e-6
    assert mesh.axis_size("tp") == min(size, 2)


def test_a_prompt_against_a_cache(sequence, random):
    cached, new = 40, 8
    q, _, _, _ = operands(random, length=new)
    _, k, v, _ = operands(random, length=cached)
    shards = Sharded(sequence, "contiguous")
    keywords = {"mesh": sequence, "causal": True, "offset": "bottom-right", "layout": "contiguous"}
    out, _ = annulus.attention(*(shards.shard(x) for x in (q, k, v)), **keywords)
    seen = reference.logits_mask(new, cached, causal=True, offset=cached - new)
    expected, _ = reference.attention(q, k, v, seen)
    assert error(shards.whole(out, q.shape), expected) < 2e-6


def test_the_same_bits_on_any_number_of_ranks(sequence, random):
    q, k, v, _ = operands(random)
    shards = Sharded(sequence)
    out, _ = annulus.attention(*(shards.shard(x) for x in (q, k, v)), mesh=sequence, causal=True,
                               layout="zigzag", reproducible="world")
    alone = annulus.Mesh("sp=-1", None, device="cpu")
    expected, _ = annulus.attention(q, k, v, mesh=alone, causal=True, reproducible="world")
    alone.close()
    assert np.array_equal(shards.whole(out, q.shape), expected)


@pytest.fixture
def made():
    """An object with a mesh of its own."""
    mesh = annulus.mesh("own=-1")
    yield annulus.Attention((1, 8, 8, 2, 1, 4, 4), mesh=mesh)
    mesh.close()


def expect_closed(made):
    with pytest.raises(annulus.UserError, match="closed"):
        made.wait()


@pytest.mark.parametrize("closed", ["attention", "mesh"])
def test_close_waits_for_close_on_another_thread(made, closed):
    began, may_end = threading.Event(), threading.Event()
    made.at_close.append(lambda: (began.set(), may_end.wait(60)))
    first = threading.Thread(target=made.close)
    second = threading.Thread(target=made.close if closed == "attention" else made.mesh.close)
    first.start()
    assert began.wait(60)
    second.start()
    second.join(0.1)
    assert second.is_alive()
    may_end.set()
    for thread in (first, second):
        thread.join(60)
        assert not thread.is_alive()
    expect_closed(made)


def test_an_interrupted_close_goes_on_later(made):
    steps = []

    def interrupt():
        steps.append("interrupted")
        if len(steps) == 1:
            raise KeyboardInterrupt

    made.at_close += [interrupt, lambda: steps.append("next")]
    with pytest.raises(KeyboardInterrupt):
        made.close()
    expect_closed(made)
    made.close()
    made.close()
    assert steps == ["interrupted", "interrupted", "next"]


def test_close_ends_the_object_whatever_fails(made):
    ended = []

    def close_again():
        with pytest.raises(annulus.UserError, match="within a call"):
            made.close()

    made.at_close += [close_again, lambda: 1 // 0, lambda: ended.append(True)]
    with pytest.raises(ZeroDivisionError):
        made.close()
    assert ended
    expect_closed(made)
