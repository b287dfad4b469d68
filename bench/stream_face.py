"""Answers per second of the gateway's CPU time: `/v1/inference` beside a WebSocket, with the same inputs.

    python bench/stream_face.py [seconds]

And, without a gateway: what a message costs in each of two WebSocket libraries (`--libraries`).
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable

from websockets.frames import Frame
from websockets.protocol import CLIENT, OPEN, SERVER, Protocol

from measuring import CARPOOL, cpu_seconds, free_port, process

SIM = "sim:?latency_ms=20&slots=64"
TEXT = "x" * 2000
# In flight in all, in both cases; and requests in one message.
IN_FLIGHT = 512
STREAMS = 4
TOGETHER = 8
UPGRADE = (
    "GET /v1/stream HTTP/1.1\r\nHost: bench\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


async def over_http(port: int, until: float) -> int:
    """One connection, request after request; how many were answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    body = json.dumps({"input": TEXT}).encode()
    request = b"POST /v1/inference HTTP/1.1\r\nHost: bench\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    answered = 0
    while time.monotonic() < until:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        await reader.readexactly(int(head.rpartition(b"Content-Length: ")[2]))
        answered += 1
    writer.close()
    return answered


async def over_stream(port: int, until: float, in_flight: int, together: int) -> int:
    """One stream with so many in flight; how many were answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(UPGRADE.encode())
    await reader.readuntil(b"\r\n\r\n")
    protocol = Protocol(CLIENT, state=OPEN, max_size=None)
    free, answered, next_id = in_flight, 0, 0
    while time.monotonic() < until:
        while free >= together:
            calls = [{"id": next_id + n, "input": TEXT} for n in range(together)]
            next_id, free = next_id + together, free - together
            protocol.send_text(json.dumps(calls).encode())
        writer.write(b"".join(protocol.data_to_send()))
        protocol.receive_data(await reader.read(1 << 18))
        for frame in protocol.events_received():
            assert isinstance(frame, Frame)
            answers = json.loads(bytes(frame.data))
            assert all("output" in answer for answer in answers), answers
            free, answered = free + len(answers), answered + len(answers)
    writer.close()
    return answered


def measure(name: str, seconds: float, clients: Callable[[int, float], list[Awaitable[int]]]) -> float:
    """Answers per CPU second of a fresh gateway."""
    port = free_port()
    command = [*CARPOOL, "serve", "--upstream", SIM, "--no-journal", "--port", str(port), "--log-level", "error"]
    with process(command, port) as gateway:

        async def load(during_s: float) -> int:
            return sum(await asyncio.gather(*clients(port, time.monotonic() + during_s)))

        asyncio.run(load(1.0))
        began = cpu_seconds(gateway.pid)
        answered = asyncio.run(load(seconds))
        rate = answered / (cpu_seconds(gateway.pid) - began)
    print(f"{name:45} {rate:10,.0f} answers per CPU second ({answered:,} answers)")
    return rate


def libraries() -> None:
    """What receiving a message of 2 KB, and sending one, takes."""
    from wsproto.connection import Connection, ConnectionType
    from wsproto.events import TextMessage

    message = json.dumps([{"id": 1, "input": TEXT}])
    client = Protocol(CLIENT, state=OPEN)
    client.send_text(message.encode())
    frame = b"".join(client.data_to_send())
    number = 20_000

    def with_websockets() -> None:
        server = Protocol(SERVER, state=OPEN)
        for _ in range(number):
            server.receive_data(frame)
            for each in server.events_received():
                assert isinstance(each, Frame)
                server.send_text(each.data)
            b"".join(server.data_to_send())

    def with_wsproto() -> None:
        server = Connection(ConnectionType.SERVER)
        for _ in range(number):
            server.receive_data(frame)
            for each in server.events():
                assert isinstance(each, TextMessage)
                each.data.encode()  # the JSON is read from bytes
                server.send(TextMessage(each.data))

    for name, run in (("websockets", with_websockets), ("wsproto", with_wsproto)) * 3:
        began = time.process_time()
        run()
        print(f"{name:12} {(time.process_time() - began) / number * 1e6:6.1f} us for a message in and one out")


def streams(together: int) -> Callable[[int, float], list[Awaitable[int]]]:
    """All of them, with so many requests in a message."""
    return lambda port, end: [over_stream(port, end, IN_FLIGHT // STREAMS, together) for _ in range(STREAMS)]


def main(seconds: float) -> None:
    http = measure(
        f"/v1/inference, {IN_FLIGHT} connections",
        seconds,
        lambda port, end: [over_http(port, end) for _ in range(IN_FLIGHT)],
    )
    for together in (1, TOGETHER):
        rate = measure(f"/v1/stream, {STREAMS} streams, {together} to a message", seconds, streams(together))
        print(f"{'':45} {rate / http:10.2f} x /v1/inference")


if __name__ == "__main__":
    if "--libraries" in sys.argv:
        libraries()
    else:
        main(float(sys.argv[1]) if len(sys.argv) > 1 else 5.0)
