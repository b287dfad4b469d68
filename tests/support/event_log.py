"""A subscriber to events that writes them down."""

from collections.abc import Sequence
from typing import Any

from carpool.core.batch import Batch
from carpool.core.outcome import Outcome
from carpool.core.request import Request


class EventLog:
    """What was told, in its order (carpool.core.events.Subscriber)."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        # Those that have ended, with the ids of their requests.
        self.batches: list[tuple[Batch, list[str]]] = []
        # By request id.
        self.outcomes: dict[str, Outcome] = {}

    def admitted(self, request: Request) -> None:
        self.told.append(("admitted", request.id))

    def taken(self, batch: Sequence[Request]) -> None:
        self.told.append(("taken", [request.id for request in batch]))

    def sent(self, batch: Sequence[Request], endpoint: str, attempt: int, now: float) -> None:
        self.told.append(("sent", [request.id for request in batch], endpoint, attempt, now))

    def ended(self, batch: Batch, requests: Sequence[Request]) -> None:
        self.batches.append((batch, [request.id for request in requests]))

    def settled(self, request: Request, outcome: Outcome) -> None:
        assert request.id not in self.outcomes, "settled twice"
        self.told.append(("settled", request.id))
        self.outcomes[request.id] = outcome

    def kinds(self) -> list[str]:
        return [kind for kind, *_ in self.told]
