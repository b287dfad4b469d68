"""F9, F10: batchers are killed while they have many innocent requests. Nobody is given up for that, and those who were
with a batcher that died keep nobody else from being served.
"""

import asyncio
import signal
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from carpool.broker.redis.keys import Keys
from support.checker import Checker, Verdict
from support.processes import until
from support.redis_fleet import Clients, fleet_over, held_by
from support.redis_servers import running_redis
from support.upstreams import scripted_upstream

CALL_S = 0.15
# Of 64 requests each: all tasks of F10 fit, also where not all batches are full.
SLOTS = ("--slots", "8")
# How the problem of a request begins that was with too many batchers that died.
GIVEN_UP = "502: given up:"
# Who waits for an answer and was with batchers that died may run out of time.
IN_TIME = {"": {504}}


class SteadyKills(NamedTuple):
    """What was seen while one of two batchers died every other moment."""

    verdict: Verdict
    checker: Checker
    # What synchronous requests were answered with.
    statuses: Counter[int]
    kills: int
    # The problems that say that a request was given up.
    given_up: int
    dead_letters: int
    errors: list[str]


async def batchers_die_in_turn(directory: Path, seconds: float, every_s: float) -> SteadyKills:
    """F9: of two batchers one is killed, then the other. Who was claimed from the first is soon with the second."""
    checker = Checker("F9", IN_TIME)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_redis(directory / "redis"))
        fleet = await stack.enter_async_context(fleet_over(directory, server.url))
        upstream = await stack.enter_async_context(scripted_upstream())
        upstream.latency_s = CALL_S
        for _ in range(2):
            await fleet.add("batcher", "--upstream", upstream.url, *SLOTS)
        await fleet.add("gateway")
        await fleet.wait_until_ready()
        clients = await stack.enter_async_context(Clients(checker, fleet.ports))
        clients.start(asks_per_s=60, tasks_per_s=60)
        kills, next_at, stop_at = 0, time.monotonic() + every_s, time.monotonic() + seconds
        while next_at <= stop_at:
            await asyncio.sleep(next_at - time.monotonic())
            next_at += every_s
            victim = fleet.batchers[kills % 2]
            victim.process.kill()
            kills += 1
            await victim.start()
        await clients.stop()
        await clients.read_again()
        given_up = sum(number for problem, number in clients.problems.items() if problem.startswith(GIVEN_UP))
        letters = await fleet.gateways[0].process.dead_letters()
        statuses = Counter(answer.status for answer in clients.answers)
        return SteadyKills(checker.verdict(upstream.seen), checker, statuses, kills, given_up, letters, fleet.errors())


class Aftermath(NamedTuple):
    """What was seen after two kills."""

    verdict: Verdict
    # Of the tasks that were in flight, and of those who came afterwards.
    tasks: Checker
    others: Checker
    # In the hands of the batcher that died first, and of the one that died next.
    held: list[int]
    # Seconds after the second kill: the last 504, and the last outcome of a task.
    last_504_s: float
    last_task_s: float
    dead_letters: int


async def many_in_flight_at_two_kills(directory: Path, tasks: int, seconds: float) -> Aftermath:
    """F10: a batcher dies with so many tasks in flight, the next one with those that it could claim; a third one is
    there already, for them and for ordinary requests.
    """
    in_flight, others, keys = Checker("F10-tasks"), Checker("F10-others", IN_TIME), Keys()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_redis(directory / "redis"))
        # Calls that hang until the kill are not given up before.
        fleet = await stack.enter_async_context(fleet_over(directory, server.url, {"upstream.timeout_s": 20}))
        upstream = await stack.enter_async_context(scripted_upstream())
        upstream.latency_s = CALL_S
        place = await fleet.add("batcher", "--upstream", upstream.url, *SLOTS)
        await fleet.add("gateway")
        await fleet.wait_until_ready()
        client = await stack.enter_async_context(server.client())
        submitters = await stack.enter_async_context(Clients(in_flight, fleet.ports))
        clients = await stack.enter_async_context(Clients(others, fleet.ports))

        # The batcher finds all tasks at once, and no call is answered before the second kill.
        upstream.gate.clear()
        place.process.process.send_signal(signal.SIGSTOP)
        for _ in range(tasks):  # one after the other: those of one moment would all be in one shard
            await submitters.submit(in_flight.new_input())
        place.process.process.send_signal(signal.SIGCONT)
        await until(lambda: len(upstream.seen) >= tasks)
        held = [len(await held_by(client, place.process.name, keys))]
        await place.replace()
        await until(lambda: len(upstream.seen) > tasks)
        held.append(len(await held_by(client, place.process.name, keys)))
        await place.replace()
        killed_at = time.monotonic()
        upstream.gate.set()
        waiting = asyncio.gather(*map(submitters.wait_for, submitters.inputs))
        clients.start(asks_per_s=10, tasks_per_s=0)
        await asyncio.sleep(seconds)
        await clients.stop()
        await waiting
        late = [answer.ended - killed_at for answer in clients.answers if answer.status == 504]
        letters = await fleet.gateways[0].process.dead_letters()
        told = max(submitters.ended.values()) - killed_at
        verdict = in_flight.verdict(upstream.seen)
        return Aftermath(verdict, in_flight, others, held, max(late, default=0.0), told, letters)


KILL_EVERY_S, SECONDS = 2.0, 60.0
IN_FLIGHT, LAST_504_S_MAX = 256, 3.0


@pytest.mark.timeout(240)
async def test_nobody_is_given_up_though_batchers_die_all_the_time(tmp_path: Path) -> None:
    seen = await batchers_die_in_turn(tmp_path, SECONDS, KILL_EVERY_S)
    passed = (
        seen.verdict.lost == seen.verdict.wrong == 0
        and seen.given_up == seen.dead_letters == 0
        and seen.kills >= 0.8 * SECONDS / KILL_EVERY_S  # on a busy machine the next batcher may be late
        and seen.checker.tally["ok"] > 0.9 * sum(seen.checker.tally.values())
        and seen.errors == []
    )
    what = (
        f"{seen.kills} x kill -9 of one of two batchers in {SECONDS:g} s: given up {seen.given_up}, dead letters "
        f"{seen.dead_letters}, synchronous ones {dict(seen.statuses)}, {dict(seen.checker.tally)}"
    )
    seen.verdict.report("F9", what, passed=passed)
    assert passed, seen.errors


async def test_those_in_flight_at_two_kills_hold_up_nobody(tmp_path: Path) -> None:
    seen = await many_in_flight_at_two_kills(tmp_path, IN_FLIGHT, seconds=20)
    passed = (
        seen.verdict.is_clean
        and seen.others.verdict().is_clean
        and seen.tasks.tally == {"ok": IN_FLIGHT}
        and seen.held[0] == IN_FLIGHT
        and seen.held[1] > 0
        and seen.last_504_s <= LAST_504_S_MAX
        and seen.others.tally.keys() <= {"ok", "504"}
        and seen.dead_letters == 0
    )
    what = (
        f"two kills with {seen.held} tasks in flight: their last outcome {seen.last_task_s:.2f} s after the second, "
        f"the last 504 of 10/s others {seen.last_504_s:.2f} s; tasks {dict(seen.tasks.tally)}, others "
        f"{dict(seen.others.tally)}, dead letters {seen.dead_letters}"
    )
    seen.verdict.report("F10", what, passed=passed)
    assert passed
