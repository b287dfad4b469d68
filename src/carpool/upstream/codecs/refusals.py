"""What an answer with an error status means for a batch. Pure.

What an upstream says is a hypothesis: a server that quotes the input which it refuses speaks with a client's words.

1. The status decides what is done. Words decide one thing only: that a 400 or 422 means the number of inputs, and how
   many are taken.
2. They count if a client's text cannot take their form: a field of its own (pydantic's), or the whole message, from its
   first character to its last, in the words that this server has for it. Words that merely occur in it are not looked
   for.
3. Where these words name the size of the batch, it must be the size that was sent.
4. A limit that was not exceeded is none.

What is believed in the end is not decided here, but by `limits.py`: what an endpoint does refutes what it says.
"""

import re
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import msgspec

from carpool.upstream.endpoint import UpstreamResponse

# What to do with a batch that was refused:
# elsewhere  the answer says nothing about the inputs: try another endpoint
# split      the batch was too large: send it in parts
# bisect     one of the inputs may be bad: find it
# fault      the answer is not what the protocol says: none of its outputs can be trusted
# give-up    another attempt would only repeat it
RefusalKind = Literal["elsewhere", "split", "bisect", "fault", "give-up"]

MESSAGE_CHARS_MAX = 512

_ELSEWHERE = frozenset({429, 502, 503, 504})
_BISECT = frozenset({400, 422, 424, 500})
# FastAPI's list of faults: the text of pydantic 2 and 1 for a list that is too long, by the name of the fault.
_PYDANTIC = {
    "too_long": re.compile(
        r"List should have at most (?P<max>[0-9]{1,6}) items? after validation, not (?P<size>[0-9]+)"
    ),
    "value_error.list.max_items": re.compile(r"ensure this value has at most (?P<max>[0-9]{1,6}) items"),
}


class Refusal(msgspec.Struct, frozen=True):
    """What an answer with an error status means."""

    kind: RefusalKind
    # The API's own words, at most MESSAGE_CHARS_MAX; shown only to a client that was alone in its call.
    message: str = ""
    # With "split": the most inputs it takes, if it says so in a form that can be believed.
    batch_max: int | None = None


def limit_words(*forms: str) -> Sequence[re.Pattern[str]]:
    """How a server says that a batch is too large: whole messages, MAX where its limit stands, SIZE for the batch's."""
    groups = {"MAX": "(?P<max>[0-9]{1,6})", "SIZE": "(?P<size>[0-9]{1,6})"}
    return tuple(re.compile(re.sub("MAX|SIZE", lambda word: groups[word[0]], form)) for form in forms)


def classify_status(
    answer: UpstreamResponse,
    size: int,
    words: Sequence[re.Pattern[str]] = (),
    *,
    inputs_field: str = "",
    start: str = "",
) -> Refusal:
    """What an answer means for a batch of `size`.

    `words`: see `limit_words`. `inputs_field`: the name of the array of inputs in the call, where the server may be one
    that tells the faults of fields. `start`: what the server puts before its own words; taken off.
    """
    body = _read(_decode_error, answer.body, _ErrorBody())
    text = _text(body).removeprefix(start)
    message = text[:MESSAGE_CHARS_MAX]
    status = answer.status
    if status in _ELSEWHERE:
        return Refusal("elsewhere", message)
    if size > 1 and status in (400, 413, 422):
        stated = [form.fullmatch(text) for form in words] + [_fault_of(inputs_field, body)]
        for found in stated:
            limit = _limit(found, size)
            if limit:
                return Refusal("split", message, limit)
        if status == 413:  # of bytes, as far as one can tell
            return Refusal("split", message)
    if status in _BISECT:
        return Refusal("bisect", message)
    return Refusal("give-up", message)


def error_message(body: bytes) -> str:
    """The words in an error answer, wherever its protocol puts them, cut to MESSAGE_CHARS_MAX; "" if there are none."""
    return _text(_read(_decode_error, body, _ErrorBody()))[:MESSAGE_CHARS_MAX]


# A server may quote the input that it refuses, and a client's numbers take long to read: only what is needed is.
_NOTHING = msgspec.Raw()
_NONE: list[msgspec.Raw] = []
_NOWHERE: tuple[str, ...] = ()


class _ErrorBody(msgspec.Struct):
    error: msgspec.Raw = _NOTHING
    message: msgspec.Raw = _NOTHING
    # FastAPI's: a text, or a list of faults of which `msg` is the text and the rest quotes the input.
    detail: msgspec.Raw = _NOTHING


class _Fault(msgspec.Struct):
    message: msgspec.Raw = _NOTHING
    msg: msgspec.Raw = _NOTHING
    type: msgspec.Raw = _NOTHING
    loc: msgspec.Raw = _NOTHING


_decode_error = msgspec.json.Decoder(_ErrorBody).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_fault = msgspec.json.Decoder(_Fault).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_place = msgspec.json.Decoder(tuple[str, ...]).decode
Read = TypeVar("Read")


def _read(decode: Callable[[bytes | msgspec.Raw], Read], part: bytes | msgspec.Raw, otherwise: Read) -> Read:
    try:
        return decode(part)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return otherwise


def _text(body: _ErrorBody) -> str:
    for said in (body.error, body.message, body.detail):
        first = next(iter(_read(_decode_list, said, [said])), _NOTHING)
        fault = _read(_decode_fault, first, _Fault())
        for part in (first, fault.message, fault.msg):
            if text := _read(_decode_text, part, ""):
                return text
    return ""


def _limit(stated: re.Match[str] | None, size: int) -> int | None:
    """The limit that these words state, if it is one for a batch of `size`."""
    if stated is None:
        return None
    named = stated.groupdict().get("size")
    limit = int(stated["max"])
    return limit if 0 < limit < size and (named is None or int(named) == size) else None


def _fault_of(field: str, body: _ErrorBody) -> re.Match[str] | None:
    """What FastAPI says of the length of the call's own array.

    A fault of one input has its number in the place, and one of parameters has their names, which are a client's.
    """
    for part in _read(_decode_list, body.detail, _NONE) if field else ():
        fault = _read(_decode_fault, part, _Fault())
        form = _PYDANTIC.get(_read(_decode_text, fault.type, ""))
        # Behind the name may stand which of several types of a list it was.
        if form is not None and _read(_decode_place, fault.loc, _NOWHERE)[:2] == ("body", field):
            return form.fullmatch(_read(_decode_text, fault.msg, ""))
    return None
