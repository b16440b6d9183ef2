"""Every Python program of the documents runs on all ranks."""

import pathlib
import re

import pytest

DOCUMENTS = pathlib.Path(__file__).parents[2] / "docs"
PROGRAMS = [(f"{name} {number}", text) for name in ("python", "start", "recipes")
            for number, text in enumerate(re.findall(
                r"```python\n(.*?)```", (DOCUMENTS / f"{name}.md").read_text(), flags=re.DOTALL), 1)]


def test_there_are_programs():
    assert len(PROGRAMS) >= 15


@pytest.mark.parametrize("name, text", PROGRAMS, ids=[name for name, _ in PROGRAMS])
def test_program(name, text):
    for module in ("torch", "transformers", "jax"):
        if f"import {module}" in text:
            pytest.importorskip(module)
    exec(compile(text, f"program of {name}", "exec"), {})  # noqa: S102
