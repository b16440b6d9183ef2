"""Ranks on a key-value store, without mpirun: processes that share a folder.

    store_ranks.py N program [arguments...]

Exit code: 0 if all ranks pass, 77 if all are skipped, else 1.
"""

import os
import subprocess
import sys
import tempfile
import threading


class Ranks:
    """`size` processes of a program, in a folder that is their store."""

    def __init__(self, size, words, **environment):
        self._folder = tempfile.TemporaryDirectory()
        self.folder = self._folder.name
        self.processes = [
            subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             env={**os.environ, **environment, "ANNULUS_TEST_STORE": self.folder,
                                  "ANNULUS_TEST_RANK": str(rank), "ANNULUS_TEST_SIZE": str(size)})
            for rank in range(size)]

    def kill(self):
        for process in self.processes:
            process.kill()
            process.wait()
        self._folder.cleanup()


def main():
    ranks = Ranks(int(sys.argv[1]), sys.argv[2:])

    def copy(rank, stream):
        for line in stream:
            sys.stdout.write(f"[{rank}] {line}")

    threads = [threading.Thread(target=copy, args=(rank, process.stdout))
               for rank, process in enumerate(ranks.processes)]
    try:
        for thread in threads:
            thread.start()
        codes = [process.wait() for process in ranks.processes]
        for thread in threads:
            thread.join()
    finally:
        ranks.kill()
    print("exit codes:", codes)
    return 77 if set(codes) == {77} else int(any(code not in (0, 77) for code in codes))


if __name__ == "__main__":
    sys.exit(main())
