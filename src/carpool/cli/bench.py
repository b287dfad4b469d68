"""`carpool bench`: open-loop load with a verifier."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from carpool.cli.dlq import leave

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from carpool.tools.bench.tally import Report, TierReport


EXIT_NOT_CLEAN, EXIT_BAD_OPTION, EXIT_INTERRUPTED = 1, 2, 130
# Above this share of a core the generator's own delay shows in the latencies.
BUSY_SHARE_MAX = 0.9
SCHEDULE_HELP = (
    "Rates over time, RATE:TIME each, one after the other; TIME is 500ms, 10s, 2m or 1h. "
    "Example: 1000:10s,5000:2s,1000:10s"
)
TIERS_HELP = (
    "Requests of several tiers, NAME=KEYFILE:SHARE each: NAME for the report, a file with the API key to send "
    "(env:VARIABLE: from the environment; nothing: no key), the share of the requests. "
    "Example: paid=p.key:30,free=env:KEY:70"
)
SIZES_HELP = (
    "How large inputs are, as bytes of their JSON values. fixed: all as --payload-bytes says. "
    "lognormal:MEDIAN,SIGMA: as texts usually are, most of them short and a few long; SIGMA is that of the logarithm, "
    "and sizes are cut at 16 medians, or at a third number, as a model cuts its inputs. A file: one size a line, drawn "
    "at random (8 MiB of lines, sizes up to 16 MiB). After 65,536 requests the same sizes come again. "
    "Example: lognormal:240,0.9,2000"
)


def bench(
    url: Annotated[
        str,
        typer.Argument(help="Base URL of the gateway, such as http://127.0.0.1:8000."),
    ],
    face: Annotated[
        Literal["http", "openai"],
        typer.Option(
            help="What to call: /v1/inference; or /v1/embeddings of one text (base64), after a first request that "
            "shows whether the answers of this model can be verified."
        ),
    ] = "http",
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 1000.0,
    duration: Annotated[str, typer.Option(help="For how long: 500ms, 20s, 2m.")] = "20s",
    schedule: Annotated[str | None, typer.Option(help="In place of --rate and --duration. " + SCHEDULE_HELP)] = None,
    arrivals: Annotated[
        Literal["poisson", "uniform"],
        typer.Option(help="Random gaps as of independent clients, or even ones."),
    ] = "poisson",
    seed: Annotated[int, typer.Option(help="The same seed gives the same Poisson arrivals and the same sizes.")] = 0,
    connections: Annotated[
        int | None,
        typer.Option(
            help="Connections to keep open; each carries one request at a time. By default half the highest "
            "rate, 100 to 10000: enough for answers within half a second."
        ),
    ] = None,
    payload_bytes: Annotated[int, typer.Option(help="Size of each input's JSON value.")] = 2000,
    sizes: Annotated[str, typer.Option(help=SIZES_HELP)] = "fixed",
    poison: Annotated[
        str, typer.Option(help="Text that the simulated GPU refuses (its own --poison); refusals count as errors.")
    ] = "",
    poison_every: Annotated[
        int, typer.Option(help="One request in so many carries the poison, if its size has room.", min=0)
    ] = 0,
    mode: Annotated[
        Literal["sync", "task"],
        typer.Option(help="Wait for the answer, or submit a task and long-poll its result."),
    ] = "sync",
    model: Annotated[str | None, typer.Option(help="The model to name; by default none.")] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the API key or token to send, without --tiers; also CARPOOL_API_KEY, the key itself."
        ),
    ] = None,
    tiers: Annotated[str | None, typer.Option(help=TIERS_HELP)] = None,
    retry: Annotated[
        int,
        typer.Option(help="Send a refused request (429, 503) again after its Retry-After, so often at most.", min=0),
    ] = 0,
    timeout: Annotated[str, typer.Option(help="A request with no answer by then is an error.")] = "10s",
    json: Annotated[Path | None, typer.Option("--json", help="Also write the report to this file.")] = None,
    answers: Annotated[
        Path | None,
        typer.Option(
            help="Also write each request to this file, a JSON object a line: when it was due, its tier, its outcome, "
            "its latency. Keeps all of them in memory until the end."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no table.")] = False,
) -> None:
    """Send requests at a given rate, whatever the answers do, and verify every answer.

    Latency counts from when a request was due, also while it waits for a free connection, so no stall hides.
    Exits 1 on errors or wrong answers, 2 on bad options, 130 when interrupted (after the report so far).
    """
    # Here, so that the other commands do not pay for it.
    import uvloop
    from rich.console import Console

    from carpool.tools.bench import run
    from carpool.tools.bench.sizes import parse_sizes

    try:
        segments = run.segments_from(rate, duration, schedule)
        with run.option("--timeout"):
            timeout_s = run.parse_duration(timeout)
        with run.option("--tiers"):
            loads = run.parse_tiers(tiers) if tiers is not None else []
        with run.option("--sizes"):
            drawn = parse_sizes(sizes, seed)
        options = run.BenchOptions(
            url=url,
            segments=segments,
            connections=run.default_connections(segments) if connections is None else connections,
            payload_bytes=payload_bytes,
            sizes=drawn,
            drawn=sizes,
            poison=poison,
            poison_every=poison_every,
            face=face,
            mode=mode,
            arrivals=arrivals,
            seed=seed,
            model=model,
            timeout_s=timeout_s,
            tiers=loads,
            key="" if loads else run.key_from(api_key_file, os.environ),
            retries=retry,
        )
        target = run.resolve(url)
        run.raise_file_limit(options.connections)
    except run.BadOption as fault:
        leave(str(fault), EXIT_BAD_OPTION, "bench")
    # Before the run: minutes of load for a report that cannot be written would be a pity.
    for name, file in (("--json", json), ("--answers", answers)):
        if file is not None and (file.is_dir() or not os.access(file.parent, os.W_OK)):
            leave(f"{name} {file} cannot be written", EXIT_BAD_OPTION, "bench")
    recorded: list[run.Answered] = []

    def say(line: str) -> None:
        typer.echo(line, err=True)

    try:
        report, interrupted = uvloop.run(
            run.drive(options, target, say=None if quiet else say, answers=None if answers is None else recorded)
        )
    except run.NotVerifiable as fault:
        leave(f"--face {face}: {fault}", EXIT_NOT_CLEAN, "bench")
    except ConnectionError as fault:
        leave(f"cannot connect to {url}: {fault}", EXIT_NOT_CLEAN, "bench")
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if answers is not None:
        answers.write_bytes(msgspec.json.Encoder().encode_lines(recorded))
    if not quiet:
        print_report(report, Console())
    if not report.clean:
        raise typer.Exit(EXIT_NOT_CLEAN)
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def print_report(report: "Report", console: "Console") -> None:
    """Print the final table."""
    from rich.table import Table

    table = Table(show_header=False, title="carpool bench", title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    latency, queue = report.latency_ms, report.queue_ms
    table.add_row("rate", f"{report.rate:,.1f}/s answered of {report.intended_rate:,.1f}/s intended")
    table.add_row("sent", f"{report.sent:,}")
    table.add_row("ok", f"[green]{report.ok:,}[/green]")
    table.add_row("errors", _alarming(report.errors))
    table.add_row("wrong", _alarming(report.wrong))
    if report.unanswered:
        table.add_row("unanswered", f"[yellow]{report.unanswered:,}[/yellow]")
    table.add_row("status", "  ".join(f"{kind}: {count:,}" for kind, count in report.status.items()) or "-")
    table.add_section()
    for name, value in (
        ("latency p50", latency.p50),
        ("latency p90", latency.p90),
        ("latency p99", latency.p99),
        ("latency p99.9", latency.p999),
        ("latency max", latency.max),
        ("queue p50", queue.p50),
        ("queue p99", queue.p99),
    ):
        table.add_row(name, _ms(value))
    table.add_row("mean batch", "-" if report.batch_mean is None else f"{report.batch_mean:.1f}")
    if (sizes := report.input_bytes) is not None:
        table.add_row("input bytes", f"mean {sizes.mean:,.1f}  p99 {sizes.p99:,}  max {sizes.max:,}")
    table.add_row("generator", f"{report.generator_busy:.0%} of a core, late by {_ms(report.behind_ms.p99)} (p99)")
    if report.retries:
        table.add_row("sent again", f"{report.retries:,}")
    if report.refusal_ms.p99 is not None:
        table.add_row("refusals p99", _ms(report.refusal_ms.p99))
    console.print(table)
    if report.tiers:
        console.print(_tiers_table(report.tiers))
    if report.generator_busy > BUSY_SHARE_MAX:
        console.print("The generator used its whole core: part of the latency is its own.", style="yellow")


def _tiers_table(tiers: "dict[str, TierReport]") -> "Table":
    from rich.table import Table

    columns = ("tier", "offered", "ok", "goodput", "shed", "limited", "timed out", "failed", "wrong")
    table = Table(*columns, "p50", "p95", "p99", "refusals p99")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, tier in tiers.items():
        counts = (tier.shed, tier.limited, tier.timed_out, tier.failed, tier.wrong)
        latency = tier.latency_ms
        times = (latency.p50, latency.p95, latency.p99, tier.refusal_ms.p99)
        table.add_row(
            *(name, f"{tier.offered:,}", f"{tier.ok:,}", f"{tier.goodput:,.1f}/s"),
            *(f"{count:,}" for count in counts),
            *map(_ms, times),
        )
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f} ms"


def _alarming(count: int) -> str:
    return f"[red]{count:,}[/red]" if count else "0"
