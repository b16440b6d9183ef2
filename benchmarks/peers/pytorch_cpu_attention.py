#!/usr/bin/env python3
"""Times the native kernel beside PyTorch's scaled_dot_product_attention on the CPU.

    python3 pytorch_cpu_attention.py --annulus-micro ../../build/annulus_micro --threads 16

With --backward it times their backward passes alone, and shows how the native kernel's rate compares
with that of its forward pass. Both get the same number of threads and take turns, round by round; the other rests meanwhile. Times
are medians over the rounds: wall-clock time, or with --user-time, for machines shared with others,
the processor time of the whole process. OpenBLAS's matrix product, or the native forward pass, runs
in the same rounds. Prints one JSON object per line (the environment, then one for each case and system), then a table.
"""

import argparse
import json
import statistics
import subprocess
import time

import torch
import torch.nn.functional as functional

from peer_cases import OPERATIONS_PER_LOGIT_AND_DIM, PASSES, print_line

HEADS = 8  # as in annulus_micro
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PyTorch:
    """One problem. The inputs are contiguous [B,N,T,D], which PyTorch's kernel prefers."""

    def __init__(self, dtype: str, mask: str, length: int, dim: int, backward: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        *self.inputs, self.grad_output = (
            torch.randn(1, HEADS, length, dim, generator=generator).to(DTYPES[dtype])
            for _ in range(4))
        self.causal = mask == "causal"
        self.backward = backward
        for tensor in self.inputs:
            tensor.requires_grad_(backward)
        self.output = self.attend()
        self.call()

    def attend(self) -> torch.Tensor:
        return functional.scaled_dot_product_attention(*self.inputs, is_causal=self.causal)

    def call(self) -> None:
        if self.backward:
            torch.autograd.grad(self.output, self.inputs, self.grad_output, retain_graph=True)
        else:
            self.attend()

    def seconds(self, user_time: bool, least: float) -> float:
        clock = time.process_time if user_time else time.perf_counter
        calls = 0
        begin, wall = clock(), time.perf_counter()
        while calls == 0 or time.perf_counter() - wall < least:
            self.call()
            calls += 1
        return (clock() - begin) / calls


def annulus_seconds(options: argparse.Namespace, name: str) -> float:
    output = subprocess.run(
        [options.annulus_micro, f"--threads={options.threads}", f"--benchmark_filter=^{name}/",
         "--benchmark_format=json", f"--benchmark_min_time={options.seconds}"],
        check=True, capture_output=True, text=True).stdout
    (line,) = json.loads(output)["benchmarks"]
    return line["cpu_time" if options.user_time else "real_time"] * 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--annulus-micro", required=True)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each system and round")
    parser.add_argument("--user-time", action="store_true")
    parser.add_argument("--backward", action="store_true", help="time the backward pass")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--masks", nargs="+", default=["full", "causal"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 8192])
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print_line(torch=torch.__version__, threads=options.threads,
               capability=torch.backends.cpu.get_cpu_capability(),
               clock="processor" if options.user_time else "wall")

    table: list[str] = []
    for dtype in options.dtypes:
        for length in options.lengths:
            for dim in options.dims:
                for mask in options.masks:
                    table.append(compare(options, dtype, mask, length, dim))
    other = "native forward" if options.backward else "sgemm"
    print(f"\n| case | native, GFLOP/s | PyTorch | native / PyTorch | {other} | native / {other} |")
    print("|---|---|---|---|---|---|")
    print("\n".join(table))


def compare(options: argparse.Namespace, dtype: str, mask: str, length: int, dim: int) -> str:
    forward = OPERATIONS_PER_LOGIT_AND_DIM * HEADS * dim * length * length
    if mask == "causal":
        forward = forward * (length + 1) // (2 * length)
    timed = "backward" if options.backward else "forward"
    # By system: the benchmark of annulus_micro, if it has one, and the operations.
    case = f"{dtype}/{mask}/{length}/{dim}"
    other = ("native forward", f"native/{case}", forward) if options.backward else (
        "sgemm", "sgemm/2048", 2 * 2048**3)
    systems = [("native", f"native_backward/{case}" if options.backward else f"native/{case}",
                forward * PASSES[timed]), ("PyTorch", None, forward * PASSES[timed]), other]
    peer = PyTorch(dtype, mask, length, dim, options.backward)
    seconds: dict[str, list[float]] = {system: [] for system, _, _ in systems}
    for _ in range(options.rounds):
        for system, benchmark, _ in systems:
            seconds[system].append(annulus_seconds(options, benchmark) if benchmark else
                                   peer.seconds(options.user_time, options.seconds))
    for system, times in seconds.items():
        print_line(dtype=dtype, mask=mask, length=length, dim=dim, timed=timed, system=system,
                   seconds=times)
    native, pytorch, third = (operations / statistics.median(seconds[system]) * 1e-9
                              for system, _, operations in systems)
    return (f"| {dtype} {mask} S={length} D={dim} | {native:.0f} | {pytorch:.0f} | "
            f"{native / pytorch:.2f} | {third:.0f} | {native / third:.2f} |")


if __name__ == "__main__":
    main()
