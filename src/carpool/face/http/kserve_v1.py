"""KServe V1 and TF Serving: `POST /v1/models/NAME:predict` with `instances`, for models that take values one by one."""

import msgspec
from msgspec import Raw

from carpool.core.errors import CarpoolError, Malformed
from carpool.core.outcome import Output
from carpool.core.ports import Caller
from carpool.face.http.exchange import JSON, Exchange
from carpool.face.http.faces import PREDICT, model_with_face
from carpool.face.http.list_bodies import check_size, fields_of, parameters_of, text_of, values_of
from carpool.face.http.lists import ListCall, ListFace

_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode


def alive(exchange: Exchange, _: str) -> None:
    """What KServe's client asks for at `/` to see whether a server lives."""
    exchange.respond(200, b'{"status":"alive"}')


class KServeV1Face(ListFace):
    """The rows of a call are its inputs."""

    field, route = "instances", PREDICT

    def read(self, exchange: Exchange, rest: str, caller: Caller) -> ListCall:
        """The instances of a body; `signature_name` is one of the parameters, as towards an upstream."""
        model = model_with_face(self.intake, rest, PREDICT, caller)
        check_size(exchange, model)
        fields = fields_of(exchange.body)
        instances = fields.pop("instances", None)
        if instances is None:
            raise Malformed("`instances` is missing; the columnar form (`inputs`) has no rows that could be told apart")
        parameters: dict[str, Raw] = {}
        if (given := fields.pop("parameters", None)) is not None:
            try:
                parameters = _decode_object(given)
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
