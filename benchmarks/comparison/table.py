"""Results as a Markdown table."""

from typing import Optional

from .results import CEILING, OURS, PEERS, TITLES, CaseResults, Results


def length_text(length: int) -> str:
    """8192 as 8k."""
    for unit, suffix in ((1 << 20, "M"), (1 << 10, "k")):
        if length % unit == 0:
            return f"{length // unit}{suffix}"
    return str(length)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def markdown(results: Results) -> str:
    """One row a case; a series without any result is shown as failed, its reason below."""
    settings = results.settings
    header = ["N/K", "mask", "S", TITLES[OURS], "ours / best peer",
              *(TITLES[peer] for peer in PEERS), TITLES[CEILING], "ours / local kernel"]
    lines = [f"TFLOP/s per GPU on {settings['gpus']} GPUs{_gpu_names(results)}: forward, "
             f"{settings['dtype']}, B = {settings['batch']}, D = {settings['head_dim']}, "
             f"4·B·N·S²·D operations, half of them when causal. Medians of "
             f"{_counted(settings['rounds'], 'round')} of {_counted(settings['iters'], 'call')}; "
             "systems take turns within a round.", "",
             _row(header), _row(["---"] * len(header))]
    lines += [_row(_cells(results, entry)) for entry in results.cases]
    failures = _failures(results)
    if failures:
        lines += ["", *failures]
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(results: Results, entry: CaseResults) -> list[str]:
    ours = results.rate(entry, OURS)
    ceiling = results.rate(entry, CEILING)
    return [f"{entry.case.heads}/{entry.case.kv_heads}", entry.case.mask,
            length_text(entry.case.length), _rate(results, entry, OURS),
            _ratio(ours, results.best_peer(entry)),
            *(_rate(results, entry, peer) for peer in PEERS),
            _rate(results, entry, CEILING), _ratio(ours, ceiling)]


def _rate(results: Results, entry: CaseResults, series: str) -> str:
    rounds = entry.systems.get(series, [])
    rate = results.rate(entry, series)
    if rate is None:
        return "failed" if rounds else "-"
    good = sum(one.ms is not None for one in rounds)
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
                lines.append(f"- {TITLES.get(series, series)}, {case.heads}/{case.kv_heads} "
                             f"{case.mask} {length_text(case.length)}: `{text}`")
    return lines
