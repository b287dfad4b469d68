"""Microseconds of Python for one request, without sockets: what the gateway does between read and write.

    .venv/bin/python bench/hot_path.py [--profile]

Feeds requests to connections with a transport that throws its bytes away, and runs the batches through a simulated
GPU of no latency. Both halves are timed: receiving (bytes to queued request) and answering (answer to response bytes).
"""

import asyncio
import cProfile
import pstats
import sys
from time import process_time

import uvloop

from carpool.app import spare_the_collector
from carpool.embedded import EmbeddedProcess
from carpool.face.http.connection import Connection
from carpool.settings import load_settings

BODY = b'{"input":"' + b"x" * 2000 + b'","client_id":"c1"}'
REQUEST = (
    b"POST /v1/inference HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
)
CONNECTIONS, ROUNDS = 1280, 40


class NowhereTransport(asyncio.Transport):
    written = 0

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        pass

    def write(self, data: bytes | bytearray | memoryview) -> None:
        NowhereTransport.written += 1


async def main(profile: cProfile.Profile | None) -> None:
    process = EmbeddedProcess(
        load_settings(
            {
                "upstream.endpoints": ["sim:?latency_ms=0&slots=64"],
                "gateway.port": "0",
                "tasks.journal": False,
                "batching.policy": "fixed",
            },
            environ={},
            file=None,
        )
    )
    await process.start()
    spare_the_collector()
    connections = [Connection(process.faces.http.state) for _ in range(CONNECTIONS)]
    for connection in connections:
        connection.connection_made(NowhereTransport())
    receiving: list[float] = []
    answering: list[float] = []
    for _ in range(ROUNDS):
        NowhereTransport.written = 0
        if profile:
            profile.enable()
        started = process_time()
        for connection in connections:
            connection.data_received(REQUEST)
        received = process_time()
        while NowhereTransport.written < CONNECTIONS:  # noqa: ASYNC110 - every turn of the loop is timed
            await asyncio.sleep(0)
        answered = process_time()
        if profile:
            profile.disable()
        receiving.append((received - started) / CONNECTIONS * 1e6)
        answering.append((answered - received) / CONNECTIONS * 1e6)
    print(f"receiving {min(receiving):.2f} us, answering {min(answering):.2f} us a request (best of {ROUNDS} rounds)")
    for connection in connections:
        connection.connection_lost(None)
    await process.drain()


if __name__ == "__main__":
    profile = cProfile.Profile() if "--profile" in sys.argv else None
    uvloop.run(main(profile))
    if profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
