"""Searches and quarantined owners beside those who wait: neither takes from the other what it needs to get on."""

import asyncio
from functools import partial

import pytest

from carpool.broker.memory import MemoryBroker
from carpool.core.clock import monotonic
from carpool.core.errors import CarpoolError, InputRefused, InternalError, QueueFull, UpstreamRefused
from carpool.core.outcome import Output
from carpool.core.request import Request
from carpool.service import ModelService, endpoint_maker
from carpool.settings import Settings, models_of
from carpool.settings.schema import BatchingSettings, UpstreamSettings
from carpool.testing import FakeUpstream, UpstreamCall, UpstreamResponse, Witness, echo, inputs_of, make_request
from carpool.upstream.pool import WELL_S
from carpool.upstream.quarantine import Quarantine
from carpool.upstream.slot_share import SlotShare
from support.processes import until
from support.virtual_gateway import SERVICE_S, Stand, failing

OWED_S = 1000.0


class Account(SlotShare):
    """One that shows what was paid."""

    def __init__(self, share: float) -> None:
        super().__init__(share)
        self.paid_s = 0.0
        self.allows(0.0, 1)

    def pay(self, seconds: float) -> None:
        super().pay(seconds)
        self.paid_s += seconds


def test_where_few_wait_a_search_takes_slots_for_nothing() -> None:
    """At low load there is always somebody who waits for the next slot, but slots take small batches anyway."""
    stand = Stand(FakeUpstream(slots=2).then(failing(400), delay_s=SERVICE_S, times=9999), max_batch=64)

    async def main() -> None:
        stand.dispatcher.scheduler.slot_share = account = Account(0.2)
        account.pay(OWED_S)  # far more than it earns while this lasts
        requests: list[Request] = []
        bad: list[Request] = []
        for number in range(300):
            if number == 50:
                bad.append(stand.send(b"bad", "X"))
            requests.append(stand.send(b"good", f"client {number % 7}"))
            await asyncio.sleep(0.01)
            stand.broker.expire(stand.clock())
        await asyncio.sleep(0.5)
        assert {type(stand.witness.outcome(request)) for request in requests} == {Output}
        assert {type(stand.witness.outcome(request)) for request in bad} == {InputRefused}
        assert stand.dispatcher.scheduler.steps > 1
        assert account.paid_s == OWED_S  # nothing more was paid

    stand.run(main)


def test_offenders_get_on_where_others_are_shed() -> None:
    """Then the others' head is always older than anything of an offender: by age it would never be its turn."""
    stand = Stand(FakeUpstream(slots=2).then(failing(400), delay_s=SERVICE_S, times=9999))

    async def main() -> None:
        apart: list[Request] = []
        stand.quarantined.refused("m", "X", stand.clock(), 8.0)
        for number in range(1500):
            for _ in range(4):  # 400 a second, where 320 fit
                stand.send(b"good", "Y")
            if number % 20 == 10:
                apart.append(stand.send(b"of X", "X"))
            await asyncio.sleep(0.01)
            stand.broker.expire(stand.clock())
        told = [stand.witness.outcome(request) for request in apart if request.arrived < stand.clock() - 2.5]
        assert len(told) > 50 and {type(outcome) for outcome in told} == {Output}

    stand.run(main)


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("slots", [1, 2])
def test_one_bad_client_does_not_starve_the_few_others(status: int, slots: int) -> None:
    """Bursts of it make searches one after the other; the others wait for the very same slots, and are never many."""
    stand = Stand(FakeUpstream(slots=slots).then(failing(status), delay_s=0.2, times=9999), max_batch=64)

    async def main() -> None:
        good: list[Request] = []
        for number in range(4000):
            if number % 20 == 0:
                good.append(stand.send(b"good", f"client {number % 7}"))
            if number % 500 == 250:
                for _ in range(64):
                    stand.send(b"bad", "X")
            await asyncio.sleep(0.01)
            stand.broker.expire(stand.clock())
        await asyncio.sleep(4.0)
        told = [type(stand.witness.outcome(request)) for request in good]
        assert told.count(Output) >= 0.98 * len(good)  # some were in one batch with it before it was known

    stand.run(main)


