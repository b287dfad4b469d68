"""Webhooks of a real gateway to a real receiver: what is sent, again and again, and where nothing is sent."""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support.client import ask_once
from support.processes import GatewayProcess, carpool, running_gateway, until
from support.redis_servers import RedisServer
from support.upstreams import answer_bytes
from support.webhooks import JSON, OTHER_SECRET, SECRET, Receiver, allowing, condition, receiver, submit, submit_many

SIM = "sim:?latency_ms=5&slots=8"
MIB = 1024 * 1024
BOUNDS = ("carpool.embedded.WEBHOOK_BYTES_MAX", "carpool.composition.redis_context.WEBHOOK_BYTES_MAX")
each_broker = pytest.mark.parametrize("redis", ["embedded", "redis"], indirect=True)
PAGE = Path(__file__).parents[2] / "docs" / "webhooks.md"


@asynccontextmanager
async def served(
    directory: Path, *receivers: Receiver, redis: RedisServer | None = None, bytes_max: int = MIB, **times: float
) -> AsyncIterator[GatewayProcess]:
    """One process; over Redis it is both halves."""
    given = allowing(*receivers, **times) | dict.fromkeys(BOUNDS, bytes_max)
    if redis is not None:
        given |= {"broker.url": redis.url, "broker.namespace": directory.name}
    async with running_gateway(directory, SIM, settings=given) as gateway:
        yield gateway


@pytest.fixture
def redis(request: pytest.FixtureRequest, redis_server: RedisServer) -> RedisServer | None:
    return redis_server if request.param == "redis" else None


async def listed(gateway: GatewayProcess) -> dict[str, Any]:
    answer: dict[str, Any] = (await ask_once(gateway.admin_port, "GET", "/internal/webhooks")).json
    return answer


async def waiting(gateway: GatewayProcess) -> int:
    total: int = (await listed(gateway))["total"]
    return total


