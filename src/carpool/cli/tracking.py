"""`carpool requests`, `usage` and `tracking init`: what was kept of requests, from where the configuration says."""

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
import typer

from carpool.cli.dlq import EXIT_FAILED, leave, print_json, printable
from carpool.core.clock import rfc3339
from carpool.settings import ConfigError, load_settings

if TYPE_CHECKING:
    from carpool.tracking.records import RequestRecord, UsageRecord
    from carpool.tracking.stores import Store

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

tracking = typer.Typer(
    name="tracking",
    no_args_is_help=True,
    help="Where requests and batches are kept for questions afterwards (`tracking.store`).",
)

Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="The gateways' configuration file; also CARPOOL_CONFIG."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

Done = TypeVar("Done")
Shown = TypeVar("Shown")

REQUESTS_EPILOG = """\
[bold]Examples[/bold]

  carpool requests --owner alice --since 1h --failed

  carpool requests --batch 6b1f90c200000a17

Give it the configuration of your gateways: that says where rows are kept. A row comes when its request ends.
"""
REQUEST_COLUMNS: "dict[str, Callable[[RequestRecord], object]]" = {
    "completed at": lambda record: rfc3339(record.completed_at),
    "id": lambda record: record.id,
    "owner": lambda record: record.owner,
    "tier": lambda record: record.tier,
    "model": lambda record: record.model,
    "outcome": lambda record: record.error or "completed",
    "ms": lambda record: f"{record.latency_ms:.1f}",
    "queue ms": lambda record: "" if record.queue_ms is None else f"{record.queue_ms:.1f}",
    "batch": lambda record: record.batch_id or ("cached" if record.cached else ""),
    "size": lambda record: record.batch_size or "",
    "attempts": lambda record: record.attempts or "",
    "endpoint": lambda record: record.endpoint or "",
}
USAGE_COLUMNS: "dict[str, Callable[[UsageRecord], object]]" = {
    "requests": lambda used: used.requests,
    "failed": lambda used: used.failed,
    "cached": lambda used: used.cached,
    "tokens": lambda used: used.tokens,
    "GPU seconds": lambda used: f"{used.gpu_seconds:.3f}",
}
USAGE_EPILOG = """\
[bold]Examples[/bold]

  carpool usage --since 24h

  carpool usage --since 7d --by model --json

GPU seconds are those of the calls that answered, each shared by all whom it answered.
"""


@tracking.command()
def init(config: Config = None) -> None:
    """Make the tables, or bring them up to date. Do it once before the first start, and after an upgrade."""
    typer.echo(_with_store(config, lambda store: store.init()))


def requests(
    owner: Annotated[str | None, typer.Option(help="Only of this owner.")] = None,
    model: Annotated[str | None, typer.Option(help="Only of this model.")] = None,
    tier: Annotated[str | None, typer.Option(help="Only of this tier.")] = None,
    batch: Annotated[str | None, typer.Option(metavar="ID", help="Only of this batch.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only those that failed.")] = False,
    error: Annotated[str | None, typer.Option(metavar="CODE", help="Only with this error.")] = None,
    since: Annotated[str, typer.Option(metavar="TIME", help="How far back: 30s, 10m, 1h, 7d.")] = "1h",
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many at most.")] = 100,
    json: Json = False,
    config: Config = None,
) -> None:
    """List requests that have ended, the newest first."""
    from carpool.tracking.stores import RequestQuestion

    question = RequestQuestion(
        since=time.time() - seconds_of(since),
        owner=owner,
        model=model,
        tier=tier,
        batch_id=batch,
        error=error,
        is_failed=failed,
        limit=limit,
    )
    found = _with_store(config, lambda store: store.requests(question))
    if json:
        print_json({"requests": [shown_record(record) for record in found]})
        return
    _print_table(REQUEST_COLUMNS, found)
    if len(found) == limit:
        typer.echo(f"the newest {limit}; see --limit")


def usage(
    since: Annotated[str, typer.Option(metavar="TIME", help="How far back: 30s, 10m, 24h, 7d.")] = "24h",
    by: Annotated[Literal["owner", "model", "tier"], typer.Option(help="Whose sums.")] = "owner",
    json: Json = False,
    config: Config = None,
) -> None:
    """Sum up requests, tokens and GPU seconds, by owner or by model: what people bill by."""
    found = _with_store(config, lambda store: store.usage(time.time() - seconds_of(since), by))
    if json:
        print_json({"by": by, "usage": msgspec.to_builtins(found)})
    else:
        _print_table({by: lambda used: used.name} | USAGE_COLUMNS, found)


def find_kept(config: Path | None, request_id: str) -> Any:
    """What was kept of a request, as the admin port shows it; None if nothing was, or tracking is off."""
    from carpool.tracking.record_view import state_of_record

    if load_settings({}, environ=os.environ, file=config).tracking.store == "off":
        return None
    record = _with_store(config, lambda store: store.find(request_id))
    return None if record is None else msgspec.to_builtins(state_of_record(record))


def shown_record(record: "RequestRecord") -> dict[str, Any]:
    """A record as JSON shows it: times as people read them."""
    shown: dict[str, Any] = msgspec.to_builtins(record)
    return shown | {name: rfc3339(shown[name]) for name in ("created_at", "completed_at")}


def seconds_of(text: str) -> float:
    """A time span such as 90s, 10m, 1h or 7d."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", text.strip())
    if found is None:
        raise ConfigError("--since must be like 30s, 10m, 1h or 7d")
    return float(found[1]) * UNITS_S[found[2]]


def _with_store(config: Path | None, work: "Callable[[Store], Awaitable[Done]]") -> Done:
    """Do something with the store that the configuration names."""
    # Here, so that the other commands do not pay for it.
    from carpool.composition.tracking import make_store
    from carpool.tracking.stores import StoreAwayError, StoreUnusableError

    settings = load_settings({}, environ=os.environ, file=config)

    async def do() -> Done:
        store = make_store(settings)
        if store is None:
            raise ConfigError('tracking.store is "off": nothing is kept; see docs/tracking.md')
        try:
            return await work(store)
        finally:
            await store.close()

    try:
        return asyncio.run(do())
    except (StoreAwayError, StoreUnusableError) as failure:
        leave(str(failure), EXIT_FAILED, "tracking")


def _print_table(columns: "Mapping[str, Callable[[Shown], object]]", found: Sequence[Shown]) -> None:
    if not found:
        typer.echo("no requests")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, header_style="bold")
    for each in found:
        table.add_row(*(Text(printable(str(show(each)))) for show in columns.values()))
    console = Console()
    if not console.is_terminal:
        console.width = 1000  # a file or a pipe gets whole lines
    console.print(table)
