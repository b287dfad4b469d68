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
    """The store does not answer, or failed; later it may not."""


class BadRowsError(Exception):
    """These rows can never be written."""


class Store(Protocol):
    """A store. Whatever is wrong is one of the errors above."""

    async def open(self) -> None:
        """Get ready to write; raises StoreUnusableError."""
        ...

    def pack(
        self, requests: Sequence[RecordFields], batches: Sequence[Batch], offset_s: float, tiers: Sequence[str]
    ) -> Packed:
        """These as `write` wants them; `offset_s` is what the wall clock shows beyond the monotonic one."""
        ...

    async def write(self, packed: Sequence[Packed]) -> None:
        """Keep these, all or none. Those that it did not take, or of which nobody knows, are given once more."""
        ...

    async def tidy(self, now: float) -> None:
        """Let go what is too old at this Unix time, or too much."""
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
        """Who used how much, the most GPU seconds first."""
        ...

    async def close(self) -> None:
        """Use it no more."""
        ...
