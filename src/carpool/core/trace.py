"""Where a request stands in a trace: W3C Trace Context (`traceparent`, `tracestate`). Pure.

1. A request whose trace is kept has a trace of its own, or is part of its caller's, if that sent a `traceparent`. All
   other requests have none: whether a trace is kept is decided when its request comes.
2. A batch has a trace of its own too, whatever is in it: its requests come from many traces, and belong to none of the
   others. The batch and its requests have links to one another. The trace of a batch follows from its id.
3. What cannot be read is as good as not there, as the standard says: a new trace begins.
"""

import re
from hashlib import blake2b
from typing import NamedTuple

import msgspec

STATE_CHARS_MAX = 512
SAMPLED = 0x01
# Why a trace is kept: its caller asks, or the ratio falls on it.
ASKED, BY_RATIO = "asked", "ratio"

# A later version may have more behind a dash. `ff` is no version.
_parent = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[ -~]*)?\Z").match
_span = re.compile(r"[0-9a-f]{16}\Z").match
_NO_TRACE, _NO_SPAN = bytes(16), bytes(8)


class Trace(msgspec.Struct, eq=False, frozen=True, gc=False):
    """A request whose trace is kept, or a batch, as a part of a trace."""

    # 16 bytes, and 8 for the span of the request itself.
    trace_id: bytes
    span_id: bytes
    # The caller's span; b"" where the trace begins here.
    parent_id: bytes = b""
    # The caller's `tracestate`.
    state: str = ""
    # Why it is kept.
    why: str = ""


class Given(NamedTuple):
    """What a `traceparent` says."""

    trace_id: bytes
    span_id: bytes
    is_sampled: bool


class BatchTrace(msgspec.Struct, eq=False):
    """A batch that was sent, where calls are traced. Its span is kept if one of its requests is."""

    trace: Trace
    # The traces of its requests that are kept.
    links: list[Trace]
    # Its calls that have ended and are not written.
    calls: list["CallTrace"]


class CallTrace(msgspec.Struct, eq=False, gc=False):
    """One call to an endpoint. The stage that makes the call writes down how it ended."""

    # For the upstream: name and value of each header.
    headers: tuple[tuple[str, str], ...]
    span_id: bytes
    endpoint: str
    attempt: int
    size: int
    started: float
    # A step of a search for bad inputs.
    is_search: bool = False
    # The status of the answer; 0 without one.
    status: int = 0
    # When the answer was there, or it was clear that none comes; and the code of an error, or "".
    ended: float = 0.0
    error: str = ""


def traceparent_of(trace_id: bytes, span_id: bytes, *, is_sampled: bool) -> str:
    """The header."""
    return f"00-{trace_id.hex()}-{span_id.hex()}-{'01' if is_sampled else '00'}"


def read_traceparent(text: str) -> Given | None:
    """What the header says; None if it cannot be read."""
    found = _parent(text)
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if more is not None and version == "00":
        return None
    trace_id, span_id = bytes.fromhex(trace), bytes.fromhex(span)
    if trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    return Given(trace_id, span_id, bool(int(flags, 16) & SAMPLED))


def read_tracestate(text: str) -> str:
    """The header as it is kept with the spans, which alone get it: "" if it is too long, or not of printable ASCII."""
    return text if len(text) <= STATE_CHARS_MAX and text.isascii() and text.isprintable() else ""


def text_of(trace: Trace) -> str:
    """A trace as it travels with a request: `traceparent` of its span, the caller's span or `-`, why, `tracestate`."""
    own = traceparent_of(trace.trace_id, trace.span_id, is_sampled=True)
    return f"{own} {trace.parent_id.hex() or '-'} {trace.why} {trace.state}"


def read_text(text: str) -> Trace | None:
    """The trace of a request that came from another process; None if it cannot be read."""
    own, *rest = text.split(" ", 3)
    given = read_traceparent(own)
    if given is None or len(rest) != 3:
        return None
    parent, why, state = rest
    parent_id = bytes.fromhex(parent) if _span(parent) else b""
    why = why if why in (ASKED, BY_RATIO) else ""
    return Trace(given.trace_id, given.span_id, parent_id, read_tracestate(state), why)


def trace_of_batch(batch_id: str) -> Trace:
    """The trace that a batch begins, and its span: the same in each process that knows its id."""
    digest = blake2b(batch_id.encode(), digest_size=24, person=b"carpool-batch").digest()
    return Trace(digest[:16], digest[16:])
