"""U8, U9: answers that come twice, errors that quote a client's input. Nobody gets another's output, and nothing is
learned from what a client wrote.
"""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from support.addressed_clients import ADDRESSES, AddressedClients, Summary
from support.checker import Checker, Verdict
from support.processes import running_gateway, until
from support.upstreams import ScriptedUpstream, answer_bytes, outputs_body, reverse, scripted_upstream, send

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
        """Answer one call, twice."""
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
        """Answer one call."""
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
