"""Slots: each is free, or with exactly one who took it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from carpool.testing import FakeClock, FakeUpstream
from carpool.upstream.breaker import Breaker
from carpool.upstream.pool import TIMER_S_MIN, EndpointPreference, EndpointState, Pool

FAILURES_MAX = 2
# With half of the jitter, the first pauses last 0.75, 1.5 and 3 s.
FIRST_PAUSE_S = 0.75


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


def taken(pool: Pool, count: int) -> list[EndpointState]:
    return [pool.take() for _ in range(count)]


def names(members: list[EndpointState]) -> list[str]:
    return [member.name for member in members]


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


def test_consecutive_batches_go_to_different_endpoints() -> None:
    pool = make_pool(2, 1, 3)
    assert (pool.total(), pool.free()) == (6, 6)
    assert names(taken(pool, 6)) == ["e0", "e1", "e2", "e0", "e2", "e2"]
    assert pool.free() == 0


def test_the_slot_that_has_been_free_longest_goes_first() -> None:
    pool = make_pool(1, 1, 1)
    first, second, third = taken(pool, 3)
    for endpoint in (second, third, first):
        pool.give_back(endpoint)
    assert taken(pool, 3) == [second, third, first]


def test_a_freed_slot_rings() -> None:
    pool = make_pool(1)
    rung: list[int] = []
    pool.when_slot_frees(lambda: rung.append(pool.free()))
    pool.give_back(pool.take())
    assert rung == [1]


def test_busy_seconds_count_every_slot_in_use() -> None:
    clock = FakeClock()
    pool = make_pool(2, clock=clock)
    clock.advance(10.0)
    first = pool.take()
    clock.advance(1.0)
    second = pool.take()
    clock.advance(2.0)
    assert pool.busy_seconds() == pytest.approx(5.0)
    pool.give_back(first)
    clock.advance(0.5)
    pool.give_back(second)
    clock.advance(100.0)
    assert pool.busy_seconds() == pytest.approx(5.5)


async def test_a_retry_goes_to_another_endpoint_if_there_is_one() -> None:
    pool = make_pool(3, 1)
    failed = pool.take()
    pool.give_back(failed)
    assert names(taken(pool, 1)) == ["e1"]  # the next in turn
    pool = make_pool(3, 1)
    failed = pool.take()
    pool.give_back(failed)
    retried = await pool.take_for_retry([failed], 1.0)
    assert retried is not None and retried.name == "e1"
    assert repr(pool) == "<Pool slots=4 free=3 retries=0 down=False>"


async def test_a_single_endpoint_is_tried_again_itself() -> None:
    pool = make_pool(1)
    failed = pool.take()
    pool.give_back(failed)
    assert await pool.take_for_retry([failed], 1.0) is failed


async def test_a_retry_waits_for_the_first_slot_that_it_may_use() -> None:
    pool = make_pool(1, 1)
    rung: list[None] = []
    pool.when_slot_frees(lambda: rung.append(None))
    failed, other = taken(pool, 2)
    pool.give_back(failed)  # free, but it is the one that failed
    waiting = asyncio.create_task(pool.take_for_retry([failed], 10.0))
    await asyncio.sleep(0)
    assert repr(pool) == "<Pool slots=2 free=1 retries=1 down=False>"
    pool.give_back(other)
    assert await waiting is other
    assert repr(pool) == "<Pool slots=2 free=1 retries=0 down=False>"
    assert len(rung) == 1  # handed over: it was never free


async def test_retries_are_served_in_order() -> None:
    pool = make_pool(1)
    endpoint = pool.take()
    retries = [asyncio.create_task(pool.take_for_retry([endpoint], 10.0)) for _ in range(3)]
    await asyncio.sleep(0)
    for retry in retries:
        assert not retry.done()
        pool.give_back(endpoint)
        assert await retry is endpoint
    assert pool.free() == 0


def test_a_retry_gives_up_in_time() -> None:
    clock = FakeClock()

    async def main() -> None:
        pool = make_pool(1, clock=clock)
        endpoint = pool.take()
        assert await pool.take_for_retry([endpoint], 2.5) is None
        assert clock() == 1002.5
        pool.give_back(endpoint)
        assert repr(pool) == "<Pool slots=1 free=1 retries=0 down=False>"

    clock.run(main())


async def test_a_cancelled_retry_keeps_no_slot() -> None:
    pool = make_pool(1)
    endpoint = pool.take()
    waits = asyncio.create_task(pool.take_for_retry([endpoint], 10.0))
    await asyncio.sleep(0)
    waits.cancel()
    await asyncio.wait([waits])
    pool.give_back(endpoint)
    assert repr(pool) == "<Pool slots=1 free=1 retries=0 down=False>"


async def test_a_retry_cancelled_just_as_it_got_its_slot_gives_it_back() -> None:
    pool = make_pool(1)
    endpoint = pool.take()
    waits = asyncio.create_task(pool.take_for_retry([endpoint], 10.0))
    await asyncio.sleep(0)
    pool.give_back(endpoint)
    waits.cancel()
    await asyncio.wait([waits])
    assert waits.cancelled()
    assert repr(pool) == "<Pool slots=1 free=1 retries=0 down=False>"


# Endpoints that fail.


def test_an_endpoint_whose_breaker_opens_is_offered_no_more() -> None:
    async def scene(pool: Pool) -> None:
        sick = pool.members[0]
        fail(pool, sick)
        assert states(pool) == ["open", "closed", "closed"]
        assert (pool.total(), pool.free(), pool.is_down) == (4, 4, False)
        assert "e0" not in names(taken(pool, 4))

    in_virtual_time(2, 2, 2)(scene)


def test_one_probe_is_offered_when_the_pause_is_over() -> None:
    async def scene(pool: Pool) -> None:
        rung: list[None] = []
        sick = pool.members[0]
        fail(pool, sick)
        pool.when_slot_frees(lambda: rung.append(None))
        await asyncio.sleep(FIRST_PAUSE_S - 0.01)
        assert (sick.offered, rung) == (0, [])
        await asyncio.sleep(0.02)
        assert (sick.offered, len(rung)) == (1, 1)
        start_on(pool, sick)
        assert (sick.breaker.state, sick.probing) == ("half-open", True)
        await asyncio.sleep(60.0)
        assert sick.offered == 0  # one at a time
        pool.give_back(sick)
        pool.record_success(sick)
        assert (sick.breaker.state, sick.offered) == ("closed", 3)

    in_virtual_time(3, 1)(scene)


def test_a_probe_that_fails_is_followed_by_a_longer_pause() -> None:
    async def scene(pool: Pool) -> None:
        sick = pool.members[0]
        fail(pool, sick)
        for pause_s in (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S):
            await asyncio.sleep(pause_s - 0.01)
            assert sick.offered == 0
            await asyncio.sleep(0.02)
            assert sick.offered == 1
            fail(pool, sick, times=1)
            assert (sick.breaker.state, sick.offered) == ("open", 0)

    in_virtual_time(2, 2)(scene)


def test_a_probe_that_tells_nothing_is_repeated() -> None:
    async def scene(pool: Pool) -> None:
        (sick,) = pool.members
        fail(pool, sick)
        await asyncio.sleep(1.0)
        for gives_back_first in (True, False):
            start_on(pool, sick)
            if gives_back_first:
                pool.give_back(sick)
            pool.says_nothing(sick)
            if not gives_back_first:
                pool.give_back(sick)
            await asyncio.sleep(0.01)
            assert (sick.breaker.state, sick.offered, sick.in_flight) == ("open", 1, 0)

    in_virtual_time(2)(scene)


def test_the_probe_waits_for_the_calls_that_began_before() -> None:
    async def scene(pool: Pool) -> None:
        (sick,) = pool.members
        start_on(pool, sick)
        fail(pool, sick)
        await asyncio.sleep(5.0)
        assert sick.offered == 0
        pool.give_back(sick)
        pool.says_nothing(sick)
        await asyncio.sleep(0.01)
        assert sick.offered == 1

    in_virtual_time(2)(scene)


def test_an_old_call_is_not_taken_for_the_probe_that_begins_as_it_ends() -> None:
    async def scene(pool: Pool) -> None:
        (sick,) = pool.members
        start_on(pool, sick)
        fail(pool, sick)
        retry = asyncio.create_task(pool.take_for_retry((), 60.0))
        await asyncio.sleep(5.0)
        pool.give_back(sick)
        pool.record_failure(sick)  # of the old call: the pause begins again
        await asyncio.sleep(0.01)
        assert (sick.breaker.state, retry.done()) == ("open", False)
        await asyncio.sleep(2.0)
        assert retry.done()
        assert (sick.breaker.state, sick.probing) == ("half-open", True)

    in_virtual_time(2)(scene)


def test_an_old_call_that_is_answered_closes_the_breaker() -> None:
    async def scene(pool: Pool) -> None:
        (sick,) = pool.members
        start_on(pool, sick)
        fail(pool, sick)
        assert pool.is_down
        pool.give_back(sick)
        pool.record_success(sick)
        assert (sick.breaker.state, sick.offered, pool.is_down) == ("closed", 2, False)
        await asyncio.sleep(5.0)
        assert sick.offered == 2  # and no probe was waited for

    in_virtual_time(2)(scene)


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


def test_one_that_could_not_be_spared_is_taken_out_later() -> None:
    async def scene(pool: Pool) -> None:
        first, second, _ = pool.members
        fail(pool, first)
        fail(pool, second)
        assert states(pool) == ["open", "closed", "closed"]
        await asyncio.sleep(1.0)
        start_on(pool, first)
        pool.give_back(first)
        pool.record_success(first)
        fail(pool, second, times=1)
        assert states(pool) == ["closed", "open", "closed"]

    in_virtual_time(1, 1, 1)(scene)


def test_when_all_fail_all_are_left_alone() -> None:
    async def scene(pool: Pool) -> None:
        rung: list[int] = []
        pool.when_slot_frees(lambda: rung.append(pool.free()))
        for member in pool.members:
            assert not is_down(pool)
            fail(pool, member)
        assert states(pool) == ["open"] * 3
        assert (is_down(pool), pool.free(), pool.total()) == (True, 0, 1)
        assert pool.retry_after_s() == 1
        rung.clear()
        await asyncio.sleep(FIRST_PAUSE_S + 0.01)
        assert rung == [1, 2, 3]  # a probe for each
        assert not is_down(pool)
        (first, second, third) = taken(pool, 3)
        assert is_down(pool)  # until one of the probes has an answer
        for member in (first, second):
            pool.give_back(member)
            pool.record_failure(member)
            assert is_down(pool)
        assert pool.retry_after_s() == 1  # the third may be well
        pool.give_back(third)
        pool.record_failure(third)
        assert pool.retry_after_s() == 2
        await asyncio.sleep(2 * FIRST_PAUSE_S + 0.01)
        well = pool.take()
        pool.give_back(well)
        pool.record_success(well)
        assert not is_down(pool)
        assert states(pool).count("closed") == 1

    in_virtual_time(1, 1, 1)(scene)


def test_a_failing_endpoint_is_not_down_while_another_is_not_failing() -> None:
    async def scene(pool: Pool) -> None:
        first, second = pool.members
        fail(pool, first)
        fail(pool, second, times=FAILURES_MAX - 1)
        assert not is_down(pool)
        fail(pool, second, times=1)
        assert is_down(pool)

    in_virtual_time(1, 1)(scene)


def test_an_endpoint_is_known_to_be_well_for_a_while() -> None:
    clock = FakeClock(now=0.5)
    pool = make_pool(1, clock=clock)
    (member,) = pool.members
    assert not pool.is_well(member)
    pool.record_success(member)
    clock.advance(10.0)
    assert pool.is_well(member)
    clock.advance(0.1)
    assert not pool.is_well(member)


# Retries around endpoints that fail.


def test_a_retry_goes_to_the_one_that_failed_when_no_other_is_in_use() -> None:
    """Else a lone failure would cost its batch the whole pause of the other."""

    async def scene(pool: Pool) -> None:
        out, used = pool.members
        fail(pool, out)
        assert await pool.take_for_retry([used], 60.0) is used

    in_virtual_time(1, 1)(scene)


def test_a_retry_that_waits_for_an_endpoint_which_then_opens_is_served_elsewhere() -> None:
    async def scene(pool: Pool) -> None:
        failed, other = pool.members
        fail(pool, other, times=FAILURES_MAX - 1)
        start_on(pool, other)
        retry = asyncio.create_task(pool.take_for_retry([failed], 60.0))
        await asyncio.sleep(0.1)
        assert not retry.done()
        pool.record_failure(other)
        pool.give_back(other)
        assert await retry is failed

    in_virtual_time(1, 1)(scene)


def test_a_retry_may_be_the_probe() -> None:
    async def scene(pool: Pool) -> None:
        (sick,) = pool.members
        fail(pool, sick)
        assert await pool.take_for_retry([sick], 60.0) is sick
        assert sick.probing
        assert pool.is_down
        pool.give_back(sick)
        pool.record_success(sick)
        assert pool.free() == 1

    in_virtual_time(1)(scene)


def test_a_retry_cancelled_just_as_it_became_the_probe_leaves_it_to_the_next() -> None:
    async def scene(pool: Pool) -> None:
        (sick,) = pool.members
        fail(pool, sick)
        retry = asyncio.create_task(pool.take_for_retry([sick], 60.0))
        loop = asyncio.get_running_loop()
        was_probing: list[bool] = []

        def cancel() -> None:
            was_probing.append(sick.probing)
            retry.cancel()

        # At the very time of the probe, and after it: its timer was set before.
        loop.call_later(sick.breaker.probe_at() - loop.time() + TIMER_S_MIN, cancel)
        await asyncio.wait([retry])
        assert was_probing == [True] and retry.cancelled()
        await asyncio.sleep(0.01)
        assert (sick.breaker.state, sick.offered, sick.in_flight) == ("open", 1, 0)

    in_virtual_time(1)(scene)


def test_a_retry_that_wants_one_that_is_well_waits_for_it() -> None:
    async def scene(pool: Pool) -> None:
        _, unknown, well = pool.members
        pool.record_success(well)
        assert await pool.take_for_retry((), 1.0, known_well=True) is well
        retry = asyncio.create_task(pool.take_for_retry((), 60.0, known_well=True))
        await asyncio.sleep(0.1)
        assert not retry.done()
        start_on(pool, unknown)
        pool.give_back(unknown)
        assert not retry.done()
        pool.give_back(well)
        assert await retry is well

    in_virtual_time(1, 1, 1)(scene)


def test_a_retry_that_wants_one_that_is_well_takes_any_other_when_none_is() -> None:
    async def scene(pool: Pool) -> None:
        failed, other = pool.members
        pool.record_success(failed)
        assert await pool.take_for_retry([failed], 1.0, known_well=True) is other

    in_virtual_time(1, 1)(scene)


# Many endpoints: each of these is asked again and again while a search or a retry waits.

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


def test_a_look_for_a_slot_compares_no_endpoint_with_all_others() -> None:
    pool, well = large_pool()
    wish = EndpointPreference(frozenset(pool.members[:1]), known_well=True)
    found: list[EndpointState | None] = []
    assert looks_of(lambda: found.append(pool.take_at_once(wish))) < 5 * MANY
    assert looks_of(lambda: pool.has_free(wish)) < 5 * MANY
    assert looks_of(lambda: pool.fits(well, wish)) < 5 * MANY
    assert found == [None]
    assert (
        looks_of(lambda: found.append(pool.take_at_once(EndpointPreference(wish.failed, known_well=False)))) < 5 * MANY
    )
    assert found[1] not in (None, pool.members[0])


def test_what_searches_ask_of_the_pool_all_the_time_costs_little() -> None:
    pool, well = large_pool()
    pool.total()
    assert looks_of(lambda: pool.is_alive(0.0)) < 9
    assert looks_of(pool.total) == 0
    assert looks_of(lambda: pool.has_others(well)) < 9
    assert looks_of(pool.free_for_quarantined) < 5 * MANY


async def test_a_freed_slot_is_compared_with_the_wishes_that_wait_and_not_with_all_endpoints_for_each() -> None:
    pool, _ = large_pool()
    unknown = pool.take()
    retries = [
        asyncio.create_task(pool.take_for_retry([failed], 10.0, known_well=True))
        for failed in (*pool.members[:50], *pool.members[:50])
    ]
    await asyncio.sleep(0)
    assert looks_of(lambda: pool.give_back(unknown)) < 10 * len(retries)
    failing = pool.take()
    # The wishes of the second half are those of the first.
    assert looks_of(lambda: pool.record_failure(failing)) < 10 * MANY
    assert not any(retry.done() for retry in retries)
    for retry in retries:
        retry.cancel()
    await asyncio.wait(retries)


# Sick endpoints beside one that is known to be well.


def test_more_than_the_share_is_taken_out_while_another_is_known_to_be_well() -> None:
    async def scene(pool: Pool) -> None:
        *sick, well = pool.members
        pool.record_success(well)
        for member in sick:
            fail(pool, member)
        assert states(pool) == ["open", "open", "open", "closed"]
        fail(pool, well, times=1)
        assert not pool.is_down

    in_virtual_time(1, 1, 1, 1)(scene)


@pytest.mark.parametrize("is_well", [True, False])
def test_the_slot_of_a_batch_that_is_tried_elsewhere_is_not_offered_while_another_is_well(is_well: bool) -> None:
    """Or one that fails at once would be the first to be free each time."""

    async def scene(pool: Pool) -> None:
        sick, other = pool.members
        if is_well:
            pool.record_success(other)
        start_on(pool, sick)
        pool.is_helped(sick)
        pool.give_back(sick)
        assert sick.offered == (1 if is_well else 2)
        pool.help_ended(sick)
        assert sick.offered == 2

    in_virtual_time(2, 1)(scene)


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
    assert pool.doubt(member) == 0.0
    assert not pool.is_well(member) and not pool.has_well(pool.members[1])
    for _ in range(3):
        assert not pool.is_well(member)
        pool.record_success(member)
    assert pool.is_well(member) and pool.has_well(pool.members[1])


@pytest.mark.parametrize("is_well", [True, False])
def test_a_probe_that_is_refused_fails_where_another_is_well(is_well: bool) -> None:
    async def scene(pool: Pool) -> None:
        sick, other = pool.members
        fail(pool, sick)
        await asyncio.sleep(1.0)
        if is_well:
            pool.record_success(other)
        start_on(pool, sick)
        pool.refused(sick)
        pool.give_back(sick)
        await asyncio.sleep(0.01)
        assert sick.offered == (0 if is_well else 1)

    in_virtual_time(1, 1)(scene)


# Limits.


def test_a_lower_limit_withholds_slots_and_a_higher_one_offers_them_again() -> None:
    async def scene(pool: Pool) -> None:
        member = pool.members[0]
        pool.set_limit(member, 2)
        assert (pool.total(), pool.free(), member.offered) == (3, 3, 2)
        start_on(pool, member)
        start_on(pool, member)
        pool.set_limit(member, 1)
        assert (member.offered, member.in_flight) == (0, 2)
        pool.give_back(member)
        assert (member.offered, member.in_flight) == (0, 1)
        pool.set_limit(member, 99)
        assert (member.limit, member.offered) == (4, 3)
        pool.set_limit(member, 0)
        assert (member.limit, member.offered, member.in_flight) == (1, 0, 1)
        pool.give_back(member)
        assert member.offered == 1

    in_virtual_time(4, 1)(scene)


def test_a_higher_limit_serves_a_waiting_retry() -> None:
    async def scene(pool: Pool) -> None:
        (member,) = pool.members
        pool.set_limit(member, 1)
        start_on(pool, member)
        retry = asyncio.create_task(pool.take_for_retry((), 60.0))
        await asyncio.sleep(0)
        pool.set_limit(member, 2)
        assert await retry is member
        assert pool.free() == 0

    in_virtual_time(2)(scene)


def test_a_limit_offers_nothing_of_an_endpoint_that_is_out() -> None:
    async def scene(pool: Pool) -> None:
        sick = pool.members[0]
        fail(pool, sick)
        pool.set_limit(sick, 1)
        pool.set_limit(sick, 3)
        assert sick.offered == 0

    in_virtual_time(3, 1)(scene)


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
        assert (is_down(pool), pool.free()) == (False, 1)  # the probe of the other
        pool.remove(sick.endpoint, lambda: gone.append(sick.name))
        assert (is_down(pool), gone, pool.free(), pool.retry_after_s()) == (True, ["e1", "e0"], 0, 1)

    in_virtual_time(1, 1)(scene)
