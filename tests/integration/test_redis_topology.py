"""Slots that move and primaries that die: commands and readers find the new place by themselves."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from redis.crc import key_slot

from carpool.broker.redis.client.link import Link, RedisFailure
from carpool.broker.redis.client.nodes import Nodes
from support.processes import until
from support.redis_nodes import connected, script_of
from support.redis_servers import HOST, RedisCluster, running_cluster, running_sentinels

pytestmark = pytest.mark.xdist_group("moving cluster")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RedisCluster]:
    """One of this file's own: its slots are moved, and a primary of it is killed."""
    async with running_cluster(tmp_path_factory.mktemp("moving-cluster"), node_timeout_ms=2000) as cluster:
        yield cluster


def key_and_slot() -> tuple[bytes, int]:
    key = b"moving-%d" % random.getrandbits(64)
    return key, key_slot(key)


async def test_one_node_that_answers_is_enough_to_find_the_others(cluster: RedisCluster) -> None:
    async with connected(f"redis+cluster://127.0.0.1:1,{HOST}:{cluster.nodes[0].port}") as nodes:
        assert len(nodes.primaries()) == 3


async def test_a_slot_that_moves_is_followed(cluster: RedisCluster) -> None:
    key, slot = key_and_slot()
    script = script_of(b"return {redis.call('INCR', KEYS[1]), '%d'}" % random.getrandbits(64))
    received: list[Any] = []
    losses: list[None] = []

    def subscribe(link: Link) -> None:
        link.send("SSUBSCRIBE", key)

    async with connected(cluster.url) as nodes:
        nodes.reader(slot, connected=subscribe, received=received.append, lost=lambda: losses.append(None))
        await until(lambda: len(received) == 1)
        move = await cluster.begin_to_move(slot)
        # ASK: the key is not at the source, so the target is asked; the slot's place stays what it was.
        assert await nodes.ask(slot, "INCR", key) == 1
        # The target does not know the script yet either.
        assert (await nodes.ask_script(script, slot, [key], []))[0] == 2
        assert nodes.node_of(slot).at[1] == move.source.port
        replies = await asyncio.gather(*(nodes.ask(slot, "INCR", key) for _ in range(200)))
        assert replies == list(range(3, 203))
        await move.end()
        # MOVED: from now on the target is asked at once.
        replies = await asyncio.gather(*(nodes.ask(slot, "INCR", key) for _ in range(200)))
        assert sorted(replies) == list(range(203, 403))
        assert nodes.node_of(slot).at[1] == move.target.port
        assert nodes.is_up(slot)
        # The reader follows: its subscription is at the new node.
        await until(lambda: 1 <= len(losses) < sum(push[0] == b"ssubscribe" for push in received))
        await nodes.ask(slot, "SPUBLISH", key, "ding")
        await until(lambda: received[-1] == [b"smessage", key, b"ding"])
        await nodes.ask(slot, "DEL", key)


async def until_writes_resume(nodes: Nodes, slot: int, key: bytes) -> None:
    """Until a write succeeds again; meanwhile every attempt must end, and with a failure of ours."""

    async def is_written() -> bool:
        try:
            return bool(await nodes.ask(slot, "SET", key, "v") == b"OK")
        except RedisFailure:
            await asyncio.sleep(0.02)
            return False

    await until(is_written)


async def test_a_primary_that_dies_is_followed_by_its_replica(cluster: RedisCluster) -> None:
    key, slot = key_and_slot()
    connections: list[Link] = []
    await cluster.wait_until_whole()
    async with connected(cluster.url, timeout_s=2.0) as nodes:
        nodes.reader(slot, connected=connections.append, received=lambda reply: None, lost=lambda: None)
        await until(lambda: bool(connections))
        dead = await cluster.primary_of(slot)
        dead.kill()
        await until(lambda: not nodes.is_up(slot))
        await until_writes_resume(nodes, slot, key)
        assert nodes.node_of(slot).at[1] != dead.port
        await until(lambda: len(connections) >= 2 and connections[-1].is_open)
        # All the others, too, once the Cluster says that it is well.
        await until(lambda: nodes.trouble == "")
        assert len(nodes.primaries()) == 3
    dead.launch()
    await dead.wait_until_ready()
    await cluster.wait_until_whole()


async def test_a_master_that_dies_is_followed_by_the_one_the_sentinels_choose(tmp_path: Path) -> None:
    key, slot = key_and_slot()
    connections: list[Link] = []
    async with running_sentinels(tmp_path) as group, connected(group.url, timeout_s=2.0) as nodes:
        assert nodes.primaries() == [0]
        first = await group.primary()
        assert nodes.node_of(slot).at == (HOST, first.port)
        assert await nodes.ask(slot, "SET", key, "v") == b"OK"
        nodes.reader(slot, connected=connections.append, received=lambda reply: None, lost=lambda: None)
        await until(lambda: bool(connections))
        first.kill()
        await until(lambda: not nodes.is_up(slot))
        await until_writes_resume(nodes, slot, key)
        assert nodes.node_of(slot).at[1] != first.port
        await until(lambda: len(connections) >= 2 and connections[-1].is_open)
