"""U8, U9, U10: answers that come twice, errors that quote an input, connections that close during a call.

Nobody gets another's output, nothing is learned from what a client wrote, and whoever left or expired is not sent
again; for the others a call that was cut off is an attempt like any other, paid from the budget.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import pytest

from support.addressed_clients import ADDRESSES, AddressedClients, Summary
from support.checker import Checker, Verdict
from support.client import Connection, ask_once, inference_body
from support.processes import GatewayProcess, running_gateway, until
from support.upstreams import ScriptedUpstream, answer_bytes, outputs_body, reverse, scripted_upstream, send

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
        self.checker.answered(text, response)

    def new_input(self, *, is_gone: bool) -> str:
        """The input of one more request."""
        text = self.checker.new_input()
        self.requests += 1
        if is_gone:
            self.gone.add(text)
        return text

    def asking(self, count: int, *, is_given_up: bool = False) -> list["asyncio.Task[None]"]:
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


# U8

REPEAT_AFTER_S = 0.005
# From the repeated answer to the next call: the gateway has read it by then.
REST_S = 0.03


class RepeatingUpstream(ScriptedUpstream):
    """Sends each answer twice: in one piece, or the second time when the connection rests."""

    def __init__(self, *, while_resting: bool) -> None:
        super().__init__()
        self._while_resting = while_resting
        self._spoilt: set[asyncio.StreamWriter] = set()
        self.repeated = 0
        # Calls on a connection on which an answer had been repeated.
        self.used_again = 0

    async def answer(self, inputs: list[str], writer: asyncio.StreamWriter) -> None:
        self.used_again += writer in self._spoilt
        answer = answer_bytes(outputs_body(reverse(inputs)))
        if self._while_resting:
            writer.write(answer)
            await asyncio.sleep(REPEAT_AFTER_S)
            writer.write(answer)
        else:
            writer.write(answer * 2)
        self._spoilt.add(writer)
        self.repeated += 1
        await writer.drain()


class Repeated(NamedTuple):
    """What came of repeated answers."""

    verdict: Verdict
    answers: Summary
    calls: int
    used_again: int


async def answers_come_twice(directory: Path, clients: int, seconds: float, *, while_resting: bool) -> Repeated:
    """U8: every answer is repeated: in one piece, to all clients at once, or at rest, to one client after the other."""
    checker = Checker("U8")
    upstream = RepeatingUpstream(while_resting=while_resting)
    upstream.latency_s = 0.0 if while_resting else 0.02
    stop_at = 0.0

    async def ask_on(asking: AddressedClients, number: int) -> None:
        while time.monotonic() < stop_at:
            await asking.ask(ADDRESSES[number % len(ADDRESSES)])

    async def ask_in_turn(asking: AddressedClients) -> None:
        while time.monotonic() < stop_at:
            for number in range(clients):
                await asking.ask(ADDRESSES[number % len(ADDRESSES)])
                await until(lambda: upstream.repeated == upstream.calls)
                await asyncio.sleep(REST_S)

    async with (
        scripted_upstream(upstream),
        running_gateway(directory, upstream.url, "--slots", "4") as gateway,
        AddressedClients(gateway.port, checker) as asking,
    ):
        stop_at = time.monotonic() + seconds
        if while_resting:
            await ask_in_turn(asking)
        else:
            await asyncio.gather(*(ask_on(asking, number) for number in range(clients)))
    verdict = checker.verdict(upstream.seen)
    return Repeated(verdict, Summary.of(asking.answers), upstream.calls, upstream.used_again)


# U9

# Inputs that read like the words of an API for its limit.
LIKE_LIMITS = (
    "too many items: 1",
    "batch size 64 > maximum allowed batch size 1",
    "at most 1 inputs",
    "maximum batch size is 2",
    "batch size 64 is too large, the limit is 1",
    "x'. batch size 64 exceeds 1",
)
# How an API may quote an input in its error.
QUOTES: dict[str, Callable[[str], str]] = {
    "after its own words": lambda text: f"could not convert string to float: {text!r}",
    "before its own words": lambda text: f"{text}: this is not a number",
    "without a word": lambda text: text,
}
BURST, AFTERWARDS = 64, 256


class QuotingUpstream(ScriptedUpstream):
    """Refuses a batch with an input that has a space in it, and quotes that input."""

    def __init__(self, quote: str) -> None:
        super().__init__()
        self._quote = QUOTES[quote]
        self.sizes: list[int] = []

    async def answer(self, inputs: list[str], writer: asyncio.StreamWriter) -> None:
        self.sizes.append(len(inputs))
        bad = next((text for text in inputs if " " in text), None)
        if bad is None:
            await super().answer(inputs, writer)
        else:
            await send(writer, json.dumps({"error": self._quote(bad)}).encode(), 400)


class Quoted(NamedTuple):
    """What came of errors that quote."""

    verdict: Verdict
    # While the quoted inputs came: what the others got, and what they got.
    innocents: Summary
    quoted: Summary
    # 256 good inputs afterwards, and the batches that they came in.
    after: Summary
    batch_mean: float
    batch_max: int


async def errors_quote_the_input(directory: Path, quote: str, rounds: int) -> Quoted:
    """U9: bursts of 64 with an input that reads like a limit; then good inputs only. One slot of 50 ms."""
    checker = Checker("U9", {text: {422} for text in LIKE_LIMITS})
    upstream = QuotingUpstream(quote)
    upstream.latency_s = 0.05
    async with (
        scripted_upstream(upstream),
        running_gateway(directory, upstream.url) as gateway,
        AddressedClients(gateway.port, checker) as clients,
    ):

        async def burst(count: int, like_limit: str = "") -> None:
            asked = [clients.ask(ADDRESSES[number % len(ADDRESSES)]) for number in range(count - bool(like_limit))]
            if like_limit:
                asked.insert(count // 2, clients.ask_for(like_limit, ADDRESSES[0], like_limit))
            await asyncio.gather(*asked)

        await burst(BURST)
        for _ in range(rounds):
            for like_limit in LIKE_LIMITS:
                await burst(BURST, like_limit)
        answered, calls = len(clients.answers), len(upstream.sizes)
        await burst(AFTERWARDS)
        before, after = clients.answers[:answered], clients.answers[answered:]
        sizes = upstream.sizes[calls:]
    return Quoted(
        checker.verdict(),
        Summary.of(answer for answer in before if not answer.mark),
        Summary.of(answer for answer in before if answer.mark),
        Summary.of(after),
        mean(sizes),
        max(sizes),
    )


SECONDS = 20


@pytest.mark.parametrize("while_resting", [False, True], ids=["in one piece", "at rest"])
async def test_an_answer_that_comes_twice_is_nobody_elses(tmp_path: Path, while_resting: bool) -> None:
    seen = await answers_come_twice(tmp_path, clients=40, seconds=SECONDS, while_resting=while_resting)
    passed = seen.verdict.is_clean and seen.answers.ok == 1.0 and seen.used_again == 0
    what = (
        f"each answer twice, {'5 ms later, at rest' if while_resting else 'in one piece'}: 40 clients, {seen.answers}; "
        f"{seen.used_again} of {seen.calls} calls on a connection with a repeated answer"
    )
    seen.verdict.report("U8", what, passed=passed)
    assert passed


@pytest.mark.parametrize("quote", QUOTES)
async def test_nothing_is_learned_from_an_error_that_quotes_the_input(tmp_path: Path, quote: str) -> None:
    seen = await errors_quote_the_input(tmp_path, quote, rounds=6)
    passed = (
        seen.verdict.is_clean
        and seen.innocents.ok == 1.0
        and seen.quoted.statuses.keys() == {422}
        and seen.after.statuses == {200: AFTERWARDS}
        and seen.batch_max >= 8
        and seen.batch_mean >= 4
    )
    what = (
        f"errors that quote the input {quote}: innocents {seen.innocents}; quoted {seen.quoted.statuses}; afterwards "
        f"{seen.after}, batches of {seen.batch_mean:.1f} on average, {seen.batch_max} at most"
    )
    seen.verdict.report("U9", what, passed=passed)
    assert passed


@pytest.mark.parametrize(
    ("case", "given_up", "sends_max"),
    [
        ("some leave", set(), 1.5),
        ("some expire", {504}, 1.5),
        ("one attempt", {502}, 1.0),
        ("at rest", set(), 1.0),
        # The budget: a fifth more, and what it has saved up.
        ("every time", set(), 1.4),
    ],
)
async def test_a_connection_that_closes_during_a_call(
    tmp_path: Path, case: str, given_up: set[int], sends_max: float
) -> None:
    seen = await connections_close(tmp_path, case, seconds=SECONDS)
    told = {200, 502} if case == "every time" else {200}
    passed = (
        seen.verdict.is_clean
        and seen.sent_again == 0
        and seen.statuses.keys() <= told
        and seen.given_up.keys() == given_up
        and seen.sends_per_request <= sends_max
    )
    what = (
        f"connections close, {case}: {seen.rounds} rounds, {seen.closed} calls cut off, {dict(seen.statuses)}, "
        f"given up {dict(seen.given_up)}; {seen.sent_again} sent again for nobody, {seen.sends_per_request:.2f} sends "
        f"a request"
    )
    seen.verdict.report("U10", what, passed=passed)
    assert passed
