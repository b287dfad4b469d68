"""`GET /v1/result/{task_id}/events`: what becomes of a task, as server-sent events.

1. `queued` tells its place and the estimated wait, `processing` that it is being worked on, `done` and `failed` are the
   end. The data is what `GET /v1/result/{task_id}` would say.
2. An event's id is the state that it tells. A client that comes again with `Last-Event-ID` does not get the same state
   twice; if it has heard the end, it gets a 204, upon which browsers stop to ask.
3. An outcome is sent as soon as it is known, a place every LOOK_S seconds if it has changed. A client that does not
   read misses places, never the outcome; the connection's own rules cut it off.
4. The number of listeners is bounded, over all and for each owner.
5. At a drain the gateway tells each listener when to come back, and ends its stream.
6. A credential that is revoked or expired ends its streams: it is checked with each look at the task.
"""

import asyncio
import logging

from carpool.core.errors import CarpoolError, InternalError, Unauthorized
from carpool.core.ports import Caller
from carpool.core.task import StoredTask
from carpool.face.http.exchange import Exchange, ExchangeWorker
from carpool.face.http.gateway import possible_task_id, task_json
from carpool.face.http.live import EVENT_STREAM, HEADERS, HEARTBEAT, event_of, retry_after
from carpool.face.http.places import Places
from carpool.face.http.problem import respond_problem
from carpool.face.intake import Intake

logger = logging.getLogger("carpool.http")

LOOK_S = 2.0
HEARTBEAT_S = 15.0
COME_BACK_S = 1.0
END = b"end"


class TaskEvents(ExchangeWorker):
    """Serves the route, and knows its listeners."""

    def __init__(self, intake: Intake, places: Places, *, forget_after_read: bool) -> None:
        self._intake = intake
        self._places = places
        self._forget_after_read = forget_after_read
        self._listeners: dict[Exchange, Listener] = {}
        self.is_draining = False

    def __len__(self) -> int:
        return len(self._listeners)

    def listen(self, exchange: Exchange, task_id: str) -> None:
        """`GET /v1/result/{task_id}/events`."""
        caller = self._intake.identify(exchange.headers, exchange.sink.peer)
        if (refusal := self._places.refusal(caller.owner)) is not None:
            respond_problem(exchange, refusal)
            return
        listener = self._listeners[exchange] = Listener(self, exchange, caller, possible_task_id(task_id))
        exchange.worker = self
        listener.look(self._intake, 0.0, forget=self._forget_after_read and exchange.method == b"GET")

    def drain(self) -> None:
        """Tell each listener when to come back (rule 5)."""
        self.is_draining = True
        for listener in list(self._listeners.values()):
            if listener.is_begun:  # else its first look is under way: it gets that state, and ends with it
                self.end(listener, retry_after(COME_BACK_S))

    def look_again(self, listener: "Listener") -> None:
        """Wait for the outcome of a task that has none yet, unless the client may not hear of it any more (rule 6)."""
        try:
            self._intake.identify(listener.exchange.headers, listener.exchange.sink.peer)
        except Unauthorized:
            self.end(listener)
            return
        except CarpoolError:
            pass  # the credential cannot be checked right now
        listener.look(self._intake, LOOK_S, forget=self._forget_after_read)

    def end(self, listener: "Listener", last: bytes = b"") -> None:
        """End the stream of a listener, with a last part."""
        exchange = listener.exchange
        self.client_left(exchange)
        if last:
            exchange.write(last)
        exchange.end()

    def refuse(self, listener: "Listener", error: CarpoolError) -> None:
        """Answer a listener with an error."""
        self.client_left(listener.exchange)
        respond_problem(listener.exchange, error)

    def client_left(self, exchange: Exchange) -> None:
        """A listener has left."""
        listener = self._listeners.pop(exchange, None)
        if listener is not None:
            self._places.give_back(listener.caller.owner)
            listener.leave(self._intake)


class Listener:
    """One client that listens to one task."""

    def __init__(self, events: TaskEvents, exchange: Exchange, caller: Caller, task_id: str) -> None:
        self._events = events
        self.exchange = exchange
        self.caller = caller
        self._task_id = task_id
        self._last_id = exchange.headers.get(b"last-event-id", b"")
        # The ticket of the look under way, when it began (0.0: without a wait), and the timer until the next.
        self._poll: object = None
        self._looked = 0.0
        self._timer: asyncio.TimerHandle | None = None
        # When it was last told something.
        self._told_at = 0.0
        # The head of the answer is out.
        self.is_begun = False

    def look(self, intake: Intake, wait_s: float, *, forget: bool) -> None:
        """Ask for the state of the task: now, or when it has an outcome, after `wait_s` at the latest."""
        self._looked = asyncio.get_running_loop().time() if wait_s else 0.0
        self._poll = intake.look(
            caller=self.caller, task_id=self._task_id, wait_s=wait_s, forget=forget, answer=self._told
        )

    def leave(self, intake: Intake) -> None:
        """The client listens no more: stop the timer and the look under way."""
        if self._timer is not None:
            self._timer.cancel()
        if self._poll is not None:
            intake.leave(self._poll)

    def _told(self, task: StoredTask | CarpoolError) -> bool:
        """Send the state of the task; returns whether the client was there. A defect harms this client alone."""
        try:
            if isinstance(task, StoredTask):
                return self._tell(task)
            self._fail(task)
        except Exception:
            logger.exception("a listener could not be told how its task is")
            self._events.refuse(self, InternalError("the gateway failed on this request"))
        return False

    def _tell(self, task: StoredTask) -> bool:
        exchange, events = self.exchange, self._events
        name, event_id = name_and_id(task)
        if event_id == END and self._last_id == END:
            events.client_left(exchange)
            exchange.respond(204, b"", b"")
            return True
        if not self.is_begun:
            self.is_begun = True
            exchange.begin(200, EVENT_STREAM, HEADERS)
            if exchange.method == b"HEAD":
                events.end(self)
                return False
        is_over = event_id == END
        if event_id != self._last_id and (is_over or not exchange.is_told_to_wait):
            self._last_id, self._told_at = event_id, asyncio.get_running_loop().time()
            exchange.write(event_of(task_json(task), name, event_id))
        if is_over:
            was_read = not exchange.sink.is_gone()
            events.end(self)
            return was_read
        if events.is_draining:
            events.end(self, retry_after(COME_BACK_S))
        else:
            self._go_on()
        return True

    def _fail(self, error: CarpoolError) -> None:
        if not self.is_begun:
            self._events.refuse(self, error)
        elif error.retryable:
            self._go_on()  # the broker is away for a moment
        else:
            self._events.end(self)  # the task was deleted: a client that comes again gets a 404

    def _go_on(self) -> None:
        """Look again: at once after the first look, else LOOK_S after the last one began, as it may fail at once."""
        loop, exchange = asyncio.get_running_loop(), self.exchange
        now = loop.time()
        if now - self._told_at >= HEARTBEAT_S and not exchange.is_told_to_wait:
            self._told_at = now
            exchange.write(HEARTBEAT)
        pause_s = max(0.0, self._looked + LOOK_S - now) if self._looked else 0.0
        self._timer = loop.call_later(pause_s, self._events.look_again, self)


def name_and_id(task: StoredTask) -> tuple[bytes, bytes]:
    """The name of the event that tells of a task in this state, and its id."""
    if task.status != "PENDING":
        return b"done" if task.status == "SUCCESS" else b"failed", END
    if task.queue is None:
        return b"queued", b"q"
    return (b"processing", b"p") if task.queue.place == 0 else (b"queued", b"q%d" % task.queue.place)
