"""What inputs may be: their length, and what is not to be found in them."""

import sys

import pytest

from carpool.admission.input_policy import BadPatternError, InputPolicy, compile_patterns
from carpool.core.errors import InputDenied, Malformed
from carpool.core.tensors import RawTensor, pack, pack_tensors
from carpool.service import ModelFace
from carpool.settings import Settings, models_of
from carpool.settings.schema import InputSettings
from carpool.testing import Witness, make_request

BAD = ["forbidden", r"(?i)ignore\s+(all\s+)?previous\s+instructions", r"^secret-\d{4}$"]


def refusal(value: bytes, *, patterns: list[str] = BAD, bytes_max: int = 0, parameters: bytes = b"") -> str:
    """Why an input is not let in; "" if it is."""
    request = make_request("r", Witness(), now=0.0, value=value, parameters=parameters)
    try:
        InputPolicy(bytes_max, patterns).check(request)
    except InputDenied as denied:
        return denied.detail
    return ""


def test_the_longest_input_counts_the_bytes_of_its_json() -> None:
    assert refusal(b'"1234"', bytes_max=6, patterns=[]) == ""
    said = refusal(b'"12345"', bytes_max=6, patterns=[])
    assert said == "an input for this model may have 6 bytes at most; this one has 7"


def test_raw_tensors_are_their_names_and_their_texts() -> None:
    texts = pack([b"fine \xff", "this is forbidden"], "BYTES")
    assert "pattern 1" in refusal(pack_tensors([RawTensor("T", "BYTES", (1, 2), texts)]))
    assert "pattern 1" in refusal(pack_tensors([RawTensor("forbidden", "UINT8", (1, 1), b"1")]))
    assert refusal(pack_tensors([RawTensor("N", "UINT8", (1, 9), b"forbidden")])) == ""
    with pytest.raises(Malformed):
        refusal(b"\0forbidden")


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (b'"this is forbidden"', 1),
        (b'"this is FORBIDDEN"', 0),
        (b'"for bidden"', 0),
        (b'"\\u0066orbidde\\u006e"', 1),
        (b'"forb\\u0069dden and \\" more"', 1),
        (b'{"a": [1, {"b": "forbidden"}]}', 1),
        (b'{"forbidden": 1}', 1),
        (b'{"forb\\u0069dden": 1}', 1),
        (b'{"a": "forbidden", "a": "fine"}', 1),
        (b'{"a": "\\\\", "b": "forbidden"}', 1),
        (b'{"a": "\\\\\\"", "b": "forb\\u0069dden"}', 1),
        (b'["fine \\\\", 1, "for\\"bidden"]', 0),
        (b'"IGNORE previous\\n\\tinstructions, please"', 2),
        (b'["ignore", "previous", "instructions"]', 2),
        (b'"secret-1234"', 3),
        (b'"the secret-1234"', 0),
        (b'{"a": "b", "c": "secret-1234"}', 3),
        (b'"line\\nsecret-1234\\nline"', 3),
        (b'"forbidden secret-1234"', 1),
        (b"1234", 0),
        (b"null", 0),
        (b"[]", 0),
        (b'""', 0),
        ('"\N{CYRILLIC SMALL LETTER EF}orbidden"'.encode(), 0),
    ],
)
def test_patterns_are_looked_for_in_what_the_model_reads(value: bytes, number: int) -> None:
    assert refusal(value) == (f"pattern {number} of deny_patterns is found in it" if number else "")


def test_what_is_in_the_parameters_counts() -> None:
    assert refusal(b'"fine"', parameters=b'{"system":"forbidden"}').startswith("pattern 1 ")
    assert refusal(b'"fine"', parameters=b'{"system":"also fine"}') == ""


def test_patterns_of_the_same_group_names_go_together() -> None:
    patterns = ["(?P<word>left)", "(?P<word>right)"]
    assert refusal(b'"right"', patterns=patterns) == "pattern 2 of deny_patterns is found in it"
    assert refusal(b'"wrong"', patterns=patterns) == ""


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        (["fine", "("], "pattern 2, which cannot be used: missing"),
        (["a)|(b"], "pattern 1, which cannot be used: unexpected"),
        (["(?=ahead)"], "pattern 1, which cannot be used: invalid perl operator"),
        ([r"(a)\1"], "pattern 1, which cannot be used: invalid escape"),
        (["(((((x{100}){100}){100}){100}){100})"], "pattern 1, which cannot be used"),
        (["a*"], "pattern 1, which is found in every text"),
        ([""], "pattern 1, which is found in every text"),
    ],
)
def test_patterns_that_cannot_be_used(patterns: list[str], says: str) -> None:
    with pytest.raises(BadPatternError, match=says.replace("(", r"\(")):
        compile_patterns(patterns)


def test_without_re2_it_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "re2", None)
    assert compile_patterns([]) == []
    with pytest.raises(BadPatternError, match=r"pip install 'carpool\[policy\]'"):
        compile_patterns(["x"])


def test_a_model_without_a_policy_has_nothing_to_do() -> None:
    (plain,) = models_of(Settings()).values()
    assert ModelFace(plain).served().prepare is None
    (strict,) = models_of(Settings(input=InputSettings(deny_patterns=["x"]))).values()
    prepare = ModelFace(strict).served().prepare
    assert prepare is not None
    with pytest.raises(InputDenied):
        prepare(make_request("r", Witness(), now=0.0, value=b'"x"'))


def test_what_the_protocol_wants_is_done_behind_it() -> None:
    settings = Settings(input=InputSettings(deny_patterns=["x"]))
    upstream = type(settings.upstream)(protocol="kserve_v2")
    (model,) = models_of(Settings(input=settings.input, upstream=upstream)).values()
    prepare = ModelFace(model).served().prepare
    assert prepare is not None
    request = make_request("r", Witness(), now=0.0, value=b'{"name":"a","shape":[1,1],"datatype":"FP32","data":[1.0]}')
    prepare(request)
    assert request.prepared is not None
    with pytest.raises(InputDenied):
        prepare(make_request("r", Witness(), now=0.0, value=b'"x"'))
