"""Slots: each is free, or with exactly one who took it."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.testing import FakeClock, FakeUpstream
from carpool.upstream.endpoint import Endpoint
from carpool.upstream.pool import Pool


def make_pool(*slots: int, clock: FakeClock | None = None) -> Pool:
    return Pool([FakeUpstream(f"e{number}", count) for number, count in enumerate(slots)], clock or FakeClock())


def taken(pool: Pool, count: int) -> list[Endpoint]:
    return [pool.take() for _ in range(count)]


def names(endpoints: list[Endpoint]) -> list[str]:
    return [endpoint.name for endpoint in endpoints]


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
    retried = await pool.take_for_retry(failed, 1.0)
    assert retried is not None and retried.name == "e1"
    assert repr(pool) == "<Pool slots=4 free=3 retries=0>"


async def test_a_single_endpoint_is_tried_again_itself() -> None:
    pool = make_pool(1)
    failed = pool.take()
    pool.give_back(failed)
    assert await pool.take_for_retry(failed, 1.0) is failed


async def test_a_retry_waits_for_the_first_slot_that_it_may_use() -> None:
    pool = make_pool(1, 1)
    rung: list[None] = []
    pool.when_slot_frees(lambda: rung.append(None))
    failed, other = taken(pool, 2)
    pool.give_back(failed)  # free, but it is the one that failed
    waiting = asyncio.create_task(pool.take_for_retry(failed, 10.0))
    await asyncio.sleep(0)
    assert repr(pool) == "<Pool slots=2 free=1 retries=1>"
    pool.give_back(other)
    assert await waiting is other
    assert repr(pool) == "<Pool slots=2 free=1 retries=0>"
    assert len(rung) == 1  # handed over: it was never free


async def test_retries_are_served_in_order() -> None:
    pool = make_pool(1)
    endpoint = pool.take()
    retries = [asyncio.create_task(pool.take_for_retry(endpoint, 10.0)) for _ in range(3)]
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
        assert await pool.take_for_retry(endpoint, 2.5) is None
        assert clock() == 1002.5
        pool.give_back(endpoint)
        assert repr(pool) == "<Pool slots=1 free=1 retries=0>"

    clock.run(main())


async def test_a_cancelled_retry_keeps_no_slot() -> None:
    pool = make_pool(1)
    endpoint = pool.take()
    waits = asyncio.create_task(pool.take_for_retry(endpoint, 10.0))
    await asyncio.sleep(0)
    waits.cancel()
    await asyncio.wait([waits])
    pool.give_back(endpoint)
    assert repr(pool) == "<Pool slots=1 free=1 retries=0>"


async def test_a_retry_cancelled_just_as_it_got_its_slot_gives_it_back() -> None:
    pool = make_pool(1)
    endpoint = pool.take()
    waits = asyncio.create_task(pool.take_for_retry(endpoint, 10.0))
    await asyncio.sleep(0)
    pool.give_back(endpoint)
    waits.cancel()
    await asyncio.wait([waits])
    assert waits.cancelled()
    assert repr(pool) == "<Pool slots=1 free=1 retries=0>"


STEPS = st.sampled_from(["take", "give back", "retry", "cancel", "turn", "second"])


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.lists(st.tuples(STEPS, st.integers(0, 99)), max_size=40),
)
def test_slots_are_conserved(slots: list[int], steps: list[tuple[str, int]]) -> None:
    clock = FakeClock()

    async def main() -> None:
        pool = make_pool(*slots, clock=clock)
        out: list[Endpoint] = []
        retries: list[tuple[Endpoint, asyncio.Task[Endpoint | None]]] = []
        for step, which in steps:
            if step == "take" and pool.free():
                out.append(pool.take())
            elif step == "give back" and out:
                pool.give_back(out.pop(which % len(out)))
            elif step == "retry":
                failed = pool.endpoints[which % len(slots)]
                retries.append((failed, asyncio.create_task(pool.take_for_retry(failed, 1.0 + which % 3))))
            elif step == "cancel" and retries:
                retries[which % len(retries)][1].cancel()
            elif step == "turn":
                await asyncio.sleep(0)
            elif step == "second":
                await asyncio.sleep(1)
            out += collect(retries, pool)
            assert pool.free() + len(out) <= sum(slots)
        await asyncio.sleep(4)
        out += collect(retries, pool)
        assert retries == []
        for endpoint in out:
            pool.give_back(endpoint)
        assert Counter(taken(pool, pool.free())) == Counter({endpoint: endpoint.slots for endpoint in pool.endpoints})

    clock.run(main())


def collect(retries: list[tuple[Endpoint, "asyncio.Task[Endpoint | None]"]], pool: Pool) -> list[Endpoint]:
    """The slots that retries have got, each of an endpoint other than the one that failed, if there is another."""
    got: list[Endpoint] = []
    for entry in [entry for entry in retries if entry[1].done()]:
        failed, retry = entry
        retries.remove(entry)
        if not retry.cancelled():
            endpoint = retry.result()
            if endpoint is not None:
                assert endpoint is not failed or len(pool.endpoints) == 1
                got.append(endpoint)
    return got
