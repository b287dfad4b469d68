"""The door: who would wait too long is refused."""

from collections.abc import Sequence
from math import inf, sqrt
from random import Random
from typing import Any

import msgspec
import pytest

from carpool.admission.gate import Gate
from carpool.admission.shedding import (
    GUARD_S,
    RECOUNT_QUIET_S,
    RECOUNT_S,
    LoadShedder,
    Thresholds,
    TierRule,
    pressure,
    too_long,
)
from carpool.composition.shedding import Ticks, learn_share
from carpool.core.errors import Shed
from carpool.core.request import Request
from carpool.testing import FakeClock, Witness, make_request


class Up:
    """Endpoints that work."""

    is_down = is_shut_to_some = False
    probes = 0

    def takes_probe(self, request: Request) -> bool:
        return False

    def is_shut_to(self, owner: str) -> bool:
        return False

    def retry_after_s(self) -> int:
        return 1

    def has_never_worked(self) -> bool:
        return False


class Taken:
    """A queue that takes everything."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def submit(self, request: Request) -> None:
        self.requests.append(request)

    def refusal_of_all(self, requests: Sequence[Request]) -> None:
        return None

    def cancel(self, request: Request) -> None:
        self.requests.remove(request)


TIERS = [TierRule(0.05, 1.0, "enterprise"), TierRule(0.15, 0.5, "paid"), TierRule(0.5, 0.25, "free")]
ENTERPRISE, PAID, FREE = range(3)


class Stands(msgspec.Struct):
    """Who waits, as a test says."""

    waiting: int = 0
    by_owner: dict[str, int] = {}
    late_names: set[str] = set()

    @property
    def cost(self) -> float:
        return self.waiting

    @property
    def owners(self) -> int:
        return len(self.by_owner)

    def of(self, owner: str) -> int:
        return self.by_owner.get(owner, 0)

    def late_of(self, owner: str) -> int:
        return self.of(owner) if owner in self.late_names else 0

    @property
    def late_owners(self) -> int:
        return len(self.late_names)

    @property
    def late(self) -> int:
        return sum(map(self.late_of, self.late_names))

    def set(self, **by_owner: int) -> None:
        self.by_owner, self.waiting = by_owner, sum(by_owner.values())


class Scene:
    """A door over tiers whose waiting the test sets. Capacity is 1,000/s in batches of 8 unless it says otherwise."""

    def __init__(self, capacity: float = 1000.0, thresholds: Thresholds | None = None, min_share: float = 0.05) -> None:
        self.stands = [Stands() for _ in TIERS]
        self.shedder = LoadShedder(TIERS, self.stands, thresholds=thresholds, min_share=min_share)
        self.now = 100.0
        self.learn(capacity)

    def learn(self, capacity: float, batch_s: float = 0.0, batch: float = 8.0) -> None:
        self.shedder.learn([capacity] * 3, [batch] * 3, self.stands, batch_s=batch_s)

    def ask(self, tier: int, owner: str = "somebody") -> Shed | None:
        self.now += RECOUNT_QUIET_S
        return self.shedder.refusal(tier, owner, self.now)


def test_nobody_is_refused_before_the_capacity_is_known() -> None:
    stands = [Stands(waiting=10**6) for _ in TIERS]
    shedder = LoadShedder(TIERS, stands)
    assert all(shedder.refusal(tier, "a", 1.0) is None for tier in range(3))
    assert shedder.predicted_wait_s(FREE) == 0.0


def test_who_would_wait_longer_than_its_tier_may_is_refused() -> None:
    scene = Scene()
    scene.stands[FREE].set(somebody=249)
    assert scene.ask(FREE) is None
    scene.stands[FREE].set(somebody=250)
    refusal = scene.ask(FREE)
    assert refusal is not None
    assert refusal.predicted_wait_ms == 250
    assert refusal.retry_after_s == 1


@pytest.mark.parametrize(
    ("wait_s", "told"),
    [
        (0.0001, (0, 1)),
        (0.9996, (1000, 1)),
        (1.0004, (1000, 1)),
        (1.0006, (1001, 2)),
        (99.0, (99000, 30)),
        (inf, (None, 30)),
    ],
)
def test_retry_after_is_the_predicted_wait_as_it_is_told(wait_s: float, told: tuple[int | None, int]) -> None:
    refusal = too_long(wait_s, "why")
    assert (refusal.predicted_wait_ms, refusal.retry_after_s) == told


class TestBursts:
    """Rule 4. 1,000 a second are served, each call takes 0.2 s, and everybody may wait for 2 s: 1,760 may be ahead."""

    def scene(self, call_s: float = 0.2, burst_rps: float = 1000.0) -> Scene:
        scene = Scene()
        scene.shedder = LoadShedder(TIERS, scene.stands, queue_s=2.0)
        scene.shedder.learn([1000.0] * 3, [8.0] * 3, scene.stands, call_s=call_s, burst_rps=burst_rps)
        return scene

    def comes_in(self, scene: Scene, waiting: int, tier: int = FREE) -> str:
        """How one more of a tier comes in, of which so many wait."""
        scene.stands[tier].set(somebody=waiting)
        if scene.ask(tier) is not None:
            return "not at all"
        return "late" if scene.shedder.is_late else "in time"

    def stand_for(self, scene: Scene, seconds: float, waiting: int = 100) -> None:
        """More wait than a batch takes."""
        scene.stands[FREE].set(somebody=waiting)
        until = scene.now + seconds
        while scene.now < until:
            scene.ask(ENTERPRISE)

    def test_a_burst_comes_in_late(self) -> None:
        scene = self.scene()
        found = [self.comes_in(scene, waiting) for waiting in (0, 249, 250, 1759, 1760, 5000)]
        assert found == ["in time", "in time", "late", "late", "not at all", "not at all"]

    @pytest.mark.parametrize(
        ("seconds", "most"), [(0.0, 1760), (0.9, 1760), (1.5, (1760 + 250) / 2), (2.1, 250), (30, 250)]
    )
    def test_a_queue_that_stands_is_cut(self, seconds: float, most: float) -> None:
        scene = self.scene()
        self.stand_for(scene, seconds)
        assert self.comes_in(scene, round(most) - 120) != "not at all"
        assert self.comes_in(scene, round(most) + 120) == "not at all"

    def test_a_queue_that_one_batch_takes_does_not_stand(self) -> None:
        scene = self.scene()
        self.stand_for(scene, 30, waiting=8)
        assert self.comes_in(scene, 1700) == "late"

    def test_a_queue_stands_until_nobody_was_refused_for_a_second(self) -> None:
        scene = self.scene()
        self.stand_for(scene, 3)
        for _ in range(60):  # it is short because the door cuts it
            assert self.comes_in(scene, 300) == "not at all"
            assert self.comes_in(scene, 0) == "in time"
        scene.now += 0.9
        assert self.comes_in(scene, 0) == "in time"
        assert self.comes_in(scene, 300) == "not at all"
        scene.now += 1.1
        assert self.comes_in(scene, 0) == "in time"
        assert self.comes_in(scene, 300) == "late"

    def test_one_that_comes_in_late_takes_nothing_that_was_promised(self) -> None:
        """Whoever waits is ahead of it, of whatever tier."""
        scene = self.scene()
        scene.stands[FREE].set(somebody=1000)
        assert self.comes_in(scene, 600, PAID) == "late"
        assert self.comes_in(scene, 800, PAID) == "not at all"

    def test_while_it_waits_its_owner_comes_in_late_too_or_not_at_all(self) -> None:
        scene = self.scene()
        scene.stands[FREE].set(somebody=300, another=100)
        scene.stands[FREE].late_names = {"somebody"}
        for owner, is_late in (("somebody", True), ("another", False), ("a third", False)):
            assert scene.ask(FREE, owner) is None
            assert scene.shedder.is_late == is_late
        scene.stands[FREE].late_names = set()
        self.stand_for(scene, 3)
        scene.stands[FREE].set(somebody=300)
        scene.stands[FREE].late_names = {"somebody"}
        assert scene.ask(FREE) is not None
        assert scene.ask(FREE, "another") is None
        scene.stands[FREE].late_names = set()
        scene.stands[FREE].set(somebody=100)
        assert scene.ask(FREE) is None
        assert not scene.shedder.is_late

    def test_its_owner_comes_in_behind_it_or_not_at_all(self) -> None:
        """Else what it sends later would go before it, and it would wait until its time is over."""
        scene = self.scene()
        scene.stands[FREE].late_names = {"somebody"}
        self.stand_for(scene, 0.5)
        assert self.comes_in(scene, 100) == "late"
        self.stand_for(scene, 3)
        assert [self.comes_in(scene, waiting) for waiting in (20, 0)] == ["not at all", "in time"]

    def test_it_is_ahead_of_lower_tiers_alone(self) -> None:
        scene = self.scene()
        scene.stands[PAID].set(somebody=400)
        scene.stands[PAID].late_names = {"somebody"}
        self.stand_for(scene, 3, waiting=0)
        assert scene.ask(ENTERPRISE) is None
        assert scene.ask(PAID, "another") is None
        scene.stands[FREE].set(another=20)  # more than its minimum share
        assert scene.ask(FREE, "another") is not None

    def test_others_of_its_tier_come_in_time_by_their_share_of_the_owners(self) -> None:
        """Else those who come later, each of another owner, would go before it until its time is over."""
        let_in: list[int] = []
        for late in (1, 199):
            scene = self.scene()
            self.stand_for(scene, 3)
            many = {f"late{number}": 200 // late for number in range(late)}
            scene.stands[FREE].set(**many)
            scene.stands[FREE].late_names = set(many)
            asked = [scene.shedder.refusal(FREE, "new", scene.now + 1 + number / 1000) for number in range(1000)]
            in_time = sum(refusal is None for refusal in asked)
            let_in.append(0 if scene.shedder.is_late else in_time)
        assert let_in == [pytest.approx(500 + 125, rel=0.1), pytest.approx(5, abs=5)]

    def test_a_call_of_many_does_not_push_it_out(self) -> None:
        scene = self.scene()
        scene.stands[FREE].set(somebody=1600)
        scene.stands[FREE].late_names = {"somebody"}
        scene.now += 1
        for owner, count, is_late in (("few", 100, False), ("many", 140, True)):
            assert scene.shedder.refusal_of_all(FREE, owner, scene.now, count, 2.0) is None
            assert scene.shedder.is_late == is_late
        assert scene.shedder.refusal_of_all(FREE, "more", scene.now + 0.01, 500, 2.0) is not None

    def test_what_was_counted_while_it_waited_is_not_held_against_those_with_deadlines(self) -> None:
        """They are asked about first; nothing else may count anew."""
        scene = self.scene()
        scene.stands[FREE].set(somebody=900)
        scene.stands[FREE].late_names = {"somebody"}
        scene.ask(FREE)
        scene.stands[FREE].set()
        assert scene.shedder.refusal_by_deadline(FREE, "somebody", scene.now + 10, 0.3) is None

    def test_higher_tiers_do_not_wait_for_it(self) -> None:
        scene = self.scene()
        for _ in range(20):
            scene.shedder.waited(FREE, 0.6)
        scene.stands[FREE].set(somebody=900, another=100)
        scene.stands[FREE].late_names = {"somebody"}
        scene.ask(ENTERPRISE)
        assert scene.shedder.predicted_wait_s(ENTERPRISE) < 0.1

    def test_nor_do_others_of_its_tier(self) -> None:
        scene = self.scene()
        self.stand_for(scene, 3)
        scene.stands[FREE].set(flood=1000, **{f"other{number}": 8 for number in range(9)})
        scene.stands[FREE].late_names = {"flood"}
        assert [scene.ask(FREE, f"other{number}") for number in range(9)] == [None] * 9
        assert scene.ask(FREE, "flood") is not None

    def test_what_higher_tiers_bring_meanwhile_is_left_for_them(self) -> None:
        scene = self.scene()
        for _ in range(100):
            for _ in range(40):
                scene.shedder.refusal(PAID, "p", scene.now)
            scene.now += 0.1
            scene.shedder.tick(0.1, scene.now)
        brought = 400 * 1.76
        most = round(1760 - brought - 3 * sqrt(brought))
        assert [self.comes_in(scene, waiting) for waiting in (most - 20, most + 20)] == ["late", "not at all"]

    def test_so_is_what_others_of_its_tier_bring_who_go_before_it(self) -> None:
        """They have little waiting, and come in time."""
        scene = self.scene()
        for _ in range(100):
            for number in range(40):
                assert scene.shedder.refusal(FREE, f"owner{number}", scene.now) is None
            scene.now += 0.1
            scene.shedder.tick(0.1, scene.now)
        assert self.comes_in(scene, 0) == "in time"
        brought = 400 * 1.76
        most = round(1760 - brought - 3 * sqrt(brought))
        for waiting, is_let_in in ((most - 30, True), (most + 30, False)):
            scene.stands[FREE].set(somebody=waiting, **{f"owner{number}": 0 for number in range(9)})
            assert (scene.ask(FREE) is None) == is_let_in

    def test_but_half_is_left_for_a_burst_of_those_who_always_come(self) -> None:
        scene = self.scene()
        for _ in range(100):
            for _ in range(80):
                assert scene.shedder.refusal(FREE, "somebody", scene.now) is None
            scene.now += 0.1
            scene.shedder.tick(0.1, scene.now)
        brought = 500 * 1.76
        most = round(1760 - brought - 3 * sqrt(brought))
        assert [self.comes_in(scene, waiting) for waiting in (most - 20, most + 20)] == ["late", "not at all"]

    @pytest.mark.parametrize("others", [[0.0, 400.0, 0.0], [0.0, 0.0, 400.0]], ids=["higher", "its own"])
    def test_and_what_its_tier_and_higher_ones_bring_to_other_gateways(self, others: list[float]) -> None:
        scene = self.scene()
        learn_share(scene.shedder, 1000.0, 8.0, others, scene.stands, 0.2, 2)
        brought = 200 * 1.76  # the half of it, as this one counts on the half of what can be served
        most = round(880 + 500 * 0.2 - brought - 3 * sqrt(brought))  # and what runs
        assert [self.comes_in(scene, waiting) for waiting in (most - 20, most + 20)] == ["late", "not at all"]

    def test_one_with_a_deadline_of_its_own_does_not_come_in_late_for_nothing(self) -> None:
        scene = self.scene()
        for _ in range(100):
            for _ in range(40):
                scene.shedder.refusal(PAID, "p", scene.now)
            scene.now += 0.1
            scene.shedder.tick(0.1, scene.now)
        scene.stands[FREE].set(somebody=300)
        scene.ask(FREE)
        assert scene.shedder.refusal_by_deadline(FREE, "somebody", scene.now, 0.5) is not None
        assert scene.shedder.refusal_by_deadline(FREE, "somebody", scene.now, 1.0) is None

    def test_a_client_that_waits_for_less_than_a_call_takes_is_told_so_in_words_that_make_sense(self) -> None:
        scene = self.scene()
        scene.stands[FREE].set(somebody=300)
        refusal = scene.shedder.refusal_by_deadline(FREE, "another", scene.now, -0.1)
        assert refusal is not None
        assert "within 0 ms" in refusal.detail

    def test_a_rate_is_known_at_once(self) -> None:
        scene = self.scene()
        scene.shedder.tick(0.1, scene.now)
        for _ in range(50):
            scene.shedder.refusal(PAID, "p", scene.now)
        assert self.comes_in(scene, 1759) == "not at all"

    def test_a_call_that_takes_as_long_as_requests_may_wait_leaves_the_tiers_limit(self) -> None:
        scene = self.scene(call_s=3.0)
        assert [self.comes_in(scene, waiting) for waiting in (249, 250)] == ["in time", "not at all"]

    def test_of_many_gateways_each_has_an_equal_part(self) -> None:
        scene = self.scene()
        learn_share(scene.shedder, 1000.0, 8.0, [0.0] * 3, scene.stands, 0.2, 4)
        # 440 may wait; 50 run.
        assert [self.comes_in(scene, waiting) for waiting in (440, 460, 480, 500)] == [
            "in time",
            "late",
            "late",
            "not at all",
        ]
        learn_share(scene.shedder, 1000.0, 8.0, [0.0] * 3, scene.stands, 0.2, 2)
        assert [self.comes_in(scene, waiting) for waiting in (460, 970, 990)] == ["late", "late", "not at all"]

    def test_it_has_a_later_place(self) -> None:
        scene = self.scene()
        taken = Taken()
        nothing: Any = None
        gate = Gate(taken, nothing, {"m": Up()}, lowest_tier=2, shedders={"m": scene.shedder})
        for waiting, is_late in ((300, True), (0, False)):
            scene.stands[FREE].set(**{"": waiting})
            scene.now += RECOUNT_QUIET_S
            single, *others = (make_request(name, Witness(), now=scene.now, tier=FREE) for name in "abc")
            assert gate.judge_all(others) is None
            for request in (single, *others):
                assert gate.admit(request) is None
                assert request.is_late == is_late
                assert request.place == pytest.approx(request.arrived + 0.05 + 2.0 * is_late)
        assert len(taken.requests) == 6

    def test_a_refusal_names_limit_tier_and_setting(self) -> None:
        scene = self.scene()
        self.stand_for(scene, 3)
        scene.stands[FREE].set(somebody=300)
        refusal = scene.ask(FREE)
        assert refusal is not None
        assert refusal.predicted_wait_ms == 300
        assert "300 ms or more, and one of tier free may wait for 250 ms now (its `wait_max_ms` is 250)" in str(refusal)

    def test_until_a_call_has_ended_it_needs_twice_what_it_has_needed_so_far(self) -> None:
        stands, since = [Stands() for _ in TIERS], [inf]
        shedder = LoadShedder(TIERS, stands, queue_s=2.0)
        shedder.suppose(lambda: (64.0, since[0]), stands)
        stands[FREE].set(somebody=10_000)
        assert shedder.refusal(FREE, "somebody", 10.0) is None, "no call runs: nothing is known"
        since[0] = 10.0
        for waiting, age_s, is_let_in in ((1000, 0.05, True), (1000, 0.2, False), (200, 0.21, True), (200, 0.5, False)):
            stands[FREE].set(somebody=waiting)
            assert (shedder.refusal(FREE, "somebody", 10.0 + age_s) is None) == is_let_in
        since[0] = inf
        assert shedder.refusal(FREE, "somebody", 11.0) is None, "it has failed: nothing is known again"


def test_the_lowest_tier_goes_first_then_the_next() -> None:
    scene = Scene()
    scene.stands[FREE].set(somebody=400)
    assert [scene.ask(tier) is None for tier in range(3)] == [True, True, False]
    scene.stands[PAID].set(somebody=600)
    assert [scene.ask(tier) is None for tier in range(3)] == [True, False, False]
    scene.stands[ENTERPRISE].set(somebody=1001)
    assert [scene.ask(tier) is None for tier in range(3)] == [False, False, False]


def test_admissions_between_two_counts_take_places() -> None:
    scene = Scene()
    scene.stands[PAID].set(somebody=100)
    scene.stands[FREE].set(**{f"owner{number}": 1 for number in range(140)})
    scene.ask(ENTERPRISE)
    admitted = 0
    while scene.shedder.refusal(FREE, f"another{admitted}", scene.now) is None:
        admitted += 1
        scene.stands[FREE].by_owner[f"another{admitted}"] = 1
    assert admitted == 9  # with enterprise's ten: 250 may be ahead
    assert scene.shedder.refusal(PAID, "somebody", scene.now) is None


def test_a_count_with_much_room_may_be_older_but_refuses_nobody() -> None:
    """250 may wait. Nobody does: whoever came in was served at once."""
    scene = Scene()
    scene.ask(FREE)
    scene.now += RECOUNT_S
    assert all(scene.shedder.refusal(FREE, "somebody", scene.now) is None for _ in range(300))
    scene.stands[FREE].set(somebody=240)
    scene.ask(FREE)
    scene.stands[FREE].set(somebody=250)
    scene.now += RECOUNT_S
    assert scene.shedder.refusal(FREE, "somebody", scene.now) is not None, "with little room it is counted anew soon"


def test_what_overtakes_counts() -> None:
    """While enterprise and paid have 600/s, a free request has 400/s left, or less when more of them come."""
    scene = Scene()
    for _ in range(60):
        for tier, count in ((ENTERPRISE, 10), (PAID, 50)):
            for _ in range(count):
                scene.ask(tier)
        scene.shedder.tick(0.1, scene.now)
    by_chance = 3 * sqrt(0.25 * 600)
    scene.stands[FREE].set(somebody=round(95 - by_chance))
    assert scene.ask(FREE) is None
    scene.stands[FREE].set(somebody=round(105 - by_chance))
    assert scene.ask(FREE) is not None


def test_the_lowest_tier_has_room_for_a_trickle() -> None:
    scene = Scene()
    scene.stands[PAID].set(somebody=450)
    scene.stands[FREE].set(somebody=12)
    assert scene.ask(FREE) is None  # 5 % of 250
    scene.stands[FREE].set(somebody=13)
    assert scene.ask(FREE) is not None
    without = Scene(min_share=0.0)
    without.stands[PAID].set(somebody=450)
    assert without.ask(FREE) is not None


def test_an_owner_with_little_comes_in_beside_one_with_much() -> None:
    scene = Scene()
    scene.stands[FREE].set(flood=400)
    assert scene.ask(FREE, "flood") is not None
    assert scene.ask(FREE, "other") is None
    scene.stands[FREE].set(flood=400, other=130)
    assert scene.ask(FREE, "other") is not None, "its own wait is too long now"


def test_many_owners_are_as_bad_as_one() -> None:
    scene = Scene()
    scene.stands[FREE].set(**{f"owner{number}": 1 for number in range(260)})
    assert scene.ask(FREE, "another") is not None


def test_one_batch_may_always_wait() -> None:
    """A slow model: a batch of 8 takes 10 s. The slot that becomes free must find a full one."""
    scene = Scene(capacity=0.8)
    scene.stands[FREE].set(somebody=7)
    assert scene.ask(FREE) is None
    scene.stands[FREE].set(somebody=8)
    assert scene.ask(FREE) is not None


def test_less_capacity_closes_the_door_and_more_opens_it() -> None:
    scene = Scene()
    scene.stands[FREE].set(somebody=200)
    assert scene.ask(FREE) is None
    scene.learn(500.0)
    assert scene.ask(FREE) is not None
    scene.learn(1000.0)
    assert scene.ask(FREE) is None
    scene.learn(0.0)
    refusal = scene.ask(FREE)
    assert refusal is not None
    assert refusal.retry_after_s == 30
    scene.shedder.suppose(lambda: (0.0, inf), scene.stands)
    assert scene.ask(FREE) is None


def test_a_deadline_of_its_own() -> None:
    scene = Scene()
    scene.stands[ENTERPRISE].set(somebody=100)
    assert scene.shedder.refusal_by_deadline(ENTERPRISE, "somebody", scene.now, 0.2) is None
    refusal = scene.shedder.refusal_by_deadline(ENTERPRISE, "somebody", scene.now, 0.05)
    assert refusal is not None
    assert refusal.predicted_wait_ms == 100
    assert scene.shedder.shed[ENTERPRISE] == 1


def test_what_one_owner_has_waiting_makes_no_other_late() -> None:
    scene = Scene()
    scene.stands[FREE].set(flood=200)
    assert scene.shedder.refusal_by_deadline(FREE, "flood", scene.now, 0.1) is not None
    assert scene.shedder.refusal_by_deadline(FREE, "little", scene.now, 0.01) is None


def test_nobody_overtakes_one_that_does_not_wait() -> None:
    """Six tenths of the capacity are used, and nothing waits: the hasty of the lowest tier are in time."""
    scene = Scene()
    for _ in range(60):
        for _ in range(60):
            scene.ask(ENTERPRISE)
        scene.shedder.tick(0.1, scene.now)
    assert scene.shedder.refusal_by_deadline(FREE, "hasty", scene.now, 0.02) is None
    scene.stands[ENTERPRISE].set(somebody=6)
    assert scene.shedder.refusal_by_deadline(FREE, "hasty", scene.now, 0.02) is None
    scene.stands[ENTERPRISE].set(somebody=10)
    assert scene.shedder.refusal_by_deadline(FREE, "hasty", scene.now, 0.02) is not None


def test_who_would_be_late_takes_no_place_from_others() -> None:
    """An owner of a high tier sends what cannot be served in time: that is not what lower tiers stand behind."""
    scene = Scene()
    scene.stands[ENTERPRISE].set(somebody=20)
    nothing: Any = None
    gate = Gate(nothing, nothing, {"m": Up()}, lowest_tier=2, shedders={"m": scene.shedder})
    for tick in range(50):
        scene.now += 0.1
        for number in range(100):
            late = make_request(f"{tick} {number}", Witness(), now=scene.now, own_timeout_s=0.001)
            assert isinstance(gate.admit(late), Shed)
        scene.shedder.tick(0.1, scene.now)
    assert scene.shedder.shed[ENTERPRISE] == 5000
    assert scene.shedder.predicted_wait_s(FREE) == pytest.approx(0.02)


def test_lanes_of_this_process_are_forgotten_when_redis_has_them() -> None:
    """A gateway was in direct mode, with two lanes waiting, and has Redis again: its own broker is empty now."""

    class Lanes:
        batch_max = 8

        def by_tier(self) -> list[int]:
            return [0, 0, 2]

        def opened_by(self, owner: str) -> int:
            return 2

        def waiting_in(self, lane_key: bytes) -> int:
            return 0

    scene = Scene()
    scene.shedder.learn([1000.0] * 3, [8.0] * 3, scene.stands, lanes=Lanes())
    scene.shedder.refusal(FREE, "a", scene.now)
    assert scene.shedder.headroom[FREE] <= 0  # each who comes is looked at
    scene.shedder.learn([1000.0] * 3, [8.0] * 3, scene.stands)
    scene.shedder.refusal(FREE, "a", scene.now + 1.0)
    assert scene.shedder.headroom[FREE] > 0


class TestCallsOfMany:
    def ask(self, scene: Scene, count: int, seconds: float = 2.0, tier: int = FREE, owner: str = "o") -> Shed | None:
        scene.now += RECOUNT_QUIET_S
        return scene.shedder.refusal_of_all(tier, owner, scene.now, count, seconds)

    def test_the_last_must_be_served_in_time(self) -> None:
        scene = Scene()
        refusal = self.ask(scene, 2002)
        assert refusal is not None and refusal.detail.endswith("send 2000 inputs at most in a call")
        assert scene.shedder.shed[FREE] == 2002
        assert self.ask(scene, 2001) is None

    def test_what_waits_counts_in_turns(self) -> None:
        scene = Scene()
        scene.stands[FREE].set(other=200)
        assert self.ask(scene, 1800) is None
        assert self.ask(scene, 1802) is not None
        scene.stands[FREE].set(other=10_000)
        assert self.ask(scene, 2) is None  # owners are served in turn
        assert self.ask(scene, 1001) is not None

    def test_the_first_must_come_in_as_one_alone_would(self) -> None:
        scene = Scene()
        scene.stands[FREE].set(o=250)
        assert scene.ask(FREE, "o") is not None
        assert self.ask(scene, 2) is not None

    def test_all_of_them_take_places(self) -> None:
        scene = Scene()
        assert self.ask(scene, 300, tier=PAID) is None
        assert scene.shedder.refusal(FREE, "b", scene.now) is None  # rule 3
        assert scene.shedder.headroom[FREE] < 0 < scene.shedder.headroom[ENTERPRISE]

    def test_nobody_is_refused_before_the_capacity_is_known(self) -> None:
        assert LoadShedder(TIERS, [Stands() for _ in TIERS]).refusal_of_all(FREE, "a", 1.0, 2048, 0.1) is None

    def test_thresholds(self) -> None:
        scene = Scene(thresholds=Thresholds(depth_highest_only=20, depth_not_lowest=10))
        assert self.ask(scene, 100) is None  # nobody waits
        scene.stands[FREE].set(o=1)
        assert self.ask(scene, 100) is not None
        assert self.ask(scene, 9) is None
        assert self.ask(scene, 100, tier=ENTERPRISE) is None


def test_a_gateway_to_which_nothing_came_so_far_lets_the_first_in() -> None:
    """The others have more than all of the capacity, at any tier."""
    scene = Scene()
    learn_share(scene.shedder, 1000.0, 8.0, [0.0, 0.0, 5000.0], scene.stands, 0.2, 2)
    assert [scene.ask(tier) is None for tier in range(3)] == [True, True, True]
    learn_share(scene.shedder, 1000.0, 8.0, [2000.0, 0.0, 5000.0], scene.stands, 0.2, 2)
    assert [scene.ask(tier) is None for tier in range(3)] == [True, True, True]


def test_the_guard_trusts_less_while_even_the_shortest_wait_is_too_long() -> None:
    scene = Scene()

    def look(wait_s: float, times: int = 10) -> float:
        for _ in range(times):
            scene.shedder.waited(FREE, wait_s)
        scene.now += GUARD_S
        scene.shedder.tick(GUARD_S, scene.now)
        return scene.shedder.trust[FREE]

    look(0.1)
    assert look(0.1) == 1.0
    assert look(0.6, times=2) == 1.0, "two are too few to say"
    for _ in range(10):
        trust = look(0.6)
    assert trust < 0.15
    scene.stands[FREE].set(somebody=60)
    assert scene.ask(FREE) is not None
    assert scene.ask(PAID) is None, "the other tiers waited as they should"
    for _ in range(20):
        trust = look(0.1)
    assert trust == 1.0


def test_over_redis_an_owner_is_not_refused_for_what_is_served_of_it() -> None:
    """Calls of two seconds, 16 requests a second, 32 at once: one owner floods, the other wants an eighth of that."""
    scene = Scene()
    scene.learn(16.0, batch_s=2.0)
    scene.stands[FREE].set(flood=36, modest=4)
    scene.shedder.tick(1.0, scene.now)
    assert scene.ask(FREE, "flood") is not None
    assert scene.ask(FREE, "modest") is None
    assert scene.ask(FREE, "somebody else") is None
    scene.stands[FREE].set(flood=36, modest=21)  # five more than are served of it
    assert scene.ask(FREE, "modest") is not None


def test_over_redis_those_that_are_served_do_not_wait() -> None:
    """Slots have 200 at once. Of 300 that stand, 100 wait."""
    scene = Scene()
    scene.learn(1000.0, batch_s=0.2)
    scene.stands[FREE].set(somebody=200)
    scene.ask(FREE)
    assert scene.shedder.predicted_wait_s(FREE) == 0.0
    scene.stands[FREE].set(somebody=300)
    scene.ask(FREE)
    assert scene.shedder.predicted_wait_s(FREE) == pytest.approx(0.1)


class TestThresholds:
    def test_depth(self) -> None:
        scene = Scene(thresholds=Thresholds())
        scene.stands[FREE].set(somebody=69)
        assert [scene.ask(tier) is None for tier in range(3)] == [True, True, True]
        scene.stands[FREE].set(somebody=71)
        assert [scene.ask(tier) is None for tier in range(3)] == [True, True, False]
        scene.stands[FREE].set(somebody=351)
        assert [scene.ask(tier) is None for tier in range(3)] == [True, False, False]

    def test_plain_numbers(self) -> None:
        scene = Scene(thresholds=Thresholds(depth_highest_only=20, depth_not_lowest=10))
        scene.stands[PAID].set(somebody=15)
        assert [scene.ask(tier) is None for tier in range(3)] == [True, True, False]
        scene.stands[PAID].set(somebody=25)
        assert [scene.ask(tier) is None for tier in range(3)] == [True, False, False]

    def test_rate(self) -> None:
        scene = Scene(thresholds=Thresholds())
        for _ in range(60):
            for _ in range(80):
                scene.ask(PAID)
            scene.shedder.tick(0.1, scene.now)
        assert [scene.ask(tier) is None for tier in range(3)] == [True, True, False]


def test_pressure_is_1_at_the_target() -> None:
    assert pressure([10.0, 20.0, 45.0], 100.0, 0.75) == pytest.approx(1.0)
    assert pressure([10.0], inf, 0.75) == 0.0


# What comes at the very start of an overload meets a door that has seen nothing of it.
SETTLED_S = 2.0


class Simulation:
    """Slots that take the best batch there is, by virtual deadline, and a door before them. On no clock but its own."""

    def __init__(self, *, slots: int, batch: int, batch_s: float, does_door_know: float = 1.0) -> None:
        self.batch, self.batch_s = batch, batch_s
        self.capacity = slots * batch / batch_s
        self.free_at = [0.0] * slots
        self.lines: list[list[float]] = [[], [], []]
        self.stands = [Stands() for _ in TIERS]
        self.shedder = LoadShedder(TIERS, self.stands)
        self.shedder.learn([self.capacity * does_door_know] * 3, [batch] * 3, self.stands)
        self.waits: list[list[float]] = [[], [], []]
        self.served = 0

    def run(self, rates: list[float], seconds: float) -> "Simulation":
        random, now, step = Random(7), 0.0, 0.001
        next_tick = 0.1
        while now < seconds:
            now += step
            for tier, rate in enumerate(rates):
                for _ in range(int(rate * step) + (random.random() < (rate * step) % 1)):
                    if self.shedder.refusal(tier, "somebody", now) is None:
                        self.lines[tier].append(now)
            for slot, free_at in enumerate(self.free_at):
                if free_at <= now:
                    batch_s = self.batch_s * random.uniform(0.9, 1.1)
                    self.free_at[slot] = now + batch_s if self.send(now) else now
            for tier, line in enumerate(self.lines):
                self.stands[tier].set(somebody=len(line))
            if now >= next_tick:
                next_tick += 0.1
                self.shedder.tick(0.1, now)
        return self

    def send(self, now: float) -> int:
        sent = 0
        while sent < self.batch and any(self.lines):
            places = [line[0] + rule.target_s if line else inf for line, rule in zip(self.lines, TIERS, strict=True)]
            tier = places.index(min(places))
            waited = now - self.lines[tier].pop(0)
            self.served += 1
            if now > SETTLED_S:
                self.waits[tier].append(waited)
            sent += 1
            if sent == self.batch or not any(self.lines):
                self.shedder.waited(tier, waited)
        return sent

    def p99(self, tier: int) -> float:
        waits = sorted(self.waits[tier])
        return waits[int(len(waits) * 0.99)]


@pytest.mark.parametrize(
    ("times", "waits"),
    [
        (2.0, (0.12, 0.14, 0.4)),
        # Enterprise and paid alone are three times the capacity: free has its minimum share, in its order.
        (10.0, (0.55, 0.65, 1.1)),
    ],
)
def test_overload_of_three_tiers(times: float, waits: tuple[float, float, float]) -> None:
    """32 slots; 5 % enterprise, 25 % paid, 70 % free at twice and ten times the capacity."""
    scene = Simulation(slots=32, batch=8, batch_s=0.2)
    offered = scene.capacity * times
    scene.run([0.05 * offered, 0.25 * offered, 0.7 * offered], 12.0)
    assert scene.served > 0.97 * scene.capacity * 12
    assert scene.shedder.shed[ENTERPRISE] == 0
    assert [scene.p99(tier) <= most for tier, most in enumerate(waits)] == [True] * 3, [*map(scene.p99, range(3))]
    assert len(scene.waits[FREE]) > 0.005 * scene.served


@pytest.mark.parametrize("wrong", [0.5, 3.0])
def test_a_wrong_estimate_does_not_ruin_it(wrong: float) -> None:
    """The door believes in half, or three times, what there is: the guard catches the latter."""
    scene = Simulation(slots=32, batch=8, batch_s=0.2, does_door_know=wrong)
    scene.run([0.0, 0.0, 2.0 * scene.capacity], 20.0)
    assert scene.served > 0.95 * scene.capacity * 20
    late = sorted(scene.waits[FREE][len(scene.waits[FREE]) // 2 :])
    assert late[int(len(late) * 0.5)] < 0.4


@pytest.mark.parametrize("tick_s", [0.1, 0.15, 0.4])
def test_ticks_that_come_late_make_no_rate_higher(tick_s: float) -> None:
    scene, clock = Scene(), FakeClock()
    ticks = Ticks({"m": scene.shedder}, clock)
    for _ in range(60):
        for _ in range(round(200 * tick_s)):
            scene.ask(FREE)
        clock.advance(tick_s)
        ticks.tick()
    assert scene.shedder.rates[FREE] == pytest.approx(200.0, rel=0.01)


def test_a_flood_of_the_lowest_tier_elsewhere_sheds_nobody_above_it_here() -> None:
    """Calls take long, so many run: they do not seem to wait because the lowest tier has little of the fleet here."""
    scene = Scene()
    for _ in range(100):
        for _ in range(20):
            scene.ask(ENTERPRISE)
        scene.now += 0.1
        scene.shedder.tick(0.1, scene.now)
    learn_share(scene.shedder, 1000.0, 8.0, [0.0, 0.0, 20_000.0], scene.stands, 6.0, 2)
    scene.stands[ENTERPRISE].set(somebody=1200)  # 200 a second, for 6 s each
    assert scene.ask(ENTERPRISE) is None
    assert scene.shedder.predicted_wait_s(ENTERPRISE) == 0.0
    scene.stands[ENTERPRISE].set(somebody=7100)
    assert scene.ask(ENTERPRISE) is not None


def test_it_is_counted_how_far_predicted_waits_are_off() -> None:
    """10 wait at 100 a second: 0.1 s. What was predicted just before a request came counts, not what is now."""
    scene = Scene(capacity=100.0)
    scene.shedder.tick(0.1, 99.0)
    assert scene.shedder.wait_errors["too-high"].total == 0
    scene.stands[ENTERPRISE].set(a=10)
    scene.shedder.tick(0.1, 100.0)
    scene.stands[ENTERPRISE].set(a=90)
    scene.shedder.tick(0.1, 100.1)
    scene.shedder.waited(ENTERPRISE, 0.4, 100.05)
    scene.shedder.waited(ENTERPRISE, 0.6, 100.2)
    errors = scene.shedder.wait_errors
    assert {name: sum(each.counts) for name, each in errors.items()} == {"too-high": 1, "too-low": 1}
    assert errors["too-low"].total == pytest.approx(0.4 - 0.1)
    assert errors["too-high"].total == pytest.approx(0.9 - 0.6)
    scene.shedder.waited(ENTERPRISE, 0.6, 10.0)
    scene.shedder.waited(ENTERPRISE, 0.6)
    assert sum(errors["too-low"].counts) == 1, "nobody knows what was predicted then"
