"""The load shedders of a process: made as configured, one for each model, and kept informed of what can be served."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from carpool.admission.shedding import LoadShedder, TierRule
from carpool.broker.lanes import LOWEST_TIER_SHARE
from carpool.core.ports import QueueStats
from carpool.core.request import Request
from carpool.service import ModelService
from carpool.settings import Settings, total_timeout_s

# Finds the waiting requests of a model and a tier.
FindQueueStats = Callable[[str, int], QueueStats]
# The least rate that a gateway is taken to want.
SOME_RPS = 1.0


def make_shedders(settings: Settings, models: Iterable[str], queue_stats: FindQueueStats) -> dict[str, LoadShedder]:
    """A load shedder for each model; none where nothing is shed."""
    shedding = settings.shedding
    if shedding.mode == "off":
        return {}
    rules = [TierRule(tier.target_ms / 1000, tier.wait_max_ms / 1000, tier.name) for tier in settings.tiers]
    return {
        model: LoadShedder(
            rules,
            stats_of_tiers(queue_stats, model, len(rules)),
            is_strict=settings.broker.order == "strict",
            min_share=LOWEST_TIER_SHARE,
            by_thresholds=shedding.mode == "thresholds",
            queue_s=queue_timeout_s(settings),
        )
        for model in models
    }


def queue_timeout_s(settings: Settings) -> float:
    """How long a request may wait for a slot at all."""
    return min(settings.broker.queue_timeout_s, total_timeout_s(settings))


def stats_of_tiers(queue_stats: FindQueueStats, model: str, tiers: int) -> list[QueueStats]:
    """The waiting requests of a model, by tier."""
    return [queue_stats(model, tier) for tier in range(tiers)]


def sample(shedders: Mapping[str, LoadShedder], request: Request) -> None:
    """A request has got its slot. Tasks do not count, nor requests that came in late: both may wait long."""
    if not (request.is_task or request.is_late):
        shedders[request.model].waited(request.tier, request.taken - request.arrived, request.arrived)


def learn_own(shedder: LoadShedder, service: ModelService, stats_by_tier: Sequence[QueueStats]) -> None:
    """What the endpoints of this process can serve."""
    count, loop = len(stats_by_tier), service.loop
    if loop.is_capacity_known():
        capacity, batches = service.capacity_rps(), [loop.busy_size] * count
        call_s, lanes = loop.service_s, service.lane_counts()
        spread = loop.wait_spread()
        shedder.learn(
            [capacity] * count, batches, stats_by_tier, call_s=call_s, burst_rps=capacity, lanes=lanes, spread=spread
        )
    else:
        shedder.suppose(lambda: (service.fleet.healthy_slots() * loop.busy_size, loop.first_sent()), stats_by_tier)


def learn_share(
    shedder: LoadShedder,
    capacity: float,
    batch: float,
    others: Sequence[float],
    stats_by_tier: Sequence[QueueStats],
    batch_s: float,
    gateways: int,
) -> None:
    """What a gateway may have of what the whole fleet can serve. `others`: requests a second, by tier, elsewhere.

    What other gateways do not want of a tier and those above it is free; where they want it all, each gateway has a
    share by what comes to it. So a flood of a low tier elsewhere takes nothing from a higher tier here. A burst may
    come to all gateways at once: each has an equal part for it, or one by what comes to it if that is more.
    """
    part = max(1 / gateways, sum(shedder.rates) / max(sum(shedder.rates) + sum(others), SOME_RPS))
    shares: list[float] = []
    for own, elsewhere in zip(accumulate(shedder.rates), accumulate(others), strict=True):
        # A gateway to which nothing came so far may be about to get some.
        share = max(own, SOME_RPS) / (max(own, SOME_RPS) + elsewhere)
        shares.append(max(capacity * share, capacity - elsewhere))
    shedder.learn(
        shares,
        [batch * share / capacity for share in shares],
        stats_by_tier,
        call_s=batch_s,
        burst_rps=capacity * part,
        elsewhere=[each * part for each in others],
        batch_s=batch_s,
    )


def wanted(shedders: Mapping[str, LoadShedder]) -> dict[str, tuple[float, ...]]:
    """Requests a second that come, by model and tier; for the other gateways."""
    return {model: tuple(shedder.rates) for model, shedder in shedders.items()}
