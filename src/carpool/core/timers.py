"""Work that comes again and again, and work that is done once for all that happened in a turn of the event loop.

Both use the running event loop, and so does everything else that waits: under a virtual loop (virtual_time.py) all of
it runs on virtual time.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable

logger = logging.getLogger("carpool")

# So long a turn of the event loop may be held up by work that can wait, about.
TURN_S = 0.005
# A turn that took longer is followed by a rest.
LONG_TURN_S = 2 * TURN_S
# The longest rest, however long the turn was: the process may have stood still in the middle of it.
REST_S_MAX = 0.1


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

    def notify(self) -> None:
        """Ask for it."""
        if not self.is_due:
            self.is_due = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        self.is_due = False
        self._work()


class SharedTurns:
    """Work of many callers that can wait: together they get TURN_S of a turn of the event loop, one after the other.

    1. A callback does some of its work, TURN_S of it at most, and asks for a later turn if there is more.
    2. New work goes before the rest of longer work, so that no caller waits for those with much to do; but in each
       turn some of that is done too.
    3. Work that cannot be done in parts may take longer. Then the event loop is left to other work for as long, before
       the next piece: a request needs several turns, and would wait for as many pieces of long work.
    4. A defect in work that waited is logged; the others go on.
    """

    __slots__ = ("_is_resting", "_left", "_new", "_next", "_spent_s")

    def __init__(self) -> None:
        # By the caller whose work it is: callers take turns.
        self._new: dict[Hashable, deque[Callable[[], None]]] = {}
        self._left: deque[Callable[[], None]] = deque()
        # In this turn; and whether the next one is put off, for that was too long (rule 3).
        self._spent_s = 0.0
        self._is_resting = False
        # Made when there is an event loop.
        self._next: OncePerTurn | None = None

    def __len__(self) -> int:
        """How many pieces of work wait for a turn."""
        return sum(map(len, self._new.values())) + len(self._left)

    def now(self, work: Callable[[], None], whose: Hashable = None) -> None:
        """Call `work`, which has just come: at once, if there is time. Where work of several callers waits, each has
        one in turn, however much the others have.
        """
        self._notify()
        if self._spent_s > TURN_S:
            self._new.setdefault(whose, deque()).append(work)
        else:
            self._do(work)

    def later(self, work: Callable[[], None]) -> None:
        """Call `work`, of which some was done, in a later turn."""
        self._notify()
        self._left.append(work)

    def _notify(self) -> None:
        if self._next is None:
            self._next = OncePerTurn(self._turn)
        if not self._is_resting:
            self._next.notify()

    def _turn(self) -> None:
        too_long_s = self._spent_s - LONG_TURN_S
        if too_long_s > 0.0 and not self._is_resting:
            self._is_resting = True
            asyncio.get_running_loop().call_later(min(too_long_s, REST_S_MAX), self._turn)
            return
        self._is_resting = False
        self._spent_s = 0.0
        number, is_first = len(self._left), True  # work that asks again has its next turn after this one
        while self._new and self._spent_s <= TURN_S:
            whose, works = next(iter(self._new.items()))
            del self._new[whose]
            if len(works) > 1:
                self._new[whose] = works  # behind the others
            self._do_waiting(works)
        while number and (is_first or self._spent_s <= TURN_S):
            self._do_waiting(self._left)
            number, is_first = number - 1, False
        if self._new or self._left or self._spent_s:
            self._notify()

    def _do_waiting(self, queue: deque[Callable[[], None]]) -> None:
        try:
            self._do(queue.popleft())
        except Exception:
            logger.exception("something that waited for its turn failed; the others go on")

    def _do(self, work: Callable[[], None]) -> None:
        time = asyncio.get_running_loop().time
        began, before_s = time(), self._spent_s
        try:
            work()
        finally:
            self._spent_s = before_s + time() - began  # with whatever else was called for meanwhile


async def repeat(pause_s: Callable[[], float], work: Callable[[], Awaitable[None]]) -> None:
    """For work that waits itself: do it, pause, and so on, until this is cancelled. A defect is logged."""
    while True:
        try:
            await work()
        except Exception:
            logger.exception("something that is done from time to time failed; it goes on")
        await asyncio.sleep(pause_s())


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, for so many seconds at most."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
