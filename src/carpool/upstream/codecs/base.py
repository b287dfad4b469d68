"""What every codec does, and what they share.

1. A codec is pure: no clock, no socket, no state that a batch could leave behind.
2. Outputs are trusted only when they are as many as the inputs. Where a protocol has an index, that decides, and
   not the order.
3. Nothing of a payload stands in the text of a ProtocolFaultError.
4. What an error means is worked out in `refusals.py`.
"""

import re
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Literal, Protocol, TypeVar

import msgspec

from carpool.core.errors import Malformed
from carpool.core.request import Request
from carpool.upstream.call_ids import is_for_another_call
from carpool.upstream.endpoint import UpstreamCall, UpstreamResponse

# What to do with a batch that was refused:
# elsewhere  the answer says nothing about the inputs: try another endpoint
# split      the batch was too large: send it in parts
# bisect     one of the inputs may be bad: find it
# fault      the answer is not what the protocol says: none of its outputs can be trusted
# give-up    another attempt would only repeat it
RefusalKind = Literal["elsewhere", "split", "bisect", "fault", "give-up"]

MESSAGE_CHARS_MAX = 512


class ProtocolFaultError(Exception):
    """The answer is not what the protocol says. The text names no payload."""


class Refusal(msgspec.Struct, frozen=True):
    """What an answer with an error status means."""

    kind: RefusalKind
    # The API's own words, at most MESSAGE_CHARS_MAX; shown only to a client that was alone in its call.
    message: str = ""
    # With "split": the most inputs it takes, if it says so in a form that can be believed.
    batch_max: int | None = None


class Prepared(msgspec.Struct, frozen=True):
    """An input that a codec has looked into before it was admitted."""

    # What `encode` needs of it, decoded once.
    value: object
    # Added to the lane key: only inputs with the same one may share a batch.
    lane: bytes


class Decoded(msgspec.Struct, frozen=True, gc=False):
    """One member's part of an answer."""

    # JSON bytes (anything with the buffer protocol).
    value: object
    tokens_used: int | None = None
    # As the answer tells it: for each of the members, or for none.
    model_version: str | None = None


class Codec(Protocol):
    """Turns a batch into a call, and its answer into one part for each member.

    Codecs name it as their base, for the methods that have a body here: what most protocols do. `call_id` is the same
    in all steps of a call, and another for each call; it matters to protocols that repeat it in the answer.
    """

    # How the call names its inputs, and the answer its outputs, where these names are settings.
    inputs_field: str = ""
    outputs_field: str = ""
    # Where False, `prepare` need not be called.
    prepares: bool = False

    def prepare(self, value: bytes) -> Prepared:
        """Look into a client's input before it is admitted; raises core.errors.Malformed with what to change."""
        return Prepared(None, b"")

    def check_parameters(self, parameters: bytes) -> None:
        """Look at canonical parameters before a request with them is admitted; raises core.errors.Malformed."""
        return

    def encode(self, batch: Sequence[Request], call_id: str = "") -> UpstreamCall:
        """One call for a batch, in its order. All members have the same model, parameters and lane."""

    def decode(self, answer: UpstreamResponse, batch: Sequence[Request], call_id: str = "") -> Sequence[Decoded]:
        """One part for each member, in their order; raises ProtocolFaultError, also when their number differs.

        So does an answer that bears the id of another call.
        """

    def classify(self, answer: UpstreamResponse, size: int, call_id: str = "") -> Refusal:
        """What an answer with an error status means for a batch of `size`."""

    def binary_input(self, data: bytes) -> bytes:
        """Binary input as this protocol has it, JSON or packed; raises core.errors.Malformed if it has none."""
        return msgspec.json.encode(data)

    def health_path(self, model: str) -> str | None:
        """Where a GET tells whether the server is well (from its root), if the protocol has that."""
        return None

    def info_path(self, model: str) -> str | None:
        """Where a GET tells how many inputs a call may have (from the server's root), if the protocol has that."""
        return None

    def batch_max_from_info(self, body: bytes) -> int | None:
        """The most inputs for one call, from what `info_path` answered; None if it does not say."""
        return None


