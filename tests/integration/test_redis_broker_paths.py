"""What the contract of a broker does not cover: real `carpool` processes that meet in a real Redis.

Most tests share a fleet of two gateways and one batcher, whose only slot is an upstream that the test holds and
releases. They leave it idle. All run in one event loop, because that upstream lives in it.
"""

import asyncio
import json
import secrets
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from carpool.broker.redis.client.address import parse_broker_url
from carpool.broker.redis.client.nodes import Nodes
from carpool.broker.redis.fleet.registry import Registry
from carpool.broker.redis.fleet.view import Heartbeat, ModelHeartbeat
from carpool.broker.redis.gateway.queue import RedisQueue
from carpool.broker.redis.keys import Keys
from carpool.broker.redis.redis_ops import RedisOps
from carpool.broker.redis.scripts import AUDIT
from carpool.core.clock import monotonic
from carpool.core.outcome import Output
from carpool.testing import Witness, make_request
from carpool.tools.doctor_checks import parse_audit
from support.checker import Checker
from support.client import Connection, Response, ask_once, inference_body
from support.processes import GatewayProcess, dlq, until
from support.redis_fleet import Clients, Fleet, WatchedUpstream, fleet_over, held_by
from support.redis_servers import RedisServer, running_redis
from support.upstreams import scripted_upstream

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("workshop")]

JSON = "Content-Type: application/json\r\n"
ASYNC_ONLY = "Prefer: respond-async\r\n"
ASYNC = JSON + ASYNC_ONLY
MAX_BATCH = 64
# Longer than a test waits for anything.
NEVER_S = 600
# A long poll: as long as one may be.
WAIT_MS = 30_000


