"""Clients that are told apart by their addresses, 127.0.0.2 to 127.0.0.11: cheap enough to send 1,000 requests a second
beside the gateway on two cores.

1. A client's idle connection is used again before it opens another.
2. In an open loop each request goes when it is due, whatever has come back; its time counts from then on.
3. An answer that does not come is lost: the run goes on without it, and the checker counts it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from random import Random
from statistics import quantiles
from typing import Any, NamedTuple, Self, cast

import msgspec

from carpool.tools.bench.generator import HEAD_END, read_head
from support.checker import Checker
from support.client import inference_body

ADDRESSES = tuple(f"127.0.0.{number}" for number in range(2, 12))
# Well over the total timeout of a synchronous request, 4 s: who waits longer is forgotten.
ANSWER_S_MAX = 15.0
# What a request's answer may take before it counts as late.
LATE_S = 10.0
# What is due goes out so often: fewer turns of the event loop, for a load that costs less than the gateway does.
TICK_S = 0.002


class _Output(msgspec.Struct):
    output: Any = None


_decode_output = msgspec.json.Decoder(_Output).decode


class Due(NamedTuple):
    """A request of an open loop."""

    # Seconds after the start of the run.
    at_s: float
    address: str
    # Added to the input: what makes it a bad one. "" for an innocent.
    mark: str = ""
    # Further fields of the body, such as `,"parameters":{"seed":1}`.
    fields: str = ""


class Answered(NamedTuple):
    """What became of one request."""

    address: str
    mark: str
    # Seconds after the start of the run.
    at_s: float
    # 0: none came, or the connection broke.
    status: int
    seconds: float


class Summary(NamedTuple):
    """Many answers in a few figures."""

    requests: int
    # Share of those answered with 200.
    ok: float
    statuses: dict[int, int]
    p50_ms: float
    p90_ms: float
    p99_ms: float

    @classmethod
    def of(cls, answers: Iterable[Answered]) -> Self:
        """The figures of these answers; their times are those of all of them, errors too."""
        listed = list(answers)
        statuses = Counter(answer.status for answer in listed)
        times_ms = [answer.seconds * 1000 for answer in listed]
        # Few have no hundredths; none have no times.
        cuts = quantiles(times_ms, n=100, method="inclusive") if len(times_ms) > 1 else (times_ms or [0.0]) * 99
        ok = statuses[200] / len(listed) if listed else 1.0
        return cls(len(listed), ok, dict(sorted(statuses.items())), cuts[49], cuts[89], cuts[98])

    def __str__(self) -> str:
        times = f"p50/p90/p99 {self.p50_ms:.0f}/{self.p90_ms:.0f}/{self.p99_ms:.0f} ms"
        statuses = ", ".join(f"{status}: {number}" for status, number in self.statuses.items())
        return f"{self.ok:.2%} with 200 ({statuses}), {times}"


def by_address(answers: Iterable[Answered]) -> dict[str, Summary]:
    """The figures of each client."""
    parts: dict[str, list[Answered]] = {}
    for answer in answers:
        parts.setdefault(answer.address, []).append(answer)
    return {address: Summary.of(part) for address, part in sorted(parts.items())}


def arrivals(per_s: float, seconds: float, random: Random) -> list[float]:
    """When independent clients come: exactly so many, at times that know nothing of one another."""
    return sorted(random.uniform(0, seconds) for _ in range(round(per_s * seconds)))


Done = Callable[[int, bytes], None]


class _Wire(asyncio.Protocol):
    """One connection: a request, its answer, the next request."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        # Gets the status and the body; status 0 if the connection broke. None while no request is under way.
        self._done: Done | None = None
        self._unread = b""
        self.is_usable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def ask(self, request: bytes, done: Done) -> None:
        """Send a request."""
        self._done = done
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        head_end = self._unread.find(HEAD_END)
        if head_end < 0:
            return
        status, length, stays = read_head(self._unread[:head_end])
        body_end = head_end + len(HEAD_END) + length
        if len(self._unread) < body_end:
            return
        body = self._unread[head_end + len(HEAD_END) : body_end]
        done, self._done = self._done, None
        # Where more has come than was asked for, this connection cannot be trusted any more.
        if not stays or done is None or len(self._unread) > body_end:
            self.close()
        self._unread = b""
        if done is not None:
            done(status, body)

    def connection_lost(self, failure: Exception | None) -> None:
        self.is_usable = False
        if self._done is not None:
            self._done(0, b"")

    def close(self) -> None:
        """Hang up."""
        self.is_usable = False
        self._transport.abort()


