"""Results as an SVG plot: TFLOP/s per GPU against the sequence length."""

import math
from dataclasses import dataclass
from typing import Iterable, Optional
from xml.sax.saxutils import escape

from .results import CEILING, TITLES, CaseResults, Results
from .table import length_text

PANEL_WIDTH, PANEL_HEIGHT = 360, 230
LEFT, TOP, GAP, RIGHT, BOTTOM = 64, 64, 64, 24, 56
COLOURS = {"annulus": "#0b6e99", "pytorch-allgather": "#d1603d", "pytorch-alltoall": "#e3a857",
           "jax-ring": "#6a8d3f", CEILING: "#555555"}
DASHES = {CEILING: "6 4"}


@dataclass(frozen=True)
class Panel:
    """One pair of axes, its upper left corner at (x, y)."""

    x: float
    y: float
    lengths: tuple[int, ...]
    top_rate: float

    def across(self, length: int) -> float:
        low, high = (math.log2(one) for one in (self.lengths[0], self.lengths[-1]))
        part = 0.5 if high == low else (math.log2(length) - low) / (high - low)
        return self.x + 20 + part * (PANEL_WIDTH - 40)

    def up(self, rate: float) -> float:
        return self.y + PANEL_HEIGHT * (1 - rate / self.top_rate)


def svg(results: Results) -> str:
    """A column of panels per head shape, a row per mask and pass."""
    shapes = _unique(entry.case.shape for entry in results.cases)
    masks = _unique(entry.case.mask for entry in results.cases)
    rows = [(mask, timed) for mask in masks for timed in results.timed]
    top_rate = _round_up(max(_all_rates(results), default=1.0))
    width = LEFT + len(shapes) * (PANEL_WIDTH + GAP) - GAP + RIGHT
    height = TOP + len(rows) * (PANEL_HEIGHT + GAP) - GAP + BOTTOM
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
             f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
             f'<rect width="{width}" height="{height}" fill="white"/>', *_legend(results)]
    for column, shape in enumerate(shapes):
        for row, (mask, timed) in enumerate(rows):
            entries = sorted((entry for entry in results.cases
                              if (entry.case.mask, entry.case.shape) == (mask, shape)),
                             key=lambda entry: entry.case.length)
            if not entries:
                continue
            panel = Panel(LEFT + column * (PANEL_WIDTH + GAP), TOP + row * (PANEL_HEIGHT + GAP),
                          tuple(entry.case.length for entry in entries), top_rate)
            which = "" if results.timed == ["forward"] else f", {timed}"
            parts += _axes(panel, f"{shape} heads, {mask}{which}")
            parts += _lines(panel, results, entries, timed)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _unique(values: Iterable) -> list:
    return list(dict.fromkeys(values))


def _all_rates(results: Results) -> list[float]:
    rates = [results.rate(entry, series, timed) for entry in results.cases
             for series in entry.systems for timed in results.timed]
    return [rate for rate in rates if rate is not None]


def _round_up(rate: float) -> float:
    step = 10 ** math.floor(math.log10(rate))
    return math.ceil(rate / step) * step


def _text(x: float, y: float, text: str, **attributes: str) -> str:
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke="{colour}"{dashes}/>')


def _legend(results: Results) -> list[str]:
    parts = []
    x = float(LEFT)
    measured = [series for series in TITLES
                if any(series in entry.systems for entry in results.cases)]
    for series in measured:
        parts += [_line(x, 22, x + 24, 22, COLOURS[series], DASHES.get(series, "")),
                  _text(x + 30, 26, TITLES[series])]
        x += 50 + 7 * len(TITLES[series])
    return parts


def _axes(panel: Panel, title: str) -> list[str]:
    right, bottom = panel.x + PANEL_WIDTH, panel.y + PANEL_HEIGHT
    parts = [_text(panel.x, panel.y - 10, title, font_weight="bold")]
    ticks = 5
    for i in range(ticks + 1):
        rate = panel.top_rate * i / ticks
        y = panel.up(rate)
        parts += [_line(panel.x, y, right, y, "#dddddd" if i else "#333333"),
                  _text(panel.x - 8, y + 4, f"{rate:g}", text_anchor="end")]
    for length in panel.lengths:
        parts.append(_text(panel.across(length), bottom + 18, length_text(length),
                           text_anchor="middle"))
    middle = panel.y + PANEL_HEIGHT / 2
    parts += [_text((panel.x + right) / 2, bottom + 38, "total sequence length",
                    text_anchor="middle"),
              _text(panel.x - 44, middle, "TFLOP/s per GPU", text_anchor="middle",
                    transform=f"rotate(-90 {panel.x - 44:.1f} {middle:.1f})")]
    return parts


def _lines(panel: Panel, results: Results, entries: list[CaseResults], timed: str) -> list[str]:
    parts = []
    for series in TITLES:
        points = [(entry.case.length, results.rate(entry, series, timed)) for entry in entries]
        parts += _polyline(panel, points, series)
    return parts


def _polyline(panel: Panel, points: list[tuple[int, Optional[float]]], series: str) -> list[str]:
    """A line through the known points, with a mark at each unless it is dashed."""
    known = [(panel.across(length), panel.up(rate), rate)
             for length, rate in points if rate is not None]
    if not known:
        return []
    name, colour, dash = TITLES[series], COLOURS[series], DASHES.get(series, "")
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in known)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}>'
             f"<title>{escape(name)}</title></polyline>"]
    if not dash:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}">'
                  f"<title>{escape(name)}: {rate:.0f}</title></circle>" for x, y, rate in known]
    return parts
