"""Mistakes, as in docs/python.md's table: the class, the argument and what the message names."""

import os
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest

import annulus

QUERY, KEY, VALUE = (np.zeros((1, 8, heads, 16), np.float32) for heads in (4, 2, 2))


def call(query=QUERY, key=KEY, value=VALUE, **keywords):
    return annulus.attention(query, key, value, **keywords)


# Each mistake: a call, the class of its error, the argument that it names, a text of its message.
MISTAKES = {
    "an unknown keyword": (lambda: call(casual=True), TypeError, None,
                           "unknown keyword 'casual'; expected 'causal', or one of alignment, "),
    "a keyword of other libraries": (lambda: call(deterministic=True), TypeError, None,
                                     "unknown keyword 'deterministic'; expected 'reproducible'"),
    "a misspelt operand": (lambda: call(sink=1), TypeError, None, "'sinks'"),
    "a keyword like no other": (lambda: call(xyz=1), TypeError, None,
                                "unknown keyword 'xyz'; expected one of "),
    "an unknown keyword of a plan": (lambda: annulus.plan(QUERY, KEY, VALUE, casual=True),
                                     TypeError, None, "'causal'"),
    "an unknown keyword of an object": (
        lambda: annulus.Attention((1, 8, 8, 4, 2, 16, 16), casual=True), TypeError, None,
        "'causal'"),
    "a list for an array": (lambda: call(QUERY.tolist()), TypeError, None, "query"),
    "operands of two dtypes": (lambda: call(key=KEY.astype(np.float16)), annulus.ArgumentError,
                               "key", "float32"),
    "a key of other dims": (lambda: call(key=KEY[..., :8].copy()), annulus.ArgumentError, "key",
                            "[1, 8, 2, 16]"),
    "a dtype without kernels": (lambda: call(QUERY.astype(np.int64)), TypeError, None,
                                "query: got int64, expected float16"),
    "every other number": (lambda: call(np.zeros((1, 8, 4, 32), np.float32)[..., ::2]),
                           annulus.ArgumentError, "query", "strides"),
    "heads that do not fit": (lambda: call(QUERY[:, :, :3]), annulus.ArgumentError,
                              "query heads N", "3"),
    "a mask of the wrong rank": (lambda: call(mask=np.ones((8, 8), bool)), annulus.ArgumentError,
                                 "mask", "2 dimensions"),
    "a window that is one number": (lambda: call(window=3), annulus.ArgumentError, "window",
                                    "(left, right)"),
    "an unknown layout": (lambda: call(layout="diagonal"), annulus.ArgumentError,
                          "layout", "layout: got 'diagonal', expected contiguous, zigzag"),
    "an unknown layout of keys": (lambda: call(kv_layout="diagonal"), annulus.ArgumentError,
                                  "kv_layout", "kv_layout: got 'diagonal'"),
    "a spec without a name": (lambda: call(query_spec="-,,-,-"), annulus.ArgumentError, "query_spec",
                              "query_spec: got"),
    "documents that end too early": (lambda: call(cu_seqlens=[0, 5]), annulus.ArgumentError,
                                     "cu_seqlens[1]", "5"),
    "segments of another length": (lambda: call(segments=np.zeros((1, 3), np.int32)),
                                   annulus.ArgumentError, "segments", "segments (query): got"),
    "a text for causal": (lambda: call(causal="yes"), TypeError, None, "expected True or False"),
    "a soft cap below 0": (lambda: call(soft_cap=-1.0), annulus.ArgumentError, "soft_cap",
                           "soft_cap: got -1"),
    "a number that is a text": (lambda: call(scale="large"), TypeError, None, "scale: got 'large'"),
    "an axis that the mesh lacks": (lambda: call(query_spec="-,xp,-,-"), annulus.UserError, None,
                                    "xp"),
    "a mesh of other ranks": (lambda: annulus.mesh({"sp": annulus.mesh().size + 1}),
                              annulus.ArgumentError, "mesh", "sp="),
    "a mesh without names": (lambda: annulus.mesh(4), annulus.ArgumentError, "mesh", "sp=4"),
    "a kernel for GPUs on the CPU": (lambda: call(implementation="sdpa"),
                                     annulus.UnsupportedError, None, "sdpa"),
    "dropout without a seed": (lambda: call(dropout=0.1), TypeError, None, "seed"),
    "a seed that is a text": (lambda: call(dropout=0.1, seed="a"), TypeError, None, "seed: got 'a'"),
    "sinks that are a list": (lambda: call(sinks=[0.0] * 4), TypeError, None, "sinks: got list"),
    "sinks of other heads": (lambda: call(sinks=np.zeros(3, np.float32)), annulus.ArgumentError,
                             "sinks", "[4, 1]"),
    "an output that is read only": (
        lambda: call(out=np.broadcast_to(np.float32(0), QUERY.shape)), annulus.ArgumentError, "out",
        "read only"),
    "an output of another dtype": (lambda: call(out=np.zeros(QUERY.shape)), annulus.ArgumentError,
                                   "out", "expected float32"),
    "a part of another array": (
        lambda: annulus.unshard(QUERY, "-,-,-,-", (1, 9, 4, 16)), annulus.ArgumentError, "local",
        "(1, 9, 4, 16)"),
    "a rank out of range": (lambda: annulus.positions((1, 8), "-,sp", rank=annulus.mesh().size),
                            annulus.ArgumentError, "rank", "got "),
    "an axis of other meshes": (lambda: annulus.mesh().axis_size("tp"), annulus.UserError, None,
                                "'tp'"),
    "an object of three sizes": (lambda: annulus.Attention((1, 8, 8)), annulus.ArgumentError,
                                 "shape", "(1, 8, 8)"),
    "a query of three dimensions": (lambda: call(QUERY[0]), annulus.ArgumentError, "query",
                                    "3 dimensions"),
    "another byte order": (lambda: call(QUERY.astype(">f4")), TypeError, None, ">f4"),
    "a layout that is a number": (lambda: call(layout=3), TypeError, None, "layout: got 3"),
    "segments of float64": (lambda: call(segments=np.zeros((1, 8))), TypeError, None,
                            "segments: got float64"),
    "an unknown kernel": (lambda: call(implementation="fastest"), annulus.ArgumentError,
                          "implementation", "fastest"),
    "a window below -1": (lambda: call(window=(-2, 0)), annulus.ArgumentError, "window", "-2"),
    "a scale of NaN": (lambda: call(scale=float("nan")), annulus.ArgumentError, "scale", "nan"),
    "a length below zero": (lambda: call(kv_lengths=[-1]), annulus.ArgumentError, "kv_lengths[0]",
                            "-1"),
    "an unknown offset": (lambda: call(offset="top-left"), annulus.ArgumentError, "offset",
                          "bottom-right"),
    "an unknown promise": (lambda: call(reproducible="always"), annulus.ArgumentError,
                           "reproducible", "no, run or world"),
    "arguments that no call has": (lambda: call(call_arguments=("length",)), annulus.ArgumentError,
                                   "call_arguments", "'length'"),
    "a block size alone": (lambda: call(block_size=(64, 64)), annulus.ArgumentError, "block_size",
                           "block_mask"),
    "an alignment alone": (lambda: call(alignment="top-left"), annulus.ArgumentError, "alignment",
                           "cu_seqlens"),
    "a bias of the wrong rank": (lambda: call(bias=np.zeros((8, 8), np.float32)),
                                 annulus.ArgumentError, "bias", "2 dimensions"),
    "the gradient of a bias that is not there": (
        lambda: annulus.attention_backward(QUERY, QUERY, KEY, VALUE, QUERY, np.zeros((1, 4, 8), np.float32),
                                           grad_bias=True), annulus.ArgumentError,
        "grad_bias", "without a bias"),
    "an unknown device": (lambda: annulus.init(device="gpu"), annulus.ArgumentError, "device",
                          '"cuda"'),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name):
    do, kind, argument, text = MISTAKES[name]
    for _ in range(2):  # the second time, an object for the call may be there
        with pytest.raises(kind) as caught:
            do()
        assert type(caught.value) is kind
        assert getattr(caught.value, "argument", None) == argument
        assert text in str(caught.value)


