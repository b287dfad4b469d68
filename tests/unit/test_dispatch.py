"""One batch through the upstream: whatever it does, each member has its own outcome and the slot comes back."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
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
from carpool.core.ports import LaneQueue
from carpool.core.request import DONE, Request
from carpool.testing import (
    AttemptFailedError,
    FakeClock,
    FakeUpstream,
    UpstreamCall,
    UpstreamResponse,
    Witness,
    echo,
    inputs_of,
    make_request,
)
from carpool.upstream.codecs import JsonCodec
from carpool.upstream.codecs.base import Decoded, Refusal
from carpool.upstream.dispatch import UpstreamDispatcher
from carpool.upstream.pool import Pool
from carpool.upstream.retry import RetryBudget

RESET = AttemptFailedError("the call broke off")
SAID = "the tensor is bad"


def refusing(*poison: int, status: int = 500, said: str = SAID) -> Callable[[UpstreamCall], UpstreamResponse]:
    """An API that refuses every call with one of these members of a batch in it, and answers all others."""
    bad = {b'"in %d"' % number for number in poison}

    def answer(call: UpstreamCall) -> UpstreamResponse:
        if bad & set(inputs_of(call)):
            return UpstreamResponse(status, msgspec.json.encode({"error": said}))
        return echo(call)

    return answer


def taking(most: int, says: str = "", status: int = 413) -> Callable[[UpstreamCall], UpstreamResponse]:
    """An API that takes so many inputs at once."""

    def answer(call: UpstreamCall) -> UpstreamResponse:
        return UpstreamResponse(status, says.encode()) if len(inputs_of(call)) > most else echo(call)

    return answer


def sick(status: int) -> UpstreamResponse:
    """What an endpoint answers that fails everything."""
    return UpstreamResponse(status, msgspec.json.encode({"error": "CUDA error: an illegal memory access"}))


class Graveyard:
    """Dead letters, as they were buried: the input, the error's code, and how often it had been sent."""

    def __init__(self) -> None:
        self.letters: list[tuple[bytes, str, int]] = []

    def bury(self, request: Request, error: CarpoolError, sends: int) -> None:
        assert request.phase != DONE  # afterwards its input is gone
        if isinstance(error, InputRefused):  # what is kept by default
            self.letters.append((request.input, error.code, sends))


