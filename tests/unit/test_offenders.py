"""Offenders: who rides apart, for how long, and whom refusals have in common."""

import pytest

from carpool.upstream.offenders import (
    HALF_LIFE_S,
    TOLD_S,
    TRACKED_MAX,
    CommonOwner,
    Offenders,
)

ME, YOU = ("m", "me"), ("m", "you")


def refuse(offenders: Offenders, times: int, now: float = 0.0, owner: str = "me") -> None:
    for _ in range(times):
        offenders.refused("m", owner, now)


def test_one_or_two_refused_inputs_are_nothing() -> None:
    offenders = Offenders()
    refuse(offenders, 2)
    assert not offenders and ME not in offenders
    refuse(offenders, 1)
    assert offenders and ME in offenders and YOU not in offenders
    assert ("another model", "me") not in offenders
    assert offenders.set_apart == 1


def test_it_returns_when_its_inputs_pass() -> None:
    offenders = Offenders()
    refuse(offenders, 100)
    passes = 0
    while ME in offenders:
        offenders.passed("m", "me", 0.0)
        passes += 1
    assert 200 < passes < 400


def test_it_returns_after_a_quiet_time_and_is_forgotten() -> None:
    offenders = Offenders()
    refuse(offenders, 100)
    offenders.look(2.9 * HALF_LIFE_S)
    assert ME in offenders
    offenders.look(3.1 * HALF_LIFE_S)
    assert ME not in offenders
    offenders.look(7 * HALF_LIFE_S)
    assert "tracked=0" in repr(offenders)


def test_while_its_requests_wait_time_does_nothing_for_it() -> None:
    """Nobody has tested them: back among the others, the same bad inputs would fail everybody's batches."""
    offenders = Offenders()
    refuse(offenders, 100)
    refuse(offenders, 100, owner="you")
    for second in range(int(4 * HALF_LIFE_S)):
        offenders.look(float(second), waiting={ME})
    assert ME in offenders and YOU not in offenders
    offenders.look(4 * HALF_LIFE_S + 2.9 * HALF_LIFE_S)  # from now on nothing of it waits
    assert ME in offenders
    offenders.look(4 * HALF_LIFE_S + 3.1 * HALF_LIFE_S)
    assert ME not in offenders


def test_requests_that_wait_make_nobody_an_offender_and_keep_nobody_s_score() -> None:
    offenders = Offenders()
    refuse(offenders, 2)
    offenders.look(HALF_LIFE_S, waiting={ME})
    refuse(offenders, 1, HALF_LIFE_S)
    assert ME not in offenders


@pytest.mark.parametrize(("every", "is_apart"), [(20, True), (100, False)])
def test_at_high_rates_the_share_decides(every: int, is_apart: bool) -> None:
    offenders = Offenders()
    for number in range(3000):
        now = number / 1000
        if number % every == 0:
            offenders.refused("m", "me", now)
        else:
            offenders.passed("m", "me", now)
    assert (ME in offenders) == is_apart


def test_what_others_say_is_believed_while_they_repeat_it() -> None:
    offenders = Offenders()
    offenders.told([YOU], 10.0)
    assert YOU in offenders
    assert offenders.of_model("m") == ["you"]
    assert offenders.seen_at("m") == []  # and is not told on
    offenders.look(10.0 + TOLD_S + 0.1)
    assert not offenders


def test_memory_is_bounded() -> None:
    offenders = Offenders()
    for number in range(TRACKED_MAX + 10):
        refuse(offenders, 3, owner=str(number))
    assert f"tracked={TRACKED_MAX}" in repr(offenders)
    assert ("m", "0") not in offenders and ("m", str(TRACKED_MAX + 9)) in offenders


def test_one_owner_that_is_in_every_refusal_is_found() -> None:
    common = CommonOwner()
    everybody = {"a", "b", "c", "d"}
    assert [common.refused(everybody, is_batch=True) for _ in range(3)] == [None] * 3
    assert common.refused({"a", "b"}, is_batch=False) is None
    assert common.answered({"a", "c"}) == "b"


def test_few_batches_are_not_enough() -> None:
    common = CommonOwner()
    assert common.refused({"a", "b"}, is_batch=True) is None
    assert common.refused({"a"}, is_batch=False) is None
    assert common.refused({"a", "c"}, is_batch=True) is None
    assert common.refused({"a", "d"}, is_batch=True) is None  # nothing was answered: it may be the endpoint
    assert common.answered({"b", "c"}) == "a"


def test_refusals_that_nobody_explains_begin_again() -> None:
    common = CommonOwner()
    for owners in ({"a", "b"}, {"a", "c"}, {"b", "d"}):
        assert common.refused(owners, is_batch=True) is None
    assert "1 batches" in repr(common)
    common.forget()
    assert not common
