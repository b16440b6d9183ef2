"""Every Python program of docs/python.md runs on all ranks."""

import pathlib
import re

import pytest

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "python.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)


def test_there_are_programs():
    assert len(PROGRAMS) >= 6


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_program(number):
    for module in ("torch", "transformers", "jax"):
        if f"import {module}" in PROGRAMS[number]:
            pytest.importorskip(module)
    exec(compile(PROGRAMS[number], f"program {number + 1} of {DOCUMENT.name}", "exec"), {})  # noqa: S102
