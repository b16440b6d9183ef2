"""The cases that peer programs are given, and the lines that they print.

A case is one attention problem, written HEADS/KV_HEADS:MASK:LENGTH or HEADS/KV_HEADS/DIM:…, as in
64/8:causal:32k and 16/16/256:causal:32k. Every program prints one JSON object a line: first its
environment, then one object a case and variant, with either times or an error. benchmarks/compare
reads them.
"""

import argparse
import json
import re
import statistics
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

# A matrix product of m×k by k×n counts 2·m·n·k operations; attention has two of them.
OPERATIONS_PER_LOGIT_AND_DIM = 4
# The timed passes, with their matrix products as a multiple of the forward pass's: the backward
# pass has five (the logits again, and four for the gradients).
PASSES = {"forward": 1.0, "backward": 2.5, "both": 3.5}
HEAD_DIM = 128  # of cases that name none


@dataclass(frozen=True)
class Case:
    """Self-attention over `length` positions, sharded along the sequence."""

    heads: int
    kv_heads: int
    causal: bool
    length: int
    head_dim: int = HEAD_DIM

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def shape(self) -> str:
        """As people read and write it: 64/8, or 16/16/256."""
        dim = "" if self.head_dim == HEAD_DIM else f"/{self.head_dim}"
        return f"{self.heads}/{self.kv_heads}{dim}"

    def __str__(self) -> str:
        return f"{self.shape}:{self.mask}:{self.length}"

    def operations(self, batch: int, timed: str = "forward") -> float:
        """4·B·N·S²·D, half of it when causal, for the forward pass."""
        whole = OPERATIONS_PER_LOGIT_AND_DIM * batch * self.heads * self.length**2 * self.head_dim
        return PASSES[timed] * (whole / 2 if self.causal else whole)


def length_of(text: str) -> int:
    """Reads a length such as 8192, 8k or 1M; for argparse's `type`, as are the next two."""
    match = re.fullmatch(r"(\d+)([kM]?)", text)
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"got '{text}'; expected a length, as in 8192, 8k or 1M")
    return int(match[1]) << {"": 0, "k": 10, "M": 20}[match[2]]


def shape_of(text: str) -> tuple[int, int, int]:
    """Reads HEADS/KV_HEADS or HEADS/KV_HEADS/DIM."""
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)(?:/([1-9]\d*))?", text)
    if match is None or int(match[1]) % int(match[2]) != 0:
        raise argparse.ArgumentTypeError(f"got '{text}'; expected HEADS/KV_HEADS or HEADS/KV_HEADS/"
                                         "DIM, the first a multiple of the second")
    return int(match[1]), int(match[2]), int(match[3] or HEAD_DIM)


def parse_case(text: str) -> Case:
    """Reads HEADS/KV_HEADS[/DIM]:MASK:LENGTH."""
    parts = text.split(":")
    if len(parts) != 3 or parts[1] not in ("causal", "full"):
        raise argparse.ArgumentTypeError(
            f"got '{text}'; expected HEADS/KV_HEADS[/DIM]:causal|full:LENGTH, as in 64/8:causal:32k")
    heads, kv_heads, head_dim = shape_of(parts[0])
    return Case(heads, kv_heads, parts[1] == "causal", length_of(parts[2]), head_dim)


def peer_parser(description: str) -> argparse.ArgumentParser:
    """The options that every peer has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--case", dest="cases", type=parse_case, action="append", required=True,
                        metavar="N/K:MASK:S", help="a case, as in 64/8:causal:32k; repeatable")
    parser.add_argument("--batch", type=int, default=1, help="batch size (default: %(default)s)")
    parser.add_argument("--iters", type=int, default=20,
                        help="timed calls of a case (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=5,
                        help="calls before them, at least (default: %(default)s)")
    parser.add_argument("--warm-seconds", type=float, default=0,
                        help="seconds of calls before them, at least (default: %(default)s)")
    parser.add_argument("--backward", action="store_true", help="time the backward pass, too")
    parser.add_argument("--annulus", action="store_true",
                        help="time the Python package of Annulus in the same processes, too")
    parser.add_argument("--tensors", metavar="FOLDER",
                        help="compute the gradients of the one case from the files in this folder, "
                        "and write them there, in place of timing; see gradient_files.py")
    return parser


def print_line(**fields: Any) -> None:
    """One JSON object on a line of its own, at once."""
    print(json.dumps(fields), flush=True)


def print_times(system: str, case: Case, options: argparse.Namespace, gpus: int,
                times: Mapping[str, Sequence[float]]) -> None:
    """Reports the milliseconds of a case's calls by what was timed, each that of the slowest
    GPU."""
    fields = {}
    for timed, milliseconds in times.items():
        median = statistics.median(milliseconds)
        rate = case.operations(options.batch, timed) / (median * 1e-3) / gpus
        fields[timed] = {"ms": median, "least_ms": min(milliseconds),
                         "most_ms": max(milliseconds), "tflops_per_gpu": rate * 1e-12}
    print_line(system=system, case=str(case), gpus=gpus, **fields)


def print_error(system: str, case: object, error: BaseException) -> None:
    """Reports a case that could not be run."""
    reason = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {reason[0][:300] if reason else 'no message'}"
    print_line(system=system, case=str(case), error=text)
