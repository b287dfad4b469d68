"""What the live page adds up (`telemetry/live.py`): nothing is lost, nothing counts twice, samples are even."""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from carpool.core.live import LivePart, LiveTier
from carpool.core.snapshot import FleetState, Health, Scale, Snapshot
from carpool.telemetry.live import Merger, quantile, step_of, thinned

SNAPSHOT = Snapshot(
    health=Health(status="healthy", gpu_utilization=0.0, queue_depth=0, requests_per_second=0.0),
    fleet=FleetState(models={}),
    scale=Scale(models={}),
    numbers=(),
    models={},
)
LATENCIES = st.lists(st.floats(0.0, 1e6), min_size=1, max_size=200)
COUNTS = st.integers(0, 10_000)


@given(LATENCIES, st.floats(0.01, 1.0))
def test_a_quantile_is_not_below_the_true_one_and_little_above(latencies: list[float], share: float) -> None:
    counts: dict[int, int] = {}
    for latency in latencies:
        counts[step_of(latency)] = counts.get(step_of(latency), 0) + 1
    # At least a millisecond: below, all are alike.
    true = max(1.0, sorted(latencies)[ceil(share * len(latencies) - 1e-9) - 1])
    found = quantile(counts, share)
    assert found is not None
    assert true * 0.999 - 0.06 <= found <= true * 1.1 + 0.06


@given(st.lists(st.integers()), st.integers(1, 50))
def test_a_sample_is_even(items: list[int], most: int) -> None:
    numbered = list(enumerate(items))
    found = thinned(numbered, most)
    assert len(found) == min(len(items), most)
    places = [place for place, _ in found]
    assert places == sorted(set(places))
    gaps = [later - earlier for earlier, later in pairwise(places)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def part(name: str, number: int, counts: Sequence[int], seconds: float = 1.0) -> LivePart:
    return LivePart(
        name=name,
        role="serve",
        number=number,
        at=float(number),
        seconds=seconds,
        tiers=(LiveTier(*counts),),
        latencies=({8: counts[2]} if counts[2] else {},),
        batches=(),
        batches_ended=counts[2],
        requests={"ok": counts[2], "shed": counts[1]},
    )


@given(st.dictionaries(st.sampled_from("abcd"), st.tuples(COUNTS, COUNTS, COUNTS, COUNTS), min_size=1))
def test_a_fleet_is_the_sum_of_its_processes(fleet: dict[str, tuple[int, ...]]) -> None:
    parts = [part(name, 1, counts) for name, counts in fleet.items()]
    event = Merger(["all"], {}).event(SNAPSHOT, parts, 0.0, 1)
    admitted, shed, answered, failed = (sum(column) for column in zip(*fleet.values(), strict=True))
    [tier] = event.tiers
    assert (tier.admitted, tier.shed, tier.answered, tier.failed) == (admitted, shed, answered, failed)
    assert tier.offered == admitted + shed
    assert event.requests == {"ok": answered, "shed": shed}
    assert event.batches_ended == answered


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), min_size=1, max_size=30))
def test_each_second_of_a_process_happens_once(steps: list[tuple[str, bool]]) -> None:
    """Whoever is asked more often than it writes, or less often, is never counted twice."""
    merger = Merger(["all"], {})
    newest: dict[str, LivePart] = {}
    ended = 0
    told: set[tuple[str, int]] = set()
    for name, is_seen in steps:
        number = newest[name].number + 1 if name in newest else 1
        newest[name] = part(name, number, (0, 0, 1, 0))
        if is_seen:
            ended += merger.event(SNAPSHOT, list(newest.values()), 0.0, 1).batches_ended
            told |= {(each.name, each.number) for each in newest.values()}
    assert ended == len(told)
