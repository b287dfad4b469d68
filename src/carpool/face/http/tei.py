"""text-embeddings-inference: `POST /embed`, for the models that embed texts."""

import msgspec

from carpool.core.errors import CarpoolError, ClientError, OverloadError, UnknownModel, UpstreamError
from carpool.core.outcome import Output
from carpool.core.ports import Caller
from carpool.face.http.exchange import JSON, Exchange
from carpool.face.http.faces import EMBED, has_face, model_with_face
from carpool.face.http.list_bodies import check_size, fields_of, parameters_of, texts_of, vector
from carpool.face.http.lists import ListCall, ListFace
from carpool.face.intake import ServedModel

_KINDS: tuple[tuple[type[CarpoolError], str], ...] = (
    (ClientError, "Validation"),
    (OverloadError, "Overloaded"),
    (UpstreamError, "Backend"),
)


class TeiFace(ListFace):
    """`POST /embed`. The protocol names no model: it is the default one, or the only model that embeds."""

    route = EMBED

    def read(self, exchange: Exchange, rest: str, caller: Caller) -> ListCall:
        """The inputs of a body; its other fields are parameters."""
        model = self._model(caller)
        check_size(exchange, model)
        fields = fields_of(exchange.body)
        values = texts_of(fields.pop("inputs", None), "inputs")
        return ListCall(model, parameters_of(fields), values)

    def _model(self, caller: Caller) -> ServedModel:
        default, own = self.intake.default_model, self.intake.models_of(caller)
        if not has_face(default, EMBED) or default not in own:
            embedding = [model for model in own if has_face(model, EMBED)]
            if len(embedding) == 1:
                return embedding[0]
            if embedding:
                names = ", ".join(model.name for model in embedding)
                raise UnknownModel(f"/embed names no model; ask for one of {names} at /v1/embeddings")
        return model_with_face(self.intake, default.name, EMBED, caller)

    def piece(self, call: ListCall, number: int, output: Output) -> bytes:
        """The embedding as it came."""
        return vector(output.value)

    def ends(self, call: ListCall, own_id: str) -> tuple[bytes, bytes, bytes]:
        """A bare array."""
        return JSON, b"[", b"]"

    def error_body(self, error: CarpoolError, detail: str) -> bytes:
        """With one of TEI's kinds."""
        kind = next((kind for base, kind in _KINDS if isinstance(error, base)), "Unhealthy")
        return msgspec.json.encode({"error": detail, "error_type": kind})
