"""Who is due, and when."""

import pytest

from carpool.broker.deadlines import REBUILD_MIN, Deadlines
from carpool.core.errors import ClientLeft
from carpool.core.request import Request
from carpool.testing import Witness, make_request
from support.memory import WatchedRequests


def request(name: str = "r", *, waits_s: float = 1.0, now: float = 0.0) -> Request:
    return make_request(name, Witness(), now=now, queue_timeout_s=waits_s)


def settled(watched: WatchedRequests) -> Request:
    done = watched.make()
    done.settle(ClientLeft(""), 0.0)
    return done


@pytest.fixture
def watched() -> WatchedRequests:
    return WatchedRequests()


def test_each_line_is_due_in_its_own_time() -> None:
    deadlines = Deadlines()
    slow, quick, odd = request("slow", waits_s=10.0), request("quick"), request("odd")
    deadlines.add(slow)
    deadlines.add(quick)
    deadlines.add_unordered(odd, 5.0)
    assert deadlines.due(0.9) == []
    assert deadlines.due(1.0) == [quick]
    assert deadlines.due(7.0) == [odd]
    assert deadlines.due(99.0) == [slow]
    assert deadlines.due(99.0) == []


def test_the_unordered_come_by_time_whatever_the_order_of_adding() -> None:
    deadlines = Deadlines()
    requests = [request(str(number)) for number in range(5)]
    for number in (3, 0, 4, 1, 2):
        deadlines.add_unordered(requests[number], float(number))
    assert deadlines.due(2.0) == requests[:3]


def test_equal_times_do_not_compare_requests() -> None:
    deadlines = Deadlines()
    for _ in range(3):
        deadlines.add_unordered(request(), 1.0)
    assert len(deadlines.due(1.0)) == 3


def test_the_settled_are_not_told(watched: WatchedRequests) -> None:
    deadlines = Deadlines()
    living = request()
    for each in (settled(watched), living, settled(watched)):
        deadlines.add(each)
        deadlines.add_end(each)
        deadlines.add_unordered(each, 1.0)
    del each
    assert deadlines.due(1e9) == [living, living, living]
    assert watched.kept() == 0


def test_the_settled_at_a_head_go_before_their_time(watched: WatchedRequests) -> None:
    deadlines = Deadlines()
    deadlines.add(settled(watched))
    deadlines.add_end(settled(watched))
    deadlines.add_unordered(settled(watched), 600.0)
    assert watched.kept() == 3
    deadlines.due(0.0)
    assert watched.kept() == 0


@pytest.mark.parametrize("ordered", [True, False])
def test_one_that_lasts_does_not_keep_all_the_settled_behind_it(watched: WatchedRequests, ordered: bool) -> None:
    """A task that waits ten minutes must not hold the memory of all that came and went after it."""
    deadlines = Deadlines()

    def add(each: Request) -> None:
        if ordered:
            deadlines.add(each)
        else:
            deadlines.add_unordered(each, 600.0)

    lasts = request(waits_s=2.0, now=598.0)  # as long as the others: in one line with them
    add(lasts)
    most = 0
    for number in range(10 * REBUILD_MIN):
        add(settled(watched))
        if number % 100 == 0:
            assert deadlines.due(1.0) == []
            most = max(most, watched.kept())
    assert most <= REBUILD_MIN + 101
    assert deadlines.due(600.0) == [lasts]


def test_the_living_all_survive_a_clearance(watched: WatchedRequests) -> None:
    deadlines = Deadlines()
    living = [request(str(number), now=float(number)) for number in range(REBUILD_MIN)]
    ending = request(waits_s=3.0)
    deadlines.add_end(ending)
    for number, each in enumerate(living):
        deadlines.add(each)
        deadlines.add(settled(watched))
        deadlines.add_unordered(settled(watched), float(number))
    assert deadlines.due(-1.0) == []
    assert deadlines.due(1e9) == [*living, ending]


def test_at_the_end_it_is_due_once_more() -> None:
    deadlines = Deadlines()
    each = request(waits_s=1.0)
    deadlines.add(each)
    assert deadlines.due(1.0) == [each]
    deadlines.add_end(each)
    assert deadlines.due(each.deadline - 0.1) == []
    assert deadlines.due(each.deadline) == [each]
    assert deadlines.due(1e9) == []
