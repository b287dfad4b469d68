"""How a dead letter is written into Redis, and how it reads. Pure.

A batcher writes the letter: length of the owner, owner, lengths of head and parameters, head, parameters. Behind it
scripts put the client's own bytes (those of a task are in Redis already). The head is what a list shows.
"""

from struct import Struct

import msgspec

from carpool.broker.redis.formats import UnknownFormatError
from carpool.core.dead_letter import DeadLetterSummary, StoredDeadLetter, is_dead_letter
from carpool.core.errors import CarpoolError
from carpool.core.request import Request

LETTER_FORMAT = 1
# An id is at least the ms of the burial times this, plus the number of the shard.
IDS_A_MS = 16
_OWNER = Struct(">H")
_LENGTHS = Struct(">II")


class LetterHead(msgspec.Struct, frozen=True, array_like=True):
    """What a list shows of a letter."""

    version: int
    request_id: str
    model: str
    tier: int
    cause: str
    detail: str
    sends: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LetterHead).decode


def encode_letter(request: Request, error: CarpoolError, sends: int) -> bytes:
    """A letter without its input."""
    head = _encode(LetterHead(LETTER_FORMAT, request.id, request.model, request.tier, error.code, error.detail, sends))
    owner, lengths = request.owner.encode(), _LENGTHS.pack(len(head), len(request.parameters))
    return b"".join((_OWNER.pack(len(owner)), owner, lengths, head, request.parameters))


def letter_of(request: Request, error: CarpoolError) -> bytes:
    """What is kept with the result of a task that failed so; empty if it is no dead letter."""
    return encode_letter(request, error, request.sends) if is_dead_letter(error) else b""


def decode_head(data: bytes) -> LetterHead:
    """Raises UnknownFormatError."""
    try:
        head = _decode(data)
    except msgspec.MsgspecError as failure:
        raise UnknownFormatError("the head of a dead letter cannot be read") from failure
    if head.version != LETTER_FORMAT:
        raise UnknownFormatError(f"the letter has format {head.version}, this program reads {LETTER_FORMAT}")
    return head


def summary_of(letter_id: int, data: bytes, size: int) -> DeadLetterSummary:
    """What a list shows. Also of a letter that this program cannot read, so that a person can drop it."""
    buried_wall = letter_id // IDS_A_MS / 1000
    try:
        head = decode_head(data)
    except UnknownFormatError:
        detail = "another version of Carpool wrote this letter"
        return DeadLetterSummary(letter_id, "", "", "unknown", detail, 0, buried_wall, size)
    return DeadLetterSummary(
        letter_id, head.request_id, head.model, head.cause, head.detail, head.sends, buried_wall, size
    )


def decode_body(letter_id: int, body: bytes) -> StoredDeadLetter:
    """A whole letter; raises UnknownFormatError."""
    head_at, parameters_at, input_at = _places(body)
    data = body[head_at:parameters_at]
    return StoredDeadLetter(
        summary_of(letter_id, data, len(body) - parameters_at),
        body[_OWNER.size : head_at - _LENGTHS.size].decode(),
        decode_head(data).tier,
        body[parameters_at:input_at],
        body[input_at:],
    )


def _places(body: bytes) -> tuple[int, int, int]:
    """Where the head, the parameters and the input of a letter begin."""
    (owner_length,) = _OWNER.unpack_from(body)
    head_length, parameters_length = _LENGTHS.unpack_from(body, _OWNER.size + owner_length)
    head_at = _OWNER.size + owner_length + _LENGTHS.size
    return head_at, head_at + head_length, head_at + head_length + parameters_length
