"""annulus.torch on GPUs, against attention in float64 on the CPU. See conftest.py."""

import json

import numpy as np
import pytest
import torch

import annulus
import annulus.torch
from reference import attention, logits_mask

BATCH, LENGTH, HEADS, KV_HEADS = 2, 512, 4, 2
# Rounding of P and dS to half precision in a product of LENGTH terms of size 1.
TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 6e-3, torch.float32: 2e-4}


def whole(dim, dtype):
    """Query, key, value and the gradient of the output, the same on all ranks."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(BATCH, LENGTH, heads, dim, generator=generator).to(dtype)
            for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]


def rows(mesh):
    return annulus.positions((LENGTH,), "sp", mesh=mesh, layout="zigzag", sequence=0)[0]


def on_gpu(mesh, tensors):
    return [x[:, rows(mesh)].cuda() for x in tensors]


def compare(found, right, mesh, dtype):
    right = torch.from_numpy(right[:, rows(mesh)])
    torch.testing.assert_close(found.detach().double().cpu(), right, atol=TOLERANCE[dtype],
                               rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("options", [
    {"causal": True},
    {},
    {"causal": True, "window": (100, 0)},
    {"causal": True, "soft_cap": 2.0},
    {"causal": True, "sinks": True},
    {"segments": np.repeat([0, 1, 2, 3], [130, 1, 200, LENGTH - 331])[None].repeat(BATCH, 0)},
], ids=lambda options: "+".join(options) or "full")
def test_output_and_gradients(sequence, dtype, dim, options):
    tensors = whole(dim, dtype)
    options = dict(options)
    sinks = None
    if options.pop("sinks", False):
        sinks = torch.linspace(-1, 1, HEADS, device="cuda", requires_grad=True)
    local = on_gpu(sequence, tensors)
    leaves = [x.requires_grad_() for x in local[:3]]
    out, lse = annulus.torch.attention(*leaves, mesh=sequence, layout="zigzag", sinks=sinks,
                                       **options)
    out.backward(local[3])

    seen = logits_mask(LENGTH, LENGTH, options.get("causal", False), 0, options.get("window"),
                       options.get("segments"), batch=BATCH)
    q, k, v, grad = (x.double().numpy() for x in tensors)
    plain_sinks = None if sinks is None else sinks.detach().double().cpu().numpy()[:, None]
    expected = attention(q, k, v, seen, soft_cap=options.get("soft_cap"), sinks=plain_sinks,
                         grad=grad)
    compare(out, expected[0], sequence, dtype)
    compare(lse.transpose(1, 2), expected[1].transpose(0, 2, 1), sequence, torch.float32
            if dtype == torch.float32 else torch.float16)
    for leaf, right in zip(leaves, expected[2:5]):
        compare(leaf.grad, right, sequence, dtype)
    if sinks is not None:
        np.testing.assert_allclose(sinks.grad.cpu().numpy(), expected[5][:, 0],
                                   rtol=TOLERANCE[dtype], atol=20 * TOLERANCE[dtype])


def test_the_current_stream_orders_the_call(sequence):
    """The operands are written late on a stream that nobody waits for."""
    tensors = whole(64, torch.bfloat16)
    q, k, v, _ = on_gpu(sequence, tensors)
    expected, _ = annulus.attention(q, k, v, mesh=sequence, causal=True, layout="zigzag")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(q)
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        out, _ = annulus.attention(late, k, v, mesh=sequence, causal=True, layout="zigzag")
        out = out * 1
    stream.synchronize()
    assert torch.equal(out, expected)


def test_a_captured_graph_serves_other_values(sequence):
    q, k, v, _ = on_gpu(sequence, whole(64, torch.bfloat16))
    options = {"mesh": sequence, "causal": True, "layout": "zigzag",
               "schedule": "ring" if sequence.size > 1 else "local"}  # allgather's kernels wait
    annulus.attention(q, k, v, **options)  # plans, and allocates
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out, lse = annulus.attention(q, k, v, **options)
    for factor in (1, -2):
        q.mul_(factor)
        graph.replay()
        expected, right = annulus.attention(q, k, v, **options)
        assert torch.equal(out, expected) and torch.equal(lse, right)


def test_seeds_in_the_memory_of_either(sequence):
    q, k, v = (torch.randn(1, 32, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    found = [annulus.torch.attention(q, k, v, mesh=sequence, causal=True, dropout=0.5,
                                     seed=torch.tensor(5, device=device))[0]
             for device in ("cpu", "cuda", "cpu")]
    assert all(torch.equal(out, found[0]) for out in found)


def test_a_captured_graph_reads_seeds_and_lengths(sequence):
    """Values in tensors on the GPU change between replays."""
    q, k, v, _ = on_gpu(sequence, whole(64, torch.bfloat16))
    seed = torch.tensor(1, device="cuda")
    lengths = torch.tensor([LENGTH, 300], dtype=torch.int32, device="cuda")

    def call(seed, lengths):
        with torch.no_grad():
            return annulus.torch.attention(
                q, k, v, mesh=sequence, causal=True, layout="zigzag", dropout=0.5, seed=seed,
                call_arguments=("lengths",), kv_lengths=lengths,
                schedule="ring" if sequence.size > 1 else "local")[0]

    call(seed, lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call(seed, lengths)
    found = []
    for number, shorter in ((1, 300), (2, 300), (2, 77)):
        seed.fill_(number)
        lengths[1] = shorter
        graph.replay()
        assert torch.equal(out, call(number, [LENGTH, shorter]))
        assert all(not torch.equal(out, other) for other in found)
        found.append(out.clone())


def test_eager_calls_in_python_and_in_cpp_are_the_same(sequence, monkeypatch):
    if annulus.torch._calls is None:
        pytest.skip("torch_calls.cpp was not built for this torch")
    results = []
    for _ in range(2):
        q, k, v, grad = on_gpu(sequence, whole(64, torch.float16))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        with torch.cuda.stream(torch.cuda.Stream()):
            out, lse = annulus.torch.attention(*leaves, mesh=sequence, causal=True, layout="zigzag")
            out.backward(grad)
        torch.cuda.synchronize()
        results.append([out.detach(), lse.detach(), *(x.grad for x in leaves)])
        monkeypatch.setattr(annulus.torch, "_calls", None)
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "gpt-oss", "Mistral"])
def test_models_of_transformers(sequence, name, packed):
    """Sharded on GPUs, against the unsharded model with eager attention on the CPU, in float32."""
    hf = pytest.importorskip("test_hf")
    batch = hf.make_batch(packed)
    expected = hf.whole_step(hf.make_model(name, "eager"), batch,
                             hf.LENGTHS if packed else [hf.LENGTH])
    model = hf.make_model(name, "annulus").cuda()
    logits, loss, gradients, rows = hf.sharded_step(
        model, {key: x.cuda() for key, x in batch.items()}, sequence)
    torch.testing.assert_close(logits.cpu(), hf.of_rows(expected[0], rows), atol=1e-4, rtol=1e-4)
    assert loss == pytest.approx(expected[1], rel=1e-4)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(gradient.cpu(), expected[2][parameter], atol=1e-4, rtol=1e-3,
                                   msg=parameter)


def test_compiled_code_computes_the_same(sequence):
    tensors = whole(64, torch.bfloat16)
    results = []
    for compiled in (False, True):
        local = on_gpu(sequence, tensors)
        leaves = [x.requires_grad_() for x in local[:3]]

        def block(q, k, v):
            return annulus.torch.attention(q, k, v, mesh="sp=-1", causal=True, layout="zigzag")[0]

        out = (torch.compile(block, fullgraph=True, backend="aot_eager") if compiled else block)(
            *leaves)
        out.backward(local[3])
        results.append([out.detach(), *(x.grad for x in leaves)])
    assert torch.equal(results[0][0], results[1][0])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def test_a_training_step_lowers_the_loss(sequence):
    generator = torch.Generator().manual_seed(1)
    width, dim = 64, 32
    layer = torch.nn.Linear(width, 3 * HEADS * dim, bias=False)
    head = torch.nn.Linear(HEADS * dim, width, bias=False)
    with torch.no_grad():
        for weights in (layer.weight, head.weight):
            weights.copy_(torch.randn(weights.shape, generator=generator) * width**-0.5)
    layer, head = layer.cuda(), head.cuda()
    x = torch.randn(BATCH, LENGTH, width, generator=generator)[:, rows(sequence)].cuda()
    optimizer = torch.optim.Adam([layer.weight, head.weight], lr=0.02)
    losses = []
    for _ in range(6):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            q, k, v = layer(x).view(BATCH, -1, HEADS, 3 * dim).split(dim, -1)
            out, _ = annulus.torch.attention(q, k, v, mesh=sequence, causal=True, layout="zigzag")
            loss = (head(out.flatten(2)) - x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]


def test_opcheck(sequence):
    q, k, v, _ = on_gpu(sequence, whole(64, torch.float32))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    text = json.dumps({"causal": True, "layout": "zigzag"})
    torch.library.opcheck(torch.ops.annulus.attention, (*leaves, *(None,) * 8, sequence.text, text),
                          atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("captured", [False, True])
def test_the_end_of_a_mesh_waits_for_the_gpu(sequence, captured):
    """It waits for calls whoever has launched them, even if their object has ended."""
    q, k, v, _ = on_gpu(sequence, whole(64, torch.bfloat16))
    mesh = annulus.Mesh("sp=-1", sequence.comm, device=sequence.device, share_gpus=True)
    made = annulus.Attention((BATCH, LENGTH, LENGTH, HEADS, KV_HEADS, 64, 64), "bfloat16", mesh=mesh,
                             causal=True, layout="zigzag",
                             schedule="ring" if sequence.size > 1 else "local")
    expected, _ = made.run(q, k, v)
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out, _ = made.run(q, k, v)
        made.close()
    torch.cuda._sleep(200_000_000)
    if captured:
        graph.replay()
        del graph
    else:
        out, _ = made.run(q, k, v)
    done = torch.cuda.Event()
    done.record()
    mesh.close()
    assert done.query() and torch.equal(out, expected)


@pytest.mark.parametrize("transport", ["nccl", "peer"])
def test_a_lost_rank(tmp_path, sequence, transport):
    if sequence.size > 1 or torch.cuda.device_count() < 2:
        pytest.skip("starts two ranks of its own, each on a GPU")
    store = pytest.importorskip("test_store")
    store.run(tmp_path, 2, f"""
import torch
torch.cuda.set_device(rank)
annulus.init(FolderStore(folder), rank=rank, size=size, timeout=3, transport="{transport}")
q, k, v = (torch.randn(1, 4096, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
for call in range(100):
    if call == 3 and rank == 1:
        os._exit(0)  # without a word
    begin = time.monotonic()
    try:
        annulus.attention(q, k, v, causal=True, schedule="ring")
        for made in annulus.mesh().attention:
            made.wait()
    except annulus.LibraryError as error:
        assert "rank 1" in str(error), error
        assert call >= 2 and time.monotonic() - begin < 20
        os._exit(0)
raise SystemExit("no error")
""")


def test_operands_elsewhere_are_named(sequence):
    q, k, v, _ = on_gpu(sequence, whole(64, torch.bfloat16))
    with pytest.raises(annulus.UserError, match="key: got memory of cpu"):
        annulus.attention(q, k.cpu(), v, mesh=sequence, causal=True, layout="zigzag", scale=0.5)
    with pytest.raises(annulus.UserError, match="query: got memory of cpu"):
        annulus.attention(q.cpu(), k.cpu(), v.cpu(), mesh=sequence, causal=True, layout="zigzag",
                          scale=0.5)
