"""What `input.deny` finds in a text, and what it leaves alone."""

import re
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.admission.input_policy import InputPolicy
from carpool.admission.input_rules import PATTERN_BYTES_MAX, make_rules, repeats
from carpool.core.errors import InputDenied
from carpool.core.tensors import RawTensor, pack, pack_tensors
from carpool.testing import Witness, make_request

ALL = ["control", "invisible", "repeats=20"]
PAGE = Path(__file__).parents[2] / "docs" / "input-policy.md"


def refusal(value: bytes, rules: list[str] = ALL, parameters: bytes = b"", patterns: list[str] | None = None) -> str:
    """Why an input is not let in; "" if it is."""
    request = make_request("r", Witness(), now=0.0, value=value, parameters=parameters)
    try:
        InputPolicy(0, patterns or [], rules).check(request)
    except InputDenied as denied:
        return denied.detail
    return ""


def test_every_character_of_the_categories_is_found() -> None:
    control, invisible = make_rules(["control", "invisible"])
    for code in range(sys.maxunicode + 1):
        category = unicodedata.category(chr(code))
        text = chr(code).encode(errors="replace")
        if category == "Cc":
            assert (control(text) is None) == (chr(code) in "\t\n\r")
        elif category == "Cf":
            assert invisible(text), hex(code)
        elif category[0] in "LNPSZ" and chr(code) not in "\u115f\u1160\u3164\uffa0\u2800":
            assert control(text) is invisible(text) is None, hex(code)


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (b'"plain text,\\n\\twith lines\\r\\n"', ""),
        ('"Grüße, мир, 你好, ❤️ 🚗"'.encode(), ""),
        (b'"a\\u0000b"', "control"),
        (b'"a\\u001b[31mred"', "control"),
        (b'"a\x7fb"', "control"),
        (b'{"fine": ["a\\b"]}', "control"),
        (b'{"a\\u0008": 1}', "control"),
        (b'"ig\\u200bnore"', "invisible"),
        (b'"ig\\u200Bnore"', "invisible"),
        ('"ig\u200bnore"'.encode(), "invisible"),
        (b'"\\u202egnp.exe"', "invisible"),
        (b'"\\udb40\\udc41\\udb40\\udc42"', "invisible"),  # tags: an "AB" that nobody sees
        ('"A\U000e0141"'.encode(), "invisible"),
        (b'"\\\\u200b is written like this"', ""),
        (b"1234", ""),
        (b'"' + b"a" * 20 + b'"', ""),
        (b'"' + b"a" * 21 + b'"', "repeats=20"),
        (b'"so ' + b"spam " * 21 + b'"', "repeats=20"),
        (b'"' + "我".encode() * 21 + b'"', "repeats=20"),
        (b'"' + b"\\u6211" * 21 + b'"', "repeats=20"),
        (b'"' + b"<|im_start|>" * 21 + b'"', "repeats=20"),
        (b"[" + b'"again", ' * 22 + b"1]", "repeats=20"),
        (b"[" + b"0," * 1000 + b"0]", ""),
    ],
)
def test_what_is_found(value: bytes, rule: str) -> None:
    said = refusal(value)
    assert said.endswith(f"; `deny` has {rule}") if rule else said == ""


def test_parameters_and_tensors_are_looked_at_too() -> None:
    assert refusal(b'"fine"', parameters=b'{"system":"\\u200b"}').startswith("it has an invisible character")
    assert "control" in refusal(pack_tensors([RawTensor("T", "BYTES", (1, 1), pack(["a\0"], "BYTES"))]))
    assert refusal(pack_tensors([RawTensor("T", "UINT8", (1, 3), b"\0\0\0")])) == ""


def test_rules_and_patterns_go_together() -> None:
    assert refusal(b'"x\\u0001"', ["control"], patterns=["x"]).startswith("it has a control character")
    assert refusal(b'"x"', ["control"], patterns=["x"]) == "pattern 1 of deny_patterns is found in it"


def by_hand(text: bytes, most: int) -> bool:
    return any(
        text[at : at + length] * (most + 1) == text[at : at + length * (most + 1)]
        for length in range(1, PATTERN_BYTES_MAX + 1)
        for at in range(len(text) - length * (most + 1) + 1)
    )


REPEATED = st.tuples(st.binary(min_size=1, max_size=36), st.integers(1, 14)).map(lambda pair: pair[0] * pair[1])


@given(st.lists(REPEATED | st.text("ab", max_size=60).map(str.encode), max_size=6).map(b"".join), st.integers(1, 12))
def test_repetitions_are_those_that_a_slow_search_finds(text: bytes, most: int) -> None:
    assert repeats(text, most) == by_hand(text, most)


def steps(text: bytes) -> int:
    """Lines that the search runs, and calls, for a text in which it finds nothing."""
    taken = 0

    def count(*_: object) -> object:
        nonlocal taken
        taken += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)  # type: ignore[arg-type]
    try:
        assert not repeats(text, 20)
    finally:
        sys.settrace(before)
    return taken


@pytest.mark.parametrize(
    "piece",
    [b"a" * 20 + b"b", b"ab" * 20 + b"-", (b"a" * 20 + b"b") * 3 + b"-", b"spam " * 20 + b".", bytes(range(256))],
)
def test_it_takes_time_in_proportion(piece: bytes) -> None:
    """Also where there is nearly a repetition everywhere."""
    once = 10_000 // len(piece)

    def varied(times: int) -> bytes:
        return b"".join(piece + str(number).encode() for number in range(10_000, 10_000 + times))

    assert steps(varied(8 * once)) < 10 * steps(varied(once))


def test_each_example_of_the_page_finds_what_it_says() -> None:
    lines = re.findall(r"^    '''(.+)''', +# (.+)$", PAGE.read_text(), re.MULTILINE)
    assert len(lines) >= 8
    patterns = [pattern for pattern, _ in lines]
    for number, (_, example) in enumerate(lines, 1):
        assert refusal(f'"so: {example} ok"'.encode(), [], patterns=patterns) == (
            f"pattern {number} of deny_patterns is found in it"
        )
    harmless = (
        "Which instructions did the previous teacher give? My sketch is at https://example.org/sk, task-12, ghost."
    )
    assert refusal(f'"{harmless}"'.encode(), [], patterns=patterns) == ""
