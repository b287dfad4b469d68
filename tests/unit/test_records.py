"""Queue entries as they are written into Redis."""

import string

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.broker.redis.formats import (
    ENTRY_FORMAT,
    Header,
    UnknownFormatError,
    decode_header,
    decode_value,
    encode_header,
    encode_value,
    value_parts,
)

ids = st.text(string.ascii_letters + string.digits + "-_", max_size=255)
owners = st.text(string.hexdigits + ".:/", max_size=64)
HEADER = Header(ENTRY_FORMAT, b"g1", "m", b"{}", b"", 0, False, 2000, 4000)


@given(st.integers(0, 2**64 - 1), ids, owners, st.binary(max_size=300))
def test_a_value_reads_as_it_was_written(ticket: int, request_id: str, owner: str, content: bytes) -> None:
    value = encode_value(ticket, request_id, owner, content)
    assert decode_value(value) == (ticket, request_id, owner, content)
    size, *parts = value_parts(ticket, request_id, owner, content)
    assert (size, b"".join(parts)) == (len(value), value)


def test_an_entry_of_another_format_is_left_to_others() -> None:
    assert decode_header(encode_header(HEADER)) == HEADER
    for version in (0, ENTRY_FORMAT - 1, ENTRY_FORMAT + 1):
        with pytest.raises(UnknownFormatError, match=f"format {version}"):
            decode_header(encode_header(msgspec.structs.replace(HEADER, version=version)))
