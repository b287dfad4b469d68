"""Identical requests share one seat: the rules of broker/coalescer.py, each with a test."""

from typing import Any

import pytest

from carpool.core.batch import Batch
from carpool.core.errors import (
    CarpoolError,
    ClientLeft,
    DeadlineExceeded,
    InputRefused,
    InternalError,
    QueueFull,
    QueueTimeout,
    UpstreamFailed,
)
from carpool.core.outcome import Output
from carpool.core.ports import NO_OPTIONS, RequestOptions
from carpool.core.request import DONE, Request, facts_of_failure
from carpool.core.trace import Trace
from carpool.testing import make_output, make_request
from support.shared_requests import CoalescerStand, FarAway

NO_STORE, NO_CACHE = RequestOptions(no_store=True), RequestOptions(no_cache=True)


def cached(door: CoalescerStand, request: Request) -> bool:
    outcome = door.witness.outcome(request)
    assert isinstance(outcome, Output)
    return outcome.call.cached


class TestSharing:
    def test_each_is_counted_where_its_time_is(self) -> None:
        door = CoalescerStand()
        door.ask(tier=2)
        door.pass_time(0.2)
        door.ask(tier=0)
        batch = door.take()
        door.pass_time(0.1)
        door.ask(tier=0)  # it comes while the seat runs
        door.pass_time(0.1)
        door.answer(batch)
        door.ask(tier=0)  # its result was kept
        seconds = door.broker.seconds
        assert {tier: sum(each.counts) for tier, each in seconds.by_tier.items()} == {0: 2, 2: 1}
        assert seconds.by_tier[2].total == pytest.approx(0.4)
        assert seconds.by_tier[0].total == pytest.approx(0.2 + 0.1)
        assert sum(door.broker.waited.counts) == 3
        assert door.broker.waited.total == seconds.queue.total == pytest.approx(0.2)

    def test_a_member_that_fails_knows_of_its_batch(self) -> None:
        door = CoalescerStand()
        first, second, late = door.ask(), door.ask(), door.ask(total_timeout_s=0.5)
        [seat] = door.take()
        seat.batch = Batch("b1", "m", 1, "full", door.now, sent=door.now, endpoint="e", attempts=2)
        door.pass_time(0.6)
        door.broker.settle(seat, InputRefused("no"))
        for request in (first, second, late):
            facts = facts_of_failure(door.coalescer.own(request))
            assert facts is not None and (facts.batch_id, facts.endpoint, facts.attempts) == ("b1", "e", 2)

    def test_a_member_whose_caller_asks_has_its_batch_traced(self) -> None:
        door = CoalescerStand()
        asked = Trace(b"1" * 16, b"2" * 8)
        first = door.ask()
        second = door.ask(trace=asked)
        [seat] = door.take()
        assert seat.trace is asked is second.trace
        door.answer([seat])
        assert door.coalescer.own(first).trace is not asked

    def test_other_parameters_or_owners_share_nothing(self) -> None:
        door = CoalescerStand(scope="owner")
        for owner in ("a", "b"):
            for parameters in (b"", b'{"k":1}'):
                door.ask(owner=owner, parameters=parameters)
                door.ask(owner=owner, parameters=parameters)
        assert (door.admitted, door.coalescer.shared) == (4, 4)

    def test_members_count_against_the_bounds(self) -> None:
        door = CoalescerStand(waiting_max=3)
        requests = [door.ask() for _ in range(5)]
        assert [isinstance(door.outcome(request), QueueFull) for request in requests] == [False] * 3 + [True] * 2
        door = CoalescerStand(bytes_max=7)
        requests = [door.ask(client_id="you") for _ in range(4)]
        assert [isinstance(door.outcome(request), QueueFull) for request in requests] == [False, False, True, True]


BAD = ("m", "bad")


@pytest.fixture(params=[False, True], ids=["embedded", "far"])
def door_of_offenders(request: pytest.FixtureRequest) -> CoalescerStand:
    """One with nobody far away, or with somebody who never has a result."""
    return CoalescerStand(far=FarAway() if request.param else None, quarantined={("m", "of another input")})


