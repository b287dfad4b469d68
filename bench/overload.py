"""What becomes of each tier as the load goes from half to ten times of what the GPUs can do: `make overload`.

    .venv/bin/python bench/overload.py [--seconds 8] [--modes predicted,thresholds,off] [--draw]

One gateway, 32 simulated GPUs that do 320 requests a second together; 5 % of the load is enterprise, 25 % paid, 70 %
free; open loop. The same with Carpool's shedding, with thresholds, with none. Writes the data and the pictures of
docs/overload.md to docs/overload/; `--draw` makes the pictures again from the data that is there.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

import measuring
from carpool.tools.charts import Axis, Panel, draw
from keyed import SHARES, keyed
from measuring import CARPOOL, MACHINE, ROOT, bench, console, free_port, process, show

FOLDER = ROOT / "docs" / "overload"
DATA = FOLDER / "data.json"
MODES = {"predicted": "predicted wait (default)", "thresholds": "thresholds", "off": "no shedding"}
TIMES = (0.5, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
SLOTS, BATCH, CALL_MS = 32, 2, 200
# 320 a second: ten times as much is what load and gateway can do beside one another on two cores.
CAPACITY = SLOTS * BATCH * 1000 / CALL_MS
# Over the total timeout of a synchronous request, 4 s: whoever has no answer by then was forgotten.
TIMEOUT = "5s"
# Without shedding everybody stays for the queue timeout, 2 s: an open loop needs a connection for each.
STAY_S = 2.2
# With its own delay above this the generator was not keeping up: such a point says little.
BEHIND_MS_MAX = 50.0


class TierPoint(msgspec.Struct, frozen=True):
    """One tier at one load."""

    offered: int
    ok: int
    shed: int
    timed_out: int
    failed: int
    goodput: float
    p50_ms: float | None
    p99_ms: float | None
    refusal_p99_ms: float | None


class Point(msgspec.Struct, frozen=True):
    """One load."""

    times: float
    tiers: dict[str, TierPoint]
    wrong: int
    # How late the generator itself was (p99), and how much of a core it used.
    behind_ms: float
    generator_busy: float


class Run(msgspec.Struct, frozen=True):
    """All of it."""

    machine: str
    seconds: float
    capacity: float
    modes: dict[str, list[Point]]


def measure(mode: str, seconds: float) -> list[Point]:
    """One gateway, one load after the other; each begins when all of the one before are answered."""
    points = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        keys = keyed(directory, f'[shedding]\nmode = "{mode}"')
        port = free_port()
        command = [*CARPOOL, "serve", "--config", str(keys.config), "--port", str(port), "--data-dir", name]
        command += ["--upstream", f"sim:?latency_ms={CALL_MS}&slots={SLOTS}", "--max-batch", str(BATCH)]
        with process(command, port):
            load(port, keys.tiers, 0.5, 3.0)  # connections and code warm, the capacity known
            for times in TIMES:
                console.print(f"{mode}, {times:g} x ...")
                points.append(point_of(times, load(port, keys.tiers, times, seconds)))
                time.sleep(0.5)
    return points


def load(port: int, tiers: str, times: float, seconds: float) -> dict[str, Any]:
    rate = CAPACITY * times
    connections = min(max(int(rate * STAY_S), 200), 8000)
    flags = ["--rate", f"{rate:g}", "--duration", f"{seconds}s", "--connections", str(connections)]
    return bench(port, *flags, "--timeout", TIMEOUT, "--payload-bytes", "500", "--tiers", tiers)


def point_of(times: float, report: dict[str, Any]) -> Point:
    tiers = {
        name: TierPoint(
            **{count: tier[count] for count in ("offered", "ok", "shed", "timed_out", "goodput")},
            failed=tier["failed"] + tier["limited"] + tier["unanswered"],
            p50_ms=tier["latency_ms"]["p50"],
            p99_ms=tier["latency_ms"]["p99"],
            refusal_p99_ms=tier["refusal_ms"]["p99"],
        )
        for name, tier in report["tiers"].items()
    }
    return Point(times, tiers, report["wrong"], report["behind_ms"]["p99"] or 0.0, report["generator_busy"])


def draw_pictures(run: Run) -> None:
    """The pictures of docs/overload.md."""
    x = Axis("offered load, times the capacity", (0.5, 1, 2, 5, 10), is_logarithmic=True)
    goodput = panels(run, lambda tier: 100 * tier.goodput / run.capacity)
    latency = panels(run, lambda tier: tier.p99_ms)
    refused = panels(run, lambda tier: 100 * (1 - tier.ok / max(tier.offered, 1)))
    share = Axis("% of the capacity", (0, 25, 50, 75, 100, 125))
    ms = Axis("ms", (100, 200, 500, 1000, 2000, 5000), is_logarithmic=True)
    percent = Axis("% of the tier's requests", (0, 25, 50, 75, 100))
    pictures = {
        "goodput": draw("Answered with 200, a second", goodput, x, share, stacked=True, mark=100.0),
        "p99": draw("p99 of those answered with 200", latency, x, ms),
        "refused": draw("Refused, or not answered in time", refused, x, percent),
    }
    for name, picture in pictures.items():
        (FOLDER / f"{name}.svg").write_text(picture)


def panels(run: Run, figure: Callable[[TierPoint], float | None]) -> list[Panel]:
    """One for each mode: this figure of each tier."""
    return [
        Panel(
            MODES[mode],
            [point.times for point in points],
            {name: [figure(point.tiers[name]) for point in points] for name in SHARES},
        )
        for mode, points in run.modes.items()
    ]


def tell(run: Run) -> None:
    """A table for each mode."""
    for mode, points in run.modes.items():
        rows = []
        for point in points:
            goodput = sum(tier.goodput for tier in point.tiers.values())
            figures = "; ".join(
                f"{name} {tier.ok / max(tier.offered, 1):.0%} p99 {tier.p99_ms or 0:.0f} ms, {tier.timed_out} late"
                for name, tier in point.tiers.items()
            )
            note = "" if point.behind_ms <= BEHIND_MS_MAX else f"the load was late by {point.behind_ms:.0f} ms"
            rows.append((f"{point.times:g} x", figures, f"{goodput / run.capacity:.0%} of capacity", note))
        show(f"{MODES[mode]}: capacity {run.capacity:g}/s", rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="of load at each point")
    parser.add_argument("--modes", default=",".join(MODES), help="which to run")
    parser.add_argument("--draw", action="store_true", help="only draw again what was measured")
    options = parser.parse_args()
    if options.draw:
        run = msgspec.json.decode(DATA.read_bytes(), type=Run)
    else:
        measuring.raise_file_limit()
        modes = {mode: measure(mode, options.seconds) for mode in options.modes.split(",")}
        run = Run(MACHINE, options.seconds, CAPACITY, modes)
        FOLDER.mkdir(exist_ok=True)
        DATA.write_bytes(msgspec.json.format(msgspec.json.encode(run)) + b"\n")
    draw_pictures(run)
    tell(run)
    for failure in measuring.failures:
        console.print(f"does not hold: {failure}")
    return 1 if measuring.failures else 0


if __name__ == "__main__":
    sys.exit(main())
