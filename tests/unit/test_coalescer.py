"""Identical requests are coalesced: the rules of broker/coalescer.py, each with a test."""

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
        door.ask(tier=0)
        door.pass_time(0.2)
        door.ask(tier=2)
        batch = door.take()
        door.pass_time(0.1)
        door.ask(tier=0)  # it comes while the leader runs
        door.pass_time(0.1)
        door.answer(batch)
        door.ask(tier=0)  # its result was kept
        seconds = door.broker.seconds
        assert {tier: sum(each.counts) for tier, each in seconds.by_tier.items()} == {0: 2, 2: 1}
        assert seconds.by_tier[2].total == pytest.approx(0.2)
        assert seconds.by_tier[0].total == pytest.approx(0.4 + 0.1)
        assert sum(door.broker.waited.counts) == 3
        assert door.broker.waited.total == seconds.queue.total == pytest.approx(0.2)

    def test_a_member_that_fails_knows_of_its_batch(self) -> None:
        door = CoalescerStand()
        first, second, late = door.ask(), door.ask(), door.ask(total_timeout_s=0.5)
        [leader] = door.take()
        leader.batch = Batch("b1", "m", 1, "full", door.now, sent=door.now, endpoint="e", attempts=2)
        door.pass_time(0.6)
        door.broker.settle(leader, InputRefused("no"))
        for request in (first, second, late):
            facts = facts_of_failure(door.coalescer.own(request))
            assert facts is not None and (facts.batch_id, facts.endpoint, facts.attempts) == ("b1", "e", 2)

    def test_a_member_whose_caller_asks_has_its_batch_traced(self) -> None:
        door = CoalescerStand()
        asked = Trace(b"1" * 16, b"2" * 8)
        first = door.ask()
        second = door.ask(trace=asked)
        [leader] = door.take()
        assert leader.trace is asked is second.trace
        door.answer([leader])
        assert door.coalescer.own(first).trace is not asked

    def test_other_parameters_or_owners_share_nothing(self) -> None:
        door = CoalescerStand(scope="owner")
        for owner in ("a", "b"):
            for parameters in (b"", b'{"k":1}'):
                door.ask(owner=owner, parameters=parameters)
                door.ask(owner=owner, parameters=parameters)
        assert (door.admitted, door.coalescer.lookups["shared"]) == (4, 4)

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
        """How many leaders wait, by whether they are quarantined."""
        return {lane.is_quarantined: lane.waiting for lane in door.broker.lanes("m")}

    def test_nobody_joins_the_leader_of_one(self, door_of_offenders: CoalescerStand) -> None:
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
        for _ in range(2):  # the one that is quarantined now has moved to a lane of its own
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
        [leader] = [request for request in door.broker.waiting_requests() if request.owner == "good"]
        door.answer([request for request in door.take() if request is leader])
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
    def test_a_better_tier_is_queued_itself_and_later_ones_join_it(self) -> None:
        door = CoalescerStand()
        low, high, between = door.ask(tier=2), door.ask(tier=0), door.ask(tier=1)
        assert door.admitted == 2
        [first] = door.take(1)
        door.answer([first])
        assert (first.tier, door.outcome(high), door.outcome(between)) == (0, b'"x"', b'"x"')
        assert door.outcome(low) is None
        door.answer(door.take())
        assert door.outcome(low) == b'"x"'
        assert (door.coalescer.held, door.coalescer.queued, door.broker.held) == (0, 0, 0)

    def test_an_owner_with_far_less_waiting_is_queued_itself(self) -> None:
        door = CoalescerStand()
        for number in range(40):
            door.ask(b'"%d"' % number, owner="greedy")
        requests = [door.ask(owner=owner) for owner in ("greedy", "modest", "other", "greedy")]
        assert door.admitted == 42
        batch = door.take(2)
        assert (b'"x"', "modest") in [(request.input, request.owner) for request in batch]
        door.answer(batch)
        assert [door.outcome(request) for request in requests] == [None, b'"x"', b'"x"', b'"x"']
        door.answer(door.take())
        assert door.outcome(requests[0]) == b'"x"'

    def test_a_better_one_that_is_refused_joins(self) -> None:
        door = CoalescerStand()
        low = door.ask(tier=2)
        door.refusal = QueueFull("no room")
        high = door.ask(tier=0)
        door.answer(door.take())
        assert door.outcome(low) == door.outcome(high) == b'"x"'

    def test_the_last_that_leaves_takes_its_own_leader_along_only(self) -> None:
        door = CoalescerStand()
        low, joined, high = door.ask(tier=2), door.ask(tier=2), door.ask(tier=0)
        for request in (low, joined):
            door.coalescer.cancel(request)
        assert [request.tier for request in door.take()] == [0]
        assert door.outcome(high) is None

    def test_one_that_has_waited_longer_is_joined(self) -> None:
        door = CoalescerStand()
        door.ask(tier=2)
        door.pass_time(0.48)
        door.ask(tier=0)
        assert [request.tier for request in door.take()] == [2]

    def test_with_strict_order_it_is_not(self) -> None:
        door = CoalescerStand(strict_order=True)
        door.ask(tier=2)
        door.pass_time(0.48)
        door.ask(tier=0)
        assert [request.tier for request in door.take()] == [0, 2]

    def test_one_that_runs_is_joined(self) -> None:
        door = CoalescerStand()
        door.ask(tier=2)
        batch = door.take()
        high = door.ask(tier=0)
        assert door.take() == []
        door.answer(batch)
        assert door.outcome(high) == b'"x"'

    def test_the_leader_has_the_latest_deadline(self) -> None:
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

    def test_who_joined_keeps_the_place_when_the_time_of_the_first_is_over(self) -> None:
        door = CoalescerStand()
        first = door.ask()
        door.pass_time(0.1)
        second, other = door.ask(), door.ask(b'"y"')
        door.pass_time(1.91)
        assert isinstance(door.outcome(first), QueueTimeout)
        assert [request.input for request in door.take(1)] == [b'"x"']
        assert door.outcome(second) is door.outcome(other) is None

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

    def test_who_is_refused_when_sent_again_has_the_refusal(self) -> None:
        door = CoalescerStand()
        requests = [door.ask() for _ in range(3)]
        [leader] = door.take()
        failure, door.refusal = UpstreamFailed("down"), QueueFull("no room")
        door.broker.settle(leader, failure)
        assert [door.outcome(request) for request in requests] == [failure, door.refusal, door.refusal]
        assert door.counts() == {failure.code: 1, QueueFull.code: 2}
        assert (door.coalescer.held, door.coalescer.queued, door.broker.held) == (0, 0, 0)


