"""A client of HTTP/2 frames on a plain socket, for what no gRPC client would send."""

import socket
import struct
import time

from support.processes import PATIENCE_S

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
_INITIAL_WINDOW_SIZE = 4


class Http2Peer:
    """One connection with one call, on stream 1."""

    def __init__(self, port: int, window: int = 65535) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        self._unread = b""
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self.frame(SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, window))

    def __enter__(self) -> "Http2Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """Send one frame; whoever has closed the connection does not get it."""
        try:
            self.socket.sendall(
                struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload
            )
        except OSError:
            pass

    def call(self, path: str, *metadata: tuple[str, str]) -> None:
        """Begin a call."""
        headers = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
        headers += [("content-type", "application/grpc"), ("te", "trailers"), *metadata]
        self.frame(HEADERS, END_HEADERS, 1, b"".join(literal(name) + text(value) for name, value in headers))

    def data(self, data: bytes, *, ends: bool) -> None:
        """A part of a message."""
        self.frame(DATA, END_STREAM if ends else 0, 1, data)

    def message(self, message: bytes) -> None:
        """A whole message, and no more."""
        self.data(b"\x00" + struct.pack(">I", len(message)) + message, ends=True)

    def open_window(self, size: int) -> None:
        """Read so much more of the answer."""
        self.frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", size))

    def status(self) -> str:
        """The `grpc-status` of the call, from its trailers, which are not compressed much."""
        while True:
            kind, _, payload = self.next_frame()
            if kind == HEADERS and b"grpc-status" in payload:
                place = payload.index(b"grpc-status") + len(b"grpc-status")
                return payload[place + 1 : place + 1 + payload[place]].decode()

    def next_frame(self) -> tuple[int, int, bytes]:
        """Kind, flags and content of the next frame; settings and pings are answered."""
        while True:
            head = self._take(9)
            length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
            payload = self._take(length)
            if kind == SETTINGS and not flags & ACK:
                self.frame(SETTINGS, ACK, 0, b"")
            elif kind == PING and not flags & ACK:
                self.frame(PING, ACK, 0, payload)
            else:
                return kind, flags, payload

    def ended(self) -> bool:
        """Whether the other side ends the connection."""
        give_up_at = time.monotonic() + PATIENCE_S
        try:
            while time.monotonic() < give_up_at:
                self.next_frame()
        except (ConnectionError, EOFError):
            return True
        return False

    def _take(self, count: int) -> bytes:
        while len(self._unread) < count:
            received = self.socket.recv(65536)
            if not received:
                raise EOFError
            self._unread += received
        taken, self._unread = self._unread[:count], self._unread[count:]
        return taken


def literal(name: str) -> bytes:
    """HPACK: a header that is not to be indexed, up to its value."""
    return b"\x00" + text(name)


def text(value: str) -> bytes:
    """HPACK: a text as it is."""
    data = value.encode()
    if len(data) < 127:
        return bytes((len(data),)) + data
    rest, more = len(data) - 127, b"\x7f"
    while rest > 127:
        more += bytes((rest & 127 | 128,))
        rest >>= 7
    return more + bytes((rest,)) + data
