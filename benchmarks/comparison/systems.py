"""How each system is started, and what its output says."""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import Any, Optional, Sequence

from peers.peer_cases import Case, parse_case

from .results import BEFORE, CEILING, FROM_JAX, FROM_TORCH, OURS, Round

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MPIRUN = ("mpirun", "--bind-to", "none")
PATIENCE = 5  # seconds in which an interrupted program ends
PYTORCH = "pytorch"
JAX = "jax"
# The series that a system measures.
SERIES = {OURS: [OURS, CEILING], BEFORE: [BEFORE],
          PYTORCH: ["pytorch-allgather", "pytorch-alltoall", FROM_TORCH], JAX: ["jax-ring", FROM_JAX]}


@dataclass(frozen=True)
class Setup:
    """The settings that all systems share."""

    annulus: str
    annulus_options: Sequence[str]
    mpirun: Sequence[str]
    python: str
    gpus: int
    batch: int
    iters: int
    warmup: int
    timeout: float
    warm_seconds: float = 0
    backward: bool = False
    device: str = "cuda"  # of our own program
    against: Optional[str] = None  # another build of it, in place of the peers
    from_python: bool = False  # times our Python package in the peers' processes

    @property
    def timing(self) -> list[str]:
        """The words that all systems understand."""
        words = ["--iters", str(self.iters), "--warmup", str(self.warmup)]
        if self.warm_seconds:
            words += ["--warm-seconds", f"{self.warm_seconds:g}"]
        return [*words, "--backward"] if self.backward else words


@dataclass(frozen=True)
class Start:
    """One start of a program, for some cases."""

    system: str
    words: tuple[str, ...]
    cases: tuple[Case, ...]


@dataclass
class Found:
    """The measurements of one start. Cases without a measurement are missing."""

    rounds: dict[tuple[str, Case], Round] = field(default_factory=dict)
    environment: Optional[dict[str, Any]] = None


def parser(description: Optional[str], mpirun: Sequence[str] = ()) -> argparse.ArgumentParser:
    """A parser with the options that name our program and, unless there is no default, mpirun."""
    made = argparse.ArgumentParser(description=description, allow_abbrev=False,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--annulus", default="build/annulus",
                      help="our program (default: %(default)s)")
    if mpirun:
        made.add_argument("--mpirun", type=shlex.split, default=list(mpirun), metavar="WORDS",
                          help="mpirun with its flags, except the number of ranks (default: "
                          f"{shlex.join(mpirun)})")
    return made


def positive(text: str) -> int:
    """Reads an option's count."""
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"got '{text}'; expected a whole number above zero")
    return int(text)


class Failure(Exception):
    """annulus plan has failed. The text is what it wrote on standard error."""


