"""Every test runs alike on all ranks of mpirun, or of torchrun on GPUs. Tests run on the CPU; with
ANNULUS_TEST_DEVICE=cuda, only the tests in test_*cuda.py and of DTensors run, on a GPU for each rank, or
on GPUs that ranks share. Under torchrun, torch's store connects the ranks, or with
JAX_COORDINATOR_ADDRESS=HOST:PORT jax.distributed does."""

import contextlib
import os
import socket

import numpy as np
import pytest

import annulus

ON_GPUS = os.environ.get("ANNULUS_TEST_DEVICE") == "cuda"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch and other ranks need memory


def pytest_ignore_collect(collection_path):
    if collection_path.suffix == ".py" and collection_path.name.startswith("test_"):
        return (collection_path.stem != "test_dtensor" and
                collection_path.stem.endswith("_cuda") != ON_GPUS)
    return None


def local_rank():
    return int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", os.environ.get("LOCAL_RANK", 0)))


def unlaunched():
    """The environment without the variables of launchers, for processes that run by themselves."""
    launchers = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_")
    return {name: value for name, value in os.environ.items() if not name.startswith(launchers)}


@contextlib.contextmanager
def refused(argument, about=None):
    """Expects an ArgumentError that names this argument."""
    with pytest.raises(annulus.ArgumentError) as caught:
        yield caught
    assert caught.value.argument == argument, about


def connect_jax(gpus=None):
    """Makes one mesh of JAX out of the devices of all processes, one each."""
    size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("PMI_SIZE", 1)))
    by_jax = "JAX_COORDINATOR_ADDRESS" in os.environ and "RANK" in os.environ
    try:
        import jax
    except ImportError:
        return
    options = {}
    if ON_GPUS:
        options["local_device_ids"] = [local_rank()]
    else:
        os.environ.setdefault("PJRT_NPROC", "8")  # enough threads for concurrent calls on any machine
        jax.config.update("jax_platforms", "cpu")
    if by_jax:
        jax.distributed.initialize(num_processes=int(os.environ["WORLD_SIZE"]),
                                   process_id=int(os.environ["RANK"]), **options)
    if size == 1 or gpus is not None and size > gpus:
        return
    from mpi4py.MPI import COMM_WORLD as ranks  # not under torchrun, whose ranks have no MPI
    if not ON_GPUS:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    jax.distributed.initialize(ranks.bcast(address), ranks.size, ranks.rank, **options)


@pytest.fixture(scope="session", autouse=True)
def ranks():
    if not ON_GPUS:
        connect_jax()
        annulus.init(device="cpu", threads=1, timeout=60)
        return
    import torch
    rank = local_rank()
    ranks_here = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", 1)))
    gpus = torch.cuda.device_count()
    connect_jax(gpus)
    torch.cuda.set_device(rank % gpus)
    annulus.init(device=rank % gpus, timeout=60,  # JAX makes another device current
                 share_gpus=ranks_here > gpus)


@pytest.fixture
def sequence():
    """All ranks share the sequence."""
    return annulus.mesh({"sp": -1})


@pytest.fixture
def random():
    return np.random.default_rng(2024)
