"""One lane: who goes first, and what is left behind by those who leave."""

import pytest

from carpool.broker.lanes import REBUILD_DEAD_MIN, Lane, Ranks
from carpool.core.errors import ClientLeft
from carpool.core.request import APART, Request
from carpool.testing import Witness, make_request
from support.memory import WatchedRequests

TARGETS_S = (0.05, 0.15, 0.5)
ENTERPRISE, PAID, FREE = range(3)


def waiting(
    lane: Lane, name: str, now: float, tier: int = FREE, total_timeout_s: float = 4.0, *, is_task: bool = False
) -> Request:
    request = make_request(
        name,
        Witness(),
        now=now,
        tier=tier,
        target_s=TARGETS_S[tier],
        total_timeout_s=total_timeout_s,
        is_task=is_task,
    )
    lane.append(request)
    return request


def leave(lane: Lane, request: Request) -> None:
    """What the broker does when a client leaves."""
    lane.forget(request)
    request.settle(ClientLeft("left"), 0.0)


def comes_and_goes(lane: Lane, watched: WatchedRequests) -> None:
    request = watched.make()
    lane.append(request)
    leave(lane, request)


def names(requests: list[Request]) -> list[str]:
    return [request.id for request in requests]


@pytest.fixture
def lane() -> Lane:
    return Lane("m", b"", Ranks(3))


def late(lane: Lane, name: str, now: float, tier: int = FREE, late_s: float = 1.0) -> Request:
    request = make_request(name, Witness(), now=now, tier=tier, target_s=TARGETS_S[tier] + late_s)
    request.is_late = True
    lane.append(request)
    return request


def test_it_is_counted_who_of_those_that_wait_came_in_late() -> None:
    ranks = Ranks(3)
    lane = Lane("m", b"", ranks)
    counted = ranks.stats_by_tier[FREE]
    first, second, _ = (late(lane, name, now) for name, now in (("a", 0.0), ("b", 0.01), ("c", 0.02)))
    waiting(lane, "in time", 0.0)
    assert (counted.waiting, counted.late_of("")) == (4, 3)
    leave(lane, second)
    assert (counted.waiting, counted.late_of("")) == (3, 2)
    assert names(lane.take(2, 0.1)[0]) == ["in time", "a"]
    assert (counted.waiting, counted.late_of("")) == (1, 1)
    lane.put_back(first)
    assert (counted.waiting, counted.late_of("")) == (2, 2)
    assert names(lane.take(9, 0.1)[0]) == ["a", "c"]
    assert (counted.waiting, counted.late_of(""), counted.late) == (0, 0, 0)


def test_strict_order_holds_between_lanes_too() -> None:
    ranks = Ranks(3, strict=True)
    long_waiting, just_come = (Lane("m", parameters, ranks) for parameters in (b"{1}", b"{2}"))
    waiting(long_waiting, "free", 0.0, FREE)
    waiting(just_come, "enterprise", 100.0, ENTERPRISE)
    assert just_come.place() < long_waiting.place()


def test_a_rebuild_leaves_nothing_dead_behind(lane: Lane) -> None:
    left = WatchedRequests()
    for _ in range(REBUILD_DEAD_MIN + 1):
        comes_and_goes(lane, left)
    assert left.kept() == 0
    assert repr(lane) == "<Lane m waiting=0 dead=0>"


def backlog(lane: Lane, tier: int, number: int) -> None:
    for _ in range(number):
        waiting(lane, str(tier), 0.0, tier, total_timeout_s=1e9)


def lowest_of(lanes: list[Lane], batches: int, count: int, now: float = 1.0) -> list[int]:
    """How many of the lowest tier each batch has, the best lane first."""
    found = []
    for _ in range(batches):
        lane = min((lane for lane in lanes if lane.waiting), key=Lane.place)
        found.append(sum(request.tier == FREE for request in lane.take(count, now)[0]))
    return found


def test_the_trickle_is_of_the_whole_model() -> None:
    ranks = Ranks(3, strict=True, min_share=0.05)
    paying, free = (Lane("m", parameters, ranks) for parameters in (b"{1}", b"{2}"))
    backlog(paying, ENTERPRISE, 8000)
    backlog(free, FREE, 8000)
    served = sum(lowest_of([paying, free], 100, 64))
    assert served == pytest.approx(0.05 * 6400, abs=64)  # whole batches: they share no lane with others


def test_what_the_lowest_tier_gets_while_nobody_else_waits_is_not_charged() -> None:
    lane = Lane("m", b"", Ranks(3, strict=True, min_share=0.05))
    backlog(lane, FREE, 2000)
    assert lowest_of([lane], 10, 64) == [64] * 10
    backlog(lane, ENTERPRISE, 1000)
    assert sum(lowest_of([lane], 10, 64)) == pytest.approx(32, abs=2 + 32)
    assert sum(lowest_of([lane], 5, 64)) == pytest.approx(16, abs=2)


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("are_lanes_apart", [False, True])
def test_however_many_tasks_are_old_synchronous_requests_have_their_share(
    is_strict: bool, are_lanes_apart: bool
) -> None:
    ranks = Ranks(3, strict=is_strict)
    lanes = [Lane("m", b"{1}", ranks)]
    lanes += [Lane("m", b"{2}", ranks)] if are_lanes_apart else []
    for _ in range(2000):
        waiting(lanes[0], "task", -100.0, FREE, is_task=True, total_timeout_s=1e9)
    assert lowest_of(lanes, 10, 8) == [8] * 10
    for _ in range(500):
        waiting(lanes[-1], "waits", 0.0, FREE, total_timeout_s=1e9)
    found = []
    for _ in range(50):
        lane = min((lane for lane in lanes if lane.waiting), key=Lane.place)
        found += [request.is_task for request in lane.take(8, 1.0)[0]]
    assert len(found) == 400
    assert found.count(True) == pytest.approx(0.1 * 400, abs=16)


@pytest.mark.parametrize(("strict", "key"), [(False, APART), (True, b"")])
def test_tasks_do_not_pay_for_those_who_may_not_go(strict: bool, key: bytes) -> None:
    """A quarantined request waits, or whose tier is not served: whoever comes later has not saved that up."""
    ranks = Ranks(3, strict)
    lane, other = Lane("m", b"", ranks), Lane("m", key, ranks)
    waiting(other, "stands", 0.0, FREE)
    for number in range(3000):
        waiting(lane, f"task-{number}", 0.0, ENTERPRISE, is_task=True)
    for _ in range(60):
        lane.take(32, 1.0)
    for number in range(3000):
        waiting(lane, f"late-{number}", 2.0, ENTERPRISE)
    taken = [request.is_task for _ in range(40) for request in lane.take(32, 3.0)[0]]
    assert 0.08 * len(taken) <= taken.count(True) <= 0.12 * len(taken)
