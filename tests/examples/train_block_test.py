"""Losses of examples/train_block on different numbers of ranks.

    train_block_test.py PROGRAM MPIEXEC OPTION...     the option -n comes without its value
"""

import re
import subprocess
import sys
import unittest

PROGRAM = None
MPIEXEC = []
LINE = re.compile(r"step +(\d+): loss (\S+) \((\S+)\)")


def losses(ranks, *arguments):
    """The losses of all steps, and their bits, as hexadecimal floating-point numbers."""
    number = MPIEXEC.index("-n") if "-n" in MPIEXEC else MPIEXEC.index("-np")
    mpiexec = MPIEXEC[:number + 1] + [str(ranks)] + MPIEXEC[number + 1:]
    run = subprocess.run(mpiexec + [PROGRAM, *arguments], capture_output=True, text=True)
    if run.returncode != 0:
        raise AssertionError(f"{ranks} ranks: exit code {run.returncode}\n{run.stdout}{run.stderr}")
    lines = LINE.findall(run.stdout)
    return [float(loss) for _, loss, _ in lines], [bits for _, _, bits in lines]


class TrainBlock(unittest.TestCase):
    def test_losses_agree_to_rounding(self):
        expected, _ = losses(1)
        self.assertLess(expected[-1], expected[0] / 2)
        for ranks in (2, 4):
            found, _ = losses(ranks)
            self.assertEqual(len(found), len(expected))
            for one, other in zip(found, expected):
                self.assertAlmostEqual(one, other, delta=2e-3 * other, msg=f"{ranks} ranks")

    def test_bits_agree_if_asked(self):
        _, expected = losses(1, "world")
        self.assertGreater(len(expected), 10)
        for ranks in (2, 4, 8):
            self.assertEqual(losses(ranks, "world")[1], expected, f"{ranks} ranks")


if __name__ == "__main__":
    PROGRAM, *MPIEXEC = sys.argv[1:]
    unittest.main(argv=sys.argv[:1])
