"""O5: owners and their rate limits over several gateways: one at ten times its limit, one at 99 %.

Each owner is an address of this machine, and sends through all gateways in turn.
"""

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import uvloop

from support.checker import Checker, Verdict
from support.client import Connection, inference_body
from support.rates import most_in_a_minute
from support.redis_fleet import Fleet
from support.redis_servers import running_redis

JSON = "Content-Type: application/json\r\n"
GREEDY, STEADY = "127.0.0.2", "127.0.0.3"
# A request must have its answer within this.
ANSWER_S_MAX = 10.0


class Seen(NamedTuple):
    """What became of the two owners."""

    verdict: Verdict
    greedy: Counter[int]
    # The most of the greedy one's requests that came in within any 60 s.
    greedy_most: int
    steady: Counter[int]
    # Refusals without the headers that they owe, or with a Retry-After that is not one.
    unclear: int
    # Times that a gateway asked Redis about an owner.
    asks: int
    errors: list[str]


class Owner:
    """A client with an address of its own, and a connection to each gateway."""

    def __init__(self, source: str, ports: list[int], checker: Checker) -> None:
        self._source = source
        self._ports = ports
        self._checker = checker
        self._idle: list[list[Connection]] = [[] for _ in ports]
        self._running: set[asyncio.Task[None]] = set()
        self.statuses: Counter[int] = Counter()
        self.came_in: list[float] = []
        self.unclear = 0

    async def send_at(self, per_s: float, seconds: float) -> None:
        """Open loop, at an even pace: what is late is not made up for."""
        began = due = time.monotonic()
        number = 0
        while (now := time.monotonic()) < began + seconds:
            if now < due:
                await asyncio.sleep(due - now)
                continue
            task = asyncio.get_running_loop().create_task(self._ask(number % len(self._ports)))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            number += 1
            due = max(due, now) + 1 / per_s
        await asyncio.gather(*self._running)

    async def close(self) -> None:
        for connection in (each for idle in self._idle for each in idle):
            await connection.close()

    async def _ask(self, gateway: int) -> None:
        idle = self._idle[gateway]
        if idle:
            connection = idle.pop()
        else:
            opened = await asyncio.open_connection("127.0.0.1", self._ports[gateway], local_addr=(self._source, 0))
            connection = Connection(*opened)
        text = self._checker.new_input()
        self._checker.accepted(text, within_s=ANSWER_S_MAX)
        answer = await connection.ask("POST", "/v1/inference", inference_body(text), JSON)
        self.statuses[answer.status] += 1
        if answer.status == 200:
            self._checker.output(text, answer.json["output"])
            self.came_in.append(time.monotonic())
        else:
            self._checker.failed(text, answer.status)
        is_clear = "ratelimit" in answer.headers and "ratelimit-policy" in answer.headers
        if answer.status == 429:
            is_clear &= int(answer.headers.get("retry-after", "0")) >= 1
        self.unclear += not is_clear
        idle.append(connection)


async def owners_over_gateways(directory: Path, gateways: int, per_minute: int, burst: int, seconds: float) -> Seen:
    """Ten times the limit, and beside it 99 % of the limit."""
    settings: dict[str, object] = {
        "limits.anonymous": per_minute,
        "limits.burst": burst,
        "shedding.mode": "off",
        # Ten processes on a few cores: what Redis does in time is not asked here.
        "broker.redis_timeout_ms": 5000,
        "broker.queue_timeout_s": 10,
        "broker.total_timeout_s": 10,
    }
    async with running_redis(directory / "redis") as server:
        fleet = Fleet(directory, server.url, settings)
        try:
            await fleet.add("batcher", "--upstream", "sim:?latency_ms=5&slots=64")
            for _ in range(gateways):
                await fleet.add("gateway")
            await fleet.wait_until_ready()
            checker = Checker("o5", {"": {429}})
            greedy, steady = (Owner(source, fleet.ports(), checker) for source in (GREEDY, STEADY))
            limit_per_s = per_minute / 60
            await asyncio.gather(greedy.send_at(10 * limit_per_s, seconds), steady.send_at(0.99 * limit_per_s, seconds))
            asks = [await place.process.metric("carpool_rate_limit_asks_total") for place in fleet.gateways]
            errors = fleet.errors()
            for owner in (greedy, steady):
                await owner.close()
        finally:
            fleet.end()
    return Seen(
        verdict=checker.verdict(),
        greedy=greedy.statuses,
        greedy_most=most_in_a_minute(greedy.came_in),
        steady=steady.statuses,
        unclear=greedy.unclear + steady.unclear,
        asks=round(sum(asks)),
        errors=errors,
    )


SECONDS = 60.0


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("gateways", "per_minute", "burst"), [(2, 1000, 100), (8, 60, 10)])
def test_one_budget_over_gateways(tmp_path: Path, gateways: int, per_minute: int, burst: int) -> None:
    seen = uvloop.run(owners_over_gateways(tmp_path, gateways, per_minute, burst, SECONDS))
    most = per_minute * 1.10 + burst
    passed = (
        seen.verdict.is_clean
        and seen.greedy.keys() == {200, 429}
        # What is its own it gets; of the burst, too.
        and 0.95 * per_minute <= seen.greedy_most <= most
        and seen.steady.keys() == {200}
        and seen.unclear == 0
        and not seen.errors
    )
    what = (
        f"{gateways} gateways, {per_minute} a minute, burst {burst}: ten times the limit {dict(seen.greedy)}, at most "
        f"{seen.greedy_most} in 60 s (bound {most:g}); 99 % of it {dict(seen.steady)}; Redis asked {seen.asks} times"
    )
    seen.verdict.report("O5", what, passed=passed)
    assert passed
