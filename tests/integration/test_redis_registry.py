"""Heartbeats over a real Redis: who comes, who goes, who falls silent."""

import secrets

import msgspec
import pytest

from carpool.broker.redis.fleet.registry import Registry
from carpool.broker.redis.fleet.view import Heartbeat, ModelHeartbeat
from carpool.broker.redis.keys import Keys
from support.processes import until
from support.redis_nodes import connected
from support.redis_servers import RedisServer


@pytest.fixture
def keys() -> Keys:
    return Keys("test-" + secrets.token_hex(6))


def description(healthy_slots: int = 4) -> Heartbeat:
    model = ModelHeartbeat(slots=4, healthy_slots=healthy_slots, capacity_rps=10.0)
    return Heartbeat("ok", rate=3.0, models={"m": model})


def live(one: Registry) -> tuple[list[str], list[str]]:
    view = one.view
    return [member.name for member in view.live_gateways()], [member.name for member in view.live_batchers()]


async def test_a_change_is_told_without_waiting(redis_server: RedisServer, keys: Keys) -> None:
    async with connected(redis_server.url) as nodes:
        said = [description()]
        one = Registry(nodes, keys, name=b"b", role="batcher", describe=lambda: said[-1], interval_s=30.0)
        one.start()
        await until(lambda: live(one) == ([], ["b"]))
        said.append(msgspec.structs.replace(said[-1], status="draining"))
        one.heartbeat()
        said.append(msgspec.structs.replace(description(healthy_slots=2), status="draining"))
        one.heartbeat()  # while the first one is under way
        await until(lambda: one.view.healthy_slots("m") == 2)
        assert one.view.batchers[0].status == "draining"
        one.close()
