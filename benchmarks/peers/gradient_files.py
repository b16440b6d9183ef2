"""Files through which all systems get the same problem and hand over their gradients.

A folder holds query.npy, key.npy, value.npy and grad_output.npy, [batch, sequence, heads, head dim]
in bfloat16 as `annulus run` reads it: its bits as uint16. A system leaves SYSTEM-RANKS.npz with the
gradients of the first three, in float32.
"""

import os
from typing import Sequence

import numpy as np

OPERANDS = ("query", "key", "value", "grad_output")


def from_bits(bits: np.ndarray) -> np.ndarray:
    """bfloat16, from its bits, as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def read_operands(folder: str) -> dict[str, np.ndarray]:
    """By name, in float32, which holds every bfloat16."""
    return {name: from_bits(np.load(os.path.join(folder, name + ".npy"))) for name in OPERANDS}


def write(folder: str, system: str, ranks: int, gradients: Sequence[np.ndarray]) -> None:
    """Hands over the gradients of query, key and value."""
    np.savez(os.path.join(folder, f"{system}-{ranks}.npz"), **dict(zip(OPERANDS, gradients)))
