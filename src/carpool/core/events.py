"""What happens to requests, for subscribers such as tracing. One object for each process.

1. A request is `admitted` once, when it counts against the bounds, and `settled` once, when its outcome is counted.
   Between these its batches are `taken` and `sent`, again where something failed. A batch has `ended` when all of its
   requests are settled, or handled elsewhere: they wait again, or a search looks into them one by one.
2. Without subscribers this costs a test for truth: a stage tests `if events.subscribers` before it reports an event.
3. A subscriber that raises does no harm: its error is logged, and the others are called. It must not wait for anything:
   a batch would wait for it.
4. Over Redis a gateway reports what was admitted and settled, a batcher what was taken and sent, and tasks whose result
   it wrote. Each has a Request of its own for it, with the same id. Of a task that was deleted in Redis, or that no
   batcher took in time, no process has one: the process that ended it reports it as settled, with what is known of it.
5. Where identical requests are coalesced, each is admitted and settled; the leader is taken and sent, with the id
   of one of them.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from carpool.core.batch import Batch
from carpool.core.outcome import Outcome, Output
from carpool.core.request import Request

logger = logging.getLogger("carpool")


class Subscriber(Protocol):
    """A listener. It may look at requests and batches, but never change them, nor keep those that are under way.

    A class that is derived from this one gets the events for which it has a method of its own.
    """

    def admitted(self, request: Request) -> None:
        """A request came in, at `request.arrived`, or was restored then; over Redis a task when Redis has it."""
        return

    def taken(self, batch: Sequence[Request]) -> None:
        """A batch left its lane, at `request.taken` of each."""
        return

    def sent(self, batch: Sequence[Request], endpoint: str, attempt: int, now: float) -> None:
        """A call with these begins: the first attempt is 1. After a dead connection the same attempt may come again."""
        return

    def ended(self, batch: Batch, requests: Sequence[Request]) -> None:
        """A batch is over, at `batch.ended`. `requests` are those that were taken for it; their inputs may be gone."""
        return

    def settled(self, request: Request, outcome: Outcome) -> None:
        """A request got its outcome, at `request.ended`; its waiter got it before, and its input is gone."""
        return


class Events:
    """Reports each event to every subscriber."""

    def __init__(self) -> None:
        # A new tuple with each change, for an event may be on its way to the subscribers meanwhile.
        self.subscribers: tuple[Subscriber, ...] = ()
        self._failures = 0
        self._find_listeners()

    def subscribe(self, subscriber: Subscriber) -> None:
        """Report events to this subscriber from now on."""
        self.subscribers = (*self.subscribers, subscriber)
        self._find_listeners()

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Report no more events to this subscriber."""
        self.subscribers = tuple(each for each in self.subscribers if each is not subscriber)
        self._find_listeners()

    def _find_listeners(self) -> None:
        """Which subscriber gets which event, looked up once: some events happen with every request."""

        def own(event: str) -> list[Callable[..., None]]:
            return [getattr(each, event) for each in self.subscribers if has_own(each, event)]

        # Most subscribers have no use for this event: so callers test for its listeners alone.
        self.of_admitted = own("admitted")
        self._of_taken, self._of_sent, self._of_ended = map(own, ("taken", "sent", "ended"))
        self._of_settled = own("settled")
        self._of_all_settled = [all_settled_of(each) for each in self.subscribers if has_own(each, "settled")]

    def admitted(self, request: Request) -> None:
        """A request came in."""
        if not request.is_shared:
            self._report(self.of_admitted, request)

    def taken(self, batch: Sequence[Request]) -> None:
        """A batch left its lane."""
        self._report(self._of_taken, batch)

    def sent(self, batch: Sequence[Request], endpoint: str, attempt: int, now: float) -> None:
        """A call begins."""
        self._report(self._of_sent, batch, endpoint, attempt, now)

    def ended(self, batch: Batch, requests: Sequence[Request]) -> None:
        """A batch is over."""
        self._report(self._of_ended, batch, requests)

    def settled(self, request: Request, outcome: Outcome) -> None:
        """A request got its outcome."""
        if not request.is_shared:
            self._report(self._of_settled, request, outcome)

    def all_settled(self, requests: Sequence[Request], outputs: Sequence[Output]) -> None:
        """Requests of one model, at least one, got their outputs at the same time; some of them may be shared."""
        self._report(self._of_all_settled, requests, outputs)

    def _report(self, listeners: Sequence[Callable[..., None]], *event: Any) -> None:
        for listener in listeners:
            try:
                listener(*event)
            except Exception:
                self._failures += 1
                if self._failures & (self._failures - 1) == 0:  # 1, 2, 4, 8, …: it may fail for every request
                    logger.exception("a subscriber to events failed; failures so far: %d", self._failures)


def has_own(subscriber: Subscriber, event: str) -> bool:
    """Whether a subscriber does something with an event."""
    return getattr(type(subscriber), event, None) is not getattr(Subscriber, event)


def all_settled_of(subscriber: Subscriber) -> Callable[[Sequence[Request], Sequence[Output]], None]:
    """How a subscriber gets many outputs: by its own `all_settled`, if it has such a quicker way, or one by one."""

    def tell_each(requests: Sequence[Request], outputs: Sequence[Output]) -> None:
        for request, output in zip(requests, outputs, strict=True):
            if not request.is_shared:
                subscriber.settled(request, output)

    return getattr(subscriber, "all_settled", tell_each)
