"""Ctrl-C interrupts a wait for other ranks."""

import os
import signal
import threading
import time

import pytest

import annulus


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
    sequence.agree(None)  # others go on
