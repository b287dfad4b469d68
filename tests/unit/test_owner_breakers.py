"""One client can neither open a breaker for others nor keep it open; certain means certain."""

import asyncio
from collections.abc import Callable

import pytest

from carpool.core.errors import InputRefused, UpstreamFailed, UpstreamRefused
from carpool.core.outcome import Output
from carpool.core.request import Request
from carpool.testing import FakeClock, FakeUpstream, UpstreamResponse, echo
from carpool.upstream.pool import Pool
from support.virtual_gateway import SERVICE_S, Stand, failing


async def worked_once(stand: Stand) -> None:
    """Until an endpoint has answered, nobody is quarantined. A while later nobody knows whether it still is well."""
    assert isinstance(await stand.answer(b"good", "Z"), Output)
    await asyncio.sleep(15.0)


@pytest.mark.parametrize("status", [400, 500])
def test_after_a_quiet_time_one_client_s_failures_are_its_own(status: int) -> None:
    stand = Stand(FakeUpstream(slots=2).then(failing(status), delay_s=SERVICE_S, times=9999))

    async def main() -> None:
        for turn in range(20):
            told = [await stand.answer(b"bad", "X") for _ in range(7)]
            assert not any(isinstance(outcome, Output) for outcome in told)
            assert isinstance(await stand.answer(b"good", "Y"), Output), turn
            await asyncio.sleep(15.0)  # so that nobody knows any more that the endpoint is well

    stand.run(main)


def test_a_client_whose_inputs_all_fail_is_refused_at_the_door_until_a_probe_is_due() -> None:
    stand = Stand(FakeUpstream().then(failing(500), delay_s=SERVICE_S, times=9999))

    async def main() -> None:
        told = [await stand.answer(b"bad", "X") for _ in range(5)]
        assert {type(outcome) for outcome in told} == {UpstreamFailed}
        await asyncio.sleep(0.01)
        assert stand.pool.is_shut_to("X") and not stand.pool.is_shut_to("Y") and not stand.pool.is_down
        await asyncio.sleep(1.1)
        assert not stand.pool.is_shut_to("X")  # its own next one may probe
        assert isinstance(await stand.answer(b"bad", "X"), UpstreamFailed)
        await asyncio.sleep(0.01)
        assert stand.pool.is_shut_to("X")
        assert isinstance(await stand.answer(b"good", "Y"), Output)
        assert not stand.pool.is_shut_to("X")
        assert isinstance(await stand.answer(b"bad", "X"), InputRefused)  # now it is certain

    stand.run(main)


def test_tasks_of_such_a_client_wait_and_do_not_stand_in_the_way() -> None:
    stand = Stand(FakeUpstream().then(failing(500), delay_s=SERVICE_S, times=9999))

    async def main() -> None:
        await worked_once(stand)
        for _ in range(5):
            await stand.answer(b"bad", "X")
        await asyncio.sleep(0.01)
        tasks = [stand.send(b"good", "X", is_task=True) for _ in range(20)]
        calls = len(stand.upstreams[0].calls)
        await asyncio.sleep(0.3)
        assert len(stand.upstreams[0].calls) == calls
        assert isinstance(await stand.answer(b"good", "Y"), Output)
        await asyncio.sleep(5.0)
        assert {type(stand.witness.outcome(task)) for task in tasks} == {Output}

    stand.run(main)


def test_failures_of_two_clients_close_it_to_all() -> None:
    stand = Stand(FakeUpstream().then(UpstreamResponse(500, b""), delay_s=SERVICE_S, times=9999))

    async def main() -> None:
        for number in range(5):
            await stand.answer(b"good", "XY"[number % 2])
        assert stand.pool.is_down

    stand.run(main)


