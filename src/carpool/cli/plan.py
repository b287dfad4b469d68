"""`carpool plan`: what a load needs, with the arithmetic."""

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from carpool.cli.dlq import Json, examples, leave, print_json
from carpool.cli.tracking import seconds_of

if TYPE_CHECKING:
    from carpool.tools.plan import Plan

EXIT_BAD_OPTION = 2
EPILOG = examples(
    "carpool plan --rate 10000 --batch 64 --batch-ms 200",
    "carpool plan --rate 1000 --batch 32 --batch-ms 55 --target 0.7 --json",
)


def plan(
    rate: Annotated[float, typer.Option(help="Requests per second, usually.")] = 10_000.0,
    batch: Annotated[int, typer.Option(help="Inputs in a call.")] = 64,
    batch_ms: Annotated[float, typer.Option(help="How long a GPU takes for a call, without any wait for it.")] = 200.0,
    target: Annotated[float, typer.Option(help="How busy GPUs, gateways and batchers are to be, up to 1.")] = 0.75,
    peak: Annotated[float, typer.Option(help="The highest rate, as a multiple of --rate.")] = 3.0,
    payload_kb: Annotated[float, typer.Option(help="Size of an input, and of an output (KB of 1,000 bytes).")] = 2.0,
    retention: Annotated[str, typer.Option(metavar="TIME", help="How long outputs are kept: 30s, 10m, 1h, 7d.")] = "1h",
    gpu_price: Annotated[float, typer.Option(help="What a GPU costs to buy.")] = 30_000.0,
    storage_price: Annotated[float, typer.Option(help="What a GB of storage costs for a month.")] = 0.02,
    json: Json = False,
) -> None:
    """Tell how many GPUs, gateways and batchers a load needs, and how much Redis, bandwidth, storage and money.

    Every figure comes with its arithmetic, at the usual rate and at the peak. The command measures and starts nothing.
    """
    given = dict(locals())
    from carpool.tools.plan import PlanError, Workload, make_plan

    given["retention_s"] = seconds_of(retention, "--retention")
    try:
        work = Workload(**{name: given[name] for name in Workload.__struct_fields__})
    except PlanError as fault:
        leave(str(fault), EXIT_BAD_OPTION, "plan")
    made = make_plan(work)
    if json:
        print_json(msgspec.to_builtins(made))
    else:
        _print_lines(made)


def _print_lines(made: "Plan") -> None:
    """A part for each rate, a line for each figure; then what was assumed."""
    width = max(len(line.name) for line in made.usual.lines)
    parts = [("Usually", made.usual), ("At the peak", made.peak)]
    for title, sizing in parts if made.workload.peak > 1 else parts[:1]:
        typer.echo(typer.style(title, bold=True))
        for line in sizing.lines:
            typer.echo(f"  {line.name:{width}}  {line.says}")
        typer.echo()
    for assumption in made.assumptions:
        typer.echo(assumption)
