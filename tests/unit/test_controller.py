"""How many calls an endpoint gets, by what is known of its load."""

from itertools import pairwise
from random import Random

import pytest

from carpool.upstream.controller import (
    CALLS,
    CALLS_MIN,
    DECREASE,
    FOUND_MAX,
    PAUSE_S_MAX,
    REPORTED_MIN,
    TRY_AFTER_S,
    TRY_AFTER_S_MAX,
    WINDOW_S,
    Controller,
    ServiceTimes,
    Throughput,
)


def test_a_loaded_endpoint_gets_less_and_then_slowly_more() -> None:
    controller = Controller(20)
    assert controller.limit == 20
    controller.report(0.95)
    assert controller.step(0.0) == 14
    controller.report(0.91)
    assert controller.step(1.0) == 9
    assert repr(controller) == "<Controller 9 of 20>"
    for expected in range(10, 20):
        controller.report(0.5)
        assert controller.step(2.0) == expected  # from 9.8, by a twentieth of the slots a step
    assert controller.step(3.0) == 20
    assert controller.step(4.0) == 20


def answer_many(controller: Controller, count: int, seconds: float, now: float = 0.0, size: int = 64) -> None:
    for _ in range(count):
        controller.answered(size, seconds, now)


def test_calls_that_take_much_longer_than_lately_mean_overload_but_take_half_at_most() -> None:
    controller = Controller(10)
    answer_many(controller, 20, 0.2)
    assert controller.step(0.0) == 10
    answer_many(controller, 20, 0.5)
    assert controller.step(0.0) == 7
    answer_many(controller, 20, 0.5)
    assert controller.step(0.0) == 5
    answer_many(controller, 20, 0.5)
    assert controller.step(0.0) == 5
    answer_many(controller, 20, 0.3)
    assert controller.step(0.0) == 5  # 5.5
    assert controller.step(0.0) == 6


def test_few_slow_calls_hold_the_limit_until_there_are_enough() -> None:
    controller = Controller(10)
    answer_many(controller, 20, 0.2)
    controller.step(0.0)
    answer_many(controller, 20, 0.5)
    assert controller.step(0.0) == 7
    answer_many(controller, CALLS_MIN - 1, 0.5)
    assert [controller.step(0.0) for _ in range(5)] == [7] * 5
    answer_many(controller, 1, 0.5)
    assert controller.step(0.0) == 5


def test_after_a_while_what_was_slow_is_normal() -> None:
    times = ServiceTimes()

    def are_slow(seconds: float, now: float) -> bool | None:
        for _ in range(CALLS_MIN):
            times.add(64, 0, seconds, now)
        return times.verdict()

    assert are_slow(0.2, 0.0) is False
    assert are_slow(1.0, 1.0) is True
    assert are_slow(1.0, WINDOW_S + 1) is True  # the window before still counts
    assert are_slow(1.0, 2 * WINDOW_S + 2) is False
    assert are_slow(0.2, 2 * WINDOW_S + 3) is False
    assert are_slow(1.0, 9 * WINDOW_S) is False  # nothing is known of a night ago


def test_where_load_is_reported_time_does_not_count() -> None:
    controller = Controller(10)
    controller.report(0.5)
    answer_many(controller, 20, 0.2)
    controller.step(0.0)
    answer_many(controller, 20, 2.0)
    assert controller.step(0.0) == 10


# One slot.


def test_the_last_slot_is_lowered_by_pauses() -> None:
    controller = Controller(1)
    assert controller.interval_s == 0.0
    answer_many(controller, 10, 0.2)
    controller.report(0.95)
    assert controller.step(0.0) == pytest.approx(0.7)
    assert controller.interval_s == pytest.approx(0.2 / 0.7)  # busy for 70 % of the time
    assert repr(controller) == "<Controller 0.7 of 1>"
    for _ in range(20):
        controller.report(0.95)
        controller.step(0.0)
    assert controller.limit == REPORTED_MIN
    assert controller.interval_s == pytest.approx(0.2 + PAUSE_S_MAX)
    for _ in range(18):
        controller.report(0.9)
        controller.step(0.0)
    assert (controller.limit, controller.interval_s) == (1, 0.0)


