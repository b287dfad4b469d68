"""A client says how long its answer is of use: 504 on time, and never sent after it."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from typing import Any

import pytest

from carpool.core.errors import DeadlineExceeded, Malformed, QueueTimeout
from carpool.core.outcome import Outcome, Output
from carpool.core.ports import NO_OPTIONS, RequestOptions
from carpool.core.request import Request
from carpool.core.timers import Every
from carpool.face.http.gateway import options_in, preferences
from carpool.face.intake import apply
from carpool.testing import FakeUpstream, Witness, echo, make_request
from support.event_log import EventLog
from support.virtual_gateway import Stand

# How often the deadlines are looked at.
TICK_S = 0.01


def wished_s(*, own: bytes | None = None, prefer: bytes = b"") -> float | None:
    headers = {} if own is None else {b"x-request-timeout-ms": own}
    return options_in(headers, preferences(prefer)).timeout_s


@pytest.mark.parametrize(
    ("text", "seconds"), [(b"1", 0.001), (b"50", 0.05), (b"0050", 0.05), (b"999999999", 999999.999)]
)
def test_milliseconds(text: bytes, seconds: float) -> None:
    assert wished_s(own=text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [b"", b"0", b"000", b"-1", b"+1", b"1.5", b"1e3", b" 5", b"5 ms", b"9999999999", b"50, 60", b"50,50", b"\xb2"],
)
def test_what_is_no_number_of_milliseconds_is_told(text: bytes) -> None:
    """Repeated headers come as one, with a comma."""
    with pytest.raises(Malformed, match="X-Request-Timeout-Ms"):
        wished_s(own=text)


@pytest.mark.parametrize(
    ("prefer", "seconds"),
    [
        (b"wait=2", 2.0),
        (b"return=minimal, wait=3; x=y", 3.0),
        (b'Wait="4"', 4.0),
        (b"wait=1, wait=9", 1.0),
        (b"wait=0", None),
        (b"wait=-1", None),
        (b"wait=1.5", None),
        (b"wait", None),
        (b"wait=", None),
        (b"wait=9999999", None),
        (b"waiting=3", None),
        (b"", None),
        (b"respond-async, wait=5", None),
        (b"wait=5, respond-async", None),
    ],
)
def test_seconds_by_preference(prefer: bytes, seconds: float | None) -> None:
    assert wished_s(prefer=prefer) == seconds


def test_our_own_header_goes_before_the_preference() -> None:
    assert wished_s(own=b"50", prefer=b"wait=9") == 0.05
    assert wished_s(own=b"50", prefer=b"respond-async") == 0.05


def test_most_say_nothing() -> None:
    assert options_in({b"host": b"x"}, {}) is NO_OPTIONS
    assert options_in({b"cache-control": b"No-Store"}, {}) == RequestOptions(None, no_store=True)


@pytest.mark.parametrize(("wished", "is_own"), [(0.05, True), (3.999, True), (4.0, False), (1e6, False)])
def test_it_may_be_shorter_than_what_everybody_has_and_no_longer(wished: float, is_own: bool) -> None:
    request = make_request("r", Witness(), now=100.0)
    apply(RequestOptions(timeout_s=wished), request)
    assert request.deadline == 100.0 + min(wished, 4.0)
    assert request.own_timeout_s == (wished if is_own else 0.0)
    assert request.queue_timeout_s == 2.0


class Timed(Witness):
    """Knows when each had its outcome."""

    def __init__(self, stand: "Watched") -> None:
        super().__init__()
        self._stand = stand
        self.at: dict[str, float] = {}

    def settled(self, request: Request, outcome: Outcome) -> None:
        super().settled(request, outcome)
        self.at[request.id] = self._stand.clock()


class Sends(EventLog):
    """Knows when each was sent for the last time."""

    def __init__(self) -> None:
        super().__init__()
        self.at: dict[str, float] = {}

    def sent(self, batch: Sequence[Request], endpoint: str, attempt: int, now: float) -> None:
        self.at.update((member.id, now) for member in batch)


class Watched(Stand):
    """A gateway that looks at its deadlines."""

    def send_with(self, own_timeout_s: float, queue_timeout_s: float = 2.0) -> Request:
        number = next(self.numbers)
        request = make_request(
            str(number),
            self.timed,
            now=self.clock(),
            value=b"%d" % number,
            own_timeout_s=own_timeout_s,
            queue_timeout_s=queue_timeout_s,
        )
        assert self.broker.submit(request) is None
        return request

    def watch(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.numbers, self.timed = count(), Timed(self)

        async def watched() -> None:
            every = Every(TICK_S, lambda: self.broker.expire(self.clock()))
            every.start()
            try:
                await main()
            finally:
                every.stop()

        self.run(watched)


@pytest.mark.parametrize("seconds_a_call", [0.04, 0.12])
def test_none_is_sent_after_its_deadline_and_each_is_told_on_time(seconds_a_call: float) -> None:
    """O6 in virtual time: three in ten give 50 ms, at one and a half times what the upstream can do."""
    gpu = FakeUpstream(slots=2)
    gpu.then(echo, delay_s=seconds_a_call, times=10_000)
    stand = Watched(gpu)
    requests: list[Request] = []
    sends = Sends()

    async def main() -> None:
        per_s = 1.5 * 2 * 8 / seconds_a_call
        for number in range(600):
            requests.append(stand.send_with(0.05 if number % 10 < 3 else 0.0))
            await asyncio.sleep(1 / per_s)
        await asyncio.sleep(5.0)

    stand.events.subscribe(sends)
    stand.watch(main)
    own = [request for request in requests if request.own_timeout_s]
    late = [request for request in own if isinstance(stand.timed.outcome(request), DeadlineExceeded)]
    assert len(own) == 180 and len(late) > 20
    assert all(sends.at[request.id] < request.deadline for request in requests if request.id in sends.at)
    assert all(request.deadline <= stand.timed.at[request.id] <= request.deadline + 0.02 for request in late)
    others = [stand.timed.outcome(request) for request in requests if not request.own_timeout_s]
    assert sum(isinstance(outcome, Output) for outcome in others) > 300
    assert stand.broker.held == 0


def test_one_longer_than_the_time_in_the_queue_is_looked_at_twice() -> None:
    gpu = FakeUpstream()
    gpu.hold()
    stand = Watched(gpu, max_batch=1)

    async def main() -> None:
        runs, waits = stand.send_with(0.4, 0.1), stand.send_with(0.3, 0.1)
        await asyncio.sleep(0.2)
        assert isinstance(stand.timed.outcome(waits), QueueTimeout)
        assert stand.timed.outcome(runs) is None
        await asyncio.sleep(0.3)
        assert isinstance(stand.timed.outcome(runs), DeadlineExceeded)
        assert stand.timed.at[runs.id] <= runs.deadline + TICK_S

    stand.watch(main)
