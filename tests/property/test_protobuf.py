"""core/protobuf.py and the messages made with it, beside the protobuf library: each reads what the other writes."""

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from carpool.core.errors import CarpoolError, Malformed, QueueFull, RateLimited, all_errors
from carpool.core.outcome import CallFacts, Output
from carpool.core.problem import problem_json
from carpool.core.protobuf import BadMessageError, as_number, as_numbers, field, fields, number_field, tag, varint
from carpool.core.task import QueuePlace, StoredTask
from carpool.core.tensor_messages import (
    CONTENTS_FIELD,
    contents_of_raw,
    raw_of_contents,
    read_parameter,
    write_parameter,
)
from carpool.core.tensors import is_packed, pack
from carpool.face.grpc.health import service_in
from carpool.face.grpc.messages import (
    STREAMED_MAX,
    PredictResponses,
    error_message,
    read_get_result,
    read_predict,
    read_stream,
    read_submit,
    status_message,
    streamed,
    submitted,
    task_message,
)
from carpool.face.grpc.reflection import answer
from carpool.face.grpc.v2_messages import own_parameters, read_infer, rows_of
from carpool.testing import Witness, make_request
from support.grpc_client import details_in, message, parts

texts = st.text(max_size=20)
whole = st.integers(-(2**63), 2**63 - 1)


def stream_in(data: bytes) -> Any:
    steps = read_stream(data)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


READERS = [read_predict, read_submit, stream_in, read_get_result, service_in, lambda data: list(fields(data))]


@given(st.lists(whole))
@example([2**63 - 1, -1, 127, 128, 16383, 16384])
def test_packed_numbers(numbers: list[int]) -> None:
    # Field 2 of an ExtensionNumberResponse has 32 bits, as protobuf reads it: whatever is above is cut off.
    packed = b"".join(map(varint, numbers))
    assert as_numbers(packed) == numbers
    written = field(2, packed)
    read = message("grpc.reflection.v1.ExtensionNumberResponse").FromString(written)
    assert [number & 0xFFFFFFFF for number in read.extension_number] == [number & 0xFFFFFFFF for number in numbers]


@given(whole)
def test_a_number(number: int) -> None:
    written = message("GetResultRequest")(wait_ms=number).SerializeToString()
    assert read_get_result(written) == ("", number)
    ((place, value),) = fields(number_field(2, number))
    assert (place, as_number(value)) == (2, number)


@given(texts, st.none() | st.binary(max_size=300), texts, texts, texts, whole)
def test_a_request_that_protobuf_wrote(
    model: str, data: bytes | None, json: str, parameters: str, client_id: str, timeout_ms: int
) -> None:
    made = message("PredictRequest")(model_id=model, parameters=parameters, client_id=client_id, timeout_ms=timeout_ms)
    if data is None:
        made.input_json = json
    else:
        made.input_data = data
    submitted, callback_url = read_submit(
        message("SubmitRequest")(request=made, callback_url=client_id).SerializeToString()
    )
    assert callback_url == client_id
    for read in (read_predict(made.SerializeToString()), submitted):
        assert (read.model, read.client_id, read.timeout_ms) == (model, client_id, timeout_ms)
        assert (read.data, read.json) == ((None, json.encode()) if data is None else (data, None))
        assert read.parameters == parameters.encode()


@given(st.lists(st.tuples(texts, texts), max_size=5), st.lists(texts, max_size=5))
def test_a_stream_that_protobuf_wrote(asked: list[tuple[str, str]], cancelled: list[str]) -> None:
    made = message("PredictStreamRequest")(cancel=cancelled)
    for own_id, json in asked:
        made.requests.add(id=own_id).request.input_json = json
    read, taken_back = stream_in(made.SerializeToString())
    assert [(own_id, read_predict(request).json) for own_id, request in read] == [(i, j.encode()) for i, j in asked]
    assert taken_back == cancelled


