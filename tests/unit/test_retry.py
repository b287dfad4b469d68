"""Whether and when to try again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.upstream.retry import TRY_ELSEWHERE, pause_before


def test_overload_and_server_errors_are_tried_elsewhere_and_refusals_are_not() -> None:
    assert {429, 500, 502, 503, 504} <= TRY_ELSEWHERE
    assert not {400, 401, 403, 404, 405, 413, 415, 422, 301, 302} & TRY_ELSEWHERE


@given(st.integers(2, 10), st.floats(0.0, 60.0), st.integers(0, 99))
def test_the_pause_is_anywhere_below_a_ceiling_that_doubles(attempt: int, backoff_s: float, percent: int) -> None:
    share = percent / 100
    pause_s = pause_before(attempt, backoff_s, share)
    assert 0.0 <= pause_s <= backoff_s * 2 ** (attempt - 2)
    assert pause_before(attempt + 1, backoff_s, share) == pytest.approx(2 * pause_s)


def test_full_jitter() -> None:
    assert pause_before(2, 0.05, 0.0) == 0.0
    assert pause_before(2, 0.05, 0.5) == 0.025
    assert pause_before(4, 0.05, 0.5) == 0.1
