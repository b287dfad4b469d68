"""The batcher half over Redis: it takes what its slots can use, and writes the outcomes back."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from carpool.broker.redis.batcher.elsewhere import BatchersElsewhere
from carpool.broker.redis.batcher.feed import Feed
from carpool.broker.redis.batcher.replies import ReplyWriter
from carpool.broker.redis.fleet.view import Beat, ModelBeat, endpoint_beat
from carpool.broker.sides import BatcherSide
from carpool.composition.batcher import BatcherHalf, make_broker
from carpool.composition.meeting import Meeting, late_ms
from carpool.core.errors import Draining
from carpool.core.snapshot import RedisBatcherNumbers
from carpool.service import ModelService
from carpool.settings import total_timeout_s

logger = logging.getLogger("carpool")

RELEASE_TIMEOUT_S = 2.0


class RedisBatcherHalf(BatcherHalf):
    """A batcher half that is filled from Redis."""

    def __init__(self, meeting: Meeting) -> None:
        ground, settings = meeting.ground, meeting.ground.settings
        others = {name: BatchersElsewhere(partial(meeting.is_served_elsewhere, name)) for name in ground.models}
        super().__init__(ground, make_broker(ground), meeting.dead_letters, ground.models.values(), others=others)
        self.meeting = meeting
        meeting.counted = self.broker
        self.replies = ReplyWriter(
            meeting.steps,
            meeting.name,
            ground.clock,
            result_ttl_ms=round(settings.tasks.result_ttl_s * 1000),
            letter_bounds=meeting.letter_bounds,
            buried=meeting.dead_letters.count,
            outcomes=self.broker.outcomes,
            waited=self.broker.waited,
            events=ground.events,
        )
        if any(model.is_cached for model in ground.models.values()):
            self.replies.keep_result = meeting.make_results().keep
        self.feed: BatcherSide = Feed(
            meeting.steps,
            meeting.name,
            self.broker,
            self.replies,
            meeting.dead_letters,
            self.services,
            line_offsets_ms=meeting.line_offsets_ms,
            late_ms=late_ms(settings),
            strict_order=settings.broker.order == "strict",
            trickle=settings.broker.trickle if settings.broker.order == "strict" else 0.0,
            tier_target_s=ground.tier_target_s,
            lease_ms=settings.broker.lease_ms,
            deliveries_max=settings.broker.deliveries_max,
            letter_bounds=meeting.letter_bounds,
            is_let_in=lambda: meeting.registry.is_in,
            clock=ground.clock,
        )
        for service in self.services:
            service.pool.when_slot_frees(self.feed.ring)
            service.pool.when_health_changes(partial(self._health_changed, service))
            service.loop.left_apart = self.feed.ring
            service.loop.when_known = meeting.registry.beat
            service.waiting_elsewhere = partial(waiting_in_redis, self.feed, service)
            service.loop.waiting_elsewhere = partial(self.feed.unread, service.name)
            service.loop.company_comes = partial(company_comes, self.feed, service)
        meeting.when_nodes_change.append(self.feed.ring)

    def take(self) -> None:
        """Take what waits in Redis from now on."""
        self.feed.start()
        self._ground.opened.callback(self.feed.close)

    async def drain(self) -> None:
        """Take nothing more, send what was taken, and write the outcomes."""
        settings = self._ground.settings
        self.feed.drain()
        await self.feed.finish_asking(settings.broker.redis_timeout_ms / 1000)
        self.hurry()
        await self._send_what_is_staged(self._ground.clock() + total_timeout_s(settings))
        await super().drain()
        if not await self.replies.finish(RELEASE_TIMEOUT_S):
            logger.warning("Redis did not take every outcome; another batcher will do that work again")

    def check_ready(self, answer: Callable[[str | None], None]) -> None:
        """Ready when this batcher takes work: it looks at the queue, and an endpoint may be called and can be."""
        if reason := self.feed.why_no_work():
            answer(reason)
        elif self.is_down():
            answer("every endpoint has failed, and none may be called for now")
        else:
            self.try_endpoints(answer)

    def beat(self) -> Beat:
        """What the others are told of this batcher."""
        return Beat(
            status=self.meeting.beat_status(), models={service.name: model_beat(service) for service in self.services}
        )

    def _health_changed(self, service: ModelService) -> None:
        """Gateways and batchers hear of it at once; if nothing works here, others may have what is staged."""
        self.meeting.registry.beat()
        if service.pool.is_none_closed:
            self.feed.give_back_staged(service.name)

    def describe_feed(self) -> RedisBatcherNumbers:
        """What `/metrics` shows of the way through Redis."""
        return RedisBatcherNumbers(
            entries_taken=self.feed.taken,
            entries_claimed=self.feed.claimed,
            entries_unreadable=self.feed.unreadable,
            leases_lost=self.feed.leases_lost,
            outcomes_unconfirmed=self.replies.unconfirmed,
            outcome_retries=self.replies.retries,
        )

    async def _send_what_is_staged(self, give_up_at: float) -> None:
        """Slots are free for it: that takes a moment."""
        while self.broker.depth and self._ground.clock() < give_up_at:  # noqa: ASYNC110 - once, at the end of a process
            await asyncio.sleep(0.005)
        for request in self.broker.waiting_requests():
            self.broker.settle(request, Draining("this process leaves"))  # back to Redis


def model_beat(service: ModelService) -> ModelBeat:
    """What the others are told of a model."""
    state = service.state()
    return ModelBeat(
        slots=state.slots,
        healthy_slots=state.healthy_slots,
        in_flight=service.pool.busy(),
        current_utilization=service.utilization,
        rate=service.rate,
        mean_batch_size=service.mean_batch_size(),
        capacity_rps=state.capacity_rps if service.loop.is_capacity_known() else 0.0,
        batch_s=service.loop.service_s,
        probes=0 if state.healthy_slots else service.pool.free(),
        is_open_to_others=service.pool.is_shut_to_some,
        retry_after_s=service.pool.retry_after_s() if service.pool.is_down else 0,
        endpoints=tuple(map(endpoint_beat, state.endpoints)),
        offenders=tuple(service.offenders_seen()),
    )


def waiting_in_redis(feed: BatcherSide, service: ModelService) -> int:
    """How many of a model wait in Redis: those that it told of, and those that have come since, at the usual rate."""
    return round(feed.unread(service.name) + service.rate * feed.unread_s())


def company_comes(feed: BatcherSide, service: ModelService) -> bool:
    """Whether requests that were cleared by a search should wait a moment for others, which the feed fetches."""
    return service.dispatcher.isolation.running > 0 and waiting_in_redis(feed, service) > 0