@given(st.binary(max_size=40))
@example(b"\x0a")
@example(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
@example(b"\x0b\x0c")
@example(b"\x12\x02\x08")
@example(b"\x80" * 11)
@pytest.mark.parametrize("read", READERS)
def test_garbage_is_refused_and_nothing_worse(read: Any, data: bytes) -> None:
    try:
        read(data)
    except (Malformed, BadMessageError):
        pass


@given(st.binary(max_size=40))
@example(b"\r\x00\x00\x00\x80")
def test_garbage_for_reflection(data: bytes) -> None:
    try:
        message("grpc.reflection.v1.ServerReflectionRequest").FromString(data)
    except DecodeError:
        return
    try:
        message("grpc.reflection.v1.ServerReflectionResponse").FromString(answer(data, ["a.B"]))
    except BadMessageError:
        pass


@given(st.binary(max_size=60))
def test_what_protobuf_can_read_is_read(data: bytes) -> None:
    """And in the same way, but for a field whose wire type is not its own, which protobuf takes for an unknown one."""
    try:
        theirs = message("PredictRequest").FromString(data)
        ours = read_predict(data)
    except Exception:
        return
    if not list(parts(data)) or max(parts(data)) > 6:
        return
    assert ours.model == theirs.model_id and ours.timeout_ms == theirs.timeout_ms


def test_too_many_fields_are_not_read() -> None:
    many = tag(99, 0) + b"\x00"
    with pytest.raises(Malformed, match="more than 32 fields"):
        read_predict(many * 33)
    read_predict(many * 32)
    one = message("PredictStreamRequest")(requests=[{"id": "x"}]).SerializeToString()
    with pytest.raises(Malformed, match="fields"):
        stream_in(one * (STREAMED_MAX + 1))
    assert len(stream_in(one * STREAMED_MAX)[0]) == STREAMED_MAX
    with pytest.raises(Malformed, match="128 bytes"):
        stream_in(message("PredictStreamRequest")(requests=[{"id": "x" * 129}]).SerializeToString())


@given(
    st.binary(max_size=300).filter(lambda value: not is_packed(value)),  # of those what they show is written
    st.integers(1, 4096),
    st.none() | texts,
    st.booleans(),
    st.none() | st.integers(0, 2**40),
    st.integers(0, 10**9),
)
def test_an_answer(
    value: bytes, size: int, version: str | None, cached: bool, tokens: int | None, latency_ms: int
) -> None:
    request = make_request("req", Witness(), now=1.0)
    request.arrived, request.taken, request.ended = 1.0, 1.25, 1.0 + latency_ms / 1000
    output = Output(value, CallFacts(size, 0.5, version, cached), tokens)
    answers = PredictResponses()
    for _ in range(2):  # the second with what the first remembered
        written = answers.message(request, output)
        read = message("PredictResponse").FromString(written)
        assert (read.request_id, read.output, read.latency_ms) == ("req", value, latency_ms)
        told = read.metadata
        assert (told.queue_ms, told.upstream_ms, told.batch_size, told.model) == (250.0, 500.0, size, request.model)
        assert (told.model_version, told.cached) == (version or "", cached)
        assert (told.tokens_used if told.HasField("tokens_used") else None) == tokens
    in_stream = message("PredictStreamResponse").FromString(streamed("own", written, None)).responses[0]
    assert (in_stream.id, in_stream.response) == ("own", read)


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.code)
def test_an_error(kind: type[CarpoolError]) -> None:
    error = kind("what to do", retry_after_s=7)
    read = message("Error").FromString(error_message(error, "req"))
    assert (read.code, read.detail, read.retryable) == (kind.code, "what to do", kind.retryable)
    assert (read.retry_after_ms, read.request_id) == (7000, "req")
    assert read.status == parts(status_message(error, "req"))[1][0] > 0
    # A task that failed tells the same.
    task = StoredTask("t", "o", "FAILED", None, problem_json(error, "req"), 12.5)
    told = message("GetResultResponse").FromString(task_message(task))
    assert (told.status, told.error.code, told.error.detail, told.error.status) == (
        3,
        kind.code,
        "what to do",
        read.status,
    )
    in_stream = message("PredictStreamResponse").FromString(streamed("own", None, error_message(error, "req")))
    assert in_stream.responses[0].error == read


def test_tasks() -> None:
    assert message("SubmitResponse").FromString(submitted("t")) == message("SubmitResponse")(task_id="t", status=1)
    waiting = StoredTask("t", "o", "PENDING", None, None, 12.5, queue=QueuePlace(3, None))
    told = message("GetResultResponse").FromString(task_message(waiting))
    assert (told.task_id, told.status, told.timestamp_s, told.queue.place) == ("t", 1, 12.5, 3)
    assert not told.queue.HasField("estimated_wait_ms")
    done = StoredTask("t", "o", "SUCCESS", b'"x"', None, 12.5)
    assert message("GetResultResponse").FromString(task_message(done)).output == b'"x"'


elements = {
    "BOOL": st.booleans(),
    "INT8": st.integers(-128, 127),
    "INT64": whole,
    "UINT32": st.integers(0, 2**32 - 1),
    "UINT64": st.integers(0, 2**64 - 1),
    "FP32": st.floats(width=32, allow_nan=False),
    "FP64": st.floats(allow_nan=False),
    "BYTES": st.binary(max_size=9),
}


@given(st.data())
@pytest.mark.parametrize("datatype", elements)
def test_typed_contents_are_read_and_written_as_protobuf_does(datatype: str, data: st.DataObject) -> None:
    values = data.draw(st.lists(elements[datatype], max_size=5))
    made = message("inference.InferTensorContents")()
    name = made.DESCRIPTOR.fields_by_number[CONTENTS_FIELD[datatype]].name
    getattr(made, name).extend(values)
    raw = b"".join(raw_of_contents(made.SerializeToString(), datatype))
    assert raw == pack(values, datatype)
    assert message("inference.InferTensorContents").FromString(contents_of_raw(raw, datatype)) == made


@given(texts, st.booleans() | whole | st.floats(allow_nan=False) | texts)
def test_parameters(name: str, value: bool | int | float | str) -> None:
    made = message("inference.ModelInferRequest")()
    made.parameters[name].MergeFromString(write_parameter(value))
    (entry,) = (part for number, part in fields(made.SerializeToString()) if number == 4)
    assert read_parameter(entry) == (name, value)


@given(st.binary(max_size=60))
def test_garbage_for_v2(data: bytes) -> None:
    try:
        asked = read_infer(data)
        own_parameters(asked)
        list(rows_of(asked, len(data)))
    except Malformed:
        pass


def test_details_of_a_status() -> None:
    limited = details_in(status_message(RateLimited("slower", retry_after_s=3), "req"))
    assert sorted(limited) == ["ErrorInfo", "QuotaFailure", "RetryInfo"]
    assert parts(parts(limited["RetryInfo"])[1][0]) == {1: [3]}
    assert parts(limited["ErrorInfo"])[1] == [b"RATE_LIMITED"]
    assert sorted(details_in(status_message(QueueFull("full"), "req"))) == ["ErrorInfo"]