def test_three_endpoints_that_do_not_tell_their_limit_are_found_out() -> None:
    """Parts of what one of them refused are answered by the others: that says nothing against it."""

    def takes_five(call: UpstreamCall) -> UpstreamResponse:
        return echo(call) if len(inputs_of(call)) <= 5 else UpstreamResponse(400, b'{"error": "no"}')

    upstreams = [FakeUpstream(name, slots=2).then(takes_five, delay_s=0.1, times=9999) for name in "abc"]
    stand = Stand(*upstreams, max_batch=64)

    async def main() -> None:
        requests: list[Request] = []
        for number in range(2000):
            requests += [stand.send(b"good", f"client {owner}") for owner in {number % 7, number * 3 % 11}]
            await asyncio.sleep(0.01)
            stand.broker.expire(stand.clock())
        await asyncio.sleep(4.0)
        late = [request for request in requests if request.arrived > stand.clock() - 14.0]
        assert {type(stand.witness.outcome(request)) for request in late} == {Output}
        assert {member.breaker.state for member in stand.pool.members} == {"closed"}
        assert not stand.quarantined

    stand.run(main)
    limits = [member.batch_limit.learned for member in stand.pool.members]
    assert any(limits) and set(limits) <= {None, 4, 5}


def test_one_of_two_that_takes_fewer_than_the_other_fails_nobody() -> None:
    """What it refuses as a whole is answered by the other, as a whole."""

    def takes_eight(call: UpstreamCall) -> UpstreamResponse:
        return echo(call) if len(inputs_of(call)) <= 8 else UpstreamResponse(500, b'{"error": "no"}')

    small = FakeUpstream("a", slots=1).then(takes_eight, delay_s=0.3, times=9999)
    stand = Stand(small, FakeUpstream("b", slots=1).then(echo, delay_s=0.3, times=9999), max_batch=64)

    async def main() -> None:
        requests: list[Request] = []
        for number in range(120 * 20):
            requests.append(stand.send(b"good", f"client {number % 7}"))
            await asyncio.sleep(1 / 120)
            stand.broker.expire(stand.clock())
        await asyncio.sleep(4.0)
        assert {type(stand.witness.outcome(request)) for request in requests} == {Output}

    stand.run(main)


@pytest.mark.parametrize("status", [403, 451])
def test_a_content_filter_refuses_one_client_only(status: int) -> None:
    stand = Stand(FakeUpstream(slots=2).then(failing(status), delay_s=SERVICE_S, times=9999))

    async def main() -> None:
        good: list[Request] = []
        bad: list[Request] = []
        for number in range(1000):
            good.append(stand.send(b"good", f"client {number % 7}"))
            if number % 10 == 5:
                bad.append(stand.send(b"bad", "X"))
            await asyncio.sleep(0.01)
            stand.broker.expire(stand.clock())
        await asyncio.sleep(4.0)
        assert {type(stand.witness.outcome(request)) for request in good} == {Output}
        told = {type(stand.witness.outcome(request)) for request in bad}
        assert InputRefused in told and Output not in told
        assert stand.pool.members[0].breaker.state == "closed"

    stand.run(main)


def test_where_nothing_is_answered_one_search_after_the_other_comes_to_its_end() -> None:
    """Those that come meanwhile are larger than what is left of the first, but only an end tells of the endpoints."""
    upstreams = [FakeUpstream(name).then(failing(500, b""), delay_s=0.03, times=9999) for name in "abc"]
    stand = Stand(*upstreams, max_batch=64)

    async def main() -> None:
        for _ in range(100):
            stand.send(b"good", "X")
            await asyncio.sleep(0.01)
            stand.broker.expire(stand.clock())
            if all(member.breaker.state != "closed" for member in stand.pool.members):
                return
        raise AssertionError("the breakers stay closed")

    stand.run(main)


class Defect:
    """In place of the dead letters: fails the first time."""

    def __init__(self) -> None:
        self.is_met = False

    def bury(self, request: Request, error: CarpoolError, sends: int) -> None:
        if not self.is_met:
            self.is_met = True
            raise RuntimeError("a defect")


def test_a_defect_in_a_step_leaves_nobody_without_an_outcome() -> None:
    """Half of the batch gets an error of its own in the first step, and that goes wrong."""
    upstream = FakeUpstream().then(echo, delay_s=SERVICE_S).then(failing(400), delay_s=SERVICE_S)
    upstream.then(UpstreamResponse(404, b""), delay_s=SERVICE_S).then(failing(400), delay_s=SERVICE_S, times=99)
    defect = Defect()
    stand = Stand(upstream, dead_letters=defect)

    async def main() -> None:
        scheduler = stand.dispatcher.scheduler
        await stand.answer(b"good", "Y")  # now it is known to be alive
        requests = [stand.send(b"bad" if number == 5 else b"good", "Y") for number in range(8)]
        await asyncio.sleep(2.0)
        assert defect.is_met
        told = [type(stand.witness.outcome(request)) for request in requests]
        assert told == [InternalError] + [UpstreamRefused] * 3 + [Output, InputRefused, Output, Output]
        assert (scheduler.running, stand.pool.free(), stand.broker.held) == (0, 1, 0)

    stand.run(main)


