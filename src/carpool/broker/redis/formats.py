"""What is written into Redis, and how it reads: queue entries, replies, errors, dead letters. Pure.

An entry of a queue stream has one field. Its name is the header, the same bytes for all requests of a lane, a tier and
a gateway, so that it is made once and understood once. Its value is the format's number in a byte, the length of a
record in two, the record, and the client's own bytes, untouched. `scripts/common.lua` reads the format's number, the
length, remaining ms, when they were counted and the id too.

A record is number, remaining ms, when they were counted, lengths of id and owner, id, owner, and what may come behind
that: a msgpack array.
Headers, these arrays and replies may become longer: a program skips what it does not know. Only what an old program
would misunderstand needs a new number.
"""

from struct import Struct, error

import msgspec

from carpool.core.dead_letter import DeadLetterSummary, StoredDeadLetter, is_dead_letter
from carpool.core.errors import CarpoolError, InternalError, all_errors, task_time_passed
from carpool.core.outcome import CallFacts
from carpool.core.request import Request
from carpool.core.tensors import PACKED, Data
from carpool.core.timeline import RequestState

# Entries of a newer format are left to newer programs.
ENTRY_FORMAT = 4
REPLY_FORMAT = 1
# The format and the length of the record, with which a value begins; the record up to its names.
_BEGINNING = Struct(">BHQQQBB")
_RECORD_AT, _NAMES_AT = 3, _BEGINNING.size
_pack = _BEGINNING.pack  # for every request
# The outcome of a task that no batcher ends.
LATE = task_time_passed()
# The state of a task.
PENDING, SUCCESS, FAILED = b"P", b"S", b"F"


class UnknownFormatError(Exception):
    """Another version of Carpool wrote this, or another program."""


class NewerFormatError(UnknownFormatError):
    """A newer version of Carpool wrote this: it is for programs that know it."""


class Header(msgspec.Struct, frozen=True, array_like=True):
    """What the entries of one lane, tier and gateway have in common."""

    version: int
    # The name of the gateway that waits; empty for tasks.
    gateway: bytes
    model: str
    # Canonical JSON of the parameters, and what the protocol adds: together the lane.
    parameters: bytes
    lane: bytes
    tier: int
    is_task: bool
    # From the entry's own time (`began_ms`): it must have been taken. 0: it may wait for a slot as long as it has time.
    queue_ms: int


class More(msgspec.Struct, frozen=True, array_like=True):
    """The end of a record, where there is one."""

    # Of a request whose trace is kept: `traceparent` of its span, the caller's span, `tracestate` (core/trace.py).
    trace: str = ""
    # The client's own name for itself.
    client_id: str = ""
    # Of a task: under which key its result is to be kept for requests that are the same; empty if it is not.
    result_key: bytes = b""


_NO_MORE = More()


class EntryRecord(msgspec.Struct, frozen=True, gc=False):
    """What is said of one entry."""

    # The gateway's own for a parked request: clients choose ids, and may repeat them. 0 for a task.
    number: int
    request_id: str
    owner: str
    # From the entry's own time (`began_ms`): it must have its outcome.
    remaining_ms: int
    # When its gateway sent it, on the clock of the shard's server, as far as the gateway knew; 0 if it did not.
    sent_ms: int = 0
    more: More = _NO_MORE


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """One entry of a gateway's reply stream: the outcomes of a turn of a batcher's event loop."""

    version: int = REPLY_FORMAT
    calls: list[CallFacts] = []
    # Number, number of its call in `calls`, seconds in the queue, the output's bytes, tokens used.
    outputs: list[tuple[int, int, float, bytes, int | None]] = []
    # Number, the error's code, its detail, its Retry-After.
    errors: list[tuple[int, str, str, int | None]] = []
    # Tasks with an outcome for which a client waits at this gateway.
    finished: list[str] = []
    # Gateways that look for a request, with its id; and answers to a gateway that looked.
    wanted: list[tuple[bytes, str]] = []
    found: list[tuple[str, RequestState]] = []
    # Of each of `errors`, the number of its call in `calls`, -1 if nothing is known of that; seconds in the queue.
    error_calls: list[tuple[int, float]] = []


class KeptResult(msgspec.Struct, array_like=True, gc=False):
    """A result that is kept for requests that are the same."""

    # When it came, in ms on Redis's clock.
    came_ms: int
    value: bytes
    tokens_used: int | None = None
    model_version: str | None = None


_encoder = msgspec.msgpack.Encoder()
_decode_header = msgspec.msgpack.Decoder(Header).decode
_decode_more = msgspec.msgpack.Decoder(More).decode
_decode_result = msgspec.msgpack.Decoder(KeptResult).decode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode
_ERRORS: dict[str, type[CarpoolError]] = {kind.code: kind for kind in all_errors()}


def encode_header(header: Header) -> bytes:
    """The name of an entry's field."""
    return _encoder.encode(header)


