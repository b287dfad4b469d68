"""U1 over Redis: each of two batchers has a sick endpoint and one that is well. No request fails."""

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from support.checker import Checker, Verdict
from support.redis_fleet import Clients, fleet_over
from support.redis_servers import running_redis
from support.upstreams import ScriptedUpstream, scripted_upstream

WELL_S = 0.1
# A request has time for another attempt, also on a busy machine.
PATIENT: dict[str, object] = {"broker.queue_timeout_s": 20.0, "broker.total_timeout_s": 40.0}


class SickUpstream(ScriptedUpstream):
    """An endpoint that is well until it is told to fail a share of its calls, at once."""

    def __init__(self) -> None:
        super().__init__()
        self.latency_s = WELL_S
        self.fault = ""
        self.share = 0.0
        self.failed = 0

    def fall_sick(self, fault: str, share: float) -> None:
        """Fail so many calls from now on."""
        self.fault, self.share, self.latency_s = fault, share, 0.005

    async def answer(self, inputs: list[str], writer: asyncio.StreamWriter) -> None:
        is_failing = random.random() < self.share
        self.failed += is_failing
        self.behaviour = self.fault if is_failing else "good"
        await super().answer(inputs, writer)


class Seen(NamedTuple):
    """What became of the requests, and of the calls."""

    verdict: Verdict
    statuses: Counter[int]
    # Problems of tasks and requests, by their text.
    problems: Counter[str]
    # Calls of the sick endpoints that failed, and calls in all.
    failed: int
    calls: int


async def one_of_two_is_sick(directory: Path, fault: str, share: float, seconds: float) -> Seen:
    """Two batchers with two endpoints each; one of each falls sick under load."""
    checker = Checker("U1-redis")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_redis(directory / "redis"))
        fleet = await stack.enter_async_context(fleet_over(directory, server.url, PATIENT))
        sick = [SickUpstream() for _ in range(2)]
        well = [SickUpstream() for _ in range(2)]
        for upstream in (*sick, *well):
            await stack.enter_async_context(scripted_upstream(upstream))
        for pair in zip(sick, well, strict=True):
            await fleet.add("batcher", *(part for upstream in pair for part in ("--upstream", upstream.url)))
        await fleet.add("gateway")
        await fleet.wait_until_ready()
        clients = await stack.enter_async_context(Clients(checker, fleet.ports))
        clients.start(asks_per_s=60, tasks_per_s=20)
        await asyncio.sleep(0.2 * seconds)
        for upstream in sick:
            upstream.fall_sick(fault, share)
        await asyncio.sleep(0.8 * seconds)
        await clients.stop()
        statuses = Counter(answer.status for answer in clients.answers)
        every = (*sick, *well)
        seen = [text for upstream in every for text in upstream.seen]
        failed, calls = sum(each.failed for each in sick), sum(each.calls for each in every)
        return Seen(checker.verdict(seen), statuses, clients.problems, failed, calls)


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("fault", ["status 500", "status 503", "reset"])
async def test_a_sick_endpoint_at_each_of_two_batchers_fails_nobody(tmp_path: Path, fault: str, share: float) -> None:
    seen = await one_of_two_is_sick(tmp_path, fault, share, seconds=10)
    passed = seen.verdict.is_clean and seen.statuses.keys() == {200} and not seen.problems and seen.failed > 0
    what = (
        f"over Redis, one of two: {fault} for {share:.0%} of its calls: {dict(seen.statuses)}, {dict(seen.problems)}, "
        f"{seen.failed} of {seen.calls} calls failed"
    )
    seen.verdict.report("U1", what, passed=passed)
    assert passed
