"""One file a protocol, behind one Protocol."""

from typing import Literal

from carpool.upstream.codecs.base import Codec, ProtocolFaultError
from carpool.upstream.codecs.json import JsonCodec
from carpool.upstream.codecs.kserve_v1 import KServeV1Codec

__all__ = ["Codec", "JsonCodec", "KServeV1Codec", "ProtocolFaultError", "make_codec"]


def make_codec(
    protocol: Literal["json", "kserve_v1"], *, inputs_field: str, outputs_field: str, parameters_field: str
) -> Codec:
    """The codec of a protocol; the field names matter to `json` alone."""
    if protocol == "kserve_v1":
        return KServeV1Codec()
    return JsonCodec(inputs_field, outputs_field, parameters_field)