class TestOffenders:
    def ask(self, door: CoalescerStand, **more: Any) -> Request:
        """Others are asked for a result first, where there are any; they have none."""
        asked = door.ask(**more)
        if door.far is not None:
            while door.far.asked:
                door.far.answer(is_broken=True)
        return asked

    def lanes(self, door: CoalescerStand) -> dict[bool, int]:
        """How many seats wait, by whether they are quarantined."""
        return {lane.is_quarantined: lane.waiting for lane in door.broker.lanes("m")}

    def test_nobody_shares_the_seat_of_one(self, door_of_offenders: CoalescerStand) -> None:
        door = door_of_offenders
        door.quarantined.add(BAD)
        self.ask(door, owner="bad")
        self.ask(door, owner="good")
        assert door.admitted == 2
        self.ask(door, owner="other")
        self.ask(door, owner="bad")
        assert door.admitted == 2
        assert self.lanes(door) == {False: 1, True: 1}

    def test_who_is_found_to_be_one_keeps_nobody_waiting(self, door_of_offenders: CoalescerStand) -> None:
        door = door_of_offenders
        bad, good = self.ask(door, owner="bad"), self.ask(door, owner="good")
        door.quarantined.add(BAD)
        door.pass_time(0.01)
        assert "good" in [request.owner for request in door.broker.waiting_requests()]
        door.answer(door.take())
        assert door.outcome(good) == door.outcome(bad) == b'"x"'
        assert (door.coalescer.held, door.coalescer.queued, door.broker.held) == (0, 0, 0)
        assert door.counts() == {"ok": 2}

    def test_nor_one_who_was_found_out_while_it_ran_and_comes_back(self) -> None:
        door = CoalescerStand()
        self.ask(door, owner="bad")
        good = self.ask(door, owner="good")
        batch = door.take()
        door.quarantined.add(BAD)
        door.pass_time(0.01)
        door.broker.put_back(batch)
        door.pass_time(0.01)
        assert [request.owner for request in door.broker.waiting_requests()] == ["good"]
        door.answer(door.take())
        assert door.outcome(good) == b'"x"'

    def test_nor_one_who_was_found_out_while_the_queue_was_full(self) -> None:
        door = CoalescerStand()
        self.ask(door, owner="bad")
        good = self.ask(door, owner="good")
        others = [door.ask(b'"%d"' % number) for number in range(10_000)]
        assert isinstance(door.outcome(others[-1]), QueueFull)
        door.quarantined.add(BAD)
        door.pass_time(0.01)
        door.coalescer.cancel(others[0])
        door.pass_time(0.01)
        assert "good" in [request.owner for request in door.broker.waiting_requests()]
        assert good.phase != DONE


class TestResults:
    def test_no_cache_takes_the_place_of_what_is_kept_here_too(self) -> None:
        """Where others keep results, one that was asked for twice is here as well."""
        far = FarAway()
        door = CoalescerStand(far=far)
        for _ in range(2):
            door.ask()
            far.answer()
            door.answer(door.take())
        assert len(door.results) == 1
        anew = door.ask(options=NO_CACHE)
        (request,) = door.take()
        door.broker.settle(request, make_output(b'"new"'))
        assert door.outcome(anew) == door.outcome(door.ask()) == b'"new"'


class TestPlaceAndDeadline:
    def test_a_better_tier_takes_all_places_along(self) -> None:
        door = CoalescerStand()
        for number in range(40):
            door.ask(b'"%d"' % number, owner="greedy", tier=2)
        requests = [door.ask(owner=owner, tier=tier) for owner, tier in (("greedy", 2), ("modest", 2), ("pays", 0))]
        batch = door.take(2)
        assert (batch[0].input, batch[0].owner) == (b'"x"', "pays")
        door.answer(batch)
        assert [door.outcome(request) for request in requests] == [b'"x"'] * 3
        assert b'"x"' not in [request.input for request in door.take(100)]

    def test_a_seat_that_has_waited_longer_stays(self) -> None:
        door = CoalescerStand()
        door.ask(tier=2)
        door.pass_time(0.48)
        door.ask(tier=0)
        assert [request.tier for request in door.take()] == [2]

    def test_with_strict_order_it_moves(self) -> None:
        door = CoalescerStand(strict_order=True)
        door.ask(tier=2)
        door.pass_time(0.48)
        door.ask(tier=0)
        assert [request.tier for request in door.take()] == [0]

    def test_one_that_runs_stays(self) -> None:
        door = CoalescerStand()
        door.ask(tier=2)
        batch = door.take()
        high = door.ask(tier=0)
        assert door.take() == []
        door.answer(batch)
        assert door.outcome(high) == b'"x"'

    def test_the_seat_has_the_latest_deadline(self) -> None:
        door = CoalescerStand()
        hasty = door.ask(total_timeout_s=0.05)
        patient = door.ask()
        door.pass_time(0.06)
        assert isinstance(door.outcome(hasty), DeadlineExceeded)
        assert door.outcome(patient) is None
        batch = door.take()
        assert len(batch) == 1
        assert batch[0].deadline == patient.deadline
        door.answer(batch)
        assert door.outcome(patient) == b'"x"'

    def test_each_has_its_own_time_in_the_queue(self) -> None:
        door = CoalescerStand()
        first = door.ask()
        door.pass_time(1.0)
        second = door.ask()
        door.pass_time(1.01)
        assert isinstance(door.outcome(first), QueueTimeout)
        assert door.outcome(second) is None
        door.pass_time(1.0)
        assert isinstance(door.outcome(second), QueueTimeout)
        assert door.take() == []
        assert door.counts() == {"queue-timeout": 2}

    def test_who_runs_waits_for_the_deadline(self) -> None:
        door = CoalescerStand()
        first, second = door.ask(), door.ask()
        batch = door.take()
        door.pass_time(3.0)
        assert door.outcome(first) is door.outcome(second) is None
        door.pass_time(1.01)
        assert isinstance(door.outcome(first), DeadlineExceeded)
        assert isinstance(door.outcome(second), DeadlineExceeded)
        assert batch[0].phase == DONE
        assert door.broker.held == 0


