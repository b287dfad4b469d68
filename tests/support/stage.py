"""Carpool on a stage: embedded or over Redis, in front of simulated GPUs in its own process or behind HTTP."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlencode

from carpool.cli.sim import simulated_gpus
from support.processes import GatewayProcess, running_gateway
from support.redis_fleet import fleet_over
from support.redis_servers import RedisServer, running_redis

Broker = Literal["embedded", "redis"]
Upstream = Literal["sim", "http"]
LOOK_S = 0.2


@contextmanager
def gpus(kind: Upstream, count: int = 1, *, slots: int = 1, latency_ms: float, **bad: str) -> Iterator[list[str]]:
    """Simulated GPUs, one in this process or each in one of its own, and the flags with which Carpool uses them.

    `bad` are options such as `poison` and `refuse`.
    """
    if kind == "sim":
        assert count == 1
        address = "sim:?" + urlencode({"latency_ms": latency_ms, "slots": slots, **bad})
        yield ["--upstream", address]
        return
    texts = {f"--{option}": text for option, text in bad.items()}
    options = {"--port": 0, "--workers": 1, "--slots": slots, "--latency-ms": latency_ms, **texts}
    with ExitStack() as stack:
        flags = ["--slots", str(slots)]
        for _ in range(count):
            running = stack.enter_context(simulated_gpus(options))
            assert running.address is not None
            flags += ["--upstream", running.address]
        yield flags


class Stage(NamedTuple):
    """The processes of one run; with the embedded broker one process is both."""

    gateway: GatewayProcess
    batcher: GatewayProcess
    redis: RedisServer | None = None

    async def breakers(self) -> set[str]:
        """The states of the breakers, as `/internal/fleet` tells them."""
        return {endpoint["breaker"] for endpoint in (await self.gateway.fleet())["endpoints"]}

    async def calls(self) -> int:
        """Calls to the upstream so far."""
        return round(await self.batcher.metric("carpool_upstream_calls_total"))


@asynccontextmanager
async def stage(
    directory: Path,
    flags: list[str],
    broker: Broker = "embedded",
    settings: Mapping[str, object] | None = None,
    redis: RedisServer | None = None,
) -> AsyncIterator[Stage]:
    """A gateway, and over Redis a batcher, with these flags for whoever calls the upstream.

    `redis` is one that others use too; else it is the stage's own.
    """
    if broker == "embedded":
        async with running_gateway(directory, "", *flags, settings=settings) as both:
            yield Stage(both, both)
        return
    async with AsyncExitStack() as stack:
        server = redis if redis is not None else await stack.enter_async_context(running_redis(directory / "redis"))
        shared = {"broker.namespace": directory.name, **(settings or {})}
        fleet = await stack.enter_async_context(fleet_over(directory, server.url, shared))
        gateway, batcher = await fleet.add("gateway"), await fleet.add("batcher", *flags)
        await fleet.wait_until_ready()
        yield Stage(gateway.process, batcher.process, server)


@asynccontextmanager
async def watched_breakers(watched: Stage) -> AsyncIterator[set[str]]:
    """Every state that a breaker was seen in until the block ends: one that opens and closes again is seen too."""
    seen: set[str] = set()
    is_over = asyncio.Event()

    async def look() -> None:
        while not is_over.is_set():
            seen.update(await watched.breakers())
            try:
                await asyncio.wait_for(is_over.wait(), LOOK_S)
            except TimeoutError:
                pass

    looking = asyncio.create_task(look())
    try:
        yield seen
    finally:
        is_over.set()
        await looking
        seen.update(await watched.breakers())
