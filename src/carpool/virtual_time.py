"""Virtual time: an event loop that never sleeps. Where a real one would wait for its next timer, the clock jumps there.

clock = VirtualClock()
random = Random(1)
clock.run(main())        # hours in there cost only what is done in them

1. Everything that waits waits on the running event loop, and reads the clock that it was handed: hand `clock` to each
   part that takes one, and `random.random` to each that takes a `random_share`. Then a run depends on nothing else: the
   same seed gives the same run.
2. Time stands still while something runs, and passes between two turns of the loop only, up to the next timer. What a
   computation costs is not part of the model; `clock.advance` inside a callback lets it cost something, and is what a
   process sees that was stopped and goes on.
3. Timers run in the order of their times, those of one time in the order in which they were set.
4. No sockets, no threads, no signals. If everything waits and no timer is set, the run ends with RuntimeError in place
   of a hang.

A turn makes no system call, so what a run costs is what is done in it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, NoReturn, TypeVar, TypeVarTuple

__all__ = ["VirtualClock", "VirtualLoop"]

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")
# Fewer cancelled timers than this are not worth a look.
CANCELLED_KEPT = 1000


class VirtualClock:
    """A monotonic clock that stands still until a test moves it, or until something waits under `run`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """The time now, in seconds."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass; it never goes back."""
        if seconds < 0:
            raise ValueError("a monotonic clock does not go back")
        self.now += seconds

    def run(self, main: Coroutine[Any, Any, Result]) -> Result:
        """Run `main` on a virtual loop with this clock."""
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(self)) as runner:
            return runner.run(main)


class VirtualLoop(asyncio.BaseEventLoop):
    """The event loop of asyncio with a heap of timers in place of a selector."""

    # Of BaseEventLoop: what is due in the next turn, and whether that is the last one.
    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock
        # By time, and those of one time in the order in which they were set; cancelled ones too, up to a half.
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._number = count()
        self._cancelled = 0

    def time(self) -> float:
        """The time of the clock."""
        return self.clock.now

    def call_later(
        self, delay: float, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call back when so many seconds have passed."""
        return self.call_at(self.clock.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Arguments], object], *args: *Arguments, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call back when it is that late."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heappush(self._timers, (when, next(self._number), timer))
        return timer

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: object) -> NoReturn:
        """Refuse: there is no way to say when, in virtual time, a thread has ended."""
        raise RuntimeError("virtual time has no threads")

    def close(self) -> None:
        """Forget all that is set."""
        super().close()
        self._timers.clear()

    def _run_once(self) -> None:
        """One turn, for `run_forever`: what is due, or if nothing is, the next timer."""
        ready, timers, clock = self._ready, self._timers, self.clock
        while timers and timers[0][2].cancelled():
            heappop(timers)
        if not ready and not self._stopping:
            if not timers:
                raise RuntimeError("everything waits and no timer is set: this would hang for ever")
            clock.now = max(clock.now, timers[0][0])
        while timers and timers[0][0] <= clock.now:
            ready.append(heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()  # noqa: SLF001 - as an event loop does

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Drop them when there are many: a timeout is set for long, and as a rule cancelled soon."""
        self._cancelled += 1
        if self._cancelled > CANCELLED_KEPT and 2 * self._cancelled > len(self._timers):
            self._timers[:] = [timer for timer in self._timers if not timer[2].cancelled() and timer[2] is not handle]
            heapify(self._timers)
            self._cancelled = 0

    def _write_to_self(self) -> None:
        """There is nothing to wake: the loop never sleeps."""
