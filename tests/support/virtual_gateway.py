"""The engine around scripted upstreams, in virtual time; or its serving half, as a batcher has it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from carpool.composition.engine import Engine
from carpool.composition.runtime import Runtime
from carpool.composition.serving import Serving, make_broker
from carpool.core.ports import DeadLetters, OtherBatchers
from carpool.core.request import Request
from carpool.settings import Settings
from carpool.settings.schema import BatchingSettings, BrokerSettings, SheddingSettings, UpstreamSettings
from carpool.testing import (
    FakeClock,
    FakeUpstream,
    UpstreamCall,
    UpstreamResponse,
    Witness,
    echo,
    inputs_of,
    make_request,
)

SERVICE_S = 0.05


def failing(status: int, mark: bytes = b"bad") -> Callable[[UpstreamCall], UpstreamResponse]:
    """An API that fails every call with such an input in it."""

    def answer(call: UpstreamCall) -> UpstreamResponse:
        if any(mark in value for value in inputs_of(call)):
            return UpstreamResponse(status, msgspec.json.encode({"error": "no"}))
        return echo(call)

    return answer


class Stand:
    """An engine that sheds nothing: a test sends requests to it, and scripts its upstreams.

    With `others` it is the half of a batcher that is not alone.
    """

    def __init__(
        self,
        *upstreams: FakeUpstream,
        max_batch: int = 8,
        dead_letters: DeadLetters | None = None,
        is_cached: bool = False,
        pad: bool = False,
        attempts: int = 3,
        random_share: Callable[[], float] = lambda: 0.5,
        others: OtherBatchers | None = None,
        clock: FakeClock | None = None,
    ) -> None:
        self.clock = clock or FakeClock()
        self.upstreams = upstreams
        self.witness = Witness()
        by_name = {f"http://gpu-{number}/": upstream for number, upstream in enumerate(upstreams)}
        settings = Settings(
            model="m",
            models={"m": {"cache": is_cached}},
            batching=BatchingSettings(policy="fixed", max_batch=max_batch, max_wait_ms=5.0),
            broker=BrokerSettings(waiting_max=1000),
            upstream=UpstreamSettings(endpoints=list(by_name), attempts=attempts, pad=pad),
            shedding=SheddingSettings(mode="off"),
        )
        self.runtime = Runtime(settings, self.clock, random_share, lambda model: lambda address: by_name[address.url])
        self.quarantined, self.events = self.runtime.quarantined, self.runtime.events
        self._dead_letters = dead_letters
        self._others = others
        self._serial = 0

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def started() -> None:
            self.start()
            await main()
            await self.finish()

        self.clock.run(started())

    async def finish(self) -> None:
        """Wait for what is under way."""
        await self.dispatcher.finish(60.0)
        await self.runtime.close()

    def start(self) -> None:
        runtime = self.runtime
        if self._others is None:
            engine = Engine(runtime, dead_letters=self._dead_letters)
            self.broker, serving, self._admit = engine.broker, engine.serving, engine.admit
            engine.start()
        else:
            self.broker = make_broker(runtime)
            models, others = runtime.models.values(), {"m": self._others}
            serving = Serving(runtime, self.broker, self._dead_letters, models, others=others)
            self._admit = self.broker.submit
            serving.start()
        (service,) = serving.services
        self.pool, self.dispatcher = service.pool, service.dispatcher

    def send(
        self, value: bytes, owner: str, is_task: bool = False, timeout_s: float = 4.0, *, is_same: bool = False
    ) -> Request:
        self._serial += 1
        request = make_request(
            str(self._serial),
            self.witness,
            now=self.clock(),
            value=value if is_same else b'"%b %d"' % (value, self._serial),
            owner=owner,
            is_task=is_task,
            total_timeout_s=600.0 if is_task else timeout_s,
        )
        if (refusal := (self.broker.submit if is_task else self._admit)(request)) is not None:
            self.witness.settled(request, refusal)  # a face answers at once
        return request

    async def answer(self, value: bytes, owner: str) -> Any:
        """The outcome of one request; None if the door is closed to its owner."""
        if self.pool.is_down or self.pool.is_shut_to(owner):
            return None
        request = self.send(value, owner)
        for _ in range(500):
            await asyncio.sleep(0.01)
            self.broker.expire(self.clock())
            if (outcome := self.witness.outcome(request)) is not None:
                return outcome
        raise AssertionError("no outcome")
