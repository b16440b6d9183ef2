"""Ranks without MPI: processes that find each other on a store, whoever starts them. Run on one rank of
mpirun; the ranks are processes of these tests."""

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest

import annulus
from annulus import _store
from conftest import unlaunched

pytestmark = pytest.mark.skipif(annulus.mesh().size > 1, reason="starts ranks of its own")

PROLOGUE = """
import contextlib, os, pathlib, signal, sys, threading, time
import numpy as np
import annulus

@contextlib.contextmanager
def raises(kind, *texts):
    try:
        yield
    except kind as error:
        assert all(text in str(error) for text in texts), error
    else:
        raise SystemExit("no error")

class FolderStore:
    '''The least that a store needs.'''
    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
    def path(self, key):
        return self.folder / key.replace("/", "%")
    def set(self, key, value):
        written = self.folder / f".{os.getpid()}.{threading.get_ident()}"
        written.write_bytes(value)
        written.rename(self.path(key))
    def get(self, key):
        return self.path(key).read_bytes()
    def wait(self, keys, timeout):
        end = time.monotonic() + timeout.total_seconds()
        while not all(self.path(key).exists() for key in keys):
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.001)
    def delete_key(self, key):
        self.path(key).unlink(missing_ok=True)

rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
"""

ON_FOLDER = """
annulus.init(FolderStore(folder), rank=rank, size=size, device="cpu", threads=1, timeout=30)
"""

USE = """
mesh = annulus.mesh({"sp": -1})
assert (mesh.rank, mesh.size) == (rank, size)
assert not any("libmpi" in line for line in open("/proc/self/maps")), "MPI was loaded"
mesh.agree(None)
with raises((ValueError, annulus.UserError), "mine"):
    mesh.agree(ValueError("mine") if rank == 0 else None)
x = np.arange(2 * 13.0).reshape(2, 13)
local = annulus.shard(x, "-,sp", mesh=mesh)
assert (annulus.unshard(local, "-,sp", x.shape, mesh=mesh) == x).all()
ranks = np.full(3, rank, np.float32)
mesh.sum(ranks)
assert (ranks == size * (size - 1) / 2).all()
if size > 1:
    with raises(annulus.UnsupportedError):
        mesh.sum(np.zeros(2**19))
q, k, v = (np.full((1, 8, 2, 16), rank, np.float32) for _ in range(3))
out, _ = annulus.attention(q, k, v, mesh={"dp": size}, causal=True)
assert np.allclose(out, rank)
if size > 1:
    with raises(annulus.UnsupportedError, "needs MPI"):
        annulus.attention(q, k, v, mesh=mesh, causal=True)
"""


def run(tmp_path, size, code, *, environment=None, expected=0):
    """The output of every rank."""
    folder = tmp_path / "store"
    folder.mkdir()
    ranks = [subprocess.Popen(
        [sys.executable, "-c", PROLOGUE + textwrap.dedent(code), str(rank), str(size), str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**unlaunched(), **{name: value.format(rank=rank)
                                for name, value in (environment or {}).items()}})
        for rank in range(size)]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    codes = [process.returncode for process in ranks]
    assert codes == [expected] * size, "\n".join(outputs)
    return outputs


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_store_of_the_callers(tmp_path, size):
    run(tmp_path, size, ON_FOLDER + USE)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
@pytest.mark.parametrize("before", ["", "torch.distributed.init_process_group('gloo')\n"],
                         ids=["annulus first", "torch first"])
