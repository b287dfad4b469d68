"""Connections to a Redis for tests, and scripts of their own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha1
from typing import Any

from carpool.broker.redis.client.address import parse_broker_url
from carpool.broker.redis.client.nodes import Nodes, Script
from support.processes import PATIENCE_S, until


async def connect(url: str, *, timeout_s: float = PATIENCE_S, kind: type[Nodes] = Nodes, **options: Any) -> Nodes:
    """Connections that are all up; somebody closes them."""
    login = {name: options.pop(name) for name in ("files", "password") if name in options}
    nodes = kind(parse_broker_url(url, **login), timeout_s=timeout_s, **options)
    nodes.start()
    await until(lambda: nodes.trouble == "")
    return nodes


@asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[Nodes]:
    """Connections that are all up, until the block ends."""
    nodes = await connect(url, **options)
    try:
        yield nodes
    finally:
        await nodes.close()


def script_of(source: bytes) -> Script:
    """A script, as Redis knows it."""
    return Script("test", source, sha1(source, usedforsecurity=False).hexdigest().encode())
