"""What the peer programs share: the cases they are given and the lines they print.

A case is one attention problem, written HEADS/KV_HEADS:MASK:LENGTH, as in 64/8:causal:32k. Every
program prints one JSON object a line: first its environment, then one object a case and variant,
with either times or an error. benchmarks/compare reads them.
"""

import argparse
import json
import re
import statistics
from dataclasses import dataclass
from typing import Any, Sequence

# A matrix product of m×k by k×n counts 2·m·n·k operations; attention has two of them.
OPERATIONS_PER_LOGIT_AND_DIM = 4


@dataclass(frozen=True)
class Case:
    """Self-attention over `length` positions, sharded along the sequence."""

    heads: int
    kv_heads: int
    causal: bool
    length: int

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    def operations(self, batch: int, head_dim: int) -> float:
        """4·B·N·S²·D, half of it when causal."""
        whole = OPERATIONS_PER_LOGIT_AND_DIM * batch * self.heads * self.length**2 * head_dim
        return whole / 2 if self.causal else float(whole)


def parse_case(text: str) -> Case:
    """Reads HEADS/KV_HEADS:MASK:LENGTH; for argparse's `type`."""
    match = re.fullmatch(r"(\d+)/(\d+):(causal|full):(\d+)([kM]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"got '{text}'; expected HEADS/KV_HEADS:causal|full:LENGTH, as in 64/8:causal:32k")
    heads, kv_heads, length = (int(match[i]) for i in (1, 2, 4))
    length <<= {"": 0, "k": 10, "M": 20}[match[5]]
    if 0 in (heads, kv_heads, length) or heads % kv_heads != 0:
        raise argparse.ArgumentTypeError(
            f"got '{text}'; expected sizes above zero, and heads a multiple of kv heads")
    return Case(heads, kv_heads, match[3] == "causal", length)


def peer_parser(description: str) -> argparse.ArgumentParser:
    """The options that every peer has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--case", dest="cases", type=parse_case, action="append", required=True,
                        metavar="N/K:MASK:S", help="a case, as in 64/8:causal:32k; repeatable")
    parser.add_argument("--batch", type=int, default=1, help="batch size (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=128,
                        help="head dimension (default: %(default)s)")
    parser.add_argument("--iters", type=int, default=20,
                        help="timed calls of a case (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=5,
                        help="calls before them (default: %(default)s)")
    return parser


def print_line(**fields: Any) -> None:
    """One JSON object on a line of its own, at once."""
    print(json.dumps(fields), flush=True)


def print_times(system: str, case: Case, options: argparse.Namespace, gpus: int,
                milliseconds: Sequence[float]) -> None:
    """Reports the times of a case's calls, each that of the slowest GPU."""
    median = statistics.median(milliseconds)
    rate = case.operations(options.batch, options.head_dim) / (median * 1e-3) / gpus
    print_line(system=system, **_fields(case), gpus=gpus, ms=median, least_ms=min(milliseconds),
               most_ms=max(milliseconds), tflops_per_gpu=rate * 1e-12)


def print_error(system: str, case: Case, error: BaseException) -> None:
    """Reports a case that could not be run."""
    reason = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {reason[0][:300] if reason else 'no message'}"
    print_line(system=system, **_fields(case), error=text)


def _fields(case: Case) -> dict[str, Any]:
    return {"heads": case.heads, "kv_heads": case.kv_heads,
            "mask": case.mask, "length": case.length}
