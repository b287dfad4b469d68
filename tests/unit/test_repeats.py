"""Whether an answer is the one before it, again: rule by rule (the numbers are those of `repeats.py`)."""

from carpool.upstream.repeats import (
    ANSWER_BYTES_MIN,
    BELIEVED_S,
    CallAndAnswer,
    Repeats,
    fingerprint_of,
    fingerprint_of_end,
)

NOW = 1000.0
ANSWER = b"a" * ANSWER_BYTES_MIN


def exchange(call: bytes, answer: bytes = ANSWER) -> CallAndAnswer:
    return CallAndAnswer(fingerprint_of(call), fingerprint_of_end(len(answer), b"head" + answer))


def test_2_an_endpoint_that_does_answer_so_is_believed_for_a_while() -> None:
    for call in (b"2", b"3"):  # the same call again, or yet another
        repeats = Repeats()
        assert repeats.is_doubtful(exchange(b"2"), exchange(b"1"), NOW)
        assert repeats.seen_alone(exchange(call), NOW) == "answers so"
        assert not repeats.is_doubtful(exchange(b"4"), exchange(b"3"), NOW + BELIEVED_S - 1)
        assert repeats.is_doubtful(exchange(b"4"), exchange(b"3"), NOW + BELIEVED_S)


def test_3_an_endpoint_that_has_another_answer_repeats() -> None:
    repeats = Repeats()
    assert repeats.is_doubtful(exchange(b"2"), exchange(b"1"), NOW)
    assert repeats.seen_alone(exchange(b"3", b"b" * 99), NOW) == "nothing"
    assert repeats.seen_alone(exchange(b"2", b"b" * 99), NOW) == "repeats"
    assert repeats.seen_alone(exchange(b"2", b"b" * 99), NOW) == "nothing"  # nothing is in doubt any more


def test_3_the_call_whose_answer_it_may_be_has_it_by_right() -> None:
    """It is asked again by chance, on a connection of its own: that shows nothing, and the doubt stays."""
    repeats = Repeats()
    assert repeats.is_doubtful(exchange(b"2"), exchange(b"1"), NOW)
    assert repeats.seen_alone(exchange(b"1"), NOW) == "nothing"
    assert repeats.is_doubtful(exchange(b"4"), exchange(b"3"), NOW)  # nothing is believed
    assert repeats.seen_alone(exchange(b"3"), NOW) == "nothing"
    assert repeats.seen_alone(exchange(b"4", b"b" * 99), NOW) == "repeats"


def test_4_short_answers_are_not_compared() -> None:
    assert not Repeats().is_doubtful(exchange(b"2", ANSWER[1:]), exchange(b"1", ANSWER[1:]), NOW)
