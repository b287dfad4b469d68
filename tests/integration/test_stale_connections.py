"""U10 of FAULTS.md on real sockets: connections that a server closes when they are used again, in the middle of a call,
or all at once. uvicorn closes after a 500 without saying so; many servers close what rests for long.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from carpool.upstream.client import HttpEndpoint
from carpool.upstream.endpoint import AttemptFailedError, ConnectionWasDeadError
from support.processes import PATIENCE_S
from support.raw_http import RawCall, RawUpstream, Script, answer_to, call_with, output_for, raw_upstream

TIMEOUT_S = PATIENCE_S


@asynccontextmanager
async def endpoint_of(script: Script, slots: int = 1) -> AsyncIterator[tuple[HttpEndpoint, RawUpstream]]:
    async with raw_upstream(script) as upstream:
        endpoint = HttpEndpoint(upstream.url, slots, answer_bytes_max=10_000)
        yield endpoint, upstream
        await endpoint.close()


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
            with pytest.raises(ConnectionWasDeadError):
                await endpoint.post(call_with("b"), TIMEOUT_S)
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
