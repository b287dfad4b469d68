"""U1 (reduced), U2, U3: whatever the fixed API does, nobody gets another's output, everybody gets an answer in time,
and the next good call succeeds.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from support.checker import Checker
from support.client import Connection, ConnectionBrokenError, ask_once, inference_body
from support.processes import GatewayProcess, running_gateway
from support.redis_servers import free_port
from support.upstreams import MIB, WRONG_BODIES, ScriptedUpstream, scripted_upstream

TOTAL_TIMEOUT_S = 20.0
# A call that fails is given up sooner than by default, so that a test of twenty faults takes seconds; the request has
# the time for all of its attempts, also on a busy machine.
QUICK = {
    "upstream.timeout_s": 2.0,
    "carpool.service.BACKOFF_S": 0.01,
    # What each fault does by itself is looked at here; resilience.py looks at what the breaker makes of many.
    "carpool.service.BREAKER_FAILURES": 1000,
    "broker.queue_timeout_s": 15.0,
    "broker.total_timeout_s": TOTAL_TIMEOUT_S,
}
# For one batch, by default.
ATTEMPTS = 4
# Beyond the deadline, for the way back on a busy machine.
SLACK_S = 10.0
# One attempt reads up to 64 MiB; an answer of 100 MB, read whole and joined, would be 190 MiB.
GROWTH_BYTES_MAX = (64 + 32) * MIB

FAULTS_OF_THE_PROTOCOL = tuple(WRONG_BODIES)
FAILED_ATTEMPTS = ("reset", "reset in the body", "close", "not HTTP", "endless headers")
OVERSIZE = ("100 MB", "100 MB in chunks", "gzip bomb", "gzip bomb as a transfer coding")
REFUSALS = ("redirect", "status 400", "status 500")
NO_END = ("trickle", "hang")

# What is promised where the endpoint is down, and where it answers nonsense or not at all.
ENDPOINT_DOWN = {"": {502}}
BAD_ANSWERS = {"": {422, 502, 504}}


class Clients:
    """Synchronous clients of one gateway."""

    def __init__(self, gateway: GatewayProcess, upstream: ScriptedUpstream, checker: Checker) -> None:
        self.gateway = gateway
        self.upstream = upstream
        self.checker = checker

    async def ask(self) -> int:
        """One request on a connection of its own; its status."""
        text = self.checker.new_input()
        self.checker.accepted(text, within_s=TOTAL_TIMEOUT_S + SLACK_S)
        try:
            response = await ask_once(self.gateway.port, "POST", "/v1/inference", inference_body(text))
        except ConnectionBrokenError:
            self.checker.broke_off(text)
            return 0
        if response.status != 200:
            self.checker.failed(text, response.status)
        elif response.json["output"] is None and self.upstream.behaviour in ("null element", "any"):
            self.checker.left(text)  # null is an output, and no nonce
        else:
            self.checker.output(text, response.json["output"])
        return response.status

    async def ask_many(self, count: int) -> Counter[int]:
        """Requests at the same moment, so that they share batches; how often each status came."""
        return Counter(await asyncio.gather(*(self.ask() for _ in range(count))))

    async def statuses_when(self, behaviour: str, count: int) -> Counter[int]:
        """The statuses while the upstream misbehaves; afterwards a good call must succeed."""
        self.upstream.behaviour = behaviour
        statuses = await self.ask_many(count)
        self.upstream.behaviour = "good"
        after = await self.ask_many(count)
        assert after == {200: count}, f"after {behaviour!r} good calls give {after}"
        return statuses


@asynccontextmanager
async def bad_upstream(directory: Path, name: str) -> AsyncIterator[Clients]:
    """A gateway in front of a scripted upstream with two slots."""
    async with (
        scripted_upstream() as upstream,
        running_gateway(directory, upstream.url, "--slots", "2", settings=QUICK) as gateway,
    ):
        yield Clients(gateway, upstream, Checker(name, BAD_ANSWERS))


async def null_elements(clients: Clients, count: int) -> Counter[str]:
    """Every batch is answered with null for its last member: that is its output, and the others have theirs."""
    clients.upstream.behaviour = "null element"
    calls_before = clients.upstream.calls
    statuses = await clients.ask_many(count)
    assert statuses == {200: count}
    nulls = clients.checker.tally["left"]
    assert nulls == clients.upstream.calls - calls_before
    clients.upstream.behaviour = "good"
    return clients.checker.tally


async def any_fault_under_load(clients: Clients, seconds: float) -> None:
    """Each call is answered well, wrongly, or not at all, by chance."""
    clients.upstream.behaviour = "any"
    stop_at = time.monotonic() + seconds

    async def ask_on() -> None:
        while time.monotonic() < stop_at:
            assert await clients.ask() in (200, 422, 502, 504)  # 422: alone in a call that was refused

    await asyncio.gather(*(ask_on() for _ in range(32)))
    clients.upstream.behaviour = "good"
    assert await clients.ask_many(32) == {200: 32}


async def huge_answers(clients: Clients) -> tuple[int, int]:
    """Answers of 100 MB and bombs; returns resident bytes before, and the most while they came."""
    await clients.ask()
    before = most = clients.gateway.resident_bytes()
    for behaviour in OVERSIZE:
        running = asyncio.ensure_future(clients.statuses_when(behaviour, 1))
        while not running.done():
            most = max(most, clients.gateway.resident_bytes())
            await asyncio.sleep(0.01)
        statuses = await running
        assert statuses.keys() <= {502, 504}, (behaviour, statuses)
    return before, most


async def endpoint_down(directory: Path, checker: Checker) -> tuple[Counter[int], Counter[int], float]:
    """Nobody listens, then somebody does; returns both statuses and the seconds that the failure took."""
    port = free_port()
    async with running_gateway(directory, f"http://127.0.0.1:{port}/infer", settings=QUICK) as gateway:
        ready = await ask_once(gateway.admin_port, "GET", "/internal/ready")
        assert ready.status == 503
        upstream = ScriptedUpstream()
        clients = Clients(gateway, upstream, checker)
        started = time.monotonic()
        refused = await clients.ask_many(8)
        seconds = time.monotonic() - started
        async with scripted_upstream(upstream, port):
            assert (await ask_once(gateway.admin_port, "GET", "/internal/ready")).status == 200
            return refused, await clients.ask_many(8), seconds


async def attempts_of_one_request(clients: Clients, behaviour: str) -> tuple[int, int, float]:
    """One request alone while every call fails: its status, how often it was sent, and its seconds."""
    clients.upstream.behaviour = behaviour
    calls_before, started = clients.upstream.calls, time.monotonic()
    status = await clients.ask()
    clients.upstream.behaviour = "good"
    return status, clients.upstream.calls - calls_before, time.monotonic() - started


async def pipelined_neighbours(clients: Clients) -> list[int]:
    """Requests of one connection, of which the upstream fails some batches: each answer is its own."""
    connection = await Connection.open(clients.gateway.port)
    texts = [clients.checker.new_input() for _ in range(16)]
    clients.upstream.behaviour = "any"
    for text in texts:
        clients.checker.accepted(text)
        connection.send("POST", "/v1/inference", inference_body(text))
    statuses = []
    for text in texts:
        response = await connection.read()
        statuses.append(response.status)
        if response.status != 200:
            clients.checker.failed(text, response.status)
        elif response.json["output"] is None:
            clients.checker.left(text)
        else:
            clients.checker.output(text, response.json["output"])
    clients.upstream.behaviour = "good"
    await connection.close()
    return statuses
