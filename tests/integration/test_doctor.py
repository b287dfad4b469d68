"""`carpool doctor` against real deployments: what it finds, and that it changes nothing."""

import json
import secrets
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from carpool.broker.redis.client.address import parse_broker_url
from carpool.broker.redis.fleet.view import Heartbeat, ModelHeartbeat, encode_heartbeat
from carpool.broker.redis.keys import GROUP, Keys, Shard
from carpool.core.finding import Finding
from carpool.settings.schema import BrokerSettings
from carpool.tools.doctor import Doctor
from support.processes import carpool
from support.redis_servers import RedisCluster, RedisServer, running_redis, running_sentinels

LANE = b"00112233445566778899aabbccddeeff:s0"


@pytest.fixture
def keys() -> Keys:
    return Keys("doctor-" + secrets.token_hex(6))


async def examine(url: str, keys: Keys, **wants: Any) -> dict[str, Finding]:
    findings = await Doctor(parse_broker_url(url), keys, BrokerSettings(**wants)).examine()
    assert all(finding.says for finding in findings)
    return {finding.check: finding for finding in findings}


async def queue(client: redis.asyncio.Redis, shard: Shard, entries: int, *, held: int | None = None) -> None:
    """Entries of a model `m` as the submit script leaves them."""
    stream = shard.stream(LANE)
    await client.xgroup_create(stream, GROUP, "0", mkstream=True)
    await client.hset(shard.lanes.decode(), LANE.decode(), "m")
    for _ in range(entries):
        await client.xadd(stream, {b"header": b"value"})
    count = entries if held is None else held
    await client.hset(shard.counts.decode(), mapping={"held": count, "unread": count})


async def heartbeat(client: redis.asyncio.Redis, key: bytes, name: str, *models: str, age_ms: int = 0) -> None:
    seconds, micros = await client.time()
    stamp = int(seconds) * 1000 + int(micros) // 1000 - age_ms
    said = encode_heartbeat(
        Heartbeat("ok", models={model: ModelHeartbeat(slots=1) for model in models}), with_models=bool(models)
    )
    await client.hset(key.decode(), name, b"%d %b" % (stamp, said))


async def snapshot(client: redis.asyncio.Redis, keys: Keys) -> dict[bytes, bytes | None]:
    pattern = keys.namespace + b"*"
    return {name: await client.dump(name) async for name in client.scan_iter(match=pattern, count=1000)}


async def test_a_deployment_in_order(tmp_path: Path, keys: Keys) -> None:
    args = ("--appendonly", "yes", "--appendfsync", "always", "--maxmemory", "100mb")
    async with running_redis(tmp_path, *args) as server, server.client() as client:
        await heartbeat(client, keys.gateways, "g")
        await heartbeat(client, keys.batchers, "b", "m")
        await queue(client, keys.shards[3], 4)
        await client.xadd(keys.replies(b"g"), {b"hello": b""})
        found = await examine(server.url, keys)
        assert {check for check, finding in found.items() if finding.level != "ok"} == set()
        assert found["waiting"].says == "4 waiting, 0 taken and not finished"
        assert found["fleet"].says == "1 gateway and 1 batcher live"
        assert {"connection", "version", "persistence", "eviction", "memory", "replicas", "clock"} <= set(found)


async def test_what_is_wrong_with_a_queue(redis_server: RedisServer, keys: Keys) -> None:
    async with redis_server.client() as client:
        first = keys.shards[0]
        await queue(client, first, 5, held=7)
        await client.xreadgroup(GROUP.decode(), "gone", {first.stream(LANE): ">"}, count=2)
        await client.zadd(keys.shards[2].letters.decode(), {"17": 17})
        before = await snapshot(client, keys)
        found = await examine(redis_server.url, keys)
        assert found["fleet"].level == "warning"
        assert found["waiting"].says == "requests that no live batcher serves: 5 for m"
        assert found["counts"].level == "warning"
        assert "shard 0 says 7/7/0, has 5/3/0" in found["counts"].says
        assert found["dead letters"].says == "1 kept, 0.0 MiB"
        assert await snapshot(client, keys) == before, "looking changes nothing"

        await heartbeat(client, keys.batchers, "b", "other")
        assert (await examine(redis_server.url, keys))["waiting"].level == "problem"
        await heartbeat(client, keys.batchers, "b", "m")
        assert (await examine(redis_server.url, keys))["waiting"].level == "ok"


