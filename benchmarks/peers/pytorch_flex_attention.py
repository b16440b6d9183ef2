#!/usr/bin/env python3
"""Times PyTorch's FlexAttention with block masks and score functions, forward, bfloat16, one GPU.

    python3 pytorch_flex_attention.py

The masks of `annulus_micro_flash blocks`, and a bias and a dense mask that all heads share as
score functions, beside dense attention by PyTorch's cuDNN kernel in the same run. (Dropout of
weights cannot be said in a score function.) Every backend that is asked for is a system of its own; what it cannot do is reported as
an error. Calls alternate between the systems and rest in between; times are by CUDA events. Prints
one JSON object a line: the environment, then one a case and system.
"""

import argparse
import statistics
import time
from typing import Any, Callable, Optional

import torch
import torch._dynamo
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from peer_cases import print_error, print_line

BLOCK = 128
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
ScoreMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
                    torch.Tensor]


def random_blocks(density: float, heads: int, length: int) -> MaskMod:
    generator = torch.Generator(device="cuda").manual_seed(1)
    count = -(-length // BLOCK)
    shown = torch.rand(heads, count, count, device="cuda", generator=generator) < density
    return lambda b, h, q, kv: shown[h, q // BLOCK, kv // BLOCK]


def causal_window(width: int) -> MaskMod:
    return lambda b, h, q, kv: (kv <= q) & (kv >= q - width)


def documents(length: int, shift: int) -> MaskMod:
    ids = (torch.arange(length, device="cuda") + shift) // 1024
    return lambda b, h, q, kv: ids[q] == ids[kv]


def cases(options: argparse.Namespace) -> dict[str, tuple[Optional[MaskMod], Optional[int]]]:
    """Name, mask and the heads that it distinguishes."""
    found: dict[str, tuple[Optional[MaskMod], Optional[int]]] = {}
    for density in (0.06, 0.11, 0.26, 0.51):
        found[f"random {density}"] = (random_blocks(density, options.heads, options.length),
                                      options.heads)
    for width in (1024, 4096):
        found[f"window {width} causal"] = (causal_window(width), None)
    found["16 documents of 1024"] = (documents(options.length, 0), None)
    found["documents that cut tiles"] = (documents(options.length, 50), None)
    return found


def score_cases(options: argparse.Namespace) -> dict[str, ScoreMod]:
    shape = (options.length, options.length)
    bias = torch.randn(shape, device="cuda")
    shown = torch.rand(shape, device="cuda") < 0.5
    return {"bias": lambda score, b, h, q, kv: score + bias[q, kv],
            "dense mask 0.5": lambda score, b, h, q, kv: torch.where(shown[q, kv], score,
                                                                     -float("inf"))}


def elapsed(call: Callable[[], object], calls: int) -> float:
    """The median of some calls in a row, in milliseconds."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:]))


def flex_call(operands: list[torch.Tensor], backend: str, mask: Optional[BlockMask] = None,
              score: Optional[ScoreMod] = None) -> Callable[[], Any]:
    compiled = torch.compile(flex_attention, dynamic=False)
    options = {} if backend == "default" else {"BACKEND": backend}
    return lambda: compiled(*operands, block_mask=mask, score_mod=score, enable_gqa=True,
                            kernel_options=options)


def dense_call(operands: list[torch.Tensor]) -> Callable[[], Any]:
    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return functional.scaled_dot_product_attention(*operands, enable_gqa=True)

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--backends", nargs="+", default=["default", "FLASH"],
                        help="of FlexAttention (default: %(default)s)")
    parser.add_argument("--scores-only", action="store_true", help="leave block masks out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=5, help="in a row, in every round")
    parser.add_argument("--rest", type=float, default=0.1, help="seconds before each measurement")
    options = parser.parse_args()

    # Every mask is compiled by itself.
    torch._dynamo.config.recompile_limit = 256
    print_line(environment={"torch": torch.__version__, "cuda": torch.version.cuda,
                            "cudnn": torch.backends.cudnn.version(),
                            "gpu": torch.cuda.get_device_name()})
    torch.manual_seed(0)
    operands = [torch.randn(1, heads, options.length, options.head_dim, device="cuda",
                            dtype=torch.bfloat16)
                for heads in (options.heads, options.kv_heads, options.kv_heads)]
    calls: dict[tuple[str, str], Callable[[], Any]] = {("dense", "cudnn"): dense_call(operands)}
    density = {"dense": 1.0}
    make_mask = torch.compile(create_block_mask)
    for name, score in score_cases(options).items():
        density[name] = 1.0
        for backend in options.backends:
            calls[name, f"flex-{backend.lower()}"] = flex_call(operands, backend, score=score)
    for name, (mod, heads) in ({} if options.scores_only else cases(options)).items():
        mask = make_mask(mod, None, heads, options.length, options.length, device="cuda")
        density[name] = 1 - mask.sparsity() / 100
        for backend in options.backends:
            calls[name, f"flex-{backend.lower()}"] = flex_call(operands, backend, mask)

    usable = {}
    with torch.no_grad():
        for (name, system), call in calls.items():
            try:
                call()
                torch.cuda.synchronize()
                usable[name, system] = call
            # The compiler wraps what backends refuse in many kinds of errors.
            except Exception as error:  # pylint: disable=broad-exception-caught
                print_error(system, name, error)
        times: dict[tuple[str, str], list[float]] = {key: [] for key in usable}
        for _ in range(options.rounds):
            for key, call in usable.items():
                time.sleep(options.rest)
                times[key].append(elapsed(call, options.calls))
    dense = statistics.median(times["dense", "cudnn"]) if ("dense", "cudnn") in times else None
    for (name, system), measured in times.items():
        median = statistics.median(measured)
        print_line(case=name, system=system, ms=median, rounds=measured,
                   tile_density=density[name], of_dense=median / dense if dense else None)


if __name__ == "__main__":
    main()
