"""Gateways and batchers as real processes over a real Redis, as a user starts them."""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import redis.asyncio

from carpool.core.snapshot import FleetState, Health
from support.client import ask_once, inference_body
from support.forks import Started, fork_carpool
from support.processes import CLEAN_ENVIRONMENT, PATIENCE_S, carpool, until
from support.redis_servers import RedisServer

SIM = "sim:?latency_ms=20&slots=8"
JSON = "Content-Type: application/json\r\n"
_SERVING = re.compile(r"(?:serving on 127\.0\.0\.1:(\d+)|batching), admin on 127\.0\.0\.1:(\d+)")
_STARTED = re.compile(r'"process (\d) of 2 started", "pid": (\d+)')


class Running:
    """One `carpool` process and its log."""

    def __init__(self, process: Started, log: Path) -> None:
        self.process = process
        self.log = log

    def ports(self) -> list[tuple[int, int]]:
        """Port and admin port of each process that serves by now."""
        return [(int(port or 0), int(admin)) for port, admin in _SERVING.findall(self.log.read_text())]

    def pids(self) -> dict[str, int]:
        """The last process at each place of a row."""
        return {number: int(pid) for number, pid in _STARTED.findall(self.log.read_text())}

    async def status(self) -> int | None:
        """The exit status, once it has left."""
        await until(lambda: self.process.poll() is not None)
        return self.process.poll()


def start(command: list[str], log: Path, environment: dict[str, str]) -> Running:
    with log.open("wb") as output:
        line = [*command, "--port", "0", "--log-format", "json"]
        return Running(fork_carpool(line, output.fileno(), output.fileno(), environment, log.parent), log)


@asynccontextmanager
async def started(directory: Path, redis: RedisServer, *commands: list[str]) -> AsyncIterator[list[Running]]:
    """These commands on free ports, until the block ends; ready is another matter."""
    environment = CLEAN_ENVIRONMENT | {"CARPOOL_BROKER_URL": redis.url, "CARPOOL_BROKER_NAMESPACE": directory.name}
    environment |= {"CARPOOL_GATEWAY_DRAIN_GRACE_S": "0.1"}
    environment |= {"CARPOOL_BROKER_QUEUE_TIMEOUT_S": "600", "CARPOOL_BROKER_TOTAL_TIMEOUT_S": "600"}
    running: list[Running] = []
    try:
        for number, command in enumerate(commands):
            running.append(start(command, directory / f"{number}.log", environment))
        yield running
    finally:
        for each in running:
            each.process.kill()  # children leave with their parent
            each.process.wait(PATIENCE_S)


async def is_ready(admin_port: int) -> bool:
    return (await ask_once(admin_port, "GET", "/internal/ready")).status == 200


async def sees(admin_port: int, **numbers: int) -> bool:
    """Whether these are the numbers of `/internal/health`."""
    health: dict[str, object] = (await ask_once(admin_port, "GET", "/internal/health")).json
    return numbers.items() <= health.items()


async def answer(port: int, text: str) -> str:
    response = await ask_once(port, "POST", "/v1/inference", inference_body(text), JSON)
    assert response.status == 200, response.body
    output: str = response.json["output"]
    return output


async def answers_again(port: int) -> bool:
    """Whether the gateway that gets this one knows of a batcher by now."""
    response = await ask_once(port, "POST", "/v1/inference", inference_body("again"), JSON)
    return response.status == 200 and response.json["output"] == "niaga"


async def test_a_task_of_one_gateway_is_told_by_the_other(tmp_path: Path, redis_server: RedisServer) -> None:
    batcher = ["batcher", "--upstream", SIM]
    async with started(tmp_path, redis_server, ["gateway"], ["gateway"], batcher, batcher) as fleet:
        await until(lambda: all(each.ports() for each in fleet))
        (one, one_admin), (other, other_admin) = fleet[0].ports()[0], fleet[1].ports()[0]
        await until(lambda: is_ready(one_admin))
        await until(lambda: is_ready(other_admin))

        accepted = await ask_once(
            one, "POST", "/v1/inference", inference_body("far"), JSON + "Prefer: respond-async\r\n"
        )
        assert accepted.status == 202
        told = await ask_once(other, "GET", f"/v1/result/{accepted.json['task_id']}?wait_ms=30000")
        assert (told.json["status"], told.json["output"]) == ("SUCCESS", "raf")
        assert [await answer(one, "abc"), await answer(other, "xyz")] == ["cba", "zyx"]
        await until(lambda: sees(one_admin, gateways=2, batchers=2, healthy_slots=16))
        assert (await ask_once(one_admin, "GET", "/internal/health")).read_as(Health).broker == "redis"
        assert (await ask_once(one_admin, "GET", "/internal/fleet")).read_as(FleetState).batchers
        for each in fleet:
            each.process.terminate()
        assert [await each.status() for each in fleet] == [0, 0, 0, 0]


