"""`carpool plan`: what a load needs, with the arithmetic."""

import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from carpool.cli.dlq import Json, examples, leave, print_json
from carpool.cli.simulate import undisturbed
from carpool.cli.tracking import seconds_of

if TYPE_CHECKING:
    from carpool.tools.plan import Plan
    from carpool.tools.verify import Checked, Verified

EXIT_BAD_OPTION, EXIT_TOO_SMALL = 2, 1
EPILOG = examples(
    "carpool plan --rate 10000 --batch 64 --batch-ms 200",
    "carpool plan --rate 1000 --batch 32 --batch-ms 55 --target 0.7 --json",
    "carpool plan --rate 1000 --batch 32 --batch-ms 55 --verify --p99-ms 150",
)


def plan(
    rate: Annotated[float, typer.Option(help="Requests per second, usually.")] = 10_000.0,
    batch: Annotated[int, typer.Option(help="Inputs in a call.")] = 64,
    batch_ms: Annotated[
        float, typer.Option(help="How long a GPU takes for one call of --batch inputs, once it has begun.")
    ] = 200.0,
    target: Annotated[float, typer.Option(help="How busy GPUs, gateways and batchers are to be, up to 1.")] = 0.75,
    peak: Annotated[float, typer.Option(help="The highest rate, as a multiple of --rate.")] = 3.0,
    payload_kb: Annotated[float, typer.Option(help="Size of an input, and of an output (KB of 1,000 bytes).")] = 2.0,
    retention: Annotated[str, typer.Option(metavar="TIME", help="How long outputs are kept: 30s, 10m, 1h, 7d.")] = "1h",
    gpu_price: Annotated[
        float, typer.Option(help="What a GPU costs to buy; it is written off over 3 years.")
    ] = 30_000.0,
    storage_price: Annotated[float, typer.Option(help="What a GB of storage costs for a month.")] = 0.02,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Simulate the plan: does p99 hold? And with how few GPUs would it? Takes a minute at most."
        ),
    ] = False,
    p99_ms: Annotated[float, typer.Option(help="With --verify: 99 of 100 requests are to be answered by then.")] = 500,
    json: Json = False,
) -> None:
    """Tell how many GPUs, gateways and batchers a load needs, and how much Redis, bandwidth, storage and money.

    Every figure comes with its arithmetic, at the usual rate and at the peak. The command measures and starts nothing.
    With --verify it exits 1 if the planned GPUs are too few.
    """
    given = dict(locals())
    from carpool.tools.plan import PlanError, Workload, make_plan

    given["retention_s"] = seconds_of(retention, "--retention")
    try:
        work = Workload(**{name: given[name] for name in Workload.__struct_fields__})
    except PlanError as fault:
        leave(str(fault), EXIT_BAD_OPTION, "plan")
    made = make_plan(work)
    try:
        verified = _verify(made, p99_ms) if verify else {}
    except PlanError as fault:
        leave(str(fault), EXIT_BAD_OPTION, "plan")
    if json:
        found = {"verified": msgspec.to_builtins(verified)} if verify else {}
        print_json(msgspec.to_builtins(made) | found)
    else:
        _print_lines(made, verified)
    if not all(each.planned.holds for each in verified.values()):
        raise typer.Exit(EXIT_TOO_SMALL)


def _verify(made: "Plan", p99_ms: float) -> "dict[str, Verified]":
    """By rate; on a terminal each run is told."""
    from carpool.tools import verify as tool

    def tell(rate: float, checked: "Checked") -> None:
        if sys.stderr.isatty():
            typer.echo(f"{rate:,g}/s with {checked_text(checked)}", err=True)

    sizings = {"usual": made.usual, "peak": made.peak} if made.workload.peak > 1 else {"usual": made.usual}
    with undisturbed():
        return {name: tool.verify(made.workload, sizing, p99_ms, tell) for name, sizing in sizings.items()}


def checked_text(checked: "Checked") -> str:
    """What was simulated, in words."""
    p99 = "nothing answered" if checked.p99_ms is None else f"p99 {checked.p99_ms:,.0f} ms"
    refused = "" if checked.answered_share == 1 else f", {1 - checked.answered_share:.2%} without an answer"
    gpus = f"{checked.gpus:,} GPU{'s' * (checked.gpus > 1)}"
    return f"{gpus}: {p99}{refused}, {checked.busy_share:.1%} busy"


def verified_lines(verified: "Verified") -> list[str]:
    """What became of the plan at one rate."""
    planned, smallest, wanted = verified.planned, verified.smallest, f"p99 {verified.p99_ms_max:,g} ms"
    if planned.holds:
        verdict = f"{wanted} holds"
    elif planned.p99_ms is None or planned.p99_ms > verified.p99_ms_max:
        verdict = f"too few for {wanted}"
    else:
        verdict = "too few: with no headroom the queue never shrinks"
    if smallest is None:
        then = "no fleet of twice the size holds it either"
    elif smallest.gpus == planned.gpus:
        then = "no smaller fleet holds it"
    else:
        then = f"the smallest that holds it: {checked_text(smallest)}"
    return [f"{verified.rate:,g}/s, {checked_text(planned)} -> {verdict}", then]


def _print_lines(made: "Plan", verified: "dict[str, Verified]") -> None:
    """A part for each rate, a line for each figure; then what was assumed."""
    width = max(len(line.name) for line in made.usual.lines)
    parts = [("Usually", made.usual), ("At the peak", made.peak)]
    for title, sizing in parts if made.workload.peak > 1 else parts[:1]:
        typer.echo(typer.style(title, bold=True))
        for line in sizing.lines:
            typer.echo(f"  {line.name:{width}}  {line.says}")
        typer.echo()
    if verified:
        typer.echo(typer.style("Simulated", bold=True))
        for each in verified.values():
            for text in verified_lines(each):
                typer.echo(f"  {text}")
        typer.echo()
    for assumption in made.assumptions:
        typer.echo(assumption)
