"""The door: who would wait too long is refused."""

from collections.abc import Sequence
from math import inf, sqrt
from typing import Any, cast

import msgspec
import pytest

from carpool.admission.gate import Gate
from carpool.admission.shedding import (
    GUARD_S,
    RECOUNT_QUIET_S,
    Elsewhere,
    LoadShedder,
    TierRule,
    pressure,
)
from carpool.composition.shedding import learn_share
from carpool.core.errors import Shed, UpstreamDown
from carpool.core.request import Request
from carpool.testing import Witness, make_request


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

    def __init__(self, capacity: float = 1000.0, by_thresholds: bool = False, min_share: float = 0.05) -> None:
        self.stands = [Stands() for _ in TIERS]
        self.shedder = LoadShedder(TIERS, self.stands, by_thresholds=by_thresholds, min_share=min_share)
        self.now = 100.0
        self.learn(capacity)

    def learn(self, capacity: float, batch_s: float = 0.0, batch: float = 8.0) -> None:
        self.shedder.learn([capacity] * 3, [batch] * 3, self.stands, batch_s=batch_s)

    def ask(self, tier: int, owner: str = "somebody") -> Shed | None:
        self.now += RECOUNT_QUIET_S
        return self.shedder.refusal(tier, owner, self.now)


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

    def test_a_queue_that_one_batch_takes_does_not_stand(self) -> None:
        scene = self.scene()
        self.stand_for(scene, 30, waiting=8)
        assert self.comes_in(scene, 1700) == "late"

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

    def test_higher_tiers_do_not_wait_for_it(self) -> None:
        scene = self.scene()
        for _ in range(20):
            scene.shedder.waited(FREE, 0.6)
        scene.stands[FREE].set(somebody=900, another=100)
        scene.stands[FREE].late_names = {"somebody"}
        scene.ask(ENTERPRISE)
        assert scene.shedder.predicted_wait_s(ENTERPRISE) < 0.1

    def test_so_is_what_others_of_its_tier_bring_who_go_before_it(self) -> None:
        """They have little waiting, and come in time."""
        scene = self.scene()
        for _ in range(100):
            for number in range(40):
                assert scene.shedder.refusal(FREE, f"owner{number}", scene.now) is None
            scene.now += 0.1
            scene.shedder.tick(scene.now)
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
            scene.shedder.tick(scene.now)
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
        scene.shedder.tick(scene.now)
    assert scene.shedder.shed[ENTERPRISE] == 5000
    assert scene.shedder.predicted_wait_s(FREE) == pytest.approx(0.02)


@pytest.mark.parametrize(("is_down", "turned_away"), [(True, 3), (False, 0)], ids=["for all", "for one owner"])
def test_who_finds_no_endpoint_came_all_the_same(is_down: bool, turned_away: int) -> None:
    """More GPUs would do nothing for an owner that alone is shut out."""
    upstream, nothing = Up(), cast(Any, None)
    upstream.is_down, upstream.is_shut_to_some = is_down, not is_down
    upstream.is_shut_to = lambda owner: not is_down  # type: ignore[method-assign]
    gate = Gate(nothing, nothing, {"m": upstream, "other": Up()}, lowest_tier=2)
    single, *others = (make_request(name, Witness(), now=0.0) for name in "abc")
    assert isinstance(gate.admit(single), UpstreamDown)
    assert isinstance(gate.judge_all(others), UpstreamDown)
    assert gate.turned_away == {"m": turned_away, "other": 0}


class TestCallsOfMany:
    def ask(self, scene: Scene, count: int, seconds: float = 2.0, tier: int = FREE, owner: str = "o") -> Shed | None:
        scene.now += RECOUNT_QUIET_S
        return scene.shedder.refusal_of_all(tier, owner, scene.now, count, seconds)

    def test_what_waits_counts_in_turns(self) -> None:
        scene = Scene()
        scene.stands[FREE].set(other=200)
        assert self.ask(scene, 1800) is None
        assert self.ask(scene, 1802) is not None
        scene.stands[FREE].set(other=10_000)
        assert self.ask(scene, 2) is None  # owners are served in turn
        assert self.ask(scene, 1001) is not None

    def test_all_of_them_take_places(self) -> None:
        scene = Scene()
        assert self.ask(scene, 300, tier=PAID) is None
        assert scene.shedder.refusal(FREE, "b", scene.now) is None  # rule 3
        assert scene.shedder.headroom[FREE] < 0 < scene.shedder.headroom[ENTERPRISE]

    def test_thresholds(self) -> None:
        scene = Scene(by_thresholds=True)
        assert self.ask(scene, 100) is None  # nobody waits
        scene.stands[FREE].set(o=1)
        assert self.ask(scene, 100) is not None
        assert self.ask(scene, 9) is None
        assert self.ask(scene, 100, tier=ENTERPRISE) is None


def test_where_nothing_waits_no_gpu_is_wanted_for_what_may_overtake() -> None:
    """What higher tiers may bring within seconds is long where a GPU serves one every two seconds."""
    scene = Scene(capacity=8.0)
    for _ in range(100):
        scene.now += 0.5
        scene.shedder.refusal(PAID, "somebody", scene.now)
        scene.shedder.tick(scene.now)
    assert scene.shedder.predicted_wait_s(FREE) > 0.3
    assert scene.shedder.wait_now_s(FREE) == 0.0
    scene.stands[PAID].set(somebody=1)
    assert scene.shedder.wait_now_s(FREE) == scene.shedder.predicted_wait_s(FREE) > 0.3


