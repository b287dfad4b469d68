"""The messages of `carpool.v1.Inference` (protos/carpool/v1/inference.proto) in protobuf's wire format. Pure.

What is read has limits: a message with too many fields, or too many requests, is Malformed before much of it was read.
"""

from collections.abc import Callable, Generator, Mapping

import msgspec

from carpool.core.errors import GRPC_STATUS, CarpoolError, Malformed, RateLimited, all_errors
from carpool.core.outcome import CallFacts, Output
from carpool.core.problem import TYPE_PREFIX, Problem
from carpool.core.protobuf import (
    BadMessageError,
    Message,
    as_bytes,
    as_message,
    as_number,
    as_text,
    double_field,
    field,
    fields,
    number_field,
    varint,
)
from carpool.core.request import Request
from carpool.core.task import StoredTask
from carpool.core.tensors import Data, shown
from carpool.face.octets import Octets

# A request has six fields; a client that is newer than this gateway may send more.
FIELDS_MAX = 32
# Requests, and ids to cancel, in one message of a stream.
STREAMED_MAX = 1024
ID_BYTES_MAX = 128
# Of an error's text, which is in a status twice, with three bytes for one beyond ASCII: clients take 8 KB of trailers.
TEXT_BYTES_MAX = 1024
_NOTHING: Message = b""
_TASK_STATUS = {"PENDING": 1, "SUCCESS": 2, "FAILED": 3}

_read_problem = msgspec.json.Decoder(Problem).decode


class PredictCall(msgspec.Struct, gc=False):
    """A PredictRequest."""

    model: str = ""
    # One of both: bytes, or a JSON value.
    data: bytes | None = None
    json: bytes | None = None
    parameters: bytes = b""
    client_id: str = ""
    timeout_ms: int = 0


def read_predict(message: Message) -> PredictCall:
    """A PredictRequest; raises Malformed."""
    call = PredictCall()
    try:
        for number, value in fields(message, FIELDS_MAX):
            if number == 1:
                call.model = as_text(value)
            elif number == 2:
                call.data, call.json = as_bytes(value), None  # of a oneof the last counts
            elif number == 3:
                call.json, call.data = as_bytes(value), None
            elif number == 4:
                call.parameters = as_bytes(value)
            elif number == 5:
                call.client_id = as_text(value)
            elif number == 6:
                call.timeout_ms = as_number(value)
    except BadMessageError as fault:
        raise malformed(fault) from None
    return call


def read_submit(message: Message) -> tuple[PredictCall, str]:
    """The PredictRequest of a SubmitRequest, and where its result is to be sent, or ""; raises Malformed."""
    found, callback_url = _NOTHING, ""
    try:
        for number, value in fields(memoryview(message), FIELDS_MAX):
            if number == 1:
                found = as_message(value)
            elif number == 2:
                callback_url = as_text(value)
    except BadMessageError as fault:
        raise malformed(fault) from None
    return read_predict(found), callback_url


def read_stream(message: bytes) -> Generator[None, None, tuple[list[tuple[str, Message]], list[str]]]:
    """A PredictStreamRequest: ids with their PredictRequests, still undecoded, and ids to cancel.

    There may be many: it yields after each, so that other work can have a turn.
    """
    asked: list[tuple[str, Message]] = []
    cancelled: list[str] = []
    try:
        for number, value in fields(memoryview(message), STREAMED_MAX):
            if number == 1:
                own_id, request = "", _NOTHING
                for part, content in fields(as_message(value), FIELDS_MAX):
                    if part == 1:
                        own_id = as_text(content)
                        if len(own_id.encode()) > ID_BYTES_MAX:
                            raise BadMessageError(f"an id may have {ID_BYTES_MAX} bytes at most")
                    elif part == 2:
                        request = as_message(content)
                asked.append((own_id, request))
                yield
            elif number == 2:
                cancelled.append(as_text(value))
    except BadMessageError as fault:
        raise malformed(fault) from None
    return asked, cancelled


def read_get_result(message: bytes) -> tuple[str, int]:
    """A GetResultRequest: the task's id, and milliseconds to wait; raises Malformed."""
    task_id, wait_ms = "", 0
    try:
        for number, value in fields(message, FIELDS_MAX):
            if number == 1:
                task_id = as_text(value)
            elif number == 2:
                wait_ms = as_number(value)
    except BadMessageError as fault:
        raise malformed(fault) from None
    return task_id, wait_ms


