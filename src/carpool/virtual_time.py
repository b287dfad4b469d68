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
3. Timers run in the order of their times; those of one time in an order that is the same in each run.
4. No sockets, no threads, no signals. If everything waits and no timer is set, the run ends with RuntimeError in place
   of a hang.

A turn makes no system call: about a million timers or callbacks a second.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

__all__ = ["VirtualClock", "VirtualLoop"]

Result = TypeVar("Result")


class VirtualClock:
    """A monotonic clock that stands still until it is told to move, or until something waits under `run`."""

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
    """The event loop of asyncio without its selector."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock
        # What `BaseEventLoop` asks for events, and how long that may take at most.
        self._selector = _Jump(clock)

    def time(self) -> float:
        """The time of the clock."""
        return self.clock.now

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: object) -> NoReturn:
        """Refuse: nobody could say when, in virtual time, a thread has ended."""
        raise RuntimeError("virtual time has no threads")

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """There is nobody to wake: the loop never sleeps."""


class _Jump:
    """In place of a selector: to wait is to move the clock."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def select(self, timeout: float | None) -> tuple[()]:
        if timeout is None:
            raise RuntimeError("everything waits and no timer is set: this would hang for ever")
        if timeout > 0:
            self._clock.now += timeout
        return ()
