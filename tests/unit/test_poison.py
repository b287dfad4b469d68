"""Inputs that are known to be bad."""

import pytest

from carpool.core.request import Request
from carpool.testing import Witness, make_request
from carpool.upstream import poison
from carpool.upstream.poison import KnownPoison

NOW = 1000.0


def request(value: bytes, model: str = "m", parameters: bytes = b"") -> Request:
    return make_request("r", Witness(), now=NOW, model=model, parameters=parameters, value=value)


def test_it_is_forgotten_after_a_while_unless_it_is_met_again() -> None:
    known = KnownPoison()
    known.add(request(b"1"), NOW)
    known.add(request(b"2"), NOW + 100.0)
    known.add(request(b"1"), NOW + 200.0)
    assert len(known) == 2
    both = [request(b"1"), request(b"2")]
    assert known.among(both, NOW + 399.0) == both
    assert known.among(both, NOW + 401.0) == both[:1]
    assert known.among(both, NOW + 501.0) == []
    assert len(known) == 0


def test_the_oldest_goes_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poison, "KEPT_MAX", 3)
    known = KnownPoison()
    for number in range(5):
        known.add(request(b"%d" % number), NOW)
    assert len(known) == 3
    everything = [request(b"%d" % number) for number in range(5)]
    assert known.among(everything, NOW) == everything[2:]
