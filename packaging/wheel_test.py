"""What wheel_test runs: attention of all ranks, and with the argument "hidden" what is said without MPI."""

import os
import pathlib
import re
import sys

import numpy as np

import annulus


def loaded(name):
    """The files of a library that this process has loaded."""
    maps = pathlib.Path("/proc/self/maps").read_text()
    return set(re.findall(rf"/\S*/lib{name}\S*\.so\S*", maps))


def expect_error(kind, text, call):
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}")


hidden = sys.argv[1:] == ["hidden"]
annulus.init(device="cpu")
mesh = annulus.mesh()
random = np.random.default_rng(1)
q, k, v = (random.standard_normal((1, 64, 2, 16)).astype(np.float32) for _ in range(3))
local = [annulus.shard(x, "-,sp,-,-", mesh=mesh) for x in (q, k, v)]
out, _ = annulus.attention(*local, mesh=mesh, layout="contiguous")
out = annulus.unshard(out, "-,sp,-,-", q.shape, mesh=mesh)
weights = np.exp(np.einsum("btnd,bsnd->bnts", q, k) / 4)
expected = np.einsum("bnts,bsnd->btnd", weights / weights.sum(-1, keepdims=True), v)
assert np.abs(out - expected).max() < 1e-5
assert mesh.size == (1 if hidden else 2)

carried = loaded("openblas")
assert carried and all("annulus.libs" in path for path in carried), carried
assert bool(loaded("mpi")) != hidden
if hidden:
    os.environ |= {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    expect_error(annulus.LibraryError, "mpi4py", annulus.init)
if mesh.rank == 0:
    print(f"{sys.version.split()[0]}, NumPy {np.__version__}: {mesh}, MPI: {annulus.mpi_library()}")
