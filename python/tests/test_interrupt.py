"""Ctrl-C interrupts a wait for other ranks."""

import ctypes
import os
import signal
import threading
import time

import pytest

import annulus


def check_that_it_is_raised_later(mesh):
    """Where a call returns to others, as a handler of XLA does, that know nothing of exceptions."""
    library = ctypes.CDLL(annulus._library.path())
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        assert library.annulus_context_agree(mesh.handle, None) == annulus._library._INTERRUPTED
        library.annulus_python_raise_later()
        for _ in range(1000):
            time.sleep(0.001)
    timer.join()


@pytest.mark.skipif(annulus.mesh({"sp": -1}).size == 1, reason="needs two ranks")
def test_what_a_handler_raises_ends_a_wait(sequence):
    """Rank 0 waits for the others, which let it wait; they would time out after 60 s."""
    from mpi4py import MPI

    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop("the handler's own")

    mesh = annulus.Mesh("sp=-1", MPI.COMM_WORLD, device="cpu", timeout=60)
    if mesh.rank == 0:
        for handler, kind in ((signal.default_int_handler, KeyboardInterrupt), (stop, Stop)):
            before = signal.signal(signal.SIGINT, handler)
            timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
            begin = time.monotonic()
            timer.start()
            try:
                with pytest.raises(kind):
                    mesh.agree(None)
            finally:
                timer.join()
                signal.signal(signal.SIGINT, before)
            assert time.monotonic() - begin < 20
        check_that_it_is_raised_later(mesh)
    sequence.agree(None)  # others go on
