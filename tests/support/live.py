"""A viewer of `/internal/live`."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from typing import Any

from support.processes import PATIENCE_S


class Viewer:
    """Reads events one by one."""

    def __init__(self, response: HTTPResponse) -> None:
        self.response = response

    def line(self) -> bytes:
        """The next line of the stream."""
        return self.response.readline()

    def next(self) -> dict[str, Any]:
        while True:
            line = self.line()
            assert line, "the stream ended"
            if line.startswith(b"data: "):
                event: dict[str, Any] = json.loads(line[6:])
                return event

    def until(self, condition: Any) -> dict[str, Any]:
        """The next event with this; the stream's own timeout is the end of patience."""
        for _ in range(round(PATIENCE_S)):
            if condition(event := self.next()):
                return event
        raise AssertionError("no such event came")


@contextmanager
def viewing(admin_port: int, **headers: str) -> Iterator[Viewer]:
    """Look at a process until the block ends."""
    connection = HTTPConnection("127.0.0.1", admin_port, timeout=PATIENCE_S)
    try:
        connection.request("GET", "/internal/live", headers=headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        yield Viewer(response)
    finally:
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
