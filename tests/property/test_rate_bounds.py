"""Rate limits: what comes in is bounded, and who keeps to its limit is never refused, over any number of gateways."""

import asyncio
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carpool.admission.limits import LocalLimits, slack
from carpool.admission.shared_limits import SharedLimits
from carpool.core.errors import CarpoolError
from carpool.core.token_bucket import TokenBucket
from carpool.testing import FakeClock
from support.rates import BudgetModel, LoadShedder, limited, most_in_a_minute

LIMITS = st.sampled_from([1, 7, 19, 20, 59, 60, 120, 300, 1000, 3000])
BURSTS = st.sampled_from([1, 2, 10, 100])
# As how many the calls of a client count: single requests, and lists, also longer ones than the burst.
COSTS = st.sampled_from([(1,), (1,), (1, 1, 7), (3, 40), (1, 1, 150)])
# Seconds that the slowest answer takes, there and back.
ANSWER_S_MAX = 0.5


class Fleet:
    """Gateways that share one budget, on virtual time."""

    def __init__(self, gateways: int, random: Random, *, answer_s: float, lost_share: float = 0.0) -> None:
        self.clock = FakeClock()
        self.random = random
        self._answer_s = answer_s
        self._lost_share = lost_share
        self._number = gateways
        self.door = LoadShedder(self.clock)

    def run(self, client: Callable[["Fleet"], list[tuple[float, int, int]]]) -> None:
        """Let calls come: each with the seconds since the one before, its gateway, and as how many it counts."""

        async def main() -> None:
            self.budget = BudgetModel(self.clock)
            self.gateways = [
                SharedLimits(
                    self.budget.way(self._way),
                    is_reachable=lambda: True,
                    # Without an answer a gateway has its part of the limit, here of so many that it is one request.
                    sharers=lambda: 10**6,
                    clock=self.clock,
                )
                for _ in range(self._number)
            ]
            for gateway in self.gateways:
                gateway.start()
            for pause_s, caller_at, cost in client(self):
                await asyncio.sleep(pause_s)
                self.door.knock(self.gateways[caller_at], self.caller, cost)
            await asyncio.sleep(5.0)
            for gateway in self.gateways:
                gateway.close()
            await asyncio.sleep(2 * ANSWER_S_MAX)

        self.clock.run(main())

    def _way(self) -> tuple[float, float, str]:
        there_s, back_s = (self.random.uniform(0.0, self._answer_s / 2) for _ in range(2))
        lost = self.random.random() < self._lost_share
        return there_s, back_s, self.random.choice(["there", "back"]) if lost else ""

    caller = limited(60)


