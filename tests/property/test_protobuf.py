"""The messages of the gRPC face and of upstreams, read and written as any client and server does."""

import struct
import subprocess
import sys
from collections.abc import Generator
from typing import Any, TypeVar

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carpool.core.errors import CarpoolError, Malformed, QueueFull, RateLimited, all_errors
from carpool.core.outcome import CallFacts, Output
from carpool.core.problem import problem_json
from carpool.core.protobuf import BadMessageError, cut_out, field, start_of_field, varint
from carpool.core.task import QueuePlace, StoredTask
from carpool.core.tensor_messages import (
    CONTENTS,
    ELEMENTS_AT_ONCE,
    add_elements,
    parameter_of,
    raw_of_contents,
    value_of,
)
from carpool.core.tensors import is_packed, pack
from carpool.face.grpc.messages import (
    STREAMED_MAX,
    PredictResponses,
    fill_error,
    parse_stream,
    read_predict,
    status_message,
    task_message,
)
from carpool.face.grpc.v2_messages import call_of, read_infer
from carpool.face.http.state import LONG_BODY_BYTES
from carpool.testing import Witness, make_request
from support.grpc_client import details_in, message, parts

Made = TypeVar("Made")

texts = st.text(max_size=20)
whole = st.integers(-(2**63), 2**63 - 1)
Request = message("inference.ModelInferRequest")


def whole_of(steps: Generator[None, None, Made]) -> Made:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            made: Made = end.value
            return made


# What is cut out of messages by hand.


@given(texts, st.lists(st.binary(max_size=300), max_size=4), st.lists(texts, max_size=3), texts)
def test_raw_contents_are_cut_out(model: str, raw: list[bytes], inputs: list[str], own_id: str) -> None:
    made = Request(model_name=model, id=own_id, inputs=[{"name": name} for name in inputs])
    rest = made.SerializeToString()
    made.raw_input_contents.extend(raw)
    found, views = cut_out(made.SerializeToString(), (7,), 64)
    assert (found, [(number, bytes(view)) for number, view in views]) == (rest, [(7, each) for each in raw])
    tail = b"".join(start_of_field(7, len(each)) + each for each in raw)
    assert Request.FromString(rest + tail) == made


