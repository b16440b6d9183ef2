"""Every test runs on all ranks of mpirun, alike."""

import numpy as np
import pytest

import annulus


@pytest.fixture(scope="session", autouse=True)
def ranks():
    annulus.init(device="cpu", threads=1, timeout=60)


@pytest.fixture
def sequence():
    """All ranks share the sequence."""
    return annulus.mesh({"sp": -1})


@pytest.fixture
def random():
    return np.random.default_rng(2024)