class Stand:
    """A dispatcher between a broker and scripted upstreams, in virtual time."""

    def __init__(
        self, *upstreams: FakeUpstream, codec: JsonCodec | None = None, budget: RetryBudget | None = None
    ) -> None:
        self._serial = count()
        self.clock = FakeClock()
        self.upstreams = upstreams or (FakeUpstream("a"),)
        self.witness = Witness()
        self.broker = MemoryBroker(waiting_max=1000, bytes_max=1_000_000, lanes_max=9, tiers=1, clock=self.clock)
        self.broker.when_work_arrives("m", self._arrived)
        self.pool = Pool(self.upstreams, self.clock, random_share=lambda: 0.5)
        self.pool.when_slot_frees(self._send_those_put_back)
        self._is_submitting = False
        self.ended: list[float] = []
        self.dead_letters = Graveyard()
        self.limits_learned: list[int | None] = []
        self.random_share = 0.5
        self.dispatcher = UpstreamDispatcher(
            self.pool,
            codec or JsonCodec(),
            self.broker,
            timeout_s=3.0,
            attempts=3,
            others_waiting=self._waiting,
            all_waiting=self._waiting,
            backoff_s=0.1,
            model="m",
            budget=budget,
            dead_letters=self.dead_letters,
            when_limit_is_learned=lambda member: self.limits_learned.append(member.batch_limit.learned),
            clock=self.clock,
            random_share=lambda: self.random_share,
        )

    def _waiting(self) -> int:
        return self.broker.all_waiting("m")

    def batch(
        self, count: int, total_timeout_s: float = 4.0, parameters: bytes = b"", is_task: bool = False
    ) -> list[Request]:
        self._is_submitting = True
        for number in range(count):
            self.broker.submit(
                make_request(
                    str(next(self._serial)),
                    self.witness,
                    now=self.clock(),
                    value=b'"in %d"' % number,
                    total_timeout_s=total_timeout_s,
                    parameters=parameters,
                    is_task=is_task,
                    owner=f"client {number}",
                )
            )
        self._is_submitting = False
        (lane,) = self.broker.lanes("m")
        return self.broker.take(lane, count, self.clock())

    def _arrived(self, lane: LaneQueue) -> None:
        if not self._is_submitting:
            asyncio.get_running_loop().call_soon(self._send_those_put_back)

    def _send_those_put_back(self) -> None:
        """What batching does with requests that wait again."""
        for lane in self.broker.lanes("m") if not self._is_submitting else ():
            while lane.waiting and self.pool.free() > 0:
                self.send(self.broker.take(lane, 64, self.clock()))

    def send(self, batch: list[Request]) -> None:
        self.dispatcher.dispatch(batch, self.ended.append)

    async def finished(self) -> None:
        await self.dispatcher.finish(600.0)
        while self.broker.depth:
            await asyncio.sleep(0.001)
            await self.dispatcher.finish(600.0)

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a test in virtual time; afterwards nothing may be left over."""

        async def checked() -> None:
            await main()
            await self.finished()

        self.clock.run(checked())
        assert repr(self.dispatcher) == "<UpstreamDispatcher running=0>"
        for member in self.pool.members:
            assert member.in_flight == 0
            if member.breaker.state == "closed":
                assert member.offered == member.limit
        assert repr(self.dispatcher.scheduler) == "<Scheduler retries=0 searches=0>"
        assert repr(self.broker) == "<MemoryBroker held=0 bytes=0 waiting=0>"

    def deliver(self, count: int = 3, total_timeout_s: float = 4.0) -> list[Any]:
        """Send one batch and wait; the outcomes of its members."""
        batch: list[Request] = []

        async def main() -> None:
            batch.extend(self.batch(count, total_timeout_s))
            self.send(batch)

        self.run(main)
        return [self.witness.outcome(request) for request in batch]

    def calls(self) -> int:
        return sum(len(upstream.calls) for upstream in self.upstreams)

    def states(self) -> dict[str, str]:
        return {member.name: member.breaker.state for member in self.pool.members}

    def failed(self) -> dict[str, int]:
        return {member.name: member.failed for member in self.pool.members}

    async def deliver_now(self, count: int, **options: Any) -> list[Any]:
        """As `deliver`, inside of a test that runs already."""
        batch = self.batch(count, **options)
        self.send(batch)
        await self.finished()
        return [self.witness.outcome(request) for request in batch]


def check_own(outcomes: Sequence[Any], but: Sequence[int] = ()) -> None:
    """Everybody has an output and it is its own, but for these."""
    for number, outcome in enumerate(outcomes):
        if number not in but:
            assert isinstance(outcome, Output)
            assert bytes(outcome.value) == b'"in %d"' % number


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


def test_a_call_that_breaks_off_is_tried_again_on_the_only_endpoint() -> None:
    stand = Stand(FakeUpstream().then(RESET, times=2))
    assert kinds(stand.deliver()) == {Output}
    assert len(stand.upstreams[0].calls) == 3
    assert stand.dispatcher.calls == {"ok": 1, "failed": 2, "refused": 0, "protocol-fault": 0}
    assert len(stand.ended) == 1  # only an answer tells how long a batch takes


def test_a_retry_that_finds_no_slot_gives_up_at_the_deadline() -> None:
    busy, bad = FakeUpstream("busy").then(echo, delay_s=2.9), FakeUpstream("bad").then(RESET)
    stand = Stand(busy, bad)

    async def main() -> None:
        long, short = stand.batch(1), stand.batch(2, total_timeout_s=1.0)
        stand.send(long)
        stand.send(short)
        await asyncio.sleep(1.01)
        assert kinds([stand.witness.outcome(request) for request in short]) == {DeadlineExceeded}
        assert len(stand.upstreams[1].calls) == 1

    stand.run(main)


@pytest.mark.parametrize("status", [301, 401, 404])
def test_a_refusal_of_a_batch_is_not_repeated(status: int) -> None:
    stand = Stand(FakeUpstream("a").then(UpstreamResponse(status, b"canary")), FakeUpstream("b"))
    outcomes = stand.deliver(2)
    assert kinds(outcomes) == {UpstreamRefused}
    assert str(status) in outcomes[0].detail and "canary" not in outcomes[0].detail
    assert stand.upstreams[1].calls == []


@pytest.mark.parametrize(
    "body", [b'{"outputs":[1,2]}', b'{"outputs":[1,2,3,4]}', b'{"outputs":null}', b"<html>", b'{"outputs":[1,NaN,2]}']
)
def test_a_protocol_fault_is_everybody_s(body: bytes) -> None:
    """No output is ever matched to a member by guess, not even those that came."""
    stand = Stand(FakeUpstream().then(UpstreamResponse(200, body)))
    assert kinds(stand.deliver(3)) == {UpstreamProtocolFault}
    assert len(stand.upstreams[0].calls) == 1
    assert stand.dispatcher.calls["protocol-fault"] == 1


class LyingCodec(JsonCodec):
    def decode(self, answer: UpstreamResponse, batch: Sequence[Request], call_id: str = "") -> Sequence[Decoded]:
        return super().decode(answer, batch)[:-1]


def test_even_a_codec_that_loses_an_output_mixes_nobody_up() -> None:
    assert kinds(Stand(codec=LyingCodec()).deliver(3)) == {InternalError}


class BrokenCodec(JsonCodec):
    def encode(self, batch: Sequence[Request], call_id: str = "") -> UpstreamCall:
        raise RuntimeError("a defect")


def test_a_defect_inside_is_told_as_one_and_the_next_batch_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    stand = Stand(codec=BrokenCodec())
    assert kinds(stand.deliver(2)) == {InternalError}
    assert "a batch failed inside Carpool" in caplog.text

    stand = Stand(FakeUpstream().then(ZeroDivisionError("a defect of the endpoint")))
    assert kinds(stand.deliver(2)) == {InternalError}
    assert kinds(stand.deliver(2)) == {Output}


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


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_slots_of_several_batches_all_come_back(share: float) -> None:
    upstreams = [FakeUpstream(name, slots=2) for name in "abc"]
    for number, upstream in enumerate(upstreams):
        upstream.then(RESET, delay_s=0.1 * number).then(UpstreamResponse(500, b"")).then(
            UpstreamResponse(200, b"?")
        ).then(RESET, times=2)
    stand = Stand(*upstreams)
    stand.random_share = share

    async def main() -> None:
        for _ in range(6):
            stand.send(stand.batch(2))
        await stand.finished()

    stand.run(main)
    assert all(upstream.most_in_flight <= 2 for upstream in upstreams)


# Poison.


@pytest.mark.parametrize("poison", [range(0, 64, 2), range(56), [5, 6, 40], range(1, 64)])
def test_many_poisons_are_all_found(poison: Sequence[int]) -> None:
    stand = Stand(FakeUpstream(slots=4).then(refusing(*poison, status=422), times=999))
    outcomes = stand.deliver(64)
    check_own(outcomes, but=poison)
    assert {number for number, outcome in enumerate(outcomes) if isinstance(outcome, InputRefused)} == set(poison)
    assert set(stand.failed().values()) == {0}


def test_known_poison_is_sent_alone_from_then_on() -> None:
    stand = Stand(FakeUpstream(slots=2).then(refusing(3), times=99))

    async def main() -> None:
        check_own(await stand.deliver_now(8), but=[3])
        calls = len(stand.upstreams[0].calls)
        outcomes = await stand.deliver_now(8)
        check_own(outcomes, but=[3])
        assert isinstance(outcomes[3], InputRefused)
        assert sorted(len(call.inputs) for call in stand.upstreams[0].calls[calls:]) == [1, 7]
        await asyncio.sleep(301.0)
        calls = len(stand.upstreams[0].calls)
        await stand.deliver_now(8)
        assert len(stand.upstreams[0].calls[calls].inputs) == 8  # forgotten

    stand.run(main)


def test_who_was_taken_for_poison_and_is_answered_rides_with_the_others_again() -> None:
    """Or a popular input that was judged wrongly once would be sent alone, copy by copy, for minutes."""
    stand = Stand(FakeUpstream(slots=2).then(refusing(3), times=9).then(echo, times=99))

    async def main() -> None:
        while len(stand.upstreams[0].calls) < 9:
            await stand.deliver_now(8)
        check_own(await stand.deliver_now(8))
        await asyncio.sleep(0.01)
        calls = len(stand.upstreams[0].calls)
        check_own(await stand.deliver_now(8))
        assert [len(call.inputs) for call in stand.upstreams[0].calls[calls:]] == [8]

    stand.run(main)
    assert stand.dispatcher.scheduler.poisoned >= 1


def test_a_batch_of_known_poison_alone() -> None:
    stand = Stand(FakeUpstream().then(refusing(0, 1, status=422), times=99))

    async def main() -> None:
        await stand.deliver_now(3)  # one is answered: else nobody would know that it is the inputs
        calls = len(stand.upstreams[0].calls)
        assert kinds(await stand.deliver_now(2)) == {InputRefused}
        assert [len(call.inputs) for call in stand.upstreams[0].calls[calls:]] == [1, 1]

    stand.run(main)


@pytest.mark.parametrize("status", [424, 500])
def test_a_lone_failure_is_poison_only_if_the_endpoint_is_known_to_be_well(status: int) -> None:
    stand = Stand(FakeUpstream().then(echo).then(sick(status), times=2))

    async def main() -> None:
        check_own(await stand.deliver_now(1))
        await asyncio.sleep(0.9)
        (outcome,) = await stand.deliver_now(1)
        assert isinstance(outcome, InputRefused)
        assert stand.failed() == {"fake": 0}
        await asyncio.sleep(0.2)
        (outcome,) = await stand.deliver_now(1)
        assert isinstance(outcome, UpstreamFailed)
        assert "CUDA" not in outcome.detail
        assert stand.failed() == {"fake": 1}

    stand.run(main)
    assert len(stand.dead_letters.letters) == 1


@pytest.mark.parametrize("size", [2, 3, 8, 9, 64])
@pytest.mark.parametrize("was_well", [True, False])
def test_an_endpoint_that_fails_everything_is_not_mistaken_for_poison(size: int, was_well: bool) -> None:
    """Not even in the first seconds, when it was well a moment ago."""
    stand = Stand(FakeUpstream("a"))

    async def main() -> None:
        if was_well:
            await stand.deliver_now(1)
        stand.upstreams[0].then(sick(500), times=999)
        before = stand.calls()
        for turn in range(1, 5):
            assert kinds(await stand.deliver_now(size)) == {UpstreamFailed}
            assert stand.failed() == {"a": turn}  # one failure a batch
            assert stand.calls() - before <= turn * (1 + 14)
        assert not stand.pool.is_down
        await stand.deliver_now(size)
        assert stand.pool.is_down

    stand.run(main)
    assert stand.dispatcher.scheduler.poisoned == 0
    assert stand.dead_letters.letters == []


@pytest.mark.parametrize("size", [2, 8, 64])
def test_two_that_fail_everything_among_three_harm_nobody(size: int) -> None:
    """Innocents that were refused alone by the other sick one are asked again where an answer came from."""
    stand = Stand(*(FakeUpstream(name) for name in "abc"))
    for upstream in stand.upstreams[:2]:
        upstream.then(sick(500), times=999)

    async def main() -> None:
        check_own(await stand.deliver_now(size))
        assert stand.failed()["a"] >= 1
        assert stand.failed()["c"] == 0
        for _ in range(9):
            check_own(await stand.deliver_now(size))

    stand.run(main)
    assert stand.dispatcher.scheduler.poisoned == 0


def test_a_whole_that_is_refused_though_its_parts_are_good_is_the_endpoint_s_fault() -> None:
    stand = Stand(FakeUpstream("a").then(sick(500)), FakeUpstream("b"))
    check_own(stand.deliver(8))
    assert stand.failed() == {"a": 1, "b": 0}
    assert [len(call.inputs) for call in stand.upstreams[1].calls] == [4, 4]


def test_a_group_that_nobody_waits_for_is_no_answer() -> None:
    """Else an endpoint that fails everything would look well, and the innocent like poison."""
    stand = Stand(FakeUpstream("a", slots=4).then(echo).then(sick(500), delay_s=0.1, times=99))
    batch: list[Request] = []

    async def main() -> None:
        check_own(await stand.deliver_now(1))  # it was well a moment ago
        batch.extend(stand.batch(4))
        stand.send(batch)
        await asyncio.sleep(0.15)  # the halves are under way
        stand.broker.cancel(batch[0])
        await stand.finished()

    stand.run(main)
    outcomes = [stand.witness.outcome(request) for request in batch]
    assert kinds(outcomes) == {ClientLeft, UpstreamFailed}
    assert stand.dispatcher.scheduler.poisoned == 0
    assert stand.failed() == {"a": 1}


@pytest.mark.parametrize("after_s", [0.05, 0.1, 0.15, 0.25, 0.35, 0.45])
@pytest.mark.parametrize("slots", [1, 2])
def test_cut_off_during_a_bisection_everybody_is_told_and_every_slot_comes_back(after_s: float, slots: int) -> None:
    stand = Stand(FakeUpstream(slots=slots).then(refusing(5), delay_s=0.1, times=99))
    batch: list[Request] = []

    async def main() -> None:
        batch.extend(stand.batch(16))
        stand.send(batch)
        await stand.dispatcher.finish(after_s)

    stand.run(main)
    outcomes = [stand.witness.outcome(request) for request in batch]
    assert Draining in kinds(outcomes)
    assert kinds(outcomes) <= {Draining, Output}


def test_cut_off_by_a_shutdown_whoever_was_refused_alone_is_told_too() -> None:
    """Nothing was answered yet, so nobody is judged: the first was refused alone, the second is under way."""
    stand = Stand(FakeUpstream().then(sick(500), delay_s=0.1, times=99))
    batch: list[Request] = []

    async def main() -> None:
        batch.extend(stand.batch(2))
        stand.send(batch)
        await stand.dispatcher.finish(0.25)

    stand.run(main)
    assert [len(call.inputs) for call in stand.upstreams[0].calls] == [2, 1, 1]
    assert kinds([stand.witness.outcome(request) for request in batch]) == {Draining}


# Batches that are too large.


TOO_MANY = '{"error":"batch size %d > maximum allowed batch size %d"}'


def test_a_retry_does_not_exceed_a_limit_that_was_learned_meanwhile() -> None:
    stand = Stand(
        FakeUpstream("a").then(UpstreamResponse(503, b""), delay_s=1.0),
        FakeUpstream("b").then(taking(4, TOO_MANY % (8, 4), status=400)),
    )

    async def main() -> None:
        stand.send(stand.batch(8))
        stand.send(stand.batch(8))
        await stand.finished()

    stand.run(main)
    sizes = [len(call.inputs) for upstream in stand.upstreams for call in upstream.calls]
    assert sorted(sizes) == [4, 4, 4, 4, 8, 8]


def test_one_that_alone_is_too_large_is_told() -> None:
    stand = Stand(FakeUpstream().then(taking(0), times=9))
    assert kinds(stand.deliver(2)) == {UpstreamRefused}
    assert [len(call.inputs) for call in stand.upstreams[0].calls] == [2, 1, 1]


class ConfusedCodec(JsonCodec):
    """Takes for the limit what is none."""

    def classify(self, answer: UpstreamResponse, size: int, call_id: str = "") -> Refusal:
        return Refusal("split", batch_max=2 * size)


def test_a_limit_that_was_not_exceeded_does_not_make_a_split_go_on_for_ever() -> None:
    stand = Stand(FakeUpstream().then(taking(2), delay_s=0.1, times=99), codec=ConfusedCodec())
    check_own(stand.deliver(8))
    assert stand.calls() == 1 + 2 + 4


def test_a_group_of_a_bisection_that_is_too_large_is_only_halved() -> None:
    stand = Stand(FakeUpstream().then(sick(500)).then(taking(2), times=99))
    check_own(stand.deliver(8))


# Sick endpoints.


class DefectiveCodec(JsonCodec):
    """Fails on what it gets back while told so."""

    is_defective = False

    def decode(self, answer: UpstreamResponse, batch: Sequence[Request], call_id: str = "") -> Sequence[Decoded]:
        if self.is_defective:
            raise ZeroDivisionError
        return super().decode(answer, batch)


def test_a_defect_during_a_probe_does_not_keep_the_endpoint_out_for_ever() -> None:
    codec = DefectiveCodec()
    stand = Stand(FakeUpstream("a").then(UpstreamResponse(404, b""), times=5), codec=codec)

    async def main() -> None:
        for _ in range(5):
            await stand.deliver_now(1)
        await asyncio.sleep(1.0)
        codec.is_defective = True
        assert kinds(await stand.deliver_now(1)) == {InternalError}
        codec.is_defective = False
        await asyncio.sleep(0.01)
        assert stand.pool.free() == 1
        check_own(await stand.deliver_now(1))
        assert stand.states() == {"a": "closed"}

    stand.run(main)


def test_a_defect_in_one_part_leaves_the_others_their_outputs() -> None:
    codec = DefectiveCodec()

    def defective(call: UpstreamCall) -> UpstreamResponse:
        codec.is_defective = True
        return echo(call)

    def well(call: UpstreamCall) -> UpstreamResponse:
        codec.is_defective = False
        return echo(call)

    stand = Stand(FakeUpstream().then(taking(2)).then(defective).then(well), codec=codec)
    outcomes = stand.deliver(4)
    failed = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, InternalError)]
    check_own(outcomes, but=failed)
    assert len(failed) == 2


def test_a_lone_500_of_an_endpoint_not_known_to_be_well_is_asked_elsewhere() -> None:
    stand = Stand(FakeUpstream("a").then(sick(500)), FakeUpstream("b"))
    check_own(stand.deliver(1))
    assert (stand.calls(), stand.failed()) == (2, {"a": 1, "b": 0})
    assert stand.dead_letters.letters == []


# One that is in doubt beside one that is known to be well.


def test_the_first_retry_at_one_that_is_well_needs_no_budget() -> None:
    stand = Stand(*(FakeUpstream(name) for name in "ab"), budget=RetryBudget(0.0, 0.0, kept_max=0.0))

    async def main() -> None:
        for _ in range(2):
            check_own(await stand.deliver_now(1))
        stand.upstreams[0].then(RESET, times=99)
        for _ in range(20):
            check_own(await stand.deliver_now(1))

    stand.run(main)
    assert stand.states() == {"a": "open", "b": "closed"}