async def test_no_way_in(tmp_path: Path, redis_server: RedisServer, keys: Keys) -> None:
    async with running_redis(tmp_path, "--requirepass", "right-one") as server:
        found = await examine(server.url, keys)
        assert found["connection"].level == "problem"
        assert "password" in found["connection"].do
        wrong = await examine(f"redis://:wrong-one@127.0.0.1:{server.port}", keys)
        assert wrong["connection"].level == "problem"
        assert "wrong-one" not in str(wrong)
        right = await examine(f"redis://:right-one@127.0.0.1:{server.port}", keys)
        assert right["connection"].level == "ok"
        server.kill()
        gone = await examine(server.url, keys)
        assert (list(gone), gone["connection"].level) == (["connection"], "problem")
    assert (await examine(redis_server.url.replace("redis:", "redis+cluster:"), keys))["cluster"].level == "problem"
    sentinel = redis_server.url.replace("redis:", "redis+sentinel:") + "/carpool"
    assert (await examine(sentinel, keys))["sentinels"].level == "problem"


async def test_a_cluster(redis_cluster: RedisCluster, keys: Keys) -> None:
    found = await examine(redis_cluster.url, keys, replicas=1)
    assert found["cluster"].level == "ok"
    assert found["replicas"].says == "1 online; a task is accepted once 1 of them have it"
    assert found["version"].where == (), "all primaries have the same: told once"
    assert found["replicas"].level == "ok"
    assert (await examine(redis_cluster.url, keys, replicas=2))["replicas"].level == "problem"
    for shard in keys.shards[::5]:
        primary = await redis_cluster.primary_of(shard.slot)
        async with primary.client() as client:
            await queue(client, shard, 2, held=3)
    found = await examine(redis_cluster.url, keys)
    assert found["waiting"].says.endswith("8 for m")
    assert found["counts"].level == "warning"
    # One of its nodes, called a single server.
    assert (await examine(redis_cluster.nodes[0].url, keys))["cluster"].level == "problem"


async def test_sentinels(tmp_path: Path, keys: Keys) -> None:
    async with running_sentinels(tmp_path) as group:
        found = await examine(group.url, keys, replicas=2)
        assert found["sentinels"].says == "3 of the 3 named answer; 3 watch the primary, 2 must agree"
        assert found["sentinels"].level == "ok"
        assert found["role"].level == "ok"
        assert found["replicas"].level == "ok"
        group.sentinels[0].kill()
        assert (await examine(group.url, keys))["sentinels"].level == "warning"
        primary = await group.primary()
        replica = next(server for server in group.servers if server is not primary)
        assert (await examine(replica.url, keys))["role"].level == "problem"


# The command


async def test_the_command(redis_server: RedisServer, keys: Keys, tmp_path: Path) -> None:
    namespace = keys.namespace.decode()
    async with redis_server.client() as client:
        fine = carpool("doctor", "--broker", redis_server.url, cwd=tmp_path, CARPOOL_BROKER_NAMESPACE=namespace)
        assert (fine.returncode, fine.stderr) == (0, "")
        lines = fine.stdout.splitlines()
        assert all(line.startswith(("ok: ", "warning: ")) for line in lines)
        assert any(line.startswith("warning: persistence: ") and " -> " in line for line in lines)

        await queue(client, keys.shards[0], 1, held=2)
        (tmp_path / "carpool.toml").write_text(f'[broker]\nurl = "{redis_server.url}"\nnamespace = "{namespace}"\n')
        bad = carpool("doctor", "--json", cwd=tmp_path)
        report: dict[str, Any] = json.loads(bad.stdout)
        levels = {finding["check"]: finding["level"] for finding in report["findings"]}
        assert (bad.returncode, report["status"]) == (1, "problem")
        assert (levels["waiting"], levels["counts"]) == ("problem", "warning")


def test_the_command_without_a_broker(tmp_path: Path) -> None:
    done = carpool("doctor", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("carpool: nothing to look at: give --upstream URL")
    assert done.stdout == ""
