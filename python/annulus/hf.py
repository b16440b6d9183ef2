"""Attention of Hugging Face's models over sequences that ranks share.

    import annulus.hf                                # registers attn_implementation="annulus"
    batch = annulus.hf.shard_batch(input_ids, labels, mesh={"sp": -1})
    loss = annulus.hf.loss(model(**batch).logits, batch)
    loss.backward()
    annulus.hf.sum_gradients(model, mesh={"sp": -1})

A layer computes exactly what the model asks for, or raises an exception that names the keyword.
"""

from __future__ import annotations

from typing import Any, Iterable, Mapping, Sequence

try:
    import torch
    from torch import Tensor
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as error:
    raise ImportError(f"annulus.hf needs PyTorch and transformers 5 or later ({error})") from error

import numpy as np

from . import _hf_mask
from ._library import UserError
from ._library import argument_error as refused
from ._mesh import AnyMesh, Mesh, mesh_of
from ._options import Options, one_of
from ._store import Store, torch_size
from .torch import run_operator, text_of

IGNORED = -100  # the label of a token without a loss, as everywhere in transformers

# Keywords of a model that every layer gets and that mean nothing to attention.
_NOT_OURS = frozenset({"use_cache", "num_items_in_batch", "shift_labels", "output_hidden_states",
                       "output_router_logits", "return_dict", "cache_position", "logits_to_keep"})

# Options that choose how attention is computed. The others follow from the model and the batch.
_CHOICES = frozenset({"schedule", "implementation", "transport", "tuning", "ulysses_degree",
                      "inner_size", "softmax_dtype", "reproducible", "backward_schedule",
                      "backward_implementation"})


class Sharding:
    """How a batch lies on the ranks; every layer gets it, under the keyword "annulus"."""

    def __init__(self, mesh: Mesh, rows: Sequence[np.ndarray], position_ids: Tensor,
                 documents: np.ndarray | None, options: dict[str, Any], seed: int | None) -> None:
        self.mesh = mesh
        self.rows = rows  # the batches and the positions of this rank
        self.position_ids = position_ids
        self.documents = documents  # ids [B,T]; -1: padding
        self.seed = seed
        self.used = False  # by a layer
        self._options = options
        self._checked = position_ids
        self._texts: dict[Any, str] = {}

    def check_positions(self, position_ids: Tensor) -> None:
        """Raises ArgumentError unless the positions are the batch's, as rotary embeddings need."""
        if position_ids is self._checked:
            return
        expected = self.position_ids.to(position_ids.device)
        if position_ids.shape[-1:] != expected.shape[-1:] or not bool(
                (position_ids == expected).all()):
            raise refused("position_ids", "others", "the position_ids that shard_batch returned")
        self._checked = position_ids

    def options(self, mask: "_hf_mask.Mask", scale: float | None, soft_cap: float | None,
                dropout: float) -> str:
        """The options of a layer, as the operator takes them."""
        key = (mask, scale, soft_cap, dropout)
        text = self._texts.get(key)
        if text is None:
            options = {**self._options, **self._visible(mask), "scale": scale, "soft_cap": soft_cap}
            if dropout:
                options["dropout"] = dropout
            text = self._texts[key] = text_of(options)
        return text

    def _visible(self, mask: "_hf_mask.Mask") -> dict[str, Any]:
        options: dict[str, Any] = {"causal": mask.causal, "window": mask.window,
                                   "chunk": mask.chunk}
        documents = self.documents
        if documents is None:
            return options
        sums = _prefix_sums(documents)
        if mask.chunk is not None:
            # transformers counts chunks from the first token of a document, as pairs of packings do.
            if sums is None:
                raise refused("attention_chunk_size", mask.chunk,
                              "none with padding, or with batches of different documents")
            return {**options, "cu_seqlens": (sums, sums), "alignment": "top-left"}
        return {**options, **({"segments": documents} if sums is None else {"cu_seqlens": sums})}

    def cuts_sequences(self) -> bool:
        return len(self.rows[1]) < int(self._options["query_length"])

    def holders(self) -> int:
        """The number of ranks that hold the same heads."""
        return self.mesh.size // self.mesh.axes.get("tp", 1)


def _prefix_sums(documents: np.ndarray) -> np.ndarray | None:
    """Prefix sums of the documents' lengths, if all batches have the same ones and no padding."""
    starts = np.diff(documents, axis=1, prepend=documents[:, :1] - 1) != 0
    if (documents < 0).any() or (starts != starts[:1]).any():
        return None
    return np.append(np.flatnonzero(starts[0]), documents.shape[1]).astype(np.int32)


