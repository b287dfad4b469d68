"""Requests that are coalesced, by real processes: alone, and over Redis; what is kept, `tests/contract` shows."""

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.client import Connection, ConnectionBrokenError, Response, ask_once, inference_body
from support.processes import GatewayProcess, running_gateway, running_role, until
from support.redis_fleet import fleet_over
from support.redis_servers import RedisServer, running_redis
from support.upstreams import scripted_upstream

TRENDING = "what everybody asks"


class TrendingClients:
    """Many at once; each input is a nonce or the trending one, and the right answer is the input, reversed."""

    def __init__(self, ports: Callable[[], list[int]], *, leave_share: float = 0.0, seed: int = 1) -> None:
        self._ports = ports
        self._leave_share = leave_share
        self._random = random.Random(seed)
        self._serial = 0
        self.right = self.wrong = self.left = self.broken = self.failed = 0
        # Inputs that were sent whole, distinct ones and trending ones.
        self.sent = self.trending = 0

    async def run(self, total: int, at_once: int) -> None:
        """So many requests, so many clients."""
        per_client = -(-total // at_once)
        await asyncio.gather(*(self._client(per_client) for _ in range(at_once)))

    async def _client(self, number: int) -> None:
        connection: Connection | None = None
        for _ in range(number):
            connection = await self._ask(connection)
        if connection is not None:
            await connection.close()

    async def _ask(self, connection: Connection | None) -> Connection | None:
        self._serial += 1
        text = f"nonce {self._serial}"
        if self._random.random() < 0.5:
            text = TRENDING
        try:
            if connection is None:
                connection = await Connection.open(self._random.choice(self._ports()))
            self.sent += 1
            self.trending += text == TRENDING
            connection.send("POST", "/v1/inference", inference_body(text))
            if self._random.random() < self._leave_share:
                await asyncio.sleep(self._random.random() * 0.05)
                self.left += 1
                await connection.abort()
                return None
            response = await connection.read()
        except (ConnectionBrokenError, OSError):
            self.broken += 1
            if connection is not None:
                await connection.close()
            await asyncio.sleep(0.05)  # nobody may be there for a while
            return None
        if response.status != 200:
            self.failed += 1
        elif response.json["output"] == text[::-1]:
            self.right += 1
        else:
            self.wrong += 1
        if response.is_last:
            await connection.close()
            return None
        return connection


CACHED: dict[str, object] = {"upstream.cache": "true"}


async def ask(gateway: GatewayProcess, text: str, headers: str = "", **more: Any) -> Response:
    body = json.dumps({"input": text, **more}).encode()
    return await ask_once(gateway.port, "POST", "/v1/inference", body, headers)


async def lookups(gateway: GatewayProcess) -> dict[str, float]:
    return {
        result: await gateway.metric(f'carpool_cache_lookups_total{{result="{result}"}}')
        for result in ("hit", "miss", "shared")
    }


class TestAlone:
    async def test_also_while_clients_hang_up(self, tmp_path: Path) -> None:
        # Nothing is kept for long: requests are shared again and again, and those who lead leave.
        settings = CACHED | {"cache.ttl_s": 0.05}
        async with (
            scripted_upstream() as upstream,
            running_gateway(tmp_path, upstream.url, settings=settings) as gateway,
        ):
            upstream.latency_s = 0.03
            clients = TrendingClients(lambda: [gateway.port], leave_share=0.3)
            await clients.run(1500, at_once=100)
            assert (clients.wrong, clients.failed, clients.broken) == (0, 0, 0)
            assert clients.right + clients.left == 1500
            assert len(upstream.seen) <= 0.55 * clients.sent

            async def nothing_is_held() -> bool:
                return await gateway.metric("carpool_held_requests") == 0

            await until(nothing_is_held)
            assert gateway.log_messages("error") == []


class TestOverRedis:
    async def test_nobody_waits_for_the_request_of_an_offender(self, tmp_path: Path, redis_server: RedisServer) -> None:
        flags = ["--broker", redis_server.url]
        settings = CACHED | {
            "broker.namespace": tmp_path.name,
            "gateway.trusted_proxies": "127.0.0.1",
            "shedding.mode": "off",
        }
        bad, good = "X-Forwarded-For: 10.0.0.1\r\n", "X-Forwarded-For: 10.0.0.2\r\n"
        async with (
            scripted_upstream() as upstream,
            running_role(tmp_path / "b", "batcher", *flags, "--upstream", upstream.url, settings=settings),
            running_role(tmp_path / "g", "gateway", *flags, settings=settings) as gateway,
        ):
            upstream.poison = "bad"
            number = 0

            async def is_known() -> bool:
                nonlocal number
                number += 1
                fine, *_ = await asyncio.gather(
                    ask(gateway, f"fine {number}", good), *(ask(gateway, f"bad {number} {i}", bad) for i in range(3))
                )
                fleet = (await ask_once(gateway.admin_port, "GET", "/internal/fleet")).json
                # Until it has heard of the batcher, the gateway knows no model.
                quarantined: list[str] = fleet["models"].get("default", {}).get("quarantined", [])
                # Calls with bad inputs alone may have closed the model for a moment.
                return quarantined == ["10.0.0.1"] and fine.status == 200

            await until(is_known)
            before = await lookups(gateway)
            upstream.latency_s = 0.2
            first = asyncio.create_task(ask(gateway, "trending", bad))
            await asyncio.sleep(0.1)
            answer = await ask(gateway, "trending", good)
            assert (answer.status, answer.json.get("output")) == (200, "gnidnert"), answer.json
            await first
            assert (await lookups(gateway))["shared"] == before["shared"]

    async def test_a_trending_input_while_gateways_are_killed(self, tmp_path: Path) -> None:
        async with (
            running_redis(tmp_path / "redis") as redis,
            scripted_upstream() as upstream,
            fleet_over(tmp_path, redis.url, CACHED | {"cache.ttl_s": 0.05}) as fleet,
        ):
            upstream.latency_s = 0.03
            await fleet.add("batcher", "--upstream", upstream.url)
            for _ in range(2):
                await fleet.add("gateway")
            await fleet.wait_until_ready()
            clients = TrendingClients(fleet.ports, leave_share=0.1)
            work = asyncio.create_task(clients.run(3000, at_once=60))
            for place in fleet.gateways:
                await asyncio.sleep(0.3)
                place.process.kill()  # with all who lead there
                await place.start()
            await work
            assert (clients.wrong, clients.failed) == (0, 0)
            assert clients.right > 0
            assert len(upstream.seen) <= 0.55 * clients.sent + clients.broken
            assert fleet.errors() == []

    async def test_without_redis_there_is_no_cache_and_no_error(self, tmp_path: Path) -> None:
        async with running_redis(tmp_path / "redis") as redis, scripted_upstream() as upstream:
            flags = ["--broker", redis.url, "--upstream", upstream.url]
            async with running_role(tmp_path / "g", "serve", *flags, settings=CACHED) as gateway:
                assert (await ask(gateway, "abc")).status == 200
                redis.kill()
                for number in range(20):
                    response = await ask_once(gateway.port, "POST", "/v1/inference", inference_body(f"x{number}"))
                    assert response.status == 200
                assert (await ask(gateway, "x3")).json["metadata"]["cached"]  # this process has it