def test_the_guard_trusts_less_while_even_the_shortest_wait_is_too_long() -> None:
    scene = Scene()

    def look(wait_s: float, times: int = 10) -> float:
        for _ in range(times):
            scene.shedder.waited(FREE, wait_s)
        scene.now += GUARD_S
        scene.shedder.tick(scene.now)
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
    def test_seconds_of_capacity(self) -> None:
        scene = Scene(by_thresholds=True)
        scene.stands[PAID].set(somebody=71)
        assert [scene.ask(tier) is None for tier in range(3)] == [True, True, False]
        scene.stands[PAID].set(somebody=351)
        assert [scene.ask(tier) is None for tier in range(3)] == [True, False, False]


class TestThresholdsOverRedis:
    """1,000 a second are served, 200 at once: 70 more may wait before free is refused, and 350 before paid is."""

    def scene(self, others: Elsewhere) -> Scene:
        scene = Scene(by_thresholds=True)
        scene.shedder.learn([1000.0] * 3, [1.0] * 3, scene.stands, batch_s=0.2, others=others)
        return scene

    @pytest.mark.parametrize(
        ("own", "others", "come_in"),
        [
            (1, 0, [True, True, True]),
            (0, 269, [True, True, True]),
            (0, 271, [True, True, False]),
            (200, 71, [True, True, False]),
            (0, 551, [True, False, False]),
            (551, 0, [True, False, False]),
        ],
    )
    def test_the_whole_queue_counts(self, own: int, others: int, come_in: list[bool]) -> None:
        scene = self.scene(Elsewhere(0, 0.0, 1.0, 1.0))
        scene.stands[PAID].set(somebody=own)
        scene.shedder.learn([1000.0] * 3, [1.0] * 3, scene.stands, batch_s=0.2, others=Elsewhere(others, 0.0, 0.5, 2.0))
        assert [scene.ask(tier) is None for tier in range(3)] == come_in

    def test_of_the_room_that_was_left_each_takes_its_part(self) -> None:
        scene = self.scene(Elsewhere(200, 0.0, 0.5, 1.0))
        for number in range(60):
            scene.stands[FREE].set(somebody=number)
            assert (scene.ask(FREE) is None) == (number < 35)
        scene.shedder.learn([1000.0] * 3, [1.0] * 3, scene.stands, batch_s=0.2, others=Elsewhere(200, 0.0, 0.5, 2.0))
        assert scene.ask(FREE) is None, "the others have not taken theirs: of the 11 that are left 5 are for this one"

    def test_what_the_others_admit_counts(self) -> None:
        scene = self.scene(Elsewhere(0, 699.0, 0.5, 1.0))
        assert scene.ask(FREE) is None
        scene = self.scene(Elsewhere(0, 701.0, 0.5, 1.0))
        assert scene.ask(FREE) is not None
        assert scene.ask(PAID) is None

    def test_how_long_it_would_take_is_told_of_the_whole(self) -> None:
        refusal = self.scene(Elsewhere(2200, 0.0, 0.5, 1.0)).ask(FREE)
        assert refusal is not None
        assert refusal.retry_after_s == 2


def test_pressure_is_1_at_the_target() -> None:
    assert pressure([10.0, 20.0, 45.0], 100.0) == pytest.approx(1.0)
    assert pressure([10.0], inf) == 0.0


@pytest.mark.parametrize("tick_s", [0.1, 0.15, 0.4])
def test_ticks_that_come_late_make_no_rate_higher(tick_s: float) -> None:
    scene = Scene()
    for number in range(60):
        for _ in range(round(200 * tick_s)):
            scene.ask(FREE)
        scene.shedder.tick(number * tick_s)
    assert scene.shedder.rates[FREE] == pytest.approx(200.0, rel=0.01)


def test_a_flood_of_the_lowest_tier_elsewhere_sheds_nobody_above_it_here() -> None:
    """Calls take long, so many run: they do not seem to wait because the lowest tier has little of the fleet here."""
    scene = Scene()
    for _ in range(100):
        for _ in range(20):
            scene.ask(ENTERPRISE)
        scene.now += 0.1
        scene.shedder.tick(scene.now)
    learn_share(scene.shedder, 1000.0, 8.0, [0.0, 0.0, 20_000.0], scene.stands, 6.0, 2)
    scene.stands[ENTERPRISE].set(somebody=1200)  # 200 a second, for 6 s each
    assert scene.ask(ENTERPRISE) is None
    assert scene.shedder.predicted_wait_s(ENTERPRISE) == 0.0
    scene.stands[ENTERPRISE].set(somebody=7100)
    assert scene.ask(ENTERPRISE) is not None


def test_it_is_counted_how_far_predicted_waits_are_off() -> None:
    """10 wait at 100 a second: 0.1 s. What was predicted just before a request came counts, not what is now."""
    scene = Scene(capacity=100.0)
    scene.shedder.tick(99.0)
    assert scene.shedder.wait_errors["too-high"].total == 0
    scene.stands[ENTERPRISE].set(a=10)
    scene.shedder.tick(100.0)
    scene.stands[ENTERPRISE].set(a=90)
    scene.shedder.tick(100.1)
    scene.shedder.waited(ENTERPRISE, 0.4, 100.05)
    scene.shedder.waited(ENTERPRISE, 0.6, 100.2)
    errors = scene.shedder.wait_errors
    assert {name: sum(each.counts) for name, each in errors.items()} == {"too-high": 1, "too-low": 1}
    assert errors["too-low"].total == pytest.approx(0.4 - 0.1)
    assert errors["too-high"].total == pytest.approx(0.9 - 0.6)
    scene.shedder.waited(ENTERPRISE, 0.6, 10.0)
    scene.shedder.waited(ENTERPRISE, 0.6)
    assert sum(errors["too-low"].counts) == 1, "nobody knows what was predicted then"
