"""No input that the face accepts can break out of its place in a batch, or make the batch one that is refused."""

import json
from math import isfinite
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carpool.face.http.strict_json import json_fault
from carpool.upstream.codecs import Codec, JsonCodec, KServeV1Codec

CODECS: list[tuple[Codec, str]] = [(JsonCodec(), "inputs"), (KServeV1Codec(), "instances")]
each_codec = pytest.mark.parametrize(("codec", "field"), CODECS, ids=["json", "kserve_v1"])

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
# JSON as clients write it: any spacing, escapes or plain UTF-8.
texts = st.builds(
    lambda value, ascii, indent: json.dumps(value, ensure_ascii=ascii, indent=indent).encode("utf-8", "surrogatepass"),
    values,
    st.booleans(),
    st.none() | st.just(1),
)
# Bytes that try to be something else: JSON's own signs, bad numbers, broken UTF-8, in any order.
signs = [b'"', b"\\", b"[", b"]", b"{", b"}", b",", b":", b" ", b"\n", b"\x00", b'"a":', b"\\u", b"d800", b"dc00"]
numbers = [b"1", b"-", b"e999", b".5", b"0", b"9" * 400, b"null", b"NaN", b"true"]
shards = st.sampled_from([*signs, *numbers, b"\xff", b"\xc3\xa9", b"[" * 70, b"]" * 70])
loose = st.lists(shards, min_size=1, max_size=8).map(b"".join) | st.binary(max_size=12)
hostile = loose | loose.map(lambda inner: b'"' + inner + b'"') | loose.map(lambda inner: b"[" + inner + b"]")


def accepted(data: bytes) -> bytes | None:
    """What the face would keep of this input, or None if it would refuse it."""
    try:
        raw = bytes(msgspec.json.decode(b'{"input":' + data + b"}", type=dict[str, msgspec.Raw])["input"])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, KeyError):
        return None
    return raw if json_fault(raw) is None else None


def strictly(body: bytes) -> Any:
    """Parse as an upstream would that takes the standard at its word: UTF-8 alone, and numbers that a double holds."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    def number(text: str) -> float:
        assert len(text) <= 300 and isfinite(float(text))
        return float(text)

    return json.loads(body.decode("utf-8"), parse_constant=refuse, parse_int=number, parse_float=number)


@each_codec
@given(data=st.lists(texts | hostile, min_size=1, max_size=8), parameters=st.sampled_from([b"", b'{"a":[1]}']))
@example(data=[b'1],"inputs":[2', b"2"], parameters=b"")
@example(data=[b'"\\', b'"'], parameters=b"")
@example(data=[b"1e308", b"1e309", b"[1e309]", b"9" * 400, b"[-%b]" % (b"9" * 310)], parameters=b"")
@example(data=[b'"\xff"', b'{"\xff":1}', b'"\xed\xa0\x80"', b'"\\ud800"', b"[" * 65 + b"]" * 65], parameters=b"")
def test_what_is_accepted_can_be_spliced(codec: Codec, field: str, data: list[bytes], parameters: bytes) -> None:
    inputs = [value for value in map(accepted, data) if value is not None]
    body = strictly(codec.encode("m", parameters, inputs).body)
    assert set(body) == ({field, "parameters"} if parameters else {field})
    assert repr(body[field]) == repr([strictly(value) for value in inputs])  # by repr: -0.0 and 1.0 stay themselves


@given(st.lists(texts, min_size=1, max_size=8))
def test_what_clients_write_is_accepted(data: list[bytes]) -> None:
    """The test above is not true for want of inputs."""
    for value in data:
        kept = accepted(value)
        if kept is None:  # too long a number, or a lone surrogate in a Python string
            assert b"\\ud" in value or b"\xed" in value or json_fault(value)
        else:
            assert kept == value


@each_codec
@given(outputs=st.lists(texts.filter(lambda text: accepted(text) is not None), max_size=8))
def test_each_output_comes_back_as_the_bytes_it_was(codec: Codec, field: str, outputs: list[bytes]) -> None:
    name = {"inputs": b"outputs", "instances": b"predictions"}[field]
    body = b'{"%b": [%b]}' % (name, b" , ".join(outputs))
    assert [bytes(raw) for raw in codec.decode(body, len(outputs))] == outputs
