"""JSON in and out of the inference routes. `input` and `output` stay the bytes they were."""

from binascii import b2a_base64
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from carpool.core.errors import Malformed
from carpool.core.finite import finite_float
from carpool.core.kept import Kept
from carpool.core.outcome import CallFacts, Output
from carpool.core.request import Request
from carpool.core.tensors import Data, shown
from carpool.core.webhook import URL_CHARS_MAX
from carpool.face.http.strict_json import QUOTE, json_fault
from carpool.face.octets import Octets

PARAMETERS_BYTES_MAX = 16 * 1024
CLIENT_ID_CHARS_MAX = 256
FAULT_CHARS_MAX = 200
# Canonical forms already worked out, by the client's bytes: few distinct parameters make most of the traffic.
CANONICAL_KEPT_MAX = 1024
# What other gateways and APIs call the fields that are here, each with its like.
ALIKE = (
    ("input", "input_data", "inputs", "instances", "data", "prompt", "text", "texts"),
    ("model", "model_id", "model_name"),
    ("parameters", "params", "options"),
)
_UNKNOWN_FIELD = "Object contains unknown field `"

Parameters = Annotated[
    Raw,
    Meta(
        description="requests with equal parameters share batches",
        examples=[{"normalize": True}],
        extra_json_schema={"type": ["object", "null"]},
    ),
]


