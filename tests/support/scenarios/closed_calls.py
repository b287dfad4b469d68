"""U10: the upstream closes a connection that was used before, in the middle of a call. Whoever left or expired is not
sent again; for the others that is an attempt like any other, paid from the budget.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from support.checker import Checker, Verdict
from support.client import Connection, ask_once, inference_body
from support.processes import GatewayProcess, running_gateway, until
from support.upstreams import ScriptedUpstream, scripted_upstream

GROUP = 4
# The gateway has seen by then that clients hung up.
SEEN_S = 0.1
TOTAL_TIMEOUT_S = 2.0
# A quiet gateway has about one retry a second.
BUDGET_S = 0.5


class ClosingUpstream(ScriptedUpstream):
    """Answers the first call on each connection, and closes during a later one."""

    def __init__(self) -> None:
        super().__init__()
        self._calls_on: Counter[asyncio.StreamWriter] = Counter()
        # The next call of so many inputs is closed; 0 for none.
        self.closes_size = 0
        # Every call but the first on its connection is.
        self.closes_always = False
        # A call that is to be closed is held until this is set.
        self.let_go = asyncio.Event()
        self.is_holding = False
        self.closed = 0

    async def answer(self, inputs: list[str], writer: asyncio.StreamWriter) -> None:
        """Answer one call, or close its connection."""
        self._calls_on[writer] += 1
        is_reused = self._calls_on[writer] > 1
        if not is_reused or not (self.closes_always or len(inputs) == self.closes_size):
            await super().answer(inputs, writer)
            return
        self.closes_size = 0
        self.is_holding = True
        await self.let_go.wait()
        self.is_holding = False
        self.closed += 1
        raise asyncio.IncompleteReadError(b"", 1)


class ClosingRounds:
    """Clients in rounds, in front of one slot of an upstream that closes."""

    def __init__(self, gateway: GatewayProcess, upstream: ClosingUpstream, errors: set[int]) -> None:
        self._gateway = gateway
        self.upstream = upstream
        self.checker = Checker("U10", {"": errors})
        # What clients were told who could be answered, and who could not.
        self.statuses: Counter[int] = Counter()
        self.given_up: Counter[int] = Counter()
        # Inputs that must not be sent twice.
        self.gone: set[str] = set()
        self.requests = 0

    async def ask(self, *, is_given_up: bool = False) -> None:
        """One client that waits; `is_given_up`: it cannot have an output."""
        text = self.new_input(is_gone=is_given_up)
        self.checker.accepted(text)
        response = await ask_once(self._gateway.port, "POST", "/v1/inference", inference_body(text))
        (self.given_up if is_given_up else self.statuses)[response.status] += 1
        if response.status == 200:
            self.checker.output(text, response.json["output"])
        else:
            self.checker.failed(text, response.status)

    def new_input(self, *, is_gone: bool) -> str:
        """The input of one more request."""
        text = self.checker.new_input()
        self.requests += 1
        if is_gone:
            self.gone.add(text)
        return text

    def asking(self, count: int, *, is_given_up: bool = False) -> list["asyncio.Task[None]"]:
        """So many clients at once."""
        return [asyncio.create_task(self.ask(is_given_up=is_given_up)) for _ in range(count)]

    async def some_leave(self) -> None:
        """Four of the eight in a call hang up; then its connection closes."""
        first = await self._occupy_the_slot()
        leaving = [await Connection.open(self._gateway.port) for _ in range(GROUP)]
        for connection in leaving:
            connection.send("POST", "/v1/inference", inference_body(self.new_input(is_gone=True)))
        staying = self.asking(GROUP)
        await self._send_all_in_one_call()
        for connection in leaving:
            await connection.close()
        await asyncio.sleep(SEEN_S)
        self.upstream.let_go.set()
        await asyncio.gather(first, *staying)
        await asyncio.sleep(BUDGET_S)

    async def some_expire(self) -> None:
        """Four of the eight in a call came a second before the others, and expire; then its connection closes."""
        first = await self._occupy_the_slot()
        began = time.monotonic()
        early = self.asking(GROUP, is_given_up=True)
        await asyncio.sleep(TOTAL_TIMEOUT_S / 2)
        late = self.asking(GROUP)
        await self._send_all_in_one_call()
        await asyncio.sleep(began + TOTAL_TIMEOUT_S + 2 * SEEN_S - time.monotonic())
        self.upstream.let_go.set()
        await asyncio.gather(first, *early, *late)

    async def one_attempt(self) -> None:
        """Where a request has one attempt, a call whose connection closes was that one."""
        await self.ask()
        self.upstream.closes_size = 1
        self.upstream.let_go.set()
        await self.ask(is_given_up=True)

    async def at_rest(self) -> None:
        """The connection closes between two calls: the next goes to another one, and that is no attempt."""
        await self.ask()
        await self.upstream.hang_up()
        await asyncio.sleep(SEEN_S)

    async def every_time(self) -> None:
        """Each connection closes during its second call: far more often than the budget pays for."""
        self.upstream.closes_always = True
        self.upstream.let_go.set()
        await asyncio.gather(*self.asking(GROUP))

    async def _occupy_the_slot(self) -> "asyncio.Task[None]":
        """A call that is not answered yet, so that those who come wait for one another."""
        self.upstream.let_go.clear()
        self.upstream.gate.clear()
        first = asyncio.create_task(self.ask())
        await until(lambda: self.upstream.in_flight == 1)
        return first

    async def _send_all_in_one_call(self) -> None:
        """Both groups wait; let them go, on the connection of the call before, and hold their call."""

        async def all_wait() -> bool:
            return bool((await self._gateway.health())["queue_depth"] == 2 * GROUP)

        await until(all_wait)
        self.upstream.closes_size = 2 * GROUP
        self.upstream.gate.set()
        await until(lambda: self.upstream.is_holding)


class Case(NamedTuple):
    """What is done in each round, under which settings, and the errors that are promised for it."""

    act: Callable[[ClosingRounds], Awaitable[None]]
    settings: dict[str, object]
    errors: set[int]


QUICK: dict[str, object] = {"broker.queue_timeout_s": TOTAL_TIMEOUT_S, "broker.total_timeout_s": TOTAL_TIMEOUT_S}
CASES = {
    "some leave": Case(ClosingRounds.some_leave, {}, set()),
    "some expire": Case(ClosingRounds.some_expire, QUICK, {504}),
    "one attempt": Case(ClosingRounds.one_attempt, {"upstream.attempts": 1}, {502}),
    "at rest": Case(ClosingRounds.at_rest, {"upstream.attempts": 1}, set()),
    "every time": Case(ClosingRounds.every_time, {}, {502}),
}


class Closed(NamedTuple):
    """What came of connections that closed."""

    verdict: Verdict
    # What clients were told who could be answered, and who could not.
    statuses: Counter[int]
    given_up: Counter[int]
    rounds: int
    closed: int
    # Inputs that were sent again though nobody could use the output.
    sent_again: int
    sends_per_request: float


async def connections_close(directory: Path, case: str, seconds: float) -> Closed:
    """U10: one case, round after round."""
    act, settings, errors = CASES[case]
    upstream = ClosingUpstream()
    rounds = 0
    async with scripted_upstream(upstream), running_gateway(directory, upstream.url, settings=settings) as gateway:
        running = ClosingRounds(gateway, upstream, errors)
        stop_at = time.monotonic() + seconds
        while time.monotonic() < stop_at:
            await act(running)
            rounds += 1
    sends = Counter(upstream.seen)
    return Closed(
        running.checker.verdict(upstream.seen),
        running.statuses,
        running.given_up,
        rounds,
        upstream.closed,
        sum(sends[text] > 1 for text in running.gone),
        len(upstream.seen) / running.requests,
    )
