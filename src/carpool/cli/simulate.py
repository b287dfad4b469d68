"""`carpool simulate`: what becomes of a load, without a GPU: the engine on virtual time."""

import gc
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from carpool.cli.bench import SCHEDULE_HELP, SIZES_HELP
from carpool.cli.dlq import Json, examples, leave, print_json, print_table
from carpool.settings import Settings, load_settings
from carpool.settings.resolution import path_of

if TYPE_CHECKING:
    from carpool.tools.bench.tally import TierReport
    from carpool.tools.simulate import Simulated
    from carpool.tools.simulated_fleet import Scaled

EXIT_BAD_OPTION, EXIT_FAILED = 2, 1
WARM_S = 5.0
# So many spans of time are told of where the fleet is scaled.
SCALED_ROWS = 24
EPILOG = examples(
    "carpool simulate --rate 10000 --gpus 40",
    "carpool simulate --rate 2000 --gpus 5 --tiers enterprise=10,paid=30,free=60",
    "carpool simulate --rate 2000 --gpus 8 --compare policy=fixed,adaptive,pid",
    "carpool simulate --rate 200 --gpu 'sim:?latency_ms=2&padded_ms_per_kb=2' --sizes lognormal:240,0.9,2000",
    "carpool simulate --rate 1000 --gpus 4 --dies 1-2@10..20 --svg run.svg",
    "carpool simulate --schedule 300:30m,900:1h,300:2h --gpus 10 --scale --svg run.svg",
    "carpool simulate --trace .carpool/tracking.db --costs fleet.json",
)


