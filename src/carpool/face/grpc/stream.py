"""PredictStream: many requests in flight on one stream, several requests and answers in a message.

1. A stream has two tasks: one reads what the client asks, the call's own writes what there is to answer.
2. While `OPEN_MAX` requests have no answer that the client has read, or `UNREAD_BYTES_MAX` of answers wait to be
   written, the gateway reads nothing more from the stream, so that what a stream holds is bounded.
3. A client that has sent its last still gets all its answers; then the stream ends.
4. The end of a stream, whatever the reason, cancels all of its requests.
5. A message that cannot be parsed, or an id that is in flight already, ends the stream: the ids of later answers
   would be ambiguous. Any other fault in one request is the answer to that request alone.
6. At a drain nothing more is read; what came is answered, then the stream ends with UNAVAILABLE.
7. A message with many requests is taken over some turns of the event loop, of which all streams together have a part.

A read is never cancelled: grpcio would lose what came. The end of the call ends it.
"""

import asyncio
from collections.abc import Generator, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from carpool.core.errors import CarpoolError, ClientLeft, Malformed, QueueFull
from carpool.core.messages import carpool_v1
from carpool.core.outcome import Outcome, Output
from carpool.core.ports import Caller, LimitVerdict
from carpool.core.protobuf import field
from carpool.core.request import DONE, Request
from carpool.face.grpc.call import GrpcCall, in_a_turn, in_turns, leaving
from carpool.face.grpc.messages import fill_error, parse_stream, predict_call
from carpool.face.http.places import Places
from carpool.face.intake import as_error, new_request_id

if TYPE_CHECKING:
    from carpool.face.grpc.inference import Inference

OPEN_MAX = 4096
UNREAD_BYTES_MAX = 4 * 1024 * 1024
# Of one message, unless a single answer has more. Clients take 4 MB by default.
MESSAGE_BYTES_MAX = 256 * 1024


class GrpcStreams:
    """All streams of a service."""

    def __init__(self, service: "Inference", places: Places, unread_bytes_max: int) -> None:
        self.service = service
        self._places = places
        self.unread_bytes_max = unread_bytes_max
        # Answers that wait to be written, over all streams.
        self.unread_bytes = 0
        self._open: set[GrpcStream] = set()
        self._is_draining = False
        self.turns = service.intake.turns

    async def serve(self, call: GrpcCall) -> CarpoolError | None:
        """One stream, from its beginning to its end."""
        if self._is_draining:
            return leaving()
        stream = GrpcStream(self, call)
        owner = call.caller(stream.intake).owner  # raises for an unknown caller, which gets no stream
        with self._places.held_by(owner):
            self._open.add(stream)
            try:
                return await stream.run()
            finally:
                self._open.discard(stream)
                stream.close()

    def drain(self) -> None:
        """Take nothing new (rule 6)."""
        self._is_draining = True
        for stream in self._open:
            stream.end(leaving(), at_once=False)


