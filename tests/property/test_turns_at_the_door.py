"""Who is refused where a tier has no room: whoever's own turn comes too late, by the number of owners and its own."""

from hypothesis import given
from hypothesis import strategies as st

from carpool.admission.shedding import Door, TierRule
from carpool.broker.standing import WaitingCount

OWNERS = "abcdef"


@given(waiting=st.dictionaries(st.sampled_from(OWNERS), st.integers(1, 6)), allowed=st.integers(1, 12))
def test_everybody_is_asked_for_its_own_turn(waiting: dict[str, int], allowed: int) -> None:
    standing = WaitingCount()
    for owner, count in waiting.items():
        for _ in range(count):
            standing.add(owner, 0)
    door = Door([TierRule(0.5, 1.0)], [standing], trickle=0.0)
    door.learn([allowed], [1.0], [standing])
    shed = 0
    for owner in OWNERS + "x":
        own = waiting.get(owner, 0)
        turns = (own + 1) * (len(waiting) + (own == 0))
        is_refused = sum(waiting.values()) >= allowed and turns >= allowed
        assert (door.refusal_if_full(0, owner, 1.0) is not None) == is_refused
        shed += is_refused
    assert door.shed == [shed]