def _whole(values: Any, name: str, shape: Sequence[int] | None = None) -> Tensor:
    """Integers [B,T] of the whole batch."""
    tensor = torch.as_tensor(values)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        raise refused(name, tensor.dtype, "integers")
    if tensor.ndim != 2:
        raise refused(name, f"{tensor.ndim} dimensions", "the whole batch, [B,T]")
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise refused(name, tuple(tensor.shape), f"{tuple(shape)}, as input_ids")
    return tensor


def _of_prefix_sums(values: Any, name: str, shape: Sequence[int]) -> np.ndarray:
    """Ids of documents [B,T] from transformers' prefix sums, which run over the flattened batch."""
    sums = np.asarray(torch.as_tensor(values).cpu())
    batch, length = shape
    if (sums.ndim != 1 or sums.dtype.kind not in "iu" or len(sums) < 2 or sums[0] != 0
            or sums[-1] != batch * length or (np.diff(sums) < 0).any()):
        raise refused(name, sums.tolist(), f"prefix sums from 0 to {batch * length}")
    ids = np.repeat(np.arange(len(sums) - 1), np.diff(sums)).reshape(batch, length)
    if (ids[1:, 0] == ids[:-1, -1]).any():
        raise refused(name, sums.tolist(), "no document in two batches")
    return ids


def _documents(shape: Sequence[int], position_ids: Tensor | None, attention_mask: Any,
               cu_seq_lens: Mapping[str, Any], seq_idx: Any) -> np.ndarray | None:
    """Ids of documents [B,T], -1 for padding, from all arguments that define documents; None: one
    document without padding."""
    found: dict[str, np.ndarray] = {}
    for name, values in cu_seq_lens.items():
        if values is not None:
            found[name] = _of_prefix_sums(values, name, shape)
    if seq_idx is not None:
        found["seq_idx"] = np.asarray(_whole(seq_idx, "seq_idx", shape).cpu())
        if (found["seq_idx"] < 0).any():
            raise refused("seq_idx", "a negative number", "ids of documents")
    if position_ids is not None and attention_mask is None:
        # As in transformers, a document begins where a position does not follow the one before.
        numbers = np.asarray(position_ids.cpu())
        jumps = np.diff(numbers, axis=1, prepend=numbers[:, :1] - 1) != 1
        found["position_ids"] = np.cumsum(jumps, axis=1)
    same = {name: np.diff(ids, axis=1) != 0 for name, ids in found.items()}
    first = next(iter(found), None)
    for name, changes in same.items():
        if first is not None and (changes != same[first]).any():
            raise refused(name, "other documents", f"the documents of {first}")
    ids = None
    if first is not None and same[first].any():
        ids = found[first].astype(np.int32)
    if attention_mask is not None:
        seen = np.asarray(_whole(attention_mask, "attention_mask", shape).cpu())
        if not np.isin(seen, (0, 1)).all():
            raise refused("attention_mask", f"up to {seen.max()}", "0 or 1")
        if not seen.all():
            ids = np.where(seen == 1, np.zeros(shape, np.int32) if ids is None else ids, -1)
    return None if ids is None else ids.astype(np.int32)


def _counted(documents: np.ndarray | None, shape: Sequence[int]) -> np.ndarray:
    """Positions [B,T], from 0 in every document."""
    index = np.broadcast_to(np.arange(shape[1]), shape)
    if documents is None or (documents < 0).any():
        return index
    starts = np.diff(documents, axis=1, prepend=documents[:, :1] - 1) != 0
    return index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)


def _spec(mesh: Mesh) -> str:
    """The mesh axes of batch and sequence, as the library's own rules have them. Ranks along any other axis
    would count every token again."""
    for name, size in mesh.axes.items():
        if size > 1 and name not in ("fsdp", "dp", "sp", "tp"):
            raise refused("mesh", f"axis {name!r}", '"fsdp", "dp", "sp" and "tp", or a spec')
    batch = "+".join(name for name in ("fsdp", "dp") if name in mesh.axes)
    return f"{batch or '-'},{'sp' if 'sp' in mesh.axes else '-'}"


