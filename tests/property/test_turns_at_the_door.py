"""Who is refused where the room for any is used: an owner whose turn comes too late, by how many owners wait."""

from hypothesis import given
from hypothesis import strategies as st

from carpool.admission.shedding import LoadShedder, TierRule
from carpool.broker.queue_stats import WaitingCount

OWNERS = "abcdef"


@given(
    waiting=st.dictionaries(st.sampled_from(OWNERS), st.integers(1, 6)),
    allowed=st.integers(1, 12),
    is_too_much=st.booleans(),
)
def test_everybody_is_asked_for_its_own_turn(waiting: dict[str, int], allowed: int, *, is_too_much: bool) -> None:
    queue_stats = WaitingCount()
    for owner, count in waiting.items():
        for _ in range(count):
            queue_stats.add(owner, 0)
    shedder = LoadShedder([TierRule(0.5, 1.0)], [queue_stats], min_share=0.0)
    shedder.learn([allowed], [1.0], [queue_stats])
    shedder.rates[0] = 2.0 * allowed if is_too_much else 0.5 * allowed
    shed = 0
    for owner in OWNERS + "x":
        own = waiting.get(owner, 0)
        turns = (own + 1) * (len(waiting) + (own == 0))
        is_refused = (2 if is_too_much else 1) * sum(waiting.values()) >= allowed and turns >= allowed
        assert (shedder.refusal_if_full(0, owner, 1.0) is not None) == is_refused
        shed += is_refused
    assert shedder.shed == [shed]
