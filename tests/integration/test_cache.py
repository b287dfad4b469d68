"""Results that are kept and requests that are coalesced, by real processes: alone, and over Redis."""

import asyncio
import json
from pathlib import Path
from typing import Any

from support.client import Response, ask_once, inference_body
from support.processes import GatewayProcess, running_gateway, running_role, until
from support.redis_fleet import fleet_over
from support.redis_servers import RedisServer, running_redis
from support.trending import TrendingClients
from support.upstreams import ScriptedUpstream, scripted_upstream

CACHED: dict[str, object] = {"upstream.cache": "true"}
ASYNC = "Prefer: respond-async\r\n"


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

    async def test_what_a_client_may_ask_for(self, tmp_path: Path) -> None:
        async with scripted_upstream() as upstream, running_gateway(tmp_path, upstream.url, settings=CACHED) as gateway:
            first = await ask(gateway, "abc")
            again = await ask(gateway, "abc")
            assert [each.json["metadata"]["cached"] for each in (first, again)] == [False, True]
            assert first.json["output"] == again.json["output"] == "cba"
            assert first.json["request_id"] != again.json["request_id"]
            assert upstream.seen == ["abc"]
            anew = await ask(gateway, "abc", "Cache-Control: no-cache\r\n")
            assert (anew.json["metadata"]["cached"], upstream.seen.count("abc")) == (False, 2)
            private = await ask(gateway, "secret", "Cache-Control: no-store\r\n")
            assert private.json["output"] == "terces"
            assert not (await ask(gateway, "secret")).json["metadata"]["cached"]
            assert upstream.seen.count("secret") == 2
            other = await ask(gateway, "abc", parameters={"k": 1})
            assert not other.json["metadata"]["cached"]
            assert (await ask(gateway, "abc", parameters={"k": 1})).json["metadata"]["cached"]

    async def test_binary_inputs_and_tasks_use_it(self, tmp_path: Path) -> None:
        async with scripted_upstream() as upstream, running_gateway(tmp_path, upstream.url, settings=CACHED) as gateway:
            binary = "Content-Type: application/octet-stream\r\n"
            answers = [await ask_once(gateway.port, "POST", "/v1/predict", b"\x00\x01", binary) for _ in range(2)]
            assert answers[0].json["output"] == answers[1].json["output"]
            assert len(upstream.seen) == 1
            await self.check_tasks(gateway, upstream)

    async def check_tasks(self, gateway: GatewayProcess, upstream: ScriptedUpstream) -> None:
        """A task fills it, and finds what is there."""
        for text, fills in (("as a task", ASYNC), ("as a request", "")):
            first = await ask(gateway, text, fills)
            if fills:
                assert await result_of(gateway, first) == text[::-1]
            assert await result_of(gateway, await ask(gateway, text, ASYNC)) == text[::-1]
            assert (await ask(gateway, text)).json["metadata"]["cached"]
            assert upstream.seen.count(text) == 1
        hidden = await ask(gateway, "not this one", ASYNC + "Cache-Control: no-store\r\n")
        assert await result_of(gateway, hidden) == "not this one"[::-1]
        assert not (await ask(gateway, "not this one")).json["metadata"]["cached"]

    async def test_a_model_that_does_not_say_so_has_none(self, tmp_path: Path) -> None:
        async with scripted_upstream() as upstream, running_gateway(tmp_path, upstream.url) as gateway:
            for _ in range(3):
                assert not (await ask(gateway, "abc")).json["metadata"]["cached"]
            assert upstream.seen == ["abc"] * 3
            assert await lookups(gateway) == {"hit": 0, "miss": 0, "shared": 0}


async def result_of(gateway: GatewayProcess, accepted: Response) -> str:
    assert accepted.status == 202
    path = f"/v1/result/{accepted.json['task_id']}?wait_ms=5000"
    task = (await ask_once(gateway.port, "GET", path)).json
    assert task["status"] == "SUCCESS"
    output: str = task["output"]
    return output


class TestOverRedis:
    async def test_gateways_share_what_is_kept(self, tmp_path: Path, redis_server: RedisServer) -> None:
        flags = ["--broker", redis_server.url]
        settings = CACHED | {"broker.namespace": tmp_path.name}
        async with (
            scripted_upstream() as upstream,
            running_role(tmp_path / "b", "batcher", *flags, "--upstream", upstream.url, settings=settings),
            running_role(tmp_path / "1", "gateway", *flags, settings=settings) as one,
            running_role(tmp_path / "2", "gateway", *flags, settings=settings) as two,
        ):
            first = await ask(one, "abc")
            assert (first.json["output"], first.json["metadata"]["cached"]) == ("cba", False)

            # Whoever is not told in time whether a result is kept goes without: each of them is asked until it is told.
            for gateway in (two, one):
                before = upstream.seen.count("abc")
                kept = await ask(gateway, "abc")
                while not kept.json["metadata"]["cached"]:
                    before = upstream.seen.count("abc")
                    kept = await ask(gateway, "abc")
                assert kept.json["output"] == "cba"
                assert upstream.seen.count("abc") == before
            await until(lambda: self.has_bytes(one))

            # Tasks: their results are written by a batcher, and found by any gateway.
            task = await ask(one, "as a task", ASYNC)
            assert await result_of(two, task) == "as a task"[::-1]

            async def is_kept_too() -> bool:
                return (await ask(two, "as a task")).json["metadata"]["cached"] is True

            await until(is_kept_too)
            again: list[str] = []

            async def is_known() -> bool:
                """Redis may be slow for a moment: then it is computed again."""
                seen = upstream.seen.count("as a task")
                accepted = await ask(one, "as a task", ASYNC)
                assert await result_of(two, accepted) == "as a task"[::-1]
                again.append(accepted.json["task_id"])
                return upstream.seen.count("as a task") == seen

            await until(is_known)
            state = await ask_once(one.admin_port, "GET", f"/internal/requests/{again[-1]}")
            assert state.json["status"] == "completed"

    async def has_bytes(self, gateway: GatewayProcess) -> bool:
        return await gateway.metric("carpool_broker_cache_bytes") > 0

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
