"""One batch through the upstream: whatever it does, each member has its own outcome and the slot comes back."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from itertools import count, pairwise
from typing import Any

import msgspec
import pytest

from carpool.broker.memory import MemoryBroker
from carpool.core.errors import (
    CarpoolError,
    ClientLeft,
    DeadlineExceeded,
    Draining,
    InputRefused,
    InternalError,
    UpstreamFailed,
    UpstreamProtocolFault,
    UpstreamRefused,
)
from carpool.core.outcome import Output
from carpool.core.request import Request
from carpool.testing import Answer, AttemptFailedError, Call, FakeClock, FakeUpstream, Witness, echo, make_request
from carpool.upstream.codecs import JsonCodec
from carpool.upstream.dispatch import UpstreamDispatcher
from carpool.upstream.pool import Pool

RESET = AttemptFailedError("the call broke off")


class Stand:
    """A dispatcher between a broker and scripted upstreams, in virtual time."""

    def __init__(self, *upstreams: FakeUpstream, codec: JsonCodec | None = None) -> None:
        self._serial = count()
        self.clock = FakeClock()
        self.upstreams = upstreams or (FakeUpstream("a"),)
        self.witness = Witness()
        self.broker = MemoryBroker(waiting_max=1000, bytes_max=1_000_000, lanes_max=9, tiers=1, clock=self.clock)
        self.broker.when_work_arrives("m", lambda lane: None)
        self.pool = Pool(self.upstreams, self.clock)
        self.ended: list[float] = []
        self.random_share = 0.5
        self.dispatcher = UpstreamDispatcher(
            self.pool,
            codec or JsonCodec(),
            self.broker,
            timeout_s=3.0,
            attempts=3,
            backoff_s=0.1,
            clock=self.clock,
            random_share=lambda: self.random_share,
        )

    def batch(self, count: int, total_timeout_s: float = 4.0, parameters: bytes = b"") -> list[Request]:
        for number in range(count):
            self.broker.submit(
                make_request(
                    str(next(self._serial)),
                    self.witness,
                    now=self.clock(),
                    value=b'"in %d"' % number,
                    total_timeout_s=total_timeout_s,
                    parameters=parameters,
                )
            )
        (lane,) = self.broker.lanes("m")
        return self.broker.take(lane, count, self.clock())

    def send(self, batch: list[Request]) -> None:
        self.dispatcher.dispatch(batch, self.ended.append)

    async def finished(self) -> None:
        await self.dispatcher.finish(600.0)

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a test in virtual time; afterwards nothing may be left over."""

        async def checked() -> None:
            await main()
            await self.finished()

        self.clock.run(checked())
        assert repr(self.dispatcher) == "<UpstreamDispatcher running=0>"
        assert repr(self.pool) == f"<Pool slots={self.pool.total()} free={self.pool.total()} retries=0>"
        assert repr(self.broker) == "<MemoryBroker held=0 bytes=0 waiting=0>"

    def deliver(self, count: int = 3, total_timeout_s: float = 4.0) -> list[Any]:
        """Send one batch and wait; the outcomes of its members."""
        batch: list[Request] = []

        async def main() -> None:
            batch.extend(self.batch(count, total_timeout_s))
            self.send(batch)

        self.run(main)
        return [self.witness.outcome(request) for request in batch]


def kinds(outcomes: Sequence[Any]) -> set[type]:
    return {type(outcome) for outcome in outcomes}


def test_each_output_goes_to_its_own_request() -> None:
    stand = Stand()
    stand.upstreams[0].then(echo, delay_s=0.2)
    outcomes = stand.deliver(3)
    assert [bytes(outcome.value) for outcome in outcomes] == [b'"in 0"', b'"in 1"', b'"in 2"']
    assert [(o.call.batch_size, round(o.call.upstream_s, 6)) for o in outcomes] == [(3, 0.2)] * 3
    assert stand.ended == [pytest.approx(0.2)]
    assert stand.dispatcher.calls == {"ok": 1, "failed": 0, "refused": 0, "protocol-fault": 0}
    assert stand.dispatcher.call_seconds.total == pytest.approx(0.2)