def simulate(
    rate: Annotated[float, typer.Option(help="Requests per second, with random gaps as of independent clients.")] = (
        1000.0
    ),
    seconds: Annotated[float, typer.Option(help="For how long, in virtual time.")] = 30.0,
    schedule: Annotated[str | None, typer.Option(help="In place of --rate and --seconds. " + SCHEDULE_HELP)] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="In place of these and of --tiers and --owners: what came once. tracking.db; what `carpool requests "
            "--json` printed; the report of `carpool bench --json`; or a JSON object a line, with `due_s`, and `tier`, "
            "`owner`, `bytes` where they are known.",
        ),
    ] = None,
    warm: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="So many seconds of the first rate go before, uncounted; of a trace, its first ones do not count "
            "(default 5; with --trace 0).",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1, max=4096, help="How many GPUs there are, each an endpoint (default 4, or as many as --costs has)."
        ),
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="How each of them behaves, as in upstream.endpoints; sim: alone takes 200 ms a call, one at a time. "
            "Example: sim:?latency_ms=50 and behind that &slots=2. So go the options of `carpool sim-gpu` from "
            "--latency-ms on, with _ in place of -.",
        ),
    ] = "sim:",
    costs: Annotated[
        Path | None,
        typer.Option(
            help="How long calls take, as a running gateway has learned it: a file with what its /internal/fleet says."
        ),
    ] = None,
    dies: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GPUS@FROM[..TO]",
            help="GPUs die, and may come back: 1-4@30..60 is GPUs 1 to 4 from second 30 to 60 after the warming up, "
            "3@10 GPU 3 from second 10 to the end. May be repeated.",
        ),
    ] = None,
    starts: Annotated[
        list[str] | None,
        typer.Option(metavar="GPUS@FROM", help="GPUs serve only from then on, such as 5-8@120. May be repeated."),
    ] = None,
    scale: Annotated[
        bool,
        typer.Option(
            "--scale",
            help="GPUs are ordered and given up as the rules of scaling say (docs/scaling-rules.md); --gpus are there "
            "at first.",
        ),
    ] = False,
    start_up: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="With --scale: how long a GPU that is ordered takes.")
    ] = 180.0,
    gpu_price: Annotated[
        float, typer.Option(min=0, help="What a GPU costs to buy; it is written off over 3 years.")
    ] = 30_000.0,
    tiers: Annotated[
        str | None,
        typer.Option(
            help="Requests of several tiers, NAME=SHARE each; by default all are of the lowest. "
            "Example: paid=30,free=70"
        ),
    ] = None,
    owners: Annotated[int, typer.Option(min=1, max=100_000, help="Owners of each tier, who ask equally often.")] = 100,
    payload_bytes: Annotated[
        int, typer.Option(min=4, max=16 * 1024 * 1024, help="Size of each input's JSON value.")
    ] = 2000,
    sizes: Annotated[str, typer.Option(help=SIZES_HELP)] = "fixed",
    arrivals: Annotated[
        Literal["poisson", "uniform"],
        typer.Option(help="Random gaps; or even ones, as the sum of very many clients has at a small rate."),
    ] = "poisson",
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="The same seed gives the same figures.")] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="This value, whatever the configuration file and the environment say. May be repeated. "
            "Example: batching.max_wait_ms=20",
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=A,B,…",
            help="Run the same load once for each value of a setting. Example: policy=fixed,adaptive,pid",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="The configuration file; also CARPOOL_CONFIG.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw rates, p99 and GPUs over time.")] = None,
    json: Json = False,
) -> None:
    """Run Carpool's own engine, load shedding included, on virtual time against simulated GPUs.

    Virtual time does not wait: where the engine would, its clock jumps on, so minutes take seconds.

    It prints latencies, refusals, how busy the GPUs are and what they cost. Settings are the usual ones, of
    carpool.toml and the environment, for the model that is meant when a client names none. The command serves and
    calls nothing.
    """
    from carpool.tools import simulate as tool
    from carpool.tools.bench.run import BadOption, option, parse_schedule, parse_tiers
    from carpool.tools.bench.sizes import parse_sizes
    from carpool.tools.traces import read_costs, read_trace
    from carpool.upstream.simulated import parse_sim_url

    try:
        with option("--schedule" if schedule is not None else "--rate and --seconds"):
            segments = parse_schedule(schedule if schedule is not None else f"{rate}:{seconds}")
        with option("--tiers"):
            shares = parse_tiers(tiers, with_keys=False) if tiers is not None else []
        with option("--sizes"):
            drawn = parse_sizes(sizes, seed)
        with option("--set"):
            given = dict(map(tool.parse_setting, settings or []))
        with option("--compare"):
            path, values = tool.parse_compared(compare) if compare is not None else ("", [""])
            if path and svg is not None:
                raise BadOption("a picture is of one run; leave --svg out")
        try:
            each = parse_sim_url(gpu)
        except ValueError as fault:
            raise BadOption(f"--gpu: {fault}") from None
        variants = [_load_settings(given | ({path: value} if path else {}), config) for value in values]
        count = 4
        with option("--costs"):
            if costs is not None:
                each, count = read_costs(costs, variants[0].model, each)
        count = count if gpus is None else gpus
        with option("--dies and --starts"):
            away = tool.parse_away(dies or [], starts or [], count)
        load = tool.Load(
            segments=segments,
            warm_s=WARM_S if warm is None else warm,
            tiers=shares,
            owners=owners,
            sizes=drawn,
            payload_bytes=payload_bytes,
            arrivals=arrivals,
            seed=seed,
        )
        if trace is not None:
            with option("--trace"):
                load = tool.recorded_load(read_trace(trace, variants[0].model), load, warm or 0.0)
        fleet = tool.Gpus(count=count, each=each, away=away, price=gpu_price, start_up_s=start_up if scale else None)
        moments = 0 if svg is None else tool.MOMENTS
        with undisturbed():
            runs = [tool.Simulation(variant, load, fleet, moments=moments).run() for variant in variants]
    except BadOption as fault:
        leave(str(fault), EXIT_BAD_OPTION, "simulate")
    if svg is not None:
        try:
            svg.write_text(tool.picture(runs[0]), encoding="utf-8")
        except OSError as fault:
            leave(f"--svg: {svg} cannot be written: {fault.strerror}", EXIT_FAILED, "simulate")
    if json:
        found = {value: msgspec.to_builtins(run) for value, run in zip(values, runs, strict=True)}
        print_json({"compared": path, "runs": found} if path else found[""])
        return
    rows = [[value, *row] for value, run in zip(values, runs, strict=True) for row in _rows(run)]
    columns = (
        "tier",
        "offered",
        "served",
        "p50",
        "p95",
        "p99",
        "503",
        "other errors",
        "mean batch",
        "GPUs busy",
        "a million",
    )
    print_table((path, *columns) if path else columns, rows if path else [row[1:] for row in rows])
    for value, run in zip(values, runs, strict=True):
        if run.scaled is not None:
            _tell_scaled(f"{path}={value}: " if path else "", run, run.scaled)


