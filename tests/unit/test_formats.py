"""Queue entries as they are written into Redis."""

import string
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.broker.redis.formats import (
    ENTRY_FORMAT,
    REPLY_FORMAT,
    EntryRecord,
    Header,
    More,
    NewerFormatError,
    Reply,
    UnknownFormatError,
    decode_header,
    decode_reply,
    decode_value,
    encode_header,
    encode_more,
    encode_record,
    encode_reply,
)
from carpool.core.outcome import CallFacts

ids = st.text(string.ascii_letters + string.digits + "-_", max_size=255)
owners = st.text(string.hexdigits + ".:/", max_size=64)
texts = st.text(max_size=200)
numbers = st.integers(0, 2**63)
records = st.builds(
    EntryRecord, numbers, ids, owners, numbers, numbers, st.builds(More, texts, texts, st.binary(max_size=32))
)
HEADER = Header(ENTRY_FORMAT, b"g1", "m", b"{}", b"", 0, False, 2000)


def beginning_of(record: EntryRecord, more: bytes) -> bytes:
    return encode_record(record.number, record.request_id, record.owner, record.remaining_ms, more, record.sent_ms)


@given(records, st.binary(max_size=300))
def test_a_value_reads_as_it_was_written(record: EntryRecord, content: bytes) -> None:
    more = record.more
    whole = beginning_of(record, encode_more(more.client_id, more.result_key, more.trace))
    assert decode_value(whole + content) == (record, content)
    short = beginning_of(record, b"")
    bare = msgspec.structs.replace(record, more=More())
    assert decode_value(short + content) == (bare, content)


@given(records, st.binary(max_size=50), st.lists(st.one_of(st.none(), st.integers(0, 9), ids), min_size=1, max_size=4))
def test_what_a_newer_program_adds_is_skipped(record: EntryRecord, content: bytes, more: list[object]) -> None:
    end = msgspec.msgpack.encode([*msgspec.structs.astuple(record.more), *more])
    value = beginning_of(record, end) + content
    assert decode_value(value) == (record, content)
    header = msgspec.msgpack.encode([*msgspec.structs.astuple(HEADER), *more])
    assert decode_header(header) == HEADER


@given(st.binary(max_size=60))
def test_whatever_a_value_is_it_is_read_or_refused(data: bytes) -> None:
    with suppress(UnknownFormatError):
        decode_value(data)


def test_entries_of_other_formats_are_told_apart() -> None:
    assert decode_header(encode_header(HEADER)) == HEADER
    with pytest.raises(NewerFormatError, match=f"format {ENTRY_FORMAT + 1}"):
        decode_header(encode_header(msgspec.structs.replace(HEADER, version=ENTRY_FORMAT + 1)))
    for version in (0, 1, 2):
        with pytest.raises(UnknownFormatError, match=f"format {version}"):
            decode_header(encode_header(msgspec.structs.replace(HEADER, version=version)))


# Replies

CALL = CallFacts(3, 0.25, "v1", cached=True, endpoint="http://gpu:8000/", attempts=2, started_s=0.5)


class OlderCallRecord(msgspec.Struct, frozen=True, array_like=True):
    """As it was written, and read, before the endpoint was in it."""

    batch_size: int
    upstream_s: float
    model_version: str | None


def reply_with(call: object) -> list[object]:
    return [REPLY_FORMAT, [call], [(7, 0, 0.1, b'"out"', None)], [], []]


def test_all_that_is_known_of_a_call_arrives() -> None:
    reply = decode_reply(encode_reply(Reply(calls=[CALL], outputs=[(7, 0, 0.1, b'"out"', None)])))
    (call,) = reply.calls
    assert msgspec.structs.asdict(call) == msgspec.structs.asdict(CALL)


def test_a_gateway_that_knows_less_of_a_call_understands() -> None:
    written = msgspec.msgpack.encode(CALL)
    assert msgspec.msgpack.decode(written, type=OlderCallRecord) == OlderCallRecord(3, 0.25, "v1")


def test_what_a_newer_batcher_knows_of_a_call_is_skipped() -> None:
    written = (*msgspec.structs.astuple(CALL), "something else")
    (call,) = decode_reply(msgspec.msgpack.encode(reply_with(written))).calls
    assert msgspec.structs.asdict(call) == msgspec.structs.asdict(CALL)
