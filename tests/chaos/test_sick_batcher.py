"""U11: over Redis each batcher has one endpoint, and one of them falls sick. The others carry its work."""

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
import redis.asyncio

from carpool.broker.redis.keys import Keys
from support.checker import Checker, Verdict
from support.redis_fleet import Clients, fleet_over
from support.redis_servers import running_redis
from support.upstreams import ScriptedUpstream, scripted_upstream

OWNERS = ("192.0.2.1", "192.0.2.2", "192.0.2.3")
# An endpoint takes 64 inputs every 0.1 s, and 70 come in a second: far below 30 % of what one endpoint carries.
CALL_S = 0.1
ASKS_PER_S, TASKS_PER_S = 50, 20
WARM_S, AFTER_S = 2.0, 6.0
# The same for an endpoint that is as slow to fail as it is to answer: 60 % of what one endpoint carries.
SLOW_CALL_S = 0.2
SLOW_ASKS_PER_S, SLOW_TASKS_PER_S = 154, 38
# By then the endpoint that was sick must have answered a call again.
BACK_S = 5.0


class Seen(NamedTuple):
    """What became of the requests."""

    verdict: Verdict
    statuses: Counter[int]
    # Problems of tasks and requests, by their text.
    problems: Counter[str]
    tasks: int
    letters: int
    # Seconds until the endpoint that was sick answered a call again; None if it did not.
    back_s: float | None
    # How many inputs were sent more than this often.
    sends_max: int

    @property
    def failed(self) -> int:
        """Requests and tasks without an output."""
        return sum(self.problems.values())

    @property
    def share_failed(self) -> float:
        return self.failed / max(1, sum(self.statuses.values()) + self.tasks)


class Endpoint(ScriptedUpstream):
    """One endpoint that may fall sick, and says when it answered."""

    def __init__(self, call_s: float = CALL_S) -> None:
        super().__init__()
        self.latency_s = call_s
        self.answered_at: list[float] = []

    async def answer(self, inputs: list[str], writer: asyncio.StreamWriter) -> None:
        """Answer one call as the script says."""
        await super().answer(inputs, writer)
        if self.behaviour == "good":
            self.answered_at.append(time.monotonic())


async def one_batcher_is_sick(
    directory: Path,
    fault: str,
    *,
    owners: int,
    sick_s: float,
    well: int = 1,
    joins: bool = False,
    is_slow: bool = False,
) -> Seen:
    """`well` batchers whose endpoints are well beside one whose endpoint fails every call for `sick_s`.

    With `joins` that one starts sick while the others are at work. A fault "refused" closes the endpoint's port.
    `is_slow`: a call that fails takes as long as one that is answered, and more comes in.
    """
    call_s, asks_per_s, tasks_per_s = CALL_S, ASKS_PER_S, TASKS_PER_S
    if is_slow:
        call_s, asks_per_s, tasks_per_s = SLOW_CALL_S, SLOW_ASKS_PER_S, SLOW_TASKS_PER_S
    checker = Checker("U11")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_redis(directory / "redis"))
        settings: dict[str, object] = {"gateway.trusted_proxies": "127.0.0.1"}
        fleet = await stack.enter_async_context(fleet_over(directory, server.url, settings))
        sick = Endpoint(call_s)
        listening = await stack.enter_async_context(AsyncExitStack())
        await listening.enter_async_context(scripted_upstream(sick))
        url, port = sick.url, sick.server.port
        others = [Endpoint(call_s) for _ in range(well)]
        for endpoint in others:
            await stack.enter_async_context(scripted_upstream(endpoint))
            await fleet.add("batcher", "--upstream", endpoint.url)
        if not joins:
            await fleet.add("batcher", "--upstream", url)
        await fleet.add("gateway")
        await fleet.wait_until_ready()
        clients = await stack.enter_async_context(Clients(checker, fleet.ports, owners=OWNERS[:owners]))
        clients.start(asks_per_s=asks_per_s, tasks_per_s=tasks_per_s)
        await asyncio.sleep(WARM_S)
        if fault == "refused":
            await listening.aclose()
        else:
            sick.behaviour, sick.latency_s = fault, call_s if is_slow else 0.005
        if joins:
            await fleet.add("batcher", "--upstream", url)
        await asyncio.sleep(sick_s)
        well_at = time.monotonic()
        sick.behaviour, sick.latency_s = "good", call_s
        if fault == "refused":
            await listening.enter_async_context(scripted_upstream(sick, port))
        await asyncio.sleep(AFTER_S)
        await clients.stop()
        endpoints = (sick, *others)
        sends = Counter(text for endpoint in endpoints for text in endpoint.seen)
        back = [at - well_at for at in sick.answered_at if at > well_at]
        return Seen(
            checker.verdict(sends.elements()),
            Counter(answer.status for answer in clients.answers),
            clients.problems,
            len(clients.accepted),
            await letters_in(server.url),
            min(back, default=None),
            max(sends.values(), default=0),
        )


async def letters_in(url: str) -> int:
    """How many dead letters Redis has."""
    async with redis.asyncio.from_url(url) as client:
        return sum([int(await client.zcard(shard.letters)) for shard in Keys("carpool", 16).shards])


FAULTS = ["status 500", "status 429", "status 503", "reset", "refused", "hang"]
SICK_S = 12.0
FAILED_SHARE_MAX = 0.002


def judge(seen: Seen, what: str) -> bool:
    """Print the row's line; whether the row holds."""
    refused = [text for text in seen.problems if text.startswith("422")]
    is_back = seen.back_s is not None and seen.back_s <= BACK_S
    passed = (
        seen.verdict.is_clean and seen.share_failed <= FAILED_SHARE_MAX and not refused and not seen.letters and is_back
    )
    back = "never" if seen.back_s is None else f"{seen.back_s:.1f} s"
    seen.verdict.report(
        "U11",
        f"{what}: {seen.failed} failed ({seen.share_failed:.2%}), {dict(seen.statuses)}, {seen.tasks} tasks, "
        f"{dict(seen.problems)}, {seen.letters} dead letters, sent {seen.sends_max} times at most, back after {back}",
        passed=passed,
    )
    return passed


@pytest.mark.parametrize("owners", [1, 3])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_batcher_whose_endpoint_is_sick_leaves_its_work_to_another(
    tmp_path: Path, fault: str, owners: int
) -> None:
    seen = await one_batcher_is_sick(tmp_path, fault, owners=owners, sick_s=SICK_S)
    assert judge(seen, f"one of two batchers, {fault}, {owners} owners")


@pytest.mark.parametrize("owners", [1, 3])
async def test_one_that_is_slow_to_fail_leaves_its_work_to_another(tmp_path: Path, owners: int) -> None:
    seen = await one_batcher_is_sick(tmp_path, "status 500", owners=owners, sick_s=SICK_S, is_slow=True)
    assert judge(seen, f"one of two batchers, status 500 after a call's time at 60 % load, {owners} owners")


@pytest.mark.parametrize("fault", ["status 500", "status 429"])
async def test_a_sick_batcher_that_joins_fails_nobody(tmp_path: Path, fault: str) -> None:
    seen = await one_batcher_is_sick(tmp_path, fault, owners=1, sick_s=SICK_S, well=3, joins=True)
    assert judge(seen, f"a sick batcher joins three, {fault}")
