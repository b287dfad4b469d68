"""However a denied word is written in JSON, and wherever it stands, it is found."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from carpool.admission.input_policy import InputPolicy, text_of
from carpool.core.errors import InputDenied
from carpool.testing import Witness, make_request

WORD = 'förbidden"\\/🚗 word'
POLICY = InputPolicy(0, [r"förbidden\"\\/🚗\sword"])
SHORT = {"\n": "\\n", "\t": "\\t", "/": "\\/", '"': '\\"', "\\": "\\\\"}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=10,
)


def is_denied(value: str) -> bool:
    try:
        POLICY.check(make_request("r", Witness(), now=0.0, value=value.encode()))
    except InputDenied:
        return True
    return False


@st.composite
def written(draw: st.DrawFn, text: str) -> str:
    """A JSON string of a text, each character in any of its forms."""

    def forms(character: str) -> list[str]:
        units = character.encode("utf-16-be")
        escaped = "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
        found = [escaped, "".join(part.upper() if part != "u" else part for part in escaped)]
        if character in SHORT:
            found.append(SHORT[character])
        if character not in '"\\' and ord(character) >= 0x20:
            found.append(character)
        return found

    return '"' + "".join(draw(st.sampled_from(forms(character))) for character in text) + '"'


@given(st.data(), TEXTS, TEXTS, VALUES)
def test_a_denied_word_is_found(data: st.DataObject, before: str, after: str, beside: Any) -> None:
    word = data.draw(written(before + WORD + after))
    others = json.dumps(beside, ensure_ascii=data.draw(st.booleans()))
    shape = data.draw(
        st.sampled_from(
            ["%s", "[%s]", '{"a":%s}', "{%s:1}", '{"k":{"k":[1,%s]}}', '{"k":%s,"k":""}', '{"k":"","k":%s}']
        )
    )
    value = shape % word
    assert is_denied(value)
    assert is_denied(f"[{others},{value}]")
    assert is_denied(f"[{value} , {others}]")


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_the_text_has_every_string_and_nothing_else(value: Any, ascii_only: bool, indent: int | None) -> None:
    strings: list[str] = []

    def walk(found: Any) -> None:
        if isinstance(found, str):
            strings.append(found)
        elif isinstance(found, list):
            for each in found:
                walk(each)
        elif isinstance(found, dict):
            for key, each in found.items():
                strings.append(key)
                walk(each)

    walk(value)
    raw = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert text_of(raw) == "\n".join(strings).encode()
