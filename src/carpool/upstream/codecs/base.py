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
from typing import Annotated, Protocol, TypeVar

import msgspec

from carpool.core.request import Request
from carpool.upstream.call_ids import is_for_another_call
from carpool.upstream.codecs.refusals import Refusal as Refusal
from carpool.upstream.codecs.refusals import classify_status
from carpool.upstream.endpoint import UpstreamCall, UpstreamResponse


class ProtocolFaultError(Exception):
    """The answer is not what the protocol says. The text names no payload."""


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
    # The name of the array of inputs in the call; and the server's whole messages for too large a batch.
    array: str = ""
    limit_words: Sequence[re.Pattern[str]] = ()
    # Where a GET tells whether the server is well, and how many inputs a call may have (in which field), from the
    # server's root; None where the protocol has no such page.
    health: str | None = None
    info: str | None = None
    info_field: str = ""

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
        return classify_status(answer, size, self.limit_words, inputs_field=self.array)

    def binary_input(self, data: bytes) -> bytes:
        """Binary input as this protocol has it, JSON or packed; raises core.errors.Malformed if it has none."""
        return msgspec.json.encode(data)

    def health_path(self, model: str) -> str | None:
        """The page that tells whether the server is well."""
        return self.health and self.health.replace("{model}", model)

    def info_path(self, model: str) -> str | None:
        """The page that tells how many inputs a call may have."""
        return self.info and self.info.replace("{model}", model)

    def batch_max_from_info(self, body: bytes) -> int | None:
        """The most inputs for one call, from what `info_path` answered; None if it does not say."""
        try:
            limit = msgspec.json.decode(decode_object(body)[self.info_field], type=int)
        except (KeyError, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return None
        return limit if limit > 0 else None


decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


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


# How many tokens a call used, as its answer tells: bounded, so that every format that it passes through can hold it.
TOKENS_MAX = 2**53
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]


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
