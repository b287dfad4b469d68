"""What one batcher cannot serve, another one does: in virtual time, with the classes of a batcher."""

import asyncio
from collections.abc import Callable
from functools import partial
from random import Random

import msgspec
import pytest

from carpool.broker.redis.batcher.leases import RETURNS_MAX
from carpool.core.errors import UpstreamError
from carpool.testing import AttemptFailedError, FakeUpstream, UpstreamCall, UpstreamResponse, echo, inputs_of
from support.sick_endpoints import FAULTS
from support.virtual_fleet import VirtualFleet, answered

SERVICE_S = 0.05


def endpoint(
    behaviour: Callable[[UpstreamCall], UpstreamResponse] | UpstreamResponse, name: str, seconds: float = SERVICE_S
) -> FakeUpstream:
    """One that always answers in this way."""

    class Endpoint(FakeUpstream):
        def __init__(self) -> None:
            super().__init__(name)
            self.sent: list[bytes] = []

        async def post(self, call: UpstreamCall, timeout_s: float) -> UpstreamResponse:
            self.sent += inputs_of(call)
            self.then(behaviour, delay_s=seconds)
            return await super().post(call, timeout_s)

    return Endpoint()


def kills(call: UpstreamCall) -> UpstreamResponse:
    """A server that dies of one input, with all that it has, and is there again."""
    if any(b"deadly" in value for value in inputs_of(call)):
        raise AttemptFailedError("the call broke off")
    return echo(call)


def refuses(call: UpstreamCall, status: int = 500) -> UpstreamResponse:
    """A server that answers with an error to a batch with a bad input."""
    if any(b"bad" in value for value in inputs_of(call)):
        return UpstreamResponse(status, msgspec.json.encode({"error": "no"}))
    return echo(call)


async def load(fleet: VirtualFleet, number: int, owners: int = 1, per_s: float = 100.0) -> None:
    for index in range(number):
        fleet.send(b"good", f"client {index % owners}")
        await asyncio.sleep(1 / per_s)


@pytest.mark.parametrize("owners", [1, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_one_of_two_batchers_is_sick(fault: str, owners: int) -> None:
    fleet = VirtualFleet(endpoint(FAULTS[fault], "sick", 0.005), endpoint(echo, "well"))
    fleet.run(lambda: load(fleet, 300, owners))
    assert answered(fleet.entries) == len(fleet.entries)
    assert not fleet.stands[0].quarantined and not fleet.stands[1].quarantined
    assert all(stand.dispatcher.scheduler.poisoned == 0 for stand in fleet.stands)


@pytest.mark.parametrize("seed", range(3))
def test_one_that_is_slow_to_fail_now_and_then_keeps_nobody(seed: int) -> None:
    chance, sick = Random(seed), False

    def answer(call: UpstreamCall) -> UpstreamResponse:
        return UpstreamResponse(500, b"{}") if sick else echo(call)

    fleet = VirtualFleet(endpoint(answer, "slow", 0.2), endpoint(echo, "well", 0.2), max_batch=64)

    async def main() -> None:
        nonlocal sick
        for index in range(1900):
            await asyncio.sleep(chance.expovariate(190))
            sick = int(index / 285) % 2 == 1
            fleet.send(b"good", "client", timeout_s=4.0)

    fleet.run(main)
    assert answered(fleet.entries) == len(fleet.entries)
    assert all(stand.dispatcher.scheduler.poisoned == 0 and not stand.quarantined for stand in fleet.stands)


@pytest.mark.parametrize("fault", ["400", "500"])
def test_one_that_refuses_everything_blames_nobody(fault: str) -> None:
    """Each input that it blamed was sent alone by the other batcher, which had no slots left for the rest."""
    well = endpoint(echo, "well")
    fleet = VirtualFleet(endpoint(FAULTS[fault], "sick", 0.005), well)
    fleet.run(lambda: load(fleet, 300))
    assert not any(entry.history.was_blamed for entry in fleet.entries)
    assert answered(fleet.entries) == len(fleet.entries)


@pytest.mark.parametrize("fault", ["500", "503", "reset"])
def test_where_all_are_sick_each_request_fails_once(fault: str) -> None:
    sick = [endpoint(FAULTS[fault], f"sick {number}", 0.005) for number in range(3)]
    fleet = VirtualFleet(*sick)
    fleet.run(lambda: load(fleet, 100, owners=3))
    assert all(len(entry.outcomes) == 1 and entry.error is not None for entry in fleet.entries)
    assert max(len(entry.had_by) for entry in fleet.entries) <= RETURNS_MAX + 1


def test_an_input_that_kills_servers_takes_nobody_along() -> None:
    servers = [endpoint(kills, f"server {number}") for number in range(3)]
    fleet = VirtualFleet(*servers)

    async def main() -> None:
        await load(fleet, 50)
        fleet.send(b"deadly", "client 0")
        await load(fleet, 200)

    fleet.run(main)
    deadly = [entry for entry in fleet.entries if b"deadly" in entry.value]
    assert all(isinstance(entry.error, UpstreamError) for entry in deadly)
    assert answered(fleet.entries) == len(fleet.entries) - 1


def test_one_owner_that_poisons_harms_nobody_else() -> None:
    servers = [endpoint(refuses, f"server {number}") for number in range(2)]
    fleet = VirtualFleet(*servers)

    async def main() -> None:
        for index in range(300):
            fleet.send(b"bad" if index % 4 == 0 else b"good", "poisoner" if index % 4 == 0 else f"client {index % 3}")
            await asyncio.sleep(0.01)

    fleet.run(main)
    good = [entry for entry in fleet.entries if b"good" in entry.value]
    assert answered(good) == len(good)
    breakers = [stand.pool.members[0].breaker for stand in fleet.stands]
    assert all(breaker.state == "closed" or breaker.blamed_owner == "poisoner" for breaker in breakers)


@pytest.mark.parametrize("owners", [1, 3])
def test_where_every_batch_has_a_bad_input_others_are_answered(owners: int) -> None:
    # Each batch is refused whole, by both: it must not go to and fro until neither endpoint seems to work.
    fleet = VirtualFleet(*(endpoint(partial(refuses, status=422), f"server {number}") for number in range(2)))

    async def main() -> None:
        await load(fleet, 50, owners, per_s=200)
        for index in range(300):
            fleet.send(*((b"bad", "poisoner") if index % 2 == 0 else (b"good", f"client {index % owners}")))
            await asyncio.sleep(0.005)

    fleet.run(main)
    good = [entry for entry in fleet.entries if b"good" in entry.value]
    assert answered(good) == len(good)
