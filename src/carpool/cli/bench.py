"""`carpool bench`: open-loop load with a verifier."""

import os
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import msgspec
import typer

from carpool.tools.bench.schedule import SCHEDULE_HELP
from carpool.tools.bench.tiers import TIERS_HELP

EXIT_NOT_CLEAN, EXIT_BAD_OPTION, EXIT_INTERRUPTED = 1, 2, 130


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
    seed: Annotated[int, typer.Option(help="The same seed gives the same Poisson arrivals.")] = 0,
    connections: Annotated[
        int | None,
        typer.Option(
            help="Connections to keep open; each carries one request at a time. By default half the highest "
            "rate, 100 to 10000: enough for answers within half a second."
        ),
    ] = None,
    payload_bytes: Annotated[int, typer.Option(help="Size of each input's JSON value.")] = 2000,
    poison: Annotated[
        str, typer.Option(help="Text that the simulated GPU refuses (its own --poison); refusals count as errors.")
    ] = "",
    poison_every: Annotated[int, typer.Option(help="One request in so many carries the poison.", min=0)] = 0,
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

    from carpool.tools.bench.report import print_report
    from carpool.tools.bench.run import (
        Answered,
        BenchOptions,
        NotVerifiable,
        default_connections,
        drive,
        key_from,
        option,
        raise_file_limit,
        resolve,
        segments_from,
    )
    from carpool.tools.bench.schedule import BadOption, parse_duration
    from carpool.tools.bench.tiers import parse_tiers

    try:
        segments = segments_from(rate, duration, schedule)
        with option("--timeout"):
            timeout_s = parse_duration(timeout)
        with option("--tiers"):
            loads = parse_tiers(tiers) if tiers is not None else []
        options = BenchOptions(
            url=url,
            segments=segments,
            connections=default_connections(segments) if connections is None else connections,
            payload_bytes=payload_bytes,
            poison=poison,
            poison_every=poison_every,
            face=face,
            mode=mode,
            arrivals=arrivals,
            seed=seed,
            model=model,
            timeout_s=timeout_s,
            tiers=loads,
            key="" if loads else key_from(api_key_file, os.environ),
            retries=retry,
        )
        target = resolve(url)
        raise_file_limit(options.connections)
    except BadOption as fault:
        _leave(str(fault), EXIT_BAD_OPTION)
    # Before the run: minutes of load for a report that cannot be written would be a pity.
    for name, file in (("--json", json), ("--answers", answers)):
        if file is not None and (file.is_dir() or not os.access(file.parent, os.W_OK)):
            _leave(f"{name} {file} cannot be written", EXIT_BAD_OPTION)
    recorded: list[Answered] = []

    def say(line: str) -> None:
        typer.echo(line, err=True)

    try:
        report, interrupted = uvloop.run(
            drive(options, target, say=None if quiet else say, answers=None if answers is None else recorded)
        )
    except NotVerifiable as fault:
        _leave(f"--face {face}: {fault}", EXIT_NOT_CLEAN)
    except ConnectionError as fault:
        _leave(f"cannot connect to {url}: {fault}", EXIT_NOT_CLEAN)
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


def _leave(complaint: str, status: int) -> NoReturn:
    typer.echo(f"carpool bench: {complaint}", err=True)
    raise typer.Exit(status)
