"""Protobuf's wire format, as much of it as Carpool reads and writes. Pure.

Written by hand because it is little, and because the generated alternative costs more than it gives: the `protobuf`
package comes in versions that exclude one another, so that a gateway that pins one gets in the way of whatever else
is installed beside it; and it copies what it reads once more. Tests compare this file with real protobuf.

1. A message is a run of fields, each a tag (number << 3 | wire type) and a value. Unknown fields are skipped.
2. Repeated numbers come packed or one by one; both are read.
3. Whatever ends outside of its message is a BadMessageError.
4. Of a memoryview the values are views of it: nothing is copied until a caller asks for bytes or text.
"""

import struct
from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_64_BITS = 0xFFFF_FFFF_FFFF_FFFF
_CUT_OFF = "the message is cut off"

_DOUBLE = struct.Struct("<d")
pack_double = _DOUBLE.pack
NUMBERS_AT_ONCE = 16384
# Lengths and small numbers, which are most of them.
VARINTS = [bytes([n]) if n < 0x80 else bytes([n & 0x7F | 0x80, n >> 7]) for n in range(0x4000)]

Message = bytes | memoryview
# A number, or whatever else is in a field.
Value = int | bytes | memoryview


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


def tag(number: int, wire_type: int) -> bytes:
    """What stands before a value."""
    return varint(number << 3 | wire_type)


def field(number: int, content: bytes) -> bytes:
    """A field that has a length: a message, text or bytes."""
    return varint(number << 3 | BYTES) + varint(len(content)) + content


def number_field(number: int, value: int) -> bytes:
    """A field with a whole number, an enum's value or a truth."""
    return varint(number << 3 | VARINT) + varint(value)


def double_field(number: int, value: float) -> bytes:
    """A field with a number of 64 bits that has a fraction."""
    return varint(number << 3 | FIXED64) + pack_double(value)


def read_varint(data: Message, place: int) -> tuple[int, int]:
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


def fields(data: Message, most: int = 0) -> Iterator[tuple[int, Value]]:
    """The fields of a message: numbers as int, everything else as bytes or a view. With more than `most`, it is bad."""
    place, end, count = 0, len(data), 0
    while place < end:
        count += 1
        if count == most + 1 and most:
            raise BadMessageError(f"the message has more than {most} fields")
        number = data[place]
        place += 1
        if number >= 0x80:
            number, place = read_varint(data, place - 1)
        wire_type = number & 7
        number >>= 3
        if not number:
            raise BadMessageError("the message has a field of an unknown kind")
        if wire_type == VARINT:
            value, place = read_varint(data, place)
            yield number, value
            continue
        if wire_type == BYTES:
            if place >= end:
                raise BadMessageError(_CUT_OFF)
            length = data[place]
            place += 1
            if length >= 0x80:
                length, place = read_varint(data, place - 1)
        elif wire_type == FIXED32:
            length = 4
        elif wire_type == FIXED64:
            length = 8
        else:
            raise BadMessageError("the message has a field of an unknown kind")
        begin = place
        place += length
        if place > end:
            raise BadMessageError(_CUT_OFF)
        yield number, data[begin:place]


def as_message(value: Value) -> Message:
    """What is in a field that is no number."""
    if isinstance(value, int):
        raise BadMessageError("a field of the message has the wrong type")
    return value


def as_bytes(value: Value) -> bytes:
    """The bytes of a field; those of a view are copied."""
    return bytes(as_message(value))


def as_text(value: Value) -> str:
    """The text of a field."""
    try:
        return str(as_message(value), "utf-8")
    except UnicodeDecodeError:
        raise BadMessageError("a text in the message is not valid UTF-8") from None


def as_number(value: Value) -> int:
    """A number with sign."""
    if not isinstance(value, int):
        raise BadMessageError("a field of the message has the wrong type")
    return value - (1 << 64) if value >> 63 else value


def as_numbers(value: Value) -> list[int]:
    """Numbers with sign, packed or one alone."""
    return [number for numbers in numbers_in(value) for number in numbers]


def numbers_in(value: Value) -> Iterator[list[int]]:
    """The same, some at a time: there may be a million of them."""
    if isinstance(value, int):
        yield [as_number(value)]
        return
    place, end = 0, len(value)
    while place < end:
        numbers: list[int] = []
        while place < end and len(numbers) < NUMBERS_AT_ONCE:
            number = value[place]
            place += 1
            if number >= 0x80:
                number, place = read_varint(value, place - 1)
                number = number - (1 << 64) if number >> 63 else number
            numbers.append(number)
        yield numbers


def read_double(value: Value) -> float:
    """A number of 64 bits that has a fraction."""
    data = as_bytes(value)
    if len(data) != _DOUBLE.size:
        raise BadMessageError("a field of the message has the wrong type")
    number: float = _DOUBLE.unpack(data)[0]
    return number
