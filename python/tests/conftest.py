"""Every test runs alike on all ranks of mpirun, or of torchrun on GPUs. Tests run on the CPU; with ANNULUS_TEST_DEVICE=cuda,
only test_cuda.py runs, on a GPU for each rank, or on GPUs that ranks share."""

import os

import numpy as np
import pytest

import annulus

ON_GPUS = os.environ.get("ANNULUS_TEST_DEVICE") == "cuda"


def pytest_ignore_collect(collection_path):
    if collection_path.suffix == ".py" and collection_path.name.startswith("test_"):
        return (collection_path.name == "test_cuda.py") != ON_GPUS
    return None


@pytest.fixture(scope="session", autouse=True)
def ranks():
    if not ON_GPUS:
        annulus.init(device="cpu", threads=1, timeout=60)
        return
    import torch
    rank, ranks_here = (
        int(os.environ.get(f"OMPI_COMM_WORLD_LOCAL_{name}", os.environ.get(torchrun, default)))
        for name, torchrun, default in (("RANK", "LOCAL_RANK", 0), ("SIZE", "LOCAL_WORLD_SIZE", 1)))
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(rank % gpus)
    annulus.init(timeout=60, share_gpus=ranks_here > gpus)


@pytest.fixture
def sequence():
    """All ranks share the sequence."""
    return annulus.mesh({"sp": -1})


@pytest.fixture
def random():
    return np.random.default_rng(2024)
