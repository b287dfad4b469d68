"""The WebSocket beside `/v1/inference` and gRPC's `Predict`, in CPU of the gateway per answer.

    .venv/bin/python bench/run.py --only stream
    .venv/bin/python bench/stream_face.py load PORT TOGETHER SECONDS     (requests in a message; 0: over HTTP)
    .venv/bin/python bench/stream_face.py libraries                      (a message, in each of two WebSocket libraries)

512 are in flight in any case, with so few slots that batches are full: what a batch costs is not the face's.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from websockets.frames import Frame
from websockets.protocol import CLIENT, OPEN, SERVER, Protocol

import grpc_face
from measuring import CARPOOL, HERE, ROOT, beside_kept, console, cpu_seconds, free_port, process, show, verdict

TEXT = "x" * 2000
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


def stream_face(quick: bool) -> None:
    seconds, rounds = (3, 1) if quick else (8, 5)
    port, grpc_port = free_port(), free_port()
    own = [sys.executable, str(Path(__file__)), "load", str(port)]
    predict = [sys.executable, str(HERE / "grpc_face.py"), "load", str(grpc_port), grpc_face.PREDICT, "unary"]
    loads = {"http": [*own, "0"], "alone": [*own, "1"], "stream": [*own, str(TOGETHER)], "predict": predict}
    cost: dict[str, list[float]] = {name: [] for name in loads}
    with tempfile.TemporaryDirectory() as data:
        command = [*CARPOOL, "serve", "--upstream", grpc_face.SIMULATED, "--port", str(port)]
        command += ["--grpc-port", str(grpc_port), "--data-dir", data]
        with process(command, grpc_port) as gateway:
            for number in range(rounds):
                console.print(f"WebSocket, round {number + 1} of {rounds} ...")
                for name, load in loads.items():
                    before = cpu_seconds(gateway.pid)
                    done = subprocess.run(
                        [*load, str(seconds)], cwd=ROOT, check=True, capture_output=True, timeout=seconds + 60
                    )
                    cost[name].append((cpu_seconds(gateway.pid) - before) / max(int(done.stdout), 1) * 1e6)
    times = {name: median(other / own for other, own in zip(cost[name], cost["stream"], strict=True)) for name in cost}
    figures = {name: f"{median(each):.1f} us" for name, each in cost.items()}
    rows = [
        verdict(
            "the WebSocket, times Predict",
            f"{times['predict']:.2f} ({figures['stream']} of CPU an answer, {figures['predict']})",
            ">= 1.5",
            times["predict"] >= 1.5,
        ),
        ("times /v1/inference", f"{times['http']:.2f} ({figures['http']})", "", ""),
        ("times one request to a message", f"{times['alone']:.2f} ({figures['alone']})", "", ""),
        beside_kept("WebSocket, times Predict", times["predict"], more_is_better=True),
    ]
    title = f"WebSocket, 2 KB, {grpc_face.SIMULATED}, {STREAMS} streams, {TOGETHER} requests to a message"
    show(f"{title}; medians of {rounds}", rows)


async def load(port: int, together: int, seconds: float) -> int:
    until = time.monotonic() + seconds
    if together:
        clients = [over_stream(port, until, IN_FLIGHT // STREAMS, together) for _ in range(STREAMS)]
    else:
        clients = [over_http(port, until) for _ in range(IN_FLIGHT)]
    return sum(await asyncio.gather(*clients))


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


if __name__ == "__main__":
    if sys.argv[1] == "libraries":
        libraries()
    else:
        import uvloop

        print(uvloop.run(load(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))))
