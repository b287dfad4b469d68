"""Whether anybody asks twice: the rules of broker/asked_twice.py, each with a test, and what becomes of requests."""

from typing import Any
from zlib import crc32

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from carpool.broker.asked_twice import COMMON, TRIAL, TRIAL_S, AskedTwice
from carpool.core.errors import Shed
from carpool.core.ports import NO_OPTIONS
from carpool.core.request import Request
from carpool.testing import Witness, make_request
from support.shared_requests import CoalescerStand, FarAway


def resting(*, is_one_of_many: bool = False) -> AskedTwice:
    asked = AskedTwice(is_one_of_many=is_one_of_many)
    for _ in range(TRIAL):
        asked.kept(0.0)
    return asked


def passes(asked: AskedTwice, number: int, now: float = 1.0, **other: Any) -> bool:
    request = make_request("", Witness(), now=now, value=b"%d" % number, **other)
    passing = asked.passes(request) if now < asked.rests_until else 0
    if passing:
        asked.remember(passing)
    return bool(passing)


class TestRests:
    def test_one_that_comes_again_ends_a_rest(self) -> None:
        asked = resting()
        assert passes(asked, 1) and passes(asked, 2)
        assert not passes(asked, 1) and not passes(asked, 3)

    def test_where_little_comes_there_is_no_rest(self) -> None:
        asked = AskedTwice(is_one_of_many=False)
        for number in range(3 * TRIAL):
            now = 1.01 * TRIAL_S / TRIAL * number
            assert now >= asked.rests_until
            asked.kept(now)

    def test_some_of_what_many_processes_get_never_pass(self) -> None:
        one, other = resting(is_one_of_many=True), resting(is_one_of_many=True)
        stay = [number for number in range(10_000) if not passes(one, number)]
        assert 0.7 / COMMON < len(stay) / 10_000 < 1.3 / COMMON
        assert stay == [number for number in range(10_000) if not passes(other, number)]

    @example(b"0," * 512)
    @given(st.binary(max_size=3000))
    @settings(max_examples=5)
    def test_so_it_is_where_all_inputs_end_alike(self, end: bytes) -> None:
        asked = resting(is_one_of_many=True)
        requests = (make_request("", Witness(), now=1.0, value=b"%d," % number + end) for number in range(2000))
        stay = sum(not asked.passes(request) for request in requests)
        assert 0.3 / COMMON < stay / 2000 < 1.7 / COMMON


class LoadShedder(CoalescerStand):
    """A door through which so much came that nobody asked for twice."""

    def __init__(self, far: FarAway | None = None) -> None:
        super().__init__(far=far)
        self.compute(*(b"%d" % number for number in range(TRIAL)))

    def compute(self, *values: bytes) -> list[Request]:
        """Requests that are answered before more come."""
        requests: list[Request] = []
        for start in range(0, len(values), 500):
            requests += [self.ask(value) for value in values[start : start + 500]]
            while self.far is not None and self.far.asked:
                self.far.answer()
            self.answer(self.take(500))
        return requests


class TestSeats:
    def test_of_three_the_last_finds_a_result(self) -> None:
        door = LoadShedder()
        kept = len(door.results)
        for computed, hits in ((1, 0), (1, 0), (0, 1)):
            before = door.admitted
            [request] = door.compute(b'"again"')
            assert door.outcome(request) == b'"again"'
            assert (door.admitted - before, door.coalescer.lookups["hit"]) == (computed, hits)
        assert len(door.results) == kept + 1
        assert door.coalescer.lookups == {"hit": 1, "miss": TRIAL + 1, "shared": 0, "passed": 1}
        assert door.counts() == {"ok": TRIAL + 3}

    def test_a_retry_of_what_was_refused_asks_for_nothing_twice(self) -> None:
        door = LoadShedder()
        door.refusal = Shed("too much")
        for _ in range(3):
            door.ask(b'"refused"')
        door.refusal = None
        kept = len(door.results)
        door.compute(b'"refused"', b'"another"')
        assert len(door.results) == kept

    @pytest.mark.parametrize("far", [None, FarAway()])
    def test_a_result_that_is_there_is_never_shed(self, far: FarAway | None) -> None:
        door = LoadShedder(far)
        door.refusal = Shed("too much")
        kept, other = b"%d" % (TRIAL - 1), b'"new"'
        if far is not None:  # one that passes
            kept = next(value for value in map(b"%d".__mod__, range(TRIAL)) if crc32(value) % COMMON)
        requests = [door.ask(value) for value in (other, kept, kept, other)]
        while far is not None and far.asked:
            far.answer()
        assert [door.outcome(request) for request in requests] == [door.refusal, kept, kept, door.refusal]
        assert sum(door.coalescer.lookups.values()) == TRIAL + 4
        assert (door.coalescer.held, door.coalescer.held_bytes, door.coalescer.queued) == (0, 0, 0)
        assert door.counts()["ok"] == TRIAL + 2

    def test_what_was_kept_before_is_found_by_the_second(self) -> None:
        door = LoadShedder()
        for hits in (0, 1):
            door.compute(b"%d" % (TRIAL - 1))
            assert door.coalescer.lookups["hit"] == hits

    def test_a_call_that_finds_a_result_is_judged_as_it_is_sent(self) -> None:
        door = LoadShedder()
        kept = b"%d" % (TRIAL - 1)
        requests = [make_request(value.decode(), door.witness, now=door.now, value=value) for value in (kept, b'"new"')]
        needing: list[Request] = []
        door.coalescer.needing(requests, NO_OPTIONS, needing.extend)
        before = door.admitted
        for request in requests:
            assert door.coalescer.ask(request, NO_OPTIONS) is None
        assert door.admitted - before == len(needing) == 1