class PredictResponses:
    """Writes PredictResponses. What the members of a batch have in common is written once."""

    def __init__(self, output_bytes: Mapping[str, Callable[[Data], Octets]] | None = None) -> None:
        # By name, the models whose clients get bytes; the others' get JSON.
        self._output_bytes = output_bytes
        # The last call and its part of the metadata: the outcomes of one batch come one after the other.
        self._call: CallFacts | None = None
        self._call_part = b""

    def message(self, request: Request, output: Output) -> bytes:
        """The PredictResponse of one request."""
        if output.call is not self._call:
            self._call = output.call
            self._call_part = _call_part(request.model, output.call)
        arrived = request.arrived
        tokens = b"" if output.tokens_used is None else number_field(7, output.tokens_used)
        metadata = double_field(1, (request.taken - arrived) * 1000.0) + tokens + self._call_part
        octets_of = self._output_bytes.get(request.model) if self._output_bytes else None
        value = shown(output.value) if octets_of is None else octets_of(output.value).data
        own_id = request.id.encode()
        return b"".join(
            (
                b"\x0a",
                varint(len(own_id)),
                own_id,
                b"\x12",
                varint(len(value)),
                value,
                b"\x18",
                varint(round((request.ended - arrived) * 1000.0)),
                b"\x22",
                varint(len(metadata)),
                metadata,
            )
        )


def _call_part(model: str, call: CallFacts) -> bytes:
    """The Metadata that is the same for every member of a batch."""
    part = double_field(2, call.upstream_s * 1000.0) + number_field(3, call.batch_size) + field(4, model.encode())
    if call.model_version is not None:
        part += field(5, call.model_version.encode())
    return part + number_field(6, 1) if call.cached else part


def error_message(error: CarpoolError, request_id: str) -> bytes:
    """An Error."""
    retry_ms = None if error.retry_after_s is None else error.retry_after_s * 1000
    return _error(type(error), error.detail, request_id, retry_ms)


def _error(kind: type[CarpoolError], detail: str, request_id: str, retry_ms: int | None = None) -> bytes:
    message = field(1, kind.code.encode()) + number_field(2, GRPC_STATUS[kind.grpc_code]) + field(3, detail.encode())
    if kind.retryable:
        message += number_field(4, 1)
    if retry_ms is not None:
        message += number_field(5, retry_ms)
    return message + field(6, request_id.encode())


def streamed(own_id: str, response: bytes | None, error: bytes | None) -> bytes:
    """One answer as a field of a PredictStreamResponse: a PredictResponse, or an Error."""
    name = own_id.encode()
    result = field(2, response) if response is not None else field(3, error or b"")
    head = b"\x0a" + varint(len(name)) + name
    return b"\x0a" + varint(len(head) + len(result)) + head + result


def submitted(task_id: str) -> bytes:
    """A SubmitResponse."""
    return field(1, task_id.encode()) + number_field(2, _TASK_STATUS["PENDING"])


def task_message(task: StoredTask) -> bytes:
    """A GetResultResponse."""
    message = field(1, task.id.encode()) + number_field(2, _TASK_STATUS[task.status])
    if task.output is not None:
        message += field(3, task.output)
    elif task.error is not None:
        message += field(4, _error_of(task.error))
    message += double_field(5, task.timestamp_wall)
    if task.queue is not None:
        wait_ms = task.queue.estimated_wait_ms
        place = number_field(1, task.queue.place)
        message += field(6, place if wait_ms is None else place + number_field(2, wait_ms))
    return message


def _error_of(problem: bytes) -> bytes:
    """The Error that says what a problem object says."""
    told = _read_problem(problem)
    code = told.type.removeprefix(TYPE_PREFIX)
    kind = next((each for each in all_errors() if each.code == code), CarpoolError)  # another release may have others
    return _error(kind, told.detail, told.request_id)


def malformed(fault: BadMessageError) -> Malformed:
    """The error for bytes that are not the expected message."""
    return Malformed(f"the message is not what this method takes: {fault}")


def status_text(error: CarpoolError) -> str:
    """The text of an error in a status, cut to what every client accepts."""
    data = error.detail.encode()
    return error.detail if len(data) <= TEXT_BYTES_MAX else data[:TEXT_BYTES_MAX].decode(errors="ignore") + "…"


def status_message(error: CarpoolError, request_id: str) -> bytes:
    """A google.rpc.Status with its details, for `grpc-status-details-bin`."""
    detail = status_text(error).encode()
    facts = {"request_id": request_id}
    if error.predicted_wait_ms is not None:
        facts["predicted_wait_ms"] = str(error.predicted_wait_ms)
    info = field(1, error.code.replace("-", "_").upper().encode()) + field(2, b"carpool")
    for name, text in facts.items():
        info += field(3, field(1, name.encode()) + field(2, text.encode()))
    details = [_detail("ErrorInfo", info)]
    if error.retry_after_s is not None:
        details.append(_detail("RetryInfo", field(1, number_field(1, error.retry_after_s))))
    if isinstance(error, RateLimited):
        details.append(_detail("QuotaFailure", field(1, field(1, b"owner") + field(2, detail))))
    return number_field(1, GRPC_STATUS[error.grpc_code]) + field(2, detail) + b"".join(details)


def _detail(name: str, content: bytes) -> bytes:
    """A google.protobuf.Any."""
    return field(3, field(1, f"type.googleapis.com/google.rpc.{name}".encode()) + field(2, content))
