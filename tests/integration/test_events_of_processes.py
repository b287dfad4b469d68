"""What whole processes tell of the same requests: one alone, and a gateway and a batcher over a real Redis."""

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from carpool.app import make_process
from carpool.composition.process import Process
from carpool.core.names import Role
from carpool.core.outcome import Output
from carpool.settings import load_settings
from support.client import Response, ask_once, inference_body
from support.event_log import EventLog
from support.processes import until
from support.redis_servers import RedisServer
from support.upstreams import ScriptedUpstream, scripted_upstream

ASYNC = "Prefer: respond-async\r\n"
NUMBER = 3


@asynccontextmanager
async def running(role: Role, upstream: str, **broker: str) -> AsyncIterator[tuple[Process, EventLog]]:
    """A process as a command starts it, and what it tells."""
    flags: dict[str, Any] = {"gateway.port": 0, "gateway.drain_grace_s": 0, "tasks.journal": False}
    flags |= {"gateway.admin_port": 0} | {f"broker.{name}": value for name, value in broker.items()}
    process = make_process(load_settings(flags | {"upstream.endpoints": [upstream]}, environ={}, file=None), role)
    log = EventLog()
    process.events.subscribe(log)
    try:
        await process.start()
        yield process, log
        await process.drain()
    finally:
        await process.close()


@pytest.fixture
async def upstream() -> AsyncIterator[ScriptedUpstream]:
    upstream = ScriptedUpstream()
    async with scripted_upstream(upstream):
        yield upstream


def with_key(upstream: ScriptedUpstream) -> str:
    """Its address with what nobody else is to see."""
    return f"{upstream.url}?key=secret"


async def ask_for(port: int, number: int, headers: str = "") -> list[Response]:
    return await asyncio.gather(
        *(ask_once(port, "POST", "/v1/inference", inference_body(f"in {each}"), headers) for each in range(number))
    )


def ids_of(log: EventLog, kind: str) -> Counter[str]:
    """Of whom it was told, and how often."""
    found: Counter[str] = Counter()
    for told, whom, *_ in log.told:
        if told == kind:
            found.update([whom] if isinstance(whom, str) else whom)
    return found


def assert_facts(log: EventLog, endpoint: str) -> None:
    for outcome in log.outcomes.values():
        assert isinstance(outcome, Output)
        call = outcome.call
        assert (call.endpoint, call.attempts, call.cached) == (endpoint, 1, False)
        assert call.started_s > 0.0 and call.upstream_s > 0.0


async def test_one_process_tells_everything(upstream: ScriptedUpstream) -> None:
    async with running("serve", with_key(upstream)) as (process, log):
        answers = await ask_for(process.port, NUMBER)
    everybody = Counter({answer.json["request_id"]: 1 for answer in answers})
    assert len(everybody) == NUMBER
    for kind in ("admitted", "taken", "sent", "settled"):
        assert ids_of(log, kind) == everybody, kind
    assert_facts(log, upstream.url)


async def test_over_redis_each_half_tells_what_it_does_and_facts_arrive(
    upstream: ScriptedUpstream, redis_server: RedisServer
) -> None:
    broker = {"url": redis_server.url, "namespace": f"events-{secrets.token_hex(4)}"}
    async with (
        running("batcher", with_key(upstream), **broker) as (_, at_batcher),
        running("gateway", with_key(upstream), **broker) as (gateway, at_gateway),
    ):
        answers = await ask_for(gateway.port, NUMBER)
        tasks = [json.loads(answer.body)["task_id"] for answer in await ask_for(gateway.port, NUMBER, ASYNC)]
        await until(lambda: len(at_batcher.outcomes) >= NUMBER)
    asked = Counter({answer.json["request_id"]: 1 for answer in answers})
    assert len(asked) == NUMBER
    assert ids_of(at_gateway, "admitted") == asked + Counter(tasks)
    assert ids_of(at_gateway, "settled") == asked
    assert ids_of(at_batcher, "taken") == ids_of(at_batcher, "sent") == asked + Counter(tasks)
    assert ids_of(at_batcher, "settled") == Counter(tasks)
    assert not {"taken", "sent"} & set(at_gateway.kinds()) and "admitted" not in at_batcher.kinds()
    assert_facts(at_gateway, upstream.url)
    assert_facts(at_batcher, upstream.url)
