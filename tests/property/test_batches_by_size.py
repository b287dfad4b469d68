"""Batches that are chosen by size: whatever happens nobody is lost, taken twice or passed over for ever."""

import gc
from collections import Counter, deque
from math import inf
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.broker.fair_queue import FairQueue
from carpool.broker.lanes import FIT_MIN, ON_THE_WAY_S, Lane, Ranks
from carpool.broker.memory import MemoryBroker
from carpool.broker.queue_stats import COST_BYTES
from carpool.broker.size_index import SizeIndex, class_of
from carpool.core.errors import ClientLeft
from carpool.core.request import DONE, QUEUED, RUNNING, Request
from carpool.testing import Witness, make_request

OWNERS = "abc"
Step = tuple[str, str | None, int, int | None]
sizes = st.integers(0, 40) | st.integers(0, 5000)
arrival = st.tuples(st.just("arrive"), st.sampled_from(OWNERS), st.integers(0, 7), sizes)
departure = st.tuples(st.just("leave"), st.none(), st.integers(0, 1000), st.none())
take = st.tuples(st.just("take"), st.none(), st.integers(1, 4), st.integers(1, 9000) | st.none())
back = st.tuples(st.just("put back"), st.none(), st.integers(0, 1000), st.integers(1, 3))
quarantine = st.tuples(st.just("quarantine"), st.sampled_from(OWNERS), st.just(0), st.none())
later = st.tuples(st.just("later"), st.none(), st.just(0), st.none())
step = st.one_of(arrival, arrival, arrival, departure, take, take, back, quarantine, later)


@given(st.lists(arrival, min_size=12, max_size=24), st.lists(step, min_size=10, max_size=60))
def test_nobody_is_lost_or_taken_twice_and_no_bound_is_broken(
    first_steps: list[Step],
    steps: list[Step],
) -> None:
    now = 1000.0
    quarantined: set[tuple[str, str]] = set()
    broker = MemoryBroker(
        waiting_max=1000, bytes_max=10**9, lanes_max=8, tiers=2, quarantined=quarantined, clock=lambda: now
    )
    broker.when_work_arrives("m", lambda _: None)
    running: list[Request] = []
    everyone: list[Request] = []
    for number, (what, owner, which, amount) in enumerate([*first_steps, *steps]):
        now += 0.001
        if what == "arrive":
            assert owner is not None and amount is not None
            request = make_request(
                str(number),
                Witness(),
                now=now,
                owner=owner,
                tier=which % 2,
                value=b"x" * amount,
                parameters=b'{"a":1}' if which & 2 else b"",
                target_s=0.1 * (which % 2),
                is_task=which == 7,
                total_timeout_s=0.01 if which == 5 else 10.0,
            )
            assert broker.submit(request) is None
            everyone.append(request)
        elif what == "leave" and (waiting := [each for each in everyone if each.phase == QUEUED]):
            broker.cancel(waiting[which % len(waiting)])
        elif what == "take":
            for lane in broker.lanes("m"):
                batch = broker.take(lane, which, now, inf if amount is None else amount, by_size=True)
                assert len(batch) <= which
                assert amount is None or sum(each.size for each in batch) <= amount or len(batch) == 1
                assert {each.lane_key for each in batch} <= {lane.key}
                assert all(each.phase == RUNNING and each.deadline > now for each in batch)
                assert not {id(each) for each in batch} & {id(each) for each in running}
                running += batch
        elif what == "put back" and running:
            assert amount is not None
            chosen = [running.pop(which % len(running)) for _ in range(min(amount, len(running)))]
            broker.put_back(chosen)
        elif what == "quarantine":
            assert owner is not None
            quarantined ^= {("m", owner)}
        elif what == "later":
            now += 0.02
        waiting = [each for each in everyone if each.phase == QUEUED]
        assert Counter(map(id, broker.waiting_requests())) == Counter(map(id, waiting))
        assert broker.depth == len(waiting)
        assert broker.held == len(waiting) + len(running)
        for tier in range(2):
            for is_task in (False, True):
                own = [each for each in waiting if (each.tier, each.is_task) == (tier, is_task)]
                stats = broker.queue_stats("m", tier, is_task=is_task)
                assert (stats.waiting, stats.owners) == (len(own), len({each.owner for each in own}))
    for _ in range(len(everyone) + 1):
        for lane in broker.lanes("m"):
            running += broker.take(lane, 3, now, by_size=True)
    assert not broker.depth
    assert len({id(each) for each in running}) == len(running)
    assert all(each.phase in (RUNNING, DONE) for each in everyone)