class Workshop:
    """Two gateways, one batcher with one slot, and what they keep in Redis."""

    def __init__(self, fleet: Fleet, gpu: WatchedUpstream, server: RedisServer, keys: Keys) -> None:
        self.fleet = fleet
        self.gpu = gpu
        self.server = server
        self.keys = keys
        self.client = server.client()
        self.one, self.other = (place.process for place in fleet.gateways)
        self.batcher = fleet.batchers[0].process

    async def entries(self) -> tuple[int, int]:
        """Entries in the queue, and those of them that a batcher has; and that the shards count right.

        Entries come by plain commands and are counted by a script right behind these: in between they do not.
        """
        found: list[tuple[int, int]] = []

        async def are_counted() -> bool:
            found[:] = await self._counted_entries()
            return bool(found)

        await until(are_counted)
        return found[0]

    async def _counted_entries(self) -> list[tuple[int, int]]:
        held = taken = 0
        for shard in self.keys.shards:
            reply: Any = await self.client.eval(AUDIT.source, 1, shard.counts)  # type: ignore[arg-type]
            facts = parse_audit(shard.number, b"", reply)
            if facts.held_counted != facts.held:
                return []
            held += facts.held
            taken += facts.held - facts.unread
        return [(held, taken)]

    async def holds(self, held: int, taken: int) -> bool:
        return await self.entries() == (held, taken)

    @asynccontextmanager
    async def busy_gpu(self, gateway: GatewayProcess | None = None) -> AsyncIterator["asyncio.Task[Response]"]:
        """While the only slot has a call without an answer. Gives the request that is in it, of this gateway."""
        self.gpu.gate.clear()
        try:
            first = asyncio.create_task(ask(gateway or self.one, "first"))
            await until(lambda: self.gpu.in_flight == 1)
            yield first
        finally:
            self.gpu.gate.set()
            await first
            await until(lambda: self.holds(0, 0))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workshop(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> AsyncIterator[Workshop]:
    settings: dict[str, object] = {
        "broker.queue_timeout_s": NEVER_S,
        "broker.total_timeout_s": NEVER_S,
        "upstream.timeout_s": NEVER_S,
        "batching.max_batch": MAX_BATCH,
        "upstream.attempts": 1,
        "shedding.mode": "off",  # on a busy machine the GPU seems slow, and a door would refuse those who are to wait
    }
    gpu = WatchedUpstream()
    async with (
        own_namespace(redis_server) as namespace,
        scripted_upstream(gpu),
        fleet_over(
            tmp_path_factory.mktemp("workshop"), redis_server.url, settings | {"broker.namespace": namespace}
        ) as fleet,
    ):
        await asyncio.gather(
            fleet.add("gateway"), fleet.add("gateway"), fleet.add("batcher", "--upstream", gpu.url, "--slots", "1")
        )
        await fleet.wait_until_ready()
        workshop = Workshop(fleet, gpu, redis_server, Keys(namespace))
        async with workshop.client:
            yield workshop
        assert fleet.errors() == []


@asynccontextmanager
async def own_namespace(server: RedisServer) -> AsyncIterator[str]:
    """A name that nobody else uses; nothing is left in it at the end."""
    namespace = f"paths-{secrets.token_hex(4)}"
    yield namespace
    async with server.client() as client:
        names = [name async for name in client.scan_iter(match=f"{namespace}:*", count=1000)]
        if names:
            await client.unlink(*names)


async def ask(gateway: GatewayProcess, text: str, headers: str = JSON, **fields: object) -> Response:
    body = json.dumps({"input": text, **fields}).encode()
    return await ask_once(gateway.port, "POST", "/v1/inference", body, headers)


async def submit(gateway: GatewayProcess, text: str) -> str:
    accepted = await ask(gateway, text, ASYNC)
    assert accepted.status == 202, accepted.body
    task_id: str = accepted.json["task_id"]
    return task_id


async def result(gateway: GatewayProcess, task_id: str, wait_ms: int = 0) -> Response:
    return await ask_once(gateway.port, "GET", f"/v1/result/{task_id}?wait_ms={wait_ms}")


def problem(response: Response) -> str:
    """The code of the error in a response."""
    code: str = response.json["type"].rpartition(":")[2]
    return code


# Outcomes find those who wait for them.


async def test_two_gateways_and_two_batchers(workshop: Workshop) -> None:
    fleet, checker = workshop.fleet, Checker("pair")
    second = await fleet.add("batcher", "--upstream", "sim:?latency_ms=5&slots=2", "--max-batch", "8")
    clients = Clients(checker, fleet.ports)

    async def both_have_worked() -> bool:
        await asyncio.gather(*(clients.ask() for _ in range(50)), *(clients.run_task() for _ in range(10)))
        taken = [await place.process.metric("carpool_entries_taken_total") for place in fleet.batchers]
        return all(number >= 50 for number in taken)

    await until(both_have_worked)
    await clients.close()
    assert checker.verdict().is_clean
    assert checker.tally.keys() == {"ok"}
    second.process.terminate()
    assert await second.process.exit_code() == 0
    fleet.batchers.remove(second)
    await until(lambda: workshop.holds(0, 0))


async def test_a_task_of_one_gateway_is_told_and_deleted_by_the_other(workshop: Workshop) -> None:
    one, other = workshop.one, workshop.other
    async with workshop.busy_gpu():
        waits = await submit(one, "waits")
        told = (await result(other, waits)).json
        assert (told["status"], told["queue"]["place"]) == ("PENDING", 1)
        held = await workshop.entries()
        deleted = await submit(one, "deleted")
        poll = asyncio.create_task(result(one, deleted, WAIT_MS))
        await until(lambda: workshop.holds(held[0] + 1, held[1]))
        assert (await ask_once(other.port, "DELETE", f"/v1/result/{deleted}")).status == 204
        assert (await poll).status == 404  # it does not wait for what never comes
        assert (await result(other, deleted)).status == 404
        assert await workshop.holds(*held)  # nobody does that work
        poll = asyncio.create_task(result(other, waits, WAIT_MS))
        workshop.gpu.gate.set()
        assert (await poll).json["output"] == "stiaw"
    assert "deleted" not in workshop.gpu.seen
    assert (await result(one, waits)).json["status"] == "SUCCESS"
    assert (await ask_once(other.port, "DELETE", f"/v1/result/{waits}")).status == 204
    assert [(await result(gateway, waits)).status for gateway in (one, other)] == [404, 404]


async def test_a_client_that_leaves_has_its_entry_deleted(workshop: Workshop) -> None:
    async with workshop.busy_gpu():
        leaver = await Connection.open(workshop.other.port)
        leaver.send("POST", "/v1/inference", inference_body("leaves"), JSON)
        await until(lambda: workshop.holds(2, 1))
        await leaver.close()
        await until(lambda: workshop.holds(1, 1))
    assert "leaves" not in workshop.gpu.seen


async def test_a_task_outlives_a_client_that_leaves_at_once(workshop: Workshop) -> None:
    async with workshop.busy_gpu():
        leaver = await Connection.open(workshop.other.port)
        leaver.send("POST", "/v1/inference", inference_body("submitted"), ASYNC)
        await leaver.close()  # before it is told the task's id
        await until(lambda: workshop.holds(2, 1))
    await until(lambda: workshop.holds(0, 0))
    assert "submitted" in workshop.gpu.seen


async def test_a_deadline_of_its_own(workshop: Workshop) -> None:
    """While the only slot is taken: told in time by the gateway, gone from Redis, and never sent."""
    own = JSON + "X-Request-Timeout-Ms: 50\r\n"
    async with workshop.busy_gpu():
        asked = time.monotonic()
        hasty = await ask_once(workshop.other.port, "POST", "/v1/inference", inference_body("hasty"), own)
        assert time.monotonic() - asked >= 0.05
        assert (hasty.status, problem(hasty)) == (504, "deadline-exceeded")
        assert "within the 50 ms that the request itself allowed" in hasty.json["detail"]
        await until(lambda: workshop.holds(1, 1))
        task = await ask_once(workshop.one.port, "POST", "/v1/inference", inference_body("later"), own + ASYNC_ONLY)
        assert task.status == 202
        path = f"/v1/result/{task.json['task_id']}?wait_ms=5000"
        ended = await ask_once(workshop.other.port, "GET", path)
        assert (ended.json["status"], ended.json["error"]["status"]) == ("FAILED", 504)
        assert "`tasks.timeout_s`, or less where its client said so" in ended.json["error"]["detail"]
        await until(lambda: workshop.holds(1, 1))
    assert not {"hasty", "later"} & set(workshop.gpu.seen)


async def test_deadlines(workshop: Workshop) -> None:
    fleet, queue_s, total_s = workshop.fleet, 1.0, 4.0
    hasty = await fleet.add("gateway", settings={"broker.queue_timeout_s": queue_s, "broker.total_timeout_s": total_s})
    await fleet.wait_until_ready()
    started = time.monotonic()
    async with workshop.busy_gpu(hasty.process) as running:
        asked = time.monotonic()
        waiting = await ask(hasty.process, "too late")
        assert (waiting.status, problem(waiting)) == (504, "queue-timeout")
        assert "within 1 s (`broker.queue_timeout_s`)" in waiting.json["detail"]
        assert time.monotonic() - asked >= queue_s
        assert int(waiting.headers["retry-after"]) >= 1
        await until(lambda: workshop.holds(1, 1))
        # The gateway says so by itself, whatever the batcher does.
        workshop.batcher.process.send_signal(signal.SIGSTOP)
        try:
            assert ((await running).status, problem(await running)) == (504, "deadline-exceeded")
            assert (await running).json["detail"] == "no result within 4 s (`broker.total_timeout_s`)"
            assert time.monotonic() - started >= total_s
        finally:
            workshop.batcher.process.send_signal(signal.SIGCONT)
    assert "too late" not in workshop.gpu.seen
    hasty.process.terminate()
    assert await hasty.process.exit_code() == 0
    fleet.gateways.remove(hasty)


# What is taken, and in which order.


async def test_a_batcher_takes_no_more_than_its_slots_can_use(workshop: Workshop) -> None:
    requests: list[asyncio.Task[Response]] = []
    most = 0

    async def look() -> None:
        """What it has beyond what was answered: an outcome takes a moment to be acknowledged."""
        nonlocal most
        held = await held_by(workshop.client, workshop.batcher.name, workshop.keys)
        most = max(most, len(held - workshop.gpu.answered))

    workshop.gpu.begin_anew()
    workshop.gpu.gate.clear()
    for number in range(500):
        gateway = workshop.one if number % 2 else workshop.other
        requests.append(asyncio.create_task(ask(gateway, f"hoard-{number}")))

    async def all_wait() -> bool:
        await look()
        return most > 0 and (await workshop.entries())[0] == len(requests)

    try:
        await until(all_wait)
        for _ in range(10):
            await look()
    finally:
        workshop.gpu.gate.set()
    while not all(request.done() for request in requests):
        await look()
    answers = await asyncio.gather(*requests)
    assert [answer.json.get("output") for answer in answers] == [f"hoard-{number}"[::-1] for number in range(500)]
    assert 0 < most <= MAX_BATCH
    await until(lambda: workshop.holds(0, 0))


async def test_parameters_never_mix_in_a_batch(workshop: Workshop) -> None:
    batches: list[list[str]] = []
    workshop.gpu.when_called = batches.append
    async with workshop.busy_gpu():
        asked = [
            asyncio.create_task(ask((workshop.one, workshop.other)[n % 2], f"{n % 7}.{n}", parameters={"k": n % 7}))
            for n in range(140)
        ]
        await until(lambda: workshop.holds(141, 1))
    assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
    workshop.gpu.when_called = lambda inputs: None
    assert sorted(chain(*batches)) == sorted(["first", *(f"{n % 7}.{n}" for n in range(140))])
    assert all(len({text.partition(".")[0] for text in batch}) == 1 for batch in batches)


async def test_who_pays_goes_first_wherever_it_waits(workshop: Workshop) -> None:
    """Credentials have no tiers yet: a gateway's half of the broker in this process says who pays."""
    batches: list[list[str]] = []
    workshop.gpu.when_called = batches.append
    async with gateway_half(workshop) as (queue, witness):
        async with workshop.busy_gpu():
            for number in range(2 * MAX_BATCH):
                queue_request(queue, witness, f"free-{number}", tier=2)
                if number % 8 == 7:
                    await asyncio.sleep(0)  # the next ones go to another shard
            await until(lambda: workshop.holds(2 * MAX_BATCH + 1, 1))
            queue_request(queue, witness, "enterprise", tier=0)
            await until(lambda: workshop.holds(2 * MAX_BATCH + 2, 1))
        await until(lambda: queue.pending.held == 0)
    workshop.gpu.when_called = lambda inputs: None
    assert "enterprise" in batches[1]
    assert all(isinstance(told, Output) for (told,) in witness.told.values())


@asynccontextmanager
async def gateway_half(workshop: Workshop) -> AsyncIterator[tuple[RedisQueue, Witness]]:
    queues: list[RedisQueue] = []
    nodes = Nodes(parse_broker_url(workshop.server.url), changed=lambda: queues[0].nodes_changed())
    bounds: dict[str, Any] = {"waiting_max": 10_000, "bytes_max": 10**9, "lanes_max": 100, "models": ["default"]}
    offsets_ms = {b"s0": 50, b"s2": 500}
    queue = RedisQueue(RedisOps(nodes, workshop.keys), b"half", line_offsets_ms=offsets_ms, **bounds)
    queues.append(queue)
    nodes.start()
    try:
        await until(lambda: queue.mode == "redis")
        yield queue, Witness()
    finally:
        queue.close()
        await nodes.close()


def queue_request(queue: RedisQueue, witness: Witness, text: str, *, tier: int) -> None:
    value = json.dumps(text).encode()
    request = make_request(
        text,
        witness,
        now=monotonic(),
        model="default",
        value=value,
        tier=tier,
        queue_timeout_s=NEVER_S,
        total_timeout_s=NEVER_S,
    )
    assert queue.submit(request) is None


# What operators see and do.


async def test_dead_letters_on_the_command_line(workshop: Workshop) -> None:
    workshop.gpu.behaviour = "status 400"
    task_id = await submit(workshop.one, "refused")
    assert (await result(workshop.other, task_id, WAIT_MS)).json["status"] == "FAILED"
    workshop.gpu.behaviour = "good"
    assert "input-refused" in await dlq(workshop.one, "list")
    [letter] = json.loads(await dlq(workshop.other, "list", "--json"))["dead_letters"]
    assert letter["request_id"] == task_id
    number = str(letter["id"])
    assert '"refused"' in await dlq(workshop.other, "show", number)
    replayed = json.loads(await dlq(workshop.other, "replay", number, "--json"))
    assert (await result(workshop.one, replayed["task_id"], WAIT_MS)).json["output"] == "desufer"
    assert await dlq(workshop.one, "list") == "no dead letters\n"
    await until(lambda: workshop.holds(0, 0))


async def sees_slots(gateway: GatewayProcess, number: int) -> bool:
    """Whether a gateway has heard of so many that work."""
    healthy: int = (await gateway.health())["healthy_slots"]
    return healthy == number


async def test_a_gateway_sees_batchers_come_and_endpoints_go(tmp_path: Path, redis_server: RedisServer) -> None:
    settings: dict[str, object] = {"upstream.health_interval_s": 0.2, "gateway.drain_grace_s": 0.1}
    gpu = WatchedUpstream()
    async with (
        own_namespace(redis_server) as namespace,
        fleet_over(tmp_path, redis_server.url, settings | {"broker.namespace": namespace}) as fleet,
        redis_server.client() as client,
    ):
        gateway = (await fleet.add("gateway")).process
        ready = await ask_once(gateway.admin_port, "GET", "/internal/ready")
        assert (ready.status, b"no batcher lives" in ready.body) == (503, True)
        assert await gateway.metric("carpool_broker_mode") == 1
        assert await client.exists(Keys(namespace).replies(gateway.name.encode())) == 1
        task_id = await submit(gateway, "early")

        async with scripted_upstream(gpu):
            batcher = (await fleet.add("batcher", "--upstream", gpu.url, "--slots", "3")).process
            await fleet.wait_until_ready()
            assert (await result(gateway, task_id, WAIT_MS)).json["output"] == "ylrae"

            await until(lambda: sees_slots(gateway, 3))
            page = (await ask_once(gateway.admin_port, "GET", "/internal/fleet")).json
            assert [each["name"] for each in page["batchers"]] == [batcher.name]
            assert [each["name"] for each in page["gateways"]] == [gateway.name]
            [endpoint] = page["models"]["default"]["endpoints"]
            assert (endpoint["batcher"], endpoint["slots"]) == (batcher.name, 3)
        await gpu.hang_up()
        await until(lambda: sees_slots(gateway, 0))

        async def is_refused() -> bool:  # but for one now and then, to try it with
            answer = await ask(gateway, "nobody there")
            return (answer.status, "retry-after" in answer.headers) == (503, True)

        await until(is_refused)

        batcher.kill()
        gateway.terminate()
        assert await gateway.exit_code() == 0
        assert await client.exists(Keys(namespace).replies(gateway.name.encode())) == 0


async def test_endpoints_that_have_all_failed_are_tried_again_by_requests(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    gpu = WatchedUpstream()
    async with (
        own_namespace(redis_server) as namespace,
        fleet_over(tmp_path, redis_server.url, {"broker.namespace": namespace}) as fleet,
        scripted_upstream(gpu),
    ):
        gateway = (await fleet.add("gateway")).process
        await fleet.add("batcher", "--upstream", gpu.url, settings={"upstream.breaker_pause_s": 0.3})
        await fleet.wait_until_ready()
        assert (await ask(gateway, "abc")).json["output"] == "cba"
        gpu.behaviour = "garbage"

        async def is_told(code: str) -> bool:
            await asyncio.sleep(0.02)  # most of these are answered at once
            return problem(await ask(gateway, "abc")) == code

        await until(lambda: is_told("upstream-down"))
        seen = gpu.calls
        await until(lambda: is_told("upstream-protocol-fault"))  # by a try, which fails
        assert gpu.calls > seen
        await until(lambda: is_told("upstream-down"))

        async def is_ready() -> bool:  # some clients ask that before they send anything
            return (await ask_once(gateway.port, "GET", "/v1/models/default")).json["ready"] is True

        await until(is_ready)
        gpu.behaviour = "good"

        async def is_back() -> bool:
            await asyncio.sleep(0.02)
            return (await ask(gateway, "abc")).status == 200

        await until(is_back)
        # For all of them, not for one now and then.
        await until(lambda: sees_slots(gateway, 1))
        answers = await asyncio.gather(*(ask(gateway, "abc") for _ in range(20)))
        assert {answer.status for answer in answers} == {200}


@asynccontextmanager
async def idle_batcher(url: str, namespace: str, shards: int) -> AsyncIterator[None]:
    """The heartbeat of a batcher that takes nothing: with none alive for 3 s, all are refused for that."""
    nodes = Nodes(parse_broker_url(url))
    nodes.start()
    said = Heartbeat("ok", models={"default": ModelHeartbeat(slots=1, healthy_slots=1)})
    registry = Registry(nodes, Keys(namespace, shards), name=b"idle", role="batcher", describe=lambda: said)
    registry.start()
    try:
        yield
    finally:
        registry.close()
        await nodes.close()


async def test_the_queue_is_bounded(tmp_path: Path, redis_server: RedisServer) -> None:
    settings: dict[str, object] = {"broker.waiting_max": 32, "broker.shards": 4}
    async with (
        own_namespace(redis_server) as namespace,
        fleet_over(tmp_path, redis_server.url, settings | {"broker.namespace": namespace}) as fleet,
        idle_batcher(redis_server.url, namespace, shards=4),
    ):
        one, other = (place.process for place in await asyncio.gather(fleet.add("gateway"), fleet.add("gateway")))
        answers = [await ask(gateway, "x", ASYNC) for gateway in (one, other) for _ in range(60)]
        statuses = Counter(answer.status for answer in answers)
        # By shard, so that not all of them need to be full.
        assert statuses.keys() == {202, 503}
        assert 24 <= statuses[202] <= 32
        refused = next(answer for answer in answers if answer.status == 503)
        assert (problem(refused), refused.headers["retry-after"]) == ("queue-full", "1")
        # Those who hold the line are in the same queue.
        answers = await asyncio.gather(*(ask(one, "x") for _ in range(40)))
        assert Counter(map(problem, answers))["queue-full"] >= 32


async def test_one_process_for_all_and_a_redis_that_fills_up(tmp_path: Path) -> None:
    async with (
        running_redis(tmp_path / "redis") as server,
        server.client() as client,
        fleet_over(tmp_path, server.url) as fleet,
    ):
        process = (await fleet.add("serve", "--upstream", "sim:?latency_ms=5&slots=2")).process
        await fleet.wait_until_ready()
        assert (await ask(process, "abc")).json["output"] == "cba"
        task_id = await submit(process, "def")
        assert (await result(process, task_id, WAIT_MS)).json["output"] == "fed"

        async def is_seen() -> bool:
            return {"gateways": 1, "batchers": 1, "healthy_slots": 2}.items() <= (await process.health()).items()

        await until(is_seen)

        async def statuses(*expected: int) -> bool:
            answers = [await ask(process, "x"), await ask(process, "x", ASYNC)]
            for answer in answers:
                if answer.status == 429:
                    assert (problem(answer), int(answer.headers["retry-after"]) >= 1) == ("broker-memory", True)
            return tuple(answer.status for answer in answers) == expected

        used = (await client.info("memory"))["used_memory"]
        await client.config_set("maxmemory", int(used / 0.85))
        await until(lambda: statuses(429, 429))
        assert (await result(process, task_id)).json["output"] == "fed"
        await client.config_set("maxmemory", 4 * used)
        await until(lambda: statuses(200, 202))
        assert fleet.errors() == []
