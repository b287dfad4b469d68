"""F13: webhooks that are due when a gateway is killed are delivered by the next one, or by another."""

import asyncio
from pathlib import Path

import pytest

from support.processes import PATIENCE_S, GatewayProcess, running_gateway, until
from support.redis_fleet import Fleet
from support.redis_servers import RedisServer
from support.webhooks import Receiver, allowing, receiver, submit_many

SIM = "sim:?latency_ms=5&slots=8"
KEEP: dict[str, object] = {"limits.anonymous": 0}


def counted(hooks: Receiver, tasks: dict[str, str]) -> tuple[int, int, int]:
    """Webhooks that came; tasks without one; those that were not of these tasks, or had another's outcome, or two."""
    bodies: dict[str, set[bytes]] = {}
    wrong = 0
    for webhook in hooks.came:
        bodies.setdefault(webhook.id, set()).add(webhook.body)
        wrong += webhook.id not in tasks or webhook.json["output"] != tasks[webhook.id][::-1]
    wrong += sum(len(each) > 1 for each in bodies.values())
    return len(hooks.came), len(tasks.keys() - bodies.keys()), wrong


async def due(gateway: GatewayProcess, count: int) -> None:
    """Wait until so many webhooks wait."""

    async def are_due() -> bool:
        await asyncio.sleep(0.03)
        return await gateway.metric("carpool_webhooks_waiting") >= count

    await until(are_due)


async def none_waits(gateway: GatewayProcess) -> None:
    """Wait until each was answered with 2xx: only then it leaves."""

    async def is_over() -> bool:
        await asyncio.sleep(0.03)
        return await gateway.metric("carpool_webhook_attempts_total") > 0 and (
            await gateway.metric("carpool_webhooks_waiting") == 0
        )

    await until(is_over, within_s=2 * PATIENCE_S)


async def kill_with_webhooks_due(directory: Path, count: int) -> tuple[int, int, int]:
    """The receiver takes some and hangs; the gateway is killed and started again; what `counted` tells."""
    async with receiver() as hooks:
        hooks.gate.clear()
        settings = KEEP | allowing(hooks, timeout_s=600)
        async with running_gateway(directory, SIM, settings=settings) as gateway:
            tasks = await submit_many(gateway.port, hooks.url, count)
            await due(gateway, count)
            await until(lambda: hooks.in_flight > 0)
            gateway.kill()
        hooks.gate.set()
        async with running_gateway(directory, SIM, settings=settings) as gateway:
            await none_waits(gateway)
        return counted(hooks, tasks)


async def kill_one_of_two(directory: Path, broker_url: str, namespace: str, count: int) -> tuple[int, int, int]:
    """Over Redis: both gateways are sending when one of them is killed; the other delivers all."""
    async with receiver() as hooks:
        hooks.gate.clear()
        # A claim ends 10 s after the time for an attempt.
        settings = KEEP | allowing(hooks, timeout_s=1) | {"broker.namespace": namespace}
        fleet = Fleet(directory, broker_url, settings)
        try:
            await asyncio.gather(fleet.add("batcher", "--upstream", SIM), fleet.add("gateway"), fleet.add("gateway"))
            first, second = (place.process for place in fleet.gateways)
            tasks = await submit_many(first.port, hooks.url, count)
            await due(first, count)
            await due(second, count)
            await until(lambda: hooks.in_flight > 0)
            first.kill()
            hooks.gate.set()
            await none_waits(second)
        finally:
            for place in (*fleet.gateways, *fleet.batchers):
                place.end()
        return counted(hooks, tasks)


WEBHOOKS = 1000


@pytest.mark.timeout(240)
async def test_each_is_delivered_after_a_restart(tmp_path: Path) -> None:
    delivered, lost, wrong = await kill_with_webhooks_due(tmp_path, WEBHOOKS)
    assert (lost, wrong) == (0, 0)
    assert WEBHOOKS <= delivered <= WEBHOOKS + 100  # twice: those that were under way


@pytest.mark.timeout(240)
async def test_each_is_delivered_by_the_other_gateway(tmp_path: Path, redis_server: RedisServer) -> None:
    delivered, lost, wrong = await kill_one_of_two(tmp_path, redis_server.url, tmp_path.name, WEBHOOKS)
    assert (lost, wrong) == (0, 0)
    assert delivered >= WEBHOOKS
