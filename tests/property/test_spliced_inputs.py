"""Inputs that Carpool takes can stand in one array for a strict parser, and each comes back as itself."""

import json
import math
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from carpool.core.errors import Malformed
from carpool.face.http.strict_json import DEPTH_MAX, NUMBER_CHARS_MAX
from carpool.face.http.wire import canonical_parameters, checked_input, decode_inference

text = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**320), 10**320) | st.floats() | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)
# Pieces that make numbers, brackets and strings of all kinds, mostly broken ones.
FRAGMENTS = b'[ ] { } , : " \\ 1 0 - . e E+ true null NaN "a" "a": \xff \xc3\xa4 \\ud800 \\u0000'.split()
pieces = st.sampled_from([*FRAGMENTS, b" ", b"\n", b"9" * 150, b"[" * 33, b"]" * 33])


def taken(raw: bytes) -> bytes | None:
    """The bytes that would be spliced into a batch; None if the body is refused."""
    try:
        return checked_input(decode_inference(b'{"input":' + raw + b"}").input, "input")
    except Malformed:
        return None


def strict_number(token: str) -> float:
    value = float(token)
    assert math.isfinite(value) and len(token) <= NUMBER_CHARS_MAX
    return value


def no_constant(token: str) -> None:
    raise AssertionError(f"{token} is not JSON")


def strictly_parsed(raw: bytes) -> Any:
    """Python's own parser, made strict; raises for what an upstream might refuse."""
    parsed = json.loads(raw.decode(), parse_float=strict_number, parse_int=strict_number, parse_constant=no_constant)
    json.dumps(parsed, ensure_ascii=False).encode()  # lone surrogates fail here
    return parsed


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(st.lists(st.lists(pieces, max_size=12).map(b"".join) | values.map(lambda v: json.dumps(v).encode()), max_size=5))
@example([b'1],"x":[2'])
@example([b'"\\ud800"', b"1"])
def test_what_is_taken_never_harms_its_neighbours(raws: list[bytes]) -> None:
    inputs = [value for raw in raws if (value := taken(raw)) is not None]
    batch = strictly_parsed(b'{"inputs":[' + b",".join(inputs) + b"]}")
    assert list(batch) == ["inputs"]
    assert len(batch["inputs"]) == len(inputs)
    assert batch["inputs"] == [strictly_parsed(value) for value in inputs]


def clean(value: Any) -> bool:
    """Whether a value has none of the faults that are checked for."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return all(map(clean, value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()))
    return len(str(value)) <= NUMBER_CHARS_MAX


@given(values, st.booleans())
def test_everything_clean_is_taken_untouched(value: Any, escaped: bool) -> None:
    raw = json.dumps(value, ensure_ascii=escaped, allow_nan=True).encode()
    assert depth(value) <= DEPTH_MAX
    assert taken(raw) == (raw if clean(value) else None)


@given(st.dictionaries(text, values.filter(clean), max_size=5), st.randoms())
def test_key_order_and_spacing_do_not_split_a_lane(parameters: dict[str, Any], random: Any) -> None:
    keys = list(parameters)
    random.shuffle(keys)
    shuffled = {key: parameters[key] for key in keys}
    forms = {
        canonical_parameters(msgspec.Raw(json.dumps(each, indent=indent).encode()))
        for each in (parameters, shuffled)
        for indent in (None, 2)
    }
    assert len(forms) == 1
    assert json.loads(forms.pop() or b"{}") == json.loads(json.dumps(parameters))
