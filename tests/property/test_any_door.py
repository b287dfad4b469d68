"""Whatever a door is told and asked, in any order: it answers, with numbers, and with waits not below zero."""

from math import isnan

from hypothesis import given
from hypothesis import strategies as st

from carpool.admission.shedding import LoadShedder, TierRule
from carpool.broker.queue_stats import WaitingCount

SECONDS = st.sampled_from([0.0, 1e-9, 0.004, 0.1, 0.2, 3.0, 1000.0])
RATES = st.sampled_from([0.0, 1e-9, 0.5, 320.0, 1e9])
TIERS = st.builds(
    TierRule, st.sampled_from([0.0, 0.05, 0.5, 5.0]), st.sampled_from([0.0, 0.001, 0.25, 2.0, 10.0]), st.just("any")
)
STEPS = st.one_of(
    st.tuples(st.just("learn"), RATES, st.sampled_from([0.0, 1.0, 64.0]), SECONDS, SECONDS, RATES),
    st.tuples(st.just("suppose"), st.sampled_from([0.0, 64.0]), SECONDS, st.booleans()),
    st.tuples(st.just("tick"), st.sampled_from([0.01, 0.1, 5.0])),
    st.tuples(st.just("waited"), st.integers(0, 4), SECONDS),
    st.tuples(st.just("one"), st.integers(0, 4), st.sampled_from("abc")),
    st.tuples(st.just("deadline"), st.integers(0, 4), st.sampled_from("abc"), st.sampled_from([-1.0, 0.0, 0.1, 2.0])),
    st.tuples(st.just("many"), st.integers(0, 4), st.sampled_from("abc"), st.sampled_from([-1.0, 0.1, 2.0])),
    st.tuples(st.just("leave")),
)


@given(
    tiers=st.lists(TIERS, min_size=1, max_size=4),
    queue_s=st.sampled_from([0.0, 0.1, 2.0, 30.0]),
    is_strict=st.booleans(),
    min_share=st.sampled_from([0.0, 0.05, 1.0]),
    steps=st.lists(st.tuples(SECONDS, STEPS), max_size=40),
)
def test_any_order_of_questions(  # noqa: C901 - one case for each question
    tiers: list[TierRule],
    queue_s: float,
    is_strict: bool,
    min_share: float,
    steps: list[tuple[float, tuple[object, ...]]],
) -> None:
    count, now = len(tiers), 0.0
    stats_by_tier = [WaitingCount() for _ in tiers]
    shedder = LoadShedder(tiers, stats_by_tier, queue_s=queue_s, is_strict=is_strict, min_share=min_share)

    def let_in(tier: int, owner: str, number: int) -> None:
        for _ in range(number):
            stats_by_tier[tier].add(owner, 1)
            if shedder.is_late:
                stats_by_tier[tier].add_late(owner)

    for seconds, step in steps:
        now += seconds
        match step:
            case ("learn", float(rate), float(batch), float(call_s), float(batch_s), float(others)):
                shedder.learn(
                    [rate] * count,
                    [batch] * count,
                    stats_by_tier,
                    call_s=call_s,
                    burst_rps=rate / 2,
                    batch_s=batch_s,
                    elsewhere=[others] * count,
                )
            case ("suppose", float(at_once), float(age_s), bool(counts_running)):
                first = at_once, now - age_s
                shedder.suppose(lambda first=first: first, stats_by_tier, counts_running=counts_running)  # type: ignore[misc]
            case ("tick", float(tick_s)):
                now += tick_s
                shedder.tick(now)
            case ("waited", int(number), float(wait_s)):
                shedder.waited(number % count, wait_s)
            case ("one", int(number), str(owner)):
                if (refusal := shedder.refusal(number % count, owner, now)) is None:
                    let_in(number % count, owner, 1)
                assert refusal is None or (refusal.predicted_wait_ms or 0) >= 0
            case ("deadline", int(number), str(owner), float(own_s)):
                refusal = shedder.refusal_by_deadline(number % count, owner, now, own_s)
                assert refusal is None or "-" not in str(refusal).partition(";")[0]
            case ("many", int(number), str(owner), float(own_s)):
                if shedder.refusal_of_all(number % count, owner, now, 64, own_s) is None:
                    let_in(number % count, owner, 64)
            case ("leave",):
                for queue_stats in stats_by_tier:
                    for owner in list(queue_stats.late_by_owner):
                        while queue_stats.late_of(owner):
                            queue_stats.remove_late(owner)
                    for owner in list(queue_stats.by_owner):
                        queue_stats.remove(owner, queue_stats.of(owner), queue_stats.of(owner))
        assert not any(
            map(
                isnan, [*shedder.headroom, *shedder.rates, *shedder.trust, *map(shedder.predicted_wait_s, range(count))]
            )
        )
