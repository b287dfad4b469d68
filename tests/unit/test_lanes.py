"""One lane: who goes first, and what is left behind by those who leave."""

import pytest

from carpool.broker.lanes import REBUILD_DEAD_MIN, Lane
from carpool.core.errors import ClientLeft
from carpool.core.request import RUNNING, Request
from carpool.testing import Witness, make_request
from support.memory import WatchedRequests

TARGETS_S = (0.05, 0.15, 0.5)
ENTERPRISE, PAID, FREE = range(3)


def waiting(lane: Lane, name: str, now: float, tier: int = FREE, total_timeout_s: float = 4.0) -> Request:
    request = make_request(
        name, Witness(), now=now, tier=tier, target_s=TARGETS_S[tier], total_timeout_s=total_timeout_s
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
    return Lane("m", b"", tiers=3)


def test_arrival_order_inside_a_tier(lane: Lane) -> None:
    for number in range(5):
        waiting(lane, str(number), now=number * 0.001)
    assert names(lane.take(3, 1.0)[0]) == ["0", "1", "2"]
    assert names(lane.take(9, 1.0)[0]) == ["3", "4"]


def test_those_who_pay_go_first_and_the_rest_by_place(lane: Lane) -> None:
    waiting(lane, "free", 0.0, FREE)  # place 0.50
    waiting(lane, "paid", 0.1, PAID)  # place 0.25
    waiting(lane, "early", 0.2, ENTERPRISE)  # place 0.25: a tie goes to the higher tier
    waiting(lane, "late", 0.46, ENTERPRISE)  # place 0.51
    assert names(lane.take(4, 1.0)[0]) == ["early", "paid", "free", "late"]


def test_strict_order_lets_the_higher_tier_go_first_however_late_it_comes() -> None:
    lane = Lane("m", b"", tiers=3, strict=True)
    waiting(lane, "free", 0.0, FREE)
    waiting(lane, "paid", 1.0, PAID)
    waiting(lane, "enterprise", 2.0, ENTERPRISE)
    assert names(lane.take(9, 2.0)[0]) == ["enterprise", "paid", "free"]


def test_strict_order_holds_between_lanes_too() -> None:
    long_waiting, just_come = (Lane("m", parameters, tiers=3, strict=True) for parameters in (b"{1}", b"{2}"))
    waiting(long_waiting, "free", 0.0, FREE)
    waiting(just_come, "enterprise", 100.0, ENTERPRISE)
    assert just_come.place() < long_waiting.place()


def test_place_and_oldest_look_at_the_living(lane: Lane) -> None:
    first = waiting(lane, "first", 1.0, FREE)
    waiting(lane, "second", 2.0, FREE)
    third = waiting(lane, "third", 3.0, ENTERPRISE)
    assert (lane.oldest(), lane.place()) == (1.0, 1.5)
    leave(lane, first)
    assert (lane.oldest(), lane.place()) == (2.0, 2.5)
    leave(lane, third)
    assert (lane.oldest(), lane.waiting) == (2.0, 1)
    assert names(lane.take(1, 3.0)[0]) == ["second"]
    assert repr(lane) == "<Lane m waiting=0 dead=0>"


def test_the_expired_are_set_apart_and_do_not_count(lane: Lane) -> None:
    waiting(lane, "over", 0.0, total_timeout_s=1.0)
    waiting(lane, "at the limit", 0.5, total_timeout_s=1.0)
    live = [waiting(lane, name, 0.6, total_timeout_s=9.0) for name in "ab"]
    batch, expired = lane.take(2, now=1.5)
    assert batch == live
    assert names(expired) == ["over", "at the limit"]
    assert lane.waiting == 0
    assert [(request.phase, request.taken) for request in batch] == [(RUNNING, 1.5)] * 2


def test_the_left_are_never_taken(lane: Lane) -> None:
    requests = [waiting(lane, str(number), 0.0) for number in range(6)]
    for request in requests[::2]:
        leave(lane, request)
    assert lane.waiting == 3
    assert names(lane.requests()) == ["1", "3", "5"]
    assert names(lane.take(9, 1.0)[0]) == ["1", "3", "5"]


def test_memory_follows_the_living(lane: Lane) -> None:
    stays = waiting(lane, "stays", 0.0)
    left = WatchedRequests()
    for _ in range(10 * REBUILD_DEAD_MIN):
        comes_and_goes(lane, left)
    assert lane.requests() == [stays]
    assert left.kept() <= REBUILD_DEAD_MIN + 1
    assert repr(lane) == f"<Lane m waiting=1 dead={left.kept()}>"


def test_a_rebuild_leaves_nothing_dead_behind(lane: Lane) -> None:
    left = WatchedRequests()
    for _ in range(REBUILD_DEAD_MIN + 1):
        comes_and_goes(lane, left)
    assert left.kept() == 0
    assert repr(lane) == "<Lane m waiting=0 dead=0>"
