"""OpenAI: `/v1/embeddings`, `/v1/completions`, `/v1/models`; and the error at `/v1/chat/completions`.

1. Fields that the model does not see, `user`, `encoding_format`, `stream` and the like, stay here and are not part of
   the lane, so that they do not keep requests out of a common batch. All other fields are parameters.
2. Embeddings as base64, which SDKs ask for, are made here of the numbers that came: 32-bit floats, little-endian.
3. A completion with `stream` comes as one event when it is finished.
4. `usage` is what the upstream reports; else the number of token ids in the call, 0 for texts.
"""

import re
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import lru_cache
from struct import pack
from typing import Literal, TypeVar

import msgspec
from msgspec import Raw

from carpool.core.errors import CarpoolError, Malformed, NotFound, UpstreamProtocolFault
from carpool.core.outcome import Output
from carpool.core.ports import Caller
from carpool.face.http.exchange import JSON, Exchange
from carpool.face.http.faces import COMPLETIONS, EMBEDDINGS, model_with_face
from carpool.face.http.gateway import check_size
from carpool.face.http.ids import request_id
from carpool.face.http.list_bodies import fields_of, not_a_vector, parameters_of, text_of, texts_of, vector
from carpool.face.http.lists import ListCall, ListFace, id_line
from carpool.face.http.problem import advice_lines
from carpool.face.http.strict_json import QUOTE
from carpool.face.intake import Intake, ServedModel, as_error

EVENTS = b"text/event-stream"
# Header lines that are written once.
LINES_KEPT = 4096

_quoted = msgspec.json.Encoder().encode
_decode_numbers = msgspec.json.Decoder(list[float]).decode
_decode_choice = msgspec.json.Decoder(dict[str, Raw]).decode
_RATE = re.compile(rb"q=(\d+);w=60\r\nRateLimit: \"default\";r=(\d+);t=(\d+)")
# What OpenAI calls errors, by their status; and some by our code for them.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_CODES = {"rate-limited": "rate_limit_exceeded", "unknown-model": "model_not_found", "unauthorized": "invalid_api_key"}


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


_decode_usage = msgspec.json.Decoder(_Usage).decode


