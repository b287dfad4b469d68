"""Is what `carpool simulate` says true? The same load there and on a real gateway: `make simulate-check`.

    .venv/bin/python bench/simulate_check.py [--only quiet,overload] [--runs 5] [--seconds 6] [--json FILE] [--keep]

Six settings. Each runs in `carpool simulate`, and then for real: `carpool bench`, a new `carpool serve` with the same
configuration file, and `carpool sim-gpu` behind it. One seed gives both the same arrivals, tiers and sizes; the first
seconds of both are not counted. What is compared are the medians of the runs, each with a seed of its own. It exits 1
if a figure is further off than it may be. `--keep` writes the table of docs/simulate.md, behind its mark.
"""

import argparse
import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.request import urlopen

import msgspec
from rich.table import Table

from keyed import SHARES, keyed
from measuring import (
    CARPOOL,
    MACHINE,
    ROOT,
    bench,
    console,
    cpu_seconds,
    failures,
    free_port,
    process,
    raise_file_limit,
)

PAGE = ROOT / "docs" / "simulate.md"
MARK = "<!-- `bench/simulate_check.py --keep` writes what follows; changes made below are lost. -->\n"
WARM_S = 2.0
# A `carpool sim-gpu` process has two: half of the GPUs are killed by ending one of two processes.
GPUS, GPUS_EACH = 4, 2
INPUT_BYTES = 500
DIES_S = 1.0
# Nobody waits longer than the queue timeout, 2 s, and a call.
STAY_S = 2.5
ALL = "all"


class Setting(NamedTuple):
    """A load and its GPUs, for both sides."""

    name: str
    rate: float
    gpu: Mapping[str, float] = {"latency_ms": 200}
    max_batch: int = 16
    sizes: str = "fixed"
    has_tiers: bool = False
    half_dies: bool = False


# Four GPUs of 200 ms and 16 inputs a batch do 320 a second.
SETTINGS = (
    Setting("quiet", 20, gpu={"latency_ms": 50}),
    Setting("busy", 240),
    Setting("2 x overload", 640),
    Setting("three tiers", 480, has_tiers=True),
    Setting("padded GPUs", 160, gpu={"latency_ms": 100, "padded_ms_per_kb": 10}, sizes="lognormal:240,0.9,2000"),
    Setting("half die", 280, half_dies=True),
)


class Figures(msgspec.Struct, frozen=True):
    """What is compared: answers a second, latencies of those answered, and requests without an answer of 200."""

    served: float
    p50_ms: float
    p99_ms: float
    refused: float


class Bound(NamedTuple):
    """How far off a figure may be: this share of the real one, or so much, whichever is more."""

    share: float
    least: float = 0.0

    def holds(self, simulated: float, real: float) -> bool:
        """Whether it is no further off."""
        return abs(simulated - real) <= max(self.share * real, self.least)


BOUNDS = {"served": Bound(0.05), "p50_ms": Bound(0.1, 3.0), "p99_ms": Bound(0.15, 10.0), "refused": Bound(0.1)}


class Compared(msgspec.Struct, frozen=True):
    """Of one setting the medians of all requests, or of a tier's."""

    setting: str
    who: str
    simulated: Figures
    real: Figures
    # Of a core, the real gateway.
    core: float

    @property
    def broken(self) -> list[str]:
        """The figures that are too far off."""
        return [name for name, bound in BOUNDS.items() if not bound.holds(*self.both(name))]

    def both(self, name: str) -> tuple[float, float]:
        """This figure, simulated and real."""
        return getattr(self.simulated, name), getattr(self.real, name)


def medians(runs: Iterable[Figures]) -> Figures:
    """Of each figure its median."""
    columns = zip(*map(msgspec.structs.astuple, runs), strict=True)
    return Figures(*map(median, columns))


def figures_of(answers: Iterable[Mapping[str, Any]], begins_s: float, seconds: float) -> Figures:
    """Of the lines of `carpool bench --answers`: of requests that were due in this time, and of all answers in it."""
    latencies: list[float] = []
    refused = served = 0
    for each in answers:
        is_ok = each["outcome"] == "200"
        served += is_ok and begins_s <= each["due_s"] + each["latency_ms"] / 1000 < begins_s + seconds
        if each["due_s"] >= begins_s:
            refused += not is_ok
            if is_ok:
                latencies.append(each["latency_ms"])
    latencies.sort()
    p50, p99 = (latencies[ceil(share * len(latencies)) - 1] if latencies else 0.0 for share in (0.5, 0.99))
    return Figures(served / seconds, p50, p99, refused)


