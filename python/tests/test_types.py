"""The package is typed (py.typed): it passes mypy, and mypy finds the mistakes of a caller."""

import pathlib
import re
import subprocess
import sys

import pytest

import annulus

pytest.importorskip("mypy")
PROJECT = pathlib.Path(__file__).parents[2]
CALLS = """
import numpy as np
import annulus

x = np.ones((1, 8, 4, 16), np.float32)
mesh = annulus.mesh({"sp": -1})
out, lse = annulus.attention(x, x, x, mesh=mesh, causal=True, window=(3, 0), layout="zigzag")
kept = annulus.Attention((1, 8, 8, 4, 4, 16, 16), mesh="sp=-1", soft_cap=2.0)
rows: list[np.ndarray] = kept.positions("query")
whole: np.ndarray = annulus.unshard(annulus.shard(x, "-,sp,-,-"), "-,sp,-,-", x.shape)
text: str = annulus.explain(x, x, x, causal=True) + kept.plan(ranks=1)
"""
MISTAKES = """
import numpy as np
import annulus

x = np.ones((1, 8, 4, 16), np.float32)
annulus.attention(x, x, x, casual=True)
annulus.attention(x, x, x, window=3)
annulus.attention(x, x, x, reproducible="always")
annulus.mesh(4)
annulus.init(timeout="long")
"""


def mypy(*arguments):
    found = subprocess.run([sys.executable, "-m", "mypy", "--config-file",
                            str(PROJECT / "pyproject.toml"), "--cache-dir=/dev/null", *arguments],
                           cwd=PROJECT / "python", capture_output=True, text=True, check=False)
    return found.returncode, found.stdout + found.stderr


@pytest.mark.skipif(annulus.mesh({"sp": -1}).size > 1, reason="one rank is enough")
def test_the_package_and_its_callers(tmp_path):
    code, text = mypy("annulus")
    assert code == 0, text
    (tmp_path / "calls.py").write_text(CALLS)
    code, text = mypy(str(tmp_path / "calls.py"))
    assert code == 0, text
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    code, text = mypy(str(tmp_path / "mistakes.py"))
    lines = {int(line) for line in re.findall(r"mistakes\.py:(\d+): error", text)}
    assert lines == {6, 7, 8, 9, 10}, text
