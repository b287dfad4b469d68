"""Results that are kept for a while, and what makes two requests the same. Pure.

1. Two requests are the same if model, canonical parameters, what the protocol adds to the lane, and the input's bytes
   are; with `scope = "owner"` the owner too.
2. Inside a process the key is all of that itself: nothing could be more exact, and Python's hash of it takes a third of
   the time of a digest. Between processes it is a digest of 256 bits, over all of them with their lengths: no client
   can write one that reads as another. BLAKE2b, as it takes half of the time of a SHA-256 where the processor (or the
   virtual machine) has no instructions for that, and a microsecond more where it has.
3. A result is kept for `ttl_s`, counted from when it came. Only outputs are kept, never errors.
4. What is kept is bounded in bytes, with its key and what Python needs for it. The result that was unused for longest
   goes first.
"""

from collections import OrderedDict
from functools import lru_cache
from hashlib import blake2b

import msgspec

from carpool.core.outcome import CallFacts, Output
from carpool.core.request import Request

# What is the same for requests that have the same result: model, parameters, lane, owner (or ""), input; or a digest.
SameKey = bytes | tuple[str, bytes, bytes, str, bytes]
# What Python needs for an entry beside the bytes of key and output: objects, and their places in the dictionary.
ENTRY_BYTES = 600
# The part before the input in a digest is remembered if it is no longer than this: clients write it.
BEGINNING_BYTES_MAX = 1024


class KeptResult(msgspec.Struct, frozen=True, gc=False):
    """A result, and when it is too old."""

    output: Output
    until: float
    # What it counts for.
    size: int


class ResultCache:
    """The results of one process."""

    def __init__(self, *, bytes_max: int, ttl_s: float) -> None:
        self._bytes_max = bytes_max
        self._ttl_s = ttl_s
        # The one that was unused for longest comes first.
        self._results: OrderedDict[SameKey, KeptResult] = OrderedDict()
        # The facts of results that no call brought: the same object for many.
        self._facts = CallFacts(0, 0.0, None, cached=True)
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._results)

    def __contains__(self, key: SameKey) -> bool:
        return key in self._results

    def __repr__(self) -> str:
        return f"<ResultCache entries={len(self._results)} bytes={self.bytes}>"

    def find(self, key: SameKey, now: float) -> Output | None:
        """The result under this key, if there is one that is not too old."""
        kept = self._results.get(key)
        if kept is None:
            return None
        if kept.until <= now:
            self._drop(key)
            return None
        self._results.move_to_end(key)
        return kept.output

    def keep(self, key: SameKey, output: Output, now: float, age_s: float = 0.0) -> None:
        """Keep a result that came `age_s` ago, in place of an older one, unless it would take all the room."""
        size = ENTRY_BYTES + len(output.value) + (len(key) if isinstance(key, bytes) else sum(map(len, key)))
        self._drop(key)
        if size > self._bytes_max or age_s >= self._ttl_s:
            return
        while self.bytes + size > self._bytes_max:
            self._drop(next(iter(self._results)))
        if self._facts.model_version != output.call.model_version:
            self._facts = CallFacts(0, 0.0, output.call.model_version, cached=True)
        # A slice would keep the answer to its whole batch.
        kept = Output(bytes(output.value), self._facts, output.tokens_used)
        self._results[key] = KeptResult(kept, now + self._ttl_s - age_s, size)
        self.bytes += size

    def _drop(self, key: SameKey) -> None:
        if (kept := self._results.pop(key, None)) is not None:
            self.bytes -= kept.size


def exact_key(request: Request) -> SameKey:
    """What is the same for requests that have the same result, inside a process."""
    return (request.model, request.parameters, request.lane, "", request.input)


def exact_key_of_owner(request: Request) -> SameKey:
    """The same for requests of one owner."""
    return (request.model, request.parameters, request.lane, request.owner, request.input)


def digest_key(request: Request) -> SameKey:
    """What is the same for requests that have the same result, in any process."""
    return digest_of(request, "")


def digest_key_of_owner(request: Request) -> SameKey:
    """The same for requests of one owner."""
    return digest_of(request, request.owner)


def digest_of(request: Request, owner: str) -> bytes:
    """What makes a request what it is, in 32 bytes."""
    parameters, lane = request.parameters, request.lane
    make = _remembered if len(parameters) + len(lane) <= BEGINNING_BYTES_MAX else _beginning
    digest = blake2b(make(request.model, parameters, lane, owner), digest_size=32)
    digest.update(request.input)
    return digest.digest()


def _beginning(model: str, parameters: bytes, lane: bytes, owner: str) -> bytes:
    parts = (model.encode(), parameters, lane, owner.encode())
    return b"%d,%d,%d,%d;" % tuple(map(len, parts)) + b"".join(parts)


_remembered = lru_cache(64)(_beginning)  # most requests have the same