class TestDelivery:
    async def test_the_payload_is_the_result_and_gone_means_no_more(self, tmp_path: Path) -> None:
        async with receiver() as hooks, served(tmp_path, hooks) as gateway:
            task = (await submit(gateway.port, hooks.url)).json["task_id"]
            await until(lambda: len(hooks.came) == 1)
            (webhook,) = hooks.came
            result = await ask_once(gateway.port, "GET", f"/v1/result/{task}")
            assert webhook.json == result.json
            assert (webhook.json["status"], webhook.json["output"]) == ("SUCCESS", "cba")
            assert webhook.headers["content-type"] == "application/json"
            await until(condition(lambda: gateway.metric(r'carpool_webhook_attempts_total\{result="delivered"\}'), 1))
            assert await gateway.metric("carpool_webhooks_waiting") == 0
            assert await gateway.metric("carpool_webhook_bytes") == 0
            hooks.answer = lambda webhook: answer_bytes(b"", 410)  # gone: no more of this
            await submit(gateway.port, hooks.url)
            await until(condition(lambda: gateway.metric(r'carpool_webhook_attempts_total\{result="given_up"\}'), 1))
            assert await waiting(gateway) == 0 and len(hooks.came) == 2
            (line,) = [each for each in gateway.log.read_text().splitlines() if "given up" in each]
            assert "410" in line and "canary" not in line

    async def test_it_comes_again_until_it_is_taken_with_the_same_id(self, tmp_path: Path) -> None:
        """Whatever the receiver does: errors, a redirect, no HTTP, an endless answer, a hang-up, silence."""
        async with receiver() as elsewhere, receiver() as hooks:
            odd = [
                answer_bytes(b"", 500),
                answer_bytes(b"", 302, f"Location: {elsewhere.url}\r\n"),
                b"no HTTP at all\r\n\r\n",
                b"HTTP/1.1 500 x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"ffff\r\n" + b"x" * 0xFFFF + b"\r\n",
                answer_bytes(b"", 503, "Retry-After: 1\r\n"),
                None,
                answer_bytes(b"", 200),
            ]
            answers = iter(odd)
            hooks.answer = lambda webhook: next(answers)
            async with served(tmp_path, elsewhere, hooks, timeout_s=0.5, backoff_s=0.01) as gateway:
                task = (await submit(gateway.port, hooks.url)).json["task_id"]
                await until(condition(lambda: waiting(gateway), 0))
                await until(condition(lambda: gateway.metric("carpool_webhooks_waiting"), 0))
                assert hooks.ids == {task: len(odd)}
                assert len({webhook.body for webhook in hooks.came}) == 1
                assert elsewhere.connections == 0
                logged = gateway.log.read_text()
                assert "canary-in-the-url" not in logged and "cba" not in logged

    async def test_both_secrets_sign_and_a_reload_changes_them(self, tmp_path: Path) -> None:
        async with receiver() as hooks:
            settings = allowing(hooks)
            del settings["webhooks.secrets"]
            file = tmp_path / "carpool.toml"
            file.write_text(f'[webhooks]\nsecrets = ["{OTHER_SECRET}", "{SECRET}"]\n')
            async with running_gateway(tmp_path, SIM, settings=settings) as gateway:
                await submit(gateway.port, hooks.url)
                await until(lambda: len(hooks.came) == 1)
                assert hooks.came[0].is_signed_with(SECRET) and hooks.came[0].is_signed_with(OTHER_SECRET)
                file.write_text(f'[webhooks]\nsecrets = ["{OTHER_SECRET}"]\n')
                gateway.reload()
                await until(lambda: "read the configuration again" in gateway.log.read_text())
                await submit(gateway.port, hooks.url)
                await until(lambda: len(hooks.came) == 2)
                assert not hooks.came[1].is_signed_with(SECRET) and hooks.came[1].is_signed_with(OTHER_SECRET)

    @each_broker
    async def test_when_too_much_waits_no_more_is_accepted(self, tmp_path: Path, redis: RedisServer | None) -> None:
        async with (
            receiver() as hooks,
            served(tmp_path, hooks, redis=redis, bytes_max=1000, timeout_s=600) as gateway,
        ):
            hooks.gate.clear()
            await submit_many(gateway.port, hooks.url, 2)
            await until(lambda: hooks.in_flight == 2)

            async def last_answer() -> tuple[int, str, bool]:
                """Over Redis a gateway learns of what waits a moment later."""
                told = await submit(gateway.port, hooks.url)
                return told.status, told.json.get("type", ""), "retry-after" in told.headers

            await until(condition(last_answer, (503, "urn:carpool:error:webhooks-full", True)))
            assert await gateway.submit("x")
            hooks.gate.set()

            async def is_accepted() -> bool:
                return (await submit(gateway.port, hooks.url)).status == 202

            await until(is_accepted)


class TestOperators:
    @each_broker
    async def test_list_and_retry(self, tmp_path: Path, redis: RedisServer | None) -> None:
        async with receiver() as hooks, served(tmp_path, hooks, redis=redis, backoff_s=3600) as gateway:
            delivered = (await submit(gateway.port, hooks.url)).json["task_id"]
            await until(lambda: len(hooks.came) == 1)
            assert hooks.came[0].json == await gateway.result(delivered)
            await until(condition(lambda: waiting(gateway), 0))
            hooks.answer = lambda webhook: answer_bytes(b"", 500)
            tasks = await submit_many(gateway.port, hooks.url, 3)
            await until(lambda: len(hooks.came) == 4)

            async def failures() -> list[str]:
                return [each["failure"] for each in (await listed(gateway))["webhooks"]]

            await until(condition(failures, ["status 500"] * 3))
            (first, *_) = (await listed(gateway))["webhooks"]
            assert (first["url"], first["attempts"]) == (hooks.url.partition("?")[0], 1)
            assert first["due_in_s"] > 0 and first["task_id"] in tasks
            admin = ("--admin", f"http://127.0.0.1:{gateway.admin_port}")
            shown = await asyncio.to_thread(lambda: carpool("webhooks", "list", *admin))
            assert shown.returncode == 0 and all(task in shown.stdout for task in tasks)
            assert "canary" not in shown.stdout
            hooks.answer = lambda webhook: answer_bytes(b"", 204)
            one = await ask_once(gateway.admin_port, "POST", f"/internal/webhooks/{first['task_id']}/retry")
            assert (one.status, one.json) == (202, {"retried": 1})
            await until(lambda: hooks.ids[first["task_id"]] == 2)
            await until(condition(lambda: waiting(gateway), 2))
            again = await ask_once(gateway.admin_port, "POST", f"/internal/webhooks/{first['task_id']}/retry")
            assert again.status == 404
            everything = await asyncio.to_thread(lambda: carpool("webhooks", "retry", "--all", *admin))
            assert (everything.returncode, everything.stdout) == (0, "2 to be sent now\n")
            await until(condition(lambda: waiting(gateway), 0))
            assert hooks.ids == {delivered: 1} | dict.fromkeys(tasks, 2)
            await until(condition(lambda: gateway.metric("carpool_webhooks_waiting"), 0))
            assert await gateway.metric("carpool_webhook_bytes") == 0


