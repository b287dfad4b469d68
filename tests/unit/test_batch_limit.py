"""What is believed of an endpoint's limit: rule by rule (the numbers are those of `limits.py`)."""

import pytest

from carpool.upstream.limits import TEST_AFTER_S_MAX, TEST_LASTS_S_MAX, BatchLimit

NOW = 1000.0


def learned(limit: int = 32, now: float = NOW) -> BatchLimit:
    """One that has just learned this."""
    known = BatchLimit()
    assert known.said(limit, 64, now)
    return known


def test_nothing_is_known_at_first() -> None:
    known = BatchLimit()
    assert (known.learned, known.largest(NOW, 64)) == (None, 64)


def test_1_what_is_said_is_believed_if_more_was_sent() -> None:
    known = BatchLimit()
    for limit, size in [(64, 64), (65, 64), (0, 64), (-1, 64), (1, 1)]:
        assert not known.said(limit, size, NOW)
    assert known.said(32, 64, NOW)
    assert (known.learned, known.largest(NOW, 64), known.largest(NOW, 7)) == (32, 32, 7)


def test_1_never_below_what_was_answered_lately() -> None:
    known = BatchLimit()
    known.answered(40, NOW)
    assert not known.said(1, 64, NOW + 59.0)
    assert known.said(40, 64, NOW + 59.0)
    quiet = BatchLimit()
    quiet.answered(40, NOW)
    assert quiet.said(1, 64, NOW + 121.0)


def test_1_a_lower_and_a_higher_limit_replace_it() -> None:
    known = learned(32)
    assert known.said(16, 32, NOW)
    assert known.said(24, 64, NOW)
    assert known.learned == 24
    assert not known.said(24, 64, NOW)


def test_2_an_answer_refutes_it() -> None:
    known = learned(32)
    known.answered(32, NOW)
    assert known.largest(NOW, 64) == 32
    known.answered(33, NOW)
    assert (known.learned, known.largest(NOW, 64)) == (None, 64)


def test_3_a_whole_refused_twice_whose_parts_are_answered_shows_a_limit() -> None:
    known = BatchLimit()
    for part in (32, 32):
        known.answered(part, NOW)
    assert not known.split(64, 32, NOW)
    for part in (25, 25):
        known.answered(part, NOW)
    assert known.split(50, 25, NOW)
    assert known.learned == 32


@pytest.mark.parametrize("between", [64, 50])
def test_3_not_if_one_as_large_was_answered_in_between(between: int) -> None:
    known = BatchLimit()
    known.split(64, 32, NOW)
    known.answered(between, NOW)
    known.split(64, 32, NOW)
    assert known.learned == (None if between == 64 else 50)


def test_3_not_while_one_as_large_was_answered_lately() -> None:
    """A bad moment of an endpoint that took them a minute ago."""
    known = BatchLimit()
    known.answered(64, NOW)
    assert [known.split(64, 32, NOW + second) for second in (1.0, 2.0, 3.0)] == [False] * 3
    assert known.split(64, 32, NOW + 121.0)


def test_3_refusals_that_contradict_each_other_teach_nothing() -> None:
    known = BatchLimit()
    assert not known.split(64, 32, NOW)
    assert not known.split(20, 10, NOW)  # though 32 were answered
    assert not known.split(64, 32, NOW)
    assert known.split(64, 32, NOW)


def test_3_a_limit_may_turn_out_lower_than_it_said() -> None:
    known = learned(32)
    assert not known.split(32, 16, NOW)
    assert known.split(32, 16, NOW)
    assert known.learned == 16


def test_4_after_a_minute_one_larger_batch_may_be_sent() -> None:
    known = learned(10)
    assert [known.largest(NOW + 59.9, wanted) for wanted in (64, 20, 10, 3)] == [10, 10, 10, 3]
    assert known.largest(NOW + 60.0, 64) == 20
    assert known.largest(NOW + 60.0, 64) == 10
    known.answered(20, NOW + 61.0)
    assert known.learned is None


def test_4_a_test_is_no_larger_than_what_there_is() -> None:
    assert learned(10).largest(NOW + 60.0, 13) == 13


def test_4_what_fits_is_no_test() -> None:
    known = learned(10)
    assert known.largest(NOW + 60.0, 10) == 10
    assert known.largest(NOW + 60.0, 64) == 20


@pytest.mark.parametrize("by_words", [True, False])
def test_4_each_refused_test_doubles_the_while(by_words: bool) -> None:
    known = learned(10)
    now, waits = NOW, []
    for _ in range(9):
        started = now
        while known.largest(now, 64) == 10:
            now += 1.0
        waits.append(now - started)
        changed = known.said(10, 20, now) if by_words else known.split(20, 10, now)
        assert not changed
    assert waits == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, TEST_AFTER_S_MAX, TEST_AFTER_S_MAX, TEST_AFTER_S_MAX]


def test_4_refusals_of_what_was_sent_before_it_was_known_do_not() -> None:
    """Many slots: all of them had a large batch when the first was refused."""
    known = learned(10)
    for _ in range(31):
        assert not known.said(10, 64, NOW + 1.0)
        assert not known.split(64, 8, NOW + 1.0)
    assert known.largest(NOW + 60.0, 64) == 20


def test_4_a_test_without_a_verdict_is_repeated() -> None:
    known = learned(10)
    assert known.largest(NOW + 60.0, 64) == 20
    assert known.largest(NOW + 60.0 + TEST_LASTS_S_MAX - 0.1, 64) == 10
    assert known.largest(NOW + 60.0 + TEST_LASTS_S_MAX, 64) == 20


def test_4_a_new_limit_is_tested_as_soon_as_the_first() -> None:
    known = learned(10)
    known.largest(NOW + 60.0, 64)
    known.said(10, 20, NOW + 60.0)
    known.said(5, 10, NOW + 70.0)
    assert [known.largest(NOW + 70.0 + seconds, 64) for seconds in (59.0, 60.0)] == [5, 10]


def test_it_says_what_it_knows() -> None:
    assert repr(learned(10)) == "<BatchLimit 10, tested after 60 s>"
