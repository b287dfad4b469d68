"""`carpool requests`, `usage`, `why` and `tracking init`: what was kept of requests, from where the configuration says.

`why` asks a running gateway first: it knows requests that have not ended, and those that ended lately.
"""

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar
from urllib.parse import quote

import msgspec
import typer

from carpool.cli.dlq import (
    DEFAULT_ADMIN,
    EXIT_FAILED,
    Admin,
    Config,
    Gateway,
    Json,
    Token,
    examples,
    leave,
    print_json,
    print_table,
    printable,
)
from carpool.core.clock import rfc3339
from carpool.settings import ConfigError, load_settings

if TYPE_CHECKING:
    from carpool.tracking.records import RequestRecord, Store

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

tracking = typer.Typer(
    name="tracking",
    no_args_is_help=True,
    help="Where requests and batches are kept for questions afterwards (`tracking.store`).",
)


Done = TypeVar("Done")

REQUESTS_EPILOG = examples(
    "carpool requests --owner alice --since 1h --failed",
    "carpool requests --batch 6b1f90c200000a17",
    "carpool requests --status processing",
    then="Give it the configuration of your gateways: it says where rows are kept. A row comes when its request ends, "
    "or before, with `tracking.in_flight`.",
)
REQUEST_COLUMNS = (
    *("completed at", "id", "owner", "tier", "model", "outcome"),
    *("ms", "queue ms", "batch", "size", "attempts", "endpoint"),
)
WHY_EPILOG = examples(
    "carpool why req_6b1f90c2aa10-17",
    "carpool why 3f6c0e9ab5d14c3f8e0f6a3b2c1d4e57 --admin http://10.0.0.7:8001",
    then="Any gateway of a fleet will do. One that ended long ago is told from tracking, where that is on.",
)
WAITED_FOR = {
    "company": "waited for company: others who would share its batch",
    "slot": "waited for a slot: all endpoints were busy, or failing",
    "retry": "lost to calls that failed, and to the pause before the next",
    "search": "its batch was refused: a search for the input at fault",
    "model": "the call: the model at work",
    "call": "the call",
    "rest": "on its way in and back",
}
HEALTH = "/internal/health"
REASONS = {
    "full": "it was full",
    "waited": "its oldest had waited as long as anybody does for company",
    "idle": "endpoints were idle: waiting longer was not worth it",
    "expected-none": "no company was expected in time",
    "drain": "the process was leaving",
}
USAGE_EPILOG = examples(
    "carpool usage --since 24h",
    "carpool usage --since 7d --by model --json",
    then="GPU seconds are those of the calls that answered, each shared by all whom it answered.",
)


@tracking.command()
def init(config: Config = None) -> None:
    """Make the tables, or bring them up to date. Do it once before the first start, and after an upgrade."""
    typer.echo(_with_store(config, lambda store: store.init()))


