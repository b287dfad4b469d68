"""One batch as people see it: its id and size, why it left, which endpoint answered, how long it took. No inputs.

While a batch is under way, it shows what is known so far.
"""

from itertools import count

import msgspec

from carpool.core.trace import BatchTrace


class Batch(msgspec.Struct, eq=False, gc=False):
    """The requests of one lane that left together. Times are monotonic seconds; 0.0: not yet."""

    # 16 hex digits; no two batches of a fleet have the same, but by an unlikely chance.
    id: str
    model: str
    size: int
    # Why it left when it did (batching/policy.py).
    reason: str
    taken: float
    # Of its last call: when it began, to which endpoint, and which attempt that was.
    sent: float = 0.0
    endpoint: str = ""
    attempts: int = 0
    # When each of its requests had an outcome, or was left to a search or to a later try; and `ok`, `not-sent`, or
    # an error's code: that of the last call, whatever became of the requests then.
    ended: float = 0.0
    result: str = ""
    # How its last call failed, in Carpool's own words.
    failure: str = ""
    # What tracing keeps about it; None where it is off, and before the first call.
    trace: BatchTrace | None = None

    @property
    def is_traced(self) -> bool:
        """Whether its span is kept."""
        return self.trace is not None and bool(self.trace.links)


class BatchIds:
    """Ids for the batches of one model in one process."""

    def __init__(self, beginning: str) -> None:
        # 8 hex digits, drawn by the batching loop.
        self._beginning = beginning
        self._numbers = count(1)

    def next(self) -> str:
        """An id that no other batch has."""
        return f"{self._beginning}{next(self._numbers) & 0xFFFFFFFF:08x}"
