"""Results that are kept for a while, and what makes two requests the same. Pure.

1. Two requests are the same if model, canonical parameters, what the protocol adds to the lane, and the input's bytes
   are; with `scope = "owner"` the owner too.
2. Inside a process the key is all of that itself: nothing could be more exact, and Python's hash of it takes a third of
   the time of a digest. Between processes it is a digest of 256 bits, over all of them with their lengths: no client
   can write one that reads as another. BLAKE2b, as it takes half of the time of a SHA-256 where the processor (or the
   virtual machine) has no instructions for that, and a microsecond more where it has.
3. A result is kept for `ttl_s`, counted from when it came. Only outputs are kept, never errors.
4. What is kept is bounded in bytes, with its key and what Python needs for it. Results that were unused for longest go
   first, a page at a time.

Inputs and outputs are written one behind the other into pages, and a page that is dropped is written anew: where no
input comes twice, a result costs two copies of its bytes. As objects of their own, thousands a second that live on cost
three times as much: each is memory that no cache of the processor has any more when it is freed.
"""

from collections import deque
from functools import lru_cache
from hashlib import blake2b
from io import SEEK_END, BytesIO

import msgspec

from carpool.core.outcome import CallFacts, Output
from carpool.core.ports import SameKey
from carpool.core.request import Request

# What Python needs for an entry beside the bytes of key and output: objects, and their places in the dictionary.
ENTRY_BYTES = 480
# A page is so large, but for small caches, which have this many; a result that is larger has one of its own.
PAGE_BYTES = 1024 * 1024
PAGES_MIN = 16
# The share of a page that may still be memory of an older page, beyond what is written.
LEFT_OVER_MAX = 1 / 8
# The part before the input in a digest is remembered if it is no longer than this: clients write it.
BEGINNING_BYTES_MAX = 1024


class CachePage:
    """Some results that came one after the other."""

    __slots__ = ("bytes", "data", "end", "numbers", "order")

    def __init__(self, order: int, data: BytesIO) -> None:
        self.order = order
        self.data = data
        # How much of it is written.
        self.end = 0
        # The hashes of the keys that were written here.
        self.numbers: list[int] = []
        # What they count for.
        self.bytes = 0


class KeptAt(msgspec.Struct, frozen=True, gc=False):
    """Where a result is."""

    page: CachePage
    # Where the input (or the digest) begins, and the output after it, and where that ends.
    start: int
    middle: int
    end: int
    # The rest of the key: model, parameters, lane, owner; or nothing.
    rest: tuple[str, bytes, bytes, str] | None
    tokens_used: int | None
    model_version: str | None
    # When it is too old.
    until: float


class ResultCache:
    """The results of one process (core.ports.Results)."""

    def __init__(self, *, bytes_max: int, ttl_s: float) -> None:
        self._bytes_max = bytes_max
        self._page_bytes = min(PAGE_BYTES, bytes_max // PAGES_MIN)
        self._ttl_s = ttl_s
        # By the hash of the key (core.ports.Results). Of two keys with the same hash the later one is kept.
        self.numbers: dict[int, KeptAt] = {}
        # In the order in which they were begun; the last one is written to.
        self._pages: deque[CachePage] = deque([CachePage(0, BytesIO())])
        # The memory of a page that was dropped.
        self._spare: BytesIO | None = None
        # The facts of results that no call brought: the same object for many.
        self._facts = CallFacts(0, 0.0, None, cached=True)
        self.bytes = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        return f"<ResultCache entries={len(self.numbers)} bytes={self.bytes}>"

    def find(self, key: SameKey, now: float) -> Output | None:
        """The result under this key, if there is one that is not too old."""
        number = hash(key)
        kept = self.numbers.get(number)
        if kept is None:
            return None
        if kept.until <= now:
            del self.numbers[number]
            return None
        data = kept.page.data
        rest, content = (None, key) if isinstance(key, bytes) else (key[:4], key[4])
        data.seek(kept.start)
        is_same = data.read(kept.middle - kept.start) == content and kept.rest == rest
        value = data.read(kept.end - kept.middle) if is_same else b""
        data.seek(kept.page.end)
        if not is_same:
            return None
        if self._facts.model_version != kept.model_version:
            self._facts = CallFacts(0, 0.0, kept.model_version, cached=True)
        output = Output(value, self._facts, kept.tokens_used)
        if 2 * (self._pages[-1].order - kept.page.order) > len(self._pages):  # it would go soon: write it anew
            self.keep(key, output, kept.until - self._ttl_s)
        return output

    def keep(self, key: SameKey, output: Output, now: float, age_s: float = 0.0) -> None:
        """Keep a result that came `age_s` ago, in place of an older one, unless it would take all the room."""
        value = output.value
        rest: tuple[str, bytes, bytes, str] | None
        if isinstance(key, bytes):
            rest, content, size = None, key, ENTRY_BYTES + len(key) + len(value)
        else:
            rest, content = key[:4], key[4]
            size = ENTRY_BYTES + len(content) + len(value) + len(key[0]) + len(key[1]) + len(key[2]) + len(key[3])
        if size > self._bytes_max or age_s >= self._ttl_s:
            self.numbers.pop(hash(key), None)
            return
        page = self._pages[-1]
        if page.bytes + size > self._page_bytes and page.bytes:
            page = self._begin_page()
        while self.bytes + size > self._bytes_max:  # the page that is written to is never among them
            self._drop(self._pages.popleft())
        start, data = page.end, page.data
        middle = start + data.write(content)
        end = page.end = middle + data.write(value)
        number = hash(key)
        until = now + self._ttl_s - age_s
        self.numbers[number] = KeptAt(
            page, start, middle, end, rest, output.tokens_used, output.call.model_version, until
        )
        page.numbers.append(number)
        page.bytes += size
        self.bytes += size

    def _begin_page(self) -> CachePage:
        last = self._pages[-1]
        if last.data.seek(0, SEEK_END) - last.end > self._page_bytes * LEFT_OVER_MAX:
            with last.data.getbuffer() as whole:
                last.data = BytesIO(whole[: last.end])
        data, self._spare = self._spare or BytesIO(), None
        page = CachePage(last.order + 1, data)
        self._pages.append(page)
        return page

    def _drop(self, page: CachePage) -> None:
        """Forget what is in a page and nowhere else."""
        kept = self.numbers
        for number in page.numbers:
            if (here := kept.get(number)) is not None and here.page is page:
                del kept[number]
        self.bytes -= page.bytes
        if page.bytes <= self._page_bytes:
            page.data.seek(0)
            self._spare = page.data


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
