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
    Unresolved,
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
        self.pool.others_wait = lambda: self.broker.all_waiting("m") > 0
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
            backoff_s=0.1,
            model="m",
            budget=budget,
            dead_letters=self.dead_letters,
            when_limit_is_learned=lambda member: self.limits_learned.append(member.batch_limit.learned),
            clock=self.clock,
            random_share=lambda: self.random_share,
        )

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
        assert "retries=0" in repr(self.pool)
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


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_an_overloaded_or_failing_endpoint_is_left_for_another(status: int) -> None:
    bad, good = FakeUpstream("bad").then(UpstreamResponse(status, b"private")), FakeUpstream("good")
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

    def fail(call: UpstreamCall) -> UpstreamResponse:
        sent_at.append(stand.clock())
        return UpstreamResponse(503, b"")

    stand.upstreams[0].then(fail, times=3)
    stand.deliver()
    assert [later - sooner for sooner, later in pairwise(sent_at)] == pytest.approx(pauses_s)


def test_no_attempt_lasts_longer_than_its_timeout_or_the_time_left() -> None:
    stand = Stand(FakeUpstream("a").then(echo, delay_s=60.0), FakeUpstream("b").then(echo, delay_s=60.0))
    outcomes = stand.deliver(total_timeout_s=4.0)
    assert kinds(outcomes) == {DeadlineExceeded}
    first, second = (upstream.calls[0].timeout_s for upstream in stand.upstreams)
    assert first == 3.0
    assert second == pytest.approx(4.0 - 3.0 - 0.05)
    assert stand.clock() == pytest.approx(1004.0)  # and nothing was tried after the deadline


def test_a_pause_that_would_outlast_the_deadline_is_not_begun() -> None:
    stand = Stand(FakeUpstream().then(UpstreamResponse(503, b""), times=9))
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
        assert kinds([stand.witness.outcome(request) for request in short]) == {DeadlineExceeded}
        assert len(stand.upstreams[1].calls) == 1

    stand.run(main)


@pytest.mark.parametrize("status", [400, 422])
def test_a_refusal_of_one_alone_is_its_own_fault(status: int) -> None:
    stand = Stand(FakeUpstream().then(UpstreamResponse(status, b"canary")))
    (outcome,) = stand.deliver(1)
    assert isinstance(outcome, InputRefused)
    assert "canary" not in outcome.detail
    assert len(stand.upstreams[0].calls) == 1


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


def test_one_who_left_during_an_attempt_is_not_sent_again() -> None:
    stand = Stand()

    def leave_and_fail(call: UpstreamCall) -> UpstreamResponse:
        stand.broker.cancel(batch[1])
        return UpstreamResponse(503, b"")

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
    answered = stand.witness.outcome(batch[1])
    assert isinstance(answered, Output)
    # The seconds of the call are shared by all whom it answers: no part of them is nobody's.
    assert answered.call.gpu_s == answered.call.upstream_s > 0.0


def test_nobody_is_sent_past_his_own_deadline() -> None:
    """Not even between two looks at the deadlines, when another member still has time."""
    stand = Stand(FakeUpstream().then(UpstreamResponse(503, b""), delay_s=1.0))
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

    def leave_and_fail(call: UpstreamCall) -> UpstreamResponse:
        for request in batch:
            stand.broker.cancel(request)
        return UpstreamResponse(503, b"")

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


@pytest.mark.parametrize("status", [400, 422, 424, 500])
@pytest.mark.parametrize("place", [0, 31, 63])
@pytest.mark.parametrize("endpoints", [1, 3])
def test_one_poison_in_64_is_found_and_harms_nobody(status: int, place: int, endpoints: int) -> None:
    api = refusing(place, status=status)
    stand = Stand(*(FakeUpstream(name, slots=2).then(api, delay_s=0.05, times=99) for name in "abc"[:endpoints]))
    outcomes = stand.deliver(64)
    check_own(outcomes, but=[place])
    assert isinstance(outcomes[place], InputRefused)
    assert outcomes[place].detail.endswith(SAID)
    assert stand.calls() <= 1 + 12
    assert set(stand.states().values()) == {"closed"}
    assert set(stand.failed().values()) == {0}
    assert stand.dispatcher.poisoned == 1
    ((value, code, sends),) = stand.dead_letters.letters
    assert (value, code) == (b'"in %d"' % place, "input-refused")
    assert sends <= 7


def test_a_long_message_of_the_model_is_cut() -> None:
    stand = Stand(FakeUpstream().then(refusing(1, status=422, said="é" * 2000), times=99))
    outcomes = stand.deliver(4)
    assert outcomes[1].detail.count("é") == 512
    check_own(outcomes, but=[1])


