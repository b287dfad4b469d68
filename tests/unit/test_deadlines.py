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