def plan(annulus: str, words: Sequence[str], errors: Optional[int] = subprocess.PIPE) -> dict:
    """The report of annulus plan for GPUs and bfloat16. With `errors` None, its messages are shown."""
    ended = subprocess.run([annulus, "plan", "--device", "cuda", "--dtype", "bfloat16", *words,
                            "--json", "-"],
                           stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
    if ended.returncode != 0:
        raise Failure((ended.stderr or "").strip())
    return json.loads(ended.stdout)


def program_obstacle(program: str) -> str:
    """Why there is no such program to start; empty if there is one."""
    return "" if shutil.which(program) else f"{program} is not a program that can be started"


def without_folders(text: str) -> str:
    """Absolute paths become the names of their files, so that a results file reveals no machine."""
    return re.sub(r"(?<![\w./])/(?:[^\s/:'\",]+/)*", "", text.replace(ROOT + "/", ""))


def shown(words: Sequence[str]) -> str:
    """A command as the results record it."""
    return " ".join(without_folders(word) for word in words)


def our_starts(setup: Setup, cases: Sequence[Case]) -> list[Start]:
    """Our own program, once for all lengths of a shape, in turns with another build of it if there is one."""
    builds = [(OURS, setup)]
    if setup.against:
        builds.append((BEFORE, replace(setup, annulus=setup.against)))
    return [Start(system, (*setup.mpirun, "-np", str(setup.gpus), *_bench_words(build, group)),
                  tuple(group)) for group in _sweeps(cases) for system, build in builds]


def starts_of_round(setup: Setup, cases: Sequence[Case]) -> list[Start]:
    """The programs of one round, each system once for all its cases."""
    words = [*setup.timing, *(["--annulus"] if setup.from_python else [])]
    peers = [] if setup.against else peer_starts(setup, cases, words)
    return [*our_starts(setup, cases), *peers]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


def peer_starts(setup: Setup, cases: Sequence[Case], words: Sequence[str]) -> list[Start]:
    """The peers' programs, with these words beside the cases."""
    common = []
    for case in cases:
        common += ["--case", str(case)]
    common += ["--batch", str(setup.batch), *words]
    peers = os.path.join(ROOT, "benchmarks", "peers")
    torchrun = (setup.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                str(setup.gpus))
    pytorch = (*torchrun, os.path.join(peers, "pytorch_context_parallel.py"), *common)
    jax = (os.path.join(peers, "jax_ring.py"), "--gpus", str(setup.gpus), *common)
    if "--annulus" in words:  # needs a process for each GPU
        jax = ("env", f"JAX_COORDINATOR_ADDRESS=localhost:{free_port()}", *torchrun, *jax)
    else:
        jax = (setup.python, *jax)
    return [Start(PYTORCH, pytorch, tuple(cases)), Start(JAX, jax, tuple(cases))]


def _bench_words(setup: Setup, group: Sequence[Case]) -> list[str]:
    case = group[0]
    sizes = (setup.batch, case.length, case.length, case.heads, case.kv_heads, case.head_dim)
    words = [setup.annulus, "bench", "--device", setup.device, "--dtype", "bfloat16",
             "--shape", ",".join(str(size) for size in sizes)]
    if len(group) > 1:
        factor = group[1].length // case.length
        words += ["--sweep", f"{case.length}:{group[-1].length}:{factor}"]
    if case.causal:
        words.append("--causal")
    return [*words, *setup.timing, *setup.annulus_options, "--json", "-"]


def _sweeps(cases: Sequence[Case]) -> list[list[Case]]:
    """Groups that one `annulus bench --sweep` covers: lengths that grow by one factor."""
    groups: list[list[Case]] = []
    for case in sorted(cases, key=lambda one: (-one.heads, one.kv_heads, one.head_dim, one.mask,
                                          one.length)):
        group = groups[-1] if groups else []
        last = group[-1] if group else None
        fits = (last is not None and case.length > last.length and case.length % last.length == 0
                and (last.shape, last.causal) == (case.shape, case.causal)
                and (len(group) == 1
                     or case.length // last.length == last.length // group[-2].length))
        if fits:
            group.append(case)
        else:
            groups.append([case])
    return groups


def run(start: Start, timeout: float) -> tuple[str, Optional[str]]:
    """Runs a program to its end. Returns its standard output, and why it failed if it did."""
    try:
        process = subprocess.Popen(start.words, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True, errors="replace", start_new_session=True)
    except OSError as error:
        return "", f"{os.path.basename(start.words[0])} cannot be started: {error.strerror}"
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return _end(process), f"did not end within {timeout:.0f} s"
    except KeyboardInterrupt:
        _end(process)
        raise
    sys.stderr.write(errors)
    if process.returncode == 0:
        return output, None
    return output, f"exit code {process.returncode}: {_telling_line(errors)}"


def _end(process: subprocess.Popen) -> str:
    """Ends a program with its ranks, which are a process group. Interrupts it first, as it may have
    started groups of its own. Returns its standard output."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        return process.communicate(timeout=PATIENCE)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def _telling_line(errors: str) -> str:
    # Without the lines of dashes that mpirun draws.
    lines = [line.strip() for line in errors.splitlines() if line.strip(" -=*\t")]
    telling = [line for line in lines if re.search(r"error", line, re.IGNORECASE)]
    line = (telling or lines or ["nothing on standard error"])[-1]
    return without_folders(line)[:300]


def read_output(start: Start, output: str) -> Found:
    """The measurements in a program's standard output, as far as it got."""
    ours = start.system in (OURS, BEFORE)
    return _read_bench(start, output) if ours else _read_peer(output)


def _read_peer(output: str) -> Found:
    found = Found()
    for line in output.splitlines():
        try:
            fields = json.loads(line)
        except ValueError:
            continue  # libraries print what they like
        if not isinstance(fields, dict):
            continue
        if "environment" in fields:
            found.environment = fields["environment"]
        elif "system" in fields:
            error = fields.get("error")
            forward, backward, both = (fields.get(timed, {}).get("ms")
                                       for timed in ("forward", "backward", "both"))
            found.rounds[fields["system"], parse_case(fields["case"])] = Round(
                forward, None if error is None else without_folders(error), backward, both)
    return found


def _read_bench(start: Start, output: str) -> Found:
    found = Found()
    brace = output.find("{")
    try:
        report = json.loads(output[brace:]) if brace >= 0 else {}
    except ValueError:
        report = {}
    units = {column["name"]: column["unit"] for column in report.get("columns", [])}
    for row in report.get("rows", []):
        case = _case_of_row(row, units, start.cases)
        if case is None:
            continue
        verdict = row.get("verdict", "OK")
        ms = _scaled(row, units, "time", {"ms": 1.0, "s": 1e3, "us": 1e-3, "µs": 1e-3})
        if verdict != "OK" or not ms:
            found.rounds[start.system, case] = Round(error=f"verdict {verdict}, time {row.get('time')}")
            continue
        backward, both = (_scaled(row, units, name, {"ms": 1.0}) for name in ("backward", "both"))
        found.rounds[start.system, case] = Round(ms, None, backward, both)

        def ceiling(time: Optional[float], prefix: str) -> Optional[float]:
            """As a time, since our program counts operations in its own way."""
            rates = {"GFLOP/s": 1e-3, "TFLOP/s": 1.0}
            rate, local = (_scaled(row, units, prefix + name, rates) for name in ("rate", "local"))
            return time * rate / local if time and rate and local else None

        found.rounds[CEILING, case] = Round(ceiling(ms, ""), None, ceiling(backward, "backward "))
    return found


def _case_of_row(row: dict[str, Any], units: dict[str, str],
                 cases: Sequence[Case]) -> Optional[Case]:
    names = units.get("shape", "").split(",")
    sizes = dict(zip(names, str(row.get("shape", "")).split(",")))
    for case in cases:
        expected = {"S": case.length, "N": case.heads, "K": case.kv_heads, "D": case.head_dim}
        if all(sizes.get(name) == str(size) for name, size in expected.items()):
            return case
    return None


def _scaled(row: dict[str, Any], units: dict[str, str], name: str,
            scales: dict[str, float]) -> Optional[float]:
    """Converts a cell to the unit of scale 1. Text may follow the unit, as in "ms, median"."""
    unit = units.get(name, "")
    for prefix, scale in scales.items():
        if re.match(re.escape(prefix) + r"(?![A-Za-z])", unit):
            value = row.get(name)
            return value * scale if isinstance(value, (int, float)) else None
    return None


def annulus_environment(annulus: str) -> dict[str, str]:
    """Versions, as `annulus info` reports them."""
    try:
        result = subprocess.run([annulus, "info"], capture_output=True, text=True, timeout=120,
                                check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": f"annulus info: {type(error).__name__}"}
    wanted = ("version", "build type", "compiler", "MPI", "CUDA", "NCCL", "cuDNN", "GPUs")
    found = {}
    for line in result.stdout.splitlines():
        for name in wanted:
            match = re.match(rf"  {name}\s{{1,}}(\S.*)", line)
            if match and name not in found:
                found[name] = without_folders(match[1].split(", package")[0].strip())
    return found