class _UsualEmbeddings(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """What SDKs send."""

    input: Raw
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None


_decode_usual = msgspec.json.Decoder(_UsualEmbeddings).decode


class OpenAiFace(ListFace):
    """What these paths have in common."""

    def error_body(self, error: CarpoolError, detail: str) -> bytes:
        """With OpenAI's own codes, where it has one."""
        kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
        code = _CODES.get(error.code, error.code.replace("-", "_"))
        return _quoted({"error": {"message": detail, "type": kind, "param": None, "code": code}})

    def lines(self, exchange: Exchange, own_id: str, limits: bytes) -> bytes:
        """Our lines of the rate limit, and the same in OpenAI's headers."""
        return id_line(own_id) + (limits and openai_limit_lines(limits))

    def advice(self, error: CarpoolError) -> bytes:
        """With `X-Should-Retry`: without it SDKs decide by the status alone."""
        return advice_lines(error) + (b"X-Should-Retry: true\r\n" if error.retryable else b"X-Should-Retry: false\r\n")


class EmbeddingsFace(OpenAiFace):
    """`POST /v1/embeddings`."""

    field, route = "input", EMBEDDINGS

    def read(self, exchange: Exchange, rest: str, caller: Caller) -> ListCall:
        """Texts, or token ids; `how` is whether base64 is wanted."""
        try:
            usual = _decode_usual(exchange.body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return self._read_unusual(exchange, caller)  # which says what is wrong, or has parameters
        model = model_with_face(self.intake, usual.model or self.intake.default_model.name, EMBEDDINGS, caller)
        check_size(exchange, model)
        values = texts_of(usual.input, "input")
        return ListCall(model, b"", values, usual.encoding_format == "base64", count_tokens(values))

    def _read_unusual(self, exchange: Exchange, caller: Caller) -> ListCall:
        fields = fields_of(exchange.body)
        model = named_model(self.intake, fields, EMBEDDINGS, caller)
        check_size(exchange, model)
        values = texts_of(fields.pop("input", None), "input")
        encoding = text_of(fields, "encoding_format") or "float"
        if encoding not in ("float", "base64"):
            raise Malformed('`encoding_format` must be "float" or "base64"')
        text_of(fields, "user")
        return ListCall(model, parameters_of(fields), values, encoding == "base64", count_tokens(values))

    def piece(self, call: ListCall, number: int, output: Output) -> bytes:
        """One embedding."""
        call.prompt_tokens += output.tokens_used or 0
        embedding = as_base64(output.value) if call.how else vector(output.value)
        return b'{"object":"embedding","index":%d,"embedding":%b}' % (number, embedding)

    def ends(self, call: ListCall, own_id: str) -> tuple[bytes, bytes, bytes]:
        """The list around them."""
        tokens = call.prompt_tokens or call.given_tokens
        model = _quoted(call.model.name)
        after = b'],"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (model, tokens, tokens)
        return JSON, b'{"object":"list","data":[', after


class CompletionsFace(OpenAiFace):
    """`POST /v1/completions`."""

    field, route = "prompt", COMPLETIONS

    def read(self, exchange: Exchange, rest: str, caller: Caller) -> ListCall:
        """Prompts; `how` is whether events are wanted, and with them one of the usage."""
        fields = fields_of(exchange.body)
        model = named_model(self.intake, fields, COMPLETIONS, caller)
        check_size(exchange, model)
        values = texts_of(fields.pop("prompt", None), "prompt")
        is_stream = read_as(bool, fields, "stream", b"false")
        wants_usage = read_as(_StreamOptions, fields, "stream_options", b"{}").include_usage
        for name in ("n", "best_of"):
            if bytes(fields.pop(name, b"1")) != b"1":
                raise Malformed(f"`{name}` must be 1: there is one completion for each prompt")
        text_of(fields, "user")
        return ListCall(model, parameters_of(fields), values, (is_stream, wants_usage), count_tokens(values))

    def piece(self, call: ListCall, number: int, output: Output) -> bytes:
        """One choice."""
        value = bytes(output.value)
        if value[0] == QUOTE:
            call.prompt_tokens += output.tokens_used or 0
            return b'{"text":%b,"index":%d,"logprobs":null,"finish_reason":"stop"}' % (value, number)
        try:
            choice = _decode_choice(value)
            usage = _decode_usage(choice.pop("usage", b"{}"))
        except (msgspec.DecodeError, RecursionError):
            choice = {}
        if "text" not in choice:
            raise UpstreamProtocolFault("the model's output is no text; ask it at /v1/inference")
        call.prompt_tokens += usage.prompt_tokens
        call.completion_tokens += usage.completion_tokens
        # The number of the prompt: an `index` of the model knows nothing of this call.
        return _quoted({"logprobs": None, "finish_reason": "stop", **choice, "index": number})

    def ends(self, call: ListCall, own_id: str) -> tuple[bytes, bytes, bytes]:
        """The object around them; as an event, there is one more that says that it was all."""
        is_stream, wants_usage = call.how
        prompt, completion = call.prompt_tokens or call.given_tokens, call.completion_tokens
        usage = b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}' % (
            prompt,
            completion,
            prompt + completion,
        )
        begin = b'{"id":"cmpl-%b","object":"text_completion","created":%d,"model":%b,"choices":[' % (
            own_id.encode(),
            time.time(),
            _quoted(call.model.name),
        )
        if not is_stream:
            return JSON, begin, b"]" + usage
        last = b"data: " + begin + b"]" + usage + b"\n\n" if wants_usage else b""
        return EVENTS, b"data: " + begin, b"]}\n\n" + last + b"data: [DONE]\n\n"


