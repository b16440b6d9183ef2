"""Attention in float64 with NumPy, with the gradients, independent of the library."""

import numpy as np


def logits_mask(query_length, kv_length, causal=False, offset=0, window=None, segments=None,
                kv_lengths=None, batch=1):
    """The pairs that are visible, [B,1,T,S]."""
    i = np.arange(query_length)[:, None] + offset
    j = np.arange(kv_length)[None, :]
    seen = np.ones((batch, query_length, kv_length), bool)
    if causal:
        seen &= j <= i
    if window is not None:
        left, right = window
        if left >= 0:
            seen &= j >= i - left
        if right >= 0:
            seen &= j <= i + right
    if segments is not None:
        segments = np.asarray(segments)
        seen &= (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] >= 0)
    if kv_lengths is not None:
        seen &= j[None] < np.asarray(kv_lengths)[:, None, None]
    return seen[:, None]


def attention(q, k, v, seen, *, scale=None, soft_cap=None, sinks=None, bias=None, grad=None):
    """Output and LSE; given the output's gradient, also gradients of query, key, value, sinks, bias."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    keys, values = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    raw = scale * np.einsum("btnd,bsnd->bnts", q, keys)
    capped = raw if soft_cap is None else soft_cap * np.tanh(raw / soft_cap)
    s = np.where(seen, capped + (0 if bias is None else bias), -np.inf)
    top = s.max(-1, keepdims=True)
    if sinks is not None:
        extra = np.broadcast_to(sinks.astype(np.float64)[None, :, None, :],
                                (*s.shape[:3], sinks.shape[1]))
        top = np.maximum(top, extra.max(-1, keepdims=True))
    top = np.where(np.isfinite(top), top, 0)
    e = np.exp(s - top)
    total = e.sum(-1, keepdims=True)
    if sinks is not None:
        sink_weights = np.exp(extra - top)
        total = total + sink_weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = np.where(total > 0, e / total, 0)
        lse = (top + np.log(total))[..., 0]
    out = np.einsum("bnts,bsnd->btnd", p, values)
    if grad is None:
        return out, lse
    grad = grad.astype(np.float64)
    delta = np.einsum("btnd,btnd->bnt", grad, out)[..., None]
    dp = np.einsum("btnd,bsnd->bnts", grad, values)
    ds = p * (dp - delta)
    raw_ds = ds if soft_cap is None else ds * (1 - (capped / soft_cap) ** 2)
    dq = scale * np.einsum("bnts,bsnd->btnd", raw_ds, keys)
    dk = scale * np.einsum("bnts,btnd->bsnd", raw_ds, q)
    dv = np.einsum("bnts,btnd->bsnd", p, grad)

    def of_group(x):
        b, length, n, d = x.shape
        return x.reshape(b, length, n // group, group, d).sum(3)

    dsinks = None if sinks is None else -(sink_weights / total * delta).sum((0, 2))
    return out, lse, dq, of_group(dk), of_group(dv), dsinks, ds
