"""Rows in flight and their outcomes, written in any order: the same for every store."""

from collections.abc import Sequence
from typing import Literal

from carpool.tracking.records import LATE_US, NOBODY, FlightRow, RequestQuestion, RequestRow, Store

Step = Literal["queued", "processing", "outcome", "over", "look"]
STEPS: Sequence[Step] = ("queued", "processing", "outcome", "over", "look")


def flight(
    request_id: str,
    status: str = "queued",
    *,
    at: float,
    writer: str = "w",
    is_task: bool = False,
    changed: float | None = None,
    owner: str = "alice",
) -> FlightRow:
    """A request that came `at` then; its time is over a second later."""
    created_at = int(at * 1e6)
    batch_id, batch_size, endpoint = ("b1", 4, "http://gpu") if status == "processing" else (None, 0, None)
    return FlightRow(
        NOBODY if is_task else writer,
        request_id,
        owner,
        "free",
        "m",
        is_task,
        status,
        created_at,
        created_at if changed is None else int(changed * 1e6),
        created_at,
        created_at + 1_000_000 + LATE_US,
        5.0 if batch_id else None,
        batch_id,
        batch_size,
        endpoint,
        1 if batch_id else 0,
    )


def ended(request_id: str, at: float, *, is_task: bool = False, error: str | None = None) -> RequestRow:
    """The outcome of one that came half a second earlier."""
    came, ends = int((at - 0.5) * 1e6), int(at * 1e6)
    return RequestRow(
        request_id, "alice", "free", "m", is_task, error, came, ends, 1.0, "b1", 4, "e", 1, 1.0, False, 7, 0.5
    )


async def write_steps(store: Store, request_id: str, steps: Sequence[Step], at: float, *, is_task: bool) -> None:
    """Write what there is of a request that came `at` then, in this order.

    "look" comes when its time is over. A request that is no task has its outcome by then: who wrote its row lives.
    """
    writer = NOBODY if is_task else "w"
    has_outcome = False
    for step in steps:
        if step == "outcome":
            has_outcome = True
            await store.write([ended(request_id, at + 0.5, is_task=is_task)], [])
        elif step == "over":
            await store.write_flights([], [(writer, request_id)])
        elif step == "look":
            if is_task or has_outcome:
                await store.fail_gone(at + 1000)
        else:
            changed = at + (0.2 if step == "processing" else 0.0)
            await store.write_flights([flight(request_id, step, at=at, is_task=is_task, changed=changed)], [])


async def told(store: Store, request_id: str) -> list[tuple[str, str | None]]:
    """The state and the error of a request, as a search for it shows it, and as the list does."""
    found = await store.find(request_id)
    assert found is not None
    listed = [each for each in await store.requests(RequestQuestion(limit=100_000)) if each.id == request_id]
    return [(each.status, each.error) for each in (found, *listed)]