@pytest.mark.parametrize("poison", [range(0, 64, 2), range(56), [5, 6, 40], range(1, 64)])
def test_many_poisons_are_all_found(poison: Sequence[int]) -> None:
    stand = Stand(FakeUpstream(slots=4).then(refusing(*poison, status=422), times=999))
    outcomes = stand.deliver(64)
    check_own(outcomes, but=poison)
    assert {number for number, outcome in enumerate(outcomes) if isinstance(outcome, InputRefused)} == set(poison)
    assert set(stand.failed().values()) == {0}


def test_a_task_that_is_poison_is_not_buried_here() -> None:
    """It becomes a dead letter together with its outcome."""
    stand = Stand(FakeUpstream().then(refusing(1), times=9))

    async def main() -> None:
        outcomes = await stand.deliver_now(2, is_task=True, total_timeout_s=600.0)
        assert kinds(outcomes) == {Output, InputRefused}

    stand.run(main)
    assert stand.dead_letters.letters == []


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
    assert stand.dispatcher.poisoned >= 1


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
    assert stand.dispatcher.poisoned == 0
    assert stand.dead_letters.letters == []


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("was_well", [True, False])
def test_an_endpoint_that_refuses_everything_among_three_harms_nobody(status: int, was_well: bool) -> None:
    stand = Stand(*(FakeUpstream(name) for name in "abc"))

    async def main() -> None:
        if was_well:
            for _ in range(3):
                await stand.deliver_now(1)
        stand.upstreams[1].then(sick(status), times=999)
        for _ in range(20):
            check_own(await stand.deliver_now(8))
        assert stand.states() == {"a": "closed", "b": "open", "c": "closed"}
        assert stand.failed() == {"a": 0, "b": 5, "c": 0}

    stand.run(main)
    assert stand.dispatcher.poisoned == 0


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
    assert stand.dispatcher.poisoned == 0


def test_poison_in_a_small_batch_of_a_quiet_pool_is_known_for_what_it_is() -> None:
    """The endpoint that refused it alone has not shown that it is well, but another has: that one is asked."""
    stand = Stand(*(FakeUpstream(name).then(refusing(0), times=9) for name in "abc"))
    outcomes = stand.deliver(2)
    assert kinds(outcomes) == {InputRefused, Output}
    assert set(stand.failed().values()) == {0}


def test_a_whole_that_is_refused_though_its_parts_are_good_is_the_endpoint_s_fault() -> None:
    stand = Stand(FakeUpstream("a").then(sick(500)), FakeUpstream("b"))
    check_own(stand.deliver(8))
    assert stand.failed() == {"a": 1, "b": 0}
    assert [len(call.inputs) for call in stand.upstreams[1].calls] == [4, 4]


def test_others_are_not_told_what_the_model_said_of_a_call_they_shared() -> None:
    """All but one left while the call ran: the one is asked about alone."""
    stand = Stand(FakeUpstream().then(refusing(0, status=422), delay_s=1.0).then(refusing(0, status=422)))
    batch: list[Request] = []

    async def main() -> None:
        batch.extend(stand.batch(3))
        stand.send(batch)
        await asyncio.sleep(0.5)
        stand.broker.cancel(batch[0])
        stand.broker.cancel(batch[1])

    stand.run(main)
    check_own([stand.witness.outcome(batch[2])] * 3, but=[0, 1])
    assert [call.inputs for call in stand.upstreams[0].calls][1:] == [[b'"in 2"']]
    assert stand.failed() == {"fake": 0}  # the poison left; nobody knows that the endpoint was right


def test_the_departed_and_the_expired_are_dropped_from_the_groups() -> None:
    stand = Stand(FakeUpstream(slots=8).then(refusing(7, status=422), delay_s=0.1, times=99))
    batch: list[Request] = []

    async def main() -> None:
        batch.extend(stand.batch(8))
        batch[4].deadline = stand.clock() + 0.15
        stand.send(batch)
        await asyncio.sleep(0.15)  # a half is under way
        stand.broker.cancel(batch[6])
        await stand.finished()

    stand.run(main)
    outcomes = [stand.witness.outcome(request) for request in batch]
    assert isinstance(outcomes[6], ClientLeft)
    assert isinstance(outcomes[7], InputRefused)
    check_own(outcomes, but=[4, 6, 7])
    sent = [value for call in stand.upstreams[0].calls for value in call.inputs]
    assert sent.count(b'"in 4"') <= 2  # in the whole, and in the half that was sent in time
    assert isinstance(outcomes[4], Output if sent.count(b'"in 4"') == 2 else DeadlineExceeded | Unresolved)
    assert sent.count(b'"in 6"') <= 2
    assert stand.failed() == {"fake": 0}


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
    assert stand.dispatcher.poisoned == 0
    assert stand.failed() == {"a": 1}