@given(st.lists(sizes, min_size=1, max_size=200), st.integers(1, 8), st.integers(0, 8))
def test_the_first_always_goes_and_who_waits_at_a_batch_in_order_goes_before_the_next(
    given_sizes: list[int], count: int, more: int
) -> None:
    """One owner, so the order is that of arrival; `more` come with each batch."""
    lane, now = Lane("m", b"", Ranks(1)), 0.0
    numbers = iter(range(10**9))

    def arrive(size: int) -> None:
        lane.append(make_request(str(next(numbers)), Witness(), now=now, value=b"x" * size, total_timeout_s=inf))

    for size in given_sizes:
        arrive(size)
    random, in_order_at = Random(1), -inf
    for _ in range(100):
        now += 1.0
        waiting = sorted(lane.requests(), key=lambda each: int(each.id))
        batch, _ = lane.take(count, now, by_size=True)
        assert waiting[:1] == batch[:1]
        assert len(batch) == min(count, len(waiting))
        if lane.is_in_order and len(waiting) >= FIT_MIN * count:
            assert batch == waiting[:count]
            assert waiting[0].arrived > in_order_at - ON_THE_WAY_S
            in_order_at = now
        for _ in range(more):
            arrive(random.choice(given_sizes))


def test_company_is_of_similar_size() -> None:
    lane, random = Lane("m", b"", Ranks(1)), Random(7)
    for number in range(1024):
        size = min(2048, int(240 * random.lognormvariate(0.0, 0.875)))
        lane.append(make_request(str(number), Witness(), now=number / 1000, value=b"x" * size, total_timeout_s=inf))
    in_order, _ = lane.take(64, 2.0, by_size=True)
    assert [each.id for each in in_order] == [str(number) for number in range(64)]
    padded = [
        64 * max(each.size for each in batch) / sum(each.size for each in batch)
        for batch in (lane.take(64, 2.0 + number, by_size=True)[0] for number in range(8))
    ]
    assert max(padded) < 2.5
    assert sum(padded) / len(padded) < 1.5


def test_newcomers_ride_along_however_large_they_are() -> None:
    """An owner with few requests beside a flood: the order prefers it, so it is not passed over."""
    lane = Lane("m", b"", Ranks(1))
    for number in range(64):
        lane.append(make_request(f"flood{number}", Witness(), now=0.0, owner="flood", value=b"x" * 1000))
    lane.take(4, 1.0, by_size=True)  # the first is in order
    for number, size in enumerate((10, 4000)):
        lane.append(make_request(f"few{number}", Witness(), now=1.5, owner="few", value=b"x" * size))
    batch, _ = lane.take(4, 2.0, by_size=True)
    assert {each.id for each in batch if each.owner == "few"} == {"few0", "few1"}


@pytest.mark.parametrize("seed", range(13, 19))
def test_many_owners_of_several_tiers(seed: int) -> None:
    random, now = Random(seed), 0.0
    lane = Lane("m", b"", Ranks(3, strict=seed % 2 == 1, min_share=0.05))
    came = gone = 0
    for _ in range(200):
        now += 0.02
        for _ in range(random.choice((0, 10, 60, 200))):
            came += 1
            size = min(2048, int(240 * random.lognormvariate(0.0, 0.875)))
            request = make_request(
                str(came),
                Witness(),
                now=now,
                owner=str(random.choice((0, random.randint(1, 9), random.randint(1, 300)))),
                tier=random.randint(0, 2),
                value=b"x" * size,
                is_task=random.random() < 0.1,
                target_s=random.choice((0.05, 0.5)),
                total_timeout_s=random.choice((0.3, 60.0)),
            )
            lane.append(request)
        batch, expired = lane.take(random.choice((8, 32)), now, by_size=random.random() < 0.9)
        gone += len(batch) + len(expired)
        assert lane.waiting == came - gone == len(lane.requests())


