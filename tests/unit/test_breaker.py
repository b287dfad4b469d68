"""When an endpoint is left alone."""

import pytest

from carpool.upstream.breaker import Breaker

NOW = 1000.0


def opened(*, failures_max: int = 3, pause_s: float = 1.0, pause_s_max: float = 30.0) -> Breaker:
    """A breaker that opened at NOW, with no jitter: its pause ends a half of `pause_s` later."""
    breaker = Breaker(failures_max, pause_s, pause_s_max)
    for _ in range(failures_max):
        breaker.failed(NOW, 0.0)
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = Breaker(failures_max=3)
    assert [breaker.failed(NOW, 0.0) for _ in range(3)] == [False, False, True]
    assert (breaker.state, breaker.failures, breaker.allows(NOW)) == ("open", 3, False)
    assert repr(breaker) == "<Breaker open failures=3>"


@pytest.mark.parametrize(("share", "pause_s"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
def test_half_of_the_pause_is_jitter(share: float, pause_s: float) -> None:
    breaker = Breaker(failures_max=1, pause_s=1.0)
    breaker.failed(NOW, share)
    assert breaker.probe_at() == NOW + pause_s
    assert not breaker.allows(NOW + pause_s - 0.001)
    assert breaker.allows(NOW + pause_s)


def test_the_pause_doubles_with_each_failed_probe_up_to_a_limit_and_a_success_forgets_it() -> None:
    breaker = opened(pause_s=1.0, pause_s_max=5.0)
    now, pauses_s = NOW, [breaker.probe_at() - NOW]
    for _ in range(4):
        now = breaker.probe_at()
        breaker.started(now)
        assert breaker.failed(now, 0.0, probe=True, may_open=False)  # it is out already
        pauses_s.append(breaker.probe_at() - now)
    assert pauses_s == [0.5, 1.0, 2.0, 2.5, 2.5]
    breaker.succeeded()
    for _ in range(3):
        breaker.failed(now, 0.0)
    assert breaker.probe_at() - now == 0.5


def test_old_failures_change_nothing_during_the_pause_or_a_probe() -> None:
    breaker = opened()
    assert not breaker.failed(NOW + 0.4, 0.0)
    assert (breaker.state, breaker.probe_at(), breaker.failures) == ("open", NOW + 0.5, 3)
    breaker.started(NOW + 1)
    assert not breaker.failed(NOW + 1, 0.0)
    assert breaker.state == "half-open"


def test_it_can_be_opened_from_outside() -> None:
    breaker = Breaker()
    breaker.open(NOW, 0.0)
    assert (breaker.state, breaker.allows(NOW)) == ("open", False)
    breaker.probe_left()  # of nobody
    assert breaker.state == "open"


# Inputs of one owner.


def test_further_failures_of_one_search_close_it_to_its_owner_alone() -> None:
    breaker = Breaker(failures_max=3)
    breaker.failed(NOW, 0.0, owners=["me"])
    assert [breaker.failed_again(NOW, 0.0, "me", may_open=True) for _ in range(3)] == [False, True, False]
    assert breaker.allows_others() and not breaker.allows(NOW)


def test_nor_do_those_of_another_owner_help_each_other() -> None:
    breaker = Breaker(failures_max=3)
    for owner in ("me", "you", "him", "her"):
        assert not breaker.failed_again(NOW, 0.0, owner, may_open=True)
    assert breaker.state == "closed"


# Failures that were healed elsewhere.


def test_healed_failures_open_only_what_the_pool_can_do_without() -> None:
    breaker = Breaker(failures_max=2)
    assert not any(breaker.record_answered_elsewhere(NOW, 0.0, may_open=False) for _ in range(9))
    assert (breaker.state, breaker.is_failing) == ("closed", False)
    assert breaker.record_answered_elsewhere(NOW, 0.0, may_open=True)


def test_pauses_go_on_doubling_until_few_were_healed() -> None:
    breaker = Breaker(failures_max=1, pause_s=1.0)
    pauses_s, now = [], NOW
    for answered in (1, 1, 99, 0):
        assert breaker.record_answered_elsewhere(now, 0.0, may_open=True)
        pauses_s.append(breaker.probe_at() - now)
        now = breaker.probe_at()
        assert breaker.started(now)
        for _ in range(answered):
            breaker.succeeded()
    assert pauses_s == [0.5, 1.0, 2.0, 0.5]


def test_what_was_closed_to_one_owner_is_closed_to_all_when_a_failure_is_healed() -> None:
    breaker = Breaker(failures_max=2)
    for _ in range(2):
        breaker.failed(NOW, 0.0, owners=["me"])
    assert breaker.allows_others()
    assert breaker.record_answered_elsewhere(NOW, 0.0, may_open=True)
    assert not breaker.allows_others() and breaker.probe_at() > NOW
