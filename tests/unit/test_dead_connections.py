"""U10 of FAULTS.md: a call whose connection was dead is sent again at once, but not for nothing and not for ever."""

from functools import partial
from typing import Any

import pytest

from carpool.broker.memory import MemoryBroker
from carpool.core.errors import ClientLeft, DeadlineExceeded, UpstreamFailed
from carpool.core.outcome import Output
from carpool.core.request import Request
from carpool.testing import (
    ConnectionWasDeadError,
    FakeClock,
    FakeUpstream,
    UpstreamCall,
    UpstreamResponse,
    Witness,
    make_request,
)
from carpool.upstream.codecs import JsonCodec
from carpool.upstream.dispatch import UpstreamDispatcher
from carpool.upstream.pool import Pool
from carpool.upstream.retry import RetryBudget

ATTEMPTS = 3
DEAD = ConnectionWasDeadError("closed")


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
            others_waiting=partial(self.broker.most_waiting, "m"),
            all_waiting=partial(self.broker.all_waiting, "m"),
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


@pytest.mark.parametrize(("attempts", "failed"), [(1, 0), (ATTEMPTS, 1)])
def test_dead_connections_one_after_the_other_come_to_an_end(attempts: int, failed: int) -> None:
    stand = Stand(FakeUpstream().then(DEAD, times=99), attempts=attempts)
    assert {type(outcome) for outcome in stand.deliver()} == {UpstreamFailed}
    assert len(stand.sizes()) == attempts
    assert stand.pool.members[0].failed == failed  # the second in a row is its fault


def test_without_a_budget_a_call_that_may_have_been_received_is_not_sent_again() -> None:
    stand = Stand(FakeUpstream().then(DEAD, times=9), paid_retries=0.0)
    assert {type(outcome) for outcome in stand.deliver()} == {UpstreamFailed}
    assert (stand.sizes(), stand.pool.members[0].failed) == ([3], 0)


def test_whoever_left_or_expired_meanwhile_is_not_sent_again() -> None:
    def upset(call: UpstreamCall) -> UpstreamResponse:
        stand.broker.cancel(stand.requests[0])
        stand.requests[1].deadline = stand.clock()
        raise DEAD

    stand = Stand(FakeUpstream().then(upset, delay_s=0.5))
    outcomes = stand.deliver(4)
    assert [type(outcome) for outcome in outcomes] == [ClientLeft, DeadlineExceeded, Output, Output]
    assert [call.inputs for call in stand.gpu.calls][1] == [b'"in 2"', b'"in 3"']
