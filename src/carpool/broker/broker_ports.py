"""What a broker has in common with others whose gateways and batchers are different processes.

A gateway's side is a `RequestQueue` (core/ports.py) over `pending.py`; a batcher's side, and what it needs, is here.
In `broker/redis` these are `gateway/queue.py` and `batcher/consumer.py`.
"""

from typing import Protocol

from carpool.core.errors import CarpoolError
from carpool.core.request import Request


class BatcherSide(Protocol):
    """Takes what free slots can use, and puts it into a local broker."""

    # While true, nothing more is taken.
    draining: bool
    taken: int
    claimed: int
    leases_lost: int
    unreadable: int

    def start(self) -> None:
        """Begin to take."""
        ...

    def notify(self) -> None:
        """A slot is free, or something else changed."""
        ...

    def drain(self) -> None:
        """Take nothing more."""
        ...

    async def finish_asking(self, timeout_s: float) -> None:
        """Wait for Redis's answer to the last question; the batcher gives back what it brings."""
        ...

    def close(self) -> None:
        """Stop all timers."""
        ...

    def give_back_staged(self, model: str) -> None:
        """No endpoint of a model works any more: other batchers may have what waits here."""
        ...

    def unread(self, model: str) -> int:
        """Requests of a model that wait for a batcher, as far as is known here."""
        ...

    def unread_s(self) -> float:
        """How many seconds ago that was known."""
        ...

    def why_no_work(self) -> str | None:
        """Why nothing is taken although slots are free; None if all is well."""
        ...


class FedModel(Protocol):
    """What a batcher's side must know of a model."""

    name: str

    def free_slots(self) -> int:
        """Slots that could take a batch now."""
        ...

    def may_go_elsewhere(self, request: Request) -> bool:
        """Whether another batcher can serve a request that this one cannot."""
        ...

    def is_probing(self) -> bool:
        """Whether every endpoint has failed, and one request at a time is wanted to try one with."""
        ...

    def is_in_doubt(self) -> bool:
        """Whether no endpoint is known to work: each has failed and not answered since."""
        ...

    def is_served_elsewhere(self) -> bool:
        """Whether another batcher has an endpoint that works."""
        ...

    def largest_batch(self) -> int:
        """The most requests in a batch."""
        ...

    def largest_batch_bytes(self) -> float:
        """The most bytes in a batch of several."""
        ...

    def refusal_of(self, request: Request) -> CarpoolError | None:
        """Why a request is not taken up now; None if it is."""
        ...

    def prepare(self, request: Request) -> None:
        """Do for a request from elsewhere what the face does for a new one; raises an error of the tree."""
        ...


class SuspectLetters(Protocol):
    """Keeps requests that batchers did not survive, and entries that cannot be read."""

    def bury_suspect(self, request: Request, error: CarpoolError, sends: int) -> None:
        """Keep a synchronous request with its error, if there is room; before it is settled."""
        ...

    def bury_unreadable(self, entry_id: bytes, model: str, content: bytes, why: str) -> None:
        """Keep an entry that cannot be read, for an operator to look at."""
        ...
