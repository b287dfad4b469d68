import pytest

from carpool.tools.bench.generator import RETRY_AFTER_S, BadResponse, read_head, retry_after_s


@pytest.mark.parametrize(
    ("head", "read"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 12", (200, 12, True)),
        (b"HTTP/1.1 503 Busy\r\nX: y\r\ncontent-length:7\r\nRetry-After: 1", (503, 7, True)),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0", (200, 0, False)),
        (b"HTTP/1.1 200 OK\r\nconnection:Close\r\nContent-Length: 0", (200, 0, False)),
        (b"HTTP/1.1 204 No Content", (204, 0, True)),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 3", (200, 3, False)),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\nConnection: Keep-Alive", (200, 3, True)),
        (b"HTTP/1.1 200\r\nContent-Length: 3", (200, 3, True)),
    ],
)
def test_a_head_tells_status_length_and_whether_to_stay(head: bytes, read: tuple[int, int, bool]) -> None:
    assert read_head(head) == read


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"", "malformed"),
        (b"HTTP/2 200 OK\r\nContent-Length: 1", "malformed"),
        (b"HTTP/1.1 abc\r\nContent-Length: 1", "malformed"),
        (b"HTTP/1.1 200 OK", "malformed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1", "malformed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1x", "malformed"),
        (b"HTTP/1.1 100 Continue\r\nContent-Length: 0", "malformed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", "chunked"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5", "chunked"),
    ],
)
def test_a_head_that_cannot_be_used_has_a_kind(head: bytes, kind: str) -> None:
    with pytest.raises(BadResponse) as caught:
        read_head(head)
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("line", "seconds"),
    [(b"Retry-After: 7", 7), (b"RETRY-AFTER:0", 0), (b"Retry-After: soon", RETRY_AFTER_S), (b"Age: 7", RETRY_AFTER_S)],
)
def test_when_to_ask_again(line: bytes, seconds: float) -> None:
    assert retry_after_s(b"HTTP/1.1 503 X\r\nContent-Length: 0\r\n" + line) == seconds