def test_parameters_go_with_the_batch() -> None:
    stand = Stand()

    async def main() -> None:
        stand.send(stand.batch(2, parameters=b'{"t":1}'))

    stand.run(main)
    assert stand.upstreams[0].calls[0].call.body == b'{"inputs":["in 0","in 1"],"parameters":{"t":1}}'


def test_the_slot_is_free_before_the_answer_is_handed_out() -> None:
    stand = Stand()
    free_when_told: list[int] = []

    class Waiter:
        def settled(self, request: Request, outcome: Output | CarpoolError) -> None:
            free_when_told.append(stand.pool.free())

    async def main() -> None:
        batch = stand.batch(1)
        batch[0].waiter = Waiter()
        stand.send(batch)
        assert stand.pool.free() == 0

    stand.run(main)
    assert free_when_told == [1]


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_an_overloaded_or_failing_endpoint_is_left_for_another(status: int) -> None:
    bad, good = FakeUpstream("bad").then(Answer(status, b"private")), FakeUpstream("good")
    stand = Stand(bad, good)
    assert kinds(stand.deliver()) == {Output}
    assert (len(bad.calls), len(good.calls)) == (1, 1)
    assert stand.dispatcher.calls["refused"] == 1


def test_a_call_that_breaks_off_is_tried_again_on_the_only_endpoint() -> None:
    stand = Stand(FakeUpstream().then(RESET, times=2))
    assert kinds(stand.deliver()) == {Output}
    assert len(stand.upstreams[0].calls) == 3
    assert stand.dispatcher.calls == {"ok": 1, "failed": 2, "refused": 0, "protocol-fault": 0}
    assert len(stand.ended) == 1  # only an answer tells how long a batch takes


def test_after_the_last_attempt_everybody_is_told() -> None:
    stand = Stand(FakeUpstream().then(RESET, times=9))
    outcomes = stand.deliver()
    assert kinds(outcomes) == {UpstreamFailed}
    assert len(stand.upstreams[0].calls) == 3
    assert "broke off" in outcomes[0].detail


@pytest.mark.parametrize(("share", "pauses_s"), [(0.0, [0.0, 0.0]), (0.5, [0.05, 0.1]), (0.999, [0.0999, 0.1998])])
def test_pauses_grow_and_stay_below_their_ceiling(share: float, pauses_s: list[float]) -> None:
    stand = Stand(FakeUpstream())
    stand.random_share = share
    sent_at: list[float] = []

    def fail(call: Call) -> Answer:
        sent_at.append(stand.clock())
        return Answer(503, b"")

    stand.upstreams[0].then(fail, times=3)
    stand.deliver()
    assert [later - sooner for sooner, later in pairwise(sent_at)] == pytest.approx(pauses_s)


def test_no_attempt_lasts_longer_than_its_timeout_or_the_time_left() -> None:
    stand = Stand(FakeUpstream("a").then(echo, delay_s=60.0), FakeUpstream("b").then(echo, delay_s=60.0))
    outcomes = stand.deliver(total_timeout_s=4.0)
    assert kinds(outcomes) == {UpstreamFailed}
    first, second = (upstream.calls[0].timeout_s for upstream in stand.upstreams)
    assert first == 3.0
    assert second == pytest.approx(4.0 - 3.0 - 0.05)
    assert stand.clock() == pytest.approx(1004.0)  # and nothing was tried after the deadline


def test_a_pause_that_would_outlast_the_deadline_is_not_begun() -> None:
    stand = Stand(FakeUpstream().then(Answer(503, b""), times=9))
    stand.random_share = 0.9  # pauses 0.09, then 0.18
    outcomes = stand.deliver(total_timeout_s=0.2)
    assert kinds(outcomes) == {UpstreamFailed}
    assert len(stand.upstreams[0].calls) == 2
    assert stand.clock() == pytest.approx(1000.09)


