"""Clients that send two requests of 2 KB each, on a connection of their own, and wait. Ends when it is killed.

.venv/bin/python bench/waiting_clients.py PORT COUNT
"""

import asyncio
import resource
import sys

BODY = b'{"input":"' + b"x" * 2000 + b'"}'
REQUEST = (
    b"POST /v1/inference HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    % (len(BODY), BODY)
)
LIFETIME_S = 120


async def main(port: int, count: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    writers = []
    for _ in range(count // 2):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST + REQUEST)
        writers.append(writer)
    await asyncio.sleep(LIFETIME_S)


asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
