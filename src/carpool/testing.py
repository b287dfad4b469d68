"""For tests of code around Carpool: a clock that a test moves, and an upstream that a test scripts.

clock = FakeClock()
gpu = FakeUpstream(slots=2)
gpu.then(Answer(503, b""))                  # the first call fails; later ones echo their inputs
clock.run(main())                           # no real second passes, however long `main` waits
assert [call.inputs for call in gpu.calls] == [[b'"a"'], [b'"a"']]
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from carpool.core.outcome import CallFacts, Outcome, Output
from carpool.core.ports import Caller
from carpool.core.request import Request, Waiter
from carpool.upstream.endpoint import (
    AttemptFailedError,
    ConnectionWasDeadError,
    NoAnswerError,
    UpstreamCall,
    UpstreamResponse,
)
from carpool.virtual_time import VirtualClock

__all__ = [
    "ANYBODY",
    "AttemptFailedError",
    "ConnectionWasDeadError",
    "FakeClock",
    "FakeUpstream",
    "ReceivedCall",
    "UpstreamCall",
    "UpstreamResponse",
    "Witness",
    "echo",
    "inputs_of",
    "make_output",
    "make_request",
]

# A caller without a credential.
ANYBODY = Caller("192.0.2.1", 0)

# The clock of virtual time, as a test sees it.
FakeClock = VirtualClock
# What a call meets: an answer, an exception to raise, or a function that makes the answer.
Reaction = UpstreamResponse | Exception | Callable[[UpstreamCall], UpstreamResponse]


class _Body(msgspec.Struct):
    inputs: list[msgspec.Raw]


_decode = msgspec.json.Decoder(_Body).decode


class ReceivedCall(msgspec.Struct, frozen=True):
    """One call that a FakeUpstream got."""

    call: UpstreamCall
    timeout_s: float
    # The elements of the call's array, as the bytes they were.
    inputs: list[bytes]


class FakeUpstream:
    """An endpoint that follows a script: `then` scripts the next calls, further ones echo their inputs.

    It speaks the plain JSON protocol, `{"inputs":[…]}` → `{"outputs":[…]}`, and like a real endpoint gives up with
    AttemptFailedError after the `timeout_s` of the call.
    """

    def __init__(self, name: str = "fake", slots: int = 1) -> None:
        self.name = name
        self.slots = slots
        self.calls: list[ReceivedCall] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self._script: deque[tuple[Reaction, float]] = deque()
        self._open = asyncio.Event()
        self._open.set()

    def __repr__(self) -> str:
        return f"<FakeUpstream {self.name} calls={len(self.calls)} in_flight={self.in_flight}>"

    def then(self, reaction: Reaction, *, delay_s: float = 0.0, times: int = 1) -> "FakeUpstream":
        """Have the next call that is not scripted yet (or the next `times` calls) meet this, after a delay."""
        self._script.extend([(reaction, delay_s)] * times)
        return self

    def hold(self) -> None:
        """Keep calls without an answer until `release`."""
        self._open.clear()

    def release(self) -> None:
        """Answer what was held."""
        self._open.set()

    async def post(self, call: UpstreamCall, timeout_s: float) -> UpstreamResponse:
        """Do what the script says."""
        reaction, delay_s = self._script.popleft() if self._script else (echo, 0.0)
        self.calls.append(ReceivedCall(call, timeout_s, inputs_of(call)))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(delay_s)
                await self._open.wait()
        except TimeoutError:
            raise NoAnswerError(timeout_s) from None
        finally:
            self.in_flight -= 1
        if isinstance(reaction, Exception):
            raise reaction
        return reaction if isinstance(reaction, UpstreamResponse) else reaction(call)

    async def accepts_connections(self) -> bool:
        """It can be reached."""
        return True

    async def close(self) -> None:
        """There is nothing to give up."""


def inputs_of(call: UpstreamCall) -> list[bytes]:
    """The elements of the array in a call of the plain JSON protocol."""
    return [bytes(raw) for raw in _decode(call.body).inputs]


def echo(call: UpstreamCall) -> UpstreamResponse:
    """Answer each input with itself."""
    return UpstreamResponse(200, b'{"outputs":[' + b",".join(inputs_of(call)) + b"]}")


class Witness:
    """A waiter that writes down the outcomes it gets."""

    def __init__(self) -> None:
        # Outcomes by request id, in the order in which they came. More than one for an id is a defect.
        self.told: dict[str, list[Outcome]] = {}

    def outcome(self, request: Request) -> Outcome | None:
        """The one outcome of a request; None while there is none."""
        told = self.told.get(request.id)
        if told is None:
            return None
        assert len(told) == 1, f"told {len(told)} times"
        return told[0]

    def settled(self, request: Request, outcome: Outcome) -> None:
        """Take the outcome of a request."""
        self.told.setdefault(request.id, []).append(outcome)


def make_request(
    request_id: str,
    waiter: Waiter,
    *,
    now: float,
    model: str = "m",
    parameters: bytes = b"",
    value: bytes = b'"x"',
    tier: int = 0,
    target_s: float = 0.05,
    queue_timeout_s: float = 2.0,
    total_timeout_s: float = 4.0,
    is_task: bool = False,
    owner: str = "",
    own_timeout_s: float = 0.0,
) -> Request:
    """A request that arrives `now`, with the default timeouts, or with a deadline of its own."""
    return Request(
        request_id,
        model,
        parameters,
        value,
        len(value),
        tier,
        now,
        now + target_s,
        queue_timeout_s,
        now + (own_timeout_s or total_timeout_s),
        waiter,
        is_task=is_task,
        owner=owner,
        own_timeout_s=own_timeout_s,
    )


def make_output(value: Any) -> Output:
    """An output as a call for this one request alone would have brought it."""
    return Output(value, CallFacts(batch_size=1, upstream_s=0.0))
