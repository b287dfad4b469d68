"""Is this JSON value safe to splice between others? Pure.

`msgspec.Raw` has already checked the syntax: quotes, brackets, escapes, surrogate pairs, number grammar, no NaN.
What it lets through, and a strict parser at the upstream might refuse, together with all 63 neighbours:

1. bytes that are not UTF-8;
2. numbers beyond a double, or so long that parsing them is an attack (over 300 characters);
3. nesting deeper than 64.

The usual input, a string of ASCII, costs one C call. A scan of the whole input is done only where a cheap test
cannot rule a fault out. Why not simply decode it: an array of 220 floats takes 11 µs to decode and 3 µs this way, and
a megabyte of `1e300`, each of which msgspec parses in 10 µs, takes two seconds. So no string or array of
a client is decoded here, and of its numbers those alone that may be too large, LARGE_NUMBERS_MAX of them at most.
"""

import re
from array import array
from itertools import accumulate
from math import isfinite

DEPTH_MAX = 64
NUMBER_CHARS_MAX = 300
# A number of 1e200 or more is compared with the largest double: so many different ones, for each takes a microsecond.
LARGE_NUMBERS_MAX = 8_192
# With fewer digits than this, and an exponent below 200, a number stays far below the largest double; and one of more
# than NUMBER_CHARS_MAX characters has such a run of digits in its integer, fraction or exponent.
SUSPICIOUS_DIGITS = 90
TOO_LARGE = "a number is too large for a double"

QUOTE = 0x22
_DIGIT_RUN = b"0" * SUSPICIOUS_DIGITS
_LONG_RUN = b"0" * (NUMBER_CHARS_MAX + 1)
# Every digit becomes 0: a long run of digits, or a long exponent, is then one C-speed search.
_DIGITS_TO_ZERO = bytes(
    0x30 if byte in b"0123456789" else 0x65 if byte in b"eE" else byte if byte in b"+-." else 0x20
    for byte in range(256)
)
# Numbers stay, and what is between them becomes spaces.
_TO_NUMBERS = bytes(byte if byte in b"0123456789+-.e" else 0x65 if byte in b"E" else 0x20 for byte in range(256))
_NUMBERS_TO_ZERO = bytes(0x30 if byte in b"0123456789+-.eE" else 0x20 for byte in range(256))
# Of 200 and more. It begins with a single letter, which is looked for at C speed.
_LARGE_EXPONENT = re.compile(rb"e\+?0*(?:[2-9][0-9]{2}|[1-9][0-9]{3})")
# Strings are cut out of so many bytes at a time: each of them is an object for a moment.
_CUT_BYTES = 64 * 1024
# Brackets are looked at eight at a time. An opening one becomes the digit 1, a closing one 0, everything else is
# deleted: so eight of them are a byte, for which a table has how much deeper it leads, and how deep it goes meanwhile.
_BITS = bytes(0x31 if byte in b"[{" else 0x30 for byte in range(256))
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_PATHS = [list(accumulate(1 if byte >> bit & 1 else -1 for bit in range(7, -1, -1))) for byte in range(256)]
_DEEPER_BY = bytes(path[-1] & 0xFF for path in _PATHS)  # as a signed byte
_DEEPEST = bytes(max(0, *path) for path in _PATHS)


def json_fault(raw: bytes) -> str | None:
    """What is wrong with this syntactically valid JSON value, or None."""
    if not raw.isascii():
        try:
            raw.decode()
        except UnicodeDecodeError:
            return "not valid UTF-8"
    if raw[0] == QUOTE:
        return None  # a string has neither numbers nor depth
    maybe_deep = raw.count(b"[") + raw.count(b"{") > DEPTH_MAX
    zeros = raw.translate(_DIGITS_TO_ZERO)
    maybe_long = _DIGIT_RUN in zeros
    maybe_large = b"e" in zeros and (b"e000" in zeros or b"e+000" in zeros)
    if not (maybe_deep or maybe_long or maybe_large):
        return None
    # What is in strings does not count. All below is at C speed too: a matrix of a megabyte is an ordinary input.
    bare = _without_strings(raw) if b'"' in raw else raw
    if maybe_deep and _depth(bare) > DEPTH_MAX:
        return f"nested deeper than {DEPTH_MAX} levels"
    if not (maybe_long or maybe_large):
        return None
    numbers = b" %b " % bare.translate(_TO_NUMBERS)
    fault = _long_fault(numbers) if maybe_long else None
    return _large_fault(numbers) if fault is None and maybe_large else fault


def _without_strings(raw: bytes) -> bytes:
    """A valid JSON value without its strings, without a step for each of them."""
    if b"\\" in raw:  # once pairs of backslashes are gone, a quote behind one ends no string
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    bare: list[bytes] = []
    is_inside = 0
    for start in range(0, len(raw), _CUT_BYTES):
        parts = raw[start : start + _CUT_BYTES].split(b'"')
        bare.append(b"".join(parts[is_inside::2]))
        is_inside = (is_inside + len(parts) - 1) % 2
    return b"".join(bare)


def _depth(bare: bytes) -> int:
    """The deepest nesting of a valid JSON value without strings."""
    bits = bare.translate(_BITS, _NO_BRACKETS)
    bits += b"0" * (-len(bits) % 8)
    eights = int(bits, 2).to_bytes(len(bits) // 8, "big")
    depths = accumulate(array("b", eights.translate(_DEEPER_BY)), initial=0)
    return max(map(int.__add__, depths, eights.translate(_DEEPEST)))


def _long_fault(numbers: bytes) -> str | None:
    """What is wrong with those of these numbers that have many digits."""
    if _LONG_RUN in numbers.translate(_NUMBERS_TO_ZERO):
        return f"a number has more than {NUMBER_CHARS_MAX} characters"
    zeros = numbers.translate(_DIGITS_TO_ZERO)
    place = zeros.find(_DIGIT_RUN)
    while place >= 0:
        number = _number_at(numbers, place)
        # Without an exponent it has too few characters to be too large.
        if b"e" in number and not isfinite(float(number)):
            return TOO_LARGE
        place = zeros.find(_DIGIT_RUN, numbers.index(b" ", place))
    return None


def _large_fault(numbers: bytes) -> str | None:
    """What is wrong with those of these numbers that have large exponents."""
    for count, match in enumerate(_LARGE_EXPONENT.finditer(numbers)):
        if count >= LARGE_NUMBERS_MAX:
            return _distinct_fault(numbers)
        if not isfinite(float(_number_at(numbers, match.start()))):
            return TOO_LARGE
    return None


def _distinct_fault(numbers: bytes) -> str | None:
    """The same, where there are many: each of them once. A mask has thousands of one number, the lowest of a double."""
    found: set[bytes] = set()
    start = 0
    while start < len(numbers):  # each number is an object for a moment
        end = numbers.find(b" ", start + _CUT_BYTES)
        end = len(numbers) if end < 0 else end
        found.update(numbers[start:end].split())
        start = end
    distinct = b" %b " % b" ".join(found)
    for count, match in enumerate(_LARGE_EXPONENT.finditer(distinct)):
        if count >= LARGE_NUMBERS_MAX:
            return f"more than {LARGE_NUMBERS_MAX} different numbers are 1e200 or larger"
        if not isfinite(float(_number_at(distinct, match.start()))):
            return TOO_LARGE
    return None


def _number_at(numbers: bytes, place: int) -> bytes:
    """The number that has a character at this place; there are spaces around it."""
    return numbers[numbers.rindex(b" ", 0, place) + 1 : numbers.index(b" ", place)]
