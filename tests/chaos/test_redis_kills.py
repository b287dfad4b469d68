"""F1, F2, and inputs that kill: `kill -9` of batchers and gateways over Redis, at every phase of a request's life."""

import asyncio
import random
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from carpool.broker.redis.batcher.suspects import DELIVERIES_MAX
from carpool.broker.redis.keys import Keys
from support.checker import Checker, Verdict
from support.client import ask_once
from support.processes import until
from support.redis_fleet import LEASE_S, Clients, Place, WatchedUpstream, fleet_over, held_by
from support.redis_servers import RedisServer, running_redis
from support.upstreams import scripted_upstream

# `fixed` holds what was taken until it has company or waited 50 ms: long enough for a kill to find it.
BATCHING = ("--slots", "2", "--policy", "fixed")
PHASES = ("leased", "sent", "answered")
# So many batchers may be down at once, so that somebody is there to claim what they held.
DOWN_AT_ONCE = 2
KILLER = "KILLER"


class BatcherKills(NamedTuple):
    """What was seen while batchers died."""

    verdict: Verdict
    checker: Checker
    # How many kills found entries in each phase.
    phases: Counter[str]
    # Seconds from a kill until each entry that the dead batcher held was sent by another, and until it had its outcome.
    reclaimed_s: list[float]
    told_s: list[float]
    errors: list[str]


class BatcherKiller:
    """Kills batchers, one at a time each, and keeps account of what they held."""

    def __init__(self, server: RedisServer, kills: int) -> None:
        self._server = server
        self._left = kills
        self._down = asyncio.Semaphore(DOWN_AT_ONCE)
        self.phases: Counter[str] = Counter()
        # When the last batcher that held it died.
        self.orphaned: dict[str, float] = {}

    async def haunt(self, place: Place, upstream: WatchedUpstream) -> None:
        """Kill the batcher of one place again and again, until all kills are done."""
        while self._left > 0:
            self._left -= 1
            async with self._down:
                await self._kill(place, upstream, PHASES[self._left % len(PHASES)])
                await place.start()
                upstream.begin_anew()
            await asyncio.sleep(random.uniform(0.1, 0.3))

    async def _kill(self, place: Place, upstream: WatchedUpstream, aim: str) -> None:
        name = place.process.name
        if aim == "leased":
            await asyncio.sleep(random.uniform(0.0, 0.1))
        elif aim == "sent":
            await until(lambda: upstream.in_flight > 0)
        else:
            answered = asyncio.Event()
            upstream.when_answered = answered.set
            await answered.wait()
            await asyncio.sleep(random.choice((0.0, 0.0, 0.001, 0.002)))
            upstream.when_answered = lambda: None
        place.process.kill()
        killed_at = time.monotonic()
        sent, answers = upstream.sent(), set(upstream.answered)
        async with self._server.client() as client:
            held = await held_by(client, name, Keys())
        self.phases.update({phase_of(text, sent, answers) for text in held})
        for text in held:
            self.orphaned[text] = killed_at


def phase_of(text: str, sent: set[str], answered: set[str]) -> str:
    """How far an entry had come that was taken and not acknowledged."""
    return "answered" if text in answered else "sent" if text in sent else "leased"


async def batchers_die(directory: Path, kills: int) -> BatcherKills:
    """F1: requests and tasks flow, batchers are killed all the time and started again."""
    checker = Checker("F1")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_redis(directory / "redis"))
        fleet = await stack.enter_async_context(fleet_over(directory, server.url))
        upstreams = [await stack.enter_async_context(scripted_upstream(WatchedUpstream())) for _ in range(4)]
        places = []
        for upstream in upstreams:
            upstream.latency_s = 0.03
            places.append(await fleet.add("batcher", "--upstream", upstream.url, *BATCHING))
        await fleet.add("gateway")
        await fleet.wait_until_ready()
        clients = await stack.enter_async_context(Clients(checker, fleet.ports))
        clients.start(asks_per_s=60, tasks_per_s=60)
        killer = BatcherKiller(server, kills)
        watched = [upstream for upstream in upstreams if isinstance(upstream, WatchedUpstream)]
        await asyncio.gather(*map(killer.haunt, places, watched))
        await clients.stop()
        await clients.read_again()
        sends = [send for upstream in watched for send in upstream.sends]
        # What its client got before the kill, or what was acknowledged with its last breath, is not sent again.
        orphaned = killer.orphaned.items()
        sent_again = [
            min((at for at, text in sends if text == orphan and at > died), default=died) - died
            for orphan, died in orphaned
        ]
        told = [clients.ended[orphan] - died for orphan, died in orphaned if clients.ended.get(orphan, 0.0) > died]
        seen = [text for upstream in upstreams for text in upstream.seen]
        return BatcherKills(checker.verdict(seen), checker, killer.phases, sent_again, told, fleet.errors())


