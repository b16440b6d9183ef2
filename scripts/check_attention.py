#!/usr/bin/env python3
"""Checks an attention output file against NumPy in float64.

    scripts/check_attention.py --query q.npy --key k.npy --value v.npy --causal \\
        --output o.npy --lse lse.npy

The options have the meaning and the spelling of `annulus run`; nothing of its code is used. Rows
are computed block by block, so memory stays small. Prints the relative Frobenius error of the
output beside its bound, and the largest share that the error of an output row or its LSE has of the
row's own bound (docs/semantics.md, section 6). An output of --normalize-output false is divided by
--sum first, --maximum + log(--sum) is its LSE, and the maximum has the bound of the LSE.
With --grad-output, the gradients of query, key and value are checked too (attention_gradients.py).
Exit code: 0 within the bounds, 4 over, 2 usage.
"""

import argparse
import json
import math
import os
import sys
from dataclasses import dataclass

import numpy as np

from attention_gradients import NAMES, Gradients

SAFETENSORS_DTYPES = {
    "BOOL": "?", "U8": "u1", "I32": "<i4", "F16": "<f2", "BF16": "<u2", "F32": "<f4",
    "F64": "<f8",
}


def usage_error(message):
    print(f"check_attention: {message}", file=sys.stderr)
    sys.exit(2)