async def test_two_processes_on_one_port(tmp_path: Path, redis_server: RedisServer) -> None:
    command = ["serve", "--upstream", SIM, "--processes", "2", "--admin-port", "0"]
    async with started(tmp_path, redis_server, command) as [parent]:
        await until(lambda: len(parent.ports()) == 2)
        [port] = {port for port, _ in parent.ports()}
        for _, admin in parent.ports():
            await until(lambda admin=admin: is_ready(admin))
            # One of them is the batcher: the endpoint's slots are there once.
            await until(lambda admin=admin: sees(admin, gateways=2, batchers=1, healthy_slots=8))
        assert await asyncio.gather(*(answer(port, f"{n}0") for n in range(1, 9))) == [f"0{n}" for n in range(1, 9)]

        # The one that is the batcher too.
        os.kill(parent.pids()["1"], signal.SIGKILL)
        await until(lambda: len(parent.ports()) == 3)
        await until(lambda: is_ready(parent.ports()[2][1]))
        await until(lambda: answers_again(port))
        errors = [line for line in map(json.loads, parent.log.read_text().splitlines()) if line["level"] == "error"]
        assert [error["message"] for error in errors] == [
            "process 1 was ended by SIGKILL; it is started again in 0.1 s"
        ]

        parent.process.terminate()
        assert await parent.status() == 0


async def test_another_number_of_shards_than_the_fleets_is_refused(tmp_path: Path, redis_server: RedisServer) -> None:
    own = {"CARPOOL_BROKER_URL": redis_server.url, "CARPOOL_BROKER_NAMESPACE": tmp_path.name}
    commands = [["batcher", "--upstream", SIM], ["gateway"], ["serve", "--upstream", SIM]]
    async with started(tmp_path, redis_server, ["gateway"]) as [gateway]:
        await until(lambda: len(gateway.ports()) == 1)
        for command in commands:
            run = partial(carpool, *command, "--port", "0", cwd=tmp_path, CARPOOL_BROKER_SHARDS="8", **own)
            done = await asyncio.to_thread(run)
            assert done.returncode == 2, command
            assert "broker.shards is 8 here and 16 in the fleet" in done.stderr.splitlines()[-1]


async def test_a_batcher_takes_nothing_before_the_fleet_has_let_it_in(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """It does not know yet who else could serve a request that its endpoint fails; or it is not let in at all."""
    own = {"CARPOOL_BROKER_URL": redis_server.url, "CARPOOL_BROKER_NAMESPACE": tmp_path.name}
    async with started(tmp_path, redis_server, ["gateway"]) as [gateway]:
        await until(lambda: len(gateway.ports()) == 1)
        [(port, _)] = gateway.ports()
        for number in range(64):
            body = json.dumps({"input": str(number), "mode": "async"}).encode()
            assert (await ask_once(port, "POST", "/v1/inference", body, JSON)).status == 202
        run = partial(carpool, "batcher", "--upstream", SIM, "--port", "0", cwd=tmp_path, CARPOOL_BROKER_SHARDS="8")
        assert (await asyncio.to_thread(partial(run, **own))).returncode == 2
    async with redis.asyncio.from_url(redis_server.url) as client:
        streams = [stream async for stream in client.scan_iter(match=f"{tmp_path.name}:*:q:*")]
        assert sum([await client.xlen(stream) for stream in streams]) == 64
        assert sum([(await client.xpending(stream, "batchers"))["pending"] for stream in streams]) == 0
