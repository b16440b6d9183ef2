"""annulus.torch against torch's own attention, on CPU ranks."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import annulus  # noqa: E402
import annulus.torch  # noqa: E402

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 2, 32, 4, 2, 16


@pytest.fixture
def tensors():
    """Query, key, value and the gradient of the output, whole and the same on all ranks."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(BATCH, LENGTH, heads, DIM, generator=generator)
            for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]


def rows(mesh):
    return torch.from_numpy(annulus.positions((LENGTH,), "sp", mesh=mesh, layout="zigzag",
                                              sequence=0)[0])


def shards(mesh, tensors):
    return [x[:, rows(mesh)].clone().requires_grad_() for x in tensors[:3]] + [
        tensors[3][:, rows(mesh)]]


def sdpa(tensors):
    """Output and gradients of causal attention by torch."""
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True)
    out = out.transpose(1, 2)
    out.backward(tensors[3])
    return out.detach(), q.grad, k.grad, v.grad


def test_like_sdpa(sequence, tensors):
    expected = sdpa(tensors)
    q, k, v, grad = shards(sequence, tensors)
    out, _ = annulus.torch.attention(q, k, v, mesh=sequence, causal=True, layout="zigzag")
    out.backward(grad)
    for found, right in zip((out.detach(), q.grad, k.grad, v.grad), expected):
        torch.testing.assert_close(found, right[:, rows(sequence)], atol=2e-5, rtol=2e-5)


def test_compiled_and_checkpointed(sequence, tensors):
    expected = sdpa(tensors)
    q, k, v, grad = shards(sequence, tensors)

    def block(q, k, v):
        return annulus.torch.attention(2 * q, k, v / 2, mesh="sp=-1", causal=True, layout="zigzag",
                                       scale=DIM**-0.5 / 2)[0] * 2

    out = torch.utils.checkpoint.checkpoint(
        torch.compile(block, fullgraph=True, backend="aot_eager"), q, k, v, use_reentrant=False)
    out.backward(grad)
    for found, right in zip((out.detach(), q.grad, k.grad, v.grad), expected):
        torch.testing.assert_close(found, right[:, rows(sequence)], atol=2e-5, rtol=2e-5)


def test_opcheck(sequence, tensors):
    q, k, v, _ = shards(sequence, tensors)
    text = json.dumps({"causal": True, "layout": "zigzag"})
    sinks = torch.zeros(HEADS, requires_grad=True)
    for extra in (None, sinks):
        torch.library.opcheck(torch.ops.annulus.attention,
                              (q, k, v, extra, *(None,) * 7, sequence.text, text))


def test_gradients_of_sinks_bias_and_lse(tensors):
    """Every partial derivative, against differences, in float64 and on every rank by itself."""
    annulus.mesh({"sp": -1})
    size = annulus.mesh({"sp": -1}).size
    mesh = annulus.mesh(f"dp={size}")
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, 4, 2, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 4, 1, 3, generator=generator, dtype=torch.float64, requires_grad=True)
            for _ in range(2))

    def call(q, k, v):
        return annulus.torch.attention(q, k, v, mesh=mesh, causal=True, soft_cap=3.0)[0]

    assert torch.autograd.gradcheck(call, (q, k, v), nondet_tol=0.0)

    single = [x.detach().float().requires_grad_() for x in (q, k, v)]
    sinks = torch.tensor([0.5, -0.3], requires_grad=True)
    bias = torch.randn(1, 2, 4, 4, generator=generator).requires_grad_()
    out, lse = annulus.torch.attention(*single, mesh=mesh, sinks=sinks, bias=bias)
    (out.sum() + (lse * torch.arange(4.0)).sum()).backward()

    expected = [x.detach().clone().requires_grad_() for x in (*single, sinks, bias)]
    q1, k1, v1, s1, b1 = expected
    logits = torch.einsum("btnd,bsnd->bnts", q1, k1.expand(-1, -1, 2, -1)) * 3**-0.5 + b1
    logits = torch.cat([logits, s1[None, :, None, None].expand(1, 2, 4, 1)], -1)
    weights = logits.softmax(-1)[..., :-1]
    plain = torch.einsum("bnts,bsnd->btnd", weights, v1.expand(-1, -1, 2, -1))
    (plain.sum() + (logits.logsumexp(-1) * torch.arange(4.0)).sum()).backward()
    # A bias without batches and sinks are shared by the ranks, so their gradients are sums.
    for found, right, copies in zip((*single, sinks, bias), expected, (1, 1, 1, size, 1)):
        torch.testing.assert_close(found.grad, copies * right.grad, atol=1e-5, rtol=1e-5)


def test_autocast(sequence, tensors):
    q, k, v, _ = shards(sequence, tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = annulus.torch.attention(q, k, v, mesh=sequence, causal=True, layout="zigzag")
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32


def test_a_mask_of_tensors_and_unknown_keywords(sequence, tensors):
    q, k, v, _ = shards(sequence, tensors)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int32)
    plain, _ = annulus.torch.attention(q, k, v, mesh=sequence, layout="zigzag")
    out, _ = annulus.torch.attention(q, k, v, mesh=sequence, layout="zigzag", segments=ids)
    torch.testing.assert_close(out, plain)
    with pytest.raises(TypeError):
        annulus.torch.attention(q, k, v, mesh=sequence, is_causal=True)
    with pytest.raises(TypeError):
        annulus.torch.attention(q, k, v, mesh=sequence, segments=object())


def test_gradients_are_not_lost_in_silence(sequence, tensors):
    q, k, v, _ = shards(sequence, tensors)
    with pytest.raises(TypeError, match="annulus.torch"):
        annulus.attention(q, k, v, mesh=sequence, layout="zigzag")
    with torch.no_grad():
        annulus.attention(q, k, v, mesh=sequence, layout="zigzag")


def test_the_numpy_face_takes_tensors(sequence, tensors):
    q, k, v, _ = (x.detach() for x in shards(sequence, tensors))
    found, _ = annulus.attention(q, k, v, mesh=sequence, layout="zigzag")
    expected, _ = annulus.attention(*(x.numpy() for x in (q, k, v)), mesh=sequence, layout="zigzag")
    assert np.array_equal(found.numpy(), expected)
