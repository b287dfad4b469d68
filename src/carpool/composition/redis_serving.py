"""Serving over Redis: it takes what its slots can use, and writes the outcomes back."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from carpool.broker.lanes import LOWEST_TIER_SHARE
from carpool.broker.redis.batcher.consumer import Consumer
from carpool.broker.redis.batcher.leases import BatchersElsewhere
from carpool.broker.redis.batcher.replies import ReplyWriter
from carpool.broker.redis.fleet.view import Heartbeat, ModelHeartbeat
from carpool.composition.redis_context import RedisContext, late_ms
from carpool.composition.serving import Serving, make_broker
from carpool.core.defaults import do_nothing
from carpool.core.errors import Draining
from carpool.core.request import Request
from carpool.core.snapshot import RedisBatcherNumbers
from carpool.service import ModelService
from carpool.settings import total_timeout_s

logger = logging.getLogger("carpool")

RELEASE_TIMEOUT_S = 2.0


class FetchedFromRedis:
    """The requests of one model that wait in Redis. The consumer fetches them."""

    def __init__(self, serving: "RedisServing", model: str) -> None:
        self._serving = serving
        self._model = model

    def unread(self) -> int:
        """Requests that wait there, as far as is known."""
        return self._serving.consumer.unread(self._model)

    def unread_s(self) -> float:
        """How long ago that was known."""
        return self._serving.consumer.unread_s()

    def is_asked(self) -> bool:
        """Whether an answer is awaited."""
        return self._serving.consumer.is_asking()

    def batch_is_due(self) -> None:
        """Fetch what the next batch is made of."""
        self._serving.consumer.notify()

    def call_time_is_known(self) -> None:
        """Tell the gateways what can be served now."""
        self._serving.redis_context.registry.heartbeat()


class RedisServing(Serving):
    """Serving what is taken from Redis."""

    def __init__(self, redis_context: RedisContext, sampled: Callable[[Request], None] | None = None) -> None:
        runtime, settings = redis_context.runtime, redis_context.runtime.settings
        super().__init__(
            runtime,
            make_broker(runtime),
            redis_context.dead_letters,
            runtime.models.values(),
            others={
                name: BatchersElsewhere(partial(redis_context.is_served_elsewhere, name)) for name in runtime.models
            },
            fetched={name: FetchedFromRedis(self, name) for name in runtime.models},
            sampled=sampled,
        )
        self.redis_context = redis_context
        redis_context.counted = self.broker
        is_cached = any(model.upstream.cache for model in runtime.models.values())
        self.replies = ReplyWriter(
            redis_context.steps,
            redis_context.name,
            runtime.clock,
            result_ttl_ms=round(settings.tasks.result_ttl_s * 1000),
            letter_bounds=redis_context.letter_bounds,
            buried=redis_context.dead_letters.count,
            outcomes=self.broker.outcomes,
            waited=self.broker.waited,
            events=runtime.events,
            keep_result=redis_context.make_results().keep if is_cached else do_nothing,
        )
        self.consumer = Consumer(
            redis_context.steps,
            redis_context.name,
            self.broker,
            self.replies,
            redis_context.dead_letters,
            self.services,
            line_offsets_ms=redis_context.line_offsets_ms,
            late_ms=late_ms(settings),
            strict_order=settings.broker.order == "strict",
            min_share=LOWEST_TIER_SHARE if settings.broker.order == "strict" else 0.0,
            tier_target_s=runtime.tier_target_s,
            lease_ms=redis_context.lease_ms,
            letter_bounds=redis_context.letter_bounds,
            is_fleet_known=redis_context.registry.has_heard,
            clock=runtime.clock,
        )
        for service in self.services:
            service.pool.when_slot_frees(self.consumer.notify)
            service.pool.when_health_changes(partial(self._health_changed, service))
        redis_context.when_nodes_change.append(self.consumer.notify)

    def take(self) -> None:
        """Take what waits in Redis from now on."""
        self.consumer.start()
        self._runtime.opened.callback(self.consumer.close)

    async def drain(self) -> None:
        """Take nothing more, send what was taken, and write the outcomes."""
        settings = self._runtime.settings
        self.consumer.drain()
        await self.consumer.finish_asking(settings.broker.redis_timeout_ms / 1000)
        self.hurry()
        await self._send_what_is_staged(self._runtime.clock() + total_timeout_s(settings))
        await super().drain()
        if not await self.replies.finish(RELEASE_TIMEOUT_S):
            logger.warning("Redis did not take every outcome; another batcher will do that work again")

    def check_ready(self, answer: Callable[[str | None], None]) -> None:
        """Ready when this batcher takes work: it looks at the queue, and an endpoint may be called and can be."""
        if reason := self.consumer.why_no_work():
            answer(reason)
        elif self.is_down():
            answer("every endpoint has failed, and none may be called for now")
        else:
            self.try_endpoints(answer)

    def heartbeat(self) -> Heartbeat:
        """What this batcher tells the other processes of itself."""
        return Heartbeat(
            status=self.redis_context.beat_status(),
            models={
                service.name: replace(
                    model_heartbeat(service),
                    waiting=self.consumer.unread(service.name) + self.broker.depth_of(service.name),
                )
                for service in self.services
            },
        )

    def _health_changed(self, service: ModelService) -> None:
        """Gateways and batchers hear of it at once; if nothing works here, other batchers may have what is staged."""
        self.redis_context.registry.heartbeat()
        if service.pool.is_none_closed:
            self.consumer.give_back_staged(service.name)

    def describe_consumer(self) -> RedisBatcherNumbers:
        """What `/metrics` shows of the way through Redis."""
        return RedisBatcherNumbers(
            entries_taken=self.consumer.taken,
            entries_claimed=self.consumer.claimed,
            entries_unreadable=self.consumer.unreadable,
            leases_lost=self.consumer.leases_lost,
            outcomes_unconfirmed=self.replies.unconfirmed,
            outcome_retries=self.replies.retries,
        )

    async def _send_what_is_staged(self, give_up_at: float) -> None:
        """Slots are free for it: that takes a moment."""
        while self.broker.depth and self._runtime.clock() < give_up_at:  # noqa: ASYNC110 - once, at the end of a process
            await asyncio.sleep(0.005)
        for request in self.broker.waiting_requests():
            self.broker.settle(request, Draining("this process leaves"))  # back to Redis


def model_heartbeat(service: ModelService) -> ModelHeartbeat:
    """What this batcher tells the other processes of a model."""
    state = service.state()
    return ModelHeartbeat(
        slots=state.slots,
        healthy_slots=state.healthy_slots,
        in_flight=service.pool.busy(),
        current_utilization=round(service.utilization, 4),
        rate=round(service.rate, 2),
        mean_batch_size=round(service.mean_batch_size(), 2),
        capacity_rps=state.capacity_rps if service.loop.is_capacity_known() else 0.0,
        batch_s=service.loop.service_s,
        works=service.fleet.working(),
        failing=service.fleet.failing(),
        fill=round(service.fill, 4),
        probes=0 if state.healthy_slots else service.pool.free(),
        is_open_to_others=service.pool.is_shut_to_some,
        retry_after_s=service.pool.retry_after_s() if service.pool.is_down else 0,
        endpoints=tuple(state.endpoints),
        quarantined=tuple(service.quarantined_here()),
        cost=service.loop.cost.seconds_by_term,
    )
