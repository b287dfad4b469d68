"""Where rows are kept: what every store does, and what people ask it afterwards.

Both databases get the same statements: parameters are `$1`, `$2`, …, which a store may write in its own way, and times
are whole microseconds of Unix time on this side of the store.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from carpool.tracking.records import BatchRow, RequestRecord, RequestRow, UsageRecord, microseconds, record_of

# All but `reason`, which is a column of batches.
_RECORD = ", ".join(f"r.{name}" for name in RequestRecord.__struct_fields__[:-1])


class StoreUnusableError(Exception):
    """The store must not be used as it is; the text says what to do."""


class StoreAwayError(Exception):
    """The store does not answer, or failed; it may work later."""


class BadRowsError(Exception):
    """These rows can never be written."""


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


class Store(Protocol):
    """A store. Its methods raise the errors above, and no others."""

    async def open(self) -> None:
        """Get ready to write; raises StoreUnusableError."""
        ...

    async def write(self, requests: Sequence[RequestRow], batches: Sequence[BatchRow]) -> None:
        """Write these, all or none. After StoreAwayError the recorder gives the same rows once more."""
        ...

    async def tidy(self, now: float) -> None:
        """Remove rows that are too old at this Unix time, or too many."""
        ...

    async def init(self) -> str:
        """Make the tables, or bring them up to date; returns what was done."""
        ...

    async def ask(self, statement: str, *values: Any) -> Sequence[Sequence[Any]]:
        """The rows that a statement finds."""
        ...

    async def close(self) -> None:
        """Use it no more."""
        ...

    async def find(self, request_id: str) -> RequestRecord | None:
        """The last request with this id: clients choose ids, and may repeat them."""
        found = await self.ask(
            f"SELECT {_RECORD}, b.reason FROM carpool_requests r LEFT JOIN carpool_batches b ON b.id = r.batch_id "
            "WHERE r.id = $1 ORDER BY r.completed_at DESC LIMIT 1",
            request_id,
        )
        return record_of(found[0]) if found else None

    async def requests(self, question: RequestQuestion) -> list[RequestRecord]:
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
        return [
            record_of(row)
            for row in await self.ask(f"{text} ORDER BY r.completed_at DESC LIMIT ${len(values)}", *values)
        ]

    async def usage(self, since: float = 0.0, by: Literal["owner", "model", "tier"] = "owner") -> list[UsageRecord]:
        """Sums of requests, tokens and GPU seconds since then, the most GPU seconds first."""
        found = await self.ask(
            f"SELECT r.{by}, count(*), count(r.error), sum(CASE WHEN r.cached THEN 1 ELSE 0 END), "
            "CAST(coalesce(sum(r.tokens), 0) AS bigint), coalesce(sum(r.gpu_seconds), 0) "
            f"FROM carpool_requests r WHERE r.completed_at >= $1 GROUP BY r.{by} ORDER BY 6 DESC, 2 DESC, 1",
            microseconds(since),
        )
        return [UsageRecord(*row) for row in found]
