"""`GET /internal/live`: a second after the other, as server-sent events.

1. An event is encoded once for all viewers.
2. There are VIEWERS_MAX of them at most.
3. A viewer that does not read misses events; after MISSED_MAX in a row its connection is ended.
"""

from collections.abc import Callable

from carpool.core.errors import QueueFull
from carpool.face.http.exchange import Exchange, ExchangeWorker
from carpool.face.http.problem import respond_problem
from carpool.face.http.server_sent import EVENT_STREAM, HEADERS, event_of, retry_after

VIEWERS_MAX = 64
# Events that a viewer may miss in a row because it does not read.
MISSED_MAX = 5
RETRY = retry_after(1)


class Viewers(ExchangeWorker):
    """The clients that watch the live page."""

    def __init__(self, changed: Callable[[], None], first: Callable[[], bytes]) -> None:
        # How many events in a row each viewer has missed.
        self._missed: dict[Exchange, int] = {}
        # Called when a viewer came or left.
        self._changed = changed
        # The first event for a new viewer; b"" for none.
        self._first = first

    def __len__(self) -> int:
        return len(self._missed)

    def join(self, exchange: Exchange, _: str) -> None:
        """`GET /internal/live`."""
        if len(self._missed) >= VIEWERS_MAX:
            respond_problem(exchange, QueueFull(f"{VIEWERS_MAX} look at this already; try again", retry_after_s=5))
            return
        exchange.begin(200, EVENT_STREAM, HEADERS)
        if exchange.method == b"HEAD":
            exchange.end()
            return
        self._missed[exchange] = 0
        exchange.worker = self
        self._changed()
        exchange.write(RETRY + event_of(self._first()))

    def show(self, event: bytes) -> None:
        """Send an event, which is JSON on one line, to every viewer."""
        part = event_of(event)
        for exchange, missed in list(self._missed.items()):
            if not exchange.is_told_to_wait:
                self._missed[exchange] = 0
                exchange.write(part)
            elif missed < MISSED_MAX:
                self._missed[exchange] = missed + 1
            else:
                exchange.break_off()

    def client_left(self, exchange: Exchange) -> None:
        """A viewer has left."""
        self._missed.pop(exchange, None)
        self._changed()
