"""annulus.torch against torch's own attention, on CPU ranks."""

import functools
import gc
import json
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import annulus  # noqa: E402
import annulus.torch  # noqa: E402
from conftest import refused, unlaunched  # noqa: E402

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


def forget_objects():
    """Compiled code asks Python for its objects again."""
    for made in annulus.mesh().attention:
        if made.native is not None:
            made.native.forget()


@pytest.fixture(params=["python", "C++", "operator", "operator in C++"])
def face(request, monkeypatch):
    """The code that passes an eager call on to the library."""
    if "C++" not in request.param:
        forget_objects()  # so that the operator asks Python
        monkeypatch.setattr(annulus.torch, "_calls", None)
    elif annulus.torch._calls is None:
        pytest.skip("torch_calls.cpp was not built for this torch")
    if "operator" in request.param:
        monkeypatch.setattr(annulus.torch, "_is_eager", lambda *_: False)
    return request.param.partition(" ")[0]


def compare(leaves, out, expected, mesh):
    for found, right in zip((out.detach(), *(x.grad for x in leaves)), expected):
        torch.testing.assert_close(found, right[:, rows(mesh)], atol=2e-5, rtol=2e-5)


def test_like_sdpa(sequence, tensors, face):
    q, k, v, grad = shards(sequence, tensors)
    out, lse = annulus.torch.attention(q, k, v, mesh=sequence, causal=True, layout="zigzag")
    names = {"python": "_Eager", "C++": "Attention", "operator": "_Operator"}
    assert names[face] in out.grad_fn.name()
    out.backward(grad)
    compare((q, k, v), out, sdpa(tensors), sequence)
    with torch.no_grad():
        again, other = annulus.torch.attention(q, k, v, mesh=sequence, causal=True, layout="zigzag")
    assert torch.equal(again, out) and torch.equal(other, lse) and not again.requires_grad


def test_compiled_code_asks_python_once_for_an_object(sequence, tensors, monkeypatch):
    """Once for each object: the first one, and the next one after the mesh has dropped it."""
    if annulus.torch._calls is None:
        pytest.skip("torch_calls.cpp was not built for this torch")
    forget_objects()
    asked, made = [], annulus.torch._made
    monkeypatch.setattr(annulus.torch, "_made", lambda *call: asked.append(call) or made(*call))
    monkeypatch.setattr(annulus._mesh, "_MAXIMUM_KEPT", 1)
    q, k, v, grad = shards(sequence, tensors)

    @functools.partial(torch.compile, fullgraph=True, backend="aot_eager", dynamic=False)
    def call(q, k, v, window):
        return annulus.torch.attention(q, k, v, mesh="sp=-1", causal=True, layout="zigzag",
                                       window=(window, 0))[0]

    for window, times in ((-1, 1), (-1, 1), (3, 2), (-1, 3)):
        for x in (q, k, v):
            x.grad = None
        out = call(q, k, v, window)
        out.backward(grad)
        assert len(asked) == times
    compare((q, k, v), out, sdpa(tensors), sequence)


class Layer(torch.nn.Module):
    """A layer of a model that scales the operands of test_like_sdpa() by its weights."""

    def __init__(self, **options):
        super().__init__()
        self.options = options
        self.scales = torch.nn.Parameter(torch.tensor([2.0, 1.0, 0.5]))

    def forward(self, q, k, v):
        q, k, v = (scale * x for scale, x in zip(self.scales, (q, k, v)))
        return annulus.torch.attention(q, k, v, mesh="sp=-1", scale=DIM**-0.5 / 2, **self.options)[0] * 2


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_and_checkpointed(sequence, tensors, reentrant, compiled):
    q, k, v, grad = shards(sequence, tensors)
    layer = Layer(causal=True, layout="zigzag")
    if compiled:
        layer = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out = torch.utils.checkpoint.checkpoint(layer, q, k, v, use_reentrant=reentrant)
    out.backward(grad)
    compare((q, k, v), out, sdpa(tensors), sequence)


def test_what_calls_change_needs_no_new_plan(sequence, tensors, face):
    """Seeds, sinks and lengths change without a new plan; compiled code is not compiled again."""
    q, k, v, _ = (x.detach() for x in shards(sequence, tensors))
    options = {"mesh": "sp=-1", "causal": True, "layout": "zigzag", "dropout": 0.5,
               "call_arguments": ("lengths",)}
    compilations = []

    def counting(graph, inputs):
        compilations.append(graph)
        return graph.forward

    def call(seed, sinks, lengths):
        return annulus.torch.attention(q, k, v, seed=seed, sinks=sinks, kv_lengths=lengths,
                                       **options)[0]

    compiled = torch.compile(call, fullgraph=True, backend=counting)
    plans, found = set(), []
    for seed, height, lengths in ((1, 0.0, [5, 32]), (2, 0.0, [5, 32]), (2, 9.0, [5, 32]),
                                  (2, 9.0, [32, 7])):
        sinks = torch.full((HEADS,), height)
        lengths = torch.tensor(lengths, dtype=torch.int32)
        out = call(seed, sinks, lengths)
        plans.add(frozenset(map(id, sequence.attention)))
        assert all(not torch.equal(out, other) for other in found)
        found.append(out)
        assert torch.equal(out, call(torch.tensor(seed), sinks, lengths.tolist()))
        if face == "operator":
            assert torch.equal(out, compiled(torch.tensor(seed), sinks, lengths))
    assert len(plans) == 1 and len(compilations) <= 1


