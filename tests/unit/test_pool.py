"""Slots: each is free, or with exactly one who took it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from carpool.testing import FakeClock, FakeUpstream
from carpool.upstream.breaker import Breaker
from carpool.upstream.controller import PAUSE_S_MAX
from carpool.upstream.pool import EndpointState, Pool

FAILURES_MAX = 2
# With half of the jitter, the first pauses last 0.75, 1.5 and 3 s.


def make_pool(*slots: int, clock: FakeClock | None = None, eject_share_max: float = 0.5) -> Pool:
    return Pool(
        [FakeUpstream(f"e{number}", count) for number, count in enumerate(slots)],
        clock or FakeClock(),
        eject_share_max=eject_share_max,
        make_breaker=lambda: Breaker(failures_max=FAILURES_MAX),
        random_share=lambda: 0.5,
    )


def in_virtual_time(*slots: int, **options: Any) -> Callable[[Callable[[Pool], Coroutine[Any, Any, None]]], None]:
    """Play a scene with such a pool, now."""

    def play(scene: Callable[[Pool], Coroutine[Any, Any, None]]) -> None:
        clock = FakeClock()
        clock.run(scene(make_pool(*slots, clock=clock, **options)))

    return play


def fail(pool: Pool, member: EndpointState, times: int = FAILURES_MAX) -> None:
    """Let calls to an endpoint fail. It has free slots."""
    for _ in range(times):
        start_on(pool, member)
        pool.give_back(member)
        pool.record_failure(member)


def start_on(pool: Pool, member: EndpointState) -> None:
    """Take a slot of this endpoint."""
    others: list[EndpointState] = []
    while (took := pool.take()) is not member:
        others.append(took)
    for other in others:
        pool.give_back(other)


def is_down(pool: Pool) -> bool:
    return pool.is_down


def states(pool: Pool) -> list[str]:
    return [member.breaker.state for member in pool.members]


# Endpoints that fail.


@pytest.mark.parametrize(
    ("endpoints", "share", "out"), [(1, 0.5, 1), (2, 0.5, 1), (3, 0.5, 1), (4, 0.5, 2), (5, 0.2, 1)]
)
def test_only_a_share_of_the_pool_is_taken_out(endpoints: int, share: float, out: int) -> None:
    async def scene(pool: Pool) -> None:
        for member in pool.members[: endpoints - 1] if endpoints > 1 else pool.members:
            fail(pool, member)
        assert states(pool).count("open") == out
        assert pool.is_down == (endpoints == 1)

    in_virtual_time(*[1] * endpoints, eject_share_max=share)(scene)


# Many endpoints: each of these is asked again and again while a search waits.

MANY = 200


class CountingBreaker(Breaker):
    """Counts how often any breaker is looked at."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        CountingBreaker.looks += 1
        return super().__getattribute__(name)


def looks_of(action: Callable[[], Any]) -> int:
    before = CountingBreaker.looks
    action()
    return CountingBreaker.looks - before


def large_pool() -> tuple[Pool, EndpointState]:
    """A pool, and the only endpoint in it that is known to be well; that has no free slot."""
    endpoints = [FakeUpstream(f"e{number}", slots=4) for number in range(MANY)]
    pool = Pool(endpoints, FakeClock(), make_breaker=CountingBreaker, random_share=lambda: 0.5)
    well = pool.members[MANY // 2]
    for _ in range(4):
        start_on(pool, well)
    pool.record_success(well)
    return pool, well


def test_what_searches_ask_of_the_pool_all_the_time_costs_little() -> None:
    pool, well = large_pool()
    pool.total()
    assert looks_of(lambda: pool.is_alive(0.0)) < 9
    assert looks_of(pool.total) == 0
    assert looks_of(lambda: pool.has_others(well)) < 9
    assert looks_of(pool.free_for_quarantined) < 5 * MANY


# Sick endpoints beside one that is known to be well.


def test_it_is_offered_again_when_the_other_is_taken_out() -> None:
    async def scene(pool: Pool) -> None:
        sick, other = pool.members
        pool.record_success(other)
        start_on(pool, sick)
        pool.is_helped(sick)
        pool.give_back(sick)
        assert sick.offered == 0
        fail(pool, other)
        assert (states(pool), sick.offered) == (["closed", "open"], 1)

    in_virtual_time(1, 1)(scene)


def test_an_endpoint_that_fails_is_in_doubt_until_it_has_answered_a_few_calls() -> None:
    pool = make_pool(1, 1)
    member = pool.members[0]
    pool.record_success(member)
    assert pool.raise_doubt(member) == 0.0
    assert not pool.is_well(member) and not pool.has_well(pool.members[1])
    for _ in range(3):
        assert not pool.is_well(member)
        pool.record_success(member)
    assert pool.is_well(member) and pool.has_well(pool.members[1])


# Limits.


# Endpoints that are removed.


def test_when_the_last_endpoint_in_use_is_removed_the_pool_is_down() -> None:
    async def scene(pool: Pool) -> None:
        sick, used = pool.members
        fail(pool, sick)
        start_on(pool, used)
        gone: list[str] = []
        pool.remove(used.endpoint, lambda: gone.append(used.name))
        assert (pool.is_down, gone) == (True, [])
        pool.give_back(used)
        pool.record_success(used)
        assert (is_down(pool), gone, pool.free()) == (True, ["e1"], 0)
        await asyncio.sleep(1.0)
        pool.look()
        assert (is_down(pool), pool.free()) == (False, 1)  # the probe of the other
        pool.remove(sick.endpoint, lambda: gone.append(sick.name))
        assert (is_down(pool), gone, pool.free(), pool.retry_after_s()) == (True, ["e1", "e0"], 0, 1)

    in_virtual_time(1, 1)(scene)


def lower(pool: Pool, member: EndpointState) -> None:
    """Let an endpoint say that it is loaded."""
    member.controller.report(0.95)
    member.controller.step(0.0)
    pool.follow(member)


@in_virtual_time(1)
async def test_after_a_call_of_minutes_a_short_one_is_followed_by_a_pause_of_a_second_at_most(pool: Pool) -> None:
    [member] = pool.members

    async def call(seconds: float) -> float:
        pool.take()
        await asyncio.sleep(seconds)
        pool.give_back(member)
        member.controller.answered(8, seconds, 0.0)
        rested_s = 0.0
        while not pool.free():
            await asyncio.sleep(0.01)
            rested_s += 0.01
            pool.look()
        return rested_s

    await call(300.0)  # this process stood still, or the model was loaded
    lower(pool, member)
    assert await call(0.1) == pytest.approx(PAUSE_S_MAX, abs=0.02)
    assert await call(0.1) < 0.1  # and it is forgotten


def test_a_new_limit_offers_no_probe_before_the_health_page_was_asked() -> None:
    clock = FakeClock()
    asked: list[EndpointState] = []
    pool = Pool(
        [FakeUpstream("e", 1)],
        clock,
        make_breaker=lambda: Breaker(failures_max=FAILURES_MAX),
        ask_health=lambda member, tell: asked.append(member),
    )
    [member] = pool.members
    lower(pool, member)
    fail(pool, member)
    clock.now += 60.0
    member.controller.step(clock())
    pool.follow(member)
    assert (states(pool), pool.free(), asked) == (["open"], 0, [])
    pool.look()
    assert (pool.free(), asked) == (0, [member])