def test_a_step_of_a_bisection_that_breaks_off_is_tried_again() -> None:
    stand = Stand(
        FakeUpstream().then(refusing(2)).then(RESET).then(UpstreamResponse(503, b"")).then(refusing(2), times=99)
    )
    outcomes = stand.deliver(4)
    check_own(outcomes, but=[2])
    assert isinstance(outcomes[2], InputRefused)


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


def test_a_limit_that_the_api_names_is_learned_and_not_exceeded_again() -> None:
    stand = Stand(FakeUpstream().then(taking(24, TOO_MANY % (64, 24), status=422), times=99))

    async def main() -> None:
        check_own(await stand.deliver_now(64))
        assert stand.limits_learned == [24]
        sizes = [len(call.inputs) for call in stand.upstreams[0].calls]
        assert sizes == [64, 24, 24, 16]
        check_own(await stand.deliver_now(64))  # formed before batching heard of it
        assert [len(call.inputs) for call in stand.upstreams[0].calls[len(sizes) :]] == [24, 24, 16]
        assert stand.limits_learned == [24]

    stand.run(main)
    assert set(stand.failed().values()) == {0}


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


def test_without_a_limit_in_the_text_a_batch_is_halved_until_it_fits() -> None:
    stand = Stand(FakeUpstream().then(taking(10), times=99))
    check_own(stand.deliver(64))
    assert stand.limits_learned == []
    assert max(len(call.inputs) for call in stand.upstreams[0].calls[7:]) <= 10
    assert set(stand.failed().values()) == {0}


def test_one_that_alone_is_too_large_is_told() -> None:
    stand = Stand(FakeUpstream().then(taking(0), times=9))
    assert kinds(stand.deliver(2)) == {UpstreamRefused}
    assert [len(call.inputs) for call in stand.upstreams[0].calls] == [2, 1, 1]


def test_who_refuses_for_the_bytes_is_alive_however_often_a_batch_must_be_halved() -> None:
    """Down to one by one: a search that is told nothing at all would end at the eighths."""

    def api(call: UpstreamCall) -> UpstreamResponse:
        return UpstreamResponse(413, b"") if len(call.body) > len(b'{"inputs":["in 12"]}') else echo(call)

    stand = Stand(FakeUpstream().then(api, times=999))
    check_own(stand.deliver(64))
    assert stand.limits_learned == []  # it is no number of inputs
    assert stand.failed() == {"fake": 0}


def test_one_that_is_too_large_alone_leaves_the_others_their_outputs() -> None:
    def api(call: UpstreamCall) -> UpstreamResponse:
        return UpstreamResponse(413, b"") if b'"in 5"' in inputs_of(call) else echo(call)

    stand = Stand(FakeUpstream().then(api, times=99))
    outcomes = stand.deliver(64)
    check_own(outcomes, but=[5])
    assert isinstance(outcomes[5], UpstreamRefused) and "413" in outcomes[5].detail
    assert stand.pool.members[0].breaker.blamed_owner == "client 5"  # the endpoint is as good as before to others


class ConfusedCodec(JsonCodec):
    """Takes for the limit what is none."""

    def classify(self, answer: UpstreamResponse, size: int, call_id: str = "") -> Refusal:
        return Refusal("split", batch_max=2 * size)


def test_a_limit_that_was_not_exceeded_does_not_make_a_split_go_on_for_ever() -> None:
    stand = Stand(FakeUpstream().then(taking(2), delay_s=0.1, times=99), codec=ConfusedCodec())
    check_own(stand.deliver(8))
    assert stand.calls() == 1 + 2 + 4


def test_poison_in_a_batch_that_is_too_large() -> None:
    poison = refusing(5, status=422)

    def api(call: UpstreamCall) -> UpstreamResponse:
        return taking(4)(call) if len(inputs_of(call)) > 4 else poison(call)

    stand = Stand(FakeUpstream(slots=2).then(api, times=99))
    outcomes = stand.deliver(16)
    check_own(outcomes, but=[5])
    assert isinstance(outcomes[5], InputRefused)


def test_a_group_of_a_bisection_that_is_too_large_is_only_halved() -> None:
    stand = Stand(FakeUpstream().then(sick(500)).then(taking(2), times=99))
    check_own(stand.deliver(8))


