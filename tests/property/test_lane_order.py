"""A lane against a model of it, for any mix of arrivals, departures and takes."""

from math import inf

from hypothesis import example, given
from hypothesis import strategies as st

from carpool.broker.lanes import REBUILD_DEAD_MIN, Lane, Ranks
from carpool.core.errors import ClientLeft
from carpool.core.request import Request
from carpool.testing import Witness, make_request
from support.memory import WatchedRequests

TIERS = 3
arrival = st.tuples(st.just("arrive"), st.integers(0, TIERS - 1), st.floats(0.0, 3.0))
departure = st.tuples(st.just("leave"), st.integers(0, 1000), st.none())
take = st.tuples(st.just("take"), st.integers(0, 5), st.floats(0.0, 2.0))


def apart(targets_ms: list[int]) -> list[float]:
    """Targets with which no two tiers ever share a place: the order of equals is nobody's business."""
    return [ms / 1000 + tier * 1e-5 for tier, ms in enumerate(sorted(targets_ms))]


targets = st.lists(st.integers(0, 2000), min_size=TIERS, max_size=TIERS).map(apart)


class Model:
    """The rules, said in the plainest way: a list for each tier, sorted anew for every request."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.tiers: list[list[Request]] = [[] for _ in range(TIERS)]

    def waiting(self) -> list[Request]:
        return [request for tier in self.tiers for request in tier]

    def next(self) -> Request:
        heads = [tier[0] for tier in self.tiers if tier]
        return min(heads, key=lambda head: (head.tier if self.strict else head.place, head.tier))

    def take(
        self, count: int, now: float, bytes_max: float = inf, room_bytes: float = inf
    ) -> tuple[list[Request], list[Request]]:
        batch: list[Request] = []
        expired: list[Request] = []
        size, size_max = 0, min(bytes_max, room_bytes)
        while len(batch) < count and self.waiting() and size <= size_max:
            request = self.next()
            if request.deadline > now:
                size += request.size
                if size > (size_max if batch else room_bytes):
                    break
            self.tiers[request.tier].remove(request)
            (batch if request.deadline > now else expired).append(request)
        return batch, expired


@given(st.lists(arrival | departure | take, max_size=60), targets, st.booleans())
def test_a_lane_does_what_its_rules_say(
    steps: list[tuple[str, int, float | None]], targets_s: list[float], strict: bool
) -> None:
    lane, model, now = Lane("m", b"", Ranks(TIERS, strict)), Model(strict), 0.0
    for number, (what, which, amount) in enumerate(steps):
        now += 0.1
        if what == "arrive":
            assert amount is not None
            request = make_request(
                str(number), Witness(), now=now, tier=which, target_s=targets_s[which], total_timeout_s=amount
            )
            lane.append(request)
            model.tiers[which].append(request)
        elif what == "leave" and model.waiting():
            request = model.waiting()[which % lane.waiting]
            model.tiers[request.tier].remove(request)
            lane.forget(request)
            request.settle(ClientLeft(""), now)
        elif what == "take":
            expected = model.take(which, now)
            assert lane.take(which, now) == expected
        assert lane.waiting == len(model.waiting())
        assert lane.waiting_bytes == sum(request.size for request in model.waiting())
        assert lane.requests() == model.waiting()
        if model.waiting():
            assert lane.oldest() == min(request.arrived for request in model.waiting())
            best = model.next()
            same_rank = [head for head in model.waiting() if not strict or head.tier == best.tier]
            assert best.place == min(head.place for head in same_rank)


@given(
    st.lists(st.tuples(st.integers(0, TIERS - 1), st.integers(0, 9), st.floats(0.0, 3.0)), max_size=40),
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 20), st.integers(0, 30) | st.just(inf)), max_size=30),
    targets,
    st.booleans(),
)
@example([(0, 9, 3.0), (0, 1, 3.0)], [(8, 4, inf), (8, 4, inf)], [0.0, 0.1, 0.2], False)  # too large, so alone
@example([(0, 9, 3.0), (1, 1, 3.0)], [(8, 4, 8), (8, 4, 9)], [0.0, 0.1, 0.2], False)  # nobody overtakes it
@example([(2, 2, 1.0), (2, 0, 0.0)], [(2, 1, 2)], [0.0, 1e-05, 2e-05], False)  # behind it, late ones wait too
def test_batches_are_bounded_in_bytes_and_the_order_is_kept(
    arrivals: list[tuple[int, int, float]],
    takes: list[tuple[int, int, float]],
    targets_s: list[float],
    strict: bool,
) -> None:
    lane, model, now = Lane("m", b"", Ranks(TIERS, strict)), Model(strict), 0.0
    for number, (tier, size, timeout_s) in enumerate(arrivals):
        now += 0.1
        request = make_request(
            str(number),
            Witness(),
            now=now,
            tier=tier,
            value=b"x" * size,
            target_s=targets_s[tier],
            total_timeout_s=timeout_s,
        )
        lane.append(request)
        model.tiers[tier].append(request)
    for count, bytes_max, room_bytes in takes:
        batch, expired = lane.take(count, now, bytes_max, room_bytes)
        assert (batch, expired) == model.take(count, now, bytes_max, room_bytes)
        size = sum(request.size for request in batch)
        assert size <= bytes_max or len(batch) == 1
        assert size <= room_bytes
        assert batch or not lane.waiting or room_bytes < inf
        assert (lane.waiting, lane.waiting_bytes) == (len(model.waiting()), sum(r.size for r in model.waiting()))


@given(st.lists(st.floats(0.01, 0.2), min_size=1, max_size=40), st.integers(1, 8), st.floats(0.0, 1.0))
def test_nobody_starves(gaps_s: list[float], batch: int, further_s: float) -> None:
    """Under a flood of enterprise requests, a free one is overtaken only by those with a place before its own."""
    lane, now = Lane("m", b"", Ranks(2)), 0.0
    patient = make_request("free", Witness(), now=now, tier=1, target_s=0.05 + further_s, total_timeout_s=1e9)
    lane.append(patient)
    taken: list[Request] = []
    may_overtake = 0
    for gap_s in gaps_s:
        now += gap_s
        for _ in range(batch + 1):  # always more than can be served
            flood = make_request("enterprise", Witness(), now=now, target_s=0.05, total_timeout_s=1e9)
            lane.append(flood)
            may_overtake += flood.place <= patient.place
        taken += lane.take(batch, now)[0]
    taken += lane.take(lane.waiting, now)[0]
    assert taken.index(patient) <= may_overtake


@given(st.lists(st.booleans(), max_size=600))
def test_memory_follows_the_living(leaves: list[bool]) -> None:
    lane, watched = Lane("m", b"", Ranks(1)), WatchedRequests()
    for number, leaving in enumerate(leaves):
        request = watched.make(now=float(number))
        lane.append(request)
        if leaving:
            lane.forget(request)
            request.settle(ClientLeft(""), 0.0)
        del request
        assert len(lane.requests()) == lane.waiting
        assert watched.kept() <= 2 * lane.waiting + REBUILD_DEAD_MIN + 1
