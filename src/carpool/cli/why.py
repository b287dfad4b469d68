"""`carpool why ID`: one request's story, from a running gateway, else from what was kept of it."""

from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import msgspec
import typer

from carpool.cli.dlq import DEFAULT_ADMIN, EXIT_FAILED, Admin, Gateway, Token, leave, print_json, printable
from carpool.cli.tracking import Config, Json, find_kept

if TYPE_CHECKING:
    from carpool.core.timeline import RequestState

WHY_EPILOG = """\
[bold]Examples[/bold]

  carpool why req_6b1f90c2aa10-17

  carpool why 3f6c0e9ab5d14c3f8e0f6a3b2c1d4e57 --admin http://10.0.0.7:8001

Any gateway of a fleet will do. One that ended long ago is told from tracking, where that is on.
"""
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
    from carpool.core.timeline import RequestState

    state = msgspec.convert(found, RequestState)
    lines = story(request_id, state)
    if state.status != "completed" and state.kept is not True:
        problem = gateway.ask("GET", HEALTH).get("problem")
        lines += [f"  now: {problem}"] if problem else []
    for line in lines:
        typer.echo(printable(line))


def story(request_id: str, state: "RequestState") -> list[str]:
    """The story in lines."""
    outcome = {"queued": "waits", "processing": "is being worked on", "completed": "was completed"}
    head = outcome.get(state.status, f"failed ({state.error})")
    how_long = "after" if state.status in ("completed", "failed") else "for"
    lines = [f"{request_id} {head}, {how_long} {state.latency_ms} ms"]
    facts = [("owner", state.owner), ("model", state.model), ("client", state.client_id or msgspec.UNSET)]
    lines += [f"  {name}: {value}" for name, value in facts if value is not msgspec.UNSET]
    if state.is_task is True:
        lines.append("  a task")
    if state.cached is True:
        lines.append("  answered with a result that had been kept: it was in no batch")
    lines += queue_lines(state) + batch_lines(state) + wait_lines(state)
    if state.kept is True:
        lines.append("  (from tracking)")
    return lines


def queue_lines(state: "RequestState") -> list[str]:
    """Where a waiting request stands in its queue."""
    queue = state.queue
    if isinstance(queue, msgspec.UnsetType):
        return []
    lines = [f"  in the queue, of {queue.waiting} that wait"] if queue.waiting is not msgspec.UNSET else []
    if queue.place is not msgspec.UNSET:
        lines.append(f"  place {queue.place}: 1 is the next")
    if queue.estimated_wait_ms is not msgspec.UNSET:
        lines.append(f"  about {queue.estimated_wait_ms} ms to go until it is sent")
    return lines


def batch_lines(state: "RequestState") -> list[str]:
    """The batch of a request, its neighbours there, and its endpoint."""
    batch = state.batch
    if isinstance(batch, msgspec.UnsetType):
        return []
    others = "alone" if not batch.neighbours else f"with {batch.neighbours} other{'s' * (batch.neighbours > 1)}"
    reason = (
        ""
        if isinstance(batch.reason, msgspec.UnsetType)
        else f"; it left because {REASONS.get(batch.reason, batch.reason)}"
    )
    lines = [f"  batch {batch.id}, {others}{reason}"]
    if not isinstance(batch.endpoint, msgspec.UnsetType):
        attempts = batch.attempts if isinstance(batch.attempts, int) else 1
        lines.append(f"  endpoint {batch.endpoint}" + (f", call {attempts} of its batch" if attempts > 1 else ""))
    if not isinstance(batch.failure, msgspec.UnsetType):
        lines.append(f"  its last call failed: {batch.failure}")
    return lines


def wait_lines(state: "RequestState") -> list[str]:
    """Where the time of a request went: from when, for how long, for what."""
    if isinstance(state.waits, msgspec.UnsetType):
        return []
    lines, at = ["  its time:"], 0.0
    for wait in state.waits:
        # Only an answer shows that the model was at work.
        what = "call" if wait.what == "model" and state.status != "completed" else wait.what
        lines.append(f"    {at:9.1f} ms  +{wait.ms:<9.1f} {WAITED_FOR.get(what, what)}")
        at += wait.ms
    return lines
