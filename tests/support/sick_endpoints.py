"""Some endpoints of a gateway are sick, one can carry the load: what becomes of the requests, in virtual time."""

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from carpool.core.request import Request
from carpool.testing import AttemptFailedError, FakeUpstream, UpstreamCall, UpstreamResponse, echo
from support.virtual_gateway import Stand


def reset(call: UpstreamCall) -> UpstreamResponse:
    raise AttemptFailedError("the connection was reset")


# What a sick endpoint does, by its name.
FAULTS: dict[str, UpstreamResponse | Callable[[UpstreamCall], UpstreamResponse]] = {
    "400": UpstreamResponse(400, b'{"error":"wrong shape"}'),
    "429": UpstreamResponse(429, b""),
    "500": UpstreamResponse(500, b'{"error":"CUDA error: an illegal memory access"}'),
    "502": UpstreamResponse(502, b""),
    "503": UpstreamResponse(503, b""),
    "reset": reset,
    "garbage": UpstreamResponse(200, b"<html>"),
}
SERVICE_S = 0.1
MAX_BATCH = 16
CLIENTS = 20
# When virtual time begins.
BEGINS_AT = 1000.0


class Sickness(NamedTuple):
    """What is wrong with an endpoint: in which way calls fail, how soon, how many of them, and when."""

    fault: str
    fails_s: float = 0.005
    # How long calls take that do not fail.
    service_s: float = SERVICE_S
    share: float = 1.0
    from_s: float = 2.0
    until_s: float = 1e9


class SickUpstream(FakeUpstream):
    """An endpoint that is well but for its sickness."""

    def __init__(self, name: str, slots: int, sickness: Sickness | None, seed: int) -> None:
        super().__init__(name, slots)
        self.sickness = sickness
        self.failed = 0
        self._random = Random(seed)

    async def post(self, call: UpstreamCall, timeout_s: float) -> UpstreamResponse:
        sickness, now = self.sickness, asyncio.get_running_loop().time() - BEGINS_AT
        if sickness and sickness.from_s <= now < sickness.until_s and self._random.random() < sickness.share:
            self.failed += 1
            self.then(FAULTS[sickness.fault], delay_s=sickness.fails_s)
        else:
            self.then(echo, delay_s=sickness.service_s if sickness else SERVICE_S)
        return await super().post(call, timeout_s)


class Run:
    """A gateway in front of `sick` endpoints and one that is well, at a share of what that one can serve."""

    def __init__(
        self,
        *sick: Sickness,
        slots: int = 1,
        load: float = 0.6,
        seconds: float = 30.0,
        seed: int = 1,
        clients: int = CLIENTS,
    ) -> None:
        self.sick = [SickUpstream(f"sick {n}", slots, sickness, seed + n) for n, sickness in enumerate(sick)]
        well = SickUpstream("well", slots, None, seed)
        # As many attempts as by default.
        self.stand = Stand(*self.sick, well, max_batch=MAX_BATCH, attempts=4, random_share=Random(seed).random)
        self.requests: list[Request] = []
        self._per_s = load * slots * MAX_BATCH / SERVICE_S
        self._seconds = seconds
        self._clients = clients
        self._random = Random(seed)
        self.stand.run(self._main)
        self.outcomes = Counter(type(self.stand.witness.outcome(request)) for request in self.requests)

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        began = due = loop.time()
        while due < began + self._seconds:
            due += self._random.expovariate(self._per_s)
            await asyncio.sleep(due - loop.time())
            self.stand.broker.expire(self.stand.clock())
            self.requests.append(self.stand.send(b"good", f"client {self._random.randrange(self._clients)}"))
        for _ in range(500):
            await asyncio.sleep(0.01)
            self.stand.broker.expire(self.stand.clock())
