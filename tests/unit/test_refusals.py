"""U9 of FAULTS.md: what an error means for a batch, and that no client's text can say so."""

import json
import time
from typing import Any, get_args

import pytest

from carpool.core.names import ProtocolName
from carpool.upstream.codecs import Codec, JsonCodec, make_codec
from carpool.upstream.codecs.base import Refusal
from carpool.upstream.codecs.refusals import classify_status, error_message, limit_words
from carpool.upstream.endpoint import UpstreamResponse
from carpool.upstream.first_contact import field_names

JSON, V1, V2, GRPC, EMBEDDINGS, COMPLETIONS, TEI = (make_codec(name) for name in get_args(ProtocolName))
CALL_ID = "carpool-5a17-7"
SIZE = 64


def refused(codec: Codec, status: int, body: object, size: int = SIZE) -> Refusal:
    return codec.classify(UpstreamResponse(status, json.dumps(body).encode()), size, CALL_ID)


def too_long(field: str, most: int = 32, size: int = SIZE, **other: Any) -> dict[str, Any]:
    """What FastAPI answers when a list is too long; it quotes the list."""
    fault = {
        "type": "too_long",
        "loc": ["body", field],
        "msg": f"List should have at most {most} items after validation, not {size}",
        "input": ["x"] * size,
        "ctx": {"field_type": "List", "max_length": most, "actual_length": size},
    }
    return {"detail": [fault | other]}


OPENAI = (
    "Invalid '%s': array too long. Expected an array with maximum length %d, but got an array with length %d instead."
)
TRITON = "inference request batch-size must be <= 8 for 'resnet50'"
# The codec, its status, its body, and the limit that it states for a batch of 64.
STATED: list[tuple[Codec, int, Any, int]] = [
    (TEI, 422, {"error": "batch size 64 > maximum allowed batch size 32", "error_type": "Validation"}, 32),
    (TEI, 413, {"error": "batch size 64 > maximum allowed batch size 32", "error_type": "Validation"}, 32),
    (EMBEDDINGS, 422, {"message": "batch size 64 > maximum allowed batch size 32", "type": "Validation"}, 32),
    (EMBEDDINGS, 422, too_long("input"), 32),
    (EMBEDDINGS, 422, too_long("input", 1, msg="List should have at most 1 item after validation, not 64"), 1),
    (EMBEDDINGS, 422, too_long("input", loc=["body", "input", "list[str]"]), 32),
    (EMBEDDINGS, 400, {"error": {"message": OPENAI % ("input", 16, 64), "code": "array_above_max_length"}}, 16),
    (COMPLETIONS, 400, {"error": {"message": OPENAI % ("prompt", 16, 64), "param": "prompt"}}, 16),
    (COMPLETIONS, 422, too_long("prompt"), 32),
    (V2, 400, {"error": f"[request id: {CALL_ID}] {TRITON}"}, 8),
    (V2, 400, {"error": TRITON}, 8),
    (GRPC, 400, {"error": f"[request id: {CALL_ID}] {TRITON}"}, 8),
    (V1, 400, {"error": "Task size 64 is larger than maximum input batch size 10"}, 10),
    (V1, 422, too_long("instances"), 32),
    (JSON, 400, {"error": "batch size 64 > maximum 32"}, 32),
    (JSON, 422, {"error": "batch size 64 > maximum allowed batch size 32"}, 32),
    (JSON, 400, {"detail": "Batch size 64 exceeds the maximum of 32."}, 32),
    (JSON, 400, {"message": "batch size 64 exceeds limit 32"}, 32),
    (JSON, 400, {"error": "Too many inputs: 64, the maximum is 32"}, 32),
    (JSON, 422, too_long("inputs"), 32),
    (JsonCodec("texts"), 422, too_long("texts"), 32),
    (
        JSON,
        422,
        too_long("inputs", type="value_error.list.max_items", msg="ensure this value has at most 32 items"),
        32,
    ),
]


@pytest.mark.parametrize(("codec", "status", "body", "limit"), STATED)
def test_a_limit_stated_in_the_server_s_own_words_is_learned(codec: Codec, status: int, body: Any, limit: int) -> None:
    refusal = refused(codec, status, body)
    assert (refusal.kind, refusal.batch_max) == ("split", limit)


@pytest.mark.parametrize(("codec", "status", "body", "limit"), STATED)
def test_words_for_a_batch_of_another_size_say_nothing(codec: Codec, status: int, body: Any, limit: int) -> None:
    if str(SIZE) not in error_message(json.dumps(body).encode()):
        return  # these words do not name it
    for size in (SIZE - 1, SIZE + 1, 2):
        assert refused(codec, status, body, size).batch_max is None
    assert refused(codec, status, body, size=1).kind != "split"


def test_the_fault_of_the_array_is_found_among_others() -> None:
    """A field of several types has a fault for each of them."""
    other = {"type": "string_type", "loc": ["body", "input", "str"], "msg": "Input should be a valid string"}
    body = {"detail": [other, "words", 7, *too_long("input", loc=["body", "input", "list[str]"])["detail"]]}
    assert refused(EMBEDDINGS, 422, body).batch_max == 32


def test_a_message_is_looked_at_whole_also_where_it_is_cut_for_a_client() -> None:
    words = limit_words("a*b <= MAX")
    body = json.dumps({"error": "a" * 505 + "b <= 7" + "1" * 5 + " and more"}).encode()
    assert len(error_message(body)) == 512
    assert classify_status(UpstreamResponse(400, body), SIZE, words).batch_max is None


def test_what_a_server_quotes_of_the_input_costs_nobody_time() -> None:
    faults = [{"type": "float_type", "loc": ["body", "inputs", 0], "msg": "words", "input": "*"}]
    quoted = b"[" + b",".join([b"1e300"] * 100_000) + b"]"  # 15 us each, if they are decoded
    body = json.dumps({"detail": faults}).encode().replace(b'"*"', quoted)
    began = time.process_time()
    refusal = JsonCodec().classify(UpstreamResponse(422, body), 8)
    assert field_names(body, b"") == ["inputs"] and refusal.message == "words"
    assert time.process_time() - began < 0.5