def simulate(setting: Setting, config: Path, seed: int, seconds: float) -> dict[str, Figures]:
    """One run of `carpool simulate`: all requests, and each tier."""
    command = [*CARPOOL, "simulate", "--config", str(config), "--json", "--seed", str(seed)]
    command += ["--rate", f"{setting.rate:g}", "--warm", f"{WARM_S:g}", "--seconds", f"{seconds:g}", "--owners", "1"]
    command += ["--sizes", setting.sizes, "--payload-bytes", str(INPUT_BYTES)]
    command += [
        "--gpus",
        str(GPUS),
        "--gpu",
        "sim:?" + "&".join(f"{key}={value}" for key, value in setting.gpu.items()),
    ]
    if setting.has_tiers:
        command += ["--tiers", ",".join(f"{tier}={share}" for tier, share in SHARES.items())]
    if setting.half_dies:
        command += ["--dies", f"1-{GPUS_EACH}@{DIES_S:g}"]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout)
    tiers = report["tiers"] if setting.has_tiers else {}
    return {who: _figures_of_tier(tier) for who, tier in ({ALL: report["all"]} | tiers).items()}


def _figures_of_tier(tier: Mapping[str, Any]) -> Figures:
    times = tier["latency_ms"]
    return Figures(tier["goodput"], times["p50"] or 0.0, times["p99"] or 0.0, tier["offered"] - tier["ok"])


class SimGpus(NamedTuple):
    """A process of simulated GPUs: the address of all of them, and the first port."""

    address: str
    port: int


@contextmanager
def sim_gpus(setting: Setting) -> Iterator[SimGpus]:
    """Such a process, until the block ends."""
    port = free_port()
    last = port + GPUS_EACH - 1
    command = [*CARPOOL, "sim-gpu", "--port", str(port), "--workers", str(GPUS_EACH)]
    for key, value in setting.gpu.items():
        command += [f"--{key.replace('_', '-')}", str(value)]
    with process(command, last):
        yield SimGpus(f"http://127.0.0.1:{port}-{last}/infer", port)


def real(
    setting: Setting, gpus: list[SimGpus], config: Path, tiers: str, seed: int, seconds: float
) -> tuple[dict[str, Figures], float]:
    """One run of a gateway and `carpool bench`; the same figures, and how much of a core the gateway used."""
    with ExitStack() as stack, tempfile.TemporaryDirectory() as directory:
        if setting.half_dies:
            doomed = stack.enter_context(ExitStack())
            short_lived = doomed.enter_context(sim_gpus(setting))
            gpus = [short_lived, *gpus]
            killer = threading.Thread(target=kill_in_time, args=(doomed, short_lived))
        port, answers = free_port(), Path(directory) / "answers.jsonl"
        command = [*CARPOOL, "serve", "--config", str(config), "--port", str(port), "--data-dir", directory]
        for each in gpus:
            command += ["--upstream", each.address]
        gateway = stack.enter_context(process(command, port))
        if setting.half_dies:
            killer.start()
        # Twice the same rate, which is what --warm stands for: so the gaps are the same ones.
        flags = ["--schedule", f"{setting.rate:g}:{WARM_S:g}s,{setting.rate:g}:{seconds:g}s", "--seed", str(seed)]
        flags += ["--connections", str(max(100, round(setting.rate * STAY_S))), "--sizes", setting.sizes]
        flags += ["--payload-bytes", str(INPUT_BYTES), "--answers", str(answers)]
        began, used_s = time.monotonic(), cpu_seconds(gateway.pid)
        report = bench(port, *flags, *(["--tiers", tiers] if tiers else []))
        core = (cpu_seconds(gateway.pid) - used_s) / (time.monotonic() - began)
        if setting.half_dies:
            killer.join()
        if report["wrong"] or report["unanswered"]:
            failures.append(f"{setting.name}: {report['wrong']} wrong, {report['unanswered']} never answered")
        lines = [json.loads(line) for line in answers.read_text().splitlines()]
    found = {ALL: figures_of(lines, WARM_S, seconds)}
    for tier in SHARES if tiers else ():
        found[tier] = figures_of((each for each in lines if each["tier"] == tier), WARM_S, seconds)
    return found, core


