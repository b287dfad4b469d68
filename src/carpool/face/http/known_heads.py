"""Request heads seen before need not be parsed again.

A client sends the same head with every request on its connection, but for the value of Content-Length. Parsing it
anew takes a dozen calls from C into Python, a third of what the face spends on a request. So the result of a parse is
kept, by the bytes of the head without that value. It is used only where the parser could not come to another result:

1. A whole request in one read, at a message boundary: head, and exactly Content-Length bytes of body.
2. Same bytes, same result: the head equals, byte for byte, a head that the parser accepted before, but for the digits
   on the line that starts with `Content-Length: `. A head with two such lines was never accepted.
3. Only these are kept: keep-alive, no Transfer-Encoding, no Expect, no Upgrade, no `traceparent`. A
   traced head would not come again, and many of them would push out those that do.
4. A head that was found is remembered whole, with the size of its request: same size and same head, so the same
   Content-Length, and the right one. So the next request of that size is known by one comparison on the same
   connection, and by one look-up where the clients behind a connection take turns.

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
_NOT_KEPT = (b"transfer-encoding", b"expect", b"upgrade", b"traceparent")
# Headers by which a request may ask for another treatment, or another answer, than most.
_SPECIAL = (
    b"cache-control",
    b"connection",
    b"content-encoding",
    b"prefer",
    b"x-request-id",
    b"x-request-timeout-ms",
)


def is_of_page(headers: dict[bytes, bytes]) -> bool:
    """Whether a page in a browser may have sent the request: browsers add one of these two headers."""
    return b"origin" in headers or b"sec-fetch-site" in headers


def is_plain(method: bytes, headers: dict[bytes, bytes]) -> bool:
    """Whether a head asks for nothing special: JSON is sent, and an ordinary response is wanted."""
    media = headers.get(b"content-type")
    is_json = media == b"application/json" or (media is None and not is_of_page(headers))
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
    # The head asks for nothing special.
    is_plain: bool
    # Rule 4: the whole head, by the size of a request with it.
    whole: dict[int, bytes]

    def fits(self, head: bytes, size: int) -> bool:
        """Whether a request of this size that begins with `head`, up to the first empty line, is a whole one."""
        before, after = self.before, self.after
        if not head.startswith(before) or not head.endswith(after):
            return False
        if not after:
            return len(head) == len(before) == size
        digits = head[len(before) : -len(after)]
        return len(digits) <= LENGTH_DIGITS_MAX and digits.isdigit() and size - len(head) == int(digits)


# Matches nothing.
NO_HEAD = KnownHead(b"", b"", {}, b"", b"", False, {})


class KnownHeads:
    """The heads seen lately, over all connections of a server."""

    __slots__ = ("_body_bytes_max", "_kept", "_whole")

    def __init__(self, body_bytes_max: int) -> None:
        self._body_bytes_max = body_bytes_max
        self._kept: dict[bytes, KnownHead] = {}
        # Rule 4: what is known of a whole head, and the size of its request; also of heads that are not kept any more.
        self._whole: dict[bytes, tuple[KnownHead, int]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def match(self, data: bytes, likely: KnownHead = NO_HEAD) -> tuple[KnownHead, bytes]:
        """The known head that these bytes begin with, and all of it, if they are one whole request; else `likely`, b"".

        `likely` is the one before it on the same connection.
        """
        size = len(data)
        head = data[: data.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX) + 4]
        whole = self._whole.get(head)
        if whole is not None and whole[1] == size:
            return whole[0], head
        known = likely if likely.fits(head, size) else self._find(head, size)
        if known is None or size - len(head) > self._body_bytes_max:
            return likely, b""
        if len(self._whole) >= WHOLE_MAX:
            for forgotten, _ in self._whole.values():
                forgotten.whole.clear()
            self._whole.clear()
        self._whole[head] = known, size
        known.whole[size] = head
        return known, head

    def _find(self, head: bytes, size: int) -> KnownHead | None:
        key, line = head, max(head.find(start) for start in _LENGTH_LINES)
        if line >= 0:
            digits_at = line + _LENGTH_LINE_BYTES
            key = head[:digits_at] + head[head.find(b"\r", digits_at) :]
        known = self._kept.get(key)
        return known if known is not None and known.fits(head, size) else None

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
