"""Work that comes again and again, and work that is done once for all that happened in a turn of the event loop.

Both use the running event loop, and so does everything else that waits: under a virtual loop (virtual_time.py) all of
it runs on virtual time.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger("carpool")


class Every:
    """Does `work` every so many seconds until it is stopped. A defect in `work` is logged; the next time comes.

    After a pause of the whole process `work` is done once, not once for each time that was missed.
    """

    __slots__ = ("_seconds", "_timer", "_work")

    def __init__(self, seconds: float, work: Callable[[], None]) -> None:
        self._seconds = seconds
        self._work = work
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin, with the first time after an interval; without effect if it has begun."""
        if self._timer is None:
            self.next_in(self._seconds)

    def start_now(self) -> None:
        """Do it now, and from now on; also in place of the time that would have come next."""
        self.stop()
        self._tick()

    def next_in(self, seconds: float) -> None:
        """Let the next time come after so long, sooner or later than it would have; then go on as usual."""
        self.stop()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._tick)

    def stop(self) -> None:
        """Do it no more. `work` may call this."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        # First of all, so that a defect does not end it for good, and `work` may stop it.
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._tick)
        try:
            self._work()
        except Exception:
            logger.exception("something that is done from time to time failed; it goes on")


class OncePerTurn:
    """Does `work` at the end of a turn of the event loop in which it was asked for, once, however often that was."""

    __slots__ = ("_loop", "_work", "is_due")

    def __init__(self, work: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = work
        # It was asked for, and will be done.
        self.is_due = False

    def ring(self) -> None:
        """Ask for it."""
        if not self.is_due:
            self.is_due = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self.is_due = False
        self._work()


async def repeat(pause_s: Callable[[], float], work: Callable[[], Awaitable[None]]) -> None:
    """For work that waits itself: do it, pause, and so on, until this is cancelled. A defect is logged."""
    while True:
        try:
            await work()
        except Exception:
            logger.exception("something that is done from time to time failed; it goes on")
        await asyncio.sleep(pause_s())
