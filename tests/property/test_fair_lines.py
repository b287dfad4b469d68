"""How owners share a line: each keeps its own order, nobody is lost, shares are equal by cost, nobody starves."""

from collections import defaultdict
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from carpool.broker.fair_queue import KEPT_MIN
from carpool.broker.lanes import REBUILD_DEAD_MIN, STRICT_STEP_S, Lane, Ranks
from carpool.broker.queue_stats import COST_BYTES
from carpool.core.errors import ClientLeft
from carpool.core.request import Request
from carpool.testing import Witness, make_request
from support.memory import WatchedRequests

OWNERS = "abcdef"
owners = st.sampled_from(OWNERS)
arrival = st.tuples(st.just("arrive"), owners, st.integers(0, 3), st.integers(0, 9))
departure = st.tuples(st.just("leave"), st.none(), st.integers(0, 1000), st.none())
take = st.tuples(st.just("take"), st.none(), st.integers(0, 9), st.integers(1, 40) | st.none())
back = st.tuples(st.just("put back"), st.none(), st.integers(0, 1000), st.none())
TARGETS_S = (0.1, 0.35)


def cost_of(request: Request) -> float:
    return 1 + request.size / COST_BYTES


@given(st.lists(arrival | departure | take | back, max_size=80))
def test_whatever_happens_nobody_is_lost_and_every_owner_keeps_its_order(
    steps: list[tuple[str, str | None, int, int | None]],
) -> None:
    ranks, now = Ranks(2), 0.0
    lane = Lane("m", b"", ranks)
    waiting: list[Request] = []
    running: list[Request] = []
    put_back: list[Request] = []
    for number, (what, owner, which, amount) in enumerate(steps):
        now += 0.01
        if what == "arrive":
            assert owner is not None and amount is not None
            request = make_request(
                str(number),
                Witness(),
                now=now,
                owner=owner,
                tier=which % 2,
                value=b"x" * amount,
                target_s=TARGETS_S[which % 2],
            )
            request.is_task = which >= 2
            lane.append(request)
            waiting.append(request)
        elif what == "leave" and waiting:
            request = waiting.pop(which % len(waiting))
            lane.forget(request)
            request.settle(ClientLeft(""), now)
        elif what == "take":
            batch, expired = lane.take(which, now, inf if amount is None else amount)
            assert not expired and len(batch) <= which
            assert len({id(request) for request in batch}) == len(batch)
            assert amount is None or sum(r.size for r in batch) <= amount or len(batch) == 1
            for position, request in enumerate(batch):
                waiting.remove(request)  # or it was lost, or came twice
                earlier = [r for r in waiting if same_line(r, request) and r.arrived < request.arrived]
                assert not [r for r in earlier if r.owner == request.owner and r not in batch[position:]]
            for line in {(r.tier, r.is_task) for r in batch if r not in put_back}:
                assert not [r for r in waiting if (r.tier, r.is_task) == line and r in put_back]
            running += batch
        elif what == "put back" and running:
            request = running.pop(which % len(running))
            lane.put_back(request)
            waiting.append(request)
            if not any(same_line(r, request) and r.place <= request.place for r in waiting if r is not request):
                put_back.append(request)
        check(lane, ranks, waiting)
    while waiting:
        batch, _ = lane.take(7, now)
        assert batch
        for request in batch:
            waiting.remove(request)
        check(lane, ranks, waiting)


def same_line(one: Request, other: Request) -> bool:
    return (one.tier, one.is_task) == (other.tier, other.is_task)


def check(lane: Lane, ranks: Ranks, waiting: list[Request]) -> None:
    assert lane.waiting == len(waiting)
    assert lane.waiting_bytes == sum(request.size for request in waiting)
    assert sorted(map(id, lane.requests())) == sorted(map(id, waiting))
    if waiting:
        assert lane.oldest() == min(request.arrived for request in waiting)
        # What is due to synchronous requests goes before tasks, and a lane of tasks behind lanes with such requests.
        is_due = bool(ranks.synchronous.due())
        due = [request for request in waiting if is_due and not request.is_task]
        behind = 0.5 * STRICT_STEP_S if is_due and not due else 0.0
        assert lane.place() == behind + min(request.place for request in due or waiting)
    for index, queue_stats in enumerate(
        ranks.stats_by_tier[: 2 * ranks.tiers]
    ):  # behind them the first ones are told again
        own = [r for r in waiting if r.tier + ranks.tiers * r.is_task == index]
        assert (queue_stats.waiting, queue_stats.owners) == (len(own), len({request.owner for request in own}))
        assert abs(queue_stats.cost - sum(map(cost_of, own))) < 1e-6
        for owner in OWNERS:
            assert queue_stats.of(owner) == sum(request.owner == owner for request in own)


