"""Inputs of any sizes: a request has the size of its turn, and its own answer alone is right."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from carpool.tools.bench.payload import NOT_TOLD, PAYLOAD_BYTES_MIN, Payload

sizes = st.lists(st.integers(PAYLOAD_BYTES_MIN, 3000), min_size=1, max_size=9)
numbers = st.integers(1, 16**8 - 1)


@given(sizes, numbers, numbers)
def test_a_request_has_the_size_of_its_turn_and_only_its_own_answer_is_right(
    sizes: list[int], number: int, other: int
) -> None:
    payload = Payload(host="g", base_path="", run_id="abcdef012345", sizes=sizes)
    head, _, body = payload.request(b"%08x" % number).partition(b"\r\n\r\n")
    assert head.endswith(b"Content-Length: %d" % len(body))
    text = msgspec.json.decode(body)["input"]
    assert len(msgspec.json.encode(text)) == sizes[number % len(sizes)]
    answer = msgspec.json.encode({"output": text[::-1]})
    assert payload.verify(answer, 0, b"%08x" % number) == NOT_TOLD
    assert (payload.verify(answer, 0, b"%08x" % other) is None) == (number != other)
