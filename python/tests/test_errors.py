"""Mistakes: all ranks get an exception of the right class, and go on."""

import ctypes

import numpy as np
import pytest

import annulus


def shards(mesh, length=8):
    return [np.zeros((1, length, heads, 16), np.float32) for heads in (4, 2, 2)]


def test_unknown_keyword(sequence):
    with pytest.raises(TypeError, match="casual"):
        annulus.attention(*shards(sequence), mesh=sequence, casual=True)


def test_classes_of_errors():
    assert issubclass(annulus.ArgumentError, annulus.UserError)
    assert issubclass(annulus.ArgumentError, ValueError)
    assert issubclass(annulus.TimeoutError, annulus.LibraryError)
    assert not issubclass(annulus.UserError, annulus.LibraryError)


@pytest.mark.parametrize("keywords", [
    {"layout": "diagonal"},
    {"schedule": "triangle"},
    {"implementation": "fastest"},
    {"implementation": "sdpa"},  # on GPUs only
    {"window": (-2, 0)},
    {"scale": float("nan")},
    {"segments": np.zeros((1, 3), np.int32)},
    {"query_spec": "-,xp,-,-"},
    {"kv_lengths": [-1]},
    {"offset": "top-left"},
    {"reproducible": "always"},
    {"cu_seqlens": [0, 5]},
])
def test_what_the_library_refuses(sequence, keywords):
    with pytest.raises(annulus.UserError):
        annulus.attention(*shards(sequence), mesh=sequence, **keywords)


@pytest.mark.parametrize("keywords, kind", [
    ({"layout": 3}, TypeError),
    ({"segments": np.zeros((1, 8))}, TypeError),
    ({"call_arguments": ("length",)}, ValueError),
    ({"block_size": (64, 64)}, ValueError),
    ({"alignment": "top-left"}, ValueError),
    ({"bias": np.zeros((8, 8), np.float32)}, ValueError),
])
def test_what_the_package_refuses(sequence, keywords, kind):
    with pytest.raises(kind):
        annulus.attention(*shards(sequence), mesh=sequence, **keywords)


def test_wrong_dtypes(sequence):
    q, k, v = shards(sequence)
    with pytest.raises(annulus.UserError):
        annulus.attention(q, k.astype(np.float16), v, mesh=sequence)
    with pytest.raises(TypeError):
        annulus.attention(q.astype(np.int64), k, v, mesh=sequence)
    with pytest.raises(TypeError):
        annulus.attention(q.astype(">f4"), k, v, mesh=sequence)
    with pytest.raises(TypeError):
        annulus.attention(q.tolist(), k, v, mesh=sequence)


def test_wrong_shapes(sequence):
    q, k, v = shards(sequence)
    with pytest.raises(annulus.UserError):
        annulus.attention(q, k[:, :, :, :8], v, mesh=sequence)
    with pytest.raises(ValueError):
        annulus.attention(q[0], k, v, mesh=sequence)
    with pytest.raises(ValueError):
        annulus.Attention((1, 8, 8), mesh=sequence)


def test_dropout_without_a_seed(sequence):
    with pytest.raises(TypeError):
        annulus.attention(*shards(sequence), mesh=sequence, dropout=0.1)


def test_a_mistake_of_one_rank_is_an_error_of_all(sequence):
    kind = TypeError if sequence.rank == 0 else annulus.UserError
    keywords = {"casual": True} if sequence.rank == 0 else {"causal": True, "chunk": 16}
    with pytest.raises(kind):
        annulus.attention(*shards(sequence), mesh=sequence, **keywords)


@pytest.mark.skipif(annulus.mesh({"sp": -1}).size == 1, reason="needs two ranks")
def test_ranks_with_different_options(sequence):
    with pytest.raises(annulus.Error):
        annulus.attention(*shards(sequence), mesh=sequence, chunk=8 * (1 + sequence.rank))


def test_the_argument_has_a_name(sequence):
    with pytest.raises(annulus.ArgumentError) as caught:
        annulus.positions((1, 8), "-,sp", mesh=sequence, rank=sequence.size)
    assert caught.value.argument == "rank"


def test_meshes(sequence):
    with pytest.raises(annulus.UserError):
        annulus.mesh({"sp": sequence.size + 1})
    with pytest.raises(annulus.UserError):
        sequence.axis_size("tp")
    assert annulus.mesh("sp=-1") is sequence


def test_another_mpi_is_refused_with_both_names():
    from annulus._mesh import _check_same_mpi

    _check_same_mpi(annulus.mpi_library())
    with pytest.raises(annulus.UserError) as caught:
        _check_same_mpi("MPICH Version: 4.1\nMPICH Release date: …")
    assert "MPICH Version: 4.1" in str(caught.value)
    assert annulus.mpi_library() in str(caught.value)


def test_libraries_of_nvidias_packages(tmp_path, monkeypatch):
    file = tmp_path / "nvidia/some/lib/libsome.so.1"
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.syspath_prepend(tmp_path)
    loaded = []

    def load(path):
        if str(file) not in loaded and path != str(file):
            raise OSError(f"{file.name}: cannot open shared object file")
        loaded.append(path)

    monkeypatch.setattr(ctypes, "CDLL", load)
    annulus._library._open()
    assert loaded == [str(file), annulus._library.path()]
    file.unlink()
    loaded.clear()
    with pytest.raises(ImportError, match=file.name):
        annulus._library._open()