def test_the_environment_of_torchrun(tmp_path, before):
    environment = {"RANK": "{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(20000 + os.getpid() % 20000)}
    run(tmp_path, 2, "import torch.distributed\n" + before +
        "annulus.init(device='cpu', threads=1, timeout=30)\n" + USE, environment=environment)


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX")
@pytest.mark.parametrize("comm, environment", [
    ("", {}), ("jax._src.distributed.global_state.client, ", {}),
    ("", {"SLURM_PROCID": "{rank}", "SLURM_STEP_NUM_TASKS": "2"}),
], ids=["found", "given", "under srun"])
def test_the_service_of_jax(tmp_path, comm, environment):
    port = 20000 + (os.getpid() + 1) % 20000
    run(tmp_path, 2, f"""
        import jax
        jax.distributed.initialize("127.0.0.1:{port}", size, rank)
        annulus.init({comm}device="cpu", threads=1, timeout=30)
        """.replace("\n        ", "\n") + USE, environment={"JAX_PLATFORMS": "cpu", **environment})


def test_a_missing_rank_is_named(tmp_path):
    code = ON_FOLDER.replace("timeout=30", "timeout=2") + """
mesh = annulus.mesh()
if rank != 1:
    with raises(annulus.TimeoutError, "waiting for rank 1 to give its text"):
        mesh.agree(None)
os._exit(0)
"""
    run(tmp_path, 3, code)


def test_a_store_that_hangs_ends_the_wait(tmp_path):
    run(tmp_path, 2, ON_FOLDER.replace("timeout=30", "timeout=2") + """
mesh = annulus.mesh()
FolderStore.wait = lambda *_: time.sleep(60)
begin = time.monotonic()
with raises(annulus.TimeoutError, f"waiting for rank {1 - rank} to",
            "key-value store: get of annulus/0/"):
    mesh.agree(None)
assert time.monotonic() - begin < 20
os._exit(0)
""")


def test_a_store_with_keys_of_others_is_refused(tmp_path):
    """Those of a second object of the same rank, here."""
    run(tmp_path, 2, ON_FOLDER + """
annulus.mesh()
annulus.mesh({"other": -1})
store = FolderStore(folder)
annulus.init(store, rank=rank, size=size, device="cpu", threads=1, timeout=30)
with raises(annulus.LibraryError, f"annulus/0/rank/{rank}"):
    annulus.mesh()
os._exit(0)
""")


def test_rank_0_keeps_the_store_until_all_have_left(tmp_path):
    run(tmp_path, 2, """
import atexit
ended = pathlib.Path(folder + ".ended")
if rank == 0:
    atexit.register(ended.touch)  # as does the end of the service of jax.distributed
""" + ON_FOLDER + """
mesh = annulus.mesh()
at_once = FolderStore.wait
def wait(self, keys, timeout):
    if rank == 1:
        time.sleep(0.5)
    if ended.exists():
        raise ConnectionError("the store has ended")
    at_once(self, keys, timeout)
FolderStore.wait = wait
mesh.agree(None)
""")


@pytest.mark.parametrize("text, is_missing", [
    ("DEADLINE_EXCEEDED: GetKeyValue() timed out", True), ("NOT_FOUND: annulus/0", True),
    ("UNAVAILABLE: connection timed out", False),
    ("UNAVAILABLE: the peer answered DEADLINE_EXCEEDED", False),
])
def test_which_errors_of_jax_mean_no_value(text, is_missing):
    class Client:
        def key_value_try_get_bytes(self, key):
            raise RuntimeError(text)

    client = _store._Jax(Client())
    if is_missing:
        assert client.get("annulus/0", 0) is None
    else:
        with pytest.raises(RuntimeError):
            client.get("annulus/0", 0)


def test_which_errors_of_a_store_mean_no_value():
    class Store:
        def wait(self, keys, timeout):
            raise self.error

    store = Store()
    store.error = TimeoutError("no value")
    assert _store._Torch(store).get("annulus/0", 1) is None
    store.error = OSError("connection timed out: timeout")
    with pytest.raises(OSError):
        _store._Torch(store).get("annulus/0", 1)


def test_a_store_that_fails_is_the_cause(tmp_path):
    run(tmp_path, 2, ON_FOLDER + """
mesh = annulus.mesh()
def broken(self, *_):
    raise ConnectionError("connection lost")
FolderStore.set = FolderStore.wait = broken
try:
    mesh.agree(None)
    raise SystemExit("no error")
except annulus.LibraryError as error:
    assert "connection lost" in str(error) and isinstance(error.__cause__, ConnectionError)
os._exit(0)
""")


def test_an_interruption_in_a_call_of_the_store(tmp_path):
    run(tmp_path, 2, ON_FOLDER + """
mesh = annulus.mesh()
if rank == 0:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    with raises(KeyboardInterrupt):
        mesh.agree(None)
    assert time.monotonic() - begin < 10
else:
    time.sleep(3)
os._exit(0)
""")


@pytest.mark.parametrize("comm, arguments, text", [
    (3, {}, "int"),
    (object(), {"rank": 0, "size": 1}, "set()"),
])
def test_what_is_no_store(comm, arguments, text):
    with pytest.raises(TypeError) as caught:
        annulus.init(comm, device="cpu", **arguments)
    assert text in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_processes_that_torch_alone_connects(tmp_path):
    """As torch.multiprocessing.spawn() starts them: the environment does not say that they are several."""
    run(tmp_path, 2, f"""
        import torch.distributed
        torch.distributed.init_process_group("gloo", f"file://{{folder}}.torch", rank=rank, world_size=size)
        annulus.init(device="cpu", threads=1, timeout=30)
        """.replace("\n        ", "\n") + USE)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_torch_sums_large_tensors(tmp_path):
    run(tmp_path, 2, """
import torch.distributed
import annulus.hf
torch.distributed.init_process_group("gloo", f"file://{folder}.torch", rank=rank, world_size=size)
annulus.init(device="cpu", threads=1, timeout=30)
tensors = [torch.full((400_000,), rank + 1.0), torch.full((3,), rank + 1, dtype=torch.bfloat16)]
annulus.hf.sum_over_ranks(tensors, annulus.mesh())
assert all((tensor == 3).all() for tensor in tensors)
""")


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_ranks_that_nothing_connects(tmp_path):
    run(tmp_path, 2, """
with raises(annulus.LibraryError, "missing: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
    annulus.init(device="cpu")
""", environment={"SLURM_PROCID": "{rank}", "SLURM_STEP_NUM_TASKS": "2"})


@pytest.mark.parametrize("environment, expected", [
    ({}, 0),
    ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, 1),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, 2),
    ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}, 0),
    ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "RANK": "1", "WORLD_SIZE": "2",
      "MASTER_ADDR": "localhost"}, 1),
    ({"PMIX_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}, 2),
])
def test_which_launcher_counts(environment, expected):
    inherited = {name: value for name, value in unlaunched().items() if name not in (
        "RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID")}
    found = subprocess.run(
        [sys.executable, "-c", "from annulus import _library; print(_library.launcher())"],
        env={**inherited, **environment}, capture_output=True, text=True, check=True).stdout
    assert int(found) == expected


def test_mpi_that_connects_none_of_several(tmp_path):
    """As under a launcher whose protocol MPI does not speak: each would run alone."""
    run(tmp_path, 1, """
with raises(annulus.LibraryError, "started 2 tasks"):
    annulus.init(device="cpu")
""", environment={"PMI_RANK": "0", "PMI_SIZE": "2"})
