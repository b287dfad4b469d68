"""How the bodies of calls with a list of inputs are read: their fields, their inputs, and what else is in them."""

import re
from contextlib import suppress
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Raw

from carpool.core.errors import Malformed, UpstreamProtocolFault
from carpool.face.http.strict_json import QUOTE
from carpool.face.http.wire import body_fault, canonical_parameters, checked_input

# OpenAI's own limit.
INPUTS_MAX = 2048
TOKEN_ID_MAX = 2**31
# Beside its inputs no body has more: each field becomes an object, and there could be a hundred thousand.
OTHERS_BYTES_MAX = 64 * 1024
# In inputs of more than this, ids of tokens are written as whole numbers of nine digits at most: each that is not would
# become an object, or two.
ODD_IDS_BYTES_MAX = 256 * 1024

_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_list = msgspec.json.Decoder(list[Raw]).decode
# The same for a long text: decoding stops after INPUTS_MAX elements, of which a megabyte may have 500,000.
_Elements = msgspec.defstruct(
    "_Elements", [(f"element_{n}", Raw, UNSET) for n in range(INPUTS_MAX)], array_like=True, forbid_unknown_fields=True
)
_decode_elements = msgspec.json.Decoder(_Elements).decode
# Checked while they are decoded: a Python loop over a megabyte of ids would hold up all other requests.
_decode_tokens = msgspec.json.Decoder(list[Annotated[int, Meta(ge=0, le=TOKEN_ID_MAX)]]).decode
_decode_floats = msgspec.json.Decoder(list[Annotated[float, Meta(ge=0, le=TOKEN_ID_MAX)]]).decode
# A text, or a list and how its first element begins.
_BEGINNING = re.compile(rb'\s*(?:(")|\[\s*(["\[0-9-]))')
_AS_ZEROS, TEN_DIGITS = bytes.maketrans(b"123456789", b"0" * 9), b"0" * 10
_NUMBERS = re.compile(rb"\s*\[[-+0-9.eE,\s]*\]\s*\Z").match


class _Inputs(msgspec.Struct):
    """Where the inputs are, in any of the faces; all other fields are passed over."""

    input: Raw = Raw()
    inputs: Raw = Raw()
    prompt: Raw = Raw()
    instances: Raw = Raw()


_decode_inputs = msgspec.json.Decoder(_Inputs).decode


def fields_of(body: bytes) -> dict[str, Raw]:
    """The fields of a body that is an object, without those that are null; raises Malformed."""
    try:
        if len(body) > OTHERS_BYTES_MAX:
            inputs = _decode_inputs(body)
            if len(body) - sum(map(len, msgspec.structs.astuple(inputs))) > OTHERS_BYTES_MAX:
                raise Malformed(f"beside the inputs a body may have {OTHERS_BYTES_MAX} bytes at most")
        fields = _decode_fields(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as failure:
        raise Malformed(body_fault(failure)) from None
    return {name: value for name, value in fields.items() if len(value) != 4 or bytes(value) != b"null"}


def text_of(fields: dict[str, Raw], name: str) -> str | None:
    """A field that is a text, taken out; None if there is none."""
    value = fields.pop(name, None)
    if value is None:
        return None
    try:
        return msgspec.json.decode(value, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Malformed(f"`{name}` must be a text") from None


def values_of(value: Raw | None, field: str) -> list[bytes]:
    """The elements of a list of inputs, each safe between others; raises Malformed."""
    try:
        if value is not None and len(value) > OTHERS_BYTES_MAX:
            read = msgspec.structs.astuple(_decode_elements(value))
            elements = [element for element in read if element is not UNSET]
        else:
            elements = _decode_list(value or b"")
    except (msgspec.DecodeError, RecursionError) as failure:
        if str(failure).endswith(f"of at most length {INPUTS_MAX}"):
            raise too_long(field, "a longer one") from None
        raise Malformed(f"`{field}` must be a list") from None
    if not elements:
        raise Malformed(f"`{field}` is empty; it must have an input at least")
    if len(elements) > INPUTS_MAX:
        raise too_long(field, f"an array with length {len(elements)}")
    return [checked_input(element, f"{field}[{number}]") for number, element in enumerate(elements)]


def too_long(field: str, got: str) -> Malformed:
    """In OpenAI's words."""
    return Malformed(
        f"Invalid '{field}': array too long. Expected an array with maximum length {INPUTS_MAX}, but got {got} instead."
    )


def texts_of(value: Raw | None, field: str) -> list[bytes]:
    """The texts in a field, or the token ids in place of them: one, or a list of them; raises Malformed."""
    begins = None if value is None else _BEGINNING.match(value)
    if value is None or begins is None:
        raise Malformed(f"`{field}` must be a text, a list of token ids, or a list of those; it must not be empty")
    is_short = len(value) <= ODD_IDS_BYTES_MAX
    if begins[2] is None or begins[2].isdigit():  # a text, or one list of numbers
        return [checked_text(checked_input(value, field), field, is_short=is_short)]
    values = values_of(value, field)
    return [checked_text(each, f"{field}[{number}]", is_short=is_short) for number, each in enumerate(values)]


def are_ids(value: bytes) -> bool:
    """Whether a JSON value is a list of whole numbers, of nine digits at most: as nearly all ids are. It makes
    no object of each, of which a megabyte has 500,000. False leaves it open.
    """
    shape = value.translate(_AS_ZEROS)
    return b"0" in shape and TEN_DIGITS not in shape and shape.translate(None, b"0, \t\r\n") == b"[]"


def checked_text(value: bytes, field: str, *, is_short: bool = True) -> bytes:
    """A text, or the ids of its tokens; raises Malformed. `is_short`: there is time to look at each id."""
    if value[0] == QUOTE or are_ids(value):
        return value
    try:
        if is_short and _decode_tokens(value):
            return value
    except (msgspec.DecodeError, RecursionError):
        if b"." in value and b"e" not in value and b"E" not in value:  # 7.0 is a whole number too
            with suppress(msgspec.DecodeError, RecursionError):
                ids = _decode_floats(value)
                if all(map(float.is_integer, ids)):
                    return msgspec.json.encode(list(map(int, ids)))
    raise Malformed(f"`{field}` must be a text, or the ids of its tokens as a list of whole numbers")


def parameters_of(fields: dict[str, Raw]) -> bytes:
    """Fields that are passed on, as canonical parameters; raises Malformed."""
    return canonical_parameters(Raw(msgspec.json.encode(fields))) if fields else b""


def vector(value: bytes) -> bytes:
    """An output that is a list of numbers; raises UpstreamProtocolFault for any other."""
    if _NUMBERS(value) is None:
        raise not_a_vector()
    return bytes(value)


def not_a_vector() -> UpstreamProtocolFault:
    """The error for an output that is no embedding."""
    return UpstreamProtocolFault("the model's output is no list of numbers; ask it at /v1/inference")
