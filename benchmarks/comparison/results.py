"""The results of a comparison: what benchmarks/compare records, and what follows from it.

A results file is one JSON object:

    schema       "annulus.comparison"
    version      1; larger when a reader of this version would go wrong
    settings     gpus, rounds, iters, warmup, batch, dtype; head_dim, if it is that of all cases;
                 backward and warm_seconds, if they were asked for
    environment  system -> what its program reports of itself: versions, names of GPUs
    commands     system -> the commands of one round, paths relative to the repository
    cases        one entry a case: heads, kv_heads, mask ("causal" or "full"), length, head_dim, and
        systems  series -> its rounds, in order; each {"ms": …} or {"error": …}, with "backward_ms"
                 and "both_ms" if the backward pass was timed, too
    gradients    if their errors were measured: case, and entries, one a series and number of ranks:
                 series, ranks, and errors (of the gradients of query, key and value) or error

The series annulus-before is the build that --against named; annulus-torch and annulus-jax are our
Python package, called in the peers' processes (--from-python). The series local-kernel is our local
kernel alone, on the blocks of the same plan, without hops and merges: the ceiling of what we can
reach.

Rates are never stored: every one is 4·B·N·S²·D operations, half of them when causal, over the
median of a series' rounds and over the GPUs; 2.5 and 3.5 times as many for the backward pass and
for both.
"""

import json
import os
import statistics
import tempfile
from dataclasses import dataclass, field
from typing import Any, Optional

from peers.peer_cases import HEAD_DIM, PASSES, Case

SCHEMA = "annulus.comparison"
VERSION = 1

OURS = "annulus"
BEFORE = "annulus-before"
CEILING = "local-kernel"
FROM_TORCH, FROM_JAX = "annulus-torch", "annulus-jax"
# Series in the order in which they are shown, with the names that people read.
TITLES = {OURS: "Annulus", BEFORE: "Annulus before", "pytorch-allgather": "PyTorch all-gather",
          "pytorch-alltoall": "PyTorch all-to-all", "jax-ring": "JAX ring",
          FROM_TORCH: "Annulus from torch", FROM_JAX: "Annulus from JAX", CEILING: "local kernel"}
PEERS = [series for series in TITLES
         if series not in (OURS, BEFORE, FROM_TORCH, FROM_JAX, CEILING)]


class ResultsError(Exception):
    """A results file that is not what it should be."""


@dataclass
class Round:
    """One measurement, or why there is none."""

    ms: Optional[float] = None  # of the forward pass
    error: Optional[str] = None
    backward_ms: Optional[float] = None
    both_ms: Optional[float] = None

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if value is not None}

    def time(self, timed: str) -> Optional[float]:
        """Milliseconds of one of PASSES."""
        return {"forward": self.ms, "backward": self.backward_ms, "both": self.both_ms}[timed]


@dataclass
class CaseResults:
    """All rounds of one case."""

    case: Case
    systems: dict[str, list[Round]] = field(default_factory=dict)

    def failed(self, series: str) -> bool:
        """True if no round succeeded."""
        return self.median_ms(series) is None

    def median_ms(self, series: str, timed: str = "forward") -> Optional[float]:
        times = [ms for one in self.systems.get(series, []) if (ms := one.time(timed)) is not None]
        return statistics.median(times) if times else None


@dataclass
class Results:
    settings: dict[str, Any]
    environment: dict[str, Any] = field(default_factory=dict)
    commands: dict[str, list[str]] = field(default_factory=dict)
    cases: list[CaseResults] = field(default_factory=list)
    gradients: Optional[dict[str, Any]] = None

    @property
    def timed(self) -> list[str]:
        """The PASSES that were timed."""
        return list(PASSES) if self.settings.get("backward") else ["forward"]

    def rate(self, entry: CaseResults, series: str, timed: str = "forward") -> Optional[float]:
        """TFLOP/s per GPU; None if the series failed."""
        ms = entry.median_ms(series, timed)
        if not ms:
            return None
        operations = entry.case.operations(self.settings["batch"], timed)
        return operations / (ms * 1e-3) / self.settings["gpus"] * 1e-12

    def best_peer(self, entry: CaseResults, timed: str = "forward") -> Optional[float]:
        """The highest rate of a peer; None if all failed."""
        rates = [self.rate(entry, series, timed) for series in PEERS]
        return max((rate for rate in rates if rate is not None), default=None)

    def to_json(self) -> dict[str, Any]:
        cases = [{"heads": entry.case.heads, "kv_heads": entry.case.kv_heads,
                  "mask": entry.case.mask, "length": entry.case.length,
                  "head_dim": entry.case.head_dim,
                  "systems": {series: [one.to_json() for one in rounds]
                              for series, rounds in entry.systems.items()}}
                 for entry in self.cases]
        data = {"schema": SCHEMA, "version": VERSION, "settings": self.settings,
                "environment": self.environment, "commands": self.commands, "cases": cases}
        return data | ({"gradients": self.gradients} if self.gradients else {})


def load(path: str) -> Results:
    """Reads a results file. Raises ResultsError naming file and entry."""
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
        if (data["schema"], data["version"]) != (SCHEMA, VERSION):
            raise ResultsError(f"{path}: is {data['schema']} version {data['version']}; "
                               f"expected {SCHEMA} version {VERSION}")
        results = Results(data["settings"], data["environment"], data["commands"],
                          gradients=data.get("gradients"))
        for key in ("gpus", "batch"):
            if results.settings[key] < 1:
                raise ResultsError(f"{path}: settings: {key} is not above zero")
        for entry in data["cases"]:
            case = Case(entry["heads"], entry["kv_heads"], entry["mask"] == "causal",
                        entry["length"],
                        entry.get("head_dim", results.settings.get("head_dim", HEAD_DIM)))
            systems = {series: [Round(**one) for one in rounds]
                       for series, rounds in entry["systems"].items()}
            results.cases.append(CaseResults(case, systems))
        return results
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read: {error.strerror}") from error
    except KeyError as error:
        raise ResultsError(f"{path}: lacks {error.args[0]!r}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ResultsError(f"{path}: is not a results file: {error}") from error


def obstacle_to_writing(folder: str, create: bool = False) -> str:
    """Why no file can be written there; empty if one can. `create` makes the folder."""
    try:
        if create:
            os.makedirs(folder or ".", exist_ok=True)
        with tempfile.TemporaryFile(dir=folder or "."):
            return ""
    except OSError as error:
        return f"{folder} cannot be written to: {error.strerror}"


def write_json(path: str, content: Any) -> None:
    write_whole(path, json.dumps(content, indent=1) + "\n")


def write_whole(path: str, text: str) -> None:
    """The file appears complete under its name, or not at all."""
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path) or ".", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
