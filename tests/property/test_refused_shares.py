"""How bad inputs change the size of batches, and what their search may take of the slots."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.upstream.refusals import LANES_MAX, RefusedShare, RefusedShares, best_size, calls_for, is_singly, may_clear
from carpool.upstream.slot_share import CARRIED_S, SlotShare

shares = st.floats(0.0, 1.0)
sizes = st.integers(1, 4096)


@given(shares, sizes)
def test_the_best_size_has_nearly_the_best_yield(share: float, max_batch: int) -> None:
    size = best_size(share, max_batch)
    assert 1 <= size <= max_batch
    halvings = [max_batch >> step for step in range(max_batch.bit_length())]
    best = max(each / calls_for(each, share) for each in halvings)
    assert size / calls_for(size, share) >= 0.8 * best


@pytest.mark.parametrize(
    ("share", "most", "least"), [(0.0, 64, 64), (0.001, 64, 64), (0.01, 32, 32), (0.05, 8, 4), (0.3, 2, 1), (1.0, 1, 1)]
)
def test_batches_shrink_where_bad_inputs_are_common(share: float, most: int, least: int) -> None:
    assert least <= best_size(share, 64) <= most


@given(st.lists(st.booleans(), max_size=3000))
def test_a_share_is_a_share(inputs: list[bool]) -> None:
    share = RefusedShare()
    for is_bad in inputs:
        if is_bad:
            share.refused()
        else:
            share.answered(1)
        assert 0.0 <= share.share <= 1.0


def test_it_follows_what_is_seen_and_forgets() -> None:
    lanes = RefusedShares()
    assert not lanes
    for _ in range(1000):
        lanes.refused("lane")
        lanes.answered("lane", 2)
    assert lanes.share("lane") == pytest.approx(1 / 3, abs=0.02)
    assert lanes.best_size("lane", 64) <= 2 and lanes.best_size("other", 64) == 64
    for _ in range(400):
        lanes.answered("lane", 64)
    assert not lanes and lanes.best_size("lane", 64) == 64


def test_one_bad_input_after_a_quiet_time_changes_nothing() -> None:
    lanes = RefusedShares()
    for _ in range(5):
        lanes.refused("lane")
        assert lanes.best_size("lane", 64) == 64
        assert may_clear(lanes.share("lane"), 64)
        lanes.answered("lane", 2000)


def test_a_few_bad_inputs_in_a_row_are_remembered() -> None:
    lanes = RefusedShares()
    for _ in range(6):
        lanes.refused("lane")
        lanes.answered("lane", 16)
    assert lanes.best_size("lane", 64) < 64


def test_lanes_are_bounded() -> None:
    lanes = RefusedShares()
    for number in range(LANES_MAX + 5):
        lanes.refused(number)
        lanes.refused(number)
    assert lanes.share(0) == 0.0 and lanes.share(LANES_MAX + 4) > 0.0


def test_singly_by_the_lane_or_by_the_search_itself() -> None:
    assert is_singly(0.3, 0, 0) and not is_singly(0.29, 1, 0)
    assert is_singly(0.0, 2, 2) and not is_singly(0.0, 1, 3)


@given(st.lists(st.tuples(st.floats(0.0, 0.3), st.floats(0.0, 0.5)), max_size=200), st.integers(1, 64))
def test_what_is_used_beside_others_never_exceeds_the_share(steps: list[tuple[float, float]], slots: int) -> None:
    account = SlotShare(0.2)
    now, used = 0.0, 0.0
    for pause_s, call_s in steps:
        now += pause_s
        if account.allows(now, slots):
            account.pay(call_s)
            used += call_s
    assert used <= 0.2 * slots * (now + CARRIED_S) + 0.5 + 1e-6


def test_where_batches_of_others_are_refused_searches_earn_more() -> None:
    account = SlotShare(0.2)
    account.allows(0.0, 4)
    account.pay(10.0)
    assert not account.allows(5.0, 4)
    for _ in range(20):
        account.batch_ended(True)
    assert account.mostly_refused > 0.9
    assert account.allows(7.0, 4)
    for _ in range(60):
        account.batch_ended(False)
    assert account.refused_share == 0.0
