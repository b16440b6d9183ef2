"""Results as an SVG plot: TFLOP/s per GPU against the sequence length. Needs Matplotlib."""

import functools
import importlib.util
import io
import sys

from .results import BEFORE, CEILING, FROM_JAX, FROM_TORCH, TITLES, Results
from .table import length_text

COLOURS = {"annulus": "#0b6e99", BEFORE: "#7fb2c8", "pytorch-allgather": "#d1603d",
           "pytorch-alltoall": "#e3a857", "jax-ring": "#6a8d3f", FROM_TORCH: "#9b4f96",
           FROM_JAX: "#c08bbd", CEILING: "#555555"}


@functools.cache
def is_possible() -> bool:
    """True if Matplotlib is installed; otherwise says so, once."""
    found = importlib.util.find_spec("matplotlib") is not None
    if not found:
        print("no plot: Matplotlib is not installed", file=sys.stderr)
    return found


def svg(results: Results) -> str:
    """A column of panels per head shape, a row per mask and pass."""
    import matplotlib.figure  # only plots need it
    shapes = list(dict.fromkeys(entry.case.shape for entry in results.cases))
    masks = dict.fromkeys(entry.case.mask for entry in results.cases)
    rows = [(mask, timed) for mask in masks for timed in results.timed]
    figure = matplotlib.figure.Figure(figsize=(4 * len(shapes), 3 * len(rows)),
                                      layout="constrained")
    panels = figure.subplots(len(rows), len(shapes), squeeze=False, sharey=True)
    drawn = {}
    for (mask, timed), line in zip(rows, panels):
        for shape, axes in zip(shapes, line):
            cases = sorted((entry for entry in results.cases
                            if (entry.case.mask, entry.case.shape) == (mask, shape)),
                           key=lambda entry: entry.case.length)
            which = "" if results.timed == ["forward"] else f", {timed}"
            axes.set(title=f"{shape} heads, {mask}{which}", xlabel="total sequence length",
                     ylabel="TFLOP/s per GPU", xscale="log")
            for series, name in TITLES.items():
                points = [(entry.case.length, results.rate(entry, series, timed))
                          for entry in cases]
                points = [point for point in points if point[1] is not None]
                if points:
                    look = "x--" if series == CEILING else "o-"
                    drawn[name], = axes.plot(*zip(*points), look, color=COLOURS[series])
            lengths = [entry.case.length for entry in cases]
            axes.set_xticks(lengths, [length_text(length) for length in lengths])
            axes.minorticks_off()
            axes.set_visible(bool(cases))
            axes.axhline(0, color="none")
    figure.legend(drawn.values(), drawn.keys(), loc="outside upper center", ncols=3)
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(text, format="svg")
    return text.getvalue()
