#!/usr/bin/env python3
"""Times PyTorch's context-parallel attention, bfloat16, cuDNN kernels.

    torchrun --standalone --nproc-per-node 4 pytorch_context_parallel.py --case 64/8:causal:32k

One process per GPU. Both ways in which PyTorch moves key/value are timed, each as a system of its
own. A call takes as long as its slowest rank, by CUDA events on each. With --backward, a forward
and a backward pass follow each other without a pause, and an event between them tells their times.
With --annulus, annulus.torch is timed in the same way.
"""

import argparse
import functools
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

# Parts of a call, in order.
Steps = list[Callable[[], object]]


def system_name(rotate: str) -> str:
    return f"pytorch-{rotate}"


def implementation_options() -> Any:
    """PyTorch's own settings of context parallelism; versions keep them in different modules."""
    return inspect.unwrap(context_parallelism.context_parallel).__globals__["_cp_options"]


def random_operands(case: Case, options: argparse.Namespace) -> list[torch.Tensor]:
    """Query, key, value and the output's gradient, of the whole sequence: context_parallel cuts
    them in place."""

    def normal(heads: int) -> torch.Tensor:
        return torch.randn(options.batch, heads, case.length, case.head_dim, device="cuda",
                           dtype=torch.bfloat16)

    return [normal(case.heads), normal(case.kv_heads), normal(case.kv_heads), normal(case.heads)]


def slowest(milliseconds: list[float]) -> list[float]:
    """The largest value of all ranks."""
    tensor = torch.tensor(milliseconds, device="cuda")
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def slowest_times(steps: Steps, options: argparse.Namespace) -> Iterator[list[float]]:
    """Milliseconds of each step of every timed call, and of the whole call, on its slowest rank. The
    ranks begin each call together."""

    def timed() -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        events[0].record()
        for step, event in zip(steps, events[1:]):
            step()
            event.record()
        torch.cuda.synchronize()
        return slowest([*(a.elapsed_time(b) for a, b in zip(events, events[1:])),
                        events[0].elapsed_time(events[-1])])

    calls, warm = 0, 0.0
    while calls < options.warmup or warm < options.warm_seconds:
        whole = timed()[-1]
        # The first call loads kernels and connects the ranks.
        warm += whole * 1e-3 if calls > 0 else 0
        calls += 1
    for _ in range(options.iters):
        yield timed()


class Sharded:
    """A case on this rank; used as a context, inside of which attention is sharded."""

    def __init__(self, case: Case, rotate: str, mesh: DeviceMesh,
                 operands: list[torch.Tensor]) -> None:
        context_parallelism.set_rotate_method(rotate)
        # PyTorch balances causal work between ranks and refuses to do so without a causal mask.
        implementation_options().enable_load_balance = case.causal
        self.case, self.mesh, self.operands = case, mesh, operands
        self.output: torch.Tensor
        self.gradients: tuple[torch.Tensor, ...]

    def __enter__(self) -> "Sharded":
        with torch.no_grad():
            self.context = context_parallelism.context_parallel(
                self.mesh, buffers=self.operands,
                buffer_seq_dims=[SEQUENCE_DIM] * len(self.operands),
                no_restore_buffers=set(self.operands))
            self.context.__enter__()
        self.kernels = sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
        self.kernels.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.kernels.__exit__(*error)
        self.context.__exit__(*error)

    def attend(self) -> None:
        query, key, value, _ = self.operands
        self.output = functional.scaled_dot_product_attention(
            query, key, value, is_causal=self.case.causal,
            enable_gqa=self.case.heads != self.case.kv_heads)

    def differentiate(self) -> None:
        *inputs, grad_output = self.operands
        self.gradients = torch.autograd.grad(self.output, inputs, grad_output)


class Annulus(Sharded):
    """The case by annulus.torch, on shards in its own layout; torchrun's store connects the ranks."""

    def __init__(self, case: Case, operands: list[torch.Tensor]) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.case = case
        self.operands = [x.transpose(1, 2).tensor_split(ranks, 1)[rank].contiguous() for x in operands]

    def __enter__(self) -> "Annulus":
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def attend(self) -> None:
        import annulus.torch

        self.output, _ = annulus.torch.attention(
            *self.operands[:3], causal=self.case.causal,
            layout="zigzag" if self.case.causal else "contiguous")


def time_case(make: Callable[[list[torch.Tensor]], Sharded], case: Case,
              options: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of the timed calls, by what was timed."""
    with make(random_operands(case, options)) as sharded:
        with torch.no_grad():
            times = {"forward": [first for first, _ in slowest_times([sharded.attend], options)]}
        if options.backward:
            for tensor in sharded.operands[:3]:
                tensor.requires_grad_()
            calls = list(slowest_times([sharded.attend, sharded.differentiate], options))
            times["backward"] = [call[1] for call in calls]
            times["both"] = [call[2] for call in calls]
        return times


def write_gradients(make: Callable[[list[torch.Tensor]], Sharded], name: str, mesh: DeviceMesh,
                    folder: str) -> None:
    """The gradients of the tensors in the folder; see gradient_files.py."""
    import gradient_files  # needs NumPy

    tensors = gradient_files.read_operands(folder)
    whole = [torch.tensor(array, device="cuda").transpose(1, 2).to(torch.bfloat16).contiguous()
             for array in tensors.values()]
    with make(whole) as sharded:
        for tensor in sharded.operands[:3]:
            tensor.requires_grad_()
        sharded.attend()
        sharded.differentiate()
        found = context_parallelism.context_parallel_unshard(
            mesh, [gradient.detach() for gradient in sharded.gradients], [SEQUENCE_DIM] * 3)
    if dist.get_rank() == 0:
        gradient_files.write(folder, name, dist.get_world_size(),
                        [gradient.float().transpose(1, 2).cpu().numpy() for gradient in found])


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
        makers = {system_name(rotate): functools.partial(Sharded, case, rotate, mesh)
                  for rotate in ROTATE_METHODS}
        if options.annulus and not options.tensors:
            makers["annulus-torch"] = functools.partial(Annulus, case)
        for name, make in makers.items():
            # All ranks have the same problem and so fail in the same way.
            try:
                if options.tensors:
                    write_gradients(make, name, mesh, options.tensors)
                    continue
                times = time_case(make, case, options)
                if reports:
                    print_times(name, case, options, gpus, times)
            except (RuntimeError, NotImplementedError, ValueError, KeyError, ImportError) as error:
                if reports:
                    print_error(name, case, error)
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
