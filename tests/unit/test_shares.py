"""What an owner has parked at a gateway, and what exceeds its share."""

import pytest

from carpool.broker.queue_stats import SHARE_COST, ParkedShares
from carpool.core.request import Request
from carpool.testing import Witness, make_request


class Stand:
    def __init__(self) -> None:
        self.shares = ParkedShares()
        self.now = 1.0

    def park(self, owner: str, size: int = 0) -> Request:
        request = make_request("r", Witness(), now=self.now, owner=owner)
        request.size = size
        self.shares.park(request)
        return request

    def over(self, requests: list[Request]) -> int:
        return sum(request.is_over for request in requests)


@pytest.fixture
def stand() -> Stand:
    return Stand()


def test_order_is_kept_until_the_last_that_is_over_has_ended(stand: Stand) -> None:
    stand.park("b")
    flood = [stand.park("a") for _ in range(SHARE_COST + 2)]
    for request in flood[: SHARE_COST + 1]:
        stand.shares.release(request)
    assert stand.park("a").is_over  # behind the one that still waits
    stand.shares.release(flood[-1])
    again = stand.park("a")
    assert again.is_over  # behind the one before it


def test_after_the_last_that_is_over_an_owner_begins_anew(stand: Stand) -> None:
    stand.park("b")
    for request in [stand.park("a") for _ in range(2 * SHARE_COST)]:
        stand.shares.release(request)
        assert not request.is_over
    assert not stand.park("a").is_over


def test_it_tells_who_has_how_much(stand: Stand) -> None:
    requests = [stand.park(owner, 4096) for owner in "aab"]
    shares = stand.shares
    assert (shares.waiting, shares.cost, shares.owners, shares.of("a"), shares.of("c")) == (3, 6.0, 2, 2, 0)
    for request in requests:
        shares.release(request)
    assert (shares.waiting, shares.cost, shares.owners, shares.of("a")) == (0, 0.0, 0, 0)
