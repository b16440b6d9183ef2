"""Mistakes: all ranks get an exception of the right class, and go on."""

import ctypes

import pytest

import annulus
from test_mistakes import call


def test_classes_of_errors():
    assert issubclass(annulus.ArgumentError, annulus.UserError)
    assert issubclass(annulus.ArgumentError, ValueError)
    assert issubclass(annulus.TimeoutError, annulus.LibraryError)
    assert not issubclass(annulus.UserError, annulus.LibraryError)


def test_a_mistake_of_one_rank_is_an_error_of_all(sequence):
    kind = TypeError if sequence.rank == 0 else annulus.UserError
    keywords = {"casual": True} if sequence.rank == 0 else {"causal": True, "chunk": 16}
    with pytest.raises(kind):
        call(mesh=sequence, **keywords)


def test_an_unknown_schedule():
    with pytest.raises(annulus.UserError, match="triangle"):
        call(schedule="triangle")


def test_meshes(sequence):
    assert annulus.mesh("sp=-1") is sequence


def test_the_current_gpu_is_not_the_cpu():
    from annulus import _mesh

    try:
        mesh = _mesh.Mesh("sp=-1", **{**_mesh._settings, "device": "cuda", "share_gpus": True})
    except annulus.UnsupportedError as error:
        assert "CUDA" in str(error)
    else:
        assert mesh.device.startswith("cuda:")
        mesh.close()


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
