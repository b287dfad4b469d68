"""What Carpool itself reads and writes of protobuf's wire format; the rest is left to messages.py. Pure.

1. Traces are written by hand (telemetry/spans.py): they need nothing installed, and it is faster.
2. Long inputs and raw tensors are cut out of a message before it is parsed, and put behind one that was serialized: a
   message object would copy them three times. Fields may stand in any order, so that is a message too.
3. A short message can become a large object, so the fields of a long one are counted before it is parsed.
"""

import struct
from collections.abc import Container, Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_64_BITS = 0xFFFF_FFFF_FFFF_FFFF
_CUT_OFF = "the message is cut off"

pack_double = struct.Struct("<d").pack
# Lengths and small numbers, which are most of them.
VARINTS = [bytes([n]) if n < 0x80 else bytes([n & 0x7F | 0x80, n >> 7]) for n in range(0x4000)]


class BadMessageError(ValueError):
    """These bytes are no such message. The text names no payload."""


def varint(number: int) -> bytes:
    """A number in as many bytes as it needs; a negative one as its complement of 64 bits."""
    if 0 <= number < 0x4000:
        return VARINTS[number]
    number &= _64_BITS
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def field(number: int, content: bytes) -> bytes:
    """A field that has a length: a message, text or bytes."""
    return start_of_field(number, len(content)) + content


def start_of_field(number: int, size: int) -> bytes:
    """What stands before the `size` bytes of such a field."""
    return varint(number << 3 | BYTES) + varint(size)


def number_field(number: int, value: int) -> bytes:
    """A field with a whole number, an enum's value or a truth."""
    return varint(number << 3 | VARINT) + varint(value)


def double_field(number: int, value: float) -> bytes:
    """A field with a number of 64 bits that has a fraction."""
    return varint(number << 3 | FIXED64) + pack_double(value)


def read_varint(data: memoryview, place: int) -> tuple[int, int]:
    """The number at `place`, and the place behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            break
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _64_BITS, place
    raise BadMessageError(_CUT_OFF)


def fields(data: memoryview, most: int) -> Iterator[tuple[int, memoryview | None, int]]:
    """The number of each field, a view of what is in it, or None where that is a number, and the place behind it.

    Raises BadMessageError, also if there are more than `most`.
    """
    place, end, count = 0, len(data), 0
    while place < end:
        count += 1
        if count > most:
            raise BadMessageError(f"the message has more than {most} fields")
        number, place = read_varint(data, place)
        wire_type = number & 7
        number >>= 3
        content = None
        if wire_type == VARINT:
            _, place = read_varint(data, place)
        elif wire_type == BYTES:
            length, begin = read_varint(data, place)
            place = begin + length
            content = data[begin:place]
        elif wire_type in (FIXED32, FIXED64):
            place += 4 if wire_type == FIXED32 else 8
        else:
            raise BadMessageError("the message has a field of an unknown kind")
        if place > end:
            raise BadMessageError(_CUT_OFF)
        yield number, content, place


def cut_out(message: bytes, numbers: Container[int], most: int) -> tuple[bytes, list[tuple[int, memoryview]]]:
    """A message without its fields of these numbers, and views of what is in those; raises BadMessageError."""
    view, start, kept_until = memoryview(message), 0, 0
    rest: list[memoryview] = []
    found: list[tuple[int, memoryview]] = []
    for number, content, end in fields(view, most):
        if number in numbers and content is not None:
            found.append((number, content))
            rest.append(view[start:kept_until])
            start = end
        kept_until = end
    rest.append(view[start:])
    return b"".join(rest), found
