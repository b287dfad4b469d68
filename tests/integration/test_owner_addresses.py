"""Whom requests count for, seen from outside: clients with addresses of their own, and what is kept of them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.client import Connection, Response, ask_once, inference_body
from support.processes import GatewayProcess, until
from support.redis_servers import RedisServer
from support.stage import stage
from support.upstreams import ScriptedUpstream, let_work_once, scripted_upstream

JSON = "Content-Type: application/json\r\n"
ASYNC = JSON + "Prefer: respond-async\r\n"
PROXY, OTHER_PROXY, CLIENT = "127.0.0.3", "127.0.0.4", "127.0.0.2"
SETTINGS = {
    # An API that refuses everything would be left alone before long.
    "carpool.service.BREAKER_FAILURES": 1000,
    "gateway.trusted_proxies": f"{PROXY},127.0.0.4/32",
}


@pytest.fixture
async def upstream() -> AsyncIterator[ScriptedUpstream]:
    async with scripted_upstream() as running:
        running.behaviour = "status 400"  # so that everything becomes a dead letter, which tells its owner
        yield running


async def ask_from(source: str, port: int, text: str, headers: str) -> Response:
    """One request from an address of this machine."""
    opened = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
    connection = Connection(*opened)
    try:
        return await connection.ask("POST", "/v1/inference", inference_body(text), headers)
    finally:
        await connection.close()


async def owners(gateway: GatewayProcess, number: int) -> dict[str, str]:
    """By input: the owner, as soon as there are so many dead letters."""

    async def listed() -> list[int]:
        page = await ask_once(gateway.admin_port, "GET", "/internal/dead-letters")
        return [letter["id"] for letter in page.json["dead_letters"]]

    async def are_there() -> bool:
        return len(await listed()) == number

    await until(are_there)
    shown = [await ask_once(gateway.admin_port, "GET", f"/internal/dead-letters/{each}") for each in await listed()]
    return {letter.json["input"]: letter.json["owner"] for letter in shown}


async def send_all(port: int) -> dict[str, str]:
    """Requests and tasks of clients and proxies; the owners that they should have."""
    spoofed = "X-Forwarded-For: 203.0.113.1\r\n"
    two_lines = "X-Forwarded-For: 203.0.113.1\r\nX-Forwarded-For: 203.0.113.2\r\n"
    cases = {
        "a client": (CLIENT, "", CLIENT),
        "another client": ("127.0.0.5", "", "127.0.0.5"),
        "a client that pretends": (CLIENT, spoofed, CLIENT),
        "a proxy of its own": (PROXY, "", PROXY),
        "a proxy for a client": (PROXY, spoofed, "203.0.113.1"),
        "a proxy for one that pretends": (PROXY, "X-Forwarded-For: 198.51.100.1, 203.0.113.2\r\n", "203.0.113.2"),
        "a proxy with two lines": (PROXY, two_lines, "203.0.113.2"),
        "two proxies": (OTHER_PROXY, f"X-Forwarded-For: 2001:db8::5, {PROXY}\r\n", "2001:db8::/64"),
        "a proxy without an address": (PROXY, "X-Forwarded-For: unknown\r\n", PROXY),
    }
    expected: dict[str, str] = {}
    for name, (source, headers, owner) in cases.items():
        assert (await ask_from(source, port, name, JSON + headers)).status == 422
        assert (await ask_from(source, port, f"task of {name}", ASYNC + headers)).status == 202
        expected |= {name: owner, f"task of {name}": owner}
    return expected


async def test_everybody_is_known_by_an_address(
    tmp_path: Path, upstream: ScriptedUpstream, redis_server: RedisServer
) -> None:
    """To the gateway, which writes it down, and to the batcher, which reads it."""
    flags = ["--upstream", upstream.url, "--max-batch", "1"]
    async with stage(tmp_path, flags, "redis", SETTINGS, redis_server) as (gateway, *_):
        await let_work_once(gateway.port)
        expected = await send_all(gateway.port)
        assert await owners(gateway, len(expected)) == expected
