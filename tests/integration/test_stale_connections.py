"""U10 of FAULTS.md on real sockets: connections that a server closes when they are used again, in the middle of a call,
or all at once. uvicorn closes after a 500 without saying so; many servers close what rests for long.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from carpool.broker.memory import MemoryBroker
from carpool.core.clock import monotonic
from carpool.core.errors import ClientLeft, DeadlineExceeded
from carpool.core.outcome import Output
from carpool.core.request import Request
from carpool.testing import Witness, make_request
from carpool.upstream.client import HttpEndpoint, make_session
from carpool.upstream.codecs import JsonCodec
from carpool.upstream.dispatch import UpstreamDispatcher
from carpool.upstream.endpoint import AttemptFailedError, ConnectionWasDeadError
from carpool.upstream.pool import Pool
from support.processes import until
from support.raw_http import RawCall, RawUpstream, Script, answer_to, call_with, output_for, raw_upstream

TIMEOUT_S = 5.0


@asynccontextmanager
async def endpoint_of(script: Script, slots: int = 1) -> AsyncIterator[tuple[HttpEndpoint, RawUpstream]]:
    async with raw_upstream(script) as upstream, make_session() as session:
        yield HttpEndpoint(session, upstream.url, slots, answer_bytes_max=10_000), upstream


async def resets_the_second(call: RawCall) -> None:
    """Answers one call on each connection, and breaks off at the next."""
    if call.number == 1:
        await call.send(answer_to(call.body, "500 X"))
    else:
        call.reset()


async def ends_the_second(call: RawCall) -> None:
    """The same with an end in order."""
    if call.number == 1:
        await call.send(answer_to(call.body))
    else:
        await call.close()


async def begins_to_answer_the_second(call: RawCall) -> None:
    """The same, but some bytes of an answer come first."""
    await call.send(answer_to(call.body)[: None if call.number == 1 else 30])
    if call.number == 2:
        await asyncio.sleep(0.02)
        await call.close()


async def resets_the_first(call: RawCall) -> None:
    call.reset()


class TestTheEndpoint:
    @pytest.mark.parametrize("script", [resets_the_second, ends_the_second], ids=["reset", "end"])
    async def test_says_that_a_used_connection_was_dead_and_sends_nothing_again(self, script: Script) -> None:
        async with endpoint_of(script) as (endpoint, upstream):
            await endpoint.post(call_with("a"), TIMEOUT_S)
            with pytest.raises(ConnectionWasDeadError) as caught:
                await endpoint.post(call_with("b"), TIMEOUT_S)
            assert not caught.value.closed_before_sent
            assert len(upstream.bodies) == 2
            await endpoint.post(call_with("b"), TIMEOUT_S)
            assert upstream.connections == 2

    async def test_a_new_connection_that_breaks_is_a_failure(self) -> None:
        async with endpoint_of(resets_the_first) as (endpoint, upstream):
            with pytest.raises(AttemptFailedError) as caught:
                await endpoint.post(call_with("a"), TIMEOUT_S)
            assert not isinstance(caught.value, ConnectionWasDeadError)
            assert len(upstream.bodies) == 1

    async def test_one_that_had_begun_to_answer_was_not_dead(self) -> None:
        async with endpoint_of(begins_to_answer_the_second) as (endpoint, _):
            await endpoint.post(call_with("a"), TIMEOUT_S)
            with pytest.raises(AttemptFailedError) as caught:
                await endpoint.post(call_with("b"), TIMEOUT_S)
            assert not isinstance(caught.value, ConnectionWasDeadError)

    async def test_one_that_only_hangs_was_not_dead(self) -> None:
        async def hang(call: RawCall) -> None:
            if call.number == 1:
                await call.send(answer_to(call.body))

        async with endpoint_of(hang) as (endpoint, _):
            await endpoint.post(call_with("a"), TIMEOUT_S)
            with pytest.raises(AttemptFailedError, match="no answer within") as caught:
                await endpoint.post(call_with("b"), 0.1)
            assert not isinstance(caught.value, ConnectionWasDeadError)

    async def test_after_one_was_dead_those_that_rested_beside_it_are_not_used(self) -> None:
        """A server that restarts closes them all; the next call should not find that out one by one."""
        async with endpoint_of(ends_the_second, slots=8) as (endpoint, upstream):
            await asyncio.gather(*(endpoint.post(call_with(str(number)), TIMEOUT_S) for number in range(8)))
            assert upstream.connections == 8
            with pytest.raises(ConnectionWasDeadError):
                await endpoint.post(call_with("b"), TIMEOUT_S)
            assert (await endpoint.post(call_with("b"), TIMEOUT_S)).body == output_for("b")
            assert upstream.connections == 9

    async def test_what_the_other_side_closed_long_ago_is_not_noticed(self) -> None:
        async def answers_and_closes(call: RawCall) -> None:
            await call.send(answer_to(call.body))
            await call.close()

        async with endpoint_of(answers_and_closes) as (endpoint, upstream):
            for number in range(3):
                assert (await endpoint.post(call_with(str(number)), TIMEOUT_S)).body == output_for(str(number))
                await asyncio.sleep(0.02)
            assert upstream.connections == 3


class Stand:
    """Dispatcher, pool and broker around one endpoint."""

    def __init__(self, endpoint: HttpEndpoint, attempts: int = 3) -> None:
        self.witness = Witness()
        self.broker = MemoryBroker(waiting_max=100, bytes_max=10_000, lanes_max=9, tiers=1)
        self.broker.when_work_arrives("m", lambda lane: None)
        self.pool = Pool([endpoint])
        self.dispatcher = UpstreamDispatcher(
            self.pool,
            JsonCodec(),
            self.broker,
            timeout_s=TIMEOUT_S,
            attempts=attempts,
            backoff_s=0.0,
            others_waiting=partial(self.broker.most_waiting, "m"),
            all_waiting=partial(self.broker.all_waiting, "m"),
        )

    def send(self, *texts: str) -> list[Request]:
        for text in texts:
            value = json.dumps(text).encode()
            self.broker.submit(make_request(text, self.witness, now=monotonic(), value=value))
        (lane,) = self.broker.lanes("m")
        batch = self.broker.take(lane, len(texts), monotonic())
        self.dispatcher.dispatch(batch, lambda seconds: None)
        return batch

    async def outcomes(self, batch: list[Request]) -> list[Any]:
        await self.dispatcher.finish(TIMEOUT_S)
        return [self.witness.outcome(request) for request in batch]

    async def check_own(self, *texts: str) -> None:
        for text, outcome in zip(texts, await self.outcomes(self.send(*texts)), strict=True):
            assert isinstance(outcome, Output)
            assert json.loads(bytes(outcome.value)) == text[::-1]

    @property
    def failed(self) -> int:
        return self.pool.members[0].failed


def inputs_of(bodies: list[bytes]) -> list[list[str]]:
    return [json.loads(body)["inputs"] for body in bodies]


class TestTheDispatcher:
    @pytest.mark.parametrize("script", [resets_the_second, ends_the_second], ids=["reset", "end"])
    async def test_sends_again_at_once_and_blames_nobody(self, script: Script) -> None:
        async def good(call: RawCall) -> None:
            if call.number == 1:
                await call.send(answer_to(call.body))
            else:
                await script(call)

        async with endpoint_of(good) as (endpoint, upstream):
            stand = Stand(endpoint)
            for number in range(5):
                await stand.check_own(f"a{number}", f"b{number}")
            # The second call of each connection was sent again on the next.
            assert (stand.failed, upstream.connections, len(upstream.bodies)) == (0, 5, 9)

    async def test_whoever_left_or_expired_during_the_call_is_not_sent_again(self) -> None:
        asked = asyncio.Event()
        go_on = asyncio.Event()

        async def script(call: RawCall) -> None:
            if call.number == 2:
                asked.set()
                await go_on.wait()
                call.reset()
            else:
                await call.send(answer_to(call.body))

        async with endpoint_of(script) as (endpoint, upstream):
            stand = Stand(endpoint)
            await stand.check_own("first")
            batch = stand.send("stays", "leaves", "expires", "stays too")
            await asked.wait()
            stand.broker.cancel(batch[1])
            batch[2].deadline = monotonic()
            go_on.set()
            outcomes = await stand.outcomes(batch)
            assert [type(outcome) for outcome in outcomes] == [Output, ClientLeft, DeadlineExceeded, Output]
            assert inputs_of(upstream.bodies)[2:] == [["stays", "stays too"]]
            assert stand.failed == 0

    async def test_a_call_that_broke_off_in_its_answer_is_an_attempt_that_failed(self) -> None:
        async with endpoint_of(begins_to_answer_the_second) as (endpoint, upstream):
            stand = Stand(endpoint)
            await stand.check_own("a")
            await stand.check_own("b", "c")
            assert (stand.failed, len(upstream.bodies)) == (1, 3)

    async def test_a_server_that_breaks_off_every_call_fails_it(self) -> None:
        async with endpoint_of(resets_the_first) as (endpoint, upstream):
            stand = Stand(endpoint)
            [outcome] = await stand.outcomes(stand.send("a"))
            assert outcome.code == "upstream-failed"
            assert (stand.failed, len(upstream.bodies)) == (3, 3)

    async def test_a_server_that_repeats_every_answer_mixes_nobody_up(self) -> None:
        async def repeat(call: RawCall) -> None:
            asyncio.get_running_loop().call_later(0.005, call.write_if_open, answer_to(call.body))
            await call.send(answer_to(call.body))

        async with endpoint_of(repeat, slots=4) as (endpoint, _):
            stand = Stand(endpoint)
            for number in range(40):
                await stand.check_own(f"text {number}")
                if not number:
                    # The connection rests: its endpoint is caught.
                    await until(lambda: endpoint.stray_answers > 0, within_s=TIMEOUT_S)
            assert endpoint.stray_answers == 1
            assert stand.failed == 0

    @pytest.mark.parametrize("attempts", [1, 3])
    async def test_nor_does_one_that_repeats_them_while_the_next_call_is_under_way(self, attempts: int) -> None:
        """Forty calls, each sent when the one before it has its answer: no connection ever rests."""

        async def repeat(call: RawCall) -> None:
            await asyncio.sleep(0.01)
            asyncio.get_running_loop().call_later(0.003, call.write_if_open, answer_to(call.body))
            await call.send(answer_to(call.body))

        async with endpoint_of(repeat) as (endpoint, _):
            stand = Stand(endpoint, attempts)
            for number in range(40):
                await stand.check_own(f"a text of more than sixty-four bytes, so that answers are compared: {number}")
            assert endpoint.stray_answers == 1
            assert stand.failed == 0  # the answer that was in doubt was asked for again

    async def test_a_server_that_answers_all_alike_fails_nobody_though_there_is_one_attempt(self) -> None:
        output = "an output of more than sixty-four bytes, so that answers are compared with one another"

        async def stub(call: RawCall) -> None:
            await call.send(answer_to(json.dumps({"inputs": [output]}).encode()))

        async with endpoint_of(stub) as (endpoint, upstream):
            stand = Stand(endpoint, attempts=1)
            for number in range(10):
                [outcome] = await stand.outcomes(stand.send(f"text {number}"))
                assert isinstance(outcome, Output)
                assert json.loads(bytes(outcome.value)) == output[::-1]
            assert (stand.failed, len(upstream.bodies)) == (0, 11)