@pytest.mark.parametrize("strict", [False, True])
def test_each_tier_has_as_many_places_as_in_order(strict: bool) -> None:
    """Requests of odd sizes stay behind and grow old: their tier gains nothing by it."""

    def found(by_size: bool) -> tuple[Counter[int], float]:
        random, lane, batches = Random(3), Lane("m", b"", Ranks(3, strict=strict)), Counter[int]()
        waits, number, now = list[float](), 0, 0.0
        for _ in range(400):
            now += 0.05
            for tier, count in ((0, 4), (1, 4), (2, 56)):
                for _ in range(count + 8 * (number < 64)):
                    number += 1
                    size = min(2048, int(240 * random.lognormvariate(0.0, 0.875)))
                    request = make_request(str(number), Witness(), now=now, tier=tier, value=b"x" * size)
                    request.place = now + (0.05, 0.15, 0.5)[tier]
                    request.deadline = inf
                    lane.append(request)
            for each in lane.take(64, now, by_size=by_size)[0]:
                batches[each.tier] += 1
                if each.tier < 2:
                    waits.append(now - each.arrived)
        return batches, sorted(waits)[int(0.99 * len(waits))]

    (in_order, waits_in_order), (by_size, waits_by_size) = found(False), found(True)
    for tier in range(3):
        assert abs(in_order[tier] - by_size[tier]) <= 0.02 * in_order[tier]
    assert waits_by_size <= 1.2 * waits_in_order + 0.05  # a batch


def test_an_owner_pays_for_what_it_gets_out_of_its_turn() -> None:
    """Two owners who flood, one with inputs of one size, one with all sizes: equal shares of cost, as without sizes."""
    lane, cost = Lane("m", b"", Ranks(1)), Counter[str]()
    for number in range(8000):
        owner, size = ("even", 100) if number % 2 else ("odd", 100 + 37 * number % 4000)
        lane.append(make_request(str(number), Witness(), now=0.0, owner=owner, value=b"x" * size, total_timeout_s=inf))
    for number in range(150):
        for each in lane.take(16, 1.0 + number, by_size=True)[0]:
            cost[each.owner] += COST_BYTES + each.size
    assert 0.95 < cost["even"] / cost["odd"] < 1.05


def batches_until_gone(lane: Lane, wanted: list[Request], by_size: bool) -> int:
    """How many batches leave before the last of some requests has left."""
    for number in range(1000):
        if not any(request.phase == QUEUED for request in wanted):
            return number
        lane.take(64, 10.0 + number, by_size=by_size)
    return 1000


def arrive(lane: Lane, count: int, owner: str, now: float, size: int = 0, *, is_task: bool = False) -> list[Request]:
    """So many come, of all sizes if none is given."""
    random = Random(owner)
    requests = [
        make_request(
            f"{owner}{number}",
            Witness(),
            now=now,
            owner=owner,
            value=b"x" * (size or random.randint(50, 1000)),
            total_timeout_s=inf,
            is_task=is_task,
        )
        for number in range(count)
    ]
    for request in requests:
        lane.append(request)
    return requests


