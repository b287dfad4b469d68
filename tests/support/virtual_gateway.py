"""Everything between the door and the endpoints, with the classes of a gateway, in virtual time."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from carpool.batching.loop import BatchLoop
from carpool.batching.policy import Fixed
from carpool.broker.memory import MemoryBroker
from carpool.core.events import Events
from carpool.core.ports import DeadLetters, OtherBatchers
from carpool.core.request import Request
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
from carpool.upstream.codecs import JsonCodec
from carpool.upstream.dispatch import UpstreamDispatcher
from carpool.upstream.pool import Pool
from carpool.upstream.quarantine import Quarantine
from carpool.upstream.same import merge_same

SERVICE_S = 0.05


def failing(status: int, mark: bytes = b"bad") -> Callable[[UpstreamCall], UpstreamResponse]:
    """An API that fails every call with such an input in it."""

    def answer(call: UpstreamCall) -> UpstreamResponse:
        if any(mark in value for value in inputs_of(call)):
            return UpstreamResponse(status, msgspec.json.encode({"error": "no"}))
        return echo(call)

    return answer


class Stand:
    """A gateway without a face: a test sends requests to it, and scripts its upstreams."""

    def __init__(
        self,
        *upstreams: FakeUpstream,
        max_batch: int = 8,
        dead_letters: DeadLetters | None = None,
        is_cached: bool = False,
        attempts: int = 3,
        random_share: Callable[[], float] = random.random,
        others: OtherBatchers | None = None,
        clock: FakeClock | None = None,
    ) -> None:
        self.clock = clock or FakeClock()
        self.upstreams = upstreams
        self.witness = Witness()
        self.quarantined = Quarantine()
        self.events = Events()
        self._max_batch = max_batch
        self._dead_letters = dead_letters
        self._merge = partial(merge_same, is_owned=False) if is_cached else None
        self._attempts = attempts
        self._random_share = random_share
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
        self.pool.close()

    def start(self) -> None:
        """Plug the parts together."""
        self.broker = MemoryBroker(
            waiting_max=1000,
            bytes_max=10**6,
            lanes_max=9,
            tiers=1,
            quarantined=self.quarantined,
            events=self.events,
            clock=self.clock,
        )
        self.pool = Pool(self.upstreams, self.clock, random_share=lambda: 0.5)
        self.pool.others_wait = lambda: self.broker.all_waiting("m") > 0
        self.dispatcher = UpstreamDispatcher(
            self.pool,
            JsonCodec(),
            self.broker,
            timeout_s=3.0,
            attempts=self._attempts,
            backoff_s=0.05,
            model="m",
            quarantined=self.quarantined,
            dead_letters=self._dead_letters,
            max_batch=lambda: self._max_batch,
            others_waiting=lambda: self.broker.most_waiting("m"),
            all_waiting=lambda: self.broker.all_waiting("m"),
            merge=self._merge,
            others=self._others,
            events=self.events,
            clock=self.clock,
            random_share=self._random_share,
        )
        BatchLoop(
            "m",
            self.broker,
            self.pool,
            self.dispatcher,
            Fixed(),
            max_batch=self._max_batch,
            max_wait_s=0.005,
            clock=self.clock,
        )

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
        assert self.broker.submit(request) is None
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
