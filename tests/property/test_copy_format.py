"""What PostgreSQL reads (`tracking/copy_format.py`) says the same as the rows that SQLite gets."""

import struct
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from carpool.core.batch import Batch
from carpool.core.outcome import CallFacts
from carpool.tracking.copy_format import (
    BATCH_COLUMNS,
    EPOCH_US,
    HEADER,
    REQUEST_COLUMNS,
    TRAILER,
    pack_batches,
    pack_requests,
)
from carpool.tracking.records import BatchRow, RequestEntry, RequestRow, batch_rows, request_rows

TIERS = ("gold", "free")
OFFSET_S = 1_700_000_000.0
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAME = TEXT.filter(bool)
SECONDS = st.floats(0, 1e6, allow_subnormal=False)
CALLS = st.builds(
    CallFacts,
    batch_size=st.integers(0, 4096),
    upstream_s=SECONDS,
    cached=st.booleans(),
    endpoint=TEXT,
    attempts=st.integers(0, 10),
    batch_id=TEXT,
    gpu_s=SECONDS,
)
ENTRIES = st.builds(
    RequestEntry,
    id=TEXT,
    owner=NAME,
    tier=st.integers(0, 3),
    model=NAME,
    code=st.sampled_from(["ok", "queue-timeout"]),
    arrived=SECONDS,
    taken=st.just(0.0) | SECONDS,
    ended=SECONDS,
    is_task=st.booleans(),
    call=CALLS,
    tokens=st.none() | st.integers(0, 2**40),
)
BATCHES = st.builds(
    Batch,
    id=NAME,
    model=NAME,
    size=st.integers(1, 4096),
    reason=NAME,
    taken=SECONDS,
    sent=st.just(0.0) | SECONDS,
    endpoint=TEXT,
    attempts=st.integers(0, 10),
    ended=SECONDS,
    result=NAME,
)
KINDS = {"is_task": "?", "cached": "?", "created_at": "q", "completed_at": "q", "sent_to_gpu_at": "q", "tokens": "q"}
KINDS |= dict.fromkeys(["batch_size", "request_count", "attempts"], "i")
KINDS |= dict.fromkeys(["queue_ms", "upstream_ms", "gpu_seconds", "seconds"], "d")


def unpack(data: bytes, columns: tuple[str, ...]) -> list[dict[str, Any]]:
    """As PostgreSQL does; all of it must be used up."""
    assert data[:19] == b"PGCOPY\n\xff\r\n\0" + bytes(8)
    at, rows = 19, []
    while (number := struct.unpack_from(">h", data, at)[0]) != -1:
        assert number == len(columns)
        at += 2
        row: dict[str, Any] = {}
        for column in columns:
            [length] = struct.unpack_from(">i", data, at)
            field = data[at + 4 : at + 4 + max(length, 0)]
            at += 4 + max(length, 0)
            if length < 0:
                row[column] = None
            elif column in KINDS:
                [row[column]] = struct.unpack(f">{KINDS[column]}", field)
                row[column] += EPOCH_US if column.endswith("_at") else 0
            else:
                row[column] = field.decode()
        rows.append(row)
    assert at + 2 == len(data)
    return rows


def assert_same(found: list[dict[str, Any]], wanted: Sequence[RequestRow | BatchRow]) -> None:
    assert len(found) == len(wanted)
    for row, other in zip(found, wanted, strict=True):
        for column, value in other._asdict().items():
            if column.endswith("_at") and value is not None:
                assert abs(row[column] - value) <= 1  # rounded otherwise
            else:
                assert row[column] == value, column


@given(st.lists(ENTRIES, max_size=8))
def test_requests(entries: list[RequestEntry]) -> None:
    found = unpack(HEADER + pack_requests(entries, OFFSET_S, TIERS) + TRAILER, REQUEST_COLUMNS)
    assert_same(found, request_rows(entries, OFFSET_S, TIERS))


@given(st.lists(BATCHES, max_size=5))
def test_batches(batches: list[Batch]) -> None:
    found = unpack(HEADER + pack_batches(batches, OFFSET_S) + TRAILER, BATCH_COLUMNS)
    assert_same(found, batch_rows(batches, OFFSET_S))


def test_every_column_is_written() -> None:
    assert set(REQUEST_COLUMNS) == set(RequestRow._fields)
    assert set(BATCH_COLUMNS) == set(BatchRow._fields)
