"""Server-sent events, and `GET /internal/live`, which sends one each second.

1. An event is encoded once for all viewers.
2. There are VIEWERS_MAX of them at most.
3. A viewer that does not read misses events; after MISSED_MAX in a row its connection is ended.
"""

from collections.abc import Callable

from carpool.core.errors import QueueFull
from carpool.face.http.exchange import Exchange, ExchangeWorker
from carpool.face.http.problem import respond_problem

EVENT_STREAM = b"text/event-stream"
HEADERS = b"Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nX-Accel-Buffering: no\r\n"
# A comment: it keeps proxies from taking the connection for dead, and shows whether the client is still there.
HEARTBEAT = b":\n\n"

VIEWERS_MAX = 64
# Events that a viewer may miss in a row because it does not read.
MISSED_MAX = 5


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
        exchange.write(retry_after(1) + event_of(self._first()))

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


def event_of(data: bytes, name: bytes = b"", event_id: bytes = b"") -> bytes:
    """An event with this data; nothing for nothing."""
    if not data:
        return b""
    if b"\n" in data or b"\r" in data:  # a line each, of which the client makes one text again
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").replace(b"\n", b"\ndata: ")
    named = b"event: %b\n" % name if name else b""
    numbered = b"id: %b\n" % event_id if event_id else b""
    return b"%b%bdata: %b\n\n" % (named, numbered, data)


def retry_after(seconds: float) -> bytes:
    """The line that sets how long a browser waits before it connects again."""
    return b"retry: %d\n\n" % round(seconds * 1000)