@given(
    st.dictionaries(owners, st.lists(st.integers(0, 60_000), min_size=1, max_size=30), min_size=2),
    st.lists(st.integers(1, 9), min_size=1, max_size=40),
)
def test_owners_with_a_backlog_get_equal_shares_by_cost(sizes: dict[str, list[int]], counts: list[int]) -> None:
    lane = Lane("m", b"", Ranks(1))
    left = dict.fromkeys(sizes, 0)
    for owner, each in sizes.items():
        for size in each:
            request = make_request(owner, Witness(), now=0.0, owner=owner)
            request.size = size
            lane.append(request)
            left[owner] += 1
    largest = 1 + max(size for each in sizes.values() for size in each) / COST_BYTES
    served: defaultdict[str, float] = defaultdict(float)
    for count in counts:
        for request in lane.take(count, 0.0)[0]:
            served[request.owner] += cost_of(request)
            left[request.owner] -= 1
        backlogged = [served[owner] for owner, number in left.items() if number]
        if not backlogged:
            break
        # Whoever still waits has got no less than anybody else, but for one request.
        assert max(served.values()) - min(backlogged) <= largest + 1e-6


@given(st.integers(1, 200), st.integers(1, 64), st.integers(0, 20), st.integers(0, 60_000))
def test_a_flood_does_not_delay_who_has_one(flood: int, batch: int, batches: int, size: int) -> None:
    lane = Lane("m", b"", Ranks(1))
    for _ in range(flood + batch * batches):
        request = make_request("flood", Witness(), now=0.0, owner="a")
        request.size = size
        lane.append(request)
    for _ in range(batches):
        lane.take(batch, 0.0)
    for _ in range(3):  # and again when it comes back
        single = make_request("single", Witness(), now=1.0, owner="b")
        lane.append(single)
        taken = lane.take(batch, 1.0)[0] + lane.take(1, 1.0)[0]
        assert single in taken[: max(batch, 2)]


@given(st.integers(1, 8), st.integers(2, 20), st.integers(1, 40))
def test_nobody_starves_however_many_owners_come(batch: int, others: int, rounds: int) -> None:
    """At more than capacity, with owners that nobody has seen before, an owner still gets its turn."""
    lane, now = Lane("m", b"", Ranks(1)), 0.0
    mine = [make_request("mine", Witness(), now=0.0, owner="me", total_timeout_s=1e9) for _ in range(rounds)]
    for request in mine:
        lane.append(request)
    served, fair = 0, 0.0
    for number in range(others):
        lane.append(make_request("x", Witness(), now=0.0, owner=f"first {number}", total_timeout_s=1e9))
    for step in range(rounds):
        for number in range(batch):
            lane.append(make_request("x", Witness(), now=now, owner=f"{step} {number}", total_timeout_s=1e9))
        now += 1.0
        fair += batch / (others + batch + 1 + served)  # as many wait, for each turn of mine leaves one more
        served += sum(request.owner == "me" for request in lane.take(batch, now)[0])
        assert served >= min(int(fair), rounds) - 1


def test_one_large_request_at_a_time_is_paid_for() -> None:
    """An owner that comes back as soon as it was served does not get more than its share."""
    lane = Lane("m", b"", Ranks(1))
    for _ in range(400):
        lane.append(make_request("small", Witness(), now=0.0, owner="small"))
    served: defaultdict[str, float] = defaultdict(float)
    waits = False
    for _ in range(200):
        if not waits:
            request = make_request("large", Witness(), now=0.0, owner="large")
            request.size = 60 * 1024
            lane.append(request)
            waits = True
        (taken,), _ = lane.take(1, 0.0)
        served[taken.owner] += cost_of(taken)
        waits = taken.owner != "large"
    assert 0.8 < served["large"] / served["small"] < 1.25


@given(st.lists(st.tuples(st.integers(0, 300), st.sampled_from(["stay", "leave", "take"])), max_size=400))
def test_memory_follows_the_living(steps: list[tuple[int, str]]) -> None:
    lane, watched = Lane("m", b"", Ranks(1)), WatchedRequests()
    for number, (owner, what) in enumerate(steps):
        request = watched.make(now=float(number))
        request.owner = str(owner)
        lane.append(request)
        if what == "leave":
            lane.forget(request)
            request.settle(ClientLeft(""), 0.0)
        elif what == "take":
            for taken in lane.take(2, float(number))[0]:
                taken.settle(ClientLeft(""), 0.0)
            del taken
        del request
        assert len(lane.requests()) == lane.waiting
        # The dead, and what the order of arrival still names.
        assert watched.kept() <= 2 * (lane.waiting + REBUILD_DEAD_MIN + 1) + lane.waiting + KEPT_MIN + 1


def test_who_is_left_when_all_the_others_have_left_waits_alone_again() -> None:
    ranks = Ranks(1)
    lane, first = Lane("m", b"", ranks), make_request("first", Witness(), now=0.0, owner="a")
    lane.append(first)
    others = [make_request("x", Witness(), now=0.0, owner="b") for _ in range(REBUILD_DEAD_MIN + 1)]
    for request in others:
        lane.append(request)
    for request in others:
        lane.forget(request)
        request.settle(ClientLeft(""), 0.0)
    check(lane, ranks, [first])
    assert lane.take(1, 0.0)[0] == [first]
    check(lane, ranks, [])
