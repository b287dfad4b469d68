"""What is known of endpoints beside their calls: probes, reported loads, states, and a fleet that changes."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from carpool.core.clock import Clock
from carpool.testing import FakeClock, FakeUpstream
from carpool.upstream.breaker import Breaker
from carpool.upstream.endpoint import AttemptFailedError, Endpoint, UpstreamResponse
from carpool.upstream.fleet import Address, Fleet
from carpool.upstream.health import (
    FAILED_PROBES_MAX,
    HealthWatch,
    endpoint_state,
    healthy_slots,
    state_of,
)
from carpool.upstream.load import LoadSource
from carpool.upstream.pool import EndpointState, Pool

WALL = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()


class PagedUpstream(FakeUpstream):
    """An endpoint with pages. `page` is what it shows, None for no answer."""

    def __init__(self, name: str = "paged", slots: int = 4) -> None:
        super().__init__(name, slots)
        self.page: UpstreamResponse | None = UpstreamResponse(200, b"")
        self.asked: list[str] = []
        self.is_reachable = True
        self.closed = 0
        self.probes_under_way = 0
        self.delay_s = 0.0
        self.defect: Exception | None = None

    async def get(self, where: str, timeout_s: float) -> UpstreamResponse:
        self.asked.append(where)
        self.probes_under_way += 1
        await asyncio.sleep(self.delay_s)
        self.probes_under_way -= 1
        if self.defect is not None:
            raise self.defect
        if self.page is None:
            raise AttemptFailedError("refused")
        return self.page

    async def accepts_connections(self) -> bool:
        self.asked.append("connection")
        return self.is_reachable

    async def close(self) -> None:
        self.closed += 1


class Setup:
    """One endpoint under watch, on a clock that stands still."""

    def __init__(self, health_path: str | None = "/health", load_source: LoadSource | None = None) -> None:
        self.clock = FakeClock()
        self.gpu = PagedUpstream()
        self.pool = Pool([self.gpu], self.clock, ask_health=lambda member, tell: self.watch.ask(member, tell))
        self.watch = make_watch(self.pool, self.clock, health_path, load_source)

    @property
    def member(self) -> EndpointState:
        return self.pool.members[0]

    @property
    def state(self) -> str:
        return state_of(self.member, self.clock())


def make_watch(
    pool: Pool, clock: Clock, health_path: str | None = "/health", load_source: LoadSource | None = None
) -> HealthWatch:
    return HealthWatch(
        pool,
        health_path=health_path,
        interval_s=2.0,
        load_source=load_source,
        clock=clock,
        random_share=lambda: 0.5,
    )


async def test_an_endpoint_that_fails_three_probes_is_offline_and_one_good_one_brings_it_back() -> None:
    setup = Setup()
    assert setup.state == "healthy"
    setup.gpu.page = None
    states = []
    for _ in range(FAILED_PROBES_MAX):
        await setup.watch.probe_quiet_ones()
        states.append(setup.state)
    assert states == ["degraded", "degraded", "offline"]
    assert healthy_slots(setup.pool.members, setup.clock()) == 0
    setup.gpu.page = UpstreamResponse(200, b"")
    await setup.watch.probe_quiet_ones()
    assert setup.state == "healthy"
    assert healthy_slots(setup.pool.members, setup.clock()) == 4
    assert setup.gpu.asked == ["/health"] * 4


async def test_without_a_health_path_a_connection_will_do() -> None:
    setup = Setup(health_path=None)
    await setup.watch.probe_quiet_ones()
    assert setup.gpu.asked == ["connection"]
    assert setup.state == "healthy"
    setup.gpu.is_reachable = False
    await setup.watch.probe_quiet_ones()
    assert setup.state == "degraded"


async def test_probes_are_made_by_themselves_at_intervals_and_a_failure_inside_does_not_end_them() -> None:
    clock = FakeClock()

    async def main() -> PagedUpstream:
        gpu = PagedUpstream()
        watch = make_watch(Pool([gpu], clock), clock)
        watch.start()
        gpu.defect = RuntimeError("a defect")
        await asyncio.sleep(3)
        gpu.defect = None
        await asyncio.sleep(8)
        await watch.close()
        await asyncio.sleep(11)
        return gpu

    gpu = await asyncio.to_thread(clock.run, main())
    assert gpu.asked == ["/health"] * 6  # at the start, and every two seconds


async def test_the_load_on_the_metrics_page_sets_the_limit() -> None:
    setup = Setup(load_source=LoadSource(":8002/metrics", "te_queue_size", 512.0))
    setup.gpu.page = UpstreamResponse(200, b"# TYPE te_queue_size gauge\nte_queue_size 500\n")
    await setup.watch.adjust_limits()
    assert setup.gpu.asked == [":8002/metrics"]
    assert (setup.member.limit, setup.state) == (2, "degraded")
    assert setup.member.controller.reported_load == pytest.approx(500 / 512)
    assert setup.pool.free() == 2
    for page in (
        None,
        UpstreamResponse(500, b"te_queue_size 500\n"),
        UpstreamResponse(200, b"\xff\n"),
        UpstreamResponse(200, b"te_queue_size 3\n"),
    ):
        setup.gpu.page = page
        for _ in range(5):
            await setup.watch.adjust_limits()
    assert (setup.member.limit, setup.pool.free(), setup.state) == (4, 4, "healthy")


def test_a_health_page_that_cannot_even_be_asked_does_not_keep_an_endpoint_out() -> None:
    setup = Setup()
    setup.gpu.defect = ZeroDivisionError("a defect")

    async def main() -> None:
        setup.watch.start()
        while not setup.pool.is_down:
            setup.pool.record_failure(setup.member)
        await asyncio.sleep(1.1)  # the pause of its breaker
        setup.pool.look()
        await asyncio.sleep(0.01)
        assert setup.gpu.asked == ["/health"] * 2  # the first at the start
        assert setup.pool.free() == 1  # the next call may try it
        await setup.watch.close()

    setup.clock.run(main())


def test_the_state_tells_the_breaker_and_the_limit() -> None:
    clock = FakeClock()
    breaker = Breaker(failures_max=1, pause_s=2.0)
    member = Pool([FakeUpstream(slots=4)], clock, make_breaker=lambda: breaker).members[0]
    assert state_of(member, clock()) == "healthy"
    member.limit = 3
    assert state_of(member, clock()) == "degraded"
    assert healthy_slots([member], clock()) == 3
    member.limit = 4
    breaker.failed(clock(), 1.0)
    assert state_of(member, clock()) == "offline"
    assert healthy_slots([member], clock()) == 0
    clock.advance(2.0)  # it waits for a call to be tried with
    assert state_of(member, clock()) == "degraded"
    assert endpoint_state(member, clock(), WALL).breaker == "half-open"
    assert healthy_slots([member], clock()) == 0
    breaker.started(clock())
    assert state_of(member, clock()) == "degraded"
    breaker.succeeded()
    assert state_of(member, clock()) == "healthy"


# A fleet that changes


def make_fleet(clock: Clock, *addresses: Address) -> tuple[Fleet, Callable[[Address], Endpoint]]:
    def make_endpoint(address: Address) -> Endpoint:
        if address.url == "bad":
            raise ValueError("bad")
        return PagedUpstream(address.url, address.slots or 1)

    fleet = Fleet(
        addresses,
        make_endpoint,
        lambda endpoints, ask: Pool(endpoints, clock, ask_health=ask),
        lambda pool: make_watch(pool, clock),
        clock,
    )
    return fleet, make_endpoint


def paged(fleet: Fleet) -> dict[str, PagedUpstream]:
    return {endpoint.name: endpoint for endpoint in fleet.pool.endpoints if isinstance(endpoint, PagedUpstream)}


async def test_endpoints_come_and_go_and_running_calls_finish() -> None:
    fleet, make_endpoint = make_fleet(FakeClock(), Address("a", 1), Address("b", 2))
    a = paged(fleet)["a"]
    notifies: list[None] = []
    fleet.pool.when_slot_frees(lambda: notifies.append(None))
    taken = fleet.pool.take()
    assert taken.name == "a"
    assert fleet.change_to(fleet.prepare([Address("b", 2), Address("c", 3)], make_endpoint)) == (1, 1)
    assert [(each.endpoint, each.state) for each in fleet.endpoint_states()] == [("b", "healthy"), ("c", "healthy")]
    assert (fleet.pool.free(), fleet.pool.total(), fleet.pool.busy(), len(notifies)) == (5, 5, 1, 3)
    assert a.closed == 0
    fleet.pool.give_back(taken)
    fleet.pool.record_success(taken)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (fleet.pool.free(), fleet.pool.busy(), a.closed) == (5, 0, 1)
    assert {fleet.pool.take().name for _ in range(5)} == {"b", "c"}
    await fleet.close()
    assert [endpoint.closed for endpoint in paged(fleet).values()] == [1, 1]


async def test_a_change_of_slots_makes_another_endpoint_and_no_change_none() -> None:
    fleet, make_endpoint = make_fleet(FakeClock(), Address("a", 1), Address("b", 2))
    a = paged(fleet)["a"]
    assert fleet.change_to(fleet.prepare([Address("b", 2), Address("a", 1)], make_endpoint)) == (0, 0)
    assert fleet.change_to(fleet.prepare([Address("a", 4), Address("b", 2)], make_endpoint)) == (1, 1)
    assert fleet.slots() == fleet.healthy_slots() == fleet.pool.free() == 6
    await asyncio.sleep(0)
    assert (a.closed, paged(fleet)["a"].slots) == (1, 4)


async def test_a_change_that_cannot_be_made_changes_nothing() -> None:
    fleet, make_endpoint = make_fleet(FakeClock(), Address("a", 1))
    with pytest.raises(ValueError, match="bad"):
        fleet.prepare([Address("c", 1), Address("bad", 1)], make_endpoint)
    assert [(each.endpoint, each.state) for each in fleet.endpoint_states()] == [("a", "healthy")]
    assert fleet.pool.free() == 1


@pytest.mark.parametrize("how", ["record_success", "record_failure", "says_nothing"])
async def test_what_a_removed_endpoint_does_is_no_longer_the_pool_s_business(how: str) -> None:
    fleet, make_endpoint = make_fleet(FakeClock(), Address("a", 2))
    pool = fleet.pool
    taken = [pool.take(), pool.take()]
    fleet.change_to(fleet.prepare([Address("b", 1)], make_endpoint))
    for member in taken:
        for _ in range(5):
            getattr(pool, how)(member)
        pool.give_back(member)
    assert (pool.free(), pool.busy(), pool.is_down) == (1, 0, False)
    assert pool.busy_seconds() == 0.0
    assert repr(fleet).startswith("<Fleet 1 endpoints")


async def test_a_new_endpoint_ends_an_outage() -> None:
    fleet, make_endpoint = make_fleet(FakeClock(), Address("a", 1))
    pool = fleet.pool
    for _ in range(5):
        pool.record_failure(pool.members[0])
    assert (pool.is_down, pool.free()) == (True, 0)
    fleet.change_to(fleet.prepare([Address("a", 1), Address("b", 1)], make_endpoint))
    assert (pool.is_down, pool.free()) == (False, 1)
    fleet.change_to(fleet.prepare([Address("a", 1)], make_endpoint))
    assert (pool.is_down, pool.free()) == (True, 0)
    await fleet.close()