def test_all_but_one_of_a_batch_that_was_too_large_left() -> None:
    stand = Stand(FakeUpstream().then(taking(2), delay_s=1.0))

    async def main() -> None:
        batch = stand.batch(3)
        stand.send(batch)
        await asyncio.sleep(0.5)
        stand.broker.cancel(batch[0])
        stand.broker.cancel(batch[2])
        await stand.finished()
        assert isinstance(stand.witness.outcome(batch[1]), Output)

    stand.run(main)


# Sick endpoints.


def test_a_failing_endpoint_among_three_is_left_alone() -> None:
    stand = Stand(*(FakeUpstream(name) for name in "abc"))
    stand.upstreams[0].then(RESET, times=99)

    async def main() -> None:
        for _ in range(30):
            check_own(await stand.deliver_now(4))
        assert stand.states() == {"a": "open", "b": "closed", "c": "closed"}

    stand.run(main)
    assert len(stand.upstreams[0].calls) <= 5 + 3  # and a few probes, in the pauses of the retries


def test_retries_stop_when_the_budget_is_spent() -> None:
    stand = Stand(*(FakeUpstream(name) for name in "ab"), budget=RetryBudget(0.0, 0.0, kept_max=4.0))
    for upstream in stand.upstreams:
        upstream.then(UpstreamResponse(429, b""), times=99)

    async def main() -> None:
        for _ in range(10):
            assert kinds(await stand.deliver_now(1)) == {UpstreamFailed}

    stand.run(main)
    assert stand.calls() == 10 + 2


def test_busy_is_not_broken() -> None:
    stand = Stand(FakeUpstream("a").then(UpstreamResponse(429, b""), times=99))

    async def main() -> None:
        for _ in range(9):
            await stand.deliver_now(1)

    stand.run(main)
    assert (stand.states(), stand.failed()) == ({"a": "closed"}, {"a": 0})


@pytest.mark.parametrize(
    "answer",
    [
        UpstreamResponse(200, b"<html>"),
        UpstreamResponse(200, b'{"outputs":[]}'),
        UpstreamResponse(404, b""),
        UpstreamResponse(301, b""),
    ],
)
def test_faults_and_refusals_that_blame_no_input_count_against_the_endpoint(answer: UpstreamResponse) -> None:
    stand = Stand(FakeUpstream("a").then(answer, times=99))

    async def main() -> None:
        for _ in range(5):
            await stand.deliver_now(2)
        assert stand.states() == {"a": "open"}
        assert stand.pool.is_down

    stand.run(main)
    assert len(stand.upstreams[0].calls) == 5


def test_while_everything_is_down_a_batch_under_way_waits_for_the_probe() -> None:
    stand = Stand(FakeUpstream("a").then(RESET, times=6))

    async def main() -> None:
        await stand.deliver_now(1)  # three failures
        outcomes = await stand.deliver_now(2)  # two more: open; then it is the probe, which fails; and that was all
        assert kinds(outcomes) == {UpstreamFailed}
        assert len(stand.upstreams[0].calls) == 6
        assert (stand.pool.is_down, stand.pool.free()) == (True, 0)
        assert stand.clock() == pytest.approx(1000.0 + 0.05 + 0.1 + 0.05 + 0.75, abs=0.01)
        await asyncio.sleep(1.6)
        assert (stand.pool.is_down, stand.pool.free()) == (False, 1)  # the next probe is due
        check_own(await stand.deliver_now(2))
        assert stand.states() == {"a": "closed"}

    stand.run(main)


def test_an_endpoint_that_answers_500_to_its_probes_is_left_alone_for_longer_and_longer() -> None:
    """A refusal blames nobody until the search has ended; then the pause must begin again."""
    stand = Stand(FakeUpstream("a").then(sick(500), times=9999))

    async def main() -> None:
        for _ in range(5):
            await stand.deliver_now(8)
        calls = []
        for _ in range(6):
            assert (stand.pool.is_down, stand.pool.free()) == (True, 0)
            down_since = stand.clock()
            while stand.pool.is_down:  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.01)
            calls.append((round(stand.clock() - down_since, 1), len(stand.upstreams[0].calls)))
            assert kinds(await stand.deliver_now(8)) == {UpstreamFailed}
        pauses_s = [pause_s for pause_s, _ in calls]
        assert pauses_s == pytest.approx([0.75, 1.5, 3.0, 6.0, 12.0, 22.5], abs=0.2)
        assert all(later - sooner <= 1 + 14 for (_, sooner), (_, later) in pairwise(calls))

    stand.run(main)


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