class TestNobodyWaitsForAnothersFlood:
    """What in order leaves with a few batches leaves with about as many where batches are by size."""

    def test_that_came_before(self) -> None:
        def found(by_size: bool) -> int:
            lane = Lane("m", b"", Ranks(1))
            arrive(lane, 8000, "flood", 0.0)
            lane.take(64, 0.5, by_size=by_size)
            few = arrive(lane, 200, "few", 1.0)
            lane.take(64, 1.5, by_size=by_size)
            lane.take(64, 1.6, by_size=by_size)  # one of the two is in order: the few are newcomers no more
            return batches_until_gone(lane, few, by_size)

        assert found(True) <= 1.5 * found(False)

    def test_that_comes_later_and_is_tiny(self) -> None:
        def found(by_size: bool) -> int:
            lane = Lane("m", b"", Ranks(1))
            arrive(lane, 4000, "flood", 0.0)
            few = arrive(lane, 100, "few", 0.0)
            lane.take(64, 0.5, by_size=by_size)
            arrive(lane, 5000, "later", 1.0, size=10)
            return batches_until_gone(lane, few, by_size)

        assert found(True) <= 1.5 * found(False)

    def test_of_tasks(self) -> None:
        def found(by_size: bool) -> int:
            lane = Lane("m", b"", Ranks(1))
            arrive(lane, 8000, "bulk", 0.0, is_task=True)
            for number in range(3):
                lane.take(64, 0.5 + number / 10, by_size=by_size)
            return batches_until_gone(lane, arrive(lane, 600, "few", 1.0), by_size)

        assert found(True) <= 1.5 * found(False)


def test_a_batch_is_of_the_tier_of_its_first_while_that_has_some() -> None:
    lane = Lane("m", b"", Ranks(2, strict=True))
    for number in range(400):
        lane.append(make_request(str(number), Witness(), now=0.0, tier=number % 2, value=b"x" * (100 + number)))
    lane.take(32, 1.0, by_size=True)
    batch, _ = lane.take(32, 1.1, by_size=True)
    assert {each.tier for each in batch} == {0}


def test_clients_who_leave_while_nothing_is_taken_are_forgotten() -> None:
    lane = Lane("m", b"", Ranks(1))
    arrive(lane, 300, "stays", 0.0)
    lane.take(64, 1.0, by_size=True)
    gone = []
    for number in range(2000):
        [request] = arrive(lane, 1, "leaves", 2.0)
        lane.forget(request)
        request.settle(ClientLeft(str(number)), 2.0)
        gone.append(request)
    seen = gc.get_referrers(*gone)
    assert sum(len(each) for each in seen if isinstance(each, deque)) < 4 * lane.waiting


@pytest.mark.parametrize("owners", [1, 2, 5])
@pytest.mark.parametrize("is_moved", [False, True])
def test_what_is_put_back_waits_once(owners: int, is_moved: bool) -> None:
    """Also where it moves to the lane of quarantined owners, and back again."""
    quarantined: set[tuple[str, str]] = set()
    broker = MemoryBroker(
        waiting_max=9000, bytes_max=10**9, lanes_max=8, tiers=1, quarantined=quarantined, clock=lambda: 5.0
    )
    broker.when_work_arrives("m", lambda _: None)
    for number in range(200):
        value = b"x" * (50 + number * 37 % 1000)
        broker.submit(make_request(str(number), Witness(), now=number / 1e6, owner=str(number % owners), value=value))
    seen: list[Request] = []
    for number in range(12):
        if is_moved:
            quarantined ^= {("m", "0")}
        for lane in broker.lanes("m"):
            batch = broker.take(lane, 8, 1.0 + number / 100, by_size=True)
            assert {each.lane_key for each in batch} <= {lane.key}
            seen += batch[4:]
            broker.put_back(batch[:4])
        waiting = [each.id for each in broker.waiting_requests()]
        assert len(set(waiting)) == len(waiting) == broker.depth == 200 - len(seen)
    while broker.depth:
        for lane in broker.lanes("m"):
            seen += broker.take(lane, 8, 2.0, by_size=True)
    assert len({each.id for each in seen}) == len(seen) == 200


