"""The smaller faces that take lists, TEI's and KServe V1's (as TF Serving's), and the paths of all of them."""

from collections.abc import Callable

import msgspec
from msgspec import Raw

from carpool.core.errors import CarpoolError, ClientError, Malformed, OverloadError, UnknownModel, UpstreamError
from carpool.core.outcome import Output
from carpool.core.ports import Caller, RequestTraces
from carpool.face.http.exchange import JSON, Exchange
from carpool.face.http.faces import COMPLETIONS, EMBED, EMBEDDINGS, PREDICT, has_face, model_with_face
from carpool.face.http.gateway import check_size
from carpool.face.http.list_bodies import fields_of, parameters_of, text_of, texts_of, values_of, vector
from carpool.face.http.lists import Answers, ListCall, ListFace
from carpool.face.http.openai import CompletionsFace, EmbeddingsFace, ModelRoutes
from carpool.face.http.router import Router
from carpool.face.intake import Intake, ServedModel

_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode
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


class KServeV1Face(ListFace):
    """`POST /v1/models/NAME:predict` with `instances`: the rows of a call are its inputs."""

    field, route = "instances", PREDICT

    def read(self, exchange: Exchange, rest: str, caller: Caller) -> ListCall:
        """The instances of a body; `signature_name` is one of the parameters, as towards an upstream."""
        model = model_with_face(self.intake, rest, PREDICT, caller)
        check_size(exchange, model)
        fields = fields_of(exchange.body)
        instances = fields.pop("instances", None)
        if instances is None:
            raise Malformed("`instances` is missing; the columnar form (`inputs`) has no rows that could be told apart")
        try:
            parameters = _decode_object(fields.pop("parameters", b"{}"))
        except (msgspec.DecodeError, RecursionError):
            raise Malformed("`parameters` must be an object") from None
        if (signature := text_of(fields, "signature_name")) is not None:
            parameters["signature_name"] = Raw(msgspec.json.encode(signature))
        if fields:
            raise Malformed("beside `instances` only `signature_name` and `parameters` are taken")
        return ListCall(model, parameters_of(parameters), values_of(instances, "instances"))

    def piece(self, call: ListCall, number: int, output: Output) -> bytes:
        """The output as it came."""
        return bytes(output.value)

    def ends(self, call: ListCall, own_id: str) -> tuple[bytes, bytes, bytes]:
        """One prediction an instance."""
        return JSON, b'{"predictions":[', b"]}"

    def error_body(self, error: CarpoolError, detail: str) -> bytes:
        """A text."""
        return msgspec.json.encode({"error": detail})


def add_list_faces(
    router: Router,
    intake: Intake,
    answers: Answers,
    is_down: Callable[[str], bool],
    traces: RequestTraces | None = None,
) -> None:
    """Serve OpenAI, TEI and KServe V1; `is_down` says whether no endpoint of a model may be called."""
    embeddings = EmbeddingsFace(intake, answers, traces)
    models = ModelRoutes(embeddings, is_down)
    router.add(b"POST", EMBEDDINGS.encode(), embeddings.serve)
    router.add(b"POST", COMPLETIONS.encode(), CompletionsFace(intake, answers, traces).serve)
    router.add(b"POST", EMBED.encode(), TeiFace(intake, answers, traces).serve)
    router.add(b"POST", b"/v1/models/*:predict", KServeV1Face(intake, answers, traces).serve)
    router.add(b"POST", b"/v1/chat/completions", models.chat)
    # What KServe's client asks for to see whether a server lives.
    router.add(b"GET", b"/", lambda exchange, _: exchange.respond(200, b'{"status":"alive"}'))
    router.add(b"GET", b"/v1/models", models.all)
    router.add(b"GET", b"/v1/models/", models.one)