def test_a_lone_500_that_an_endpoint_known_to_be_well_repeats_is_poison() -> None:
    stand = Stand(FakeUpstream("a").then(sick(500)), FakeUpstream("b").then(echo).then(sick(500)))

    async def main() -> None:
        first, second = stand.batch(1), stand.batch(1)
        sick_one = stand.pool.take()
        stand.send(first)  # to b, which is well from now on
        await stand.finished()
        stand.pool.give_back(sick_one)
        free = stand.pool.take()  # b; a is next
        stand.send(second)
        stand.pool.give_back(free)
        await stand.finished()
        assert kinds([stand.witness.outcome(second[0])]) == {InputRefused}

    stand.run(main)
    assert [len(upstream.calls) for upstream in stand.upstreams] == [1, 2]
    assert stand.failed() == {"a": 0, "b": 0}
    assert [code for _, code, _ in stand.dead_letters.letters] == ["input-refused"]


@pytest.mark.parametrize("status", [400, 500])
def test_the_second_endpoint_is_asked_about_an_input_once_also_if_it_never_says_anything(status: int) -> None:
    """It is busy, so the first one is asked again and refuses again: that is no news, and no reason to go on."""
    stand = Stand(
        FakeUpstream("a").then(sick(status), times=999), FakeUpstream("b").then(UpstreamResponse(429, b""), times=999)
    )
    (outcome,) = stand.deliver(1, total_timeout_s=60.0)
    assert isinstance(outcome, InputRefused if status == 400 else UpstreamFailed)
    assert [len(upstream.calls) for upstream in stand.upstreams] == [2, 1]


def test_endpoints_that_fail_every_step_of_a_search_are_all_blamed() -> None:
    """Else only the one that got the whole batch would be, and the rest be burdened with its parts for ever."""
    stand = Stand(*(FakeUpstream(name).then(sick(500), times=999) for name in "abc"))

    async def main() -> None:
        for _ in range(8):
            if not stand.pool.is_down:
                assert kinds(await stand.deliver_now(8)) == {UpstreamFailed}
        assert stand.pool.is_down
        assert set(stand.states().values()) == {"open"}

    stand.run(main)


# One that is in doubt beside one that is known to be well.


def test_what_one_in_doubt_refuses_is_asked_of_another_as_a_whole() -> None:
    """The first refusal is searched, the second is not: two in a row are seldom the fault of inputs."""
    sick_one, well = FakeUpstream("sick"), FakeUpstream("well", slots=2)
    stand = Stand(sick_one, well)

    async def main() -> None:
        for _ in range(2):
            check_own(await stand.deliver_now(8))
        sick_one.then(sick(500), times=99)
        while len(sick_one.calls) < 2:
            check_own(await stand.deliver_now(8))
        calls = len(well.calls)
        while len(sick_one.calls) < 3:
            check_own(await stand.deliver_now(8))
        assert {len(call.inputs) for call in well.calls[calls:]} == {8}

    stand.run(main)
    assert stand.failed()["well"] == 0
    assert stand.dispatcher.poisoned == 0


def test_poison_in_a_batch_that_one_in_doubt_refused_is_found() -> None:
    first, second = FakeUpstream("first"), FakeUpstream("second")
    stand = Stand(first, second)

    async def main() -> None:
        for _ in range(2):
            check_own(await stand.deliver_now(8))
        for upstream in (first, second):
            upstream.then(refusing(3), times=99)
        stand.pool.members[0].doubt = 1.0
        outcomes = await stand.deliver_now(8)
        check_own(outcomes, but=[3])
        assert isinstance(outcomes[3], InputRefused)

    stand.run(main)
    assert [len(upstream.calls[1].inputs) for upstream in stand.upstreams] == [8, 8]
    assert stand.failed() == {"first": 0, "second": 0}
    assert {member.doubt for member in stand.pool.members} == {0.0}


def test_an_endpoint_that_breaks_its_protocol_is_left_for_another() -> None:
    stand = Stand(FakeUpstream("a").then(UpstreamResponse(200, b"<html>")), FakeUpstream("b"))
    check_own(stand.deliver(3))
    assert stand.failed() == {"a": 1, "b": 0}


def test_a_batch_that_breaks_every_endpoint_is_sent_as_often_as_attempts_allow() -> None:
    """However well the others are: it is the inputs, and they would break them all."""
    stand = Stand(*(FakeUpstream(name) for name in "abcdef"))

    async def main() -> None:
        for _ in range(6):
            check_own(await stand.deliver_now(1))
        for upstream in stand.upstreams:
            upstream.then(RESET, times=99)
        calls = stand.calls()
        assert kinds(await stand.deliver_now(1)) == {UpstreamFailed}
        assert stand.calls() - calls == 3

    stand.run(main)


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
