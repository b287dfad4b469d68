"""Rate limits over real sockets and a real Redis: the script, gateways that share a budget, and what clients see."""

import asyncio
import secrets
import time
from collections import Counter
from pathlib import Path
from random import Random

from carpool.admission.limits import slack
from carpool.admission.shared_limits import SharedLimits
from carpool.broker.redis.client.link import RedisFailure
from carpool.broker.redis.gateway.rates import RedisRateBudget
from carpool.broker.redis.keys import Keys
from carpool.broker.redis.redis_ops import TICKS_A_SECOND, RedisOps
from carpool.core.clock import monotonic
from carpool.core.ports import RateAsk, RateTold
from support.client import Connection, Response, ask_once, inference_body
from support.gateway import HeldGpu
from support.processes import GatewayProcess, running_gateway, running_role, until
from support.rates import BucketModel, LoadShedder, limited
from support.redis_nodes import connected
from support.redis_servers import RedisCluster, RedisServer, running_redis

START_MS = 1_700_000_000_000
JSON = "Content-Type: application/json\r\n"


def new_keys() -> Keys:
    return Keys("test-" + secrets.token_hex(6))


async def ask(steps: RedisOps, question: RateAsk) -> RateTold:
    told: asyncio.Future[list[RateTold] | RedisFailure] = asyncio.get_running_loop().create_future()
    steps.ask_rates(steps.keys.shard_of_owner(question.owner), [question], told.set_result)
    answers = await told
    assert not isinstance(answers, RedisFailure)
    return answers[0]


def some_question(random: Random, per_minute: int, burst: int) -> RateAsk:
    need, want = random.choice([0, 1, 1, 5]), random.choice([0, 0, 3, 20])
    cost = random.choice([1, 1, 1, 3, burst, burst + 5, 500])
    return RateAsk("o", per_minute, burst + slack(per_minute), burst, need, want, cost)