class TestWhereNothingIsSent:
    async def test_hosts_and_addresses_that_are_not_allowed(self, tmp_path: Path) -> None:
        """`localhost` is on the list, and private addresses are not allowed: the name is, what it stands for is not."""
        async with receiver() as hooks:
            settings = allowing(hooks, allow_private="false", backoff_s=3600) | {
                "webhooks.hosts": f"localhost:{hooks.port},127.0.0.1:{hooks.port}"
            }
            async with running_gateway(tmp_path, SIM, settings=settings) as gateway:
                for url in (
                    hooks.url,
                    f"http://[::ffff:127.0.0.1]:{hooks.port}/",
                    "http://169.254.169.254/latest/meta-data",
                    f"http://localhost:{hooks.port}@example.org/",
                    f"http://localhost:{hooks.port + 1}/",
                    "file:///etc/passwd",
                ):
                    assert (await submit(gateway.port, url)).status == 400, url
                accepted = await submit(gateway.port, f"http://localhost:{hooks.port}/hooks")
                assert accepted.status == 202

                async def failures() -> list[str]:
                    return [each["failure"] for each in (await listed(gateway))["webhooks"]]

                await until(condition(failures, ["the address is not allowed"]))
                assert hooks.connections == 0


class TestRestarts:
    async def test_sigterm_while_a_webhook_is_under_way_and_where_they_are_turned_off(self, tmp_path: Path) -> None:
        async with receiver() as hooks:
            hooks.gate.clear()
            async with served(tmp_path, hooks, timeout_s=600) as gateway:
                task = (await submit(gateway.port, hooks.url)).json["task_id"]
                await until(lambda: hooks.in_flight == 1)
                os.kill(gateway.process.pid, signal.SIGTERM)
                assert await gateway.exit_code() == 0
            hooks.gate.set()
            async with running_gateway(tmp_path, SIM) as gateway:  # it waits, and no other is accepted
                assert await waiting(gateway) == 1
                assert "webhooks wait and are not sent" in gateway.log.read_text()
                refused = await submit(gateway.port, "https://example.org/")
                assert (refused.status, refused.json["type"]) == (400, "urn:carpool:error:callback-denied")
                synchronous = json.dumps({"input": "x", "callback_url": "https://example.org/"}).encode()
                answer = await ask_once(gateway.port, "POST", "/v1/inference", synchronous, JSON)
                assert (answer.status, answer.json["type"]) == (400, "urn:carpool:error:malformed")
            async with served(tmp_path, hooks) as gateway:
                await until(lambda: hooks.ids[task] == 2)
                await until(condition(lambda: waiting(gateway), 0))


def test_the_snippet_of_the_page_verifies() -> None:
    """As a receiver would run it, on a webhook made here by hand."""
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(compile(snippet, PAGE.name, "exec"), namespace)
    from carpool.broker.webhooks.rules import secret_of, signed_headers

    body = b'{"task_id":"t","status":"SUCCESS"}'
    now = 1_700_000_000
    for signed_with in ([SECRET], [OTHER_SECRET, SECRET]):
        headers = signed_headers("t", now, body, [secret_of(secret) for secret in signed_with])
        assert namespace["verify"](headers, body, SECRET, now + 60) == {"task_id": "t", "status": "SUCCESS"}
        for wrong in ((headers, body + b" ", SECRET, now), (headers, body, SECRET, now + 3600)):
            with pytest.raises(ValueError, match="webhook"):
                namespace["verify"](*wrong)
    with pytest.raises(ValueError, match="webhook"):
        namespace["verify"](signed_headers("t", now, body, [secret_of(OTHER_SECRET)]), body, SECRET, now)
