"""The messages of `carpool.v1.Inference` (core/protos/carpool/v1/inference.proto), and the statuses of calls. Pure."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from carpool.core.errors import GRPC_STATUS, CarpoolError, Malformed, RateLimited, all_errors
from carpool.core.messages import DecodeError, carpool_v1, google_rpc
from carpool.core.outcome import CallFacts, Output
from carpool.core.problem import TYPE_PREFIX, Problem
from carpool.core.protobuf import BadMessageError, cut_out, fields, start_of_field
from carpool.core.request import Request
from carpool.core.task import StoredTask
from carpool.core.tensors import Data, shown
from carpool.face.http.state import LONG_BODY_BYTES
from carpool.face.octets import Octets

# Requests, and ids to cancel, in one message of a stream.
STREAMED_MAX = 1024
ID_BYTES_MAX = 128
# Of a long PredictRequest: it has a few, and parameters of a few texts.
FIELDS_MAX = 32
# Of an error's text, which is in a status twice, with three bytes for one beyond ASCII: clients take 8 KB of trailers.
TEXT_BYTES_MAX = 1024


_INPUTS = {
    carpool_v1.PredictRequest.INPUT_DATA_FIELD_NUMBER: "input_data",
    carpool_v1.PredictRequest.INPUT_JSON_FIELD_NUMBER: "input_json",
}
_OUTPUT = carpool_v1.PredictResponse.OUTPUT_FIELD_NUMBER
_read_problem = msgspec.json.Decoder(Problem).decode


def parse(kind: Any, message: bytes) -> Any:
    """A message of this kind; raises Malformed."""
    try:
        return kind.FromString(message)
    except DecodeError:
        raise malformed("it is cut off, or a text in it is not valid UTF-8") from None


def malformed(fault: object) -> Malformed:
    """The error for bytes that are not the expected message."""
    return Malformed(f"the message is not what this method takes: {fault}")


class PredictCall(NamedTuple):
    """A PredictRequest."""

    # Without its input, if that is long.
    message: Any
    # The field that its input is in, "input_data" or "input_json"; None if there is none.
    kind: str | None
    given: bytes


def predict_call(message: Any) -> PredictCall:
    """The call of a whole message."""
    kind = message.WhichOneof("input")
    return PredictCall(message, kind, message.input_data if kind == "input_data" else message.input_json.encode())


def read_predict(data: bytes) -> PredictCall:
    """The call in the bytes of a PredictRequest; raises Malformed. The input of a long one is copied once."""
    if len(data) <= LONG_BODY_BYTES:
        return predict_call(parse(carpool_v1.PredictRequest, data))
    try:
        rest, found = cut_out(data, _INPUTS, FIELDS_MAX)
    except BadMessageError as fault:
        raise malformed(fault) from None
    message = parse(carpool_v1.PredictRequest, rest)
    number, view = found[-1] if found else (0, b"")  # of a oneof the last counts
    return PredictCall(message, _INPUTS.get(number), bytes(view))


def parse_stream(message: bytes) -> Any:
    """A PredictStreamRequest; raises Malformed."""
    if len(message) > LONG_BODY_BYTES:  # empty requests are 25 times as large when they are parsed: count them first
        try:
            for _ in fields(memoryview(message), STREAMED_MAX):
                pass
        except BadMessageError as fault:
            raise malformed(fault) from None
    asked = parse(carpool_v1.PredictStreamRequest, message)
    if len(asked.requests) + len(asked.cancel) > STREAMED_MAX:
        raise malformed(f"the message has more than {STREAMED_MAX} fields")
    if any(len(request.id.encode()) > ID_BYTES_MAX for request in asked.requests):
        raise malformed(f"an id may have {ID_BYTES_MAX} bytes at most")
    return asked


class PredictResponses:
    """Writes PredictResponses. What the members of a batch have in common is written once."""

    def __init__(self, output_bytes: Mapping[str, Callable[[Data], Octets]]) -> None:
        # By name, the models whose clients get bytes; the others' get JSON.
        self._output_bytes = output_bytes
        # The last call and its part of the metadata: the outcomes of one batch come one after the other.
        self._call: CallFacts | None = None
        self._call_part = b""

    def message(self, request: Request, output: Output) -> bytes:
        """The PredictResponse of one request. Its output is put behind the rest, so that it is copied once."""
        call, arrived = output.call, request.arrived
        if call is not self._call:
            facts = carpool_v1.Metadata(
                upstream_ms=call.upstream_s * 1000.0,
                batch_size=call.batch_size,
                model=request.model,
                model_version=call.model_version,
                cached=call.cached,
            )
            self._call, self._call_part = call, facts.SerializeToString()
        octets_of = self._output_bytes.get(request.model) if self._output_bytes else None
        value = shown(output.value) if octets_of is None else octets_of(output.value).data
        response = carpool_v1.PredictResponse()
        response.request_id = request.id
        response.latency_ms = round((request.ended - arrived) * 1000.0)
        metadata = response.metadata
        metadata.MergeFromString(self._call_part)
        metadata.queue_ms = (request.taken - arrived) * 1000.0
        if output.tokens_used is not None:
            metadata.tokens_used = output.tokens_used
        return b"".join((response.SerializeToString(), start_of_field(_OUTPUT, len(value)), value))


def fill_error(
    told: Any, kind: type[CarpoolError], detail: str, request_id: str, retry_after_s: int | None = None
) -> None:
    """Fill an Error."""
    told.code, told.status, told.detail = kind.code, GRPC_STATUS[kind.grpc_code], detail
    told.retryable, told.request_id = kind.retryable, request_id
    if retry_after_s is not None:
        told.retry_after_ms = retry_after_s * 1000


def task_message(task: StoredTask) -> Any:
    """A GetResultResponse."""
    message = carpool_v1.GetResultResponse(
        task_id=task.id, status=f"TASK_STATUS_{task.status}", output=task.output, timestamp_s=task.timestamp_wall
    )
    if task.error is not None:
        told = _read_problem(task.error)
        code = told.type.removeprefix(TYPE_PREFIX)
        kind = next((each for each in all_errors() if each.code == code), CarpoolError)  # other releases have others
        fill_error(message.error, kind, told.detail, told.request_id)
    if task.queue is not None:
        message.queue.place = task.queue.place
        if task.queue.estimated_wait_ms is not None:
            message.queue.estimated_wait_ms = task.queue.estimated_wait_ms
    return message


def status_text(error: CarpoolError) -> str:
    """The text of an error in a status, cut to what every client accepts."""
    data = error.detail.encode()
    return error.detail if len(data) <= TEXT_BYTES_MAX else data[:TEXT_BYTES_MAX].decode(errors="ignore") + "…"


def status_message(error: CarpoolError, request_id: str) -> bytes:
    """A google.rpc.Status with its details, for `grpc-status-details-bin`."""
    text = status_text(error)
    status = google_rpc.Status(code=GRPC_STATUS[error.grpc_code], message=text)
    info = google_rpc.ErrorInfo(reason=error.code.replace("-", "_").upper(), domain="carpool")
    info.metadata["request_id"] = request_id
    if error.predicted_wait_ms is not None:
        info.metadata["predicted_wait_ms"] = str(error.predicted_wait_ms)
    details = [info]
    if error.retry_after_s is not None:
        details.append(google_rpc.RetryInfo(retry_delay={"seconds": error.retry_after_s}))
    if isinstance(error, RateLimited):
        details.append(google_rpc.QuotaFailure(violations=[{"subject": "owner", "description": text}]))
    for detail in details:
        name = f"type.googleapis.com/{detail.DESCRIPTOR.full_name}"
        status.details.add(type_url=name, value=detail.SerializeToString())
    serialized: bytes = status.SerializeToString()
    return serialized
