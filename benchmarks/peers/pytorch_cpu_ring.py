"""The sums of PyTorch's ring attention (context_parallel), by its CPU kernels, all ranks in one
process. As in PyTorch 2.15, each rank holds two chunks, r and 2P - 1 - r; a kernel hands over its
output and its gradients in the dtype of the operands, and they are added in float32 (the option
convert_to_f32, its default) and rounded at the end. The CPU kernels take no grouped heads: keys and
values are repeated, and their gradients added up in float32.
"""

import numpy as np
import torch

from .gradient_files import OPERANDS

forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
SEQUENCE_DIM = 2  # of [batch, heads, sequence, head dim]


def merged(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and log-sum-exps of the same rows, added by weight in float32."""
    out, lse = parts[0][0].float(), parts[0][1]
    for more, more_lse in parts[1:]:
        both = torch.logaddexp(lse, more_lse)
        out = (out * torch.exp(lse - both).unsqueeze(-1)
               + more.float() * torch.exp(more_lse - both).unsqueeze(-1))
        lse = both
    return out, lse


def ring_gradients(operands: dict[str, np.ndarray], dtype: str, causal: bool,
                   ranks: int) -> list[np.ndarray]:
    """Gradients of query, key and value [batch, sequence, heads, head dim], float32."""
    tensors = [torch.from_numpy(operands[name]).transpose(1, 2).to(getattr(torch, dtype))
               for name in OPERANDS]
    group = tensors[0].shape[1] // tensors[1].shape[1]
    query, key, value, grad_output = (
        one.repeat_interleave(group, 1) if i in (1, 2) else one for i, one in enumerate(tensors))
    length = query.shape[SEQUENCE_DIM]
    chunks = np.arange(length).reshape(2 * ranks, -1)
    held = [torch.from_numpy(np.concatenate([chunks[r], chunks[2 * ranks - 1 - r]]))
            for r in range(ranks)]
    half = length // (2 * ranks)

    def hops(rank: int) -> list[tuple[int, slice, slice, bool]]:
        """Owner of the columns, rows and columns of the shards, and whether they are causal."""
        everything, first, second = slice(None), slice(0, half), slice(half, None)
        steps = []
        for hop in range(ranks):
            owner = (rank - hop) % ranks
            if hop == 0 or not causal:
                steps.append((owner, everything, everything, causal and hop == 0))
            elif hop <= rank:
                steps.append((owner, everything, first, False))
            else:
                steps.append((owner, second, everything, False))
        return steps

    gradients = [torch.zeros_like(one, dtype=torch.float32) for one in (query, key, value)]
    results = {}
    for rank in range(ranks):
        rows = held[rank]
        halves: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[], []]
        for owner, own, theirs, is_causal in hops(rank):
            columns = held[owner][theirs]
            out, lse = forward(query[:, :, rows[own]], key[:, :, columns], value[:, :, columns],
                               0.0, is_causal)
            if own == slice(None):
                halves[0].append((out[:, :, :half], lse[:, :, :half]))
                halves[1].append((out[:, :, half:], lse[:, :, half:]))
            else:
                halves[1].append((out, lse))
        both = [merged(parts) for parts in halves]
        results[rank] = (torch.cat([out for out, _ in both], SEQUENCE_DIM).to(query.dtype),
                         torch.cat([lse for _, lse in both], SEQUENCE_DIM))
    # By hop: so the sums of columns, which go round, are added in their order.
    for hop in range(ranks):
        for rank in range(ranks):
            owner, own, theirs, is_causal = hops(rank)[hop]
            rows, columns = held[rank][own], held[owner][theirs]
            out, lse = (one[:, :, own] for one in results[rank])
            parts = backward(grad_output[:, :, rows], query[:, :, rows], key[:, :, columns],
                             value[:, :, columns], out, lse.contiguous(), 0.0, is_causal)
            for total, part, at in zip(gradients, parts, (rows, columns, columns)):
                total[:, :, at] += part.float()
    grad_query, *grad_columns = gradients
    grad_columns = [one.unflatten(1, (-1, group)).sum(2) for one in grad_columns]
    return [one.to(query.dtype).float().transpose(1, 2).numpy()
            for one in (grad_query, *grad_columns)]
