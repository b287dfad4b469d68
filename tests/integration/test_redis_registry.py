"""Heartbeats over a real Redis: who comes, who goes, who falls silent."""

import asyncio
import secrets
from pathlib import Path
from typing import Any

import msgspec
import pytest

from carpool.broker.redis.client.nodes import Nodes
from carpool.broker.redis.fleet.registry import Registry
from carpool.broker.redis.fleet.view import EndpointHeartbeat, Heartbeat, ModelHeartbeat, fleet_state
from carpool.broker.redis.keys import Keys
from carpool.core.names import Role
from support.processes import until
from support.redis_nodes import connected
from support.redis_servers import RedisCluster, RedisServer, running_redis

INTERVAL_S = 0.05
# Nobody is late by so much, however busy the machine is.
STALE_S = 20.0


@pytest.fixture
def keys() -> Keys:
    return Keys("test-" + secrets.token_hex(6))


def description(healthy_slots: int = 4) -> Heartbeat:
    endpoint = EndpointHeartbeat("http://gpu:9000/infer", "healthy", in_flight=1, limit=4, slots=4, breaker="closed")
    model = ModelHeartbeat(slots=4, healthy_slots=healthy_slots, capacity_rps=10.0, endpoints=(endpoint,))
    return Heartbeat("ok", rate=3.0, models={"m": model})


def registry(
    nodes: Nodes,
    keys: Keys,
    name: bytes,
    role: Role,
    said: Heartbeat | None = None,
    **options: Any,
) -> Registry:
    said = description() if said is None else said
    timing = {"interval_s": INTERVAL_S, "stale_s": STALE_S, **options}
    return Registry(nodes, keys, name=name, role=role, describe=lambda: said, **timing)


def live(one: Registry) -> tuple[list[str], list[str]]:
    view = one.view
    return [member.name for member in view.live_gateways()], [member.name for member in view.live_batchers()]


async def test_each_sees_the_others(redis_server: RedisServer, keys: Keys) -> None:
    async with connected(redis_server.url) as nodes:
        said = description()
        gateway, batcher = registry(nodes, keys, b"g", "gateway"), registry(nodes, keys, b"b", "batcher", said)
        both = registry(nodes, keys, b"s", "serve")
        assert not gateway.is_fresh()
        for one in (gateway, batcher, both):
            one.start()
        await until(lambda: live(gateway) == live(batcher) == live(both) == (["g", "s"], ["b", "s"]))
        assert gateway.is_fresh()
        assert gateway.view.healthy_slots("m") == 8
        said.models["m"] = description(healthy_slots=1).models["m"]
        await until(lambda: gateway.view.healthy_slots("m") == 5)
        assert [row.batcher for row in fleet_state(gateway.view).models["m"].endpoints] == ["b", "s"]
        for one in (gateway, batcher, both):
            one.close()


async def test_one_that_leaves_is_gone_at_once(redis_server: RedisServer, keys: Keys) -> None:
    async with connected(redis_server.url) as nodes:
        watcher, leaver = registry(nodes, keys, b"w", "gateway"), registry(nodes, keys, b"l", "serve")
        watcher.start()
        leaver.start()
        await until(lambda: live(watcher) == (["l", "w"], ["l"]))
        await leaver.leave()
        async with redis_server.client() as client:
            assert await client.hkeys(keys.gateways.decode()) == [b"w"]
            assert await client.hkeys(keys.batchers.decode()) == []
            await asyncio.sleep(3 * INTERVAL_S)
            assert await client.hkeys(keys.batchers.decode()) == []
        await until(lambda: watcher.view.batchers == () and live(watcher) == (["w"], []))
        watcher.close()


async def test_one_that_falls_silent_is_offline_and_still_shown(redis_server: RedisServer, keys: Keys) -> None:
    async with connected(redis_server.url) as nodes:
        changes: list[tuple[list[str], list[str]]] = []
        watcher: Registry = registry(
            nodes, keys, b"w", "gateway", changed=lambda: changes.append(live(watcher)), stale_s=2.0
        )
        silent = registry(nodes, keys, b"s", "batcher")
        watcher.start()
        silent.start()
        await until(lambda: live(watcher) == (["w"], ["s"]))
        silent.close()
        await until(lambda: live(watcher) == (["w"], []))
        async with redis_server.client() as client:
            seconds, micros = await client.time()
            last_beat = await client.hget(keys.batchers.decode(), "s")
        assert isinstance(last_beat, bytes)
        last_beat_ms = int(last_beat.split()[0])
        assert seconds * 1000 + micros / 1000 - last_beat_ms >= 2000, "not before it was silent for so long"
        assert [(member.name, member.status) for member in watcher.view.batchers] == [("s", "offline")]
        assert watcher.view.healthy_slots("m") == 0
        # Told of changes alone, not of every heartbeat.
        assert changes[-2:] == [(["w"], ["s"]), (["w"], [])]
        assert len(changes) <= 3
        watcher.close()