def test_no_second_derivatives(sequence, tensors, face):
    q, k, v, grad = shards(sequence, tensors)
    out, _ = annulus.torch.attention(q, k, v, mesh=sequence, causal=True, layout="zigzag")
    first, = torch.autograd.grad(out, q, grad, create_graph=True)
    assert first.requires_grad
    with pytest.raises(RuntimeError):
        (first.sum() + q.sum()).backward()


def test_no_forward_mode(sequence, tensors, face):
    q, k, v, _ = shards(sequence, tensors)

    def call(query):
        return annulus.torch.attention(query, k.detach(), v.detach(), mesh=sequence, causal=True,
                                       layout="zigzag")[0]

    with pytest.raises(RuntimeError):
        torch.func.jvp(call, (q.detach(),), (torch.ones_like(q),))


def test_an_object_outlives_the_cache_until_its_gradients(sequence, tensors, face, monkeypatch):
    monkeypatch.setattr(annulus._mesh, "_MAXIMUM_KEPT", 1)
    q, k, v, grad = shards(sequence, tensors)
    out, _ = annulus.torch.attention(q, k, v, mesh=sequence, causal=True, layout="zigzag")
    with torch.no_grad():
        for window in (3, 5, 7):
            annulus.torch.attention(q, k, v, mesh=sequence, layout="zigzag", window=(window, 0))
    gc.collect()
    out.backward(grad)
    compare((q, k, v), out, sdpa(tensors), sequence)


def test_errors_of_both_passes(tensors, face):
    """Each raises its own exception, whichever layer it comes from."""
    mesh = annulus.Mesh("copies=-1", annulus.mesh().comm, device="cpu")
    q, k, v, grad = (x.clone().requires_grad_() for x in tensors)
    with refused("sinks"):
        annulus.torch.attention(q, k, v, mesh=mesh, sinks=torch.zeros(HEADS + 1))
    out, _ = annulus.torch.attention(q, k, v, mesh=mesh)
    mesh.close()
    if face != "operator":  # which knows the mesh by its text, and makes it again
        with pytest.raises(annulus.UserError, match="closed"):
            out.backward(grad.detach())


def objects_of(mesh, call):
    """The objects that a call makes."""
    before = set(mesh.attention)
    call()
    return set(mesh.attention) - before


def test_close_waits_for_calls_of_other_threads(tensors, face):
    """Calls under way end as if close() came after them; later calls raise UserError."""
    mesh = annulus.mesh("copies=-1")
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    for window in range(40):
        caught, begun = [], threading.Event()

        def call():
            out, _ = annulus.torch.attention(*leaves, mesh=mesh, window=(window, 0))
            return torch.autograd.grad(out, leaves, tensors[3])

        def call_until_closed():
            expected = call()
            begun.set()
            try:
                while True:
                    assert all(map(torch.equal, call(), expected))
            except Exception as error:
                caught.append(error)

        def start():
            thread.start()
            begun.wait(60)

        thread = threading.Thread(target=call_until_closed)
        made, = objects_of(mesh, start)
        time.sleep(window % 4 * 0.0005)
        made.close()
        thread.join(60)
        assert [type(error) for error in caught] == [annulus.UserError], caught
    mesh.close()


