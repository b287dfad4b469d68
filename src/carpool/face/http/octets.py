"""Outputs as `application/octet-stream`, for clients of `/v1/predict` that ask for it with `Accept`. Pure.

1. The output is one raw tensor: its bytes; of BYTES with one element, that element.
2. The output is JSON, and what JSON has for bytes: a base64 text, or `{"b64": text}`. Those bytes.
3. Any other output stays JSON, whatever is accepted: the answer's `Content-Type` says so.
"""

from binascii import Error, a2b_base64
from typing import NamedTuple

import msgspec

from carpool.core.tensors import DATATYPES, DIMENSIONS_MAX, Data, element_starts, is_packed, length_of, unpack_tensors

OCTETS = b"application/octet-stream"
JSON = b"application/json"


class _Bytes(msgspec.Struct):
    b64: str
    datatype: str = ""
    shape: tuple[int, ...] = ()


_decode_json = msgspec.json.Decoder(str | _Bytes | list[_Bytes]).decode


class Octets(NamedTuple):
    """An output's bytes, and what is known of them."""

    data: Data
    # Of a tensor.
    datatype: str = ""
    shape: tuple[int, ...] = ()


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
