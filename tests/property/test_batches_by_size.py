"""Batches that are chosen by size: whatever happens nobody is lost, taken twice or passed over for ever."""

from collections import Counter
from math import inf
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from carpool.broker.lanes import NOT_LARGER, Lane, Ranks
from carpool.broker.memory import MemoryBroker
from carpool.broker.queue_stats import COST_BYTES
from carpool.broker.size_index import SizeIndex, class_of
from carpool.core.request import DONE, QUEUED, RUNNING, Request
from carpool.testing import Witness, make_request

OWNERS = "abc"
sizes = st.integers(0, 40) | st.integers(0, 5000)
arrival = st.tuples(st.just("arrive"), st.sampled_from(OWNERS), st.integers(0, 7), sizes)
departure = st.tuples(st.just("leave"), st.none(), st.integers(0, 1000), st.none())
take = st.tuples(st.just("take"), st.none(), st.integers(1, 4), st.integers(1, 9000) | st.none())
back = st.tuples(st.just("put back"), st.none(), st.integers(0, 1000), st.integers(1, 3))
quarantine = st.tuples(st.just("quarantine"), st.sampled_from(OWNERS), st.just(0), st.none())
later = st.tuples(st.just("later"), st.none(), st.just(0), st.none())
step = st.one_of(arrival, arrival, arrival, departure, take, take, back, quarantine, later)


@given(st.lists(step, max_size=120))
def test_nobody_is_lost_or_taken_twice_and_no_bound_is_broken(
    steps: list[tuple[str, str | None, int, int | None]],
) -> None:
    now = 1000.0
    quarantined: set[tuple[str, str]] = set()
    broker = MemoryBroker(
        waiting_max=1000, bytes_max=10**9, lanes_max=8, tiers=2, quarantined=quarantined, clock=lambda: now
    )
    broker.when_work_arrives("m", lambda _: None)
    running: list[Request] = []
    everyone: list[Request] = []
    for number, (what, owner, which, amount) in enumerate(steps):
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
        if lane.in_order_at == now:
            assert batch == waiting[:count]
            assert waiting[0].arrived > in_order_at
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


def test_newcomers_ride_along_unless_they_are_much_larger() -> None:
    """An owner with few requests beside a flood: the order prefers it, so it is passed over once at most."""
    lane = Lane("m", b"", Ranks(1))
    for number in range(64):
        lane.append(make_request(f"flood{number}", Witness(), now=0.0, owner="flood", value=b"x" * 1000))
    lane.take(4, 1.0, by_size=True)  # the first is in order
    for number, size in enumerate((1000, 10, 1001 * NOT_LARGER)):
        lane.append(make_request(f"few{number}", Witness(), now=1.5, owner="few", value=b"x" * size))
    batch, _ = lane.take(4, 2.0, by_size=True)
    assert {each.id for each in batch if each.owner == "few"} == {"few0", "few1"}
    batch, _ = lane.take(4, 2.1, by_size=True)
    assert "few2" in {each.id for each in batch}


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