async def test_the_long_silent_and_the_absurd_are_forgotten(redis_server: RedisServer, keys: Keys) -> None:
    async with redis_server.client() as client, connected(redis_server.url) as nodes:
        now_ms = int((await client.time())[0]) * 1000
        old = {"old": f"{now_ms - 62_000} {{}}", "future": f"{now_ms + 62_000} {{}}", "bad": "not a stamp"}
        kept = {"silent": f'{now_ms - 30_000} {{"status":"ok"}}', "long": f"{now_ms} " + "x" * 300_000}
        for name, value in (old | kept).items():
            await client.hset(keys.batchers.decode(), name, value)
        one = registry(nodes, keys, b"w", "gateway")
        one.start()
        await until(lambda: live(one) == (["w"], []))
        assert [member.name for member in one.view.batchers] == ["silent"]
        assert sorted(await client.hkeys(keys.batchers.decode())) == [b"long", b"silent"]
        one.close()


async def test_a_change_is_told_without_waiting(redis_server: RedisServer, keys: Keys) -> None:
    async with connected(redis_server.url) as nodes:
        said = [description()]
        one = Registry(nodes, keys, name=b"b", role="batcher", describe=lambda: said[-1], interval_s=30.0)
        one.start()
        await until(lambda: live(one) == ([], ["b"]))
        said.append(msgspec.structs.replace(said[-1], status="draining"))
        one.heartbeat()
        said.append(msgspec.structs.replace(description(healthy_slots=2), status="draining"))
        one.heartbeat()  # while the first one is under way
        await until(lambda: one.view.healthy_slots("m") == 2)
        assert one.view.batchers[0].status == "draining"
        one.close()


async def test_a_redis_that_is_gone_makes_the_view_old(tmp_path: Path, keys: Keys) -> None:
    async with running_redis(tmp_path) as server, connected(server.url) as nodes:
        one = registry(nodes, keys, b"g", "gateway", stale_s=1.0)
        one.start()
        await until(one.is_fresh)
        server.kill()
        await until(lambda: not one.is_fresh())
        assert one.failures > 0
        await one.leave()  # nobody is there to be told
        again = registry(nodes, keys, b"g", "gateway")
        again.start()
        await server.restart()
        await until(again.is_fresh)
        assert live(again) == (["g"], [])
        again.close()


async def test_on_a_cluster(redis_cluster: RedisCluster, keys: Keys) -> None:
    async with connected(redis_cluster.url) as nodes:
        one = registry(nodes, keys, b"s", "serve")
        one.start()
        await until(lambda: live(one) == (["s"], ["s"]))
        await one.leave()


async def test_another_number_of_shards_is_not_let_in(redis_server: RedisServer, keys: Keys) -> None:
    """It would look for entries, and put some, where the others never look."""
    other_keys = Keys(keys.namespace.decode(), 8)
    async with connected(redis_server.url) as nodes:
        member, odd = registry(nodes, keys, b"g", "gateway"), registry(nodes, other_keys, b"b", "batcher")
        member.start()
        await until(lambda: member.is_in)
        odd.start()
        await until(lambda: odd.refusal != "")
        assert "broker.shards is 8 here and 16 in the fleet" in odd.refusal
        seen = member.view
        await until(lambda: member.view is not seen)
        assert live(member) == (["g"], [])
        # The last of the others has left.
        await member.leave()
        await until(lambda: odd.is_in)
        assert odd.refusal == ""
        odd.close()


async def test_one_that_was_let_in_stays(redis_server: RedisServer, keys: Keys) -> None:
    """Whatever somebody else writes there."""
    async with connected(redis_server.url) as nodes, redis_server.client() as client:
        member = registry(nodes, keys, b"g", "gateway")
        member.start()
        await until(lambda: member.is_in)
        seconds, _ = await client.time()
        await client.hset(keys.batchers.decode(), "odd", f'{seconds * 1000} {{"status":"ok","shards":3}}')
        await until(lambda: live(member) == (["g"], ["odd"]))
        assert (member.is_in, member.refusal) == (True, "")
        member.close()