class GrpcStream:
    """One stream. It waits for the outcomes of its requests."""

    # For traces.
    route = "carpool.v1.Inference/PredictStream"

    def __init__(self, streams: GrpcStreams, call: GrpcCall) -> None:
        self._streams = streams
        self._service = streams.service
        self.intake = streams.service.intake
        self._call = call
        # By the client's ids: those that wait for an outcome, or for word of their rate limit (None).
        self._asked: dict[str, Request | None] = {}
        # What there is to write, and how many bytes that is; and how many answers are being written now.
        self._ready: list[bytes] = []
        self._ready_bytes = 0
        self._written = 0
        # The stream reads no more; it waits for no more outcomes; and the error that it ends with, if any.
        self._is_ended = self._is_broken = False
        self._end: CarpoolError | None = None
        # The writer waits for answers, the reader for room.
        self._wake, self._room = asyncio.Event(), asyncio.Event()
        # It ends with the call.
        self._reader: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<GrpcStream asked={len(self._asked)} ready={len(self._ready)} {'ended' if self._is_ended else 'open'}>"

    async def run(self) -> CarpoolError | None:
        """Write answers until the last one; returns how the stream ends."""
        self._reader = asyncio.get_running_loop().create_task(self._read())
        while True:
            if self._ready:
                await self._call.write(self._next_message(), self._give_up)
                self._written = 0
                self._room.set()
            elif self._is_broken or (self._is_ended and not self._asked):
                return self._end
            else:
                self._wake.clear()
                await self._wake.wait()

    def end(self, why: CarpoolError | None, *, at_once: bool) -> None:
        """Read no more; with `at_once`, wait for no more outcomes either."""
        if not self._is_broken and (at_once or not self._is_ended):
            self._is_ended, self._is_broken, self._end = True, at_once, why
            self._wake.set()

    def close(self) -> None:
        """The call is over: drop what is unwritten and cancel the open requests (rule 4)."""
        self._is_ended = self._is_broken = True
        self._room.set()
        self._streams.unread_bytes -= self._ready_bytes
        self._ready, self._ready_bytes = [], 0
        asked, self._asked = self._asked, {}
        for request in asked.values():
            if request is not None:
                self.intake.cancel(request)

    def settled(self, request: Request, outcome: Outcome) -> None:
        """Take the outcome of a request."""
        own_id: str = request.ticket
        asked = self._asked.pop(own_id, self)
        if asked is self:
            return  # the stream has ended
        try:
            if isinstance(outcome, Output):
                response = self._service.answers.message(request, outcome)
                self._add(field(1, field(1, own_id.encode()) + field(2, response)))  # a PredictStreamResponse with one
            else:
                self._add_error(own_id, outcome, request.id, came_in=asked is not None)
        except Exception as failure:
            self._add_error(own_id, as_error(failure), request.id)

    async def _read(self) -> None:
        """Ask what the client asks (rule 1)."""
        try:
            while not self._is_ended:
                message = await self._call.next()
                if message is None:
                    self.end(None, at_once=False)
                elif not self._is_ended:
                    await self._take(message)
                    del message
                    while self._is_full() and not self._is_ended:
                        self._room.clear()
                        await self._room.wait()
        except CarpoolError as error:
            self.end(error, at_once=True)
        except Exception as failure:
            if not self._is_broken:  # else the call has ended meanwhile, and with it the read
                self.end(as_error(failure), at_once=True)

    def _is_full(self) -> bool:
        """Whether the client has to take answers first (rule 2)."""
        return len(self._asked) + len(self._ready) + self._written >= OPEN_MAX or self._ready_bytes >= UNREAD_BYTES_MAX

    async def _take(self, message: bytes) -> None:
        caller = self._call.caller(self.intake)  # with each message: a credential may expire before the stream ends
        asked = await in_a_turn(self._streams.turns, message, partial(parse_stream, message))
        if self._is_ended:
            return
        for each in asked.requests:
            if each.id in self._asked:
                raise Malformed("an id is in flight already; give each request one of its own")
            self._asked[each.id] = None  # from now on the stream waits for it, also at a drain
        await in_turns(self._streams.turns, self._ask_each(caller, asked.requests))
        for own_id in asked.cancel:
            if (taken_back := self._asked.get(own_id)) is not None:
                self.intake.cancel(taken_back)

    def _ask_each(self, caller: Caller, asked: Iterable[Any]) -> Generator[None, None, None]:
        for each in asked:
            if self._is_broken:
                return
            if caller.limit is None:
                self._ask(each.id, caller, each.request)
            elif (entry := self.intake.enter(caller)) is None:
                self.intake.when_known(caller, partial(self._known, each.id, caller, each.request))
            else:
                self._known(each.id, caller, each.request, entry)
            yield

    def _known(self, own_id: str, caller: Caller, request: Any, entry: LimitVerdict) -> None:
        """The rate limit has let a request in, or refused it."""
        if own_id not in self._asked:
            return  # the stream has ended
        if isinstance(entry, CarpoolError):
            self._refuse(own_id, entry)
        else:
            self._ask(own_id, caller, request)

    def _ask(self, own_id: str, caller: Caller, asked: Any) -> None:
        request_id = new_request_id()
        try:
            request = self._service.ask(caller, self._call, predict_call(asked), request_id, self, own_id)
        except Exception as failure:  # whatever it is, the other requests of this stream go on
            self._refuse(own_id, as_error(failure), request_id)
            return
        if request.phase != DONE:  # else `settled` has its refusal already
            self._asked[own_id] = request

    def _refuse(self, own_id: str, error: CarpoolError, request_id: str = "") -> None:
        del self._asked[own_id]
        self._add_error(own_id, error, request_id or new_request_id(), came_in=False)

    def _add_error(self, own_id: str, error: CarpoolError, request_id: str, *, came_in: bool = True) -> None:
        if not isinstance(error, ClientLeft):
            self._service.problems.note(self._call, error, came_in=came_in)
        message = carpool_v1.PredictStreamResponse()
        told = message.responses.add(id=own_id).error
        fill_error(told, type(error), error.detail, request_id, error.retry_after_s)
        self._add(message.SerializeToString())

    def _add(self, answer: bytes) -> None:
        if self._is_broken:
            return
        streams = self._streams
        self._ready.append(answer)
        self._ready_bytes += len(answer)
        streams.unread_bytes += len(answer)
        if streams.unread_bytes > streams.unread_bytes_max and self._ready_bytes > UNREAD_BYTES_MAX:
            self._give_up()  # its connection is ended soon, if it does not begin to read
        self._wake.set()

    def _give_up(self) -> None:
        """The client does not read: drop its answers, and end the stream with an error that it gets if it reads on."""
        if not self._is_broken:
            self._end = QueueFull("answers were left unread; read them sooner, or ask for less", retry_after_s=1)
            self.close()

    def _next_message(self) -> bytes:
        """As many answers as go into one PredictStreamResponse."""
        ready = self._ready
        count = len(ready)
        if self._ready_bytes > MESSAGE_BYTES_MAX:
            count, size = 1, len(ready[0])
            while count < len(ready) and size + len(ready[count]) <= MESSAGE_BYTES_MAX:
                size += len(ready[count])
                count += 1
        message = b"".join(ready[:count])
        del ready[:count]
        self._ready_bytes -= len(message)
        self._streams.unread_bytes -= len(message)
        self._written = count
        return message