def test_a_retry_that_finds_no_slot_gives_up_at_the_deadline() -> None:
    busy, bad = FakeUpstream("busy").then(echo, delay_s=2.9), FakeUpstream("bad").then(RESET)
    stand = Stand(busy, bad)

    async def main() -> None:
        long, short = stand.batch(1), stand.batch(2, total_timeout_s=1.0)
        stand.send(long)
        stand.send(short)
        await asyncio.sleep(1.01)
        assert kinds([stand.witness.outcome(request) for request in short]) == {UpstreamFailed}
        assert len(stand.upstreams[1].calls) == 1

    stand.run(main)


@pytest.mark.parametrize("status", [400, 422])
def test_a_refusal_of_one_alone_is_its_own_fault(status: int) -> None:
    stand = Stand(FakeUpstream().then(Answer(status, b"canary")))
    (outcome,) = stand.deliver(1)
    assert isinstance(outcome, InputRefused)
    assert "canary" not in outcome.detail
    assert len(stand.upstreams[0].calls) == 1


@pytest.mark.parametrize("status", [301, 400, 401, 404, 413, 422])
def test_a_refusal_of_a_batch_is_not_repeated(status: int) -> None:
    stand = Stand(FakeUpstream("a").then(Answer(status, b"canary")), FakeUpstream("b"))
    outcomes = stand.deliver(2)
    assert kinds(outcomes) == {UpstreamRefused}
    assert str(status) in outcomes[0].detail and "canary" not in outcomes[0].detail
    assert stand.upstreams[1].calls == []


@pytest.mark.parametrize(
    "body", [b'{"outputs":[1,2]}', b'{"outputs":[1,2,3,4]}', b'{"outputs":null}', b"<html>", b'{"outputs":[1,NaN,2]}']
)
def test_a_protocol_fault_is_everybody_s(body: bytes) -> None:
    """No output is ever matched to a member by guess, not even those that came."""
    stand = Stand(FakeUpstream().then(Answer(200, body)))
    assert kinds(stand.deliver(3)) == {UpstreamProtocolFault}
    assert len(stand.upstreams[0].calls) == 1
    assert stand.dispatcher.calls["protocol-fault"] == 1


class LyingCodec(JsonCodec):
    def decode(self, body: bytes, count: int) -> Sequence[msgspec.Raw]:
        return super().decode(body, count)[:-1]


def test_even_a_codec_that_loses_an_output_mixes_nobody_up() -> None:
    assert kinds(Stand(codec=LyingCodec()).deliver(3)) == {InternalError}


class BrokenCodec(JsonCodec):
    def encode(self, model: str, parameters: bytes, inputs: Sequence[bytes]) -> Call:
        raise RuntimeError("a defect")


def test_a_defect_inside_is_told_as_one_and_the_next_batch_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    stand = Stand(codec=BrokenCodec())
    assert kinds(stand.deliver(2)) == {InternalError}
    assert "a batch failed inside Carpool" in caplog.text

    stand = Stand(FakeUpstream().then(ZeroDivisionError("a defect of the endpoint")))
    assert kinds(stand.deliver(2)) == {InternalError}
    assert kinds(stand.deliver(2)) == {Output}


def test_one_who_left_during_an_attempt_is_not_sent_again() -> None:
    stand = Stand()

    def leave_and_fail(call: Call) -> Answer:
        stand.broker.cancel(batch[1])
        return Answer(503, b"")

    stand.upstreams[0].then(leave_and_fail)
    batch: list[Request] = []

    async def main() -> None:
        batch.extend(stand.batch(3))
        stand.send(batch)

    stand.run(main)
    assert [call.inputs for call in stand.upstreams[0].calls][1] == [b'"in 0"', b'"in 2"']
    outcomes = [stand.witness.outcome(request) for request in batch]
    assert isinstance(outcomes[1], ClientLeft)
    for number in (0, 2):
        outcome = outcomes[number]
        assert isinstance(outcome, Output) and bytes(outcome.value) == b'"in %d"' % number