class ModelRoutes:
    """`/v1/models`: for OpenAI a list of them; each by itself also as KServe V1 and TF Serving tell of it."""

    def __init__(self, face: OpenAiFace, is_down: Callable[[str], bool]) -> None:
        # For its errors.
        self._face = face
        self._is_down = is_down
        self._created = int(time.time())

    def all(self, exchange: Exchange, _: str) -> None:
        """`GET /v1/models`: those that the caller may ask for."""

        def models(caller: Caller) -> tuple[int, object]:
            return 200, {"object": "list", "data": [self._tell(model) for model in self._face.intake.models_of(caller)]}

        self._answer(exchange, models)

    def one(self, exchange: Exchange, name: str) -> None:
        """`GET /v1/models/NAME`: 503 while no endpoint of its may be called."""

        def model(caller: Caller) -> tuple[int, object]:
            model = self._face.intake.model(name, caller)
            is_ready = not self._is_down(model.name)
            state = {"version": "1", "state": "AVAILABLE" if is_ready else "UNAVAILABLE"}
            status = {**state, "status": {"error_code": "OK" if is_ready else "UNAVAILABLE", "error_message": ""}}
            body = {**self._tell(model), "name": model.name, "ready": is_ready, "model_version_status": [status]}
            return 200 if is_ready else 503, body

        self._answer(exchange, model)

    def chat(self, exchange: Exchange, _: str) -> None:
        """`POST /v1/chat/completions`: what to use instead."""

        def nothing(_: Caller) -> tuple[int, object]:
            raise NotFound(
                "chat is not served here: put the messages into one text with the model's own template, and send "
                "that as `prompt` to /v1/completions"
            )

        self._answer(exchange, nothing)

    def _answer(self, exchange: Exchange, find: Callable[[Caller], tuple[int, object]]) -> None:
        """Answer with the status and body that `find` returns for the caller, or with the error that it raises."""
        try:
            status, body = find(self._face.intake.identify(exchange.headers, exchange.sink.peer))
            exchange.respond(status, _quoted(body))
        except Exception as failure:
            self._face.refuse(exchange, as_error(failure), request_id(exchange.headers))

    def _tell(self, model: ServedModel) -> dict[str, object]:
        return {"id": model.name, "object": "model", "created": self._created, "owned_by": "carpool"}


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


def named_model(intake: Intake, fields: dict[str, Raw], path: str, caller: Caller) -> ServedModel:
    """The model of a body, taken out of its fields; the default one where it names none."""
    return model_with_face(intake, text_of(fields, "model") or intake.default_model.name, path, caller)


Read = TypeVar("Read")


def read_as(kind: type[Read], fields: dict[str, Raw], name: str, default: bytes) -> Read:
    """A field of a body, taken out; raises Malformed."""
    try:
        return msgspec.json.decode(fields.pop(name, default), type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise Malformed(f"`{name}` is not what it should be") from None


def count_tokens(values: Sequence[bytes]) -> int:
    """How many token ids the inputs have; texts count nothing."""
    return sum(value.count(b",") + 1 for value in values if value[0] != QUOTE)


def as_base64(value: bytes) -> bytes:
    """A list of numbers as 32-bit floats in base64, quoted; raises UpstreamProtocolFault for anything else."""
    try:
        numbers = _decode_numbers(value)
        # A quarter of the time of an `array`.
        packed = pack(f"<{len(numbers)}f", *numbers)
    except (msgspec.DecodeError, RecursionError, OverflowError):
        raise not_a_vector() from None
    return b'"%b"' % b64encode(packed)


@lru_cache(LINES_KEPT)
def openai_limit_lines(lines: bytes) -> bytes:
    """The lines of a rate limit, and the same in OpenAI's headers."""
    found = _RATE.search(lines)
    if found is None:
        return lines
    names = (b"Limit-Requests: %b", b"Remaining-Requests: %b", b"Reset-Requests: %bs")
    return lines + b"".join([b"X-RateLimit-%b\r\n" % name for name in names]) % found.groups()