class GatewayKills(NamedTuple):
    """What was seen while gateways died."""

    verdict: Verdict
    checker: Checker
    # Statuses at the gateway that was never killed.
    statuses_at_the_other: set[int]
    tasks: int
    # Accepted by a gateway that was killed before the outcome was there.
    orphans: int
    errors: list[str]


async def gateways_die(directory: Path, kills: int) -> GatewayKills:
    """F2: two gateways are killed and started again, a third one stays; tasks outlive them all."""
    # A gateway that was just started may not have found Redis yet.
    checker = Checker("F2", {"": {503}})
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_redis(directory / "redis"))
        fleet = await stack.enter_async_context(fleet_over(directory, server.url))
        upstream = await stack.enter_async_context(scripted_upstream())
        upstream.latency_s = 0.05
        await fleet.add("batcher", "--upstream", upstream.url, "--slots", "2")
        staying = await fleet.add("gateway")
        victims = [await fleet.add("gateway") for _ in range(2)]
        await fleet.wait_until_ready()
        # At the victims most clients, and at the other one its own.
        doomed = await stack.enter_async_context(Clients(checker, lambda: [victim.port for victim in victims]))
        doomed.may_break = lambda port: True
        safe = await stack.enter_async_context(Clients(checker, lambda: [staying.port]))
        doomed.start(asks_per_s=80, tasks_per_s=40)
        safe.start(asks_per_s=20, tasks_per_s=0)
        died_at: list[float] = []
        left = kills

        async def haunt(victim: Place) -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await asyncio.sleep(random.uniform(0.0, 0.2))
                await victim.replace()
                died_at.append(time.monotonic())

        await asyncio.gather(*map(haunt, victims))
        await asyncio.gather(doomed.stop(), safe.stop())
        await doomed.read_again()
        orphans = sum(
            any(accepted < at < doomed.ended.get(text, 0.0) for at in died_at)
            for text, accepted in doomed.accepted.items()
        )
        return GatewayKills(
            checker.verdict(upstream.seen),
            checker,
            {answer.status for answer in safe.answers},
            len(doomed.inputs),
            orphans,
            fleet.errors(),
        )


class InputsThatKill(NamedTuple):
    """What became of inputs that kill their batcher each time."""

    verdict: Verdict
    tally: Counter[str]
    # How often each was sent (one that was only leased when its neighbour killed was delivered too), and the size of
    # the larger one of their last batches.
    sends: list[int]
    last_batch: int
    # Of each dead letter: its deliveries.
    deliveries: list[int]


