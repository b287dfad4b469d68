"""Quarantined owners: which ones, for how long, and whom refusals have in common."""

from carpool.upstream.quarantine import (
    HALF_LIFE_S,
    TOLD_S,
    TRACKED_MAX,
    CommonOwner,
    Quarantine,
)

ME, YOU = ("m", "me"), ("m", "you")


def refuse(quarantined: Quarantine, times: int, now: float = 0.0, owner: str = "me") -> None:
    for _ in range(times):
        quarantined.refused("m", owner, now)


def test_one_or_two_refused_inputs_are_nothing() -> None:
    quarantined = Quarantine()
    refuse(quarantined, 2)
    assert not quarantined and ME not in quarantined
    refuse(quarantined, 1)
    assert quarantined and ME in quarantined and YOU not in quarantined
    assert ("another model", "me") not in quarantined
    assert quarantined.were_quarantined == 1


def test_it_returns_when_its_inputs_pass() -> None:
    quarantined = Quarantine()
    refuse(quarantined, 100)
    passes = 0
    while ME in quarantined:
        quarantined.passed("m", "me", 0.0)
        passes += 1
    assert 200 < passes < 400


def test_it_returns_after_a_quiet_time_and_is_forgotten() -> None:
    quarantined = Quarantine()
    refuse(quarantined, 100)
    quarantined.look(2.9 * HALF_LIFE_S)
    assert ME in quarantined
    quarantined.look(3.1 * HALF_LIFE_S)
    assert ME not in quarantined
    quarantined.look(7 * HALF_LIFE_S)
    assert "tracked=0" in repr(quarantined)


def test_requests_that_wait_make_nobody_an_offender_and_keep_nobody_s_score() -> None:
    quarantined = Quarantine()
    refuse(quarantined, 2)
    quarantined.look(HALF_LIFE_S, waiting={ME})
    refuse(quarantined, 1, HALF_LIFE_S)
    assert ME not in quarantined


def test_what_others_say_is_believed_while_they_repeat_it() -> None:
    quarantined = Quarantine()
    quarantined.told([YOU], 10.0)
    assert YOU in quarantined
    assert quarantined.of_model("m") == ["you"]
    assert quarantined.seen_at("m") == []  # and is not told on
    quarantined.look(10.0 + TOLD_S + 0.1)
    assert not quarantined


def test_memory_is_bounded() -> None:
    quarantined = Quarantine()
    for number in range(TRACKED_MAX + 10):
        refuse(quarantined, 3, owner=str(number))
    assert f"tracked={TRACKED_MAX}" in repr(quarantined)
    assert ("m", "0") not in quarantined and ("m", str(TRACKED_MAX + 9)) in quarantined


def test_refusals_that_nobody_explains_begin_again() -> None:
    common = CommonOwner()
    for owners in ({"a", "b"}, {"a", "c"}, {"b", "d"}):
        assert common.refused(owners, is_batch=True) is None
    assert "1 batches" in repr(common)
    common.forget()
    assert not common