def kill_in_time(doomed: ExitStack, gpus: SimGpus) -> None:
    """Once their first call has come: end these GPUs so long after it as the simulation has it."""
    while not any(calls_of(gpus.port + number) for number in range(GPUS_EACH)):
        time.sleep(0.01)
    time.sleep(WARM_S + DIES_S)
    doomed.close()


def calls_of(port: int) -> int:
    """How many calls a GPU has seen."""
    with urlopen(f"http://127.0.0.1:{port}/stats", timeout=5) as answer:
        calls: int = json.load(answer)["calls"]
        return calls


def compare(setting: Setting, runs: int, seconds: float) -> list[Compared]:
    """One setting: so many runs of both sides."""
    seeds = range(1, runs + 1)
    found: dict[str, list[Figures]] = {}
    cores = []
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config, tiers = directory / "carpool.toml", ""
        batching = f"[batching]\nmax_batch = {setting.max_batch}\n"
        if setting.has_tiers:
            tiers = keyed(directory, batching).tiers
        else:
            config.write_text(batching)
        console.print(f"{setting.name}: simulating ...")
        with ThreadPoolExecutor(2) as threads:
            simulated = list(threads.map(lambda seed: simulate(setting, config, seed, seconds), seeds))
        # Those that are to die are begun for each run.
        lasting = GPUS // GPUS_EACH - setting.half_dies
        gpus = [stack.enter_context(sim_gpus(setting)) for _ in range(lasting)]
        for seed in seeds:
            console.print(f"{setting.name}: run {seed} of {runs} ...")
            figures, core = real(setting, gpus, config, tiers, seed, seconds)
            cores.append(core)
            for who, each in figures.items():
                found.setdefault(who, []).append(each)
    return [
        Compared(setting.name, who, medians(each[who] for each in simulated), medians(figs), round(median(cores), 2))
        for who, figs in found.items()
    ]


COLUMNS = ("setting", "who", "answers/s", "p50 (ms)", "p99 (ms)", "without an answer", "gateway", "holds")


def row(compared: Compared) -> list[str]:
    """As the table has it: each figure simulated, and then real."""
    cells = [f"{here:,.0f} / {there:,.0f}" for here, there in map(compared.both, BOUNDS)]
    holds = "NO: " + ", ".join(compared.broken) if compared.broken else "yes"
    return [compared.setting, compared.who, *cells, f"{compared.core:.0%}", holds]


def markdown(rows: Iterable[Compared]) -> str:
    """The same for docs/simulate.md."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(row, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Run both, print the table, and say whether it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--only", default=",".join(names), help=f"of these, by their beginnings: {', '.join(names)}")
    parser.add_argument("--runs", type=int, default=5, help="of each setting, on each side")
    parser.add_argument("--seconds", type=float, default=6.0, help="of load in each run, after the warming up")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--keep", action="store_true", help="write the table of docs/simulate.md")
    asked = parser.parse_args()
    raise_file_limit()
    wanted = tuple(asked.only.split(","))
    chosen = [setting for setting in SETTINGS if setting.name.startswith(wanted)]
    if not chosen:
        parser.error(f"--only: there are {', '.join(names)}")
    found = [each for setting in chosen for each in compare(setting, asked.runs, asked.seconds)]
    table = Table(*COLUMNS, title="simulated / real", title_justify="left")
    for each in found:
        table.add_row(*row(each))
        failures.extend(f"{each.setting}, {each.who}: {name} is too far off" for name in each.broken)
    console.print(table)
    if asked.json is not None:
        asked.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    if asked.keep:
        told = (
            f"Measured on {datetime.now(UTC):%Y-%m-%d} with `make simulate-check`, {MACHINE} for all of it: medians of "
            f"{asked.runs} runs of {asked.seconds:g} s, simulated / real; `gateway` is how much of a core it used."
        )
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(f"{page.partition(MARK)[0]}{MARK}\n{told}\n\n{markdown(found)}\n", encoding="utf-8")
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
