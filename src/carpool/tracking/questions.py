"""What people ask about requests afterwards, in SQL. Pure.

Both databases get the same statements: parameters are `$1`, `$2`, …, which a store may write in its own way, and
times are whole microseconds of Unix time on this side of the store.
"""

from typing import Any, Literal

import msgspec

Statement = tuple[str, list[Any]]

# The columns of a RequestRecord, in its order.
_RECORD = (
    "r.id, r.owner, r.tier, r.model, r.is_task, r.error, r.created_at, r.completed_at, r.queue_ms, r.batch_id, "
    "r.batch_size, r.endpoint, r.attempts, r.upstream_ms, r.cached, r.tokens, r.gpu_seconds"
)


class RequestQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests to find; a field that is left out does not restrict them."""

    since: float = 0.0
    owner: str | None = None
    model: str | None = None
    tier: str | None = None
    batch_id: str | None = None
    error: str | None = None
    is_failed: bool = False
    limit: int = 100


class UsageQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """By what to sum the use up."""

    since: float = 0.0
    by: Literal["owner", "model", "tier"] = "owner"


def requests_statement(question: RequestQuestion) -> Statement:
    """Requests that ended since then, the newest first."""
    values: list[Any] = [microseconds(question.since)]
    wanted = ["r.completed_at >= $1"]
    for name in ("owner", "model", "tier", "batch_id", "error"):
        if (value := getattr(question, name)) is not None:
            values.append(value)
            wanted.append(f"r.{name} = ${len(values)}")
    if question.is_failed:
        wanted.append("r.error IS NOT NULL")
    values.append(question.limit)
    text = f"SELECT {_RECORD}, NULL FROM carpool_requests r WHERE {' AND '.join(wanted)}"
    return f"{text} ORDER BY r.completed_at DESC LIMIT ${len(values)}", values


def find_statement(request_id: str) -> Statement:
    """One request: clients choose ids, and may repeat them; the last one counts."""
    text = (
        f"SELECT {_RECORD}, b.reason FROM carpool_requests r LEFT JOIN carpool_batches b ON b.id = r.batch_id "
        "WHERE r.id = $1 ORDER BY r.completed_at DESC LIMIT 1"
    )
    return text, [request_id]


def usage_statement(question: UsageQuestion) -> Statement:
    """Sums since then, by a column."""
    by = question.by  # one of three words
    text = (
        f"SELECT r.{by}, count(*), count(r.error), sum(CASE WHEN r.cached THEN 1 ELSE 0 END), "
        "coalesce(sum(r.tokens), 0), coalesce(sum(r.gpu_seconds), 0) "
        f"FROM carpool_requests r WHERE r.completed_at >= $1 GROUP BY r.{by} ORDER BY 6 DESC, 2 DESC, 1"
    )
    return text, [microseconds(question.since)]


def microseconds(seconds: float) -> int:
    """A time as it is kept."""
    return int(seconds * 1e6)
