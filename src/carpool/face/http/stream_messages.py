"""The messages of a stream: JSON in and out.

In: a request, or a list of them, each with an id that the client chose. Out: a list of answers, each with that id and
either an `output` or an `error`. One request that cannot be understood harms none of those beside it.
"""

from typing import Annotated, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from carpool.core.errors import CarpoolError, Malformed
from carpool.core.problem import problem_json
from carpool.face.http.wire import CLIENT_ID_CHARS_MAX, Parameters, Pieces, body_fault

OwnId = Annotated[str, Meta(min_length=1, max_length=128)] | Annotated[int, Meta(ge=-(2**53), le=2**53)]
# Of requests in one message.
REQUESTS_MAX = 1024
_FAULTS = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class StreamCall(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One request in a message."""

    id: OwnId
    input: Raw
    model: str | None = None
    parameters: Parameters | UnsetType = UNSET
    client_id: Annotated[str, Meta(max_length=CLIENT_ID_CHARS_MAX)] | None = None
    timeout_ms: Annotated[int, Meta(gt=0, lt=10**9)] | None = None


class BadCall(NamedTuple):
    """A request that could not be understood; `id` is None where it had no usable one."""

    id: str | int | None
    error: CarpoolError


class _Named(msgspec.Struct):
    id: OwnId | None = None


# A list of up to REQUESTS_MAX; decoding stops at the next element: a long list of zeros would take a tenth of a second.
_Parts = msgspec.defstruct(
    "_Parts", [(f"part_{n}", Raw, UNSET) for n in range(REQUESTS_MAX)], array_like=True, forbid_unknown_fields=True
)
_decode_calls = msgspec.json.Decoder(StreamCall | list[StreamCall]).decode
_decode_parts = msgspec.json.Decoder(_Parts).decode
_decode_call = msgspec.json.Decoder(StreamCall).decode
_decode_named = msgspec.json.Decoder(_Named).decode
_encode = msgspec.json.Encoder().encode


def decode_message(message: bytes) -> list[StreamCall | BadCall]:
    """The requests in a message; one BadCall if nothing can be made of it at all."""
    try:
        calls = _decode_calls(message)
    except _FAULTS:
        return _one_by_one(message)
    if isinstance(calls, StreamCall):
        return [calls]
    if len(calls) > REQUESTS_MAX:
        return [BadCall(None, Malformed(f"a message may have {REQUESTS_MAX} requests at most; send several"))]
    return list(calls)


def _one_by_one(message: bytes) -> list[StreamCall | BadCall]:
    """The same for a message with a fault in it: its valid requests are still served."""
    if message.lstrip()[:1] != b"[":
        return [_decode_one(Raw(message))]
    try:
        parts = _decode_parts(message)
    except _FAULTS as failure:
        return [BadCall(None, Malformed(body_fault(failure)))]
    return [_decode_one(part) for part in msgspec.structs.astuple(parts) if part is not UNSET]


def _decode_one(part: Raw) -> StreamCall | BadCall:
    try:
        return _decode_call(part)
    except _FAULTS as failure:
        fault = Malformed(body_fault(failure, StreamCall))
    try:
        return BadCall(_decode_named(part).id, fault)
    except _FAULTS:
        return BadCall(None, fault)


def output_pieces(own_id: str | int, pieces: Pieces) -> Pieces:
    """An answer: what `POST /v1/inference` says, with the client's own id."""
    before, output, after = pieces
    return b'{"id":%b,%b' % (_encode(own_id), before[1:]), output, after


def error_pieces(own_id: str | int | None, error: CarpoolError, request_id: str) -> Pieces:
    """An error: a problem object, and when it is worth to ask again."""
    retry = b"" if error.retry_after_s is None else b',"retry_after_s":%d' % error.retry_after_s
    return b'{"id":%b,"error":' % _encode(own_id), problem_json(error, request_id), b"%b}" % retry
