"""Bytes in and out, for clients that have no JSON. Pure.

What an output is as `application/octet-stream`, for clients of `/v1/predict` that ask for it with `Accept`:

1. The output is one raw tensor: its bytes; of BYTES with one element, that element.
2. The output is JSON, and what JSON has for bytes: a base64 text, or `{"b64": text}`. Those bytes.
3. Any other output stays JSON, whatever is accepted: the answer's `Content-Type` says so.

The setting `bytes_as` lets the clients of a model send and get bytes, and says what the model has in their place: the
form that its protocol has for bytes, as above, a text, or any JSON. An output of another form is sent as the bytes of
its JSON.
"""

from binascii import Error, a2b_base64
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from carpool.core.errors import Malformed
from carpool.core.names import BytesForm
from carpool.core.tensors import (
    DATATYPES,
    DIMENSIONS_MAX,
    Data,
    element_starts,
    is_packed,
    length_of,
    shown,
    unpack_tensors,
)
from carpool.face.http.strict_json import json_fault

OCTETS = b"application/octet-stream"
JSON = b"application/json"


class _Bytes(msgspec.Struct):
    b64: str
    datatype: str = ""
    shape: tuple[int, ...] = ()


_decode_json = msgspec.json.Decoder(str | _Bytes | list[_Bytes]).decode
_decode_bytes = msgspec.json.Decoder(bytes).decode
_decode_raw = msgspec.json.Decoder(msgspec.Raw).decode
_decode_text = msgspec.json.Decoder(str).decode


class Octets(NamedTuple):
    """An output's bytes, and what is known of them."""

    data: Data
    # Of a tensor.
    datatype: str = ""
    shape: tuple[int, ...] = ()


def bytes_in(form: BytesForm, of_protocol: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """Makes an input of a client's bytes; `of_protocol` is how the model's protocol has bytes. It raises Malformed."""
    return {"text": _text_input, "json": _json_input}.get(form, of_protocol)


def bytes_out(form: BytesForm) -> Callable[[Data], Octets] | None:
    """Makes the bytes for a client of an output; None where clients have JSON."""
    return None if not form else partial(_octets_out, form)


def base64_bytes(given: msgspec.Raw) -> bytes:
    """The bytes that a client wrote as base64; raises Malformed."""
    try:
        data = _decode_bytes(given)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise Malformed("`input_data` must be a base64 text: this model takes bytes") from None
    if not data:
        raise Malformed("`input_data` is empty; send the input's bytes")
    return data


def _text_input(data: bytes) -> bytes:
    try:
        return msgspec.json.encode(data.decode())
    except UnicodeDecodeError:
        raise Malformed("the bytes are not valid UTF-8: this model takes texts") from None


def _json_input(data: bytes) -> bytes:
    try:
        value = bytes(_decode_raw(data))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise Malformed("the bytes are not valid JSON: this model takes JSON") from None
    if fault := json_fault(value):
        raise Malformed(f"the bytes cannot be passed on as JSON: {fault}")
    return value


def _octets_out(form: BytesForm, value: Data) -> Octets:
    if form == "base64" and (found := octets_in(value)) is not None:
        return found
    whole = shown(value)
    if form == "text":
        try:
            return Octets(_decode_text(whole).encode())
        except (ValueError, RecursionError):
            pass  # no text
    return Octets(whole)


def octets_in(value: Data) -> Octets | None:
    """The bytes of an output; None if it has none."""
    if is_packed(value):
        tensors = unpack_tensors(value)
        if len(tensors) != 1:
            return None
        _, datatype, shape, data = tensors[0]
        return _of_tensor(data, datatype, tuple(shape))
    try:
        found = _decode_json(value)
        if isinstance(found, list):
            [only] = found
            if (only.datatype and only.datatype not in DATATYPES) or len(only.shape) > DIMENSIONS_MAX:
                return None  # no tensor: whatever a model says, it must not get into a header
            return _of_tensor(a2b_base64(only.b64, strict_mode=True), only.datatype, only.shape)
        return Octets(a2b_base64(found if isinstance(found, str) else found.b64, strict_mode=True))
    except (ValueError, RecursionError, Error):
        return None


def _of_tensor(data: Data, datatype: str, shape: tuple[int, ...]) -> Octets:
    if datatype == "BYTES" and len(element_starts(data)) == 2:
        data = memoryview(data)[len(length_of(data)) :]
    return Octets(data, datatype, shape)


def wants_octets(accept: bytes) -> bool:
    """Whether a client would rather have bytes than JSON."""
    weights: dict[bytes, float] = {}
    for each in accept.split(b","):
        media, *parameters = (part.strip().lower() for part in each.split(b";"))
        weights[media] = min([_weight(parameter) for parameter in parameters], default=1.0)
    return weights.get(OCTETS, 0.0) > weights.get(JSON, 0.0)


def _weight(parameter: bytes) -> float:
    name, _, value = parameter.partition(b"=")
    if name.strip() != b"q":
        return 1.0
    try:
        return min(1.0, max(0.0, float(value)))
    except ValueError:
        return 1.0