class InferenceCall(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The body of `POST /v1/inference`."""

    input: Annotated[Raw, Meta(description="any JSON value; passed on untouched", examples=["a short sentence"])]
    model: str | None = None
    # Raw in a union with None is not supported: every object would be refused.
    parameters: Parameters | UnsetType = UNSET
    client_id: Annotated[str, Meta(max_length=CLIENT_ID_CHARS_MAX)] | None = None
    mode: Literal["sync", "async"] | None = None
    callback_url: (
        Annotated[
            str,
            Meta(
                max_length=URL_CHARS_MAX,
                description="of a task: where its result is sent, if the operator allows its host",
            ),
        ]
        | None
    ) = None


class PredictCall(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The body of `POST /v1/predict`."""

    model_id: str
    input_data: Annotated[
        Raw,
        Meta(
            description="any JSON value, passed on untouched; base64 for a model whose clients send bytes",
            examples=["a short sentence"],
        ),
    ]


_decode_inference = msgspec.json.Decoder(InferenceCall).decode
_decode_predict = msgspec.json.Decoder(PredictCall).decode
_decode_any = msgspec.json.Decoder(float_hook=finite_float).decode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode
_canonical: Kept[bytes, bytes] = Kept(CANONICAL_KEPT_MAX)
# An answer: what comes before the output, the output, and the rest. The sender joins them, so that a long output is
# copied once.
Pieces = tuple[bytes, Data, bytes]


def decode_inference(body: bytes) -> InferenceCall:
    """Parse and check the body of an inference request; raises Malformed."""
    try:
        return _decode_inference(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as failure:
        raise Malformed(body_fault(failure, InferenceCall)) from None


def decode_predict(body: bytes) -> PredictCall:
    """Parse and check the body of a predict request; raises Malformed."""
    try:
        return _decode_predict(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as failure:
        raise Malformed(body_fault(failure, PredictCall)) from None


def checked_input(raw: Raw, field: str) -> bytes:
    """The client's own bytes of its input, checked to be safe between other inputs; raises Malformed."""
    value = bytes(raw)
    if value[0] == QUOTE and value.isascii():
        return value  # the usual input, a string of ASCII, has none of the faults
    fault = json_fault(value)
    if fault is not None:
        raise Malformed(f"`{field}` cannot be passed on: {fault}")
    return value


def canonical_parameters(raw: Raw) -> bytes:
    """The same bytes for the same parameters, whatever their key order and spacing; b"" for none."""
    given = bytes(raw)
    known = _canonical.get(given)
    if known is not None:
        return known
    if len(given) > PARAMETERS_BYTES_MAX:
        raise Malformed(f"`parameters` may have {PARAMETERS_BYTES_MAX} bytes at most")
    fault = json_fault(given)
    if fault is not None:
        raise Malformed(f"`parameters` cannot be passed on: {fault}")
    parsed = _decode_any(given)
    if parsed is not None and not isinstance(parsed, dict):
        raise Malformed("`parameters` must be an object")
    canonical = _encode_sorted(parsed) if parsed else b""
    # `1e15` is written out as 1000000000000000.0: what is kept and sent on is four times as long.
    if len(canonical) > PARAMETERS_BYTES_MAX:
        raise Malformed(f"`parameters` may have {PARAMETERS_BYTES_MAX} bytes at most, with their numbers written out")
    _canonical.keep(given, canonical, len(given) + len(canonical))
    return canonical


def body_fault(failure: Exception, call: type[msgspec.Struct] = msgspec.Struct) -> str:
    """What is wrong with a body, in words for its sender. msgspec's texts name fields and places, and one value.

    For an unknown field it names the field of `call` that may be meant.
    """
    if isinstance(failure, RecursionError):
        return "the body is nested too deeply"
    if isinstance(failure, UnicodeDecodeError):
        return "the body is not valid UTF-8"
    text = str(failure)
    if text.startswith("Invalid enum value"):
        text = '`mode` must be "sync" or "async"'
    if text.startswith(_UNKNOWN_FIELD):
        name = text.removeprefix(_UNKNOWN_FIELD).partition("`")[0]
        alike = next((names for names in ALIKE if name in names), ())
        text += "".join(f"; did you mean `{field}`?" for field in call.__struct_fields__ if field in alike)
    # A field's name may be as long as the body.
    return f"the body is not what this path takes: {text[:FAULT_CHARS_MAX]}"


class InferenceAnswers:
    """Writes the 200s of `POST /v1/inference`. What the members of a batch have in common is written once."""

    def __init__(self) -> None:
        # The last call and its part of the body: the outcomes of one batch come one after the other.
        self._call: CallFacts | None = None
        self._call_part = b""

    def pieces(self, request: Request, output: Output) -> Pieces:
        """The body for one request."""
        if output.call is not self._call:
            self._call = output.call
            self._call_part = call_part(request.model, output.call)
        tokens = b"" if output.tokens_used is None else b',"tokens_used":%d' % output.tokens_used
        arrived = request.arrived
        end = b',"metadata":{"latency_ms":%.0f,"queue_ms":%.2f%b%b' % (
            (request.ended - arrived) * 1000.0,
            (request.taken - arrived) * 1000.0,
            tokens,
            self._call_part,
        )
        return b'{"request_id":"%b","output":' % request.id.encode(), output.value, end


def call_part(model: str, call: CallFacts) -> bytes:
    """The end of the body: what is the same for every member of a batch."""
    version = b"" if call.model_version is None else b',"model_version":' + msgspec.json.encode(call.model_version)
    return b',"upstream_ms":%.2f,"batch_size":%d,"model":%b,"cached":%b%b}}' % (
        call.upstream_s * 1000.0,
        call.batch_size,
        msgspec.json.encode(model),
        b"true" if call.cached else b"false",
        version,
    )


def predict_pieces(request: Request, output: Output) -> Pieces:
    """The 200 of `POST /v1/predict`."""
    return _predicted(request, shown(output.value))


def base64_pieces(octets_of: Callable[[Data], Octets], request: Request, output: Output) -> Pieces:
    """The same where clients get bytes."""
    return _predicted(request, b'"%b"' % b2a_base64(octets_of(output.value).data, newline=False))


def _predicted(request: Request, value: Data) -> Pieces:
    return b'{"request_id":"%b","output":' % request.id.encode(), value, b',"latency_ms":%d}' % latency_ms(request)


def latency_ms(request: Request) -> int:
    """How long it took."""
    return round((request.ended - request.arrived) * 1000.0)
