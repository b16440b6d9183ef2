"""Exact attention over sequences that ranks share: NumPy arrays on CPUs, torch tensors anywhere.

    import annulus
    annulus.init()                                   # alone, under mpirun, or on GPUs under torchrun
    mesh = annulus.mesh({"sp": -1})
    out, lse = annulus.attention(q, k, v, mesh=mesh, causal=True, layout="zigzag")
"""

from ._attention import (
    Attention,
    Gradients,
    attention,
    attention_backward,
    explain,
    plan,
    positions,
    shard,
    unshard,
)
from ._library import (
    ArgumentError,
    Error,
    FileError,
    InternalError,
    LibraryError,
    MemoryError,
    MpiError,
    SystemError,
    TimeoutError,
    UnsupportedError,
    UserError,
    mpi_library,
    version,
)
from ._mesh import Mesh, init, mesh
from ._options import Options

__version__ = version()

__all__ = [
    "ArgumentError", "Attention", "Error", "FileError", "Gradients", "InternalError",
    "LibraryError", "MemoryError", "Mesh", "MpiError", "Options", "SystemError", "TimeoutError",
    "UnsupportedError", "UserError", "attention", "attention_backward", "explain", "init", "mesh",
    "mpi_library", "plan", "positions", "shard", "unshard", "version",
]
