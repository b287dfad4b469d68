"""Whoever connects to a busy gateway is taken in at once, however many they are."""

import asyncio
import socket
from contextlib import ExitStack

import uvloop

from carpool.face.http.exchange import Exchange
from carpool.face.http.server import HttpServer
from carpool.face.http.state import HttpLimits
from support.processes import until

NEWCOMERS = 320


def answer(exchange: Exchange) -> None:
    exchange.respond(200, b"{}")


async def turns_for_newcomers() -> tuple[int, bytes]:
    """In how many turns of the event loop many who connected during one turn are taken in; and what the last gets."""
    server = HttpServer(answer, HttpLimits(accepted_a_turn=32))
    port = await server.start("127.0.0.1", 0)
    with ExitStack() as stack:
        for _ in range(NEWCOMERS):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        turns = 0
        while len(server.connections) < NEWCOMERS:
            turns += 1
            await asyncio.sleep(0)
        client.setblocking(False)
        async with asyncio.timeout(60):
            first = await asyncio.get_running_loop().sock_recv(client, 1024)
        server.drain()
        server.stop_listening()
    await until(lambda: len(server.connections) == 0)
    await server.finish(0.0)
    return turns, first


def test_many_are_taken_in_in_a_turn() -> None:
    turns, first = uvloop.run(turns_for_newcomers())
    assert turns <= NEWCOMERS / 4
    assert first.startswith(b"HTTP/1.1 200")