def _tell_scaled(name: str, run: "Simulated", scaled: "Scaled") -> None:
    """How many GPUs there were, and how busy."""
    steady = "the number was never steady"
    if scaled.steady_busy_share is not None:
        share, lowest, highest = scaled.steady_busy_share, scaled.steady_lowest, scaled.steady_highest
        steady = f"busy for {share:.1%} of their time while all was steady ({lowest:.0%} to {highest:.0%})"
    typer.echo(f"\n{name}{scaled.gpus_mean:,.1f} GPUs in the mean, {scaled.gpus_most:,} at most; {steady}")
    rows, length = [], ceil(len(run.moments) / SCALED_ROWS)
    for first in range(0, len(run.moments), length):
        span = run.moments[first : first + length]
        slowest = max((each.p99_ms for each in span if each.p99_ms is not None), default=None)
        rows.append(
            [
                _clock_time(span[-1].at_s),
                *(
                    f"{mean(values):,.1f}/s"
                    for values in zip(*((each.offered, each.refused) for each in span), strict=True)
                ),
                "-" if slowest is None else f"{slowest:,.1f} ms",
                str(span[-1].gpus_wanted),
                str(span[-1].gpus_there),
                f"{mean(each.busy_share for each in span):.0%}",
            ]
        )
    print_table(("until", "offered", "not served", "worst p99", "GPUs wanted", "there", "busy"), rows)


def _clock_time(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


@contextmanager
def undisturbed() -> Iterator[None]:
    """With few passes of the garbage collector, as app.py, and no log of GPUs that fail, which the figures tell."""
    logger, only_defects, thresholds = logging.getLogger("carpool"), logging.StreamHandler(), gc.get_threshold()
    only_defects.addFilter(_is_defect)
    logger.addHandler(only_defects)
    logger.propagate = False
    gc.set_threshold(100_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        logger.propagate = True
        logger.removeHandler(only_defects)


def _is_defect(record: logging.LogRecord) -> bool:
    return record.exc_info is not None


def _load_settings(given: Mapping[str, str], config: Path | None) -> Settings:
    """The settings with those that the command line has."""
    from carpool.tools.bench.run import BadOption

    loaded = load_settings(given, environ=os.environ, file=config, flag="--set or --compare")
    own = loaded.models.get(loaded.model, {})
    for path in given:
        section, _, key = path.partition(".")
        if (stronger := path_of(loaded.model, own, key, section)) != path:
            raise BadOption(f"{path} would change nothing, as the file has {stronger}: take that out of it")
    return loaded


def _rows(run: "Simulated") -> list[list[str]]:
    """All of it, then each tier if there are several."""
    mean = "-" if run.batch_mean is None else f"{run.batch_mean:.1f}"
    tiers = run.tiers if len(run.tiers) > 1 else {}
    rows = [_row(name, tier, run.seconds) for name, tier in [("all", run.all), *tiers.items()]]
    rows[0] += [
        mean,
        f"{run.busy_share:.1%}",
        "-" if run.money_per_million is None else f"{run.money_per_million:,.2f}",
    ]
    return rows


def _row(name: str, tier: "TierReport", seconds: float) -> list[str]:
    latency, others = tier.latency_ms, tier.limited + tier.timed_out + tier.failed
    times = ("-" if value is None else f"{value:,.1f} ms" for value in (latency.p50, latency.p95, latency.p99))
    rates = f"{tier.offered / seconds:,.1f}/s", f"{tier.goodput:,.1f}/s"
    return [name, *rates, *times, f"{tier.shed:,}", f"{others:,}"]
