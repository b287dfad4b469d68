"""At most ERRORS_A_TURN errors leave in a turn of the event loop; the others wait for the next turns.

A client that is refused may ask again at once. With a thousand such connections the event loop finds new requests as
fast as it refuses, and comes to nothing else: batches that are ready, answers that came, timers. Refusals that wait a
few milliseconds keep those clients waiting too, and other work goes on between. Requests behind a waiting error are
not handled before it leaves: a connection has one place here, however many requests it sends at once.
"""

from collections import deque
from collections.abc import Callable

from carpool.core.timers import OncePerTurn

# Each takes some 30 us, most of it to write: a turn lasts a few milliseconds.
ERRORS_A_TURN = 100


class ErrorPace:
    """Says when an error may leave. What waits is bounded by the connections."""

    def __init__(self) -> None:
        self._left = ERRORS_A_TURN
        self._waiting: deque[Callable[[], None]] = deque()
        self._turn = OncePerTurn(self._next_turn)

    def __len__(self) -> int:
        return len(self._waiting)

    def is_now(self, send: Callable[[], None]) -> bool:
        """Whether one more may leave now; else `send` is called when it may."""
        turn = self._turn
        if not turn.is_due:  # a call less for most of them
            turn.notify()
        if self._left > 0:
            self._left -= 1
            return True
        self._waiting.append(send)
        return False

    def _next_turn(self) -> None:
        number = min(len(self._waiting), ERRORS_A_TURN)
        self._left = ERRORS_A_TURN - number
        for _ in range(number):
            self._waiting.popleft()()
        if self._waiting:
            self._turn.notify()