def test_one_who_left_during_the_call_that_works_keeps_its_outcome() -> None:
    stand = Stand(FakeUpstream().then(echo, delay_s=1.0))
    batch: list[Request] = []

    async def main() -> None:
        batch.extend(stand.batch(2))
        stand.send(batch)
        await asyncio.sleep(0.5)
        stand.broker.cancel(batch[0])

    stand.run(main)
    assert isinstance(stand.witness.outcome(batch[0]), ClientLeft)
    assert isinstance(stand.witness.outcome(batch[1]), Output)


def test_nobody_is_sent_past_his_own_deadline() -> None:
    """Not even between two looks at the deadlines, when another member still has time."""
    stand = Stand(FakeUpstream().then(Answer(503, b""), delay_s=1.0))
    batch: list[Request] = []

    async def main() -> None:
        batch.extend(stand.batch(2))
        batch[0].deadline = stand.clock() + 1.0
        stand.send(batch)

    stand.run(main)
    assert [len(call.inputs) for call in stand.upstreams[0].calls] == [2, 1]
    assert isinstance(stand.witness.outcome(batch[0]), DeadlineExceeded)
    assert isinstance(stand.witness.outcome(batch[1]), Output)


def test_a_batch_whose_members_have_all_left_is_not_sent() -> None:
    stand = Stand()

    async def main() -> None:
        batch = stand.batch(2)
        stand.send(batch)
        for request in batch:
            stand.broker.cancel(request)

    stand.run(main)
    assert stand.upstreams[0].calls == []


def test_a_batch_whose_members_all_leave_is_not_tried_again() -> None:
    stand = Stand()
    batch: list[Request] = []

    def leave_and_fail(call: Call) -> Answer:
        for request in batch:
            stand.broker.cancel(request)
        return Answer(503, b"")

    stand.upstreams[0].then(leave_and_fail)

    async def main() -> None:
        batch.extend(stand.batch(2))
        stand.send(batch)

    stand.run(main)
    assert len(stand.upstreams[0].calls) == 1


@pytest.mark.parametrize("after_s", [0.0, 0.5, 1.02, 1.5])
def test_cut_off_by_a_shutdown_everybody_is_told(after_s: float) -> None:
    """Before the call, during it, in the pause, and while waiting for another endpoint's slot."""
    stand = Stand(FakeUpstream("bad").then(RESET, delay_s=1.0), FakeUpstream("busy").then(echo, delay_s=60.0))
    batch: list[Request] = []

    async def main() -> None:
        batch.extend(stand.batch(2))
        stand.send(batch)
        stand.send(stand.batch(1, total_timeout_s=99.0))
        await stand.dispatcher.finish(after_s)

    stand.run(main)
    assert kinds([stand.witness.outcome(request) for request in batch]) == {Draining}


def test_finish_waits_also_for_what_starts_meanwhile() -> None:
    stand = Stand(FakeUpstream("a").then(echo, delay_s=1.0).then(echo, delay_s=1.0))

    async def main() -> None:
        first = stand.batch(1)
        stand.pool.when_slot_frees(lambda: stand.send(stand.batch(2)) if len(stand.upstreams[0].calls) == 1 else None)
        stand.send(first)
        await stand.dispatcher.finish(5.0)
        assert stand.dispatcher.running == 0
        assert stand.clock() == pytest.approx(1002.0)

    stand.run(main)
    assert len(stand.upstreams[0].calls) == 2


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_slots_of_several_batches_all_come_back(share: float) -> None:
    upstreams = [FakeUpstream(name, slots=2) for name in "abc"]
    for number, upstream in enumerate(upstreams):
        upstream.then(RESET, delay_s=0.1 * number).then(Answer(500, b"")).then(Answer(200, b"?")).then(RESET, times=2)
    stand = Stand(*upstreams)
    stand.random_share = share

    async def main() -> None:
        for _ in range(6):
            stand.send(stand.batch(2))
        await stand.finished()

    stand.run(main)
    assert all(upstream.most_in_flight <= 2 for upstream in upstreams)
