"""What may stand between other inputs, and what may not: the edges of each check."""

import pytest

from carpool.face.http.strict_json import DEPTH_MAX, LARGE_NUMBERS_MAX, NUMBER_CHARS_MAX, json_fault


def nested(depth: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return opening * depth + closing * depth


@pytest.mark.parametrize(
    "raw",
    [
        b"null",
        b"0",
        b"-0.0",
        b'""',
        b'"a"',
        '"äöü 🚗"'.encode(),
        rb'"\ud83d\ude97"',
        b'"]},{\\""',
        b"1e308",
        b"-1.7976931348623157e308",
        b"1e-400",
        b"1e00000000000000000000000000000000000001",
        b"9" * NUMBER_CHARS_MAX,
        b"-" + b"9" * (NUMBER_CHARS_MAX - 1),
        b"0." + b"1" * (NUMBER_CHARS_MAX - 2),
        b"0.1e-" + b"9" * (NUMBER_CHARS_MAX - 5),
        nested(DEPTH_MAX),
        nested(DEPTH_MAX, b'{"a":', b"}").replace(b":}", b":1}"),
        b"[" + b"[]," * 200 + b"[]]",
        b'"' + b"9" * 1000 + b"e999" + b"[" * 1000 + b'"',
        b'["' + b"9" * 1000 + b'","' + b"[{" * 100 + b'","\\"1e999"]',
        b'{"1e999":1,"' + b"[" * 70 + b'":2}',
        b'{"a":1,"a":2}',
        b"[" + b",".join([b"-1.7976931348623157e308"] * 3 * LARGE_NUMBERS_MAX) + b"]",
        b'["\\\\","1e999","\\\\\\"",1e308,"1e999,\\"1e999"]',
        # Strings across the places where a long value is cut.
        b"[" + b",".join([b'"' + b"a" * n + b'1e999"' for n in range(600)]) + b",1e308]",
        b"0e999",
        b"0." + b"0" * 250 + b"1e500",
    ],
    ids=repr,
)
def test_safe_to_splice(raw: bytes) -> None:
    assert json_fault(raw) is None


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b'"\xff"', "UTF-8"),
        (b'"\xc0\x80"', "UTF-8"),
        (b'"\xed\xa0\x80"', "UTF-8"),
        (b'{"\xe4":1}', "UTF-8"),
        (b'["a", "\xf4\x90\x80\x80"]', "UTF-8"),
        (nested(DEPTH_MAX + 1), "nested"),
        (nested(DEPTH_MAX + 1, b'{"a":', b"}").replace(b":}", b":1}"), "nested"),
        (b"[" * 40 + b'{"]]]]":' * 25 + b"1" + b"}" * 25 + b"]" * 40, "nested"),
        (b"9" * (NUMBER_CHARS_MAX + 1), "characters"),
        (b"[1," + b"-" + b"9" * NUMBER_CHARS_MAX + b"]", "characters"),
        (b"0." + b"0" * (NUMBER_CHARS_MAX - 1), "characters"),
        (b"1e" + b"0" * (NUMBER_CHARS_MAX - 1), "characters"),
        (b"1e309", "double"),
        (b"-1E+309", "double"),
        (b"[1.5e3, 2e400]", "double"),
        (b'{"a":{"b":1e0000000999}}', "double"),
        (b"9" * 100 + b"e250", "double"),
        (b"9" * 250 + b"e99", "double"),
        (b"[true,17976931348623159E292]", "double"),
        (b"[" + b",".join([b'"' + b"a" * n + b'"' for n in range(600)]) + b",1e309]", "double"),
        (
            b"[%b]" % b",".join(b"%de300" % n for n in range(1, LARGE_NUMBERS_MAX + 2)),
            "more than 8192 different numbers",
        ),
        (b"[" + b"1e300," * LARGE_NUMBERS_MAX + b"1e309]", "too large"),
        (b"[" + b"[]," * 1000 + nested(DEPTH_MAX) + b"]", "nested"),
    ],
    ids=repr,
)
def test_not_safe(raw: bytes, fault: str) -> None:
    found = json_fault(raw)
    assert found is not None and fault in found