async def inputs_that_kill(directory: Path, innocents: int) -> InputsThatKill:
    """A task and a request kill every batcher that sends them; innocents travel with them."""
    checker = Checker("F1-killer", {KILLER: {502}})
    patient = {"broker.queue_timeout_s": 20, "broker.total_timeout_s": 20}
    calls: dict[str, list[int]] = {}
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_redis(directory / "redis"))
        fleet = await stack.enter_async_context(fleet_over(directory, server.url, patient))
        upstreams = []
        restarts: set[asyncio.Task[None]] = set()
        starting: set[Place] = set()

        async def start_again(place: Place) -> None:
            await place.start()
            starting.discard(place)

        for _ in range(2):
            upstream = WatchedUpstream()
            await stack.enter_async_context(scripted_upstream(upstream))
            upstream.latency_s = 0.02
            place = await fleet.add("batcher", "--upstream", upstream.url, *BATCHING)

            def look(inputs: list[str], place: Place = place) -> None:
                found = [text for text in inputs if KILLER in text]
                for text in found:
                    calls.setdefault(text, []).append(len(inputs))
                # While the next batcher starts, the last calls of the dead one may still be here.
                if found and place not in starting:
                    place.process.kill()
                    starting.add(place)
                    restarts.add(asyncio.create_task(start_again(place)))

            upstream.when_called = look
            upstreams.append(upstream)
        await fleet.add("gateway")
        await fleet.wait_until_ready()
        port = fleet.ports()[0]
        clients = await stack.enter_async_context(Clients(checker, fleet.ports))

        async def task(text: str) -> None:
            task_id = await clients.submit(text)
            assert task_id
            await clients.wait_for(task_id)

        killers = [checker.new_input() + KILLER for _ in range(2)]
        work = [clients.ask() for _ in range(innocents // 2)] + [clients.run_task() for _ in range(innocents // 2)]
        work += [task(killers[0]), ask_and_check(checker, port, killers[1])]
        await asyncio.gather(*work)
        await asyncio.gather(*restarts)
        admin = fleet.gateways[0].process.admin_port
        listed = await ask_once(admin, "GET", "/internal/dead-letters?limit=10")
        return InputsThatKill(
            checker.verdict([text for upstream in upstreams for text in upstream.seen]),
            checker.tally,
            [len(calls[text]) for text in killers],
            max(calls[text][-1] for text in killers),
            [letter["sends"] for letter in listed.json["dead_letters"]],
        )


async def ask_and_check(checker: Checker, port: int, text: str) -> None:
    checker.accepted(text, within_s=25)
    response = await ask_once(port, "POST", "/v1/inference", f'{{"input":"{text}"}}'.encode())
    checker.answered(text, response)


BATCHER_KILLS, GATEWAY_KILLS, INNOCENTS = 100, 50, 60


@pytest.mark.timeout(300)
async def test_every_outcome_comes_though_batchers_die(tmp_path: Path) -> None:
    seen = await batchers_die(tmp_path, BATCHER_KILLS)
    latest = max(seen.reclaimed_s)
    passed = (
        seen.verdict.is_clean
        and all(seen.phases[phase] > 0 for phase in PHASES)
        and latest <= LEASE_S + 1.0
        and seen.errors == []
    )
    what = (
        f"{BATCHER_KILLS} x kill -9 of a batcher, entries found {dict(seen.phases)}, {len(seen.reclaimed_s)} orphans "
        f"sent by others within {latest:.2f} s of the kill (outcome within {max(seen.told_s):.2f} s), "
        f"{dict(seen.checker.tally)}"
    )
    seen.verdict.report("F1", what, passed=passed)
    assert passed, seen.errors


@pytest.mark.timeout(240)
async def test_tasks_outlive_their_gateway(tmp_path: Path) -> None:
    seen = await gateways_die(tmp_path, GATEWAY_KILLS)
    passed = (
        seen.verdict.is_clean
        and seen.checker.tally.keys() <= {"ok", "left", "503"}
        and seen.statuses_at_the_other == {200}
        and seen.orphans > 0
        and seen.errors == []
    )
    what = (
        f"{GATEWAY_KILLS} x kill -9 of a gateway, {seen.tasks} tasks ({seen.orphans} open when a gateway died), "
        f"{dict(seen.checker.tally)}"
    )
    seen.verdict.report("F2", what, passed=passed)
    assert passed, seen.errors


async def test_inputs_that_kill_their_batcher_become_dead_letters(tmp_path: Path) -> None:
    seen = await inputs_that_kill(tmp_path, INNOCENTS)
    passed = (
        seen.verdict.is_clean
        and seen.tally == {"ok": INNOCENTS, "502": 2}
        and max(seen.sends) <= DELIVERIES_MAX
        and seen.last_batch == 1
        and seen.deliveries == [DELIVERIES_MAX, DELIVERIES_MAX]
    )
    what = (
        f"inputs that kill: sent {seen.sends} times, the last time in a batch of {seen.last_batch}, "
        f"{len(seen.deliveries)} dead letters after {seen.deliveries} deliveries, "
    )
    seen.verdict.report("F1", what + str(dict(seen.tally)), passed=passed)
    assert passed
