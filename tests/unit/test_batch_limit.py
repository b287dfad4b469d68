"""What is believed of an endpoint's limit: rule by rule (the numbers are those of `limits.py`)."""

from carpool.upstream.limits import BatchLimit

NOW = 1000.0


def learned(limit: int = 32, now: float = NOW) -> BatchLimit:
    """One that has just learned this."""
    known = BatchLimit()
    assert known.said(limit, 64, now)
    return known


def test_1_never_below_what_was_answered_lately() -> None:
    known = BatchLimit()
    known.answered(40, NOW)
    assert not known.said(1, 64, NOW + 59.0)
    assert known.said(40, 64, NOW + 59.0)
    quiet = BatchLimit()
    quiet.answered(40, NOW)
    assert quiet.said(1, 64, NOW + 121.0)


def test_3_not_while_one_as_large_was_answered_lately() -> None:
    """A bad moment of an endpoint that took them a minute ago."""
    known = BatchLimit()
    known.answered(64, NOW)
    assert [known.split(64, 32, NOW + second) for second in (1.0, 2.0, 3.0)] == [False] * 3
    assert known.split(64, 32, NOW + 121.0)


def test_4_a_new_limit_is_tested_as_soon_as_the_first() -> None:
    known = learned(10)
    known.largest(NOW + 60.0, 64)
    known.said(10, 20, NOW + 60.0)
    known.said(5, 10, NOW + 70.0)
    assert [known.largest(NOW + 70.0 + seconds, 64) for seconds in (59.0, 60.0)] == [5, 10]


def test_it_says_what_it_knows() -> None:
    assert repr(learned(10)) == "<BatchLimit 10, tested after 60 s>"
