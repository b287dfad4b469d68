"""Results that gateways keep together, in a real Redis: bounded, for a while, and never in anybody's way."""

import asyncio
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from carpool.broker.redis.gateway.results import RedisResults
from carpool.broker.redis.keys import Keys
from carpool.broker.redis.redis_ops import RedisOps
from carpool.core.outcome import Output
from carpool.testing import make_output
from support.processes import PATIENCE_S, until
from support.redis_nodes import connected
from support.redis_servers import RedisServer, running_redis

KEYS = [bytes([number]) * 32 for number in range(40)]


@asynccontextmanager
async def results_in(server: Any, namespace: str, **options: Any) -> AsyncIterator[RedisResults]:
    async with connected(server.url) as nodes:
        keys = Keys(namespace, options.pop("shards", 16))
        await until(lambda: all(nodes.is_up(shard.slot) for shard in keys.shards))
        results = RedisResults(
            RedisOps(nodes, keys), **{"bytes_max": 10**6, "ttl_s": 60.0, "look_s_max": PATIENCE_S, **options}
        )
        await find(results, b"-" * 32)  # now it knows Redis's clock, and what is written is
        yield results
        results.close()


async def find(results: RedisResults, *keys: bytes) -> list[bytes | None]:
    found: dict[bytes, bytes | None] = {}

    def told(key: bytes, output: Output | None, age_s: float) -> None:
        assert key not in found
        found[key] = None if output is None else output.value

    for key in keys:
        results.look(key, partial(told, key))
    assert not found
    await until(lambda: len(found) == len(keys))
    return [found[key] for key in keys]


async def until_found(results: RedisResults, *keys: bytes) -> None:
    """The first script that a server has not seen is sent twice: what it writes comes a moment later."""

    async def all_found() -> bool:
        return None not in await find(results, *keys)

    await until(all_found)


async def cache_bytes(server: RedisServer, namespace: str, shard: int = 0) -> int:
    return int(await server.ask("HGET", Keys(namespace, 1).shards[shard].counts.decode(), "cache_bytes") or 0)