def test_a_gradient_of_another_shape():
    rows = np.zeros((1, 4, 8), np.float32)
    with pytest.raises(annulus.UserError, match="grad.output: got shape") as caught:
        annulus.attention_backward(QUERY[:, :4], QUERY, KEY, VALUE, QUERY, rows)
    if annulus.mesh().size == 1:
        assert caught.value.argument == "grad_output"
        assert str(caught.value).startswith("grad_output: got")


def test_a_mesh_after_its_end():
    mesh = annulus.mesh({"ended": -1})
    assert f"'ended={mesh.size}'" in repr(mesh)
    mesh.close()
    assert "closed" in repr(mesh)
    with pytest.raises(annulus.UserError, match="closed"):
        call(mesh=mesh)


def test_a_mesh_after_the_end_of_mpi(sequence, monkeypatch):
    monkeypatch.setattr(sequence, "_mpi", types.SimpleNamespace(Is_finalized=lambda: True))
    with pytest.raises(annulus.UserError, match=r"MPI\.Finalize\(\)"):
        call(chunk=3)


@pytest.mark.skipif(annulus.mesh({"sp": -1}).size == 1, reason="needs two ranks")
def test_ranks_with_different_arguments(sequence):
    with pytest.raises(annulus.UserError) as caught:
        call(chunk=8 * (1 + sequence.rank))
    assert "chunk 8" in str(caught.value) and "chunk 16" in str(caught.value)


@pytest.mark.skipif(annulus.mesh({"sp": -1}).size > 1, reason="one rank is enough")
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_library_that_is_missing_at_run_time(tmp_path):
    """As where libmpi is: the package names what its own library lacks."""
    (tmp_path / "empty.c").write_text("")
    missing = tmp_path / "libmpi_of_another_machine.so"
    for arguments in (["-o", missing], ["-o", tmp_path / "libannulus.so", "-Wl,--no-as-needed",
                                        missing]):
        subprocess.run(["cc", "-shared", "-fPIC", tmp_path / "empty.c", *arguments], check=True)
    missing.unlink()
    found = subprocess.run(
        [sys.executable, "-c", "import annulus"], capture_output=True, text=True, check=False,
        env={**os.environ, "ANNULUS_PYTHON_LIBRARY": str(tmp_path / "libannulus.so")})
    assert found.returncode != 0
    last = found.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError") and missing.name in last
