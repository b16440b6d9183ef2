"""Writes the fixtures of generate_jax.py and its neighbours: a case is NAME.json and
NAME.safetensors in cases/, as README.md describes."""

import importlib.metadata
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

HERE = Path(__file__).parent
CASES = HERE / "cases"


def pinned_versions(*packages: str) -> dict[str, str]:
    """The versions that requirements.txt pins; refuses to go on with others."""
    lines = (HERE / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    for package in packages:
        if (found := importlib.metadata.version(package)) != pins[package]:
            raise SystemExit(f"{package} is {found}, requirements.txt says {pins[package]}")
    return {package: pins[package] for package in packages}


DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def generator(case: str) -> np.random.Generator:
    """A random generator of its own for each case, so that adding a case changes no other."""
    return np.random.default_rng(zlib.crc32(case.encode()))


@dataclass
class Shape:
    """The sizes of a case."""

    batch: int = 2
    rows: int = 43
    columns: int | None = None  # as many as rows
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    value_dim: int | None = None  # as dim


def operands(case: str, shape: Shape, dtype: str = "float32",
             sharpness: float = 1) -> dict[str, np.ndarray]:
    """Normally distributed query, key and value."""
    random = generator(case)
    columns = shape.columns or shape.rows
    sizes = {
        "query": (shape.batch, shape.rows, shape.heads, shape.dim),
        "key": (shape.batch, columns, shape.kv_heads, shape.dim),
        "value": (shape.batch, columns, shape.kv_heads, shape.value_dim or shape.dim),
    }
    tensors = {name: random.standard_normal(size).astype(np.float32)
               for name, size in sizes.items()}
    tensors["query"] *= sharpness
    return {name: tensor.astype(DTYPES[dtype]) for name, tensor in tensors.items()}


def positions(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Positions of rows and columns, as they broadcast to [T,S]."""
    return np.arange(shape.rows)[:, None], np.arange(shape.columns or shape.rows)[None, :]


def save(case: str, says: str, reference: str, tensors: dict[str, Any], **fields: Any) -> None:
    """Writes a case. The tensors are named as the options of `annulus run`; `output` and `lse` are
    the reference's. The fields are those of README.md."""
    packages = ("torch",) if "torch" in reference else ("jax", "jaxlib")
    if "ejkernel" in reference:
        packages = ("ejkernel", *packages)
    made_with = pinned_versions(*packages, "numpy")
    pinned_versions("ml_dtypes", "safetensors")
    description = {"says": says, "reference": reference, "made_with": made_with, **fields}
    # One field a line.
    text = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}"
                      for key, value in description.items() if value)
    (CASES / f"{case}.json").write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
    arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    # One entry: safetensors writes several in any order.
    versions = ", ".join(f"{package} {version}" for package, version in made_with.items())
    save_file(arrays, CASES / f"{case}.safetensors", {"made_with": f"{reference}; {versions}"})
    size = (CASES / f"{case}.safetensors").stat().st_size
    print(f"{case:40s} {size:7d} bytes")
