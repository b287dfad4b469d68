"""Gateways and batchers as real processes over a real Redis, as a user starts them."""

import asyncio
import os
import re
import signal
from pathlib import Path

from support.client import ask_once, inference_body
from support.processes import running_role, until
from support.redis_servers import RedisServer

SIM = "sim:?latency_ms=20&slots=8"
_SERVING = re.compile(r"serving on 127\.0\.0\.1:(\d+), admin on 127\.0\.0\.1:(\d+)")
_STARTED = re.compile(r'"process (\d) of 2 started", "pid": (\d+)')


def settings(directory: Path, server: RedisServer) -> dict[str, object]:
    return {"broker.url": server.url, "broker.namespace": directory.name, "gateway.drain_grace_s": 0.1}


async def is_ready(admin_port: int) -> bool:
    return (await ask_once(admin_port, "GET", "/internal/ready")).status == 200


async def sees(admin_port: int, **numbers: int) -> bool:
    """Whether these are the numbers of `/internal/health`."""
    health: dict[str, object] = (await ask_once(admin_port, "GET", "/internal/health")).json
    return numbers.items() <= health.items()


async def answer(port: int, text: str) -> str | None:
    response = await ask_once(port, "POST", "/v1/inference", inference_body(text))
    output: str | None = response.json["output"] if response.status == 200 else None
    return output


async def test_two_processes_on_one_port(tmp_path: Path, redis_server: RedisServer) -> None:
    flags = ("--upstream", SIM, "--processes", "2", "--admin-port", "0")
    async with running_role(tmp_path, "serve", *flags, settings=settings(tmp_path, redis_server)) as parent:

        def ports() -> list[tuple[int, int]]:
            """Port and admin port of each process that serves by now."""
            return [(int(port), int(admin)) for port, admin in _SERVING.findall(parent.log.read_text())]

        await until(lambda: len(ports()) == 2)
        [port] = {port for port, _ in ports()}
        for _, admin in ports():
            await until(lambda admin=admin: is_ready(admin))
            # One of them is the batcher: the endpoint's slots are there once.
            await until(lambda admin=admin: sees(admin, gateways=2, batchers=1, healthy_slots=8))
        assert await asyncio.gather(*(answer(port, f"{n}0") for n in range(1, 9))) == [f"0{n}" for n in range(1, 9)]

        # The one that is the batcher too.
        os.kill(int(dict(_STARTED.findall(parent.log.read_text()))["1"]), signal.SIGKILL)
        await until(lambda: len(ports()) == 3)
        await until(lambda: is_ready(ports()[2][1]))

        async def answers_again() -> bool:
            """Whether the gateway that gets this one knows of a batcher by now."""
            return await answer(port, "again") == "niaga"

        await until(answers_again)
        assert parent.log_messages("error") == ["process 1 was ended by SIGKILL; it is started again in 0.1 s"]
        parent.terminate()
        assert await parent.exit_code() == 0
