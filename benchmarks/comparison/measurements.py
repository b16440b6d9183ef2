"""What benchmarks/several_gpus measures: commands, results, and the figures that are wanted."""

import json
import os
import shlex
import statistics
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Sequence

from peers.peer_cases import parse_case

from . import results, systems, table

BENCHMARKS = os.path.join(systems.ROOT, "benchmarks")
TESTS = os.path.join(systems.ROOT, "tests", "launcher", "commands")


@dataclass(frozen=True)
class Figure:
    """A measured number, None if it was not measured, beside the wanted one, None without a goal."""

    what: str
    measured: Optional[float]
    wanted: Optional[float] = None
    most: bool = False  # wanted is the most that it may be, not the least

    @property
    def met(self) -> Optional[bool]:
        if self.wanted is None:
            return None
        if self.measured is None:
            return False
        return self.measured <= self.wanted if self.most else self.measured >= self.wanted


@dataclass(frozen=True)
class Command:
    words: Sequence[str]
    key: str = ""  # under which `read` gets its outputs
    variables: dict[str, str] = field(default_factory=dict)

    def shown(self) -> str:
        words = [*(f"{name}={value}" for name, value in self.variables.items()), *self.words]
        return shlex.join(systems.without_folders(word) for word in words)


@dataclass(frozen=True)
class Step:
    """Commands in the order in which they run. `read` gets their outputs: for each key, a list in
    the order of rounds. It returns the content of the results file, None if the commands write it
    or there is none, and the figures."""

    name: str
    file: str
    seconds: int
    commands: Sequence[Command]
    read: Callable[[dict[str, list[Any]]], tuple[Any, list[Figure]]]
    written: str = ""  # the file that the commands write, without .json


@dataclass(frozen=True)
class Job:
    """What the options say."""

    annulus: str
    mpirun: Sequence[str]
    python: str
    gpus: int
    device: str
    small: bool
    rounds: int
    scratch: str  # a folder for files that are not results

    def ranks(self, ranks: int, *words: str) -> list[str]:
        return [*self.mpirun, "-np", str(ranks), self.annulus, *words]

    def bench(self, shape: str, *words: str) -> list[str]:
        return ["bench", "--device", self.device, "--dtype", "bfloat16", "--shape", shape, *words,
                "--json", "-"]

    def shape(self, length: str, heads: str = "64,8,128") -> str:
        return f"1,{length},{length},{'8,2,64' if self.small else heads}"

    def tool(self, name: str, *words: str) -> list[str]:
        """One of the programs beside this one, on these GPUs."""
        return [self.python, os.path.join(BENCHMARKS, name), "--annulus", self.annulus,
                "--mpirun", shlex.join(self.mpirun), "--gpus", str(self.gpus), "--device",
                self.device, *words]

    def in_turns(self, commands: Sequence[Command]) -> list[Command]:
        return [*commands] * self.rounds


# For each case, the forward rate that four GPUs should reach, in TFLOP/s per GPU, and the multiples
# of the best peer's rate, forward and backward.
CASES = {
    "64/8:causal:8k": (580, None, 1.8), "64/8:causal:32k": (620, None, 1.12),
    "64/8:causal:128k": (600, None, 1.05), "32/32:causal:8k": (420, 4.0, 2.0),
    "32/32:causal:32k": (630, None, 1.25), "32/32:causal:128k": (590, None, 1.05),
    "64/8:full:128k": (605, None, None)}
SMALL_CASES = {"8/2/64:causal:256": (None, None, None), "4/4/64:full:512": (None, None, None)}


def cases(job: Job) -> dict[str, tuple[Optional[float], ...]]:
    return SMALL_CASES if job.small else CASES


def compare(job: Job, seconds: int) -> Step:
    """Both passes beside the peers."""
    wanted = {parse_case(text): figures for text, figures in cases(job).items()}
    words = ["--python", job.python, "--output-dir", job.scratch, "--backward", "--gradients",
             "none", "--rounds", "1", "--iters", "5"]
    for case in wanted:
        words += ["--cases", str(case)]
    written = os.path.join(job.scratch, "comparison")

    def read(_: dict[str, list[Any]]) -> tuple[Any, list[Figure]]:
        found = results.load(written + ".json")
        figures = []
        for entry in found.cases:
            rate, *of_peer = wanted[entry.case]
            name = f"{entry.case.shape} {entry.case.mask} {table.length_text(entry.case.length)}"
            for timed, least, multiple in zip(("forward", "backward"), (rate, None), of_peer):
                ours, peer = found.rate(entry, results.OURS, timed), found.best_peer(entry, timed)
                figures.append(Figure(f"{name}, {timed}, TFLOP/s per GPU", ours, least))
                figures.append(Figure(f"{name}, {timed}, × best peer",
                                      ours / peer if ours and peer else None, multiple))
        return None, figures

    return Step("compare", "compare", seconds, [Command(job.tool("compare", *words))], read,
                written)


