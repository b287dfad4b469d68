"""Webhooks over Redis: any gateway sends them, and another one when that dies."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.client import ask_once
from support.processes import GatewayProcess, running_role, until
from support.redis_servers import RedisServer
from support.upstreams import answer_bytes
from support.webhooks import JSON, Receiver, allowing, condition, receiver, submit, submit_many

SIM = "sim:?latency_ms=5&slots=8"


@asynccontextmanager
async def served(
    directory: Path,
    redis: RedisServer,
    hooks: Receiver,
    upstream: str = SIM,
    task_timeout_s: float = 600,
    **settings: object,
) -> AsyncIterator[GatewayProcess]:
    """Both halves in one process."""
    given = allowing(hooks, **settings) | {
        "broker.namespace": directory.name,
        "upstream.attempts": 1,
        "tasks.timeout_s": task_timeout_s,
    }
    flags = ("--broker", redis.url, "--upstream", upstream)
    async with running_role(directory, "serve", *flags, settings=given) as gateway:
        yield gateway


async def listed(gateway: GatewayProcess) -> dict[str, Any]:
    answer: dict[str, Any] = (await ask_once(gateway.admin_port, "GET", "/internal/webhooks")).json
    return answer


async def test_delivers_lists_and_sends_again(tmp_path: Path, redis_server: RedisServer) -> None:
    async with receiver() as hooks, served(tmp_path, redis_server, hooks, backoff_s=3600) as gateway:
        task = (await submit(gateway.port, hooks.url)).json["task_id"]
        await until(lambda: len(hooks.came) == 1)
        result = await ask_once(gateway.port, "GET", f"/v1/result/{task}")
        assert hooks.came[0].json == result.json
        assert result.json["output"] == "cba"

        async def shown() -> list[tuple[str, int, str]]:
            found = (await listed(gateway))["webhooks"]
            return sorted((each["failure"], each["attempts"], each["url"]) for each in found)

        await until(condition(shown, []))
        hooks.answer = lambda webhook: answer_bytes(b"", 500)
        tasks = await submit_many(gateway.port, hooks.url, 3)
        url = hooks.url.partition("?")[0]
        await until(condition(shown, [("status 500", 1, url)] * 3))
        hooks.answer = lambda webhook: answer_bytes(b"", 204)
        first, *_ = tasks
        one = await ask_once(gateway.admin_port, "POST", f"/internal/webhooks/{first}/retry")
        assert (one.status, one.json) == (202, {"retried": 1})
        await until(lambda: hooks.ids[first] == 2)
        await until(condition(shown, [("status 500", 1, url)] * 2))
        assert (await ask_once(gateway.admin_port, "POST", f"/internal/webhooks/{first}/retry")).status == 404
        everything = await ask_once(gateway.admin_port, "POST", "/internal/webhooks/retry")
        assert everything.json == {"retried": 2}
        await until(condition(shown, []))
        await until(condition(lambda: gateway.metric("carpool_webhooks_waiting"), 0))
        assert await gateway.metric("carpool_webhook_bytes") == 0
        assert hooks.ids == {task: 1} | dict.fromkeys(tasks, 2)


async def test_when_too_much_waits_no_more_is_accepted(tmp_path: Path, redis_server: RedisServer) -> None:
    async with receiver() as hooks, served(tmp_path, redis_server, hooks, bytes_max=1000, timeout_s=600) as gateway:
        hooks.gate.clear()
        await submit_many(gateway.port, hooks.url, 2)
        await until(lambda: hooks.in_flight == 2)

        async def last_answer() -> tuple[int, str]:
            refused = await submit(gateway.port, hooks.url)
            return refused.status, refused.json.get("type", "")

        await until(condition(last_answer, (503, "urn:carpool:error:webhooks-full")))
        plain = {"input": "x", "mode": "async"}
        assert (await ask_once(gateway.port, "POST", "/v1/inference", json.dumps(plain).encode(), JSON)).status == 202
        hooks.gate.set()

        async def is_accepted() -> bool:
            return (await submit(gateway.port, hooks.url)).status == 202

        await until(is_accepted)