@pytest.mark.parametrize(("slots", "status", "least"), [(1, 429, 1), (1, 503, 1), (8, 429, 1), (8, 503, 8), (8, 0, 8)])
def test_what_refusals_leave(slots: int, status: int, least: float) -> None:
    """One client's inputs may be all that is refused: the others keep a whole slot."""
    controller = Controller(slots)
    controller.failed(status, 0.0)
    assert controller.step(0.0) == max(least, int(slots * DECREASE))
    for _ in range(20):
        controller.failed(status, 0.0)
        controller.step(0.0)
    assert controller.limit == least


def test_slow_calls_do_not_lower_the_last_slot() -> None:
    controller = Controller(1)
    answer_many(controller, 20, 0.2)
    controller.step(0.0)
    answer_many(controller, 20, 2.0)
    assert controller.step(0.0) == 1


# Slots that are found.


class Endpoint:
    """An endpoint under a controller, on a clock of its own. `rates`: inputs a second by how many calls it has."""

    def __init__(self, *rates: float) -> None:
        self.rates = rates
        self.now = 0.0
        self.controller = Controller(None)
        # The slots at each second.
        self.seen: list[int] = []

    def run(self, seconds: float, *, is_crowded: bool = True, load: float | None = None) -> list[int]:
        """Let it have all the calls that it may have; returns the slots at each second."""
        until, seen = self.now + seconds, []
        while self.now < until:
            slots = self.controller.slots
            rate = self.rates[min(slots, len(self.rates)) - 1]
            calls = max(1, round(rate / 64))
            for call in range(calls):
                ended = self.now + (call + 1) / calls
                self.controller.answered(64, slots * 64 / rate, ended - slots * 64 / rate, is_crowded=is_crowded)
            if load is not None:
                self.controller.report(load)
            self.now += 1.0
            self.controller.step(self.now)
            assert abs(self.controller.slots - slots) <= 1
            seen.append(self.controller.slots)
        return seen


def test_a_slot_that_brings_more_is_kept_and_one_that_does_not_is_taken_back() -> None:
    endpoint = Endpoint(640, 1280, 1310)
    seen = endpoint.run(120)
    assert seen[10] == 2 and set(seen) == {1, 2, 3} and seen[-1] == 2
    assert 1 not in seen[seen.index(2) + 20 : seen.index(3)]


def test_slots_that_bring_nothing_are_tried_ever_less_often() -> None:
    endpoint = Endpoint(640)
    seen = endpoint.run(4 * TRY_AFTER_S_MAX)
    assert set(seen) == {1, 2}
    begun = [second for second in range(1, len(seen)) if seen[second - 1 : second + 1] == [1, 2]]
    waits = [later - earlier for earlier, later in pairwise(begun)]
    assert waits == sorted(waits)
    assert TRY_AFTER_S <= waits[0] <= 2 * TRY_AFTER_S
    assert waits[-1] >= TRY_AFTER_S_MAX
    assert seen.count(2) < 0.05 * len(seen)


def test_no_more_than_eight_are_tried_and_one_that_is_not_needed_any_more_is_taken_away() -> None:
    endpoint = Endpoint(*(640 * slots for slots in range(1, 20)))
    seen = endpoint.run(400)
    assert max(seen) == FOUND_MAX
    endpoint.rates = (640, 1280)
    seen = endpoint.run(2000)
    assert seen[-1] in (2, 3) and min(seen) >= 1


def test_a_slot_that_brings_nothing_any_more_is_found_out() -> None:
    endpoint = Endpoint(640, 1280)
    assert endpoint.run(60)[-1] == 2
    endpoint.rates = (640,)
    assert endpoint.run(300)[-1] == 1


