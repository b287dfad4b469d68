"""Request heads seen before need not be parsed again.

A client sends the same head with every request on its connection, but for the value of Content-Length. Parsing it
anew takes a dozen calls from C into Python, a third of what the face spends on a request. So the result of a parse is
kept, by the bytes of the head without that value. It is used only where the parser could not come to another result:

1. A whole request in one read, at a message boundary: head, and exactly Content-Length bytes of body.
2. Same bytes, same result: the head equals, byte for byte, one that the parser accepted before, but for the digits
   on the line that starts with `Content-Length: `. A head with two such lines was never accepted.
3. Only these are kept: keep-alive, no Transfer-Encoding, no Expect, no Upgrade.
4. A head that was found is remembered whole, by the size of its request. So the next request of that size is known by
   one comparison: same size and same head, so the same Content-Length, and the right one.

`tests/property/test_known_heads.py` feeds the same bytes with and without this and compares everything that comes out.
"""

import msgspec

# Longer heads are parsed each time; so the memory is bounded by about 8 MiB.
HEAD_BYTES_MAX = 1024
KEPT_MAX = 4096
# Rule 4: whole heads, all together.
WHOLE_MAX = 4096

# A body with a longer length comes in several reads anyway, and int() of many digits is slow.
LENGTH_DIGITS_MAX = 7

_LENGTH_LINES = (b"\r\nContent-Length: ", b"\r\ncontent-length: ")
_LENGTH_LINE_BYTES = len(_LENGTH_LINES[0])
_NOT_KEPT = (b"transfer-encoding", b"expect", b"upgrade")
# Headers by which a request may ask for another treatment, or another answer, than most.
_SPECIAL = (
    b"cache-control",
    b"connection",
    b"content-encoding",
    b"prefer",
    b"x-request-id",
    b"x-request-timeout-ms",
)


def is_plain(method: bytes, headers: dict[bytes, bytes]) -> bool:
    """Whether a head asks for nothing special: JSON is sent, and an ordinary response is wanted."""
    is_json = headers.get(b"content-type", b"application/json") == b"application/json"
    return is_json and method != b"HEAD" and not any(name in headers for name in _SPECIAL)


class KnownHead(msgspec.Struct, frozen=True, gc=False):
    """What the parser made of a head."""

    method: bytes
    target: bytes
    # Shared by every exchange with this head: never changed. Without Content-Length, which differs.
    headers: dict[bytes, bytes]
    # The bytes of the head before and after the value of Content-Length; all of it, and b"", for one without.
    before: bytes
    after: bytes
    # It asks for nothing special.
    is_plain: bool
    # Rule 4: the whole head, by the size of a request with it.
    whole: dict[int, bytes]

    def body_at(self, data: bytes) -> int:
        """Where the body begins, if these bytes are one whole request with this head; else 0."""
        before, after = self.before, self.after
        if not before or not data.startswith(before):
            return 0
        start = len(before)
        if not after:
            return start if len(data) == start else 0
        end = data.find(after, start, start + LENGTH_DIGITS_MAX + len(after))
        digits = data[start:end]
        if end < 0 or not digits.isdigit():
            return 0
        end += len(after)
        return end if len(data) - end == int(digits) else 0


# Matches nothing.
NO_HEAD = KnownHead(b"", b"", {}, b"", b"", False, {})


class KnownHeads:
    """The heads seen lately, over all connections of a server."""

    __slots__ = ("_body_bytes_max", "_kept", "_whole")

    def __init__(self, body_bytes_max: int) -> None:
        self._body_bytes_max = body_bytes_max
        self._kept: dict[bytes, KnownHead] = {}
        # Where heads are remembered whole, as often as there are such heads: also those that are not kept any more.
        self._whole: list[dict[int, bytes]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def match(self, data: bytes, likely: KnownHead = NO_HEAD) -> tuple[KnownHead, bytes]:
        """The known head that these bytes begin with, and all of it, if they are one whole request; else `likely`, b"".

        `likely` is tried first: looking for another one takes three times as long.
        """
        known, body_at = likely, likely.body_at(data)
        if not body_at:
            known, body_at = self._find(data) or (likely, 0)
        if not body_at or len(data) - body_at > self._body_bytes_max:
            return likely, b""
        if len(self._whole) >= WHOLE_MAX:
            for whole in self._whole:
                whole.clear()
            self._whole.clear()
        self._whole.append(known.whole)
        head = known.whole[len(data)] = data[:body_at]
        return known, head

    def _find(self, data: bytes) -> tuple[KnownHead, int] | None:
        end = data.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX) + 4
        line = data.find(_LENGTH_LINES[0], 0, end)
        if line < 0:
            line = data.find(_LENGTH_LINES[1], 0, end)
        if line < 0:
            known = self._kept.get(data[:end])
            return (known, end) if known is not None and len(data) == end else None
        digits_at = line + _LENGTH_LINE_BYTES
        digits_end = data.find(b"\r", digits_at)
        known = self._kept.get(data[:digits_at] + data[digits_end:end])
        if known is None:
            return None
        body_at = known.body_at(data)
        return (known, body_at) if body_at else None

    def keep(self, data: bytes, method: bytes, target: bytes, headers: dict[bytes, bytes]) -> None:
        """Remember the head of a request that the parser accepted, keep-alive, and that was all of `data`."""
        end = data.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX) + 4
        length = headers.get(b"content-length", b"0")
        # `end` is 3 for a head that is too long, and a first line that is empty would not be the head's.
        if end < 5 or len(data) - end != int(length) or any(name in headers for name in _NOT_KEPT):
            return
        key, before, after = data[:end], data[:end], b""
        if b"content-length" in headers:
            line = max(key.find(start) for start in _LENGTH_LINES)
            if line < 0:
                return  # spelled in another way
            digits_at = line + _LENGTH_LINE_BYTES
            digits_end = key.find(b"\r", digits_at)
            if key[digits_at:digits_end] != length:
                return
            before, after = key[:digits_at], key[digits_end:]
            key = before + after
        if len(self._kept) >= KEPT_MAX:
            self._kept.clear()
        headers = {name: value for name, value in headers.items() if name != b"content-length"}
        self._kept[key] = KnownHead(method, target, headers, before, after, is_plain(method, headers), {})
