"""Where rows are kept: what every store does."""

from collections.abc import Sequence
from typing import Any, Protocol

from carpool.core.batch import Batch
from carpool.tracking.questions import RequestQuestion, UsageQuestion
from carpool.tracking.records import RecordFields, RequestRecord, UsageRecord

# Rows as a store wants them.
Packed = Any


class StoreUnusableError(Exception):
    """The store must not be used as it is; the text says what to do."""


class StoreAwayError(Exception):
    """The store does not answer, or failed; it may work later."""


class BadRowsError(Exception):
    """These rows can never be written."""


class Store(Protocol):
    """A store. Its methods raise the errors above, and no others."""

    async def open(self) -> None:
        """Get ready to write; raises StoreUnusableError."""
        ...

    def pack(
        self, requests: Sequence[RecordFields], batches: Sequence[Batch], offset_s: float, tiers: Sequence[str]
    ) -> Packed:
        """These as `write` wants them; `offset_s` is what the wall clock shows beyond the monotonic one."""
        ...

    async def write(self, packed: Sequence[Packed]) -> None:
        """Write these, all or none. After an error the recorder gives the same rows once more."""
        ...

    async def tidy(self, now: float) -> None:
        """Remove rows that are too old at this Unix time, or too many."""
        ...

    async def init(self) -> str:
        """Make the tables, or bring them up to date; returns what was done."""
        ...

    async def find(self, request_id: str) -> RequestRecord | None:
        """The last request with this id."""
        ...

    async def requests(self, question: RequestQuestion) -> list[RequestRecord]:
        """Requests, the newest first."""
        ...

    async def usage(self, question: UsageQuestion) -> list[UsageRecord]:
        """Sums of requests, tokens and GPU seconds, the most GPU seconds first."""
        ...

    async def close(self) -> None:
        """Use it no more."""
        ...
