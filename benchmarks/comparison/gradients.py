"""How far the gradients of each system are from float64 gradients."""

import os
import tempfile
from typing import Any, Callable, Optional, Sequence

import numpy as np

from peers.gradient_files import OPERANDS, from_bits, read_operands
from peers.peer_cases import Case

from . import systems
from .results import OURS, PEERS


def write_operands(folder: str, case: Case, batch: int) -> None:
    """Writes normally distributed values, cut off to bfloat16."""
    random = np.random.default_rng(1)
    for name in OPERANDS:
        heads = case.kv_heads if name in ("key", "value") else case.heads
        shape = (batch, case.length, heads, case.head_dim)
        numbers = random.standard_normal(shape, np.float32)
        np.save(os.path.join(folder, name + ".npy"), (numbers.view(np.uint32) >> 16).astype(np.uint16))


def exact_gradients(case: Case, operands: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Gradients of query, key and value, in float64, head by head."""
    query, key, value, grad_output = (operands[name].astype(np.float64) for name in OPERANDS)
    found = [np.zeros_like(tensor) for tensor in (query, key, value)]
    scale = case.head_dim**-0.5
    hidden = np.triu(np.ones((case.length, case.length), bool), 1) if case.causal else None
    for b, n in np.ndindex(query.shape[0], case.heads):
        k = n * case.kv_heads // case.heads
        q, g = query[b, :, n], grad_output[b, :, n]
        weights = scale * (q @ key[b, :, k].T)
        if hidden is not None:
            weights[hidden] = -np.inf
        weights = np.exp(weights - weights.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        by_weight = g @ value[b, :, k].T
        by_logit = weights * (by_weight - (weights * by_weight).sum(axis=1, keepdims=True))
        found[0][b, :, n] = scale * (by_logit @ key[b, :, k])
        found[1][b, :, k] += scale * (by_logit.T @ q)
        found[2][b, :, k] += weights.T @ g
    return found


def errors(found: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> list[float]:
    """The errors relative to the norms of the exact gradients (Frobenius)."""
    return [float(np.linalg.norm(one - truth) / np.linalg.norm(truth))
            for one, truth in zip(found, exact)]


def words_of_run(annulus: str, device: str, dtype: str, case: Case,
                 path: Callable[[str], str]) -> list[str]:
    """annulus run, which reads operands and writes output and gradients. `path` names the files."""
    words = [annulus, "run", "--device", device, "--dtype", dtype]
    for name in ("output", *OPERANDS, *(f"grad_{name}" for name in OPERANDS[:3])):
        words += [f"--{name.replace('_', '-')}", path(name)]
    return [*words, "--causal"] if case.causal else words


def _our_start(setup: systems.Setup, case: Case, ranks: int, folder: str) -> systems.Start:
    words = words_of_run(setup.annulus, "cuda", "bfloat16", case,
                         lambda name: os.path.join(folder, name + ".npy"))
    if ranks > setup.gpus:
        words.append("--share-gpus")
    return systems.Start(OURS, (*setup.mpirun, "-np", str(ranks), *words, *setup.annulus_options),
                         (case,))


def measure(setup: systems.Setup, case: Case,
            log: Callable[[str], None]) -> list[dict[str, Any]]:
    """One entry for each series and number of ranks: its errors, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        return _measure_in(folder, setup, case, log)


def _measure_in(folder: str, setup: systems.Setup, case: Case,
                log: Callable[[str], None]) -> list[dict[str, Any]]:
    write_operands(folder, case, setup.batch)
    exact = exact_gradients(case, read_operands(folder))
    entries: list[dict[str, Any]] = []

    def run(start: systems.Start) -> Optional[str]:
        log(systems.shown(start.words))
        return systems.run(start, setup.timeout)[1]

    def add(series: str, ranks: int, failure: Optional[str],
            read: Callable[[], list[np.ndarray]]) -> None:
        entry: dict[str, Any] = {"series": series, "ranks": ranks}
        if failure is None:
            try:
                entry["errors"] = errors(read(), exact)
            except (OSError, ValueError, KeyError) as error:
                failure = f"no gradients: {type(error).__name__}"
        if failure is not None:
            entry["error"] = failure
        entries.append(entry)

    # GPUs are shared where there are more ranks.
    for ranks in (1, *(setup.gpus * factor for factor in (1, 2, 4))):
        if ranks == 1 and entries:
            continue
        paths = [os.path.join(folder, f"grad_{name}.npy") for name in OPERANDS[:3]]
        failure = run(_our_start(setup, case, ranks, folder))
        add(OURS, ranks, failure, lambda: [from_bits(np.load(path)) for path in paths])
    for start in systems.peer_starts(setup, [case], ["--tensors", folder]):
        failure = run(start)
        for series in (one for one in systems.SERIES[start.system] if one in PEERS):
            path = os.path.join(folder, f"{series}-{setup.gpus}.npz")

            def read(path: str = path) -> list[np.ndarray]:
                with np.load(path) as file:
                    return [file[name] for name in OPERANDS[:3]]

            add(series, setup.gpus, failure, read)
    return entries
