"""A closed loop: so many clients, each of which sends again as soon as it has its answer. That shows saturation.

    python3 bench/gpu/clients.py http://127.0.0.1:8000/v1/inference --clients 1024 --seconds 10
    python3 bench/gpu/clients.py http://127.0.0.1:9000/infer --clients 2 --batch 64 --sort-among 1024

`carpool bench` is an open loop: above the capacity its latencies are those of its own backlog. Here as many wait as
there are clients. With `--batch` a client sends whole batches, to the server itself: as they come, or sorted by size
out of so many texts, or those of `--replay`, which are lists of sizes as the server's `/batches` tells them. Every
answer is verified: a text is answered reversed. One process; the report is JSON on standard output.
"""

import argparse
import asyncio
import json
import secrets
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from random import Random
from time import perf_counter, process_time
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import msgspec
import uvloop

from carpool.tools.bench.generator import BadResponse, read_head
from carpool.tools.bench.tally import LogHistogram

HEAD_END = b"\r\n\r\n"
# Text after the nonce: no neighbours are alike, so that no other part of it passes for the right one.
FILLER = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789" * 133
NONCE_DIGITS = 18
# An answer that takes longer ends the run.
ANSWER_S_MAX = 30.0


def sizes_of(spec: str, random: Random) -> Iterator[int]:
    """Endless sizes in bytes: `2000`, or `lognormal:MEDIAN,SIGMA,MAX` as `carpool bench --sizes` has them."""
    kind, colon, rest = spec.partition(":")
    if not colon:
        while True:
            yield int(spec)
    if kind != "lognormal":
        raise SystemExit(f"{spec}: sizes are a number, or lognormal:MEDIAN,SIGMA,MAX")
    median, sigma, most = map(float, rest.split(","))
    while True:
        yield min(int(median * random.lognormvariate(0.0, sigma)), int(most))


def batches_of(sizes: Iterator[int], batch: int, sort_among: int) -> Iterator[list[int]]:
    """Sizes by `batch`: as they come, or sorted out of so many at a time, the batches in the order of a coin."""
    random = Random(1)
    while True:
        pool = [next(sizes) for _ in range(max(batch, sort_among))]
        if sort_among:
            pool.sort()
        found = [pool[start : start + batch] for start in range(0, len(pool), batch)]
        random.shuffle(found)
        yield from found


class Target(NamedTuple):
    """Where calls go, and whether a call is a batch or one text."""

    host: str
    ports: list[int]
    path: str
    is_batch: bool


class Load:
    """What the clients share: what to send next, until when, and what became of it."""

    def __init__(self, target: Target, batches: Iterator[list[int]]) -> None:
        self.target, self._batches = target, batches
        self._run, self._number = secrets.token_hex(5), 0
        self.ends_at = 0.0
        self.latency, self.statuses = LogHistogram(), dict[str, int]()
        # Answers until `ends_at` make the rate; `last` is when the last one of all came.
        self.inputs = self.calls = self.wrong = 0
        self.last = 0.0
        self.running, self.done = 0, asyncio.Event()

    def next_call(self) -> tuple[list[str], bytes]:
        """Texts that nobody sent before, and the request that carries them."""
        texts = []
        for size in next(self._batches):
            self._number += 1
            texts.append(f"{self._run}{self._number:08x}{FILLER[: max(size - NONCE_DIGITS, 0)]}")
        body = msgspec.json.encode({"inputs": texts} if self.target.is_batch else {"input": texts[0]})
        head = f"POST {self.target.path} HTTP/1.1\r\nHost: {self.target.host}\r\nContent-Type: application/json\r\n"
        return texts, b"%bContent-Length: %d\r\n\r\n%b" % (head.encode(), len(body), body)

    def count(self, texts: list[str], status: int, body: bytes, began: float) -> None:
        now = self.last = perf_counter()
        self.statuses[str(status)] = self.statuses.get(str(status), 0) + 1
        if status != 200:
            return
        answer = msgspec.json.decode(body)
        outputs = answer["outputs"] if self.target.is_batch else [answer["output"]]
        self.wrong += outputs != [text[::-1] for text in texts]
        if now <= self.ends_at:
            self.calls += 1
            self.inputs += len(texts)
            self.latency.add((now - began) * 1000)


class Client(asyncio.Protocol):
    """One connection, one call at a time."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._received = bytearray()
        # Made before it is needed: the server must not wait for its client.
        self._next = load.next_call()
        load.running += 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self) -> None:
        self._began = perf_counter()
        if self._began >= self._load.ends_at:
            self._transport.close()
            return
        self._texts, request = self._next
        self._transport.write(request)
        self._next = self._load.next_call()

    def data_received(self, data: bytes) -> None:
        self._received += data
        start = self._received.find(HEAD_END) + len(HEAD_END)
        if start < len(HEAD_END):
            return
        try:
            status, length, _ = read_head(bytes(self._received[: start - len(HEAD_END)]))
        except BadResponse as fault:
            raise SystemExit(f"not an answer: {fault}") from None
        if len(self._received) >= start + length:
            body = bytes(self._received[start:])
            self._received.clear()
            self._load.count(self._texts, status, body, self._began)
            self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None or perf_counter() < self._load.ends_at:
            self._load.statuses["lost"] = self._load.statuses.get("lost", 0) + 1
        self._load.running -= 1
        if not self._load.running:
            self._load.done.set()


async def drive(target: Target, batches: Iterator[list[int]], clients: int, seconds: float) -> dict[str, object]:
    """The report."""
    load = Load(target, batches)
    loop = asyncio.get_running_loop()
    ports = cycle(target.ports)
    opened = [(await loop.create_connection(lambda: Client(load), "127.0.0.1", next(ports)))[1] for _ in range(clients)]
    began, cpu_before_s = perf_counter(), process_time()
    load.ends_at = began + seconds
    for client in opened:
        client.send()
    async with asyncio.timeout(seconds + ANSWER_S_MAX):
        await load.done.wait()
    errors = sum(count for status, count in load.statuses.items() if status != "200")
    return {
        **{"rate": round(load.inputs / seconds, 1), "calls": load.calls, "wrong": load.wrong, "errors": errors},
        **{"status": load.statuses, "elapsed_s": round(load.last - began, 3)},
        "generator_busy": round((process_time() - cpu_before_s) / (perf_counter() - began), 3),
        "latency_ms": msgspec.to_builtins(load.latency.quantiles()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="with a range of ports, clients take turns: http://127.0.0.1:9000-9001/infer")
    parser.add_argument("--clients", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--sizes", default="lognormal:240,0.875,2048")
    parser.add_argument("--batch", type=int, default=0, help="texts in a call; 0: one, as Carpool's clients have it")
    parser.add_argument("--sort-among", type=int, default=0)
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    host, _, ports = urlsplit(options.url).netloc.partition(":")
    first, _, last = ports.partition("-")
    target = Target(
        host, list(range(int(first), int(last or first) + 1)), urlsplit(options.url).path, options.batch > 0
    )
    if options.replay:
        batches: Iterator[list[int]] = cycle(json.loads(options.replay.read_bytes()))
    else:
        sizes = sizes_of(options.sizes, Random(options.seed))
        batches = batches_of(sizes, max(options.batch, 1), options.sort_among)
    print(json.dumps(uvloop.run(drive(target, batches, options.clients, options.seconds))))


if __name__ == "__main__":
    main()
