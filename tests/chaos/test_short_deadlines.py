"""O6: three in ten clients give their requests 50 ms, and the upstream needs most of that for a call. None is sent
after its deadline, each is told in time, and the others do not notice.
"""

import asyncio
import time
from collections import Counter
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

from support.checker import Checker, Verdict
from support.client import Connection, ConnectionBrokenError, inference_body
from support.processes import running_gateway
from support.redis_fleet import WatchedUpstream, fleet_over
from support.redis_servers import running_redis
from support.upstreams import scripted_upstream

OWN_MS = 50
# So much later an answer may come, and so much later than the client's own clock the gateway's may begin.
TOLERANCE_MS = 20
HASTY = "hasty"
# Two slots, eight inputs a call of 40 ms: 400 a second.
LATENCY_S, SLOTS, MAX_BATCH = 0.04, 2, 8
PER_S = 330
WARM_UP_S = 1.0
FLAGS = ("--slots", str(SLOTS), "--max-batch", str(MAX_BATCH))
# Else the hasty are refused before they could be late.
SETTINGS = {"shedding.mode": "off"}


class Deadlines(NamedTuple):
    """What was seen."""

    verdict: Verdict
    # Statuses of those with a deadline of their own, and of the others.
    hasty: Counter[int]
    others: Counter[int]
    # Of the 504 to hasty ones: after how many ms 99 % of them had come.
    told_ms_p99: float
    # Inputs that reached the upstream later than their deadline and the tolerance.
    sent_late: int

    @property
    def passed(self) -> bool:
        return (
            self.verdict.is_clean
            and self.hasty.keys() <= {200, 504}
            and self.hasty[504] > 20
            and self.others[200] > 0.99 * self.others.total()
            and self.told_ms_p99 <= OWN_MS + TOLERANCE_MS
            and self.sent_late == 0
        )

    def __str__(self) -> str:
        return (
            f"30 % with {OWN_MS} ms: {dict(self.hasty)}, 504 after {self.told_ms_p99:.1f} ms (p99), sent late "
            f"{self.sent_late}; others {dict(self.others)}"
        )


class HastyLoad:
    """Clients at a fixed rate; three in ten say how long they wait."""

    def __init__(self, port: int, checker: Checker) -> None:
        self._port = port
        self._checker = checker
        self._idle: list[Connection] = []
        self.began: dict[str, float] = {}
        self.statuses: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
        self.told_ms: list[float] = []

    async def run(self, seconds: float) -> None:
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(int(PER_S * seconds)):
                await asyncio.sleep(started + number / PER_S - time.monotonic())
                group.create_task(self._ask(is_hasty=number % 10 < 3))
        for connection in self._idle:
            await connection.close()

    async def _ask(self, *, is_hasty: bool) -> None:
        connection = self._idle.pop() if self._idle else await Connection.open(self._port)
        text = self._checker.new_input() + (HASTY if is_hasty else "")
        self._checker.accepted(text)
        began = self.began[text] = time.monotonic()
        headers = f"X-Request-Timeout-Ms: {OWN_MS}\r\n" if is_hasty else ""
        try:
            response = await connection.ask("POST", "/v1/inference", inference_body(text), headers)
        except ConnectionBrokenError:
            self._checker.broke_off(text)
            return
        self._idle.append(connection)
        self.statuses[is_hasty][response.status] += 1
        if response.status == 200:
            self._checker.output(text, response.json["output"])
            return
        self._checker.failed(text, response.status)
        if is_hasty and response.status == 504:
            assert f"{OWN_MS} ms that the request itself allowed" in response.json["detail"]
            self.told_ms.append((time.monotonic() - began) * 1000)


async def _watch(port: int, upstream: WatchedUpstream, seconds: float) -> Deadlines:
    checker = Checker("O6", {HASTY: {504}})
    await HastyLoad(port, checker).run(WARM_UP_S)
    upstream.sends.clear()
    load = HastyLoad(port, checker)
    await load.run(seconds)
    latest_s = (OWN_MS + TOLERANCE_MS) / 1000
    late = [text for came, text in upstream.sends if HASTY in text and came - load.began[text] > latest_s]
    return Deadlines(
        checker.verdict(), load.statuses[True], load.statuses[False], quantiles(load.told_ms, n=100)[-1], len(late)
    )


async def embedded_deadlines(directory: Path, seconds: float) -> Deadlines:
    upstream = WatchedUpstream()
    upstream.latency_s = LATENCY_S
    async with (
        scripted_upstream(upstream),
        running_gateway(directory, upstream.url, *FLAGS, settings=SETTINGS) as gateway,
    ):
        return await _watch(gateway.port, upstream, seconds)


async def redis_deadlines(directory: Path, seconds: float) -> Deadlines:
    """A gateway and a batcher over Redis."""
    upstream = WatchedUpstream()
    upstream.latency_s = LATENCY_S
    async with (
        running_redis(directory / "redis") as server,
        scripted_upstream(upstream),
        fleet_over(directory, server.url, SETTINGS) as fleet,
    ):
        await fleet.add("gateway")
        await fleet.add("batcher", "--upstream", upstream.url, *FLAGS)
        await fleet.wait_until_ready()
        return await _watch(fleet.ports()[0], upstream, seconds)


async def test_short_deadlines_in_one_process(tmp_path: Path) -> None:
    seen = await embedded_deadlines(tmp_path, seconds=20)
    seen.verdict.report("O6", str(seen), passed=seen.passed)
    assert seen.passed


async def test_short_deadlines_over_redis(tmp_path: Path) -> None:
    seen = await redis_deadlines(tmp_path, seconds=20)
    seen.verdict.report("O6 over Redis", str(seen), passed=seen.passed)
    assert seen.passed