class TestFarAway:
    def test_a_result_from_elsewhere(self) -> None:
        far = FarAway()
        door = CoalescerStand(far=far)
        door.ask()
        far.answer()
        door.answer(door.take())
        other = CoalescerStand(far=far)
        first, second = other.ask(), other.ask()
        while far.asked:
            far.answer()
        assert other.outcome(first) == other.outcome(second) == b'"x"'
        assert cached(other, first)
        assert other.admitted == 0
        third = other.ask()
        assert other.outcome(third) == b'"x"'
        assert not far.asked
        assert other.counts() == {"ok": 3}
        assert other.coalescer.held == 0

    def test_without_one_a_leader_is_queued_once(self) -> None:
        far = FarAway()
        door = CoalescerStand(far=far)
        requests = [door.ask(), door.ask(owner="other")]
        assert door.admitted == 0
        for _ in range(2):
            far.answer(is_broken=True)
        batch = door.take()
        assert len(batch) == 1
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
            door.coalescer.cancel(request)  # a second time changes nothing
        while far.asked:
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
        while far.asked:
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
        requests = [door.ask(permit=permit) for permit in permits]
        door.broker.settle(door.take()[0], UpstreamFailed("down"))
        door.answer(door.take())
        assert [permit.given_back for permit in permits] == [1, 1, 1]
        assert door.outcome(requests[2]) == b'"x"'
