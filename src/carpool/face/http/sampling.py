"""Times a request now and then until it is queued. The other requests pay nothing for that, not even a test.

1. Every SAMPLE_S the sampler takes the place of the routes until it has timed a request, then steps back. So about
   as many are timed in a second at any load.
2. A request may have to wait before it is let in, until its owner's rate limit is known: then it is given to the routes
   once more, and timed until then.
3. Only what asks for something (POST) is timed; a task is not: it waits for its disk, or for Redis, which have numbers
   of their own.
"""

from carpool.core.histograms import RequestSeconds
from carpool.core.request import Request
from carpool.face.http.exchange import Exchange
from carpool.face.http.state import HttpState
from carpool.face.intake import RequestGroup

SAMPLE_S = 0.05
# A sample that waits longer to be let in is given up; rate limits are known sooner, or not at all.
FOLLOWED_S_MAX = 2.0


class Sampler:
    """Takes samples of `receive` and `admit`."""

    def __init__(self, state: HttpState, seconds: RequestSeconds) -> None:
        self._state = state
        self._seconds = seconds
        self._routes = state.handler
        # The request that is timed, and since when.
        self._followed: Exchange | None = None
        self._since = 0.0

    def take(self) -> None:
        """Time the next request. To be called every SAMPLE_S."""
        followed = self._followed
        is_undecided = followed is not None and followed.response is None and followed.context is None
        if is_undecided and self._state.clock() - self._since < FOLLOWED_S_MAX:
            return
        self._followed = None
        self._state.handler = self._handle

    def _handle(self, exchange: Exchange) -> None:
        if self._followed is None and exchange.method == b"POST":
            self._followed, self._since = exchange, self._state.clock()
            self._seconds.receive.observe(exchange.received_s)
        elif self._followed is not exchange:
            self._routes(exchange)
            return
        try:
            self._routes(exchange)
        finally:
            if isinstance(exchange.context, Request | RequestGroup) or exchange.response is not None:
                self._seconds.admit.observe(self._state.clock() - self._since)
                self._followed = None
                self._state.handler = self._routes
