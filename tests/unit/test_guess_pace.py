"""How fast tokens may be guessed (rules at the top of `face/http/admin_guard.py`)."""

from carpool.face.http.admin_guard import ADDRESSES_MAX, ALL_MAX, ALL_S, OWN_MAX, OWN_S, GuessPace, network_of


def guesses(pace: GuessPace, address: str, tries: int, now: float) -> int:
    """How many of these were looked at."""
    taken = 0
    for _ in range(tries):
        if pace.wait_s(address, now) == 0.0:
            taken += 1
            pace.was_wrong(address, now)
    return taken


def test_all_together_have_a_pace_too_but_not_those_who_are_known() -> None:
    pace = GuessPace()
    pace.was_right("10.0.0.1", 0.0)
    assert sum(guesses(pace, f"10.1.{n}.1", 5, 0.0) for n in range(200)) == ALL_MAX
    assert 0.0 < pace.wait_s("10.0.0.2", 0.0) <= ALL_S
    assert pace.wait_s("10.0.0.1", 0.0) == 0.0
    assert guesses(pace, "10.0.0.1", 50, 0.0) == OWN_MAX, "of its own it has no more than others"
    assert pace.wait_s("10.0.0.2", ALL_S + 60 * OWN_S) == 0.0


def test_what_is_remembered_is_bounded() -> None:
    pace = GuessPace()
    for number in range(5 * ADDRESSES_MAX):
        pace.was_wrong(f"w{number}", float(number % 3))
        pace.was_right(f"r{number}", 0.0)
        assert len(pace) <= 2 * ADDRESSES_MAX + 1


def test_a_network_of_ipv6_is_one_address() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1")
    assert network_of("2001:db8::1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:10.0.0.1") != network_of("::ffff:10.0.0.2")
    assert (network_of("10.0.0.1"), network_of("")) == ("10.0.0.1", "")