def decode_header(data: bytes) -> Header:
    """Raises UnknownFormatError."""
    try:
        version, *_ = msgspec.msgpack.decode(data, type=list)
        if isinstance(version, int) and version > ENTRY_FORMAT:
            raise NewerFormatError(f"the entry has format {version}, this program reads {ENTRY_FORMAT}")
        header = _decode_header(data)
    except (msgspec.MsgspecError, ValueError) as failure:
        raise UnknownFormatError("the header of an entry cannot be read") from failure
    if header.version != ENTRY_FORMAT:
        raise UnknownFormatError(f"the entry has format {header.version}, this program reads {ENTRY_FORMAT}")
    return header


def encode_record(
    number: int, request_id: str, owner: str, remaining_ms: int, more: bytes = b"", sent_ms: int = 0
) -> bytes:
    """What an entry's value begins with; the client's bytes follow. The remaining time may be over.

    Ids and owners are at most 255 ASCII characters: the face and admission see to that.
    """
    names = (request_id + owner).encode()
    length = _NAMES_AT - _RECORD_AT + len(names) + len(more)
    if remaining_ms < 0:
        remaining_ms = 0
    return _pack(ENTRY_FORMAT, length, number, remaining_ms, sent_ms, len(request_id), len(owner)) + names + more


def encode_more(client_id: str, result_key: bytes = b"", trace: str = "") -> bytes:
    """The end of a record."""
    return _encoder.encode(More(trace, client_id, result_key))


def decode_value(data: bytes) -> tuple[EntryRecord, Data]:
    """The record, and the client's bytes. Raises UnknownFormatError."""
    try:
        version, length, number, remaining_ms, sent_ms, id_length, owner_length = _BEGINNING.unpack_from(data)
        names_end = _NAMES_AT + id_length + owner_length
        end = _RECORD_AT + length
        names = data[_NAMES_AT:names_end].decode()
        more = _NO_MORE if names_end == end else _decode_more(data[names_end:end])
    except (error, UnicodeDecodeError, msgspec.MsgspecError) as failure:
        raise UnknownFormatError("the value of an entry cannot be read") from failure
    if version != ENTRY_FORMAT or end > len(data):
        raise UnknownFormatError("the value of an entry is not what its header says")
    record = EntryRecord(number, names[:id_length], names[id_length:], remaining_ms, sent_ms, more)
    # Raw tensors may be large: no second copy is made of them.
    return record, memoryview(data)[end:] if data[end : end + 1] == PACKED else data[end:]


def began_ms(entry_id: bytes, sent_ms: int) -> int:
    """From when the times of an entry count, on the clock of its server: when its gateway sent it.

    Its id is later where it waited on the way: in a socket, while Redis stood still. It is earlier only where the
    server's clock was set back since the gateway looked at it; and it is all there is where the gateway did not know.
    """
    added_ms = int(entry_id.partition(b"-")[0])
    return min(sent_ms, added_ms) if sent_ms else added_ms


def encode_reply(reply: Reply) -> bytes:
    """The value of a reply entry."""
    return _encoder.encode(reply)


def decode_reply(data: bytes) -> Reply:
    """Raises UnknownFormatError."""
    try:
        reply = _decode_reply(data)
    except msgspec.MsgspecError as failure:
        raise UnknownFormatError("a reply cannot be read") from failure
    if reply.version != REPLY_FORMAT:
        raise UnknownFormatError(f"the reply has format {reply.version}, this program reads {REPLY_FORMAT}")
    return reply


def encode_result(result: KeptResult) -> bytes:
    """What is kept."""
    return _encoder.encode(result)


def decode_result(data: bytes) -> KeptResult:
    """What was kept. Raises UnknownFormatError."""
    try:
        return _decode_result(data)
    except msgspec.MsgspecError as failure:
        raise UnknownFormatError("a result cannot be read") from failure


def make_error(code: str, detail: str, retry_after_s: int | None) -> CarpoolError:
    """The error of the tree with this code."""
    kind = _ERRORS.get(code)
    if kind is None:  # a newer program's
        return InternalError("a batcher answered with an error that this gateway does not know")
    return kind(detail, retry_after_s=retry_after_s)


# Dead letters: length of the owner, owner, lengths of head and parameters, head, parameters. Scripts put the client's
# own bytes behind that (those of a task are in Redis already).

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


_decode_letter_head = msgspec.msgpack.Decoder(LetterHead).decode


def encode_letter(request: Request, error: CarpoolError, sends: int) -> bytes:
    """A letter without its input."""
    head = _encoder.encode(
        LetterHead(LETTER_FORMAT, request.id, request.model, request.tier, error.code, error.detail, sends)
    )
    owner, lengths = request.owner.encode(), _LENGTHS.pack(len(head), len(request.parameters))
    return b"".join((_OWNER.pack(len(owner)), owner, lengths, head, request.parameters))


def letter_of(request: Request, error: CarpoolError) -> bytes:
    """What is kept with the result of a task that failed so; empty if it is no dead letter."""
    return encode_letter(request, error, request.sends) if is_dead_letter(error) else b""


def decode_head(data: bytes) -> LetterHead:
    """Raises UnknownFormatError."""
    try:
        head = _decode_letter_head(data)
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