def test_a_defect_at_the_end_of_a_search_leaves_nobody_without_an_outcome() -> None:
    defect = Defect()
    stand = Stand(FakeUpstream().then(failing(500), delay_s=SERVICE_S, times=999), dead_letters=defect)

    async def main() -> None:
        scheduler = stand.dispatcher.scheduler
        assert isinstance(await stand.answer(b"good", "client"), Output)  # else there are no letters
        await asyncio.sleep(15.0)
        requests = [stand.send(b"bad", f"client {number}") for number in range(8)]
        await asyncio.sleep(3.9)
        assert defect.is_met
        assert InternalError in {type(stand.witness.outcome(request)) for request in requests}
        assert None not in [stand.witness.outcome(request) for request in requests]
        assert (scheduler.running, stand.pool.busy(), stand.broker.held) == (0, 0, 0)

    stand.run(main)


# With all that a gateway has around them.


class ServiceStand:
    """A model of a gateway, with a simulated GPU of two slots."""

    def __init__(self, bytes_max: int = 9999) -> None:
        settings = Settings(
            model="m",
            upstream=UpstreamSettings(endpoints=["sim:?latency_ms=1&slots=2&refuse=BAD"]),
            batching=BatchingSettings(max_batch=4, batch_bytes_max=bytes_max),
        )
        self.witness = Witness()
        self.quarantined = Quarantine()
        self.broker = MemoryBroker(waiting_max=99, bytes_max=9999, lanes_max=9, tiers=1, quarantined=self.quarantined)
        [model] = models_of(settings).values()
        self.service = ModelService(
            model,
            partial(endpoint_maker, clock=monotonic),
            self.broker,
            None,
            self.quarantined,
        )
        self.service.loop.in_flight_bytes_max = bytes_max
        self.pool = self.service.pool
        self._serial = 0

    def request(self, owner: str, value: bytes = b'"good 1"') -> Request:
        self._serial += 1
        # The deadline comes while the endpoint still counts as alive: later on, a search goes before others.
        return make_request(
            str(self._serial),
            self.witness,
            now=monotonic(),
            value=value,
            owner=owner,
            total_timeout_s=WELL_S - 2.0,
        )

    def send(self, count: int, owner: str = "Y", value: bytes = b'"good 1"') -> list[Request]:
        requests = [self.request(owner, value) for _ in range(count)]
        assert [self.broker.submit(request) for request in requests] == [None] * count
        return requests

    def kinds(self, requests: list[Request]) -> set[type]:
        return {type(self.witness.outcome(request)) for request in requests}


async def test_those_for_whose_bytes_there_is_no_room_keep_no_search_from_a_slot() -> None:
    """The members of the search hold the bytes that the others wait for: each would wait for the other."""
    stand = ServiceStand(bytes_max=32)
    stand.send(4)
    await until(lambda: len(stand.witness.told) == 4)  # now it is known to be alive
    scheduler = stand.service.scheduler
    assert scheduler.slot_share.allows(monotonic(), 2)
    scheduler.slot_share.pay(OWED_S)
    bad, good = stand.send(1, "X", b'"BAD  1"'), stand.send(3 + 36)
    await until(lambda: len(stand.witness.told) == 4 + 40)
    assert stand.kinds(bad) == {InputRefused}
    assert stand.kinds(good) == {Output}


async def test_of_what_other_processes_admitted_two_batches_of_offenders_are_taken_up() -> None:
    stand = ServiceStand()
    busy = [stand.pool.take() for _ in range(2)]
    stand.quarantined.refused("m", "X", monotonic(), 3.0)
    taken_up = stand.send(7, "X")
    assert stand.service.refusal_of(stand.request("X")) is None
    taken_up += stand.send(1, "X")
    assert isinstance(stand.service.refusal_of(stand.request("X")), QueueFull)
    assert stand.service.refusal_of(stand.request("Y")) is None
    for member in busy:
        stand.pool.give_back(member)
    await until(lambda: stand.broker.waiting_quarantined("m") == 0)
    assert stand.service.refusal_of(stand.request("X")) is None
    await until(lambda: len(stand.witness.told) == len(taken_up))
    assert stand.kinds(taken_up) == {Output}