@given(
    per_minute=LIMITS,
    burst=BURSTS,
    gateways=st.integers(1, 8),
    answer_s=st.sampled_from([0.0, 0.002, 0.1, ANSWER_S_MAX]),
    lost_share=st.sampled_from([0.0, 0.2]),
    costs=COSTS,
    seed=st.integers(0, 2**32),
)
@example(per_minute=1000, burst=1, gateways=8, answer_s=0.002, lost_share=0.0, costs=(1,), seed=1)
@example(per_minute=60, burst=1, gateways=8, answer_s=0.5, lost_share=0.2, costs=(1,), seed=1)
@example(per_minute=1000, burst=100, gateways=4, answer_s=0.1, lost_share=0.0, costs=(1, 1, 150), seed=1)
def test_no_more_comes_in_than_the_bound(
    per_minute: int, burst: int, gateways: int, answer_s: float, lost_share: float, costs: tuple[int, ...], seed: int
) -> None:
    random = Random(seed)
    fleet = Fleet(gateways, random, answer_s=answer_s, lost_share=lost_share)
    fleet.caller = limited(per_minute, burst)

    def flood(fleet: Fleet) -> list[tuple[float, int, int]]:
        """Ten times the limit and more, in waves with pauses, each through some of the gateways."""
        calls: list[tuple[float, int, int]] = []
        passed_s = 0.0
        while passed_s < 130.0 and len(calls) < 6000:
            some = random.sample(range(gateways), random.randint(1, gateways))
            pace_s = 60.0 / per_minute * random.choice([0.0, 0.1, 0.1, 0.5, 1.0])
            for _ in range(random.randint(1, max(2, per_minute // 10))):
                calls.append((random.uniform(0.0, 2 * pace_s), random.choice(some), random.choice(costs)))
                passed_s += calls[-1][0]
            rest_s = random.choice([0.0, 0.0, 0.3, 1.2, 10.0, 60.0 / per_minute * burst])
            calls.append((min(rest_s, 70.0), random.choice(some), random.choice(costs)))
            passed_s += calls[-1][0]
        return calls

    fleet.run(flood)
    assert not fleet.door.waiting
    # A call of more than the burst stands in its place. Without an answer every gateway lets one in.
    largest = max(burst, *costs)
    without_answer = gateways * max(costs) if lost_share else 0
    assert most_in_a_minute(fleet.door.came_in) <= per_minute * 1.10 + largest + without_answer


@pytest.mark.parametrize(("per_minute", "gateways", "before"), [(1000, 4, 0.9), (3000, 2, 0.8), (300, 2, 0.6)])
def test_a_flood_that_finds_every_gateway_with_a_lease(per_minute: int, gateways: int, before: float) -> None:
    """The most that can come in: a full bucket, and leases for what each gateway let in just before."""
    fleet = Fleet(gateways, Random(1), answer_s=0.002)
    fleet.caller = limited(per_minute)
    interval_s = 60.0 / per_minute

    def client(fleet: Fleet) -> list[tuple[float, int, int]]:
        steady = [interval_s / before] * int(8.0 * before / interval_s)
        flood = [interval_s / 2.5] * (3 * per_minute)
        return [(pause_s, number % gateways, 1) for number, pause_s in enumerate([*steady, 1.0, *flood])]

    fleet.run(client)
    most = most_in_a_minute(fleet.door.came_in)
    assert per_minute * 1.05 < most <= per_minute * 1.10 + 1


@given(
    per_minute=LIMITS,
    burst=BURSTS,
    gateways=st.integers(1, 8),
    answer_s=st.sampled_from([0.0, 0.002, 0.05]),
    jumps=st.sampled_from(["round", "any", "blocks"]),
    costs=COSTS,
    seed=st.integers(0, 2**32),
)
@example(per_minute=60, burst=10, gateways=8, answer_s=0.002, jumps="round", costs=(1,), seed=1)
@example(per_minute=7, burst=2, gateways=1, answer_s=0.05, jumps="round", costs=(1,), seed=1603202092)
@example(per_minute=1000, burst=1, gateways=2, answer_s=0.05, jumps="blocks", costs=(1,), seed=1)
@example(per_minute=1000, burst=100, gateways=3, answer_s=0.05, jumps="any", costs=(1, 1, 150), seed=1)
def test_who_keeps_to_its_limit_is_never_refused(
    per_minute: int, burst: int, gateways: int, answer_s: float, jumps: str, costs: tuple[int, ...], seed: int
) -> None:
    """At any moment it sends what one bucket with its limit would let in; with no burst, at 99 % of an even pace."""
    random = Random(seed)
    # Below 17 a minute there is no slack: who may have one request at once must not have its answers on the way change
    # the order of things.
    fleet = Fleet(gateways, random, answer_s=answer_s if slack(per_minute) else 0.0)
    fleet.caller = limited(per_minute, burst)
    interval_s = 60.0 / per_minute

    def conform(fleet: Fleet) -> list[tuple[float, int, int]]:
        calls: list[tuple[float, int, int]] = []
        # A little slower than its limit: of the clocks' fractions the budget rounds up.
        bucket, now, last = TokenBucket(0.99 / interval_s, burst), 0.0, 0.0
        gateway = 0
        cost = random.choice(costs)
        while now < 200.0 and len(calls) < 4000:
            if not bucket.borrow(now, cost):
                now += bucket.wait_s(now, min(cost, burst)) + 1e-9
                continue
            if jumps == "round":
                gateway = (gateway + 1) % gateways
            elif jumps == "any" or random.random() < 0.02:
                gateway = random.randrange(gateways)
            calls.append((now - last, gateway, cost))
            cost = random.choice(costs)
            last = now
            if random.random() < 0.01:
                now += random.choice([0.2, 1.1, 5.0, 70.0])
            elif random.random() < 0.3:
                now += random.uniform(0.0, 2 * interval_s)
        return calls

    fleet.run(conform)
    assert fleet.door.refused == []
    assert not fleet.door.waiting


@given(per_minute=LIMITS, burst=BURSTS, costs=COSTS, seed=st.integers(0, 2**32))
def test_one_process_alone_is_exact(per_minute: int, burst: int, costs: tuple[int, ...], seed: int) -> None:
    clock, random = FakeClock(), Random(seed)
    door, limits, caller = LoadShedder(clock), LocalLimits(clock), limited(per_minute, burst)
    for _ in range(3000):
        clock.advance(random.expovariate(10 * per_minute / 60 / max(costs)))
        door.knock(limits, caller, random.choice(costs))
    assert most_in_a_minute(door.came_in) <= per_minute + max(burst, *costs)
    # What a refusal says is true: who comes again when Retry-After is over comes in, and nobody sooner.
    for cost in costs:
        while not isinstance(refusal := limits.enter(caller, cost), CarpoolError):
            pass
        assert refusal.retry_after_s is not None
        if refusal.retry_after_s > 1:
            clock.advance(refusal.retry_after_s - 1)
            assert isinstance(limits.enter(caller, cost), CarpoolError)
            clock.advance(1)
        else:
            clock.advance(refusal.retry_after_s)
        assert isinstance(limits.enter(caller, cost), bytes)


@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.1, 1.0, 9.0]), st.sampled_from([(60, 3), (600, 10), (6, 1)]), st.integers(1, 30)
        ),
        max_size=60,
    )
)
def test_each_limit_of_an_owner_holds_by_itself_debts_too(calls: list[tuple[float, tuple[int, int], int]]) -> None:
    """Whatever else its owner may do: what one limit lets in is what a bucket of its own would."""
    clock = FakeClock()
    limits = LocalLimits(clock)
    # By limit: when a bucket that is this limit's alone is full.
    full_at: dict[tuple[int, int], float] = {}
    for pause_s, limit, cost in calls:
        clock.advance(pause_s)
        interval_s, burst = 60 / limit[0], limit[1]
        came_in = isinstance(limits.enter(limited(*limit), cost), bytes)
        ahead_s = max(full_at.get(limit, 0.0) - clock(), 0.0) + cost * interval_s
        assert came_in == (ahead_s <= max(burst, cost) * interval_s + 1e-4)
        if came_in:
            full_at[limit] = clock() + ahead_s
