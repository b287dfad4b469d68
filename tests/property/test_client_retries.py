"""The client's retries: never more than the budget, never sooner than asked for."""

from hypothesis import given
from hypothesis import strategies as st

from carpool.client.wire import PAUSE_FIRST_S, PAUSE_LAST_S, ClientRetryBudget, pause_s

lucks = st.floats(0, 1)


@given(share=st.floats(0, 1), reserve=st.floats(0, 20), steps=st.lists(st.booleans(), max_size=300))
def test_retries_are_a_share_of_the_calls(share: float, reserve: float, steps: list[bool]) -> None:
    budget = ClientRetryBudget(share, reserve)
    calls = retries = 0
    for number, is_call in enumerate(steps):
        if is_call:
            calls += 1
            budget.called()
        else:
            retries += budget.take(float(number))
        assert retries <= reserve + share * calls + 1e-6


@given(attempt=st.integers(0, 10_000), luck=lucks)
def test_pauses_grow_within_bounds(attempt: int, luck: float) -> None:
    assert PAUSE_FIRST_S / 2 <= pause_s(attempt, None, luck) <= PAUSE_LAST_S
    assert pause_s(attempt, None, luck) <= pause_s(attempt + 1, None, luck)


@given(attempt=st.integers(0, 100), asked_s=st.floats(0, 3600), luck=lucks)
def test_nobody_comes_back_sooner_than_asked(attempt: int, asked_s: float, luck: float) -> None:
    assert asked_s <= pause_s(attempt, asked_s, luck) <= asked_s * 1.25 + PAUSE_FIRST_S
