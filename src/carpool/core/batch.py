"""One batch as people see it: which, how large, why it left, who answered, how long it took. Never what is in it.

Whoever looks at a batch while it is under way sees what is known so far.
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
    # Of its last call: when it began, to whom, and which attempt that was.
    sent: float = 0.0
    endpoint: str = ""
    attempts: int = 0
    # When all of its requests had an outcome, or were somebody else's to look after; and `ok`, `not-sent`, or an
    # error's code: that of the last call, whatever became of the requests then.
    ended: float = 0.0
    result: str = ""
    # How its last call failed, in Carpool's own words.
    failure: str = ""
    # What tracing keeps about it; None where it is off, and before the first call.
    trace: BatchTrace | None = None


class BatchIds:
    """Ids for the batches of one model in one process."""

    def __init__(self, beginning: str) -> None:
        # 8 hex digits, drawn by whoever makes this.
        self._beginning = beginning
        self._numbers = count(1)

    def next(self) -> str:
        """An id that no other batch has."""
        return f"{self._beginning}{next(self._numbers) & 0xFFFFFFFF:08x}"
