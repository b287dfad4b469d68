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
from carpool.core.request import DONE, QUEUED, Request, facts_of_failure
from carpool.core.trace import Trace
from carpool.testing import make_output, make_request
from support.shared_requests import CoalescerStand, FarAway

NO_STORE, NO_CACHE = RequestOptions(no_store=True), RequestOptions(no_cache=True)


def cached(door: CoalescerStand, request: Request) -> bool:
    outcome = door.witness.outcome(request)
    assert isinstance(outcome, Output)
    return outcome.call.cached


class TestSharing:
    def test_one_is_sent_and_all_get_its_output(self) -> None:
        door = CoalescerStand()
        requests = [door.ask(b'"a"') for _ in range(5)]
        other = door.ask(b'"b"')
        batch = door.take()
        assert sorted(request.input for request in batch) == [b'"a"', b'"b"']
        door.answer(batch)
        assert [door.outcome(request) for request in requests] == [b'"a"'] * 5
        assert door.outcome(other) == b'"b"'
        assert not any(cached(door, request) for request in requests)
        assert (door.coalescer.misses, door.coalescer.shared, door.coalescer.hits) == (2, 4, 0)
        assert door.counts() == {"ok": 6}
        assert (door.coalescer.held, door.coalescer.held_bytes, door.coalescer.queued, door.broker.held) == (0, 0, 0, 0)

    def test_each_keeps_its_own_times(self) -> None:
        door = CoalescerStand()
        first = door.ask()
        door.pass_time(0.2)
        second = door.ask()
        batch = door.take()
        door.pass_time(0.1)
        third = door.ask()
        door.pass_time(0.1)
        door.answer(batch)
        assert second.taken - second.arrived == 0.0
        assert third.taken == third.arrived  # it came while the seat ran
        assert third.ended - third.arrived == pytest.approx(0.1)
        assert door.outcome(first) == door.outcome(third) == b'"x"'

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
        asked = Trace(b"1" * 16, b"2" * 8, is_sampled=True)
        first = door.ask(trace=Trace(b"3" * 16, b"4" * 8))
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

    def test_owners_share_where_the_scope_is_all(self) -> None:
        door = CoalescerStand()
        door.ask(owner="a")
        door.ask(owner="b")
        assert (door.admitted, door.coalescer.shared) == (1, 1)

    def test_ten_thousand_members_come_and_leave(self) -> None:
        door = CoalescerStand(waiting_max=20_000)
        requests = [door.ask() for _ in range(10_000)]
        for request in requests[::2]:
            door.coalescer.cancel(request)
        assert door.coalescer.held == 5000
        door.answer(door.take())
        assert all(door.outcome(request) == b'"x"' for request in requests[1::2])
        assert all(isinstance(door.outcome(request), ClientLeft) for request in requests[::2])
        assert door.counts() == {"ok": 5000, "client-left": 5000}

    def test_members_count_against_the_bounds(self) -> None:
        door = CoalescerStand(waiting_max=3)
        requests = [door.ask() for _ in range(5)]
        assert [isinstance(door.outcome(request), QueueFull) for request in requests] == [False] * 3 + [True] * 2
        door = CoalescerStand(bytes_max=7)
        requests = [door.ask(client_id="you") for _ in range(4)]
        assert [isinstance(door.outcome(request), QueueFull) for request in requests] == [False, False, True, True]

    @pytest.mark.parametrize("is_far", [False, True], ids=["embedded", "far"])
    def test_one_large_input_that_comes_often_keeps_nobody_out(self, is_far: bool) -> None:
        far = FarAway() if is_far else None
        door = CoalescerStand(far=far, bytes_max=1000)
        large = b'"%b"' % (b"x" * 600)
        requests = [door.ask(large, owner="greedy", parameters=b'{"p":1}') for _ in range(50)]
        while far is not None and far.asked:
            far.answer()
        assert len({(id(request.input), id(request.parameters)) for request in requests}) == 1  # held once
        others = [door.ask(b'"%d"' % (number // 2), owner="modest") for number in range(20)]
        while far is not None and far.asked:
            far.answer()
        door.answer(door.take())
        assert [door.outcome(request) for request in requests] == [large] * 50
        assert [door.outcome(request) for request in others] == [b'"%d"' % (number // 2) for number in range(20)]


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

    def test_nor_does_one_who_is_found_out_when_its_batch_is_taken(self) -> None:
        door = CoalescerStand()
        self.ask(door, owner="bad")
        good = self.ask(door, owner="good")
        door.quarantined.add(BAD)
        assert door.take() == []  # it waits again, apart
        later = self.ask(door, owner="later")
        assert self.lanes(door) == {False: 1}
        door.answer(door.take())
        assert door.outcome(good) == door.outcome(later) == b'"x"'

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

    def test_one_with_a_better_place_takes_no_seat_along(self, door_of_offenders: CoalescerStand) -> None:
        door = door_of_offenders
        door.quarantined.add(BAD)
        good = self.ask(door, owner="good", tier=2)
        bad = self.ask(door, owner="bad", tier=0)
        assert self.lanes(door) == {False: 1}
        door.answer(door.take())
        assert door.outcome(good) == door.outcome(bad) == b'"x"'

    def test_a_failure_leaves_them_no_seat(self, door_of_offenders: CoalescerStand) -> None:
        door = door_of_offenders
        door.quarantined.add(BAD)
        first, bad, good = (self.ask(door, owner=owner) for owner in ("first", "bad", "good"))
        door.broker.settle(door.take()[0], UpstreamFailed("down"))
        assert isinstance(door.outcome(first), UpstreamFailed)
        assert self.lanes(door) == {False: 1}
        door.answer(door.take())
        assert door.outcome(good) == door.outcome(bad) == b'"x"'


class TestResults:
    def test_a_result_that_is_kept_needs_no_seat(self) -> None:
        door = CoalescerStand()
        door.ask()
        door.answer(door.take())
        again = door.ask()
        assert door.outcome(again) == b'"x"'
        assert cached(door, again)
        assert (door.admitted, door.coalescer.hits) == (1, 1)
        assert door.counts() == {"ok": 2}

    def test_it_is_too_old_one_day(self) -> None:
        door = CoalescerStand(ttl_s=10.0)
        door.ask()
        door.answer(door.take())
        door.pass_time(9.9)
        assert door.outcome(door.ask()) is not None
        door.pass_time(0.2)
        assert door.outcome(door.ask()) is None

    def test_errors_are_not_kept(self) -> None:
        door = CoalescerStand()
        door.ask()
        door.broker.settle(door.take()[0], InputRefused("no"))
        assert door.outcome(door.ask()) is None
        assert len(door.results) == 0

    def test_no_store_shares_nothing_and_leaves_nothing(self) -> None:
        door = CoalescerStand()
        door.ask(options=NO_STORE)
        door.ask()
        door.ask(options=NO_STORE)
        batch = door.take()
        assert len(batch) == 3
        door.answer(batch[:1])
        assert len(door.results) == 0
        door.answer(batch[1:])
        assert len(door.results) == 1
        assert door.outcome(door.ask(options=NO_STORE)) is None

    def test_no_cache_is_computed_anew_and_kept(self) -> None:
        door = CoalescerStand()
        door.ask()
        door.answer(door.take())
        anew = door.ask(options=NO_CACHE)
        assert door.outcome(anew) is None
        (request,) = door.take()
        door.broker.settle(request, make_output(b'"new"'))
        assert door.outcome(anew) == b'"new"'
        assert not cached(door, anew)
        assert door.outcome(door.ask()) == b'"new"'

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

    def test_a_hit_asks_nobody_for_admission(self) -> None:
        door = CoalescerStand()
        door.ask()
        door.answer(door.take())
        door.refusal = QueueFull("shed")
        assert door.outcome(door.ask()) == b'"x"'
        assert isinstance(door.outcome(door.ask(b'"y"')), QueueFull)


class TestPlaceAndDeadline:
    @pytest.mark.parametrize("is_far", [False, True], ids=["embedded", "far"])
    def test_nobody_waits_in_the_line_of_an_owner_with_far_more_waiting(self, is_far: bool) -> None:
        far = FarAway() if is_far else None
        door = CoalescerStand(far=far)
        mine = [door.ask(b'"%d"' % number, owner="greedy") for number in range(40)]
        mine.append(door.ask(owner="greedy"))
        while far is not None and far.asked:
            far.answer(is_broken=True)
        for request in mine:
            request.is_over = is_far  # over Redis it stands in a second line then
        others = [door.ask(owner=owner) for owner in ("modest", "modest", "another")]
        batch = door.take(4)
        assert [request.input for request in batch].count(b'"x"') == 1
        door.answer(batch)
        assert [door.outcome(request) for request in (mine[-1], *others)] == [b'"x"'] * 4
        rest = door.take(100)
        assert len(rest) == 40 - 3  # nor is it sent again
        door.answer(rest)
        assert door.counts() == {"ok": 44}
        assert (door.coalescer.held, door.coalescer.queued, door.broker.held) == (0, 0, 0)

    def test_the_first_place_is_kept_as_well(self) -> None:
        door = CoalescerStand()
        mine = [door.ask(owner="greedy")]
        mine += [door.ask(b'"%d"' % number, owner="greedy") for number in range(40)]
        other = door.ask(owner="modest")
        batch = door.take(1)
        assert [request.input for request in batch] == [b'"x"']
        door.answer(batch)
        assert [door.outcome(request) for request in (mine[0], other)] == [b'"x"'] * 2
        assert len(door.take(100)) == 40

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

    def test_a_better_tier_moves_the_seat_up(self) -> None:
        door = CoalescerStand()
        low = door.ask(b'"a"', tier=2)
        door.pass_time(0.01)
        door.ask(b'"b"', tier=1)
        high = door.ask(b'"a"', tier=0, owner="pays")
        (first,) = door.take(1)
        assert (first.input, first.tier, first.owner) == (b'"a"', 0, "pays")
        assert first.place == high.place
        assert [request.input for request in door.take()] == [b'"b"']
        assert door.coalescer.own(low).phase == QUEUED  # what was queued for it was withdrawn, but it waits
        door.answer([first])
        assert door.outcome(low) == door.outcome(high) == b'"a"'
        assert [door.coalescer.own(request).result_code for request in (low, high)] == ["ok", "ok"]
        assert door.counts() == {"ok": 2}
        assert door.coalescer.queued == 0

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
    def test_the_first_leaves_and_the_others_stay(self) -> None:
        door = CoalescerStand()
        first, second = door.ask(), door.ask()
        door.coalescer.cancel(first)
        door.coalescer.cancel(first)
        batch = door.take()
        door.answer(batch)
        assert isinstance(door.outcome(first), ClientLeft)
        assert door.outcome(second) == b'"x"'
        assert door.counts() == {"ok": 1, "client-left": 1}

    def test_the_last_takes_the_seat_along(self) -> None:
        door = CoalescerStand()
        requests = [door.ask() for _ in range(3)]
        for request in requests:
            door.coalescer.cancel(request)
        assert door.take() == []
        assert door.counts() == {"client-left": 3}
        later = door.ask()
        door.answer(door.take())
        assert door.outcome(later) == b'"x"'

    def test_who_is_alone_takes_it_along(self) -> None:
        door = CoalescerStand()
        request = door.ask()
        door.coalescer.cancel(request)
        assert door.take() == []
        assert isinstance(door.outcome(request), ClientLeft)

    def test_uncached_requests_are_the_queues_alone(self) -> None:
        door = CoalescerStand()
        request = door.ask(options=NO_STORE)
        door.coalescer.cancel(request)
        assert isinstance(door.outcome(request), ClientLeft)


class TestFailures:
    def test_an_error_of_the_input_is_everybodys(self) -> None:
        door = CoalescerStand()
        requests = [door.ask() for _ in range(3)]
        door.broker.settle(door.take()[0], InputRefused("no"))
        assert all(isinstance(door.outcome(request), InputRefused) for request in requests)
        assert door.counts() == {InputRefused.code: 3}

    def test_one_that_may_pass_is_the_firsts(self) -> None:
        door = CoalescerStand()
        requests = [door.ask() for _ in range(3)]
        door.broker.settle(door.take()[0], UpstreamFailed("down"))
        assert isinstance(door.outcome(requests[0]), UpstreamFailed)
        (again,) = door.take()
        later = door.ask()
        door.answer([again])
        assert [door.outcome(request) for request in (*requests[1:], later)] == [b'"x"'] * 3
        assert door.counts() == {"ok": 3, UpstreamFailed.code: 1}

    def test_a_second_failure_is_everybodys_who_rode_twice(self) -> None:
        door = CoalescerStand()
        requests = [door.ask() for _ in range(3)]
        door.broker.settle(door.take()[0], UpstreamFailed("down"))
        later = door.ask()
        door.broker.settle(door.take()[0], UpstreamFailed("down"))
        assert all(isinstance(door.outcome(request), UpstreamFailed) for request in requests)
        assert door.outcome(later) is None
        door.broker.settle(door.take()[0], UpstreamFailed("down"))
        assert isinstance(door.outcome(later), UpstreamFailed)
        assert door.take() == []
        assert (door.coalescer.held, door.coalescer.queued, door.broker.held) == (0, 0, 0)

    def test_a_closed_door_is_everybodys(self) -> None:
        door = CoalescerStand()
        requests = [door.ask() for _ in range(3)]
        door.refusal = QueueFull("full")
        door.broker.settle(door.take()[0], UpstreamFailed("down"))
        assert isinstance(door.outcome(requests[0]), UpstreamFailed)
        assert all(isinstance(door.outcome(request), QueueFull) for request in requests[1:])
        assert door.counts() == {UpstreamFailed.code: 1, QueueFull.code: 2}

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
    def test_the_door_is_closed_meanwhile(self, number: int) -> None:
        far = FarAway()
        door = CoalescerStand(far=far)
        requests = [door.ask() for _ in range(number)]
        door.refusal = QueueFull("full")
        far.answer()
        assert all(isinstance(door.outcome(request), QueueFull) for request in requests)
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

    def test_the_deadline_passes_meanwhile(self) -> None:
        far = FarAway()
        door = CoalescerStand(far=far)
        request = door.ask(total_timeout_s=0.01)
        door.pass_time(0.02)
        far.answer()
        assert isinstance(door.outcome(request), DeadlineExceeded)
        assert door.admitted == 0

    def test_a_seat_that_may_run_already_is_queued_twice_and_the_first_result_counts(self) -> None:
        far = FarAway()
        door = CoalescerStand(far=far)
        low = door.ask(tier=2)
        far.answer()
        high = door.ask(tier=0)
        first, second = door.take()
        assert (first.tier, second.tier) == (0, 2)
        door.answer([second])
        assert door.outcome(low) == door.outcome(high) == b'"x"'
        assert first.phase == DONE
        assert door.counts() == {"ok": 2}
        assert (door.coalescer.held, door.coalescer.queued, door.broker.held) == (0, 0, 0)

    def test_the_second_time_it_has_the_latest_deadline(self) -> None:
        """Else the one in whose name it is queued would be blamed for a call that another's deadline cut off."""
        far = FarAway()
        door = CoalescerStand(far=far)
        hasty = door.ask(tier=2, total_timeout_s=0.05)
        far.answer()
        patient = door.ask(tier=0, owner="pays")
        seat = next(request for request in door.take() if request.owner == "pays")
        assert seat.deadline == patient.deadline
        door.pass_time(0.06)
        assert isinstance(door.outcome(hasty), DeadlineExceeded)
        door.answer([seat])
        assert door.outcome(patient) == b'"x"'

    def test_the_seat_expires_with_its_first_and_the_others_get_another(self) -> None:
        far = FarAway()
        door = CoalescerStand(far=far)
        hasty = door.ask(total_timeout_s=0.5, queue_timeout_s=0.5)
        far.answer()
        door.pass_time(0.4)
        patient = door.ask()
        door.pass_time(0.11)
        assert isinstance(door.outcome(hasty), DeadlineExceeded)
        assert door.outcome(patient) is None
        door.answer(door.take())
        assert door.outcome(patient) == b'"x"'


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

    def test_a_deadline_of_ones_own_is_ones_own(self) -> None:
        door = CoalescerStand()
        hasty, patient = door.ask(own_timeout_s=0.05), door.ask()
        door.pass_time(0.06)
        assert isinstance(door.outcome(hasty), DeadlineExceeded)
        door.answer(door.take())
        assert door.outcome(patient) == b'"x"'