def test_what_is_put_back_is_served_next_and_nothing_is_sorted_again() -> None:
    broker = MemoryBroker(waiting_max=9000, bytes_max=10**9, lanes_max=8, tiers=1, clock=lambda: 5.0)
    broker.when_work_arrives("m", lambda _: None)
    for number in range(2000):
        broker.submit(make_request(str(number), Witness(), now=number / 1e6, value=b"x" * (50 + number * 37 % 1000)))
    [lane] = broker.lanes("m")
    assert isinstance(lane, Lane)
    broker.take(lane, 64, 1.0, by_size=True)
    batch = broker.take(lane, 64, 1.1, by_size=True)
    again = {each.id for each in batch[32:]}
    never = AssertionError("it looks at all that waits")
    with patch.object(SizeIndex, "_fill", side_effect=never), patch.object(FairQueue, "rebuild", side_effect=never):
        broker.put_back(batch[32:])
        again -= {each.id for each in broker.take(lane, 1, 1.2, by_size=True)}
    assert len(again) == 31
    assert {each.id for each in broker.take(lane, 31, 1.3)} == again


@given(st.lists(sizes, max_size=100), sizes)
def test_the_nearest_come_first_and_each_once(given_sizes: list[int], size: int) -> None:
    requests = [
        make_request(str(number), Witness(), now=0.0, value=b"x" * each) for number, each in enumerate(given_sizes)
    ]
    for request in requests:
        request.phase = QUEUED
    index = SizeIndex(requests)
    found = list(index.nearest(size))
    assert Counter(map(id, found)) == Counter(map(id, requests))
    distances = [abs(class_of(each.size) - class_of(size)) for each in found]
    assert distances == sorted(distances)
    assert not list(index.nearest(size))


def test_what_is_gone_is_dropped() -> None:
    requests = [make_request(str(number), Witness(), now=0.0) for number in range(1000)]
    index = SizeIndex(requests)  # none of them waits
    index.keep_small(0)
    assert "held=0" in repr(index)


@pytest.mark.parametrize("gone", [1, 20])
def test_who_comes_and_leaves_takes_nothing_from_those_that_wait(gone: int) -> None:
    """The place of one that waited went with each that left: its tier, or its whole lane, was not served any more."""

    def found(by_size: bool) -> int:
        lane, now, number = Lane("m", b"", Ranks(2)), 0.0, 0

        def come(owner: str, tier: int) -> Request:
            nonlocal number
            number += 1
            request = make_request(
                str(number),
                Witness(),
                now=now,
                owner=owner,
                tier=tier,
                target_s=0.05 + 0.45 * tier,
                value=b"x" * (50 + number % 7 * 100),
                total_timeout_s=inf,
            )
            lane.append(request)
            return request

        for _ in range(24):
            come("busy", 0)
        lane.take(8, now, by_size=by_size)
        victim = come("victim", 1)
        for batches in range(200):
            now += 0.1
            for _ in range(8):
                come("busy", 0)
            for _ in range(gone):
                leaving = come("leaves", 1)
                lane.forget(leaving)
                leaving.settle(ClientLeft("left"), now)
            if victim in lane.take(8, now, by_size=by_size)[0]:
                return batches
        return 200

    assert found(True) <= found(False) + 2


@pytest.mark.parametrize("owners", [1, 5])
def test_what_is_put_back_goes_together(owners: int) -> None:
    """Innocents of a batch that was refused: one went with each batch."""
    lane, now, number = Lane("m", b"", Ranks(1)), 0.0, 0
    batch: list[Request] = []
    for count in (96, 32, 32, 32, 32):
        for _ in range(count):
            number += 1
            value = b"x" * (50 + number % 7 * 100)
            lane.append(make_request(str(number), Witness(), now=now, owner=str(number % owners), value=value))
        batch, _ = lane.take(32, now, by_size=True)
        now += 0.2
    for request in batch[1:]:
        lane.put_back(request)
    again, _ = lane.take(32, now, by_size=True)
    assert {each.id for each in batch[1:]} <= {each.id for each in again}
