"""Results as a Markdown table."""

from typing import Any, Optional

from peers.peer_cases import HEAD_DIM, OPERATIONS_PER_LOGIT_AND_DIM, PASSES

from .results import (BEFORE, CEILING, FROM_JAX, FROM_TORCH, OURS, PEERS, TITLES, CaseResults,
                      Results)


def length_text(length: int) -> str:
    """8192 as 8k."""
    for unit, suffix in ((1 << 20, "M"), (1 << 10, "k")):
        if length % unit == 0:
            return f"{length // unit}{suffix}"
    return str(length)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


# The text for each of PASSES.
_TEXTS = {"forward": "forward", "backward": "backward", "both": "forward and backward together"}


def markdown(results: Results) -> str:
    """One table for each pass, one row for each case. A series without any result is shown as failed;
    the reason follows below."""
    parts = [_table(results, timed) for timed in results.timed]
    if results.gradients:
        parts.append(_gradients_table(results.gradients["case"], results.gradients["entries"]))
    if failures := _failures(results):
        parts.append("\n".join(failures) + "\n")
    return "\n".join(parts)


def _table(results: Results, timed: str) -> str:
    settings = results.settings
    header = ["N/K", "mask", "S", TITLES[OURS]]
    if _is_against(results):
        header += [TITLES[BEFORE], "time / before"]
    else:
        header += ["ours / best peer", *(TITLES[one] for one in PEERS)]
    for series in _from_python(results):
        header += [TITLES[series], "/ ours"]
    if timed != "both":
        header += [TITLES[CEILING], "ours / local kernel"]
    products = PASSES[timed] * OPERATIONS_PER_LOGIT_AND_DIM
    warm = settings.get("warm_seconds", 0)
    lines = [f"TFLOP/s per GPU on {settings['gpus']} GPUs{_gpu_names(results)}: {_TEXTS[timed]}, "
             f"{settings['dtype']}, B = {settings['batch']}, D = {HEAD_DIM} unless N/K/D is given, "
             f"{products:g}·B·N·S²·D operations, half of them when causal. Medians of "
             f"{_counted(settings['rounds'], 'round')} of {_counted(settings['iters'], 'call')}"
             f"{f' after {warm:g} s of others' if warm else ''}; systems take turns within a round.",
             "", _row(header), _row(["---"] * len(header))]
    lines += [_row(_cells(results, entry, timed)) for entry in results.cases]
    return "\n".join(lines) + "\n"


def _is_against(results: Results) -> bool:
    """True if another build of Annulus was measured, in place of the peers."""
    return any(BEFORE in entry.systems for entry in results.cases)


def _from_python(results: Results) -> list[str]:
    return [series for series in (FROM_TORCH, FROM_JAX)
            if any(series in entry.systems for entry in results.cases)]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(results: Results, entry: CaseResults, timed: str) -> list[str]:
    ours = results.rate(entry, OURS, timed)
    cells = [entry.case.shape, entry.case.mask, length_text(entry.case.length),
             _rate(results, entry, OURS, timed)]
    if _is_against(results):
        before = results.rate(entry, BEFORE, timed)
        cells += [_rate(results, entry, BEFORE, timed),
                  f"{before / ours:.3f}" if ours and before else "-"]
    else:
        cells += [_ratio(ours, results.best_peer(entry, timed)),
                  *(_rate(results, entry, peer, timed) for peer in PEERS)]
    for series in _from_python(results):
        cells += [_rate(results, entry, series, timed),
                  _ratio(results.rate(entry, series, timed), ours)]
    if timed != "both":
        ceiling = results.rate(entry, CEILING, timed)
        cells += [_rate(results, entry, CEILING, timed), _ratio(ours, ceiling)]
    return cells


def _rate(results: Results, entry: CaseResults, series: str, timed: str) -> str:
    rounds = entry.systems.get(series, [])
    rate = results.rate(entry, series, timed)
    if rate is None:
        return "failed" if any(one.error for one in rounds) else "-"  # "-": not timed
    good = sum(one.time(timed) is not None for one in rounds)
    return f"{rate:.0f}" if good == len(rounds) else f"{rate:.0f} ({good} of {len(rounds)} rounds)"


def _ratio(ours: Optional[float], other: Optional[float]) -> str:
    return "-" if ours is None or not other else f"{ours / other:.2f}"


def _gpu_names(results: Results) -> str:
    for environment in results.environment.values():
        names = environment.get("gpus")
        if names:
            return f" ({', '.join(sorted(set(names)))})"
    return ""


def _failures(results: Results) -> list[str]:
    lines: list[str] = []
    for entry in results.cases:
        for series, rounds in entry.systems.items():
            if series == CEILING:
                continue  # fails with our own series
            for reason in dict.fromkeys(one.error for one in rounds if one.error is not None):
                text = reason.replace("|", "/").replace("`", "'")
                case = entry.case
                lines.append(f"- {TITLES.get(series, series)}, {case.shape} "
                             f"{case.mask} {length_text(case.length)}: `{text}`")
    return lines


def _gradients_table(case: str, entries: list[dict[str, Any]]) -> str:
    """One row for each entry; the last column compares with our own unsharded run."""
    alone = next((entry["errors"] for entry in entries
                  if entry["series"] == OURS and entry["ranks"] == 1 and "errors" in entry), None)
    lines = [f"Errors of the gradients of {case}: distance from a float64 computation with the same "
             "bfloat16 inputs, divided by its norm (Frobenius).", "",
             "| | ranks | dQ | dK | dV | largest, of ours on one rank |", "|---|---|---|---|---|---|"]
    reasons = []
    for entry in entries:
        found = entry.get("errors")
        title = TITLES.get(entry["series"], entry["series"])
        if found is None:
            cells = ["failed", "-", "-", "-"]
            reasons.append(f"- {title}, {entry['ranks']} ranks: `{entry['error']}`")
        else:
            ratio = max(one / own for one, own in zip(found, alone)) if alone else None
            cells = [*(f"{one:.2e}" for one in found), f"{ratio:.2f}" if ratio else "-"]
        lines.append(f"| {title} | {entry['ranks']} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, *([""] + reasons if reasons else [])]) + "\n"
