"""Messages of streams: whatever comes, nothing raises, and every request is found or told what is wrong."""

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from carpool.core.errors import Malformed
from carpool.face.http.stream import (
    REQUESTS_MAX,
    BadCall,
    StreamCall,
    decode_message,
    error_pieces,
    output_pieces,
)

own_ids = st.text(min_size=1, max_size=128) | st.integers(-(2**53), 2**53)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
good = st.fixed_dictionaries(
    {"id": own_ids, "input": values},
    optional={"model": st.text(), "client_id": st.text(max_size=256), "timeout_ms": st.integers(1, 10**8)},
)
bad = values | st.fixed_dictionaries({"id": own_ids}) | st.fixed_dictionaries({"id": values, "input": values})


@given(st.binary(max_size=200))
@example(b"[" * 100_000)
@example(b"\xff")
@example(b'{"id":1,"input":"\xff"}')
def test_any_bytes(message: bytes) -> None:
    assert all(isinstance(each, StreamCall | BadCall) for each in decode_message(message))


@given(st.lists(st.tuples(st.just(True), good) | st.tuples(st.just(False), bad), max_size=8))
def test_good_ones_among_bad_ones(mixed: list[tuple[bool, Any]]) -> None:
    decoded = decode_message(json.dumps([value for _, value in mixed]).encode())
    assert len(decoded) == len(mixed)
    for (is_good, value), found in zip(mixed, decoded, strict=True):
        if is_good:
            assert isinstance(found, StreamCall)
            assert (found.id, json.loads(bytes(found.input))) == (value["id"], value["input"])
        elif isinstance(found, BadCall) and found.id is not None:
            assert found.id == value["id"]


def test_only_so_many_in_a_message() -> None:
    good, bad = b'{"id":1,"input":1}', b"0"
    for one in (good, bad):
        assert len(decode_message(b"[%b]" % b",".join([good] * (REQUESTS_MAX - 1) + [one]))) == REQUESTS_MAX
        (refused,) = decode_message(b"[%b]" % b",".join([good] * REQUESTS_MAX + [one]))
        assert isinstance(refused, BadCall) and str(REQUESTS_MAX) in refused.error.detail


@given(own_ids, st.integers(0, 1000) | st.none())
def test_answers_are_json(own_id: str | int, retry_after_s: int | None) -> None:
    answer = json.loads(b"".join(output_pieces(own_id, (b'{"request_id":"r","output":', b"[1]", b',"metadata":{}}'))))
    assert answer == {"id": own_id, "request_id": "r", "output": [1], "metadata": {}}
    error = json.loads(b"".join(error_pieces(own_id, Malformed("no", retry_after_s=retry_after_s), "r")))
    assert (error["id"], error["error"]["request_id"], error.get("retry_after_s")) == (own_id, "r", retry_after_s)
