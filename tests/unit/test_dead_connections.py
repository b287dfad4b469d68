"""U10 of FAULTS.md: a call whose connection was dead is sent again at once, but not for nothing and not for ever."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from carpool.broker.memory import MemoryBroker
from carpool.core.errors import ClientLeft, DeadlineExceeded, UpstreamFailed
from carpool.core.outcome import Output
from carpool.core.request import Request
from carpool.testing import (
    AttemptFailedError,
    ConnectionWasDeadError,
    DoubtfulAnswerError,
    FakeClock,
    FakeUpstream,
    UpstreamCall,
    UpstreamResponse,
    Witness,
    echo,
    make_request,
)
from carpool.upstream.attempts import DEAD_IN_A_ROW_MAX
from carpool.upstream.codecs import JsonCodec
from carpool.upstream.dispatch import UpstreamDispatcher
from carpool.upstream.pool import Pool
from carpool.upstream.retry import RetryBudget

ATTEMPTS = 3
UNSENT = ConnectionWasDeadError("closed", closed_before_sent=True)
SENT = ConnectionWasDeadError("closed", closed_before_sent=False)
DOUBT = DoubtfulAnswerError("the one before, again")


class Stand:
    """A dispatcher between a broker and one endpoint, in virtual time."""

    def __init__(self, gpu: FakeUpstream, paid_retries: float = 9.0, attempts: int = ATTEMPTS) -> None:
        self.gpu = gpu
        self.clock = FakeClock()
        self.witness = Witness()
        self.broker = MemoryBroker(waiting_max=100, bytes_max=10_000, lanes_max=9, tiers=1, clock=self.clock)
        self.broker.when_work_arrives("m", lambda lane: None)
        self.pool = Pool([gpu], self.clock)
        # Half of what can be kept is there at the start.
        self.budget = RetryBudget(0.0, 0.0, kept_max=2 * paid_retries)
        self.dispatcher = UpstreamDispatcher(
            self.pool,
            JsonCodec(),
            self.broker,
            timeout_s=3.0,
            attempts=attempts,
            backoff_s=0.1,
            budget=self.budget,
            clock=self.clock,
            random_share=lambda: 0.5,
        )
        self.requests: list[Request] = []

    def deliver(self, count: int = 3) -> list[Any]:
        """Send one batch; the outcomes of its members."""

        async def main() -> None:
            for number in range(count):
                request = make_request(str(number), self.witness, now=self.clock(), value=b'"in %d"' % number)
                self.broker.submit(request)
            (lane,) = self.broker.lanes("m")
            self.requests = self.broker.take(lane, count, self.clock())
            self.dispatcher.dispatch(self.requests, lambda seconds: None)
            await self.dispatcher.finish(60.0)

        self.clock.run(main())
        assert (self.pool.free(), self.pool.busy()) == (1, 0)
        return [self.witness.outcome(request) for request in self.requests]

    def sizes(self) -> list[int]:
        return [len(call.inputs) for call in self.gpu.calls]

    def paid(self) -> float:
        left = 0
        while self.budget.take(self.clock()):
            left += 1
        return 9.0 - left


@pytest.mark.parametrize(("dead", "paid", "sends"), [(UNSENT, 0.0, 0), (SENT, 1.0, 1)])
def test_a_dead_connection_costs_its_price_and_harms_nobody(
    dead: ConnectionWasDeadError, paid: float, sends: int
) -> None:
    stand = Stand(FakeUpstream().then(dead))
    started = stand.clock()
    assert {type(outcome) for outcome in stand.deliver()} == {Output}
    assert stand.clock() == started  # at once
    assert (stand.sizes(), stand.paid()) == ([3, 3], paid)
    assert [request.sends for request in stand.requests] == [sends] * 3
    assert stand.pool.members[0].failed == 0


def test_what_surely_was_not_received_takes_no_attempt() -> None:
    stand = Stand(
        FakeUpstream()
        .then(UNSENT)
        .then(UpstreamResponse(503, b""))
        .then(UNSENT)
        .then(UpstreamResponse(503, b""))
        .then(UNSENT)
    )
    assert {type(outcome) for outcome in stand.deliver()} == {Output}
    assert len(stand.sizes()) == ATTEMPTS + 3


@pytest.mark.parametrize(
    ("dead", "sent_at_once"), [(UNSENT, 1 + DEAD_IN_A_ROW_MAX), (SENT, ATTEMPTS)], ids=["unsent", "sent"]
)
def test_dead_connections_one_after_the_other_come_to_an_end(dead: ConnectionWasDeadError, sent_at_once: int) -> None:
    stand = Stand(FakeUpstream().then(dead, times=99))
    assert {type(outcome) for outcome in stand.deliver()} == {UpstreamFailed}
    assert len(stand.sizes()) == sent_at_once * (ATTEMPTS if dead is UNSENT else 1)
    assert stand.pool.members[0].failed == (ATTEMPTS if dead is UNSENT else 1)  # the second in a row is its fault


def test_without_a_budget_a_call_that_may_have_been_received_is_not_sent_again() -> None:
    stand = Stand(FakeUpstream().then(SENT, times=9), paid_retries=0.0)
    assert {type(outcome) for outcome in stand.deliver()} == {UpstreamFailed}
    assert (stand.sizes(), stand.pool.members[0].failed) == ([3], 0)
    free = Stand(FakeUpstream().then(UNSENT), paid_retries=0.0)
    assert {type(outcome) for outcome in free.deliver()} == {Output}


@pytest.mark.parametrize("attempts", [1, ATTEMPTS])
@pytest.mark.parametrize("paid_retries", [0.0, 9.0])
def test_a_call_whose_answer_is_in_doubt_is_sent_again_once_whatever_else_is_allowed(
    attempts: int, paid_retries: float
) -> None:
    stand = Stand(FakeUpstream().then(DOUBT), paid_retries, attempts)
    started = stand.clock()
    assert {type(outcome) for outcome in stand.deliver()} == {Output}
    assert (stand.sizes(), stand.clock()) == ([3, 3], started)  # at once
    assert [request.sends for request in stand.requests] == [1] * 3  # before the one that was answered
    assert stand.pool.members[0].failed == 0
    if paid_retries:
        assert stand.paid() == 0.0


@pytest.mark.parametrize(("attempts", "calls"), [(1, 2), (ATTEMPTS, ATTEMPTS + 1)])
def test_answers_in_doubt_one_after_the_other_come_to_an_end(attempts: int, calls: int) -> None:
    stand = Stand(FakeUpstream().then(DOUBT, times=99), attempts=attempts)
    assert {type(outcome) for outcome in stand.deliver()} == {UpstreamFailed}
    assert len(stand.sizes()) == calls
    assert stand.pool.members[0].failed == 1


def test_after_a_doubt_a_failure_is_one() -> None:
    stand = Stand(FakeUpstream().then(DOUBT).then(UpstreamResponse(503, b""), times=9), attempts=1)
    assert {type(outcome) for outcome in stand.deliver()} == {UpstreamFailed}
    assert len(stand.sizes()) == 2


@pytest.mark.parametrize("dead", [UNSENT, SENT, DOUBT], ids=["unsent", "sent", "doubt"])
def test_whoever_left_or_expired_meanwhile_is_not_sent_again(dead: AttemptFailedError) -> None:
    def upset(call: UpstreamCall) -> UpstreamResponse:
        stand.broker.cancel(stand.requests[0])
        stand.requests[1].deadline = stand.clock()
        raise dead

    stand = Stand(FakeUpstream().then(upset, delay_s=0.5))
    outcomes = stand.deliver(4)
    assert [type(outcome) for outcome in outcomes] == [ClientLeft, DeadlineExceeded, Output, Output]
    assert [call.inputs for call in stand.gpu.calls][1] == [b'"in 2"', b'"in 3"']


@pytest.mark.parametrize("dead", [UNSENT, SENT], ids=["unsent", "sent"])
def test_if_everybody_left_nothing_is_sent_again(dead: ConnectionWasDeadError) -> None:
    def upset(call: UpstreamCall) -> UpstreamResponse:
        for request in stand.requests:
            stand.broker.cancel(request)
        raise dead

    stand = Stand(FakeUpstream().then(upset))
    stand.deliver()
    assert stand.sizes() == [3]


@pytest.mark.parametrize("after_s", [0.0, 0.5, 1.5])
def test_cut_off_by_a_shutdown_the_slot_comes_back(after_s: float) -> None:
    slow: list[tuple[ConnectionWasDeadError | Callable[[UpstreamCall], UpstreamResponse], float]] = [
        (UNSENT, 1.0),
        (echo, 1.0),
    ]
    stand = Stand(FakeUpstream())
    for reaction, delay_s in slow:
        stand.gpu.then(reaction, delay_s=delay_s)

    async def main() -> None:
        stand.broker.submit(make_request("0", stand.witness, now=stand.clock()))
        (lane,) = stand.broker.lanes("m")
        stand.dispatcher.dispatch(stand.broker.take(lane, 1, stand.clock()), lambda seconds: None)
        await asyncio.sleep(after_s)
        await stand.dispatcher.finish(0.0)

    stand.clock.run(main())
    assert (stand.pool.free(), stand.pool.busy()) == (1, 0)
