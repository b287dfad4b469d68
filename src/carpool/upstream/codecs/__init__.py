"""The protocols of upstreams, behind one Protocol."""

from carpool.core.names import ProtocolName
from carpool.upstream.codecs.base import Codec, ProtocolFaultError
from carpool.upstream.codecs.json import JsonCodec
from carpool.upstream.codecs.kserve_v1 import KServeV1Codec
from carpool.upstream.codecs.kserve_v2 import KServeV2Codec, TensorCodec
from carpool.upstream.codecs.tensors import tensor_defaults
from carpool.upstream.codecs.texts import OpenAiCompletionsCodec, OpenAiEmbeddingsCodec, TeiEmbedCodec

__all__ = [
    "Codec",
    "JsonCodec",
    "KServeV1Codec",
    "ProtocolFaultError",
    "TensorCodec",
    "make_codec",
]


def make_codec(
    protocol: ProtocolName,
    *,
    inputs_field: str = "inputs",
    outputs_field: str = "outputs",
    parameters_field: str = "parameters",
    model_version: str = "",
    tensor: str = "",
    tensor_binary: bool = False,
    tokens_field: str = "tokens_used",
    version_field: str = "model_version",
    completion_text: bool = False,
) -> Codec:
    """The codec of a protocol. Field names matter to `json`, the version to KServe, `tensor…` to its V2."""
    tensors = tensor_defaults(tensor, always_raw=tensor_binary)
    match protocol:
        case "json":
            return JsonCodec(inputs_field, outputs_field, parameters_field, tokens_field, version_field)
        case "kserve_v1":
            return KServeV1Codec(model_version)
        case "kserve_v2":
            return KServeV2Codec(tensors, model_version)
        case "kserve_v2_grpc":
            from carpool.upstream.codecs.kserve_v2_grpc import KServeV2GrpcCodec  # here: it needs `carpool[grpc]`

            return KServeV2GrpcCodec(tensors, model_version)
        case "openai_embeddings":
            return OpenAiEmbeddingsCodec()
        case "openai_completions":
            return OpenAiCompletionsCodec(is_text=completion_text)
        case "tei_embed":
            return TeiEmbedCodec()