def check_count(found: int, count: int) -> None:
    """Outputs and inputs must be as many."""
    if found != count:
        raise ProtocolFaultError(f"{found} outputs came for {count} inputs")


def check_id(answered: object, sent: str) -> None:
    """An answer must not be for another call."""
    if is_for_another_call(answered, sent):
        raise ProtocolFaultError("the answer is for another call")


def check_text(body: bytes) -> None:
    """A JSON answer must be UTF-8; msgspec.Raw does not look."""
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError:
            raise ProtocolFaultError("the answer is not valid UTF-8") from None


Parsed = TypeVar("Parsed")


def parse_answer(decode: Callable[[bytes], Parsed], body: bytes) -> Parsed:
    """Parse a JSON answer; raises ProtocolFaultError."""
    try:
        return decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as failure:
        # msgspec's text names a place and a type, never a value
        raise ProtocolFaultError(f"the answer is not the JSON expected: {failure}") from None


# What Python and TF Serving write for numbers that JSON does not have. Strings are matched in order to be skipped.
_NOT_A_NUMBER = re.compile(rb'"(?:[^"\\]++|\\.)*+"|NaN|Infinity|-Infinity', re.DOTALL)


def nulls_for_not_a_number(body: bytes) -> bytes:
    """The same JSON with null for bare NaN, Infinity and -Infinity."""
    if b"NaN" not in body and b"Infinity" not in body:
        return body
    return _NOT_A_NUMBER.sub(lambda token: token[0] if token[0][0] == 0x22 else b"null", body)


# For protocols that embed or complete texts.

# How many tokens a call used, as its answer tells: bounded, so that every format that it passes through can hold it.
TOKENS_MAX = 2**53
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]

_decode_tokens = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0)]]).decode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
# A call may have texts or token ids, not both.
_TEXT, _TOKENS = Prepared(None, b"text"), Prepared(None, b"tokens")


class TextCodec(Codec):
    """What protocols that take texts have in common."""

    prepares = True

    def prepare(self, value: bytes) -> Prepared:
        """A text, or the ids of its tokens. Bare numbers would melt together with their neighbours into one input."""
        if value[:1] == b'"':
            return _TEXT
        try:
            if _decode_tokens(value):
                return _TOKENS
        except (msgspec.DecodeError, RecursionError):
            pass
        raise Malformed("`input` must be a text, or the ids of its tokens as an array of whole numbers")

    def binary_input(self, data: bytes) -> bytes:
        """There is none."""
        raise Malformed("this model takes texts; send JSON")


def check_fields(parameters: bytes, own: Sequence[str]) -> dict[str, msgspec.Raw]:
    """Parameters that are sent as fields of the call must leave the codec's `own` alone; raises Malformed."""
    fields = _decode_object(parameters) if parameters else {}
    for name in own:
        if name in fields:
            raise Malformed(f"`parameters` may not have `{name}`: that is for Carpool to fill in")
    return fields


def as_fields(parameters: bytes) -> bytes:
    """Canonical parameters as further fields of an object that has some."""
    return b"," + parameters[1:-1] if len(parameters) > 2 else b""


def in_order_of_index(indices: Sequence[int]) -> list[int]:
    """Where in the answer each member's part stands; raises ProtocolFaultError unless each index is there once."""
    places = [-1] * len(indices)
    for place, index in enumerate(indices):
        if not 0 <= index < len(places) or places[index] >= 0:
            raise ProtocolFaultError("the indices of the outputs are not those of the inputs, each once")
        places[index] = place
    return places


def input_lengths(batch: Sequence[Request]) -> list[int]:
    """How long the inputs were; the inputs of requests that have ended are gone, but not their sizes."""
    return [max(request.size - len(request.parameters), 0) for request in batch]


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Whole shares of `total` by weight, which sum up to it."""
    sum_of_weights = sum(weights)
    if not sum_of_weights:
        weights, sum_of_weights = [1] * len(weights), len(weights)
    bounds = [total * reached // sum_of_weights for reached in accumulate(weights, initial=0)]
    return [end - start for start, end in pairwise(bounds)]