def choices(job: Job, seconds: int) -> Step:
    written = os.path.join(job.scratch, "choices")
    words = ["--transports", "peer" if job.device == "cuda" else "auto", "--iters", "3", "--warmup",
             "1", "--within", "inf", "--output", written + ".json"]
    for text in cases(job):
        words += ["--case", text]

    def read(_: dict[str, list[Any]]) -> tuple[Any, list[Figure]]:
        with open(written + ".json", encoding="utf-8") as file:
            found = json.load(file)["cases"]
        figures = []
        for case, by_choice in found.items():
            times = {choice: statistics.median(one["ms"] for one in rounds if "ms" in one)
                     for choice, rounds in by_choice.items() if any("ms" in one for one in rounds)}
            automatic = times.pop("auto", None)
            ratio = automatic / min(times.values()) if automatic and times else None
            figures.append(Figure(f"{case}, auto ÷ best by hand", ratio,
                                  None if job.small else 1.03, most=True))
        return None, figures

    return Step("choices", "choices", seconds, [Command(job.tool("choices", *words))], read,
                written)


def median_time(reports: Sequence[dict]) -> float:
    return statistics.median(report["rows"][0]["time"] for report in reports)


def share_of_alone(found: dict[str, list[Any]], alone: str, together: str,
                   count: int) -> Optional[float]:
    """The rate of `count` GPUs as a share of `count` times one GPU's. None if a run was cut off."""
    if alone not in found or together not in found:
        return None
    return median_time(found[alone]) / median_time(found[together]) / count


def all_reports(found: dict[str, list[Any]]) -> list[Any]:
    return [report for reports in found.values() for report in reports]


def strong(job: Job, seconds: int) -> Step:
    """One problem on 1, 2, 4 … GPUs."""
    counts = [1 << power for power in range(job.gpus.bit_length()) if 1 << power <= job.gpus]
    length = "512" if job.small else "128k"
    words = job.bench(job.shape(length), "--causal", "--warmup", "1", "--warm-seconds", "0.4",
                      "--iters", "3")

    def read(found: dict[str, list[Any]]) -> tuple[Any, list[Figure]]:
        return all_reports(found) or None, [
            Figure(f"causal {length} on {count}, share of {count} × one GPU's rate",
                   share_of_alone(found, "1", str(count), count)) for count in counts[1:]]

    return Step("strong", f"strong_{length}", seconds, job.in_turns(
        [Command(job.ranks(count, *words), str(count)) for count in counts]), read)


def million(job: Job, seconds: int) -> Step:
    length = "1k" if job.small else "1M"
    case = parse_case(f"{'8/2/64' if job.small else '64/8'}:causal:{length}")
    words = job.bench(job.shape(length), "--causal", "--once")

    def read(found: dict[str, list[Any]]) -> tuple[Any, list[Figure]]:
        seconds_of_call = median_time(found[""]) * 1e-3
        return found[""][0], [Figure(f"{case.shape} causal {length}, TFLOP/s per GPU",
                                     case.operations(1) / seconds_of_call / job.gpus * 1e-12)]

    return Step("million", f"ring_{length.lower()}", seconds,
                [Command(job.ranks(job.gpus, *words))], read)


def decode(job: Job, seconds: int) -> Step:
    """One query of each sequence; on one GPU and on all in turns."""
    wanted = ({"1,1,1k,8,2,64": None, "4,1,512,8,2,64": None} if job.small else
              {"1,1,1M,64,8,128": 0.8, "16,1,128k,64,8,128": 0.8, "1,1,128k,64,8,128": 0.5})
    commands = [Command(job.ranks(count, *job.bench(
        shape, "--causal", "--causal-offset", "bottom-right", "--warm-seconds", "0.2", "--iters",
        "50")), f"{shape} on {count}") for shape in wanted for count in (1, job.gpus)]

    def read(found: dict[str, list[Any]]) -> tuple[Any, list[Figure]]:
        return all_reports(found) or None, [
            Figure(f"{shape}, share of {job.gpus} × one GPU's rate",
                   share_of_alone(found, f"{shape} on 1", f"{shape} on {job.gpus}", job.gpus),
                   share) for shape, share in wanted.items()]

    return Step("decode", "decode", seconds, job.in_turns(commands), read)


def crossing_bytes(plan: dict, ranks_per_node: int) -> int:
    """What all ranks of a plan send to other nodes."""
    total = 0
    for rank in plan["ranks"]:
        for task in rank["tasks"]:
            for transfer in task.get("sends", []):
                peer = rank["groups"][task["group"]]["ranks"][transfer["peer"]]
                if peer // ranks_per_node != rank["rank"] // ranks_per_node:
                    total += transfer["bytes"]
    return total


