#!/usr/bin/env python3
"""Times PyTorch's context-parallel attention, forward, bfloat16, cuDNN kernels.

    torchrun --standalone --nproc-per-node 4 pytorch_context_parallel.py --case 64/8:causal:32k

One process per GPU. Both ways in which PyTorch moves key/value are timed, each as a system of its
own. A call takes as long as its slowest rank, by CUDA events on each.
"""

import argparse
import inspect
import os
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import _attention as context_parallelism
from torch.nn.attention import SDPBackend, sdpa_kernel

from peer_cases import Case, peer_parser, print_error, print_line, print_times

ROTATE_METHODS = ("allgather", "alltoall")
SEQUENCE_DIM = 2  # of [batch, heads, sequence, head dim]


def system_name(rotate: str) -> str:
    return f"pytorch-{rotate}"


def implementation_options() -> Any:
    """PyTorch's own settings of context parallelism; versions keep them in different modules."""
    return inspect.unwrap(context_parallelism.context_parallel).__globals__["_cp_options"]


def random_operands(case: Case, options: argparse.Namespace) -> tuple[torch.Tensor, ...]:
    """Query, key and value of the whole sequence: context_parallel cuts them in place."""

    def normal(heads: int) -> torch.Tensor:
        return torch.randn(options.batch, heads, case.length, options.head_dim, device="cuda",
                           dtype=torch.bfloat16)

    return normal(case.heads), normal(case.kv_heads), normal(case.kv_heads)


def slowest_times(call: Callable[[], object], options: argparse.Namespace) -> Iterator[float]:
    """Milliseconds of each timed call on its slowest rank; the ranks begin each together."""
    for _ in range(options.warmup):
        call()
    for _ in range(options.iters):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        elapsed = torch.tensor([begin.elapsed_time(end)], device="cuda")
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        yield elapsed.item()


def time_case(case: Case, rotate: str, mesh: DeviceMesh,
              options: argparse.Namespace) -> list[float]:
    context_parallelism.set_rotate_method(rotate)
    # PyTorch balances causal work between ranks and refuses to do so without a causal mask.
    implementation_options().enable_load_balance = case.causal
    query, key, value = random_operands(case, options)
    operands = [query, key, value]
    with torch.no_grad(), context_parallelism.context_parallel(
            mesh, buffers=operands, buffer_seq_dims=[SEQUENCE_DIM] * len(operands),
            no_restore_buffers=set(operands)), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):

        def attend() -> torch.Tensor:
            return functional.scaled_dot_product_attention(
                query, key, value, is_causal=case.causal,
                enable_gqa=case.heads != case.kv_heads)

        return list(slowest_times(attend, options))


def print_environment(gpus: int) -> None:
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    print_line(environment={
        "torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl,
        "cudnn": torch.backends.cudnn.version(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(gpus)]})


def main() -> None:
    options = peer_parser("PyTorch context-parallel attention; start it with torchrun").parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    gpus = dist.get_world_size()
    reports = dist.get_rank() == 0
    mesh = init_device_mesh("cuda", (gpus,), mesh_dim_names=("sequence",))
    if reports:
        print_environment(gpus)
    for case in options.cases:
        for rotate in ROTATE_METHODS:
            # All ranks have the same problem and so fail in the same way.
            try:
                times = time_case(case, rotate, mesh, options)
                if reports:
                    print_times(system_name(rotate), case, options, gpus, times)
            except (RuntimeError, NotImplementedError, ValueError, KeyError) as error:
                if reports:
                    print_error(system_name(rotate), case, error)
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
