"""Which models each face serves: those whose upstream takes the same kind of input, whatever protocol it speaks.

`json` and `kserve_v1` carry any JSON value: only the model's answer shows what it makes of a text.
"""

from carpool.core.errors import UnknownModel
from carpool.core.names import ProtocolName
from carpool.core.ports import Caller
from carpool.face.intake import Intake, ServedModel

EMBEDDINGS, COMPLETIONS, EMBED, PREDICT = "/v1/embeddings", "/v1/completions", "/embed", "/v1/models/NAME:predict"
INFER = "/v2/models/NAME/infer"

_ANY_VALUE: tuple[ProtocolName, ...] = ("json", "kserve_v1")
# By path, the protocols of upstreams that can serve it; `/v1/inference` and `/v1/predict` serve all.
FACES: dict[str, tuple[ProtocolName, ...]] = {
    EMBEDDINGS: (*_ANY_VALUE, "openai_embeddings", "tei_embed"),
    COMPLETIONS: (*_ANY_VALUE, "openai_completions"),
    EMBED: (*_ANY_VALUE, "openai_embeddings", "tei_embed"),
    PREDICT: (*_ANY_VALUE, "openai_embeddings", "openai_completions", "tei_embed"),
    # Tensors: other protocols have no form for them.
    INFER: ("kserve_v2", "kserve_v2_grpc"),
}


def has_face(model: ServedModel, path: str) -> bool:
    """Whether a model can be asked at this path."""
    return model.protocol in FACES[path]


def model_with_face(intake: Intake, name: str, path: str, caller: Caller) -> ServedModel:
    """The model with this name; raises UnknownModel if it cannot be asked at this path, or not by this caller."""
    model = intake.model(name, caller)
    if not has_face(model, path):
        has = ", ".join(each for each in FACES if has_face(model, each))
        raise UnknownModel(
            f"this model cannot be asked at {path}; it can at /v1/inference, /v1/predict{has and ', ' + has}"
        )
    return model
