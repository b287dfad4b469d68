"""Requests that were taken and wait again: in front, in the lane where their owner rides now, counted once."""

from carpool.broker.memory import MemoryBroker
from carpool.core.request import DONE, QUEUED, Request
from carpool.testing import FakeClock, Witness, make_output, make_request
from carpool.upstream.quarantine import Quarantine


class Stand:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.quarantined = Quarantine()
        self.witness = Witness()
        self.rung: list[str] = []
        self.broker = MemoryBroker(
            waiting_max=100, bytes_max=10_000, lanes_max=9, tiers=2, quarantined=self.quarantined, clock=self.clock
        )
        self.broker.when_work_arrives("m", lambda lane: self.rung.append("apart" if lane.is_quarantined else "plain"))

    def submit(self, name: str, tier: int = 0, owner: str = "") -> Request:
        request = make_request(name, self.witness, now=self.clock(), tier=tier, owner=owner)
        self.clock.advance(0.001)
        assert self.broker.submit(request) is None
        return request

    def take(self, count: int = 99, apart: bool = False) -> list[str]:
        lanes = [lane for lane in self.broker.lanes("m") if lane.is_quarantined == apart]
        return [request.id for lane in lanes for request in self.broker.take(lane, count, self.clock())]


def test_they_go_before_those_who_came_after_them() -> None:
    stand = Stand()
    first = [stand.submit(name) for name in "abcd"]
    (lane,) = stand.broker.lanes("m")
    taken = stand.broker.take(lane, 4, stand.clock())
    stand.submit("e")
    stand.broker.put_back([taken[2], taken[0]])
    assert [first[n].phase for n in (0, 2)] == [QUEUED, QUEUED]
    assert stand.take() == ["a", "c", "e"]


def test_tiers_keep_their_order() -> None:
    stand = Stand()
    stand.submit("low", tier=1)
    stand.submit("high")
    (lane,) = stand.broker.lanes("m")
    stand.broker.put_back(stand.broker.take(lane, 2, stand.clock()))
    assert sorted(stand.take()) == ["high", "low"]


def test_counts_are_as_before() -> None:
    stand = Stand()
    requests = [stand.submit(name) for name in "ab"]
    (lane,) = stand.broker.lanes("m")
    stand.broker.take(lane, 2, stand.clock())
    assert stand.broker.bytes_running("m") == 6
    stand.broker.put_back(requests)
    assert stand.broker.bytes_running("m") == 0
    assert stand.broker.depth == 2 and lane.waiting_bytes == 6
    stand.broker.cancel(requests[0])
    assert stand.take() == ["b"]
    stand.broker.settle_batch([requests[1]], [make_output(b"1")])
    assert repr(stand.broker) == "<MemoryBroker held=0 bytes=0 waiting=0>"
    assert stand.broker.bytes_running("m") == 0


def test_who_left_stays_gone() -> None:
    stand = Stand()
    request = stand.submit("a")
    assert stand.take() == ["a"]
    stand.broker.cancel(request)
    stand.broker.put_back([request])
    assert request.phase == DONE and stand.broker.depth == 0


def test_one_that_had_its_slot_has_no_queue_timeout_any_more() -> None:
    stand = Stand()
    request = stand.submit("a")
    assert stand.take() == ["a"]
    stand.broker.put_back([request])
    stand.clock.advance(3.0)
    stand.broker.expire(stand.clock())
    assert request.phase == QUEUED
    stand.clock.advance(1.1)
    stand.broker.expire(stand.clock())
    assert request.result_code == "deadline-exceeded"


def test_owners_are_quarantined_also_those_who_waited_already() -> None:
    stand = Stand()
    stand.submit("early", owner="bad")
    stand.submit("good", owner="good")
    stand.quarantined.refused("m", "bad", stand.clock(), 3.0)
    stand.submit("late", owner="bad")
    assert stand.take() == ["good"]
    assert stand.take(apart=True) == ["early", "late"]
    assert stand.rung[-1] == "apart"


def test_what_returned_to_good_rides_with_the_others_again() -> None:
    stand = Stand()
    stand.quarantined.refused("m", "bad", stand.clock(), 3.0)
    request = stand.submit("a", owner="bad")
    assert stand.take(apart=True) == ["a"]
    stand.quarantined.look(stand.clock() + 60.0)
    stand.broker.put_back([request])
    assert stand.take() == ["a"]


def test_offenders_are_known_to_wait_until_their_last_request_is_taken() -> None:
    """Their scores stand still for as long."""
    stand = Stand()
    stand.quarantined.refused("m", "bad", stand.clock(), 3.0)
    for name, owner in (("a", "bad"), ("b", "bad"), ("c", "good")):
        stand.submit(name, owner=owner)
    assert stand.broker.quarantined_owners() == {("m", "bad")}
    assert stand.take(1, apart=True) == ["a"]
    assert stand.broker.quarantined_owners() == {("m", "bad")}
    assert stand.take(1, apart=True) == ["b"]
    assert stand.broker.quarantined_owners() == set()
