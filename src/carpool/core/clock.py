"""Time as an argument: the one function that reads the monotonic clock, and its type."""

from collections.abc import Callable
from datetime import UTC, datetime
from time import perf_counter

Clock = Callable[[], float]

# perf_counter is CLOCK_MONOTONIC here: it does not jump with the wall clock. uvloop's own loop.time() has
# millisecond steps and stands still within one turn of the loop, too coarse for latencies.
monotonic: Clock = perf_counter


def rfc3339(wall: float) -> str:
    """A Unix time as people read it: UTC, to the millisecond."""
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


# A timer that comes so much later than it was set for: this process stood still (SIGSTOP, a suspended machine).
# Timers then run before what lies in the sockets is read: that an answer is late is not its sender's fault.
STOOD_STILL_S = 1.0