def test_under_load_a_slot_that_is_taken_away_on_trial_does_not_come_back_at_once() -> None:
    endpoint = Endpoint(640, 1280)
    controller = endpoint.controller
    while endpoint.run(1) != [2]:
        pass
    while endpoint.run(1) != [1]:
        pass
    controller.report(0.95)
    assert (controller.slots, controller.limit) == (1, 1)
    assert controller.step(endpoint.now) == pytest.approx(0.7)
    assert set(endpoint.run(TRY_AFTER_S - 1)) == {1}
    assert 2 in endpoint.run(60)


def test_without_a_whole_batch_waiting_nothing_is_tried() -> None:
    endpoint = Endpoint(640, 1280)
    assert set(endpoint.run(100, is_crowded=False)) == {1}


def test_a_refusal_takes_the_slot_that_is_tried_back_at_once() -> None:
    endpoint = Endpoint(640, 1280)
    controller = endpoint.controller
    while controller.slots == 1:
        endpoint.run(1)
    controller.failed(503, endpoint.now)
    assert (controller.slots, controller.limit) == (1, 1)
    assert set(endpoint.run(TRY_AFTER_S - 1)) == {1}
    controller.report(0.95)
    assert controller.step(endpoint.now) == pytest.approx(0.7)  # nothing is tried: the endpoint is loaded
    assert 2 in endpoint.run(60)


def test_a_load_over_the_limit_takes_the_slot_that_is_tried_back_and_then_lowers() -> None:
    endpoint = Endpoint(640, 1280)
    while endpoint.controller.slots == 1:
        endpoint.run(1, load=0.85)
    endpoint.run(1, load=0.95)
    assert endpoint.controller.limit == 1
    endpoint.run(1, load=0.95)
    assert endpoint.controller.limit == pytest.approx(0.7)


def test_a_step_during_which_no_whole_batch_waits_is_kept_if_more_was_answered() -> None:
    """One slot was too little, and two are more than enough: the queue is empty while the second one is tried."""
    endpoint = Endpoint(640, 768)
    while endpoint.controller.slots == 1:
        endpoint.run(1)
    assert set(endpoint.run(60, is_crowded=False)) == {2}


def test_enough_calls_are_counted() -> None:
    endpoint = Endpoint(64)  # a call a second
    assert set(endpoint.run(CALLS)) == {1}
    assert 2 in endpoint.run(3)


def test_what_was_answered_with_fewer_slots_is_no_measure_for_a_step() -> None:
    """A second slot brings nothing here, though more is answered than while the endpoint was loaded."""
    controller = Controller(None)
    controller.report(0.95)
    controller.step(0.0)
    seen = []
    for second in range(20):
        calls = int(20 * min(1, controller.limit))
        for call in range(calls):
            controller.answered(8, 0.05, second + call / calls, is_crowded=True)
        controller.report(0.5)
        controller.step(second + 1.0)
        seen.append(controller.slots)
    assert 2 in seen and seen[-1] == 1


def test_batches_of_mixed_sizes_are_not_slow_where_padding_is_paid_for() -> None:
    """Twice as many inputs, the largest of them twice as large, is four times as much work."""
    times, random = ServiceTimes(), Random(1)
    verdicts = []
    for number in range(4000):
        size, largest = random.randint(32, 63), min(2048, int(800 * random.lognormvariate(0.0, 0.5)))
        times.add(size, largest, 0.02 + 10e-6 * size * largest, number / 20)
        if number % CALLS_MIN == CALLS_MIN - 1:
            verdicts.append(times.verdict())
    assert verdicts.count(True) <= 1


def test_a_time_in_which_nothing_waited_is_no_low_throughput() -> None:
    """Bursts with silence between them, two calls at once: a slot that brought much was taken away again."""
    rates = []
    for pause_s in (0.0, 5.0):
        seen, now = Throughput(0.0), 0.0
        for number in range(100):
            now += 0.05 + pause_s * (number % 20 == 0)
            seen.add(64, now, now + 0.1, True)
            seen.add(64, now + 0.01, now + 0.11, True)
        rates.append(seen.rate)
    assert rates[1] == pytest.approx(rates[0], rel=0.25)
