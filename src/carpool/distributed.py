"""Gateways and batchers over Redis: a process is one of them, or both. Their parts are listed here."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import msgspec

from carpool.broker.redis.fleet.registry import LiveParts
from carpool.broker.redis.fleet.view import Heartbeat
from carpool.broker.webhooks.deliverer import Deliverer
from carpool.composition.engine import EXPIRY_TICK_S
from carpool.composition.faces import Faces
from carpool.composition.process import Part, Process
from carpool.composition.redis_admission import RedisAdmission
from carpool.composition.redis_context import RedisContext
from carpool.composition.redis_serving import RedisServing
from carpool.composition.serving import Serving, make_broker
from carpool.composition.tracking import describe_tracking
from carpool.composition.webhooks import describe_webhooks, start_webhooks
from carpool.core.names import Role
from carpool.core.request import QUEUED, Request
from carpool.core.snapshot import Mode, Numbers, Snapshot
from carpool.face.http.admin import FoundRequest

logger = logging.getLogger("carpool")


class RedisProcess(Process):
    """One of a fleet that meets in Redis."""

    redis_context: RedisContext

    @abstractmethod
    def heartbeat(self) -> Heartbeat:
        """What this process tells the others of itself."""

    @abstractmethod
    def expire(self) -> None:
        """Look at the deadlines."""

    @abstractmethod
    def mode(self) -> Mode:
        """How requests are served now."""

    @abstractmethod
    def describe(self) -> tuple[Numbers, ...]:
        """What `/metrics` shows because of the role."""

    async def meet(self) -> RedisContext:
        """Find out whether this Redis may be used; the halves are plugged to what this returns."""
        redis_context = self.redis_context = RedisContext(self.runtime, self.role, self._told_of_itself)
        await redis_context.check_disks()
        name, watch = redis_context.name.decode(), self.watch
        watch.name = name
        watch.others = LiveParts(redis_context.nodes, redis_context.keys, name, lambda: redis_context.registry.view)
        redis_context.when_heard.append(lambda view: watch.want(view.is_watched(without=name)))
        return redis_context

    def _told_of_itself(self) -> Heartbeat:
        cores = round(self.redis_context.cores.used, 4)
        return msgspec.structs.replace(self.heartbeat(), is_watched=self.watch.is_looked_at, cores=cores)

    def watch_deadlines(self) -> None:
        """Look at the deadlines from now on."""
        self.runtime.do_every(EXPIRY_TICK_S, self.expire)

    async def listen(self) -> None:
        """Serve operators."""
        await self.listen_for_operators(self.redis_context.desk, self.redis_context.outbox)

    def say_where(self, where: str) -> None:
        """Log where this process serves."""
        facts = {
            "role": self.role,
            "name": self.redis_context.name.decode(),
            "models": list(self.runtime.models),
            "slots": self.serving.slots_total(),
        }
        host = self.runtime.settings.gateway.admin_host
        logger.info("%s, admin on %s:%d", where, host, self.admin_port, extra={"fields": facts})

    def say_goodbye(self) -> None:
        """Tell all processes of the fleet that this one leaves."""
        self.redis_context.registry.heartbeat()

    def snapshot(self) -> Snapshot:
        """What operators see."""
        return Snapshot(
            health=self.redis_context.health(self.mode()),
            fleet=self.redis_context.fleet(self.serving),
            scale=self.redis_context.scaling.state(),
            numbers=(
                *self.redis_context.describe(),
                *self.describe(),
                *describe_tracking(self.tracking),
                *self.runtime.describe(),
            ),
            models=self.serving.describe(),
        )

    @abstractmethod
    def check_work(self, answer: Callable[[str | None], None]) -> None:
        """Whether work is done while Redis is there; else the reason why not."""

    def check_ready(self, answer: Callable[[str | None], None]) -> None:
        """Ready when work is done over Redis, or when a gateway can do it by itself; else the reason why not."""
        if self.runtime.draining:
            answer("draining")
        elif self.mode() == "redis":
            self.check_work(answer)
        elif self.role != "batcher" and self.serving.services:
            self.serving.try_endpoints(answer)
        else:
            answer(f"Redis cannot be reached: {self.redis_context.nodes.trouble}")


class RedisGateway(RedisProcess):
    """A gateway half; with endpoints of its own also a batcher half for the time when Redis is gone."""

    role: ClassVar[Role] = "gateway"
    # None: no host is allowed.
    webhooks: Deliverer | None = None

    async def plug(self) -> Sequence[Part]:
        """A queue in Redis, and its own endpoints for the time when Redis is gone."""
        runtime, redis_context = self.runtime, await self.meet()
        models = runtime.models.values()
        self.serving = Serving(
            runtime,
            make_broker(runtime),
            redis_context.dead_letters,
            models if all(model.upstream.endpoints for model in models) else (),
            # Its endpoints are the batchers' too: while Redis is gone, the gateways share them.
            sharers=redis_context.gateways_last_seen,
            sampled=self._sampled,
        )
        return self.parts_with(Part(self.serving.start, self.serving.drain))

    def parts_with(self, serving: Part, consumer: Sequence[Part] = ()) -> Sequence[Part]:
        """What a process with clients has. Their requests are answered by batchers, or by its own endpoints."""
        redis_context = self.redis_context
        self.admission = RedisAdmission(redis_context, self.serving, self.watch.find_slow)
        self.faces = Faces(self.runtime, self.admission)
        return (
            Part(redis_context.start, redis_context.registry.leave),
            serving,
            Part(self.admission.watch),
            Part(self._start_webhooks),
            Part(self.watch_deadlines),
            Part(partial(redis_context.wait_for_redis, self.admission.is_connected)),
            *consumer,
            Part(self._open_faces, self._close_faces),
            Part(self.listen),
            Part(self._say_where, self.say_goodbye),
        )

    def _start_webhooks(self) -> None:
        self.webhooks = start_webhooks(self.runtime, self.redis_context.outbox)

    async def _open_faces(self) -> None:
        await self.faces.start(self.listening, self.check_ready)
        self.port = self.faces.port

    async def _close_faces(self) -> None:
        await self.faces.stop_accepting()
        await self.faces.drain()

    def _say_where(self) -> None:
        self.say_where(f"serving on {self.runtime.settings.gateway.host}:{self.port}")

    def _sampled(self, request: Request) -> None:
        self.admission.sampled_here(request)

    def expire(self) -> None:
        """Look at the deadlines."""
        now = self.runtime.clock()
        self.admission.expire(now)
        self.serving.expire(now)

    def check_work(self, answer: Callable[[str | None], None]) -> None:
        """Batchers do it."""
        answer(None if self.redis_context.registry.view.live_batchers() else "no batcher lives")

    def find_request(self, request_id: str, answer: FoundRequest) -> None:
        """Tell how a request is: one of this process, a task, or one of another gateway."""
        self.admission.find(request_id, answer)

    def heartbeat(self) -> Heartbeat:
        """What this process tells the others of itself."""
        return self.admission.heartbeat()

    def mode(self) -> Mode:
        """How requests are served now."""
        return self.admission.queue.mode

    def describe(self) -> tuple[Numbers, ...]:
        """What `/metrics` shows because of the role. What is held in memory came to it in direct mode."""
        pending, direct = self.admission.queue.pending, self.serving.broker
        shedder = self.faces.describe(pending.held + direct.held, pending.held_bytes + direct.held_bytes)
        webhooks = describe_webhooks(self.webhooks)
        return shedder, self.admission.describe_cache(), self.admission.describe_queue(), *webhooks


class RedisBatcher(RedisProcess):
    """A batcher half."""

    role: ClassVar[Role] = "batcher"

    async def plug(self) -> Sequence[Part]:
        """What is taken from Redis; others take what waits there when this one leaves."""
        redis_context = await self.meet()
        self.serving = self.own = RedisServing(redis_context)
        return (
            Part(redis_context.start, redis_context.registry.leave),
            Part(self.serving.start, self.own.drain),
            Part(self.watch_deadlines, redis_context.tasks.drain),
            Part(partial(redis_context.wait_for_redis, redis_context.are_all_nodes_up)),
            Part(self.own.take),
            Part(self.listen),
            Part(partial(self.say_where, "batching"), self.say_goodbye),
        )

    def expire(self) -> None:
        """Look at the deadlines."""
        self.serving.expire(self.runtime.clock())

    def check_work(self, answer: Callable[[str | None], None]) -> None:
        """It takes work, and Redis takes its outcomes."""
        self.own.check_ready(answer)

    def find_request(self, request_id: str, answer: FoundRequest) -> None:
        """Tell how a request is that waits here, or a task."""
        request = self.serving.find_waiting(request_id)
        if request is None or (request.is_task and request.phase == QUEUED):
            self.redis_context.tasks.state(request_id, answer)
        else:
            answer(self.serving.tell_of(request))

    def heartbeat(self) -> Heartbeat:
        """What this process tells the others of itself."""
        return self.own.heartbeat()

    def mode(self) -> Mode:
        """How requests are served now."""
        return "redis" if self.redis_context.are_all_nodes_up() else "down"

    def describe(self) -> tuple[Numbers, ...]:
        """What `/metrics` shows because of the role."""
        return (self.own.describe_consumer(),)


class RedisServe(RedisGateway):
    """Both halves in one process of a fleet."""

    role: ClassVar[Role] = "serve"

    async def plug(self) -> Sequence[Part]:
        """Both halves. Its requests are answered by its own batches, or by others'."""
        self.serving = self.own = RedisServing(await self.meet(), self._sampled)
        return self.parts_with(Part(self.serving.start, self.own.drain), [Part(self.own.take)])

    def check_work(self, answer: Callable[[str | None], None]) -> None:
        """Its batcher half does it."""
        self.own.check_ready(answer)

    def heartbeat(self) -> Heartbeat:
        """What this process tells the others of itself."""
        return msgspec.structs.replace(self.admission.heartbeat(), models=self.own.heartbeat().models)

    def describe(self) -> tuple[Numbers, ...]:
        """What `/metrics` shows because of the role. What is held in memory was taken from Redis."""
        pending = self.admission.queue.pending
        shedder = self.faces.describe(pending.held, pending.held_bytes)
        queue, consumer = self.admission.describe_queue(), self.own.describe_consumer()
        return shedder, self.admission.describe_cache(), queue, consumer, *describe_webhooks(self.webhooks)


PROCESSES: dict[Role, type[RedisProcess]] = {each.role: each for each in (RedisGateway, RedisBatcher, RedisServe)}
