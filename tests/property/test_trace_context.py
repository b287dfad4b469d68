"""W3C Trace Context (`core/trace.py`): what is read, what is not, and what is passed on."""

import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carpool.core.trace import (
    STATE_CHARS_MAX,
    Trace,
    read_text,
    read_traceparent,
    read_tracestate,
    text_of,
    trace_of_batch,
    traceparent_of,
)

trace_ids = st.binary(min_size=16, max_size=16).filter(any)
span_ids = st.binary(min_size=8, max_size=8).filter(any)
states = st.text(string.printable[:95], max_size=STATE_CHARS_MAX)

VALID = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@given(trace_ids, span_ids, st.booleans())
def test_what_is_written_is_read(trace_id: bytes, span_id: bytes, is_sampled: bool) -> None:
    text = traceparent_of(trace_id, span_id, is_sampled=is_sampled)
    assert len(text) == 55
    assert read_traceparent(text) == (trace_id, span_id, is_sampled)


@given(st.text(max_size=80))
@example(VALID + "\n")
@example(VALID + "-")
@example(VALID + "-more")
@example("ff" + VALID[2:])
@example(VALID.upper())
@example(VALID[:-1] + "g")
@example(VALID.replace("-", "_"))
@example("00-" + "0" * 32 + "-b7ad6b7169203331-01")
@example("00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01")
@example(f"{VALID}, {VALID}")
@example(" " + VALID)
def test_anything_else_is_none(text: str) -> None:
    given = read_traceparent(text)
    assert given is None or text[:2] != "00" or traceparent_of(*given[:2], is_sampled=given[2])[:53] == text[:53]
    if len(text) != 55 and text.startswith("00"):
        assert given is None


@pytest.mark.parametrize(
    "text",
    [VALID + "-", VALID + "-more", "ff" + VALID[2:], VALID.upper(), f"{VALID},{VALID}", "", VALID[:-1], VALID + "\n"],
)
def test_what_cannot_be_read(text: str) -> None:
    assert read_traceparent(text) is None


@given(st.integers(1, 0xFE), st.text(string.printable[:95], max_size=20), st.integers(0, 255))
def test_a_later_version_is_read_as_far_as_it_is_known(version: int, more: str, flags: int) -> None:
    text = f"{version:02x}{VALID[2:53]}{flags:02x}"
    assert read_traceparent(text) == (*read_traceparent(VALID)[:2], bool(flags & 1))  # type: ignore[index]
    assert read_traceparent(f"{text}-{more}") == read_traceparent(text)
    assert read_traceparent(f"{text}.{more}") is None


@given(st.text(max_size=600))
@example("a=1,b=2 ,\tc=3")
@example("vendor=1, other=2")
@example("a=1\r\nx: y")
@example("a=\u00e9")
def test_a_tracestate_is_passed_on_as_it_is_or_not_at_all(text: str) -> None:
    is_fine = len(text) <= STATE_CHARS_MAX and all(" " <= character <= "~" for character in text)
    assert read_tracestate(text) == (text if is_fine else "")


@given(
    trace_ids,
    span_ids,
    st.one_of(st.just(b""), span_ids),
    states,
    st.sampled_from(["", "asked", "ratio"]),
)
def test_a_trace_travels(trace_id: bytes, span_id: bytes, parent_id: bytes, state: str, why: str) -> None:
    own = Trace(trace_id, span_id, parent_id, state, why)
    came = read_text(text_of(own))
    assert came is not None
    for name in ("trace_id", "span_id", "parent_id", "state", "why"):
        assert getattr(came, name) == getattr(own, name)


@given(st.text(max_size=120))
def test_whatever_came_with_an_entry_is_read_or_passed_over(text: str) -> None:
    read_text(text)


@given(st.text(string.hexdigits, min_size=1, max_size=16), st.text(string.hexdigits, min_size=1, max_size=16))
def test_each_batch_has_a_trace_of_its_own(one: str, other: str) -> None:
    trace = trace_of_batch(one)
    assert (len(trace.trace_id), len(trace.span_id), trace.parent_id) == (16, 8, b"")
    assert (trace.trace_id == trace_of_batch(other).trace_id) == (one == other)