def test_a_health_page_is_asked_before_an_input_is_risked() -> None:
    asked: list[Callable[[bool], None]] = []
    clock = FakeClock()

    async def main() -> None:
        pool = Pool([FakeUpstream()], clock, ask_health=lambda member, tell: asked.append(tell))
        while not pool.is_down:
            member = pool.take()
            pool.give_back(member)
            pool.record_failure(member)
        await asyncio.sleep(1.2)
        pool.look()
        assert (len(asked), pool.free()) == (1, 0)
        asked[0](False)
        await asyncio.sleep(2.5)
        pool.look()
        assert (len(asked), pool.free()) == (2, 0)
        asked[1](True)
        assert pool.free() == 1

    clock.run(main())


def test_one_of_ten_clients_that_is_all_bad_is_set_apart() -> None:
    stand = Stand(FakeUpstream(slots=4).then(failing(400), delay_s=SERVICE_S, times=99999))

    async def main() -> None:
        good: list[Request] = []
        for number in range(3000):
            owner = number % 10
            request = stand.send(b"bad" if owner == 3 else b"good", f"client {owner}")
            if owner != 3 and number > 500:
                good.append(request)
            await asyncio.sleep(0.003)
            stand.broker.expire(stand.clock())
        await asyncio.sleep(5.0)
        assert ("m", "client 3") in stand.quarantined
        assert {type(stand.witness.outcome(request)) for request in good} == {Output}
        waits = sorted(request.ended - request.arrived for request in good)
        assert waits[len(waits) * 99 // 100] < 4 * SERVICE_S  # virtual time

    stand.run(main)


@pytest.mark.parametrize(
    ("takes_s", "given_s", "hangs"),
    [(SERVICE_S, 0.5 * SERVICE_S, False), (9.0, 6 * SERVICE_S, True), (9.0, 0.5 * SERVICE_S, True)],
    ids=["it answers", "it hangs", "it hangs and nobody has patience"],
)
def test_calls_cut_off_before_calls_end_say_nothing_of_an_endpoint_that_answers(
    takes_s: float, given_s: float, hangs: bool
) -> None:
    """Or one impatient client would close it to everybody."""
    upstream = FakeUpstream(slots=2).then(echo, delay_s=SERVICE_S, times=40).then(echo, delay_s=takes_s, times=9999)
    stand = Stand(upstream, max_batch=1)

    async def main() -> None:
        for _ in range(40):
            assert isinstance(await stand.answer(b"good", "Y"), Output)
        for _ in range(60):
            stand.send(b"good", "X", timeout_s=given_s)
            if takes_s == SERVICE_S:
                stand.send(b"good", "Y")
            await asyncio.sleep(0.1)
            stand.broker.expire(stand.clock())
            assert hangs or stand.pool.members[0].breaker.state == "closed"
        assert (stand.pool.members[0].failed > 0) == hangs
        assert (stand.pool.members[0].breaker.state != "closed") == hangs

    stand.run(main)


def test_a_search_that_found_nothing_alive_counts_each_of_its_calls() -> None:
    """They were failures in a row: four more such searches would tell nothing new."""
    upstream = FakeUpstream(slots=2).then(failing(500, b""), delay_s=SERVICE_S, times=9999)
    stand = Stand(upstream)

    async def main() -> None:
        for _ in range(8):
            stand.send(b"good", "X")
        await asyncio.sleep(20 * SERVICE_S)
        assert stand.pool.members[0].breaker.blamed_owner == "X"
        assert stand.pool.is_shut_to("X") and not stand.pool.is_shut_to("Y")

    stand.run(main)


@pytest.mark.parametrize("status", [403, 451])
def test_an_api_that_refuses_everybody_with_another_status_convicts_nobody(status: int) -> None:
    """A key that has run out: the API answered a moment ago, and each request is alone."""
    stand = Stand(FakeUpstream().then(echo, delay_s=SERVICE_S, times=5).then(failing(status, b""), times=9999))

    async def main() -> None:
        for number in range(5):
            assert isinstance(await stand.answer(b"good", f"client {number}"), Output)
        for number in range(4):
            assert isinstance(await stand.answer(b"good", f"client {number}"), UpstreamRefused)

    stand.run(main)
    assert stand.dispatcher.scheduler.poisoned == 0