async def test_many_that_come_at_once_are_bounded_too(tmp_path: Path, redis_server: RedisServer) -> None:
    keys = [bytes([number % 256, number // 256]) * 16 for number in range(2000)]
    async with results_in(redis_server, tmp_path.name, bytes_max=200_000) as results:
        results.keep(KEYS[0], make_output(b"1"))
        results.write()

        async def is_counted() -> bool:
            return await cache_bytes(redis_server, tmp_path.name) > 0

        await until(is_counted)  # from now on Redis knows the script
        for key in keys:
            results.keep(key, make_output(b"x" * 1000))
        results.keep(b"l" * 32, make_output(b"x" * 100_000))  # too large for one command: it is not kept
        results.write()
        await until_found(results, keys[-1])
        assert 50_000 < await cache_bytes(redis_server, tmp_path.name) <= 200_000
        found = await find(results, *keys)
        assert 40 < sum(value is not None for value in found) < 200
        assert None not in found[-40:]
        assert await find(results, b"l" * 32) == [None]


async def test_while_memory_is_short_they_make_room(tmp_path: Path, redis_server: RedisServer) -> None:
    is_short = False
    async with results_in(redis_server, tmp_path.name, shards=1, is_memory_short=lambda: is_short) as results:
        for key in KEYS:
            results.keep(key, make_output(b"x"))
        results.write()
        await until_found(results, *KEYS)
        is_short = True
        results.keep(b"k" * 32, make_output(b"x"))
        results.write()
        assert await find(results, *KEYS, b"k" * 32) == [None] * 41
        assert await cache_bytes(redis_server, tmp_path.name) == 0


async def test_what_is_no_result_is_none(tmp_path: Path, redis_server: RedisServer) -> None:
    async with results_in(redis_server, tmp_path.name, shards=1) as results:
        client = redis_server.client()
        await client.hset(Keys(tmp_path.name, 1).shards[0].kept, KEYS[0], b"garbage")
        await client.aclose()
        assert await find(results, KEYS[0]) == [None]


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_nobody_waits_for_a_redis_that_does_not_answer(tmp_path: Path, how: str) -> None:
    async with running_redis(tmp_path) as server, results_in(server, "n", look_s_max=0.2) as results:

        async def is_found() -> bool:
            return await find(results, KEYS[0]) == [b"1"]

        results.keep(KEYS[0], make_output(b"1"))
        results.write()
        await until(is_found)
        getattr(server, how)()
        assert await find(results, KEYS[0], KEYS[1]) == [None, None]
        for _ in range(5):
            assert await find(results, KEYS[0]) == [None]
        results.keep(KEYS[2], make_output(b"1"))
        await asyncio.sleep(0.01)
        if how == "stop":
            server.go_on()
            await until(is_found)


async def hset(server: RedisServer, namespace: str, key: bytes, value: bytes) -> None:
    async with server.client() as client:
        await client.hset(Keys(namespace, 1).shards[0].kept, key, value)


def documented_rights() -> list[str]:
    """What the docs say that a user of Redis needs."""
    text = (Path(__file__).parents[2] / "docs" / "redis.md").read_text()
    return shlex.split(text.partition("ACL SETUSER carpool")[2].partition("```")[0].replace("\\\n", ""))


@asynccontextmanager
async def results_of_user(server: RedisServer, *more: str, **options: Any) -> AsyncIterator[RedisResults]:
    """With the rights that the docs tell of, and these."""
    rights = [">pw" if word == ">PASSWORD" else word for word in documented_rights()]
    assert "+eval" in rights
    await server.ask("ACL", "SETUSER", "carpool", *rights, *more)

    class AsUser:
        url = f"redis://carpool:pw@127.0.0.1:{server.port}"

    async with results_in(AsUser, "carpool", **options) as results:
        yield results


async def test_with_the_rights_that_the_docs_tell_of(tmp_path: Path) -> None:
    async with running_redis(tmp_path) as server, results_of_user(server, bytes_max=20_000) as results:
        for key in KEYS[:20]:
            results.keep(key, make_output(b"x" * 1000))
            results.write()
            await until_found(results, key)
        assert 0 < await cache_bytes(server, "carpool") <= 20_000
        assert await server.ask("PTTL", Keys("carpool", 1).shards[0].kept_before.decode()) > 0


async def test_where_redis_does_not_count_them_they_go(tmp_path: Path) -> None:
    """Else nothing would bound them."""
    async with running_redis(tmp_path) as server, results_of_user(server, "-pttl") as results:
        assert results.keep(KEYS[0], make_output(b"1"))
        await until(lambda: not results.keep(KEYS[1], make_output(b"1")))
        kept = Keys("carpool", 1).shards[0].kept.decode()

        async def is_gone() -> bool:
            return not await server.ask("EXISTS", kept)

        await until(is_gone)
        await server.ask("ACL", "SETUSER", "carpool", "+pttl")

        async def is_found() -> bool:
            results.keep(KEYS[2], make_output(b"1"))
            results.write()
            return await find(results, KEYS[2]) == [b"1"]

        await until(is_found)


async def test_one_that_many_ask_for_is_sent_once(tmp_path: Path) -> None:
    """Tasks share no seat. Redis would send as many replies in one as no connection takes."""
    async with running_redis(tmp_path) as server, results_in(server, "n", bytes_max=10**8) as results:
        results.keep(KEYS[0], make_output(b"x" * 1_000_000))
        results.write()
        await until_found(results, KEYS[0])
        before = int((await server.facts("stats"))["total_net_output_bytes"])
        found: list[Output | None] = []
        for _ in range(300):
            results.look(KEYS[0], lambda output, age_s: found.append(output))
        await until(lambda: len(found) == 300)
        assert all(output is not None and len(output.value) == 1_000_000 for output in found)
        assert int((await server.facts("stats"))["total_net_output_bytes"]) - before < 3_000_000


async def test_while_redis_is_not_asked_they_are_to_be_kept_elsewhere_too(tmp_path: Path) -> None:
    async with running_redis(tmp_path) as server, results_in(server, "n", look_s_max=0.01) as results:
        await until(lambda: results.keep(KEYS[0], make_output(b"1")))
        server.stop()
        kept: list[bool] = []
        results.look(KEYS[1], lambda output, age_s: kept.append(results.keep(KEYS[2], make_output(b"1"))))
        await until(lambda: bool(kept))
        assert kept == [False]
        server.go_on()
