"""How full a real Redis is."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from carpool.broker.redis.client.address import parse_broker_url
from carpool.broker.redis.client.link import Lost
from carpool.broker.redis.client.nodes import Nodes
from carpool.broker.redis.fleet.memory import MemoryWatch
from support.processes import until
from support.redis_servers import RedisCluster, RedisServer, running_redis


@asynccontextmanager
async def watching(url: str) -> AsyncIterator[MemoryWatch]:
    nodes = Nodes(parse_broker_url(url))
    nodes.start()
    watch = MemoryWatch(nodes, interval_s=0.05)
    watch.start()
    try:
        yield watch
    finally:
        watch.close()
        await nodes.close()


async def test_full_and_not_full_again(tmp_path: Path) -> None:
    async with running_redis(tmp_path, "--maxmemory", "30mb") as server, watching(server.url) as watch:
        await until(lambda: watch.used_bytes > 0)
        assert (watch.is_short, watch.is_full) == (False, False)
        assert 0 < watch.fraction < 0.5
        assert watch.letter_bytes_max(shards=5) == 3 * 1024 * 1024
        async with server.client() as client:
            for number in range(26):
                await client.set(f"big-{number}", b"x" * 1_000_000)
            await until(lambda: watch.is_full)
            assert watch.is_short
            assert 0.8 < watch.fraction < 1.1
            await client.flushall()
            await until(lambda: not watch.is_full)


class SomePrimaries:
    """Those that a test answers for."""

    def __init__(self, slots: list[int]) -> None:
        self.slots = slots
        self.asked: list[Callable[[Any], None]] = []

    def primaries(self) -> list[int]:
        return self.slots

    def send(self, slot: int, told: Callable[[Any], None], *command: bytes) -> None:
        self.asked.append(told)

    def look(self, watch: MemoryWatch, *replies: object) -> None:
        """A round, and what each of them says."""
        watch.start()
        for reply in replies:
            self.asked.pop(0)(reply)
        watch.close()


def said(used: int) -> bytes:
    return b"used_memory:%d\r\nmaxmemory:100\r\n" % used


async def test_a_primary_that_does_not_answer_makes_nothing_less() -> None:
    """The others had room, so a full one was forgotten when it hung, and new requests were let in."""
    primaries = SomePrimaries([0, 1])
    watch = MemoryWatch(cast(Nodes, primaries), interval_s=1000.0)
    primaries.look(watch, said(95), said(10))
    for used in (10, 20):
        primaries.look(watch, Lost("it hangs"), said(used))
        assert (watch.fraction, watch.used_bytes, watch.is_full) == (0.95, 95 + used, True)
        assert watch.letter_bytes_max(shards=10) == 10
    primaries.slots = [5, 1]  # another has its place, and was not heard of yet
    primaries.look(watch, Lost("it comes"), said(20))
    assert (watch.is_full, watch.letter_bytes_max(shards=10)) == (True, 10)
    primaries.look(watch, said(30), said(20))
    assert (watch.fraction, watch.used_bytes) == (0.3, 50)


async def test_a_primary_that_never_answered_hides_no_room() -> None:
    """Beside one that was away from the start, another that had been full for a moment was so for ever: 429 for all."""
    primaries = SomePrimaries([0, 1])
    watch = MemoryWatch(cast(Nodes, primaries), interval_s=1000.0)
    primaries.look(watch, Lost("it is away"), said(85))
    assert watch.is_full and watch.letter_bytes_max(shards=10) is None
    primaries.look(watch, Lost("it is away"), said(10))
    assert (watch.fraction, watch.used_bytes, watch.is_short) == (0.1, 10, False)


async def limit_memory(nodes: list[RedisServer], most: int) -> None:
    for node in nodes:
        async with node.client() as client:
            await client.config_set("maxmemory", most)


async def test_every_primary_of_a_cluster_counts(redis_cluster: RedisCluster) -> None:
    primaries = [node for node in redis_cluster.nodes if (await node.facts("replication"))["role"] == "master"]
    fullest = max([int((await node.facts("memory"))["used_memory"]) for node in primaries])
    least = sum([int((await node.facts("memory"))["used_memory"]) for node in primaries]) * 0.8
    await limit_memory(primaries, 20 * fullest)
    try:
        async with watching(redis_cluster.url) as watch:
            await until(lambda: watch.limit_bytes == 20 * fullest * len(primaries) and watch.used_bytes > least)
            assert 0 < watch.fraction < 0.8
            assert not watch.is_full
    finally:
        await limit_memory(primaries, 0)  # others use them later
