"""Gateways without Redis call the same endpoints, each its share of the slots: what they can serve is a share too."""

from functools import partial
from math import inf

import pytest

from carpool.batching.policy import Fit
from carpool.broker.memory import MemoryBroker
from carpool.broker.redis.batcher.leases import BatchersElsewhere
from carpool.core.clock import monotonic
from carpool.service import IN_DOUBT_BATCH, STUCK_AHEAD_S, ModelService, endpoint_maker
from carpool.settings import Settings, models_of
from carpool.settings.schema import BatchingSettings, UpstreamSettings
from carpool.upstream.quarantine import Quarantine


async def test_the_door_of_one_of_four_does_not_count_on_what_the_others_use() -> None:
    settings = Settings(model="m", upstream=UpstreamSettings(endpoints=["sim:?slots=8"]))
    broker = MemoryBroker(waiting_max=9, bytes_max=9, lanes_max=9, tiers=1)
    [model] = models_of(settings).values()
    gateways = 1
    endpoints = partial(endpoint_maker, clock=monotonic)
    service = ModelService(model, endpoints, broker, None, Quarantine(), lambda: gateways)
    of_all = service.capacity_rps()
    gateways = 4
    assert of_all > 0.0
    assert service.capacity_rps() == of_all / 4


async def test_a_loaded_endpoint_of_one_slot_counts_for_its_share_of_the_time() -> None:
    settings = Settings(model="m", upstream=UpstreamSettings(endpoints=["sim:"]))
    broker = MemoryBroker(waiting_max=9, bytes_max=9, lanes_max=9, tiers=1)
    [model] = models_of(settings).values()
    service = ModelService(
        model, partial(endpoint_maker, clock=monotonic), broker, None, Quarantine(), sharers=lambda: 2
    )
    of_all = service.capacity_rps()
    [member] = service.pool.members
    member.controller.report(1.0)
    member.controller.step(0.0)
    service.pool.follow(member)
    assert service.capacity_rps() == pytest.approx(0.7 * of_all)
    assert service.loop.free_slots() == 1  # it still takes a whole call


@pytest.mark.parametrize(("gateways", "free"), [(1, 4), (2, 2), (4, 1), (9, 1)])
async def test_an_endpoint_that_rests_now_and_then_costs_no_whole_slot(gateways: int, free: int) -> None:
    settings = Settings(model="m", upstream=UpstreamSettings(endpoints=[f"sim:?seed={number}" for number in range(4)]))
    broker = MemoryBroker(waiting_max=9, bytes_max=9, lanes_max=9, tiers=1)
    [model] = models_of(settings).values()
    endpoints = partial(endpoint_maker, clock=monotonic)
    service = ModelService(model, endpoints, broker, None, Quarantine(), lambda: gateways)
    assert service.loop.free_slots() == free
    member = service.pool.members[0]
    member.controller.report(1.0)
    member.controller.step(0.0)
    service.pool.follow(member)
    assert service.pool.total() == pytest.approx(3.7)
    assert service.loop.free_slots() == free


class Elsewhere:
    """Where requests are fetched from."""

    waiting = 0

    def unread(self) -> int:
        return self.waiting

    def unread_s(self) -> float:
        return 0.0

    def is_asked(self) -> bool:
        return False

    def batch_is_due(self) -> None: ...

    def call_time_is_known(self) -> None: ...


@pytest.mark.parametrize(("fit", "ahead"), [("on", 8), ("off", 0)])
async def test_what_is_fetched_ahead_waits_a_while_for_busy_slots(fit: Fit, ahead: int) -> None:
    settings = Settings(
        model="m", batching=BatchingSettings(fit=fit), upstream=UpstreamSettings(endpoints=["sim:?slots=1"])
    )
    broker = MemoryBroker(waiting_max=9, bytes_max=9, lanes_max=9, tiers=1)
    [model] = models_of(settings).values()
    endpoints, fetched = partial(endpoint_maker, clock=monotonic), Elsewhere()
    service = ModelService(model, endpoints, broker, None, Quarantine(), lambda: 1, fetched=fetched)
    service.loop.service_s = 0.01
    assert service.stuck_after_s() == inf
    service.pool.take()
    for fetched.waiting, free in ((1000, ahead), (100, 0)):
        assert service.free_slots() == free
        assert service.stuck_after_s() == (STUCK_AHEAD_S if fit == "on" else 0.0)


@pytest.mark.parametrize("are_others_well", [False, True])
async def test_after_two_failed_batches_few_are_taken_where_others_are_well(are_others_well: bool) -> None:
    settings = Settings(model="m", upstream=UpstreamSettings(endpoints=["sim:"]))
    broker = MemoryBroker(waiting_max=9, bytes_max=9, lanes_max=9, tiers=1)
    [model] = models_of(settings).values()
    others = BatchersElsewhere(lambda: are_others_well)
    endpoints = partial(endpoint_maker, clock=monotonic)
    service = ModelService(model, endpoints, broker, None, Quarantine(), lambda: 1, others=others)
    [member] = service.pool.members
    service.pool.raise_doubt(member)
    assert service.largest_batch() == 64
    service.pool.raise_doubt(member)
    assert service.largest_batch() == (IN_DOUBT_BATCH if are_others_well else 64)
    service.pool.record_success(member)
    assert service.largest_batch() == 64