def requests(
    owner: Annotated[str | None, typer.Option(help="Only of this owner.")] = None,
    model: Annotated[str | None, typer.Option(help="Only of this model.")] = None,
    tier: Annotated[str | None, typer.Option(help="Only of this tier.")] = None,
    batch: Annotated[str | None, typer.Option(metavar="ID", help="Only of this batch.")] = None,
    status: Annotated[
        Literal["queued", "processing", "completed", "failed"] | None, typer.Option(help="Only in this state.")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only those that failed.")] = False,
    error: Annotated[str | None, typer.Option(metavar="CODE", help="Only with this error.")] = None,
    since: Annotated[str, typer.Option(metavar="TIME", help="How far back: 30s, 10m, 1h, 7d.")] = "1h",
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many at most.")] = 100,
    json: Json = False,
    config: Config = None,
) -> None:
    """List requests: those in flight, where these are kept, and those that have ended; of both the newest first."""
    from carpool.tracking.records import RequestQuestion

    question = RequestQuestion(
        since=time.time() - seconds_of(since),
        owner=owner,
        model=model,
        tier=tier,
        batch_id=batch,
        error=error,
        status=status,
        is_failed=failed,
        limit=limit,
    )
    found = _with_store(config, lambda store: store.requests(question))
    if json:
        print_json({"requests": [shown_record(record) for record in found]})
        return
    print_table(REQUEST_COLUMNS, map(request_cells, found), "no requests")
    if len(found) == limit:
        typer.echo(f"the newest {limit}; see --limit")


def request_cells(record: "RequestRecord") -> tuple[object, ...]:
    """A row of the table, in the order of REQUEST_COLUMNS."""
    return (
        "" if record.completed_at is None else rfc3339(record.completed_at),
        *(record.id, record.owner, record.tier, record.model),
        *(record.error or record.status, f"{record.latency_ms:.1f}"),
        "" if record.queue_ms is None else f"{record.queue_ms:.1f}",
        record.batch_id or ("cached" if record.cached else ""),
        *(record.batch_size or "", record.attempts or "", record.endpoint or ""),
    )


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
        rows = [
            (used.name, used.requests, used.failed, used.cached, used.tokens, f"{used.gpu_seconds:.3f}")
            for used in found
        ]
        print_table([by, "requests", "failed", "cached", "tokens", "GPU seconds"], rows, "no requests")


def find_kept(config: Path | None, request_id: str) -> Any:
    """What was kept of a request, as the admin port shows it; None if nothing was, or tracking is off."""
    from carpool.tracking.records import state_of_record

    if load_settings({}, environ=os.environ, file=config).tracking.store == "off":
        return None
    record = _with_store(config, lambda store: store.find(request_id))
    return None if record is None else msgspec.to_builtins(state_of_record(record))


def shown_record(record: "RequestRecord") -> dict[str, Any]:
    """A record as JSON shows it: times as people read them."""
    shown: dict[str, Any] = msgspec.to_builtins(record)
    times = {name: shown[name] for name in ("created_at", "completed_at")}
    return shown | {name: None if at is None else rfc3339(at) for name, at in times.items()}


def seconds_of(text: str, option: str = "--since") -> float:
    """A time span such as 90s, 10m, 1h or 7d."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", text.strip())
    if found is None:
        raise ConfigError(f"{option} must be like 30s, 10m, 1h or 7d")
    return float(found[1]) * UNITS_S[found[2]]


def _with_store(config: Path | None, work: "Callable[[Store], Awaitable[Done]]") -> Done:
    """Do something with the store that the configuration names."""
    # Here, so that the other commands do not pay for it.
    from carpool.composition.tracking import make_store
    from carpool.tracking.records import StoreAwayError, StoreUnusableError

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


def why(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="A request's id, or a task's.")],
    admin: Admin = DEFAULT_ADMIN,
    token: Token = "",
    json: Json = False,
    config: Config = None,
) -> None:
    """Tell one request's story: where it is, what its time went to, with whom it was sent, and to which endpoint."""
    gateway = Gateway(admin, token, "why")
    asked = gateway.ask("GET", f"/internal/requests/{quote(request_id, safe='')}", may_miss=True)
    found = asked or find_kept(config, request_id)
    if found is None:
        leave("no gateway knows this request any more, and nothing was kept of it", EXIT_FAILED, "why")
    if json:
        print_json(found)
        return
    lines = story(request_id, found)
    if found["status"] != "completed" and not found.get("kept"):
        problem = gateway.ask("GET", HEALTH).get("problem")
        lines += [f"  now: {problem}"] if problem else []
    for line in lines:
        typer.echo(printable(line))


def story(request_id: str, state: Mapping[str, Any]) -> list[str]:
    """A request's state (core.timeline.RequestState) in lines; what is not known is not in it."""
    status, queue = state["status"], state.get("queue", {})
    heads = {"queued": "waits, for", "processing": "is being worked on, for", "completed": "was completed, after"}
    head = heads.get(status, f"failed ({state['error']}), after")
    lines = [f"{request_id} {head} {state['latency_ms']} ms"]
    facts = (("owner", "owner"), ("model", "model"), ("client", "client_id"))
    lines += [f"  {title}: {state[name]}" for title, name in facts if state.get(name) is not None]
    if state.get("is_task"):
        lines.append("  a task")
    if state.get("cached"):
        lines.append("  answered with a result that had been kept: it was in no batch")
    if "waiting" in queue:
        lines.append(f"  in the queue, of {queue['waiting']} that wait")
    if "place" in queue:
        lines.append(f"  place {queue['place']}: 1 is the next")
    if "estimated_wait_ms" in queue:
        lines.append(f"  about {queue['estimated_wait_ms']} ms to go until it is sent")
    if batch := state.get("batch"):
        lines += batch_lines(batch)
    if "waits" in state:
        lines.append("  its time:")
    at = 0.0
    for wait in state.get("waits", ()):
        # Only an answer shows that the model was at work.
        what = "call" if wait["what"] == "model" and status != "completed" else wait["what"]
        lines.append(f"    {at:9.1f} ms  +{wait['ms']:<9.1f} {WAITED_FOR.get(what, what)}")
        at += wait["ms"]
    if state.get("kept"):
        lines.append("  (from tracking)")
    return lines


def batch_lines(batch: Mapping[str, Any]) -> list[str]:
    """The batch of a request, its neighbours there, and its endpoint."""
    others, reason, attempts = batch["neighbours"], batch.get("reason"), batch.get("attempts", 1)
    company = f"with {others} other{'s' * (others > 1)}" if others else "alone"
    because = f"; it left because {REASONS.get(reason, reason)}" if reason else ""
    lines = [f"  batch {batch['id']}, {company}{because}"]
    if "endpoint" in batch:
        lines.append(f"  endpoint {batch['endpoint']}" + (f", call {attempts} of its batch" if attempts > 1 else ""))
    if "failure" in batch:
        lines.append(f"  its last call failed: {batch['failure']}")
    return lines