def shard_batch(input_ids: Any, labels: Any = None, *, mesh: AnyMesh = None,
                layout: str = "zigzag", spec: str | None = None, position_ids: Any = None,
                attention_mask: Any = None, cu_seq_lens_q: Any = None, cu_seq_lens_k: Any = None,
                max_length_q: int | None = None, max_length_k: int | None = None,
                seq_idx: Any = None, num_items_in_batch: int | Tensor | None = None,
                dropout_seed: int | None = None, choices: Options | None = None) -> dict[str, Any]:
    """The rank's part of a batch, as keywords of a model. Collective.

    Takes what transformers' collators return: the whole batch [B,T], the same on all ranks.
    Documents follow from cu_seq_lens_*, seq_idx or position_ids that start anew; padding follows from
    attention_mask. `labels` are the tokens' own labels; the result has them shifted, as "shift_labels",
    and "num_items_in_batch", the number of tokens with a loss in the whole batch.

    - spec: the mesh axes of batch and sequence, by default "fsdp+dp,sp" as far as the mesh has them;
      heads lie on "tp".
    - layout: "contiguous", "zigzag" or "striped".
    - dropout_seed: a new one for every step, the same on all ranks; models with dropout need it.
    - choices: schedule, implementation and the like, as in `annulus.Options`.
    """
    on = mesh_of(mesh)
    error: Exception | None = None
    batch: dict[str, Any] = {}
    try:
        ids = _whole(input_ids, "input_ids")
        shape = tuple(ids.shape)
        positions = None if position_ids is None else torch.as_tensor(position_ids)
        if positions is not None:
            positions = _whole(positions if positions.ndim != 2 else positions.expand(shape[0], -1),
                               "position_ids", shape)
        documents = _documents(shape, positions, attention_mask,
                               {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k},
                               seq_idx)
        for name, most in (("max_length_q", max_length_q), ("max_length_k", max_length_k)):
            longest = int(_counted(documents, shape).max()) + 1
            if most is not None and int(most) < longest:
                raise refused(name, most, f"{longest} or more, as the longest document has")
        if positions is None:
            positions = torch.from_numpy(_counted(documents, shape).copy()).to(ids.device)
        for name in choices or ():
            if name not in _CHOICES:
                raise refused("choices", repr(name), one_of(_CHOICES, name))
        spec = _spec(on) if spec is None else spec
        rows = on.positions(shape, spec, layout=layout)
        if not all(map(len, rows)):
            raise refused("input_ids", shape, f"tokens for every rank of {on.text}")
        indices = [torch.from_numpy(numbers).to(ids.device) for numbers in rows]

        def local(whole: Tensor) -> Tensor:
            return whole.index_select(0, indices[0].to(whole.device)).index_select(
                1, indices[1].to(whole.device))

        batch = {"input_ids": local(ids), "position_ids": local(positions), "use_cache": False}
        if labels is not None:
            shifted = torch.nn.functional.pad(_whole(labels, "labels", shape)[:, 1:], (0, 1),
                                              value=IGNORED)
            count = (shifted != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
            batch |= {"shift_labels": local(shifted), "num_items_in_batch": int(count)}
        heads = "tp" if "tp" in on.axes else "-"
        options = {**(choices or {}), "layout": layout, "query_spec": f"{spec},{heads},-",
                   "kv_spec": f"{spec},{heads},-", "query_length": shape[1], "kv_length": shape[1]}
        batch["annulus"] = Sharding(on, rows, batch["position_ids"], documents, options,
                                    dropout_seed)
    except (TypeError, ValueError, RuntimeError, UserError) as caught:
        error = caught
    on.agree(error)
    def numbers(tensor: Tensor | None) -> np.ndarray | None:
        return None if tensor is None else tensor.cpu().numpy()

    # The library itself finds choices that differ, since ranks plan each call together.
    other = on.differing({
        "input_ids": numbers(ids), "labels": None if labels is None else numbers(shifted),
        "attention_mask": documents, "position_ids": numbers(positions), "dropout_seed": dropout_seed,
        "num_items_in_batch": batch.get("num_items_in_batch")})
    if other is not None:
        raise refused(other, "another one on another rank", "the whole batch on every rank")
    return batch


def loss(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """This rank's part of the mean loss over all tokens of the whole batch. The parts of all ranks add
    up to the loss, and their gradients to its gradient."""
    for name in ("shift_labels", "num_items_in_batch"):
        if name not in batch:
            raise refused("batch", f"none of {name}", "what shard_batch returned for labels")
    sharding = batch.get("annulus")
    if sharding is not None and sharding.cuts_sequences() and not sharding.used:
        raise refused("attn_implementation", "another one", '"annulus": no layer has seen the other ranks')
    labels = batch["shift_labels"]
    if logits.shape[:-1] != labels.shape:
        raise refused("logits", tuple(logits.shape), f"{(*labels.shape, 'vocabulary')}")
    summed = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.to(logits.device).flatten(), ignore_index=IGNORED,
        reduction="sum")
    return summed / batch["num_items_in_batch"]


def sum_over_ranks(tensors: Iterable[Tensor], mesh: AnyMesh = None) -> None:
    """Sums tensors over all ranks of the mesh, in place. Collective.

    Without MPI, torch.distributed sums them if it connects the ranks; otherwise, the tensors must be small.
    """
    on = mesh_of(mesh)
    if on.comm is None:
        return
    by_torch = isinstance(on.comm, Store) and 1 < on.size == torch_size()
    with torch.no_grad():
        for tensor in tensors:
            summed = tensor.detach().to(tensor.device if by_torch else "cpu", copy=True,
                                        dtype=torch.promote_types(tensor.dtype, torch.float32)).contiguous()
            if by_torch:
                torch.distributed.all_reduce(summed)
            else:
                on.sum(summed.numpy())
            tensor.copy_(summed)


def sum_gradients(model: torch.nn.Module, mesh: AnyMesh = None) -> None:
    """Sums the gradients of a model that all ranks hold whole, in place. Collective.

    Only for models without DDP or FSDP, which average gradients themselves: under DDP or FSDP, multiply
    the loss by the number of their ranks instead.
    """
    on = mesh_of(mesh)
    if on.axes.get("tp", 1) > 1:
        raise refused("mesh", on.text, "one without tp, since ranks along tp hold different heads")
    for parameter in model.parameters():
        # A rank without tokens for an expert has no gradient of it, but other ranks may.
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    sum_over_ranks((p.grad for p in model.parameters() if p.grad is not None), on)


@torch.compiler.disable
def attention_forward(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
                      attention_mask: Any, dropout: float = 0.0, scaling: float | None = None,
                      is_causal: bool | None = None, sliding_window: int | None = None,
                      softcap: float | None = None, s_aux: Tensor | None = None,
                      position_ids: Tensor | None = None, annulus: Sharding | None = None,
                      **others: Any) -> tuple[Tensor, None]:
    """Attention of a layer: query [b,n,t,D], key and value [b,k,t,D] of this rank. Collective."""
    for name, given in others.items():
        if name not in _NOT_OURS and given is not None and given is not False:
            raise refused(name, given if isinstance(given, (bool, int, float, str))
                          else type(given).__name__, "none: annulus cannot honour this keyword")
    if not isinstance(annulus, Sharding):
        raise refused("annulus", type(annulus).__name__,
                      "what shard_batch returned, passed on by the model: model(**batch)")
    mask = attention_mask
    if not isinstance(mask, _hf_mask.Mask):
        raise refused("attention_mask", type(mask).__name__,
                      "none from the caller (padding goes to shard_batch), and a model that makes "
                      "its masks by transformers.masking_utils")
    if is_causal is not None and bool(is_causal) != mask.causal:
        raise refused("is_causal", is_causal, f"{mask.causal}, as the model's mask has it")
    if sliding_window is not None and sliding_window != mask.sliding_window:
        raise refused("sliding_window", sliding_window,
                      f"{mask.sliding_window}, as the model's mask has it")
    if key.shape[2] != query.shape[2]:
        raise refused("use_cache", f"{key.shape[2]} keys for {query.shape[2]} queries",
                      "no cache of keys")
    for positions in (position_ids, mask.positions):
        if positions is not None:
            annulus.check_positions(positions)
    seed = None
    if dropout:
        if annulus.seed is None:
            raise refused("dropout", dropout, "0, or a dropout_seed in shard_batch")
        seed = (annulus.seed * 1_000_003 + (getattr(module, "layer_idx", None) or 0)) % 2**63
    sinks = None
    if s_aux is not None:
        # The library sums this gradient over the ranks, and the trainer will sum it again.
        sinks = s_aux.float().view_as(s_aux)
        if sinks.requires_grad:
            holders = annulus.holders()
            sinks.register_hook(lambda gradient: gradient / holders)
    annulus.used = True
    text = annulus.options(mask, scaling, softcap, float(dropout))
    out, _ = run_operator(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), sinks,
                          None, None, seed, annulus.mesh.text, text)
    return out, None


AttentionInterface.register("annulus", attention_forward)
AttentionMaskInterface.register("annulus", torch.compiler.disable(_hf_mask.read))

__all__ = ["IGNORED", "Sharding", "attention_forward", "loss", "shard_batch", "sum_gradients",
           "sum_over_ranks"]