class TestLeaving:
    def test_uncached_requests_are_the_queues_alone(self) -> None:
        door = CoalescerStand()
        request = door.ask(options=NO_STORE)
        door.coalescer.cancel(request)
        assert isinstance(door.outcome(request), ClientLeft)


class TestFailures:
    def test_if_the_first_has_left_nobody_has_the_failure(self) -> None:
        door = CoalescerStand()
        requests = [door.ask() for _ in range(2)]
        door.coalescer.cancel(requests[0])
        door.broker.settle(door.take()[0], UpstreamFailed("down"))
        door.answer(door.take())
        assert door.outcome(requests[1]) == b'"x"'


class TestFarAway:
    def test_a_result_from_elsewhere(self) -> None:
        far = FarAway()
        door = CoalescerStand(far=far)
        door.ask()
        far.answer()
        door.answer(door.take())
        other = CoalescerStand(far=far)
        first, second = other.ask(), other.ask()
        assert len(far.asked) == 1
        far.answer()
        assert other.outcome(first) == other.outcome(second) == b'"x"'
        assert cached(other, first)
        assert other.admitted == 0
        third = other.ask()
        assert other.outcome(third) == b'"x"'
        assert not far.asked
        assert other.counts() == {"ok": 3}
        assert other.coalescer.held == 0

    def test_without_one_the_seat_is_queued_once(self) -> None:
        far = FarAway()
        door = CoalescerStand(far=far)
        requests = [door.ask(tier=2), door.ask(tier=0, owner="pays")]
        assert door.admitted == 0
        far.answer(is_broken=True)
        batch = door.take()
        assert [(request.tier, request.owner) for request in batch] == [(0, "pays")]
        door.answer(batch)
        assert [door.outcome(request) for request in requests] == [b'"x"'] * 2
        assert door.counts() == {"ok": 2}
        assert len(far.kept) == 1

    @pytest.mark.parametrize("number", [1, 2])
    def test_all_leave_before_the_answer(self, number: int) -> None:
        far = FarAway()
        door = CoalescerStand(far=far)
        requests = [door.ask() for _ in range(number)]
        for request in requests:
            door.coalescer.cancel(request)
        far.answer()
        assert door.admitted == 0
        assert door.counts() == {"client-left": number}
        assert (door.coalescer.held, door.coalescer.queued) == (0, 0)

    @pytest.mark.parametrize("number", [1, 2])
    def test_a_defect_at_the_door_leaves_nobody_waiting(self, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        far = FarAway()
        door = CoalescerStand(far=far)
        requests = [door.ask() for _ in range(number)]
        accepted: list[CarpoolError | None] = []
        task = make_request("t", door.witness, now=door.now, value=b'"y"', is_task=True)
        door.coalescer.submit(task, NO_OPTIONS, accepted.append)
        monkeypatch.setattr(door.broker, "submit", lambda request: 1 / 0)
        for _ in range(2):
            far.answer()
        assert all(isinstance(door.outcome(request), InternalError) for request in requests)
        assert [type(each) for each in accepted] == [InternalError]
        assert (door.coalescer.held, door.coalescer.queued) == (0, 0)


class Permit:
    """Counts how often it was given back."""

    def __init__(self) -> None:
        self.given_back = 0

    def give_back(self) -> None:
        self.given_back += 1


class TestWhatAMemberBrings:
    def test_each_permit_is_given_back_once(self) -> None:
        door = CoalescerStand()
        permits = [Permit() for _ in range(3)]
        requests = [door.ask(tier=2 - number, permit=permits[number]) for number in range(3)]
        door.broker.settle(door.take()[0], UpstreamFailed("down"))
        door.answer(door.take())
        assert [permit.given_back for permit in permits] == [1, 1, 1]
        assert door.outcome(requests[2]) == b'"x"'
