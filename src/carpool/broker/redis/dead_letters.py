"""Dead letters in Redis: how they are written and read, how many are kept, and how synchronous requests become some.

1. Letters never keep a request out: they have bounds of their own, and while the memory of Redis is short, before
   requests are refused for it, the oldest go.
2. A batcher writes a letter: length of the owner, owner, lengths of head and parameters, head, parameters. Behind it
   scripts put the client's own bytes (those of a task are in Redis already). The head is what a list shows.
3. A task becomes a letter in the step that writes its result (`letter_of`).
"""

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from struct import Struct

import msgspec

from carpool.broker.redis.client.link import RedisFailure
from carpool.broker.redis.formats import UnknownFormatError
from carpool.broker.redis.keys import Shard
from carpool.broker.redis.redis_ops import RedisOps
from carpool.core.clock import Clock, monotonic
from carpool.core.dead_letter import (
    DeadLetterSummary,
    StoredDeadLetter,
    SynchronousKept,
    dead_letter_causes,
    is_dead_letter,
    is_kept,
)
from carpool.core.defaults import do_nothing, no
from carpool.core.errors import CarpoolError, Malformed
from carpool.core.request import DONE, Request

logger = logging.getLogger("carpool.broker")

LETTER_FORMAT = 1
# An id is at least the ms of the burial times this, plus the number of the shard.
IDS_A_MS = 16
_OWNER = Struct(">H")
_LENGTHS = Struct(">II")
# On their way into Redis.
BURYING_MAX = 1000
BURYING_BYTES_MAX = 64 * 1024 * 1024
DROPPED_LOG_S = 10.0


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


class LetterBounds:
    """The bounds of each shard, for the scripts that keep letters; and a count of those that were dropped."""

    def __init__(
        self,
        *,
        letters_max: int,
        bytes_max: int,
        ttl_ms: int,
        is_memory_short: Callable[[], bool] = no,
        # Of Redis's memory, the part of a shard; None: no limit.
        memory_bytes_max: Callable[[], int | None] = do_nothing,
        clock: Clock = monotonic,
    ) -> None:
        self._letters_max = letters_max
        self._bytes_max = bytes_max
        self.ttl_ms = ttl_ms
        self._is_memory_short = is_memory_short
        self._memory_bytes_max = memory_bytes_max
        self._clock = clock
        self._logged_at = -DROPPED_LOG_S
        self._logged = 0
        # Letters that went before their time, since the start of this process. For metrics.
        self.dropped = 0

    def arguments(self) -> tuple[int, int, int]:
        """Most letters, most bytes of them, and 1 while memory is short."""
        memory_bytes_max = self._memory_bytes_max()
        bytes_max = self._bytes_max if memory_bytes_max is None else min(self._bytes_max, memory_bytes_max)
        return self._letters_max, bytes_max, int(self._is_memory_short())

    def note_dropped(self, number: int) -> None:
        """A script dropped so many. Said in the log once in a while."""
        self.dropped += number
        now = self._clock()
        if self.dropped > self._logged and now - self._logged_at >= DROPPED_LOG_S:
            logger.warning("%d dead letters were dropped to make room", self.dropped - self._logged)
            self._logged, self._logged_at = self.dropped, now


class RedisDeadLetterBox:
    """Keeps synchronous requests that were given up on (core.ports.DeadLetters)."""

    def __init__(
        self,
        steps: RedisOps,
        *,
        bounds: LetterBounds,
        kept: SynchronousKept = "poison",
    ) -> None:
        self._steps = steps
        self._nodes = steps.nodes
        self._keys = steps.keys
        self._kept = kept
        self._bounds = bounds
        self._next_shard = 0
        # Letters on their way into Redis.
        self.burying = 0
        self._burying_bytes = 0
        # For metrics. Every cause from the start: an alert on an increase needs the zero before the first one.
        self.buried = Counter(dict.fromkeys(dead_letter_causes(), 0))
        # Letters that Redis did not take.
        self.failures = 0

    def bury(self, request: Request, error: CarpoolError, sends: int) -> None:
        """Keep a request with its error, if the settings keep such errors and there is room; before it is settled."""
        if is_kept(self._kept, error):
            self._bury(request, error, sends)

    def bury_suspect(self, request: Request, error: CarpoolError, sends: int) -> None:
        """Keep a request that batchers did not survive: it is poison, whatever its error says."""
        if self._kept != "none":
            self._bury(request, error, sends)

    def bury_unreadable(self, entry_id: bytes, model: str, content: bytes, why: str) -> None:
        """Keep an entry of the queue that cannot be read, for an operator to look at."""
        now, name = monotonic(), entry_id.decode(errors="replace")
        self._bury(Request(name, model, b"", content, len(content), 0, now, now, 0.0, now, self), Malformed(why), 0)

    def settled(self, request: Request, outcome: object) -> None:
        """Nothing to do: no client waits for such an entry."""

    def count(self, cause: str) -> None:
        """A request was given up on; also for tasks (ReplyWriter calls this)."""
        self.buried[cause] += 1

    def _bury(self, request: Request, error: CarpoolError, sends: int) -> None:
        if request.is_task or request.phase == DONE:  # a task's result buries it; a settled request has no input
            return
        self.count(error.code)
        shard = self._shard()
        if shard is None or self.burying >= BURYING_MAX or self._burying_bytes + request.size > BURYING_BYTES_MAX:
            self.failures += 1
            return
        self.burying += 1
        self._burying_bytes += request.size
        letter, done = encode_letter(request, error, sends), partial(self._done, request.size)
        self._steps.bury(shard, self._bounds.arguments(), letter, bytes(request.input), done)

    def _done(self, size: int, reply: int | RedisFailure) -> None:
        self.burying -= 1
        self._burying_bytes -= size
        if isinstance(reply, RedisFailure):
            self.failures += 1
        else:
            self._bounds.note_dropped(reply)

    def _shard(self) -> Shard | None:
        """The next shard that can be reached."""
        shards = self._keys.shards
        for _ in shards:
            self._next_shard = (self._next_shard + 1) % len(shards)
            if self._nodes.is_up(shards[self._next_shard].slot):
                return shards[self._next_shard]
        return None