@given(st.binary(max_size=60))
@example(b"\x0a")
@example(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
@example(b"\x0b\x0c")
@example(b"\x80" * 11)
def test_what_is_cut_off_is_no_message(data: bytes) -> None:
    try:
        rest, views = cut_out(data, (7,), 64)
    except BadMessageError:
        return
    theirs, ours = parts(data), parts(rest)
    assert [each for each in theirs.pop(7, []) if isinstance(each, bytes)] == [bytes(view) for _, view in views]
    assert ours.keys() - {7} == theirs.keys()


@given(whole)
def test_a_number(number: int) -> None:
    written = varint(2 << 3) + varint(number)
    assert message("GetResultRequest").FromString(written).wait_ms == number


def test_other_programs_may_have_messages_of_the_same_names() -> None:
    """tritonclient and KServe put theirs into protobuf's default pool, which has each name once."""
    code = (
        "from google.protobuf import descriptor_pb2, descriptor_pool\n"
        "theirs = descriptor_pb2.FileDescriptorProto(name='grpc_service.proto', package='inference', syntax='proto3')\n"
        "theirs.message_type.add(name='ModelInferRequest')\n"
        "descriptor_pool.Default().Add(theirs)\n"
        "import carpool.face.grpc.v2_messages, carpool.upstream.codecs.kserve_v2_grpc"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@given(
    st.sampled_from(["input_json", "input_data"]), st.sampled_from(["input_json", "input_data"]), st.booleans(), whole
)
def test_a_long_request_is_read_as_a_short_one(first: str, last: str, is_long: bool, timeout_ms: int) -> None:
    size = LONG_BODY_BYTES if is_long else 1
    request, values = message("PredictRequest"), {"input_json": "é" * size, "input_data": b"\xff" * size}
    data = request(**{first: values[first]}).SerializeToString() + request(model_id="m").SerializeToString()
    data += request(**{last: values[last]}, timeout_ms=timeout_ms).SerializeToString()
    read = read_predict(data)
    value = values[last]
    assert (read.kind, read.given) == (last, value.encode() if isinstance(value, str) else value)
    assert (read.message.model_id, read.message.timeout_ms) == ("m", timeout_ms)
    assert read_predict(request(client_id="x" * size).SerializeToString()).kind is None
    with pytest.raises(Malformed):
        read_predict(data + b"\x12")


# Limits.


def long(kind: Any) -> bytes:
    """So many of a field that they are counted before they are parsed."""
    data: bytes = kind.SerializeToString()
    return data * (LONG_BODY_BYTES // len(data) + 1)


def test_a_stream_s_message_has_so_many_requests() -> None:
    one = message("PredictStreamRequest")(requests=[{"id": "x"}])
    few = one.SerializeToString()
    assert len(parse_stream(few * STREAMED_MAX).requests) == STREAMED_MAX
    for many in (few * (STREAMED_MAX + 1), long(one), long(message("PredictStreamRequest")(cancel=["x"]))):
        with pytest.raises(Malformed, match="more than 1024 fields"):
            parse_stream(many)
    with pytest.raises(Malformed, match="128 bytes"):
        parse_stream(message("PredictStreamRequest")(requests=[{"id": "x" * 129}]).SerializeToString())


def tensor(**fields: Any) -> bytes:
    written: bytes = Request(inputs=[{"name": "x", "datatype": "INT8", **fields}]).SerializeToString()
    return written


@pytest.mark.parametrize(
    ("data", "why"),
    [
        pytest.param(long(Request(inputs=[{}])), "256 fields", id="tensors"),
        pytest.param(long(Request(parameters={"x": {}})), "256 fields", id="parameters"),
        pytest.param(field(5, long(Request(parameters={"x": {}}))), "64 fields", id="parameters of a tensor"),
        pytest.param(tensor(shape=[1] * LONG_BODY_BYTES), "dimensions", id="a shape"),
        pytest.param(tensor(contents={"bytes_contents": [b""] * 65_537}), "65536 fields", id="elements of BYTES"),
    ],
)
def test_what_is_long_has_few_fields(data: bytes, why: str) -> None:
    with pytest.raises(Malformed, match=why):
        whole_of(read_infer(data))


def test_a_long_request_has_few_fields() -> None:
    with pytest.raises(Malformed, match="more than 32 fields"):
        read_predict(b"\x78\x01" * LONG_BODY_BYTES)  # of a number that there is not


def test_what_is_long_may_have_long_parts() -> None:
    raw = bytes(LONG_BODY_BYTES)
    asked, views = whole_of(read_infer(Request(inputs=[{"name": "x"}], raw_input_contents=[raw]).SerializeToString()))
    assert (asked.inputs[0].name, [bytes(view) for view in views]) == ("x", [raw])
    many = [b""] * 65_536
    asked, _ = whole_of(read_infer(tensor(contents={"bytes_contents": many})))
    assert list(asked.inputs[0].contents.bytes_contents) == many


@given(st.binary(max_size=60))
def test_garbage_for_v2(data: bytes) -> None:
    try:
        asked, raw = whole_of(read_infer(data))
        whole_of(call_of(asked, raw, len(data)))
    except Malformed:
        pass


# What is answered.


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
    answers = PredictResponses({})
    for _ in range(2):  # the second with what the first remembered
        read = message("PredictResponse").FromString(answers.message(request, output))
        assert (read.request_id, read.output, read.latency_ms) == ("req", value, latency_ms)
        told = read.metadata
        assert (told.queue_ms, told.upstream_ms, told.batch_size, told.model) == (250.0, 500.0, size, request.model)
        assert (told.model_version, told.cached) == (version or "", cached)
        assert (told.tokens_used if told.HasField("tokens_used") else None) == tokens


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.code)
def test_an_error(kind: type[CarpoolError]) -> None:
    error = kind("what to do", retry_after_s=7)
    read = message("Error")()
    fill_error(read, kind, error.detail, "req", error.retry_after_s)
    assert (read.code, read.detail, read.retryable) == (kind.code, "what to do", kind.retryable)
    assert (read.retry_after_ms, read.request_id) == (7000, "req")
    assert read.status == parts(status_message(error, "req"))[1][0] > 0
    # A task that failed tells the same.
    told = task_message(StoredTask("t", "o", "FAILED", None, problem_json(error, "req"), 12.5))
    assert (told.status, told.error.code, told.error.detail, told.error.status) == (
        3,
        kind.code,
        "what to do",
        read.status,
    )


def test_tasks() -> None:
    told = task_message(StoredTask("t", "o", "PENDING", None, None, 12.5, queue=QueuePlace(3, None)))
    assert (told.task_id, told.status, told.timestamp_s, told.queue.place) == ("t", 1, 12.5, 3)
    assert not told.queue.HasField("estimated_wait_ms") and not told.HasField("error")
    assert task_message(StoredTask("t", "o", "SUCCESS", b'"x"', None, 12.5)).output == b'"x"'


def test_details_of_a_status() -> None:
    limited = details_in(status_message(RateLimited("slower", retry_after_s=3), "req"))
    assert sorted(limited) == ["ErrorInfo", "QuotaFailure", "RetryInfo"]
    assert parts(parts(limited["RetryInfo"])[1][0]) == {1: [3]}
    assert parts(limited["ErrorInfo"])[1] == [b"RATE_LIMITED"]
    assert sorted(details_in(status_message(QueueFull("full"), "req"))) == ["ErrorInfo"]


# Tensors and parameters.

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
def test_typed_contents_and_raw_ones_are_the_same(datatype: str, data: st.DataObject) -> None:
    values = data.draw(st.lists(elements[datatype], max_size=5))
    made, again = message("inference.InferTensorContents")(), message("inference.InferTensorContents")()
    getattr(made, CONTENTS[datatype]).extend(values)
    raw = b"".join(raw_of_contents(made, datatype))
    assert raw == pack(values, datatype)
    add_elements(again, raw, datatype)
    assert again == made


def test_many_elements_are_converted_some_at_a_time() -> None:
    count = ELEMENTS_AT_ONCE + 1
    made = message("inference.InferTensorContents")(int_contents=range(count))
    found = list(raw_of_contents(made, "INT32"))
    assert len(found) == 2 and b"".join(found) == struct.pack(f"<{count}i", *range(count))


@given(st.booleans() | whole | st.floats(allow_nan=False) | texts)
def test_parameters(value: bool | int | float | str) -> None:
    found = value_of(parameter_of(value))
    assert (found, type(found)) == (value, type(value))
