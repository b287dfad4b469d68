"""R5: Redis stands still again and again for a moment, under load. What was on its way then may have lain in a socket
for longer than its client waits: none of it is sent after its deadline.
"""

import asyncio
import random
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from support.checker import Checker, Verdict
from support.client import Connection, ConnectionBrokenError, inference_body
from support.redis_fleet import ASYNC, fleet_over
from support.redis_servers import RedisServer, running_redis
from support.upstreams import ScriptedUpstream, scripted_upstream

STALL_S, BETWEEN_S = (0.3, 2.0), (0.3, 1.2)
OWN_MS = (300, 2500)
PER_S, TASKS_PER_S = 60, 15
LATENCY_S = 0.02
# So much later than the client's own clock the gateway's may begin, where everything shares two cores.
TOLERANCE_S = 0.1
SETTINGS = {"shedding.mode": "off", "broker.queue_timeout_s": 30, "broker.total_timeout_s": 30}


class Stalls(NamedTuple):
    """What was seen."""

    verdict: Verdict
    stalls: int
    statuses: Counter[int]
    # Inputs that reached the upstream, how many of them after their deadline, and how late the latest was.
    sent: int
    sent_late: int
    latest_s: float

    def __str__(self) -> str:
        return (
            f"{self.stalls} stalls of Redis of {STALL_S[0]:g} to {STALL_S[1]:g} s: {dict(self.statuses)}; "
            f"of {self.sent} that were sent {self.sent_late} after their deadline, the latest {self.latest_s:.2f} s"
        )


class NotingUpstream(ScriptedUpstream):
    """Knows when each input came: before it takes its time, which is longer where the machine is busy."""

    def __init__(self) -> None:
        super().__init__()
        self.sends: list[tuple[float, str]] = []

    async def answer(self, inputs: list[str], writer: asyncio.StreamWriter) -> None:
        self.sends += [(time.monotonic(), text) for text in inputs]
        await asyncio.sleep(LATENCY_S)
        await super().answer(inputs, writer)


class ImpatientLoad:
    """Clients at a fixed rate, each of which says how long it waits; some submit tasks that are over as soon."""

    def __init__(self, port: int, checker: Checker) -> None:
        self._port = port
        self._checker = checker
        self._idle: list[Connection] = []
        # By input: when it is over for its client.
        self.over_at: dict[str, float] = {}
        self.statuses: Counter[int] = Counter()
        self.is_over = False

    async def run(self, per_s: float, *, as_tasks: bool) -> None:
        async with asyncio.TaskGroup() as group:
            while not self.is_over:
                await asyncio.sleep(random.expovariate(per_s))
                group.create_task(self._ask(as_task=as_tasks))

    async def close(self) -> None:
        for connection in self._idle:
            await connection.close()

    async def _ask(self, *, as_task: bool) -> None:
        connection = self._idle.pop() if self._idle else await Connection.open(self._port)
        text, own_ms = self._checker.new_input(), random.randint(*OWN_MS)
        self.over_at[text] = time.monotonic() + own_ms / 1000
        if not as_task:
            self._checker.accepted(text)
        headers = f"X-Request-Timeout-Ms: {own_ms}\r\n" + (ASYNC if as_task else "")
        try:
            response = await connection.ask("POST", "/v1/inference", inference_body(text), headers)
        except ConnectionBrokenError:
            self._checker.broke_off(text)
            return
        self._idle.append(connection)
        self.statuses[response.status] += 1
        if as_task:
            return
        self._checker.answered(text, response)


async def stall(server: RedisServer, seconds: float) -> int:
    """Stop it and let it go on; returns how often."""
    over_at, number = time.monotonic() + seconds, 0
    while time.monotonic() < over_at:
        await asyncio.sleep(random.uniform(*BETWEEN_S))
        server.stop()
        await asyncio.sleep(random.uniform(*STALL_S))
        server.go_on()
        number += 1
    return number


async def redis_stalls(directory: Path, seconds: float) -> Stalls:
    """A gateway and a batcher over a Redis that stands still for moments."""
    checker = Checker("R5", {"": {503, 504}})
    upstream = NotingUpstream()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_redis(directory / "redis"))
        await stack.enter_async_context(scripted_upstream(upstream))
        fleet = await stack.enter_async_context(fleet_over(directory, server.url, SETTINGS))
        await fleet.add("gateway")
        # As many slots as keep a queue, so that what came late is not the first to be sent.
        await fleet.add("batcher", "--upstream", upstream.url, "--slots", "1", "--max-batch", "4")
        await fleet.wait_until_ready()
        load = ImpatientLoad(fleet.ports()[0], checker)
        coming = [
            asyncio.create_task(load.run(per_s, as_tasks=as_tasks))
            for per_s, as_tasks in ((PER_S, False), (TASKS_PER_S, True))
        ]
        number = await stall(server, seconds)
        load.is_over = True
        await asyncio.gather(*coming)
        await asyncio.sleep(OWN_MS[1] / 1000 + 1.0)
        await load.close()
    late_s = [came - load.over_at[text] for came, text in upstream.sends]
    late = [each for each in late_s if each > TOLERANCE_S]
    return Stalls(checker.verdict(), number, load.statuses, len(late_s), len(late), max(late_s))


SECONDS = 40.0


@pytest.mark.timeout(120)
async def test_nothing_is_sent_late_when_redis_stalls(tmp_path: Path) -> None:
    seen = await redis_stalls(tmp_path, SECONDS)
    passed = seen.verdict.is_clean and seen.sent_late == 0 and seen.statuses[200] > 0
    seen.verdict.report("R5", str(seen), passed=passed)
    assert passed
