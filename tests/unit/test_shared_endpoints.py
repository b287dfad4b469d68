"""Gateways without Redis call the same endpoints, each its share of the slots: what they can serve is a share too."""

from functools import partial

from carpool.broker.memory import MemoryBroker
from carpool.core.clock import monotonic
from carpool.service import ModelService, endpoint_maker
from carpool.settings import Settings, models_of
from carpool.settings.schema import UpstreamSettings
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
