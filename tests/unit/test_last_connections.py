"""The end of listening: who has connected is accepted, and who comes then is refused before it has sent anything."""

import errno
import select
import socket
from contextlib import closing

from carpool.face.http.server import close_after_the_last, drop_newcomers


def listening() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(16)
    return listener


def connecting(address: tuple[str, int]) -> socket.socket:
    client = socket.socket()
    client.settimeout(0.2)
    client.connect(address)
    return client


def test_who_comes_while_the_last_are_accepted_is_refused_and_not_reset() -> None:
    listener = listening()
    address = listener.getsockname()
    with closing(connecting(address)) as first:
        drop_newcomers(listener)
        with closing(socket.socket()) as second:
            second.setblocking(False)
            assert second.connect_ex(address) == errno.EINPROGRESS
            accepted = close_after_the_last(listener)
            assert [each.getpeername() for each in accepted] == [first.getsockname()]
            select.select([], [second], [], 10.0)  # the kernel asks again by itself after a second
            assert second.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED
        first.sendall(b"ping")
        (served,) = accepted
        with closing(served):
            served.settimeout(5.0)
            assert served.recv(4) == b"ping"
