"""A toy subscriber: what happened to each request, in order."""

from collections.abc import Sequence

from carpool.core.batch import Batch
from carpool.core.outcome import Outcome
from carpool.core.request import Request


class Diary:
    """Words by the id of a request."""

    def __init__(self) -> None:
        self.written: dict[str, list[str]] = {}

    def _write(self, request: Request, word: str) -> None:
        self.written.setdefault(request.id, []).append(word)

    def admitted(self, request: Request) -> None:
        self._write(request, "admitted")

    def taken(self, batch: Sequence[Request]) -> None:
        for request in batch:
            self._write(request, "taken")

    def sent(self, batch: Sequence[Request], endpoint: str, attempt: int, now: float) -> None:
        for request in batch:
            self._write(request, f"sent to {endpoint}, attempt {attempt}")

    def ended(self, batch: Batch, requests: Sequence[Request]) -> None:
        pass

    def settled(self, request: Request, outcome: Outcome) -> None:
        self._write(request, f"settled: {request.result_code}")