def two_nodes(job: Job, seconds: int) -> Step:
    """Rings over two simulated nodes of two ranks or more. With two GPUs, four ranks share
    them."""
    ranks_per_node = max(2, job.gpus // 2)
    length = "512" if job.small else "8k"
    shape = job.shape(length, "32,8,128")
    transport = ["--transport", "composite"] if job.device == "cuda" else []
    shared = ["--share-gpus"] if job.device == "cuda" and job.gpus < 4 else []
    schedules = ("ring", "double_ring")
    commands = []
    for schedule in schedules:
        commands.append(Command([job.annulus, "plan", "--device", job.device, "--dtype", "bfloat16",
                                 "--shape", shape, "--mesh", f"sp={2 * ranks_per_node}",
                                 "--ranks-per-node", str(ranks_per_node), "--schedule", schedule,
                                 *transport, "--json", "-"], f"{schedule}, planned"))
    measured = []
    for schedule in schedules:
        bench = job.bench(shape, "--schedule", schedule, *transport, *shared, "--iters", "10")
        words = [*job.mpirun]
        for node in ("one", "two"):
            words += [*([":"] if node == "two" else []), "-np", str(ranks_per_node), "-x",
                      f"ANNULUS_NODE={node}", "-x", f"NCCL_HOSTID={node}", job.annulus, *bench]
        measured.append(Command(words, schedule))

    def read(found: dict[str, list[Any]]) -> tuple[Any, list[Figure]]:
        sent = {schedule: crossing_bytes(found[f"{schedule}, planned"][0], ranks_per_node)
                for schedule in schedules}
        times = {schedule: median_time(found[schedule]) for schedule in schedules}
        # In double_ring, the keys of every rank cross once. In ring, those of two ranks cross at
        # every hop.
        figures = [Figure("double_ring ÷ ring, bytes between nodes",
                          sent["double_ring"] / sent["ring"],
                          ranks_per_node / (2 * ranks_per_node - 1), most=True),
                   Figure("double_ring ÷ ring, time", times["double_ring"] / times["ring"],
                          None if job.small else 1, most=True)]
        return {"bytes_between_nodes": sent, "ranks_per_node": ranks_per_node,
                "reports": [one for schedule in schedules for one in found[schedule]]}, figures

    return Step("two_nodes", "two_nodes", seconds, [*commands, *job.in_turns(measured)], read)


def random_problems(job: Job, seconds: int) -> Step:
    """Random problems over each transport."""
    count = 5 if job.small else 200
    transports = {"peer": ["--transport", "peer"], "nccl": ["--transport", "nccl"]}
    if job.device == "cpu":
        transports = {"mpi": []}
    commands = [Command(job.ranks(job.gpus, "verify", "--device", job.device, "--random",
                                  str(count), *words, "--json", "-"), name)
                for name, words in transports.items()]

    def read(found: dict[str, list[Any]]) -> tuple[Any, list[Figure]]:
        kept = {name: {key: report[key] for key in ("meta", "verdict")}
                for name, (report, *_) in found.items()}
        figures = [Figure(f"verify --random {count}, {name}: right",
                          float(kept[name]["verdict"]["passed"]) if name in kept else None, 1)
                   for name in transports]
        return kept or None, figures

    return Step("random", "random", seconds, commands, read)


def failures(job: Job, seconds: int) -> Step:
    """The tests of a rank that is killed, and of one that is stopped."""
    script = f"cli_{'gpu' if job.device == 'cuda' else 'failure'}_test.py"
    variables = {"ANNULUS_TEST_PROGRAM": os.path.abspath(job.annulus),
                 "ANNULUS_TEST_MPIEXEC": shlex.join([*job.mpirun, "-n"]),
                 "ANNULUS_TEST_CHECKER": os.path.join(systems.ROOT, "scripts", "check_attention.py"),
                 "PYTHONPATH": os.path.join(systems.ROOT, "tests", "support")}
    which = ("killed", "stopped")
    commands = [Command([job.python, os.path.join(TESTS, script), f"RankFails.test_{one}"], one,
                        variables) for one in which]

    def read(found: dict[str, list[Any]]) -> tuple[Any, list[Figure]]:
        passed = {one: True for one in which if one in found}
        return passed or None, [Figure(f"a {one} rank: the others end in time",
                                       1.0 if one in passed else None, 1) for one in which]

    return Step("failures", "failures", seconds, commands, read)


def steps(job: Job) -> list[Step]:
    """The most telling ones first, since time may run out."""
    return [compare(job, 210), choices(job, 85), decode(job, 45), strong(job, 50),
            two_nodes(job, 16), random_problems(job, 95), million(job, 30), failures(job, 60)]
