"""O7, O8: plain defaults, one slot of 200 ms, which is 320 requests a second in batches of 64. Everybody comes at once;
or a process starts while several times its capacity comes in.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from support.checker import Checker, Verdict
from support.client import Connection, inference_body
from support.keyed_load import MIX, Keys, Loaded, p99_ms, send_load
from support.processes import GatewayProcess, running_gateway
from support.redis_fleet import fleet_over
from support.redis_servers import running_redis
from support.scenarios.too_much import STANDING_S, added
from support.stage import Broker, stage

CALL_MS, BATCH = 200.0, 64
CAPACITY = BATCH * 1000 / CALL_MS
FLAGS = ["--upstream", f"sim:?latency_ms={CALL_MS:g}&slots=1"]
# Quiet after a burst, so that the next one finds nobody.
QUIET_S = 0.5


class Burst(NamedTuple):
    """What became of bursts of as many single requests at once."""

    verdict: Verdict
    # By status, of each burst.
    statuses: list[Counter[int]]
    # The longest until a refusal came.
    refusal_s: float


async def bursts(directory: Path, broker: Broker, sizes: list[int], quiet_s: float = QUIET_S) -> Burst:
    """One burst after another, each when everybody of the last one is answered; one request goes before them."""
    async with stage(directory, FLAGS, broker) as running:
        checker, refusals = Checker("O7", {"": {503}}), [0.0]
        clients = [await Connection.open(running.gateway.port) for _ in range(max(sizes))]

        async def ask(client: Connection) -> int:
            text = checker.new_input()
            checker.accepted(text)
            started = time.monotonic()
            response = await client.ask("POST", "/v1/inference", inference_body(text))
            checker.answered(text, response)
            if response.status != 200:
                refusals.append(time.monotonic() - started)
            return response.status

        await ask(clients[0])
        statuses = []
        for size in sizes:
            await asyncio.sleep(quiet_s)
            statuses.append(Counter(await asyncio.gather(*map(ask, clients[:size]))))
        for client in clients:
            await client.close()
    return Burst(checker.verdict(), statuses, max(refusals))


class Started(NamedTuple):
    """A process that started into too much; over Redis, what each of two gateways saw."""

    loads: list[Loaded]

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs were in the way."""
        return any(load.is_disturbed for load in self.loads)

    @property
    def verdict(self) -> Verdict:
        return added(*(load.verdict for load in self.loads))

    @property
    def timed_out(self) -> int:
        """Admitted, and not answered in time."""
        return sum(load.timed_out for load in self.loads)

    @property
    def p99_ms(self) -> float:
        """Of those with an output, from when it is a standing queue."""
        return p99_ms(answer for load in self.loads for answer in load.between(STANDING_S))

    @property
    def about(self) -> str:
        return " | ".join(load.about for load in self.loads)


async def starts_into(directory: Path, broker: Broker, times: float, seconds: float) -> Started:
    """The first request that a fresh process sees is one of so many times what it can do, of three tiers."""
    keys = Keys(directory)
    async with fresh(directory, broker, keys) as gateways:
        share = times * CAPACITY / len(gateways)
        sent = (send_load(gateway.port, f"{share}:{seconds}s", keys.load(MIX)) for gateway in gateways)
        return Started(await asyncio.gather(*sent))


@asynccontextmanager
async def fresh(directory: Path, broker: Broker, keys: Keys) -> AsyncIterator[list[GatewayProcess]]:
    """One process, or two gateways and a batcher, that have not seen a request yet."""
    settings = {"config": keys.config}
    async with AsyncExitStack() as stack:
        if broker == "embedded":
            yield [await stack.enter_async_context(running_gateway(directory / "one", "", *FLAGS, settings=settings))]
            return
        server = await stack.enter_async_context(running_redis(directory / "redis"))
        fleet = await stack.enter_async_context(fleet_over(directory, server.url, settings))
        gateways = [await fleet.add("gateway") for _ in range(2)]
        await fleet.add("batcher", *FLAGS)
        await fleet.wait_until_ready()
        yield [gateway.process for gateway in gateways]
