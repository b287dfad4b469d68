"""The head of an HTTP/1.x response, as much of it as a load generator needs. Pure."""

HEAD_BYTES_MAX = 65_536
HEAD_END = b"\r\n\r\n"


class BadResponse(Exception):
    """The bytes are not a response this reader takes; `kind` is what it is counted under."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def read_head(data: bytes, end: int) -> tuple[int, int, bool]:
    """Status, body length and whether the connection stays, from a head whose blank line begins at `end`."""
    head = data[:end].lower()
    if not head.startswith((b"http/1.1 ", b"http/1.0 ")):
        raise BadResponse("malformed")
    try:
        status = int(head[9:12])
        length_at = head.find(b"\r\ncontent-length:")
        if length_at < 0:
            return status, _length_untold(head, status), _stays(head)
        line_end = head.find(b"\r\n", length_at + 2)
        length = int(head[length_at + 17 : line_end if line_end > 0 else end])
    except ValueError:
        raise BadResponse("malformed") from None
    if status < 200 or length < 0:
        raise BadResponse("malformed")
    return status, length, _stays(head)


def _length_untold(head: bytes, status: int) -> int:
    if b"\r\ntransfer-encoding:" in head:
        raise BadResponse("chunked")
    if status in (204, 304):
        return 0
    raise BadResponse("malformed")


def _stays(head: bytes) -> bool:
    if head.startswith(b"http/1.0"):
        return b"\r\nconnection: keep-alive" in head
    return b"\r\nconnection: close" not in head