class AddressedClients:
    """Clients with addresses of their own at one gateway."""

    def __init__(self, port: int, checker: Checker) -> None:
        self._port = port
        self._checker = checker
        self._idle: dict[str, list[_Wire]] = {}
        self._wires: list[_Wire] = []
        self._opening: set[asyncio.Task[None]] = set()
        # Of an open loop: how many answers there will be.
        self._expected = 0
        self._all_are_answered = asyncio.Event()
        self._started = time.monotonic()
        self.answers: list[Answered] = []
        # By how much the load itself was late at most: a busy machine, not the gateway.
        self.behind_s_max = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for wire in self._wires:
            wire.close()
        await asyncio.sleep(0)  # transports close in the next turn of the event loop

    async def connect(self, address: str, count: int) -> None:
        """Have so many idle connections of this client, for a burst in which nobody is late."""
        idle = self._idle.setdefault(address, [])
        while len(idle) < count:
            idle.append(await self._open(address))

    async def run(self, load: Sequence[Due]) -> list[Answered]:
        """Send each request when it is due; returns when all are answered, or nobody waits any more."""
        already = len(self.answers)
        self._expected = already + len(load)
        self._all_are_answered.clear()
        waiting = iter(load)
        due = next(waiting, None)
        self._started = time.monotonic()
        while due is not None:
            now_s = time.monotonic() - self._started
            while due is not None and due.at_s <= now_s:
                self.behind_s_max = max(self.behind_s_max, now_s - due.at_s)
                self._send(self._checker.new_input() + due.mark, due.address, due.mark, fields=due.fields)
                due = next(waiting, None)
            await asyncio.sleep(TICK_S)
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                await self._all_are_answered.wait()
        except TimeoutError:
            pass
        return self.answers[already:]

    async def ask(self, address: str, mark: str = "") -> Answered:
        """One request of this client, and what became of it."""
        return await self.ask_for(self._checker.new_input() + mark, address, mark)

    async def ask_for(self, text: str, address: str, mark: str = "") -> Answered:
        """The same with this very input, which nobody else may have at the same time."""
        answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._send(text, address, mark, lambda answered: None if answer.done() else answer.set_result(answered))
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                return await answer
        except TimeoutError:
            return Answered(address, mark, 0.0, 0, ANSWER_S_MAX)

    def _send(
        self,
        text: str,
        address: str,
        mark: str,
        tell: Callable[[Answered], None] = lambda answered: None,
        fields: str = "",
    ) -> None:
        """Send a request at once if there is an idle connection, else as soon as there is one."""
        body = inference_body(text)[:-1] + fields.encode() + b"}"
        request = b"POST /v1/inference HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        self._checker.accepted(text, within_s=LATE_S)
        began = time.monotonic()

        def begin(wire: _Wire) -> None:
            def done(status: int, answer: bytes) -> None:
                answered = Answered(address, mark, began - self._started, status, time.monotonic() - began)
                if wire.is_usable:
                    self._idle.setdefault(address, []).append(wire)
                self._judge(text, status, answer)
                self.answers.append(answered)
                if len(self.answers) == self._expected:
                    self._all_are_answered.set()
                tell(answered)

            wire.ask(request, done)

        async def begin_on_another() -> None:
            begin(await self._open(address))

        wire = self._take_idle(address)
        if wire is not None:
            begin(wire)
        else:
            task = asyncio.create_task(begin_on_another())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _judge(self, text: str, status: int, answer: bytes) -> None:
        if status == 200:
            self._checker.output(text, _decode_output(answer).output)
        elif status:
            self._checker.failed(text, status)
        else:
            self._checker.broke_off(text)

    def _take_idle(self, address: str) -> _Wire | None:
        """An idle connection that the gateway did not close meanwhile."""
        idle = self._idle.get(address, [])
        while idle:
            wire = idle.pop()
            if wire.is_usable:
                return wire
        return None

    async def _open(self, address: str) -> _Wire:
        loop = asyncio.get_running_loop()
        _, wire = await loop.create_connection(_Wire, "127.0.0.1", self._port, local_addr=(address, 0))
        self._wires.append(wire)
        return wire
