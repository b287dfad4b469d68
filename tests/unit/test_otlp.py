"""OTLP's protobuf, written by hand (`telemetry/spans.py`), read by a decoder of its own (tests/support/otlp.py)."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.trace import Trace
from carpool.telemetry.spans import (
    ERROR,
    INTERNAL,
    REMOTE,
    SERVER,
    Envelope,
    attribute,
    attributes,
    link,
    named,
    rejected_spans,
    span,
    trace_state,
)
from support.otlp import SeenLink, spans_in

TRACE_ID, SPAN_ID, PARENT_ID = bytes(range(16)), bytes(range(8)), bytes(range(8, 16))
ENVELOPE = Envelope([("service.name", "x"), ("n", 3)], "carpool", "1.0")
values = st.one_of(st.text(max_size=300), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))


def one(rest: bytes, **changes: Any) -> Any:
    """A span with these attributes, links and status, read again."""
    arguments = {"parent_id": PARENT_ID, "name_and_kind": named("a name", SERVER), "state": ""} | changes
    packed = span(
        TRACE_ID,
        SPAN_ID,
        arguments["parent_id"],
        1_800_000_000_123_456_789,
        1_800_000_001_000_000_001,
        arguments["name_and_kind"] + trace_state(arguments["state"]) + rest,
        REMOTE,
    )
    [seen] = spans_in(ENVELOPE.wrap([packed]))
    return seen


@given(st.dictionaries(st.text(min_size=1, max_size=80), values, max_size=20))
def test_attributes_read_as_they_were_written(pairs: dict[str, Any]) -> None:
    assert one(attributes(pairs.items())).attributes == pairs


@given(st.text(max_size=200))
def test_a_span(name: str) -> None:
    seen = one(
        attribute("x", 1) + link(Trace(TRACE_ID, PARENT_ID, state="a=b")) + link(Trace(TRACE_ID, SPAN_ID)) + ERROR,
        name_and_kind=named(name, INTERNAL),
        state="c=d",
    )
    assert (seen.trace_id, seen.span_id, seen.parent_id) == (TRACE_ID.hex(), SPAN_ID.hex(), PARENT_ID.hex())
    assert (seen.name, seen.kind, seen.state, seen.flags) == (name, "internal", "c=d", 0x301)
    assert (seen.start_ns, seen.end_ns) == (1_800_000_000_123_456_789, 1_800_000_001_000_000_001)
    assert seen.links == [
        SeenLink(TRACE_ID.hex(), PARENT_ID.hex(), "a=b"),
        SeenLink(TRACE_ID.hex(), SPAN_ID.hex(), ""),
    ]
    assert seen.attributes == {"x": 1}
    assert seen.is_error
    assert seen.resource == {"service.name": "x", "n": 3}


def test_attributes_without_a_value_are_left_out() -> None:
    assert one(attributes([("a", None), ("b", 0), ("c", ""), ("d", False)])).attributes == {"b": 0, "c": "", "d": False}


@pytest.mark.parametrize(
    ("body", "rejected"),
    [
        (b"", 0),
        (b"\x0a\x00", 0),
        (b"\x0a\x02\x08\x07", 7),
        (b"\x0a\x06\x12\x01x\x08\x81\x01", 129),  # the message first
        (b"\x10\x05\x0a\x02\x08\x07", 7),  # behind a field that nobody knows
        (b"\x0a\x0b\x08" + b"\xff" * 9 + b"\x01", 0),  # less than nothing
        (b"\x0a\x7f\x08\x07", 0),
        (b"\x0a", 0),
        (b"\xff" * 30, 0),
        (b'{"partialSuccess":{"rejectedSpans":"7"}}', 0),
    ],
)
def test_what_a_receiver_says_it_rejected(body: bytes, rejected: int) -> None:
    assert rejected_spans(body) == rejected


@given(st.binary(max_size=200))
def test_any_answer_can_be_looked_at(body: bytes) -> None:
    assert rejected_spans(body) >= 0