class TestScript:
    async def test_it_does_what_its_model_does(self, redis_server: RedisServer) -> None:
        """The bounds are proved of the model (tests/property/test_rate_bounds.py)."""
        now_ms = START_MS

        def told_ms() -> bytes:
            return b"%d" % now_ms

        async with connected(redis_server.url) as nodes:
            for seed in range(40):
                random, model = Random(seed), BucketModel()
                steps = RedisOps(nodes, new_keys(), now_ms=told_ms)
                per_minute, burst = random.choice([7, 60, 999, 1000, 60_000]), random.choice([1, 10, 100])
                now_ms = START_MS + random.randint(0, 10**9)
                for number in range(30):
                    now_ms += random.choice([0, 1, 70, 900, 3100, -2000 if number % 9 == 8 else 20])
                    question = some_question(random, per_minute, burst)
                    expected = model.step(question, (now_ms - START_MS) * (TICKS_A_SECOND // 1000))
                    assert await ask(steps, question) == expected, (seed, number)

    async def test_a_key_goes_a_minute_after_its_bucket_is_full(self, redis_server: RedisServer) -> None:
        async with connected(redis_server.url) as nodes:
            steps = RedisOps(nodes, new_keys())
            await ask(steps, RateAsk("o", 600, 9, 5, 4, 3))
            shard = steps.keys.shard_of_owner("o")
            left_ms = await nodes.ask(shard.slot, b"PTTL", shard.rate("o"))
            assert 0 < left_ms <= 60_800

    async def test_on_a_cluster(self, redis_cluster: RedisCluster) -> None:
        async with connected(redis_cluster.url) as nodes:
            budget = RedisRateBudget(RedisOps(nodes, new_keys()))
            limits = SharedLimits(budget, is_reachable=lambda: True, sharers=lambda: 1)
            door = LoadShedder(monotonic)
            for number in range(50):
                door.knock(limits, limited(60, owner=f"owner {number}"))
            await until(lambda: not door.waiting)
            assert (len(door.came_in), door.refused) == (50, [])
            limits.close()


async def infer(connection: Connection, text: str = "x", headers: str = "") -> Response:
    return await connection.ask("POST", "/v1/inference", inference_body(text), JSON + headers)


class TestClients:
    async def test_what_a_client_sees(self, tmp_path: Path) -> None:
        settings = {"limits.anonymous": 5, "limits.burst": 50}
        async with running_gateway(tmp_path, "sim:?latency_ms=1", settings=settings) as gateway:
            connection = await Connection.open(gateway.port)
            plain = [await infer(connection) for _ in range(2)]
            own = await infer(connection, headers="X-Request-Id: my-id\r\n")
            body = b'{"model_id":"default","input_data":"x"}'
            predicted = await connection.ask("POST", "/v1/predict", body, JSON)
            task = await infer(connection, headers="Prefer: respond-async\r\n")
            answers = [*plain, own, predicted, task]
            assert [answer.status for answer in answers] == [200, 200, 200, 200, 202]
            for number, answer in enumerate(answers):
                assert answer.headers["ratelimit-policy"] == '"default";q=5;w=60'
                left, _, full_s = answer.headers["ratelimit"].partition(";t=")
                assert left == f'"default";r={4 - number}'
                assert 12 * number < int(full_s) <= 12 * (number + 1)
            assert own.headers["x-request-id"] == "my-id"
            refused = await infer(connection, headers="X-Request-Id: my-id\r\n")
            assert (refused.status, refused.json["type"]) == (429, "urn:carpool:error:rate-limited")
            assert refused.json["request_id"] == "my-id"
            assert 1 <= int(refused.headers["retry-after"]) <= 12
            assert refused.headers["ratelimit"].startswith('"default";r=0;t=')
            # Before the body is looked at; and on a connection that lives on.
            assert (await connection.ask("POST", "/v1/inference", b"{", JSON)).status == 429
            assert (await connection.ask("POST", "/v1/predict", b"{", JSON)).status == 429
            # Asking for a result counts for nothing.
            polls = [await connection.ask("GET", task.headers["location"] + "?wait_ms=5000") for _ in range(9)]
            assert {poll.status for poll in polls} == {200}
            assert (await connection.ask("DELETE", task.headers["location"])).status == 204
            await connection.close()

    async def test_strangers_have_no_limit_unless_one_is_set(self, tmp_path: Path) -> None:
        settings = {"limits.per_minute": 1, "limits.burst": 1, "limits.concurrent": 1}
        async with running_gateway(tmp_path, "sim:?latency_ms=1", settings=settings) as gateway:
            answer = await ask_once(gateway.port, "POST", "/v1/inference", inference_body("x"), JSON)
            assert "ratelimit" not in answer.headers
            assert await statuses_from("127.0.0.2", gateway, 5) == {200: 5}

    async def test_so_many_at_once(self, tmp_path: Path) -> None:
        with HeldGpu().running() as gpu:
            gpu.hold()
            settings = {"limits.anonymous": 1000, "limits.concurrent": 2}
            async with running_gateway(tmp_path, gpu.url, settings=settings) as gateway:
                first, second, third = [await Connection.open(gateway.port) for _ in range(3)]
                for held in (first, second):
                    held.send("POST", "/v1/inference", inference_body("x"), JSON)

                async def are_held() -> bool:
                    return await gateway.metric("carpool_held_requests") == 2

                await until(are_held)
                refused = await infer(third)
                assert (refused.status, refused.headers["retry-after"]) == (429, "1")
                assert "at once" in refused.json["detail"]
                # A task does not count, nor does what cannot be read; who leaves makes room.
                assert (await infer(third, headers="Prefer: respond-async\r\n")).status == 202
                assert (await third.ask("POST", "/v1/inference", b"{", JSON)).status == 400
                await first.abort()

                async def is_room() -> bool:
                    return await gateway.metric("carpool_held_requests") <= 2

                await until(is_room)
                third.send("POST", "/v1/inference", inference_body("x"), JSON)
                gpu.release()
                assert (await second.read()).status == 200
                assert (await third.read()).status == 200
                for _ in range(5):
                    assert (await infer(third)).status == 200
                await second.close()
                await third.close()


async def statuses_from(source: str, gateway: GatewayProcess, number: int) -> Counter[int]:
    """What requests from an address of this machine get."""
    opened = await asyncio.open_connection("127.0.0.1", gateway.port, local_addr=(source, 0))
    connection = Connection(*opened)
    answers = [await infer(connection) for _ in range(number)]
    await connection.close()
    return Counter(answer.status for answer in answers)


class TestProcesses:
    async def test_without_redis_each_gateway_has_its_part(self, tmp_path: Path) -> None:
        async with running_redis(tmp_path / "redis") as server:
            settings = {"broker.url": server.url, "limits.anonymous": 60, "limits.burst": 20}
            gpu = ("--upstream", "sim:?latency_ms=1")
            async with (
                running_role(tmp_path / "a", "serve", *gpu, settings=settings) as one,
                running_role(tmp_path / "b", "gateway", *gpu, settings=settings) as other,
            ):
                await one.until_ready()
                await other.until_ready()

                async def see_each_other() -> bool:
                    return {await gateway.metric("carpool_live_gateways") for gateway in (one, other)} == {2}

                await until(see_each_other)
                server.stop()
                try:
                    # The first ones find out; nobody is kept waiting for long.
                    began = time.monotonic()
                    statuses = [await statuses_from("127.0.0.2", gateway, 40) for gateway in (one, other)]
                    seconds = time.monotonic() - began
                    for each in statuses:
                        assert each.keys() <= {200, 429}
                        assert 10 <= each[200] <= 10 + seconds / 2 + 1
                finally:
                    server.go_on()

    async def test_a_client_that_leaves_at_the_door(self, tmp_path: Path) -> None:
        """While Redis is asked whether it may come in."""
        async with running_redis(tmp_path / "redis") as server:
            settings = {
                "broker.url": server.url,
                "limits.anonymous": 60,
                "limits.burst": 20,
                "broker.redis_timeout_ms": 20_000,
            }
            gpu = ("--upstream", "sim:?latency_ms=1")
            async with running_role(tmp_path / "a", "serve", *gpu, settings=settings) as gateway:
                await gateway.until_ready()
                stays = await Connection.open(gateway.port)
                assert (await infer(stays)).status == 200
                server.stop()
                try:
                    leaves = await Connection.open(gateway.port)
                    leaves.send("POST", "/v1/inference", inference_body("left"), JSON)
                    stays.send("POST", "/v1/inference", inference_body("stays"), JSON)
                    await asyncio.sleep(0.2)
                    await leaves.abort()
                    await asyncio.sleep(0.2)
                finally:
                    server.go_on()
                assert (await stays.read()).status == 200
                assert (await infer(stays)).status == 200
                await stays.close()
                gateway.terminate()
                assert await gateway.exit_code() == 0
                assert not gateway.log_messages("error")
