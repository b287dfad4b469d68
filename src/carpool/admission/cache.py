"""Results that are kept for a while, and what makes two requests the same. Pure.

1. Two requests are the same if model, canonical parameters, what the protocol adds to the lane, and the input's bytes
   are; with `scope = "owner"` the owner too.
2. Inside a process the key is all of that itself: nothing could be more exact, and Python's hash of it takes a sixth of
   the time of a SHA-256. Between processes it is the SHA-256, over all of them with their lengths: nobody can write one
   that reads as another.
3. A result is kept for `ttl_s`, counted from when it came. Only outputs are kept, never errors.
4. What is kept is bounded in bytes, with its key and what Python needs for it. The one that was unused for longest goes
   first.
"""

from collections import OrderedDict
from hashlib import sha256

import msgspec

from carpool.core.outcome import CallFacts, Output
from carpool.core.ports import SameKey
from carpool.core.request import Request

# What Python needs for an entry beside the bytes of key and output: objects, and their places in the dictionary.
ENTRY_BYTES = 400


class Kept(msgspec.Struct, frozen=True, gc=False):
    """A result."""

    value: bytes
    tokens_used: int | None
    model_version: str | None
    # When it is too old, and what it counts for.
    until: float
    size: int


class ResultCache:
    """The results of one process (core.ports.Results)."""

    def __init__(self, *, bytes_max: int, ttl_s: float) -> None:
        self._bytes_max = bytes_max
        self._ttl_s = ttl_s
        # By key, the one that was used last at the end. A plain dict would look for its first entry among those that
        # were removed.
        self._kept: OrderedDict[SameKey, Kept] = OrderedDict()
        # The facts of results that no call brought: the same object for many.
        self._facts = CallFacts(0, 0.0, None, cached=True)
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        return f"<ResultCache entries={len(self._kept)} bytes={self.bytes}>"

    def find(self, key: SameKey, now: float) -> Output | None:
        """The result under this key, if there is one that is not too old."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        if kept.until <= now:
            del self._kept[key]
            self.bytes -= kept.size
            return None
        self._kept.move_to_end(key)
        if self._facts.model_version != kept.model_version:
            self._facts = CallFacts(0, 0.0, kept.model_version, cached=True)
        return Output(kept.value, self._facts, kept.tokens_used)

    def keep(self, key: SameKey, output: Output, now: float, age_s: float = 0.0) -> None:
        """Keep a result that came `age_s` ago, in place of an older one; not one that would take all the room."""
        value = bytes(output.value)  # a slice would keep the answer to its whole batch
        size = len(value) + ENTRY_BYTES + (len(key) if isinstance(key, bytes) else sum(map(len, key)))
        if size > self._bytes_max or age_s >= self._ttl_s:
            return
        kept = self._kept
        if key in kept:
            self.bytes -= kept.pop(key).size
        kept[key] = Kept(value, output.tokens_used, output.call.model_version, now + self._ttl_s - age_s, size)
        self.bytes += size
        while self.bytes > self._bytes_max:
            self.bytes -= kept.popitem(last=False)[1].size


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
    """The SHA-256 of what makes a request what it is."""
    parts = (request.model.encode(), request.parameters, request.lane, owner.encode())
    return sha256(b"%d,%d,%d,%d;" % tuple(map(len, parts)) + b"".join(parts) + request.input).digest()
