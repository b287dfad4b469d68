import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from carpool.tools.bench.options import BadOption, key_from
from carpool.tools.bench.payload import NOT_TOLD, PAYLOAD_BYTES_MIN, Payload

NUMBER = b"0000002a"
METADATA = b'"metadata":{"latency_ms":9.5,"queue_ms":1.25,"upstream_ms":8,"batch_size":64,"model":"m","cached":false}'


def make(size: int = 100, **more: Any) -> Payload:
    return Payload(host="gateway:80", base_path="/base", run_id="abcdef012345", size=size, **more)


def sent_body(payload: Payload) -> dict[str, Any]:
    head, _, body = payload.request(NUMBER).partition(b"\r\n\r\n")
    assert b"Content-Length: %d" % len(body) in head
    decoded: dict[str, Any] = msgspec.json.decode(body)
    return decoded


def answer(output: str, *, metadata: bytes = METADATA) -> bytes:
    return b'{"request_id":"r","output":%b,%b}' % (msgspec.json.encode(output), metadata)


def test_a_size_with_no_room_for_the_nonce_is_refused() -> None:
    with pytest.raises(ValueError, match="too small"):
        make(PAYLOAD_BYTES_MIN - 1)


def test_path_model_and_preference_are_in_the_request() -> None:
    payload = make(model='say "hi"', respond_async=True)
    assert payload.request(NUMBER).startswith(b"POST /base/v1/inference HTTP/1.1\r\nHost: gateway:80\r\n")
    assert b"\r\nPrefer: respond-async\r\n" in payload.request(NUMBER)
    assert sent_body(payload)["model"] == 'say "hi"'
    assert b"Prefer" not in make().request(NUMBER)
    assert "model" not in sent_body(make())


@pytest.mark.parametrize("size", [PAYLOAD_BYTES_MIN, 2000])
def test_only_the_expected_output_is_right(size: int) -> None:
    payload = make(size)
    text = sent_body(payload)["input"]
    right = text[::-1]
    assert payload.expected_output(NUMBER) == right
    prefix = b"HTTP/1.1 200 OK\r\n\r\n"
    assert payload.verify(prefix + answer(right), len(prefix), NUMBER) == (1.25, 64)
    wrong = [text, right[:-1], right[1:], right + "x", "x" + right, "", right.swapcase()]
    for output in wrong:
        assert payload.verify(answer(output), 0, NUMBER) is None
    # The output of another request differs in nothing but its nonce.
    assert payload.verify(answer(right), 0, b"0000002b") is None


def test_the_same_answer_in_other_bytes_is_right_too() -> None:
    payload = make()
    value = {
        "metadata": {"batch_size": 3, "queue_ms": 2},
        "output": payload.expected_output(NUMBER),
        "more": [1],
    }
    spaced = msgspec.json.format(msgspec.json.encode(value))
    assert payload.verify(spaced, 0, NUMBER) == (2.0, 3)


@pytest.mark.parametrize(
    ("metadata", "journey"),
    [
        (b'"metadata":{"latency_ms":4}', NOT_TOLD),
        (b'"metadata":{"queue_ms":0,"batch_size":5}', (0.0, 5)),
        (b'"metadata":{"queue_ms":null,"batch_size":null,"cached":true}', NOT_TOLD),
        (b'"metadata":null', NOT_TOLD),
        (b'"latency_ms":4', NOT_TOLD),
    ],
)
def test_metadata_that_tells_less_is_no_fault(metadata: bytes, journey: tuple[float, int]) -> None:
    payload = make()
    assert payload.verify(answer(payload.expected_output(NUMBER), metadata=metadata), 0, NUMBER) == journey


@pytest.mark.parametrize("body", [b"", b"{}", b"not json", b'{"output":null}', b'{"output":{"a":1}}', b"[1]"])
def test_a_body_with_no_such_output_is_wrong(body: bytes) -> None:
    assert make().verify(body, 0, NUMBER) is None


def test_a_right_output_in_a_broken_body_is_wrong() -> None:
    payload = make()
    assert payload.verify(answer(payload.expected_output(NUMBER))[:-1], 0, NUMBER) is None


def test_where_a_key_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text("cp_of_the_file\n")
    monkeypatch.setenv("CARPOOL_API_KEY", "cp_other")
    assert key_from(file, os.environ) == "cp_of_the_file"
    assert key_from(None, os.environ) == "cp_other"
    assert key_from(None, {}) == ""
    assert make(key="cp_x").credential == "Authorization: Bearer cp_x\r\n"
    for content in ("", "two words", "cp_x\r\nHost: evil"):
        file.write_text(content)
        with pytest.raises(BadOption):
            key_from(file, os.environ)
    with pytest.raises(BadOption):
        key_from(tmp_path, os.environ)
