"""The errors that clients get when Redis does not take their requests and tasks."""

from collections.abc import Callable

from carpool.broker.journal_records import store_full
from carpool.broker.redis.client.link import Lost, NoRoom, RedisFailure, Refused
from carpool.broker.replays import no_such_letter
from carpool.core.errors import BrokerDown, BrokerMemoryFull, CarpoolError, QueueFull

# What the script, or Redis itself, refuses.
REFUSALS: dict[str, Callable[[], CarpoolError]] = {
    "QUEUEFULL": lambda: QueueFull("the queue is full; try again soon", retry_after_s=1),
    "LANESFULL": lambda: QueueFull(
        "too many different `parameters` are waiting; use fewer distinct ones or try again soon", retry_after_s=1
    ),
    "STOREFULL": store_full,
    "OOM": lambda: BrokerMemoryFull("the memory of Redis is full; try again soon", retry_after_s=1),
}


def out_of_reach() -> BrokerDown:
    """The error when nothing was sent."""
    return BrokerDown("Redis cannot be reached; try again soon", retry_after_s=1)


def error_of(failure: RedisFailure) -> CarpoolError:
    """The error that the submitter of a task gets."""
    if isinstance(failure, Lost):
        return BrokerDown("Redis was lost: the task may or may not have been accepted; try again", retry_after_s=1)
    if isinstance(failure, NoRoom):
        return REFUSALS["QUEUEFULL"]()
    if not isinstance(failure, Refused):
        return out_of_reach()
    if failure.code == "NOLETTER":
        return no_such_letter()
    if failure.code in REFUSALS:
        return REFUSALS[failure.code]()
    return BrokerDown("Redis cannot take tasks right now; try again soon", retry_after_s=1)
