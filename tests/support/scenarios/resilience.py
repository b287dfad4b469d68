"""U1, U4, U5: some endpoints are bad, an input is poison, one endpoint is slow. Clients that have done nothing wrong
hardly notice; when every endpoint is bad they are told at once.
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

from support.checker import Checker, Verdict
from support.client import Connection, ConnectionBrokenError, ask_once, inference_body
from support.processes import GatewayProcess, running_gateway, until
from support.upstreams import ScriptedUpstream, scripted_upstream

POISON = "POISON"
# A call is given up sooner than by default; a request has the time for all of its attempts, also on a busy machine.
QUICK = {
    "upstream.timeout_s": 2.0,
    "carpool.service.BACKOFF_S": 0.02,
    "broker.queue_timeout_s": 20.0,
    "broker.total_timeout_s": 40.0,
}
# Nobody listens on the endpoint's port.
REFUSE = "refuse"
ONE_BAD = (REFUSE, "reset", "hang", "trickle", "status 500", "status 503")
ALL_BAD = ("reset", "hang", "status 500", "status 503")
UPSTREAM_LATENCY_S = 0.01


class Load:
    """Clients at a fixed rate, whatever comes back; idle connections are used again."""

    def __init__(self, port: int, checker: Checker) -> None:
        self._port = port
        self._checker = checker
        self._idle: list[Connection] = []
        self._running: set[asyncio.Task[None]] = set()
        # Status and seconds of each answer, in the order in which they came.
        self.answers: list[tuple[int, float]] = []

    @property
    def succeeded(self) -> float:
        """Share of the requests that were answered with 200."""
        return sum(status == 200 for status, _ in self.answers) / len(self.answers)

    async def run(self, per_s: float, seconds: float, mark: Callable[[int], str] = lambda number: "") -> None:
        """All requests of a run; `mark` is added to the input of the request with this number."""
        started = time.monotonic()
        for number in range(int(per_s * seconds)):
            await asyncio.sleep(started + number / per_s - time.monotonic())
            self._start(mark(number))
        await self._finish()

    async def run_until(self, work: "asyncio.Future[Any]", per_s: float) -> None:
        """Requests until `work` is done; raises what that raised."""
        while not work.done():
            self._start("")
            await asyncio.sleep(1 / per_s)
        await self._finish()
        await work

    async def saturate_until(self, work: "asyncio.Future[Any]", clients: int) -> None:
        """So many requests at any time until `work` is done, however quick they are; raises what that raised."""

        async def ask_on() -> None:
            while not work.done():
                await self._ask(self._checker.new_input())

        await asyncio.gather(*(ask_on() for _ in range(clients)))
        await self._finish()
        await work

    def _start(self, mark: str) -> None:
        task = asyncio.create_task(self._ask(self._checker.new_input() + mark))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _finish(self) -> None:
        await asyncio.gather(*self._running)
        for connection in self._idle:
            await connection.close()
        self._idle.clear()

    async def _ask(self, text: str) -> None:
        connection = self._idle.pop() if self._idle else await Connection.open(self._port)
        self._checker.accepted(text)
        started = time.monotonic()
        try:
            response = await connection.ask("POST", "/v1/inference", inference_body(text))
        except ConnectionBrokenError:
            self._checker.broke_off(text)
            self.answers.append((0, time.monotonic() - started))
            return
        self.answers.append((response.status, time.monotonic() - started))
        self._checker.answered(text, response)
        self._idle.append(connection)


class Behind(NamedTuple):
    """A gateway and the upstreams behind it."""

    gateway: GatewayProcess
    upstreams: list[ScriptedUpstream]


@asynccontextmanager
async def three_upstreams(
    directory: Path, *flags: str, refusing: int = 0, settings: dict[str, object] | None = None
) -> AsyncIterator[Behind]:
    """A gateway in front of three upstreams; of these, nobody listens on the first `refusing`."""
    async with AsyncExitStack() as stack:
        upstreams = [await stack.enter_async_context(scripted_upstream()) for _ in range(3 - refusing)]
        urls = [upstream.url for upstream in upstreams]
        for _ in range(refusing):
            # Bound and not listening: nobody else gets this port meanwhile.
            reserved = stack.enter_context(socket.socket())
            reserved.bind(("127.0.0.1", 0))
            urls.insert(0, f"http://127.0.0.1:{reserved.getsockname()[1]}/infer")
        for upstream in upstreams:
            upstream.latency_s = UPSTREAM_LATENCY_S
        more = [part for url in urls[1:] for part in ("--upstream", url)]
        gateway = await stack.enter_async_context(
            running_gateway(directory, urls[0], *more, *flags, settings={**QUICK, **(settings or {})})
        )
        yield Behind(gateway, upstreams)


def inputs_seen(upstreams: list[ScriptedUpstream]) -> list[str]:
    """Every input that reached an endpoint, as often as it did."""
    return [text for upstream in upstreams for text in upstream.seen]


class Seen(NamedTuple):
    """What clients saw."""

    verdict: Verdict
    succeeded: float
    statuses: dict[str, int]


async def one_of_three_is_bad(directory: Path, behaviour: str, per_s: float, seconds: float) -> Seen:
    """U1: one endpoint fails every call, all the time."""
    checker = Checker(f"U1-{behaviour.replace(' ', '-')}")
    async with three_upstreams(directory, refusing=behaviour == REFUSE) as (gateway, upstreams):
        if behaviour != REFUSE:
            upstreams[0].behaviour = behaviour
        load = Load(gateway.port, checker)
        await load.run(per_s, seconds)
    return Seen(checker.verdict(inputs_seen(upstreams)), load.succeeded, dict(checker.tally))


class AllBad(NamedTuple):
    """What was seen while every endpoint was bad, and after."""

    verdict: Verdict
    # Milliseconds of the refusals once every breaker was open: the 99th of a hundred.
    refusal_ms: float
    statuses: set[int]
    # Times that inputs reached an endpoint, for each that was offered.
    sends_per_request: float
    # Seconds after the endpoints were well again until a request succeeded.
    back_s: float


async def all_are_bad(directory: Path, behaviour: str, per_s: float, seconds: float) -> AllBad:
    """U1: every endpoint fails every call; then all are well again."""
    checker = Checker(f"U1-all-{behaviour.replace(' ', '-')}", {"": {502, 503, 504}})
    # Nothing is to succeed: who waits for longer only makes the run longer.
    hasty: dict[str, object] = {
        "upstream.timeout_s": 1.0,
        "broker.queue_timeout_s": 2.0,
        "broker.total_timeout_s": 4.0,
    }
    async with three_upstreams(directory, settings=hasty) as (gateway, upstreams):
        for upstream in upstreams:
            upstream.behaviour = behaviour
        before = Load(gateway.port, checker)

        async def is_open() -> bool:
            return {each["breaker"] for each in (await gateway.fleet())["endpoints"]} == {"open"}

        await before.run_until(asyncio.ensure_future(until(is_open)), per_s)
        load = Load(gateway.port, checker)
        await load.run(per_s, seconds)
        refusals = [took * 1000 for status, took in load.answers if status == 503]
        offered = len(before.answers) + len(load.answers)
        sent = sum(len(upstream.seen) for upstream in upstreams)
        for upstream in upstreams:
            upstream.behaviour = "good"
        well_again = time.monotonic()

        async def works() -> bool:
            await asyncio.sleep(0.02)
            return (await ask_once(gateway.port, "POST", "/v1/inference", inference_body("x"))).status == 200

        await until(works)
        back_s = time.monotonic() - well_again
    statuses = {status for status, _ in load.answers}
    return AllBad(
        checker.verdict(inputs_seen(upstreams)), quantiles(refusals, n=100)[-1], statuses, sent / offered, back_s
    )


class Poisoned(NamedTuple):
    """What became of poison and innocents."""

    verdict: Verdict
    # Shares of the innocents that got their output, and of the poison that got a 422.
    innocents_ok: float
    poison_refused: float
    poison_sends_max: int
    dead_letters: int
    breakers: set[str]
    mean_batch: float


async def poison(directory: Path, every: int, per_s: float, seconds: float) -> Poisoned:
    """U4: one request in `every` makes the API fail its whole batch."""
    checker = Checker("U4", {POISON: {422}})
    async with three_upstreams(directory) as (gateway, upstreams):
        for upstream in upstreams:
            upstream.poison = POISON
            upstream.latency_s = 0.1  # so that batches are of some size
        load = Load(gateway.port, checker)
        await load.run(per_s, seconds, lambda number: POISON if number % every == every // 2 else "")
        seen = [text for text in inputs_seen(upstreams) if POISON in text]
        letters = await gateway.dead_letters()
        breakers = {each["breaker"] for each in (await gateway.fleet())["endpoints"]}
        mean_batch = len(inputs_seen(upstreams)) / sum(upstream.calls for upstream in upstreams)
    bad = len(set(seen))
    return Poisoned(
        checker.verdict(inputs_seen(upstreams)),
        checker.tally["ok"] / (len(load.answers) - bad),
        checker.tally["422"] / bad,
        max(seen.count(text) for text in set(seen)),
        letters,
        breakers,
        mean_batch,
    )


class Slow(NamedTuple):
    """What a slow endpoint was given."""

    verdict: Verdict
    succeeded: float
    # Its share of all inputs.
    share: float
    most_in_flight: int


async def one_is_slow(directory: Path, per_s: float, seconds: float, settings: dict[str, object] | None = None) -> Slow:
    """U5: one endpoint takes ten times as long; the load is near what the other two can serve."""
    checker = Checker("U5")
    flags = ("--slots", "2", "--max-batch", "4")
    async with three_upstreams(directory, *flags, settings=settings) as (gateway, upstreams):
        for upstream, latency_s in zip(upstreams, (1.0, 0.1, 0.1), strict=True):
            upstream.latency_s = latency_s
        load = Load(gateway.port, checker)
        await load.run(per_s, seconds)
        inputs = [len(upstream.seen) for upstream in upstreams]
        most = upstreams[0].most_in_flight
    return Slow(checker.verdict(inputs_seen(upstreams)), load.succeeded, inputs[0] / sum(inputs), most)
