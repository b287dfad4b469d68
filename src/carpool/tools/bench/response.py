"""The head of an HTTP/1.x response, as much of it as a load generator needs. Pure."""

from functools import lru_cache

HEAD_BYTES_MAX = 65_536
HEAD_END = b"\r\n\r\n"
# What a refused client waits where the answer has no Retry-After.
RETRY_AFTER_S = 1.0


class BadResponse(Exception):
    """The bytes are not a response this reader takes; `kind` is what it is counted under."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


# Most heads of a run are the same but for a few lengths; reading each anew took an eighth of the time.
@lru_cache(maxsize=512)
def read_head(head: bytes) -> tuple[int, int, bool]:
    """Status, body length and whether the connection stays, from a head without its blank line."""
    status_line, *lines = head.split(b"\r\n")
    version, _, rest = status_line.partition(b" ")
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or not rest[:3].isdigit():
        raise BadResponse("malformed")
    headers = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip().lower()
    if b"transfer-encoding" in headers:
        raise BadResponse("chunked")
    status = int(rest[:3])
    # Without a length a body would last until the connection closes; no gateway of ours answers so.
    length = headers.get(b"content-length", b"0" if status in (204, 304) else b"")
    if status < 200 or not length.isdigit():
        raise BadResponse("malformed")
    options = headers.get(b"connection", b"")
    stays = b"keep-alive" in options if version == b"HTTP/1.0" else b"close" not in options
    return status, int(length), stays


@lru_cache(maxsize=512)
def retry_after_s(head: bytes) -> float:
    """Seconds after which a refused client should ask again, from the head of its answer."""
    for line in head.lower().split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"retry-after" and value.strip().isdigit():
            return float(value)
    return RETRY_AFTER_S
