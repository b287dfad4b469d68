"""What is kept of requests that are over, and of what was worked out for them: bounded by number and by bytes."""

import msgspec
import pytest

from carpool.core.errors import Malformed
from carpool.core.kept import Kept
from carpool.core.request import Request
from carpool.face.http.wire import PARAMETERS_BYTES_MAX, canonical_parameters
from carpool.face.intake import Recent
from carpool.testing import Witness, make_request


def request_with(number: int, parameters: bytes = b"", lane: bytes = b"") -> Request:
    request = make_request(str(number), Witness(), now=0.0)
    request.parameters, request.lane = parameters, lane
    return request


def test_recent_requests_are_bounded_by_number() -> None:
    recent = Recent(3)
    for number in range(5):
        recent.add(request_with(number))
        recent.add(request_with(10 + number, b"{}"))
    assert [request.id for request in recent] == ["2", "3", "4", "12", "13", "14"]


def test_recent_requests_are_bounded_by_the_bytes_that_they_keep() -> None:
    recent = Recent(1000, 100)
    for number in range(50):
        recent.add(request_with(number, b"p" * 20, b"l" * 10))
    assert [request.id for request in recent] == ["47", "48", "49"]
    # One that is longer than all may be is not kept; those without parameters are not pushed out.
    recent.add(request_with(50))
    recent.add(request_with(51, b"p" * 101))
    assert [request.id for request in recent] == ["50"]
    recent.add(request_with(52, b"p" * 100))
    assert [request.id for request in recent] == ["50", "52"]


def test_what_was_worked_out_is_bounded_by_number_and_by_bytes() -> None:
    kept: Kept[int, str] = Kept(3, 100)
    for number in range(4):
        kept.keep(number, "short", 10)
    assert dict(kept) == {3: "short"}
    kept.keep(4, "long", 90)
    assert dict(kept) == {3: "short", 4: "long"}
    kept.keep(5, "one more", 1)
    assert dict(kept) == {5: "one more"}
    kept.keep(6, "too long", 101)
    assert dict(kept) == {5: "one more"}


def test_parameters_are_measured_as_they_are_kept() -> None:
    """`1e15` becomes 1000000000000000.0: sixteen kilobytes of it would become sixty."""
    given = b'{"a":[' + b",".join([b"1e15"] * (PARAMETERS_BYTES_MAX // 5 - 3)) + b"]}"
    assert len(given) <= PARAMETERS_BYTES_MAX
    with pytest.raises(Malformed, match="written out"):
        canonical_parameters(msgspec.Raw(given))
    short = b'{"a":[' + b",".join([b"1e15"] * 800) + b"]}"
    assert len(canonical_parameters(msgspec.Raw(short))) == 6 + 800 * 18 + 799 + 2