@pytest.mark.skipif(annulus.mesh({"sp": -1}).size == 1, reason="needs two ranks")
def test_close_is_refused_within_a_call(sequence, tensors, face):
    """In a signal handler, which runs while rank 0 waits for the other ranks."""
    mesh = annulus.mesh("sp=-1,closed=1")
    q, k, v, _ = (x.detach() for x in shards(sequence, tensors))
    errors = []

    def call():
        return annulus.torch.attention(q, k, v, mesh=mesh, layout="zigzag")[0]

    def close(*_):
        with pytest.raises(annulus.UserError, match="within a call") as error:
            made.close()
        errors.append(error)

    made, = objects_of(mesh, call)
    expected = call()
    if mesh.rank == 0:
        before = signal.signal(signal.SIGALRM, close)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    else:
        time.sleep(1.5)
    assert torch.equal(call(), expected)
    if mesh.rank == 0:
        signal.signal(signal.SIGALRM, before)
        assert errors
    mesh.close()


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
    out, lse = annulus.torch.attention(*single, mesh=mesh, sinks=sinks, bias=bias,
                                       bias_shape=bias.shape)
    (out.sum() + (lse * torch.arange(4.0)).sum()).backward()

    expected = [x.detach().clone().requires_grad_() for x in (*single, sinks, bias)]
    q1, k1, v1, s1, b1 = expected
    logits = torch.einsum("btnd,bsnd->bnts", q1, k1.expand(-1, -1, 2, -1)) * 3**-0.5 + b1
    logits = torch.cat([logits, s1[None, :, None, None].expand(1, 2, 4, 1)], -1)
    weights = logits.softmax(-1)[..., :-1]
    plain = torch.einsum("bnts,bsnd->btnd", weights, v1.expand(-1, -1, 2, -1))
    (plain.sum() + (logits.logsumexp(-1) * torch.arange(4.0)).sum()).backward()
    # A bias without batches and sinks are shared by the ranks, so their gradients are sums.
    for found, right, copies in zip((*single, sinks, bias), expected, (1, 1, 1, size, size)):
        torch.testing.assert_close(found.grad, copies * right.grad, atol=1e-5, rtol=1e-5)

    # One batch per rank: each may have a bias of its own, or all share one.
    bias = bias.detach().clone().requires_grad_()
    out, _ = annulus.torch.attention(*single, mesh=mesh, bias=bias)
    if size > 1:
        with refused("bias_shape"):
            out.sum().backward()
    gradients = []
    for batches in (1, size):
        out, _ = annulus.torch.attention(*single, mesh=mesh, bias=bias, bias_shape=(batches, 2, 4, 4))
        gradients += torch.autograd.grad(out.square().sum(), bias)
    torch.testing.assert_close(gradients[0], size * gradients[1])


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


@pytest.mark.parametrize("name, change, text", [
    ("query", lambda x: x.detach().numpy(), "ndarray"), ("key", lambda x: x.detach().numpy(), "ndarray"),
    ("query", lambda x: x.to("meta"), "meta"), ("key", lambda x: x.to("meta"), "meta")])
def test_operands_that_are_elsewhere(sequence, tensors, name, change, text):
    operands = dict(zip(("query", "key", "value"), tensors))
    operands[name] = change(operands[name])
    with pytest.raises(TypeError, match=f"{name}: .*{text}"):
        annulus.torch.attention(*operands.values(), mesh=sequence)


def test_gradients_are_not_lost_in_silence(sequence, tensors):
    q, k, v, _ = shards(sequence, tensors)
    with pytest.raises(TypeError, match="annulus.torch"):
        annulus.attention(q, k, v, mesh=sequence, layout="zigzag")
    with torch.no_grad():
        annulus.attention(q, k, v, mesh=sequence, layout="zigzag")


def test_other_tensors_need_no_dtensors(sequence, tensors, monkeypatch):
    class Own(torch.Tensor):
        pass

    monkeypatch.delitem(sys.modules, "torch.distributed.tensor", raising=False)
    monkeypatch.setitem(sys.modules, "annulus._dtensor", None)  # as where torch lacks them
    q, k, v, _ = (x.detach() for x in shards(sequence, tensors))
    out, _ = annulus.torch.attention(q.as_subclass(Own), k, v, mesh=sequence, layout="zigzag")
    expected, _ = annulus.torch.attention(q, k, v, mesh=sequence, layout="zigzag")
    assert torch.equal(torch.Tensor(out), expected)


def test_calls_in_cpp_that_do_not_load(tmp_path, monkeypatch):
    monkeypatch.setattr(annulus._library, "path", lambda: str(tmp_path / "libannulus.so"))
    assert annulus.torch._load_calls() is None
    (tmp_path / f"libannulus_torch-{torch.__version__}.so").write_text("no library")
    with pytest.warns(UserWarning):
        assert annulus.torch._load_calls() is None


def test_without_calls_in_cpp(sequence, tmp_path):
    if sequence.size > 1 or annulus.torch._calls is None:
        pytest.skip("other tests have shown it" if sequence.size == 1 else "runs processes alone")
    library = tmp_path / "libannulus.so"
    library.symlink_to(annulus._library.path())
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k",
                    "like_sdpa or compiled or second or opcheck", __file__],
                   env=unlaunched() | {"ANNULUS_PYTHON_LIBRARY": str(library)}, check=True)


def test_the_numpy_face_takes_tensors(sequence, tensors):
    q, k, v, _ = (x.detach() for x in shards(sequence, tensors))
    found, _ = annulus.attention(q, k, v, mesh=sequence, layout="zigzag")
    expected, _ = annulus.attention(*(x.numpy() for x in (q, k, v)), mesh=sequence, layout="zigzag")
    assert np.array_equal(found.numpy(), expected)