def load(path, tensor=None):
    """The array in a .npy file, or a tensor of a .safetensors file. bfloat16 comes as its bits."""
    try:
        if not path.endswith(".safetensors"):
            array = np.load(path, mmap_mode="r")
            # ml_dtypes writes bfloat16 as two bytes of unknown type.
            return array.view("<u2") if array.dtype == np.dtype("V2") else array
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        if tensor not in header:
            usage_error(f"{path}: no tensor '{tensor}' among {', '.join(header)}")
        entry = header[tensor]
        begin, end = entry["data_offsets"]
        dtype = np.dtype(SAFETENSORS_DTYPES[entry["dtype"]])
        if begin == end:
            return np.zeros(entry["shape"], dtype)
        data = np.memmap(path, dtype, "r", 8 + length + begin, (end - begin) // dtype.itemsize)
        return data.reshape(entry["shape"])
    except (OSError, ValueError, KeyError) as error:
        usage_error(f"{path}: {error}")


def size(text):
    """4k, 1M and 2G are powers of 1024, 1e6 is a million."""
    sign = -1 if text.startswith("-") else 1
    text = text.lstrip("-")
    unit = {"k": 1 << 10, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 0)
    return sign * (int(text[:-1]) * unit if unit else int(float(text)))


def widened(array):
    """float64 values; uint16 is bfloat16 bits."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def finite(array, name):
    """float64 values of an input: what NaN and infinity should give is not what this checks."""
    values = widened(array)
    if not np.isfinite(values).all():
        usage_error(f"{name} holds NaN or infinity: only finite inputs are checked")
    return values


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    for name in ("query", "key", "value", "cu-seqlens", "cu-seqlens-q", "cu-seqlens-kv",
                 "q-lengths", "kv-lengths", "q-segments", "kv-segments"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--input", help=".safetensors file with query, key and value")
    parser.add_argument("--output", required=True, help="the output to check")
    parser.add_argument("--lse", help="the LSE to check, float32 [B,N,T]")
    parser.add_argument("--normalize-output", choices=["true", "false"], default="true")
    parser.add_argument("--maximum", help="with --normalize-output false: to check, float32 [B,N,T]")
    parser.add_argument("--sum", help="likewise")
    parser.add_argument("--grad-output", help="gradient of the loss with respect to the output")
    parser.add_argument("--grad-lse", help="the same for the LSE, float32 [B,N,T] (default: 0)")
    for name in NAMES:
        parser.add_argument(f"--grad-{name}", help="a gradient to check, with --grad-output")
    parser.add_argument("--layout", choices=["bthd", "bhtd"], default="bthd")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--causal-offset", default="0", metavar="N|top-left|bottom-right|FILE")
    parser.add_argument("--window", metavar="L[,R]", help="--window=-1,0 when L is negative")
    parser.add_argument("--prefix", default="0", metavar="N|FILE")
    parser.add_argument("--sink-tokens", type=size, default=0)
    parser.add_argument("--chunk", type=size)
    parser.add_argument("--scale", type=float)
    parser.add_argument("--soft-cap", type=float)
    parser.add_argument("--dropout", type=float, default=0)
    parser.add_argument("--seed", type=int, default=0, help="seed for --dropout")
    parser.add_argument("--block-mask", help="bool, broadcastable to [B,N,T/Q,S/K], rounded up")
    parser.add_argument("--block-size", default="128", metavar="Q[,K]")
    parser.add_argument("--mask", help="bool, broadcastable to [B,N,T,S]")
    parser.add_argument("--bias", help="float32, broadcastable to [B,N,T,S]")
    parser.add_argument("--sinks", help="float32 [N,M] or [M]")
    arguments = parser.parse_args()
    unnormalised = arguments.normalize_output == "false"
    if unnormalised != (arguments.maximum is not None) or unnormalised != (
            arguments.sum is not None):
        usage_error("--normalize-output false comes with --maximum and --sum, and only that")
    if unnormalised and arguments.lse is not None:
        usage_error("--lse: an output of --normalize-output false has --maximum and --sum instead")
    if unnormalised and arguments.grad_output:
        usage_error("--grad-output: an output of --normalize-output false has no gradients")
    for name in ("lse", *NAMES):
        if getattr(arguments, f"grad_{name}") and not arguments.grad_output:
            usage_error(f"--grad-{name} needs --grad-output")
    if arguments.grad_output and not any(getattr(arguments, f"grad_{name}") for name in NAMES):
        usage_error("--grad-output needs a gradient to check: " +
                    ", ".join(f"--grad-{name}" for name in NAMES))
    return arguments


class Problem:
    """Query, key and value as [B,T,N,D], and everything that decides which keys a query sees."""

    def __init__(self, arguments):
        self.layout = arguments.layout
        self.query, self.key, self.value = (
            self.to_bthd(self.operand(arguments, name)) for name in ("query", "key", "value"))
        self.batch, self.rows, self.heads, self.width = self.query.shape
        self.columns, self.kv_heads = self.key.shape[1:3]
        self.value_width = self.value.shape[3]
        consistent = (
            self.key.shape == (self.batch, self.columns, self.kv_heads, self.width)
            and self.value.shape[:3] == self.key.shape[:3]
            and self.kv_heads > 0 and self.heads % self.kv_heads == 0
            and self.query.dtype == self.key.dtype == self.value.dtype)
        if not consistent:
            usage_error("query, key and value do not fit together: "
                        f"{self.query.shape}, {self.key.shape}, {self.value.shape}")
        self.scale = arguments.scale if arguments.scale is not None else 1 / math.sqrt(self.width)
        self.soft_cap = arguments.soft_cap
        self.dropout = round(arguments.dropout * 65536)
        self.seed = arguments.seed
        self.causal = arguments.causal
        self.left, self.right = self.window(arguments.window)
        self.prefix = self.by_batch(arguments.prefix)
        self.sink_tokens, self.chunk = arguments.sink_tokens, arguments.chunk
        self.place(arguments)
        self.q_segments, self.kv_segments = self.segments(arguments)
        self.q_lengths = self.lengths(arguments.q_lengths, self.rows)
        self.kv_lengths = self.lengths(arguments.kv_lengths, self.columns)
        shape = (self.batch, self.heads, self.rows, self.columns)
        self.mask = np.broadcast_to(load(arguments.mask), shape) if arguments.mask else None
        self.q_block, self.kv_block = self.block_size(arguments.block_size)
        self.blocks = self.block_mask(arguments.block_mask)
        self.bias = np.broadcast_to(load(arguments.bias), shape) if arguments.bias else None
        sinks = load(arguments.sinks) if arguments.sinks else np.zeros((self.heads, 0))
        self.sinks = np.broadcast_to(sinks, (self.heads, sinks.shape[-1])).astype(np.float64)

    @staticmethod
    def operand(arguments, name):
        path = getattr(arguments, name)
        if path is None and arguments.input is None:
            usage_error(f"--{name} or --input is needed")
        array = load(path or arguments.input, name)
        if array.ndim != 4:
            usage_error(f"{name} has shape {array.shape}, expected 4 dimensions")
        return array

    def to_bthd(self, array):
        return array.transpose(0, 2, 1, 3) if self.layout == "bhtd" else array

    def by_batch(self, text):
        """A number, or a file with one per batch row."""
        values = load(text) if text.endswith((".npy", ".safetensors")) else size(text)
        return np.broadcast_to(values, (self.batch,)).astype(np.int64)

    def place(self, arguments):
        """row_place [B,T]: the key place on the diagonal of each row. key_place [S]. Places count
        inside documents if queries and keys have packings of their own."""
        offset = arguments.causal_offset
        self.key_place = np.arange(self.columns)
        self.packed = arguments.cu_seqlens_q is not None
        if arguments.cu_seqlens_q is None:
            if offset in ("top-left", "bottom-right"):
                offset = str(self.columns - self.rows if offset == "bottom-right" else 0)
            self.row_place = np.arange(self.rows) + self.by_batch(offset)[:, None]
            return
        if offset not in ("top-left", "bottom-right"):
            usage_error("--cu-seqlens-q needs --causal-offset top-left or bottom-right")
        q, kv = np.asarray(load(arguments.cu_seqlens_q)), np.asarray(load(arguments.cu_seqlens_kv))
        longer = np.diff(kv) - np.diff(q) if offset == "bottom-right" else 0 * np.diff(q)
        row_place = np.arange(self.rows) + np.repeat(longer - q[:-1], np.diff(q))
        self.row_place = np.broadcast_to(row_place, (self.batch, self.rows))
        self.key_place = self.key_place - np.repeat(kv[:-1], np.diff(kv))

    @staticmethod
    def window(text):
        if text is None:
            return None, None
        sides = [size(side) for side in text.split(",")]
        left, right = sides if len(sides) == 2 else (sides[0], sides[0])
        return (None if left == -1 else left), (None if right == -1 else right)

    def segments(self, arguments):
        if arguments.cu_seqlens:
            bounds = np.asarray(load(arguments.cu_seqlens))
            if bounds[0] != 0 or bounds[-1] != self.rows or self.rows != self.columns:
                usage_error(f"cu_seqlens {bounds} with T={self.rows}, S={self.columns}")
            ids = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
            ids = np.broadcast_to(ids, (self.batch, self.rows))
            return ids, ids
        if arguments.cu_seqlens_q:
            return tuple(
                np.broadcast_to(np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)),
                                (self.batch, bounds[-1]))
                for bounds in (load(arguments.cu_seqlens_q), load(arguments.cu_seqlens_kv)))
        if (arguments.q_segments is None) != (arguments.kv_segments is None):
            usage_error("--q-segments and --kv-segments come together")
        if arguments.q_segments is None:
            return None, None
        return load(arguments.q_segments), load(arguments.kv_segments)

    @staticmethod
    def block_size(text):
        sizes = [size(part) for part in text.split(",")]
        return sizes[0], sizes[-1]

    def block_mask(self, path):
        if path is None:
            return None
        grid = (self.batch, self.heads, -(-self.rows // self.q_block),
                -(-self.columns // self.kv_block))
        return np.broadcast_to(load(path, "block_mask"), grid).astype(bool)

    def lengths(self, path, default):
        return np.asarray(load(path)) if path else np.full(self.batch, default)

    def near(self, b, rows, columns):
        """The pairs that causal, window, chunk, sink tokens and prefix show."""
        i = self.row_place[b][rows][:, None]
        j = self.key_place[columns][None, :]
        seen = np.ones((len(rows), len(columns)), bool)
        if self.left is not None:
            seen &= j >= i - self.left
        if self.right is not None:
            seen &= j <= i + self.right
        if self.chunk is not None:
            seen &= i // self.chunk == j // self.chunk
        seen |= j < self.sink_tokens
        if self.causal:
            seen &= j <= i
        return seen | (j < self.prefix[b])

    def column_range(self, b, begin, end):
        """Columns outside it are invisible to all rows in [begin, end), by position."""
        plain = self.chunk is None and self.sink_tokens == 0 and not self.prefix.any()
        if not plain or self.packed or end == begin:
            return 0, self.columns
        first, behind = self.row_place[b][begin], self.row_place[b][end - 1] + 1
        low, high = 0, self.columns
        if self.left is not None:
            low = first - self.left
        if self.right is not None:
            high = min(high, behind + self.right)
        if self.causal:
            high = min(high, behind)
        low = min(max(low, 0), self.columns)
        return low, min(max(high, low), self.columns)

    def visible(self, b, n, rows, columns):
        j = columns[None, :]
        seen = self.near(b, rows, columns) & (j < self.kv_lengths[b])
        seen = seen & (rows[:, None] < self.q_lengths[b])
        if self.q_segments is not None:
            q, kv = self.q_segments[b][rows][:, None], self.kv_segments[b][columns][None, :]
            seen &= (q == kv) & (q >= 0)
        if self.blocks is not None:
            seen &= self.blocks[b, n][np.ix_(rows // self.q_block, columns // self.kv_block)]
        if self.mask is not None:
            seen &= self.mask[b, n][np.ix_(rows, columns)].astype(bool)
        return seen

    def dropped(self, b, n, rows, columns):
        """Which probabilities drop, by sixteen bits each of Philox 4x32-10 (Salmon et al. 2011)."""
        i, j = np.broadcast_arrays(rows[:, None], columns[None, :])
        low = np.uint64(0xFFFFFFFF)
        words = [np.broadcast_to(np.asarray(word, np.uint64), i.shape)
                 for word in (j // 32 * 4 + j % 8 // 2, i, n, b + 0x64726F70)]
        key = [self.seed & 0xFFFFFFFF, self.seed >> 32]
        for _ in range(10):
            even, odd = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
            words = [odd >> np.uint64(32) ^ words[1] ^ np.uint64(key[0]), odd & low,
                     even >> np.uint64(32) ^ words[3] ^ np.uint64(key[1]), even & low]
            key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
        word = np.choose(j % 32 // 8, words)
        return (word >> np.asarray(j % 2 * 16, np.uint64) & np.uint64(0xFFFF)) < self.dropout

    def probabilities(self, b, n, key, begin, end):
        """The Expected of rows [begin, end) of one head, before attend()."""
        low, high = self.column_range(b, begin, end)
        rows, columns = np.arange(begin, end), np.arange(low, high)
        query = finite(self.query[b, begin:end, n], "query")
        logits = query @ key[low:high].T
        logits *= self.scale
        capped = np.zeros_like(logits)
        if self.soft_cap is not None:
            logits = self.soft_cap * np.tanh(logits / self.soft_cap)
            capped = np.abs(logits)
        before_bias = logits.copy() if self.soft_cap is not None else logits
        bias = np.zeros((1, 1))
        if self.bias is not None:
            bias = self.bias[b, n, begin:end, low:high].astype(np.float64)
            logits += bias
        visible = self.visible(b, n, rows, columns)
        logits[~visible] = -np.inf
        seen = visible & (logits > -np.inf)
        dots = np.max(np.abs(query) @ np.abs(key[low:high]).T, axis=1, where=seen, initial=0)
        capped = np.max(capped, axis=1, where=seen, initial=0)
        biases = np.max(np.broadcast_to(np.abs(bias), seen.shape), axis=1, where=seen, initial=0)
        sinks = np.broadcast_to(self.sinks[n], (end - begin, self.sinks.shape[1]))
        largest = np.max(np.concatenate([logits, sinks], axis=1), axis=1, initial=-np.inf,
                         keepdims=True)
        # A row that sees nothing has no finite maximum; its weights are all zero.
        shift = np.where(np.isfinite(largest), largest, 0)
        weights = np.exp(logits - shift)
        total = weights.sum(axis=1) + np.exp(sinks - shift).sum(axis=1)
        with np.errstate(divide="ignore"):
            lse = np.log(total) + shift[:, 0]
        kept = np.ones((1, 1))
        if self.dropout > 0:
            kept = ~self.dropped(b, n, rows, columns) / (1 - self.dropout / 65536)
        weights /= np.where(total > 0, total, 1)[:, None]
        return Expected((begin, end), (low, high), query, weights, kept, before_bias, lse,
                        largest[:, 0], abs(self.scale) * dots, capped, biases)


@dataclass
class Expected:
    """Some rows of a head over the columns that they may see, and the sizes of their terms."""
    rows: tuple
    columns: tuple
    query: np.ndarray
    probabilities: np.ndarray
    kept: np.ndarray            # 0 or 1/(1 - p) by dropout
    capped: np.ndarray          # logits under a soft cap, before the bias
    lse: np.ndarray
    maximum: np.ndarray
    dot: np.ndarray             # scale · the largest Σ|qᵢkᵢ|
    largest_capped: np.ndarray  # the largest |logit| under a soft cap, before the bias
    bias: np.ndarray            # the largest |bias|

    def attend(self, value):
        weights, value = self.probabilities * self.kept, value[slice(*self.columns)]
        norms = np.linalg.norm(value, axis=1)
        self.output = weights @ value
        self.root_square = np.linalg.norm(weights * norms, axis=1)  # √Σ p²‖v‖²
        self.sum = weights @ norms                                  # Σ p‖v‖


class Bounds:
    """The errors that docs/semantics.md, section 6, allows."""

    def __init__(self, problem, normalised):
        dtype = problem.query.dtype
        if dtype == np.float64 and not normalised:
            dtype = np.dtype(np.float32)  # as the sum that an unnormalised output is divided by
        growth = math.sqrt(math.log2(max(problem.columns, 2)))
        known = {"float64": (1e-14 * growth, 1e-14 * growth), "float32": (2e-6 * growth, 2**-24),
                 "float16": (1e-3, 2**-11), "uint16": (6e-3, 2**-8)}
        if dtype.name not in known:
            usage_error(f"query of dtype {dtype}; expected float64, float32, float16 or bfloat16 "
                        "(as uint16)")
        self.output, self.roundoff = known[dtype.name]
        self.lse = 2e-3 if dtype.itemsize == 2 and problem.soft_cap is not None else 1e-5
        self.summed = 2**-53 if dtype == np.float64 else 2**-24
        self.root_width = math.sqrt(problem.width)
        self.subnormal = 2**-25 * math.sqrt(problem.value_width) if dtype == np.float16 else 0

    def of_rows(self, rows):
        """The largest shares of the bounds, of rows and of their LSEs."""
        logit = self.summed * (self.root_width * rows.dot + 2 * rows.bias + 8 * rows.largest_capped)
        scale = rows.root_square + np.linalg.norm(rows.output, axis=1)
        output = ((4 * self.roundoff + logit) * scale + 8 * self.summed * rows.sum
                  + 4 * self.subnormal)
        return output, self.lse + 2**-24 * self.root_width * rows.dot


def largest_share(errors, allowed):
    """The largest ratio of an error to its bound; an error of 0 is within a bound of 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(errors == 0, 0, errors / allowed)
    return float(np.max(np.where(np.isnan(shares), np.inf, shares), initial=0))


class Comparison:
    def __init__(self, bounds, names):
        self.bounds = bounds
        self.difference = self.norm = 0.0
        self.shares = dict.fromkeys(names, 0.0)  # by name: the largest share of a row's bound

    def add_share(self, name, errors, allowed):
        self.shares[name] = max(self.shares[name], largest_share(errors, allowed))

    def add_output(self, actual, rows):
        squares = np.sum((actual - rows.output) ** 2, axis=1)
        self.difference += float(np.sum(squares))
        self.norm += float(np.sum(rows.output**2))
        self.add_share("row", np.sqrt(squares), self.bounds.of_rows(rows)[0])

    def add_of_rows(self, name, actual, rows):
        """Compares the LSE or the maximum."""
        expected = getattr(rows, name)
        same = actual == expected  # −inf and −inf, whose difference is no number
        errors = np.where(same, 0, np.abs(actual - np.where(same, 0, expected)))
        self.add_share(name, errors, self.bounds.of_rows(rows)[1])

    def relative_error(self):
        if self.difference == 0:
            return 0.0
        return math.sqrt(self.difference / self.norm) if self.norm > 0 else math.inf


class Results:
    """Computed results: output, and LSE or, unnormalised, maximum and sum; None if not given."""

    def __init__(self, arguments, problem):
        self.output = problem.to_bthd(load(arguments.output, "output"))
        expected = (problem.batch, problem.rows, problem.heads, problem.value_width)
        if self.output.shape != expected or self.output.dtype != problem.query.dtype:
            usage_error(f"{arguments.output}: {self.output.dtype} {self.output.shape}, "
                        f"expected {problem.query.dtype} {expected}")
        self.lse, self.maximum, self.sum = (
            self.of_rows(getattr(arguments, name), name, problem)
            for name in ("lse", "maximum", "sum"))

    @staticmethod
    def of_rows(path, name, problem):
        if path is None:
            return None
        array = load(path, name)
        if array.shape != (problem.batch, problem.heads, problem.rows):
            usage_error(f"{path}: shape {array.shape}, expected [B,N,T]")
        return array

    def add_to(self, comparison, b, n, rows, expected):
        """Compares some rows of one head with the Expected."""
        output = widened(self.output[b, rows, n])
        if self.lse is not None:
            comparison.add_of_rows("lse", self.lse[b, n, rows].astype(np.float64), expected)
        if self.sum is not None:
            total = self.sum[b, n, rows].astype(np.float64)
            maximum = self.maximum[b, n, rows].astype(np.float64)
            output = output / np.where(total == 0, 1, total)[:, None]
            with np.errstate(divide="ignore"):
                comparison.add_of_rows("lse", maximum + np.log(total), expected)
            comparison.add_of_rows("maximum", maximum, expected)
        comparison.add_output(output, expected)


def gradients_of(arguments, problem):
    """None without --grad-output."""
    if not arguments.grad_output:
        return None
    shapes = dict(zip(NAMES, (problem.query.shape, problem.key.shape, problem.value.shape)))

    def array(path, name, shape):
        if path is None:
            return None
        found = load(path, name)
        found = found if name == "grad_lse" else problem.to_bthd(found)
        if found.shape != shape:
            usage_error(f"{path}: shape {found.shape}, expected {shape}")
        return found

    output = (*problem.query.shape[:3], problem.value_width)
    return Gradients(
        {name: array(getattr(arguments, f"grad_{name}"), f"grad_{name}", shapes[name])
         for name in NAMES},
        array(arguments.grad_output, "grad_output", output),
        array(arguments.grad_lse, "grad_lse", (problem.batch, problem.heads, problem.rows)))


def compare(problem, results, gradients):
    names = ["row"]
    if results.lse is not None or results.sum is not None:
        names.append("lse")
    if results.maximum is not None:
        names.append("maximum")
    comparison = Comparison(Bounds(problem, normalised=results.sum is None), names)
    # About 32 MiB per block of logits, of which a few exist at once.
    block = max(1, (1 << 22) // max(problem.columns, 1))
    for b in range(problem.batch):
        for kv_head in range(problem.kv_heads):
            key = finite(problem.key[b, :, kv_head], "key")
            value = finite(problem.value[b, :, kv_head], "value")
            group = problem.heads // problem.kv_heads
            if gradients is not None:
                gradients.begin_kv_head(key, value)
            for n in range(kv_head * group, (kv_head + 1) * group):
                for begin in range(0, problem.rows, block):
                    end = min(begin + block, problem.rows)
                    parts = problem.probabilities(b, n, key, begin, end)
                    parts.attend(value)
                    results.add_to(comparison, b, n, slice(begin, end), parts)
                    if gradients is not None:
                        gradients.add_rows(problem, b, n, parts, widened)
            if gradients is not None:
                gradients.end_kv_head(b, kv_head, widened)
    return comparison


def main():
    arguments = parse_arguments()
    problem = Problem(arguments)
    results = Results(arguments, problem)
    gradients = gradients_of(arguments, problem)
    comparison = compare(problem, results, gradients)
    output_bound = comparison.bounds.output
    error = comparison.relative_error()
    good = error <= output_bound
    print(f"# {os.path.basename(arguments.output)} against NumPy float64")
    print(f"output  relative Frobenius error {error:.3e}  bound {output_bound:.3e}  "
          f"{'ok' if good else 'WRONG'}")
    shares = [(f"{name:<7} largest share of a row's bound", share)
              for name, share in comparison.shares.items()]
    if gradients is not None:
        shares += [(f"grad_{name:<5} share of its bound", share)
                   for name, share in gradients.shares(output_bound)]
    for text, share in shares:
        right = share <= 1
        good = good and right
        print(f"{text} {share:.3f}  {'ok' if right else 'WRONG'}")
    return 0 if good else 4


if __name__ == "__main__":
    sys.exit(main())
