"""Who is there, as every process of a fleet knows by the registry in Redis: who comes, goes, and falls silent.

A process that keeps all to itself has none, so this runs over Redis alone; on a Cluster, with the rest of the contract.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sites import LONG_MS, NEVER_MS, Door, Open, Site, opened

from carpool.broker.redis.keys import Keys
from carpool.composition.process import Process
from support.client import ask_once
from support.processes import until
from support.redis_servers import RedisCluster, RedisServer, running_redis

Fleet = dict[str, Any]

REPLICAS_TIMEOUT_MS = "carpool.composition.redis_context.REPLICAS_TIMEOUT_MS"


@pytest.fixture
async def open_fleet(redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[Open]:
    async with opened(tmp_path, redis_server) as open_one:
        yield open_one


def name_of(process: Process) -> str:
    """By which the others know it."""
    return process.watch.name


async def fleet_at(process: Process) -> Fleet:
    """Who is there, as a process tells operators."""
    fleet: Fleet = (await ask_once(process.admin_port, "GET", "/internal/fleet")).json
    return fleet


def statuses(fleet: Fleet, kind: str) -> dict[str, str]:
    return {member["name"]: member["status"] for member in fleet[kind]}


async def until_all_see(site: Site, gateways: dict[str, str], batchers: dict[str, str]) -> None:
    """Wait until every process tells of these, and of nobody else."""

    async def do_all() -> bool:
        fleets = await asyncio.gather(*map(fleet_at, site.processes))
        return all(statuses(each, "gateways") == gateways and statuses(each, "batchers") == batchers for each in fleets)

    await until(do_all)


async def test_each_sees_the_others_come_and_leave(open_fleet: Open) -> None:
    site = await open_fleet()
    batcher, here, there = site.processes
    gateways = {name_of(here): "ok", name_of(there): "ok"}
    await until_all_see(site, gateways, {name_of(batcher): "ok"})
    (endpoint,) = (await fleet_at(there))["models"]["m"]["endpoints"]
    assert (endpoint["batcher"], endpoint["state"], endpoint["slots"]) == (name_of(batcher), "healthy", 4)

    both = await site.add("serve")
    gateways |= {name_of(both): "ok"}
    await until_all_see(site, gateways, {name_of(batcher): "ok", name_of(both): "ok"})
    health = (await site.here.admin("GET", "health")).json
    assert (health["healthy_slots"], health["gateways"], health["batchers"]) == (8, 3, 2)

    site.processes.remove(both)
    await both.drain()
    del gateways[name_of(both)]
    await until_all_see(site, gateways, {name_of(batcher): "ok"})


async def test_one_that_falls_silent_is_offline_and_still_shown(open_fleet: Open) -> None:
    site = await open_fleet()
    batcher, here, there = site.processes
    site.processes.remove(batcher)
    await batcher.close()
    await until_all_see(site, {name_of(here): "ok", name_of(there): "ok"}, {name_of(batcher): "offline"})
    assert (await fleet_at(here))["models"]["m"]["healthy_slots"] == 0
    ready = await site.here.admin("GET", "ready")
    assert (ready.status, "no batcher lives" in ready.body.decode()) == (503, True)
    another = await site.add("batcher")
    await until_all_see(
        site, {name_of(here): "ok", name_of(there): "ok"}, {name_of(batcher): "offline", name_of(another): "ok"}
    )
    assert await site.there.output(await site.here.submit()) == "x"


async def test_what_changes_at_one_is_known_to_the_others(open_fleet: Open) -> None:
    site = await open_fleet()
    assert (await site.here.ask()).status == 200
    site.gpu.failing = 503
    while (await site.here.ask()).status == 502:
        pass  # until its breaker opens

    async def slots() -> list[int]:
        return [(await fleet_at(process))["models"]["m"]["healthy_slots"] for process in site.processes]

    async def all_know() -> bool:
        return await slots() == [0, 0, 0]

    await until(all_know)


async def test_how_long_an_endpoint_takes_is_known_to_all(open_fleet: Open) -> None:
    site = await open_fleet()
    assert (await site.here.ask()).status == 200

    async def all_know() -> bool:
        fleets = await asyncio.gather(*map(fleet_at, site.processes))
        endpoints = [endpoint for fleet in fleets for endpoint in fleet["models"]["m"]["endpoints"]]
        return all(0 < each.get("call_p50_ms", 0) == each["call_p99_ms"] for each in endpoints)

    await until(all_know)


async def test_one_that_drains_says_so(open_fleet: Open) -> None:
    site = await open_fleet()
    batcher, here, there = site.processes
    site.gpu.hold()
    task_id = await site.here.submit()
    await site.gpu.until_called()
    site.processes.remove(batcher)
    leaving = asyncio.ensure_future(batcher.drain())
    gateways = {name_of(here): "ok", name_of(there): "ok"}
    await until_all_see(site, gateways, {name_of(batcher): "draining"})
    site.gpu.release()
    await leaving
    await until_all_see(site, gateways, {})
    assert await site.there.output(task_id) == "x"


async def test_the_long_silent_and_the_absurd_are_forgotten(open_fleet: Open, redis_server: RedisServer) -> None:
    """Whatever somebody writes there: it keeps nobody out who was let in."""
    site = await open_fleet()
    batcher, here, there = site.processes
    batchers = Keys(str(site.settings["broker.namespace"])).batchers.decode()
    async with redis_server.client() as client:
        now_ms = int((await client.time())[0]) * 1000
        gone = {"old": f"{now_ms - 62_000} {{}}", "future": f"{now_ms + 62_000} {{}}", "bad": "not a stamp"}
        odd = {"odd": f'{now_ms - 30_000} {{"status":"ok"}}', "long": f"{now_ms} " + "x" * 300_000}
        for name, value in (gone | odd).items():
            await client.hset(batchers, name, value)
        gateways = {name_of(here): "ok", name_of(there): "ok"}
        await until_all_see(site, gateways, {name_of(batcher): "ok", "odd": "offline"})
        left = set(await client.hkeys(batchers))
    assert left == {name_of(batcher).encode(), b"odd", b"long"}
    assert (await site.here.admin("GET", "ready")).status == 200


async def test_while_redis_is_gone_nobody_is_known_to_be_there(tmp_path: Path) -> None:
    async with running_redis(tmp_path / "redis") as server, opened(tmp_path, server) as open_one:
        site = await open_one()
        batcher, here, there = site.processes
        gateways = {name_of(here): "ok", name_of(there): "ok"}
        await until_all_see(site, gateways, {name_of(batcher): "ok"})
        server.kill()

        async def all_are_offline() -> bool:
            fleet = await fleet_at(batcher)
            return set(statuses(fleet, "gateways").values()) == {"offline"}

        await until(all_are_offline)
        assert (await ask_once(batcher.admin_port, "GET", "/internal/ready")).status == 503
        assert await Door(batcher).metric("heartbeat_failures_total") > 0
        await server.restart()
        await until_all_see(site, gateways, {name_of(batcher): "ok"})


async def test_on_a_cluster(redis_cluster: RedisCluster, tmp_path: Path) -> None:
    async with opened(tmp_path, redis_cluster) as open_one:
        site = await open_one(upstream__cache=True, broker__replicas=1, **{REPLICAS_TIMEOUT_MS: NEVER_MS})
        batcher, here, there = site.processes
        await until_all_see(site, {name_of(here): "ok", name_of(there): "ok"}, {name_of(batcher): "ok"})
        ids = [await site.here.submit(f"task {number}") for number in range(20)]
        assert len({task_id[-1] for task_id in ids}) > 3  # in many shards
        assert await site.there.delete(ids[0]) in (204, 404)
        assert [await site.there.output(task_id) for task_id in ids[1:]] == [
            f"task {number}" for number in range(1, 20)
        ]
        for number in range(20):
            task_id = await site.here.submit(f"bad {number}")
            assert await site.there.status(task_id, LONG_MS) == "FAILED"
        letters = (await site.there.admin("GET", "dead-letters")).json["dead_letters"]
        assert [letter["id"] for letter in letters] == sorted({letter["id"] for letter in letters})
        assert len(letters) == 20
        site.gpu.is_strict = False
        report = (await site.there.admin("POST", "dead-letters/replay")).json
        for task in report["tasks"]:
            assert await site.here.status(task["task_id"], LONG_MS) == "SUCCESS"
        site.gpu.hold()

        async def is_given() -> bool:
            asked = await site.there.ask("task 1", headers="X-Request-Timeout-Ms: 200\r\n")
            return asked.status == 200 and bool(asked.json["metadata"]["cached"])

        await until(is_given)
