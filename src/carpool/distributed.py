"""Gateways and batchers over Redis: a process is one of them, or both. Start and drain are read here.

A gateway has a face, admission, and its half of the broker (`RedisQueue`, `RedisTasks`). A batcher has models with
their loops over a local broker, which its half (`Feed`) fills and whose outcomes go back to Redis (`ReplyWriter`). A
gateway with upstreams has such models too, for the time when Redis is gone.
"""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from carpool.admission.gate import Gate
from carpool.broker.memory import MemoryBroker
from carpool.broker.parking import Parking
from carpool.broker.redis.batcher.feed import Feed
from carpool.broker.redis.batcher.replies import ReplyWriter
from carpool.broker.redis.batcher.results import TaskResults
from carpool.broker.redis.client.nodes import Nodes
from carpool.broker.redis.dead_letters.bounds import LetterBounds
from carpool.broker.redis.dead_letters.box import RedisDeadLetterBox
from carpool.broker.redis.fleet.depth import DepthWatch
from carpool.broker.redis.fleet.memory import MemoryWatch
from carpool.broker.redis.fleet.persistence import PersistenceWatch
from carpool.broker.redis.fleet.registry import Registry
from carpool.broker.redis.fleet.servers import Inspection
from carpool.broker.redis.fleet.view import FleetView, fleet_page, health_numbers
from carpool.broker.redis.formats import Reply
from carpool.broker.redis.gateway.dead_letters import RedisDeadLetterDesk
from carpool.broker.redis.gateway.queue import RedisQueue
from carpool.broker.redis.gateway.states import RequestStates
from carpool.broker.redis.gateway.task_intake import TaskIntake
from carpool.broker.redis.gateway.task_removals import TaskRemovals
from carpool.broker.redis.gateway.tasks import RedisTasks
from carpool.broker.redis.keys import Keys, line_name
from carpool.broker.redis.steps import Steps
from carpool.broker.sides import BatcherSide, Mode
from carpool.composition import Process, face_settings, http_limits, intake_settings
from carpool.core.clock import Clock, monotonic
from carpool.core.errors import CarpoolError, Draining
from carpool.core.names import Role
from carpool.core.request import QUEUED, Request, RequestState, state_of
from carpool.face.http.admin import FoundRequest
from carpool.face.http.gateway import GatewayRoutes
from carpool.face.http.openapi import gateway_openapi
from carpool.face.http.server import HttpServer
from carpool.face.intake import Intake
from carpool.service import ModelFace, ModelService
from carpool.settings import ConfigError, Settings, broker_address, models_of
from carpool.telemetry.metrics import Value

logger = logging.getLogger("carpool")

# With strict order, what a tier adds to the place of its entries, in ms: more than any clock counts.
STRICT_STEP_MS = 10**13
# So many tasks of the largest size have room in a shard.
LARGEST_TASKS_A_SHARD = 4
# Dead letters kept in each shard.
LETTERS_A_SHARD_MAX = 10_000
# For so long after the last batcher was seen, requests are still queued: it may be about to come back.
BATCHERS_GONE_S = 3.0
WATCH_S = 0.25
REFRESH_S = 1.0
# Weight of the last second in the rate that is shown.
RATE_WEIGHT = 0.5
RELEASE_TIMEOUT_S = 2.0
START_TIMEOUT_S = 2.0
MODE_NUMBERS: dict[Mode, int] = {"down": 0, "redis": 1, "direct": 2}


class FleetAvailability:
    """What admission sees of the upstreams of a model: those of all batchers, or in direct mode our own."""

    def __init__(self) -> None:
        self.is_down = False
        # Batchers answer for owners of their own.
        self.is_shut_to_some = False

    def is_shut_to(self, owner: str) -> bool:
        """Nobody is, here."""
        return False

    def retry_after_s(self) -> int:
        """While it is down: whole seconds until it is tried again."""
        return 1


class DistributedProcess(Process):
    """A gateway, a batcher, or both."""

    def __init__(
        self, settings: Settings, role: Role, listening: socket.socket | None = None, clock: Clock = monotonic
    ) -> None:
        super().__init__(settings, listening, clock)
        self.role = role
        self.is_gateway, self.is_batcher = role != "batcher", role != "gateway"
        # Unique: what belongs to a process that is gone must not reach another one.
        self.name = f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}".encode()
        self.queue: RedisQueue | None = None
        self.tasks: RedisTasks | None = None
        self.feed: BatcherSide | None = None
        self.replies: ReplyWriter | None = None
        self.local: MemoryBroker | None = None
        # Where Redis must not write to a disk.
        self.disks: PersistenceWatch | None = None
        self._batchers_seen = self.clock()
        self._rate = 0.0
        self._arrivals_then = 0

    async def start(self) -> None:
        """Plug the stages together, from the back to the front, and listen."""
        settings = self.settings
        broker, gateway = settings.broker, settings.gateway
        named = self.named
        self.targets = tuple(tier.target_ms / 1000 for tier in settings.tiers)
        self.keys = Keys(broker.namespace, broker.shards)
        if broker.persistence == "forbidden":
            await self._watch_disks()
        self.nodes = self._connect()
        self.memory = MemoryWatch(self.nodes, memory_max=broker.memory_max)
        self.depth = DepthWatch(self.nodes, self.keys)
        self.steps = Steps(self.nodes, self.keys)
        self.letter_bounds = LetterBounds(
            letters_max=LETTERS_A_SHARD_MAX,
            bytes_max=-(-settings.dead_letters.bytes_max // broker.shards),
            ttl_ms=round(settings.tasks.dead_letter_ttl_s * 1000),
            is_memory_short=lambda: self.memory.is_short,
            memory_bytes_max=lambda: self.memory.letter_bytes_max(broker.shards),
            clock=self.clock,
        )
        self.dead_letters = RedisDeadLetterBox(
            self.steps,
            bounds=self.letter_bounds,
            kept=settings.dead_letters.synchronous,
        )
        if all(model.upstream.endpoints for model in named.values()):  # a gateway may have none
            self._make_models()
        faces: Sequence[ModelFace] = self.services or [ModelFace(model) for model in named.values()]
        if self.is_batcher:
            self._make_feed()
        self.tasks = self._make_tasks()
        self._opened.callback(self.tasks.close)
        self.states = RequestStates(self.steps, self.name, lease_ms=broker.lease_ms, others=self._other_gateways)
        self.availability = {name: FleetAvailability() for name in named}
        if self.is_gateway:
            self._make_queue(list(named))
        self.registry = Registry(
            self.nodes,
            self.keys,
            name=self.name,
            role=self.role,
            describe=self.heartbeat,
            changed=self._fleet_changed,
            heard=self._heard_of_offenders,
            clock=self.clock,
        )
        self.start_fleets()
        self.start_timers()
        self.memory.start()
        self._opened.callback(self.memory.close)
        self.depth.start()
        self._opened.callback(self.depth.close)
        self.registry.start()
        self._opened.callback(self.registry.close)
        self.do_every(WATCH_S, self._fleet_changed)
        await self._wait_for_redis()
        if self.feed is not None:
            self.feed.start()
            self._opened.callback(self.feed.close)
        by_name = {face.name: face for face in faces}
        desk = RedisDeadLetterDesk(
            self.steps,
            self.tasks,
            frozenset(named),
            tier_target_s=self.targets,
            task_timeout_s=settings.tasks.timeout_s,
            prepare=lambda request: by_name[request.model].prepare(request),
            clock=self.clock,
        )
        self.desk = desk
        self.do_every(REFRESH_S, lambda: self.in_background(self._refresh_numbers()))
        if self.is_gateway:
            assert self.queue is not None
            self.gate = Gate(
                self.queue,
                self.tasks,
                self.availability,
                lowest_tier=len(settings.tiers) - 1,
                trusted_proxies=gateway.trusted_proxies,
            )
            self.intake = Intake(
                self.gate,
                self.queue,
                self.tasks,
                {face.name: face.served() for face in faces},
                intake_settings(settings, self.targets),
                clock=self.clock,
            )
            routes = GatewayRoutes(
                self.intake,
                face_settings(settings),
                gateway_openapi(list(named), settings.model, settings.tasks.wait_ms_max),
            )
            await self.listen_for_clients(HttpServer(routes.router, http_limits(settings, faces), self.clock))
        await self.listen_for_operators(desk)
        for service in self.services:
            self.in_background(service.ask_limits())
        facts = {"role": self.role, "name": self.name.decode(), "models": list(named), "slots": self.slots_total()}
        where = f"serving on {gateway.host}:{self.port}, " if self.is_gateway else "batching, "
        logger.info("%sadmin on %s:%d", where, gateway.admin_host, self.admin_port, extra={"fields": facts})

    async def drain(self) -> None:
        """Stop taking new work, finish the old, leave. Every step may rely on those before it."""
        logger.info("draining")
        self.draining = True
        self.registry.beat()
        if self.feed is not None and not self.is_gateway:
            self.feed.drain()  # others take what waits in Redis
        await self.stop_accepting()
        if self.tasks is not None:
            self.tasks.drain()
        if self.is_gateway:
            await self.answer_the_rest()  # by this process's batches, or by others'
            self.gate.closed = True
        if self.feed is not None:
            self.feed.drain()
            await self.feed.finish_asking(self.settings.broker.redis_timeout_ms / 1000)
        for service in self.services:
            service.loop.drain()  # company will not come
        await self._send_what_is_staged()
        await self.finish_batches()
        if self.replies is not None and not await self.replies.finish(RELEASE_TIMEOUT_S):
            logger.warning("Redis did not take every outcome; another batcher will do that work again")
        await self.registry.leave()
        await self.close()
        logger.info("drained")

    def expire(self) -> None:
        """Look at the deadlines."""
        now = self.clock()
        if self.queue is not None:
            self.queue.expire(now)
        if self.local is not None:
            self.local.expire(now)

    # The parts.

    async def _watch_disks(self) -> None:
        """Refuse to start where Redis writes to a disk, or does not tell; later, look again and again."""
        self.disks = PersistenceWatch(Inspection(broker_address(self.settings.broker), self.keys))
        if faults := await self.disks.faults():
            raise ConfigError(faults)
        self.disks.start()
        self._opened.callback(self.disks.close)

    def _connect(self, patience_ms: int = 0) -> Nodes:
        broker = self.settings.broker
        timeout_s = (broker.redis_timeout_ms + patience_ms) / 1000
        nodes = Nodes(broker_address(broker), timeout_s=timeout_s, changed=self._nodes_changed)
        self._opened.push_async_callback(nodes.close)
        nodes.start()
        return nodes

    def _make_models(self) -> None:
        settings = self.settings
        self.local = MemoryBroker(
            waiting_max=settings.broker.waiting_max,
            bytes_max=settings.broker.bytes_max,
            lanes_max=settings.broker.lanes_max,
            tiers=len(settings.tiers),
            strict_order=settings.broker.order == "strict",
            task_patience_s=settings.tasks.patience_ms / 1000,
            offenders=self.offenders,
            events=self.events,
            clock=self.clock,
        )
        # A gateway's endpoints are the batchers' too: while Redis is gone, the gateways share them.
        sharers = None if self.is_batcher else self._gateways_last_seen
        self.services = [
            ModelService(model, self.session, self.local, self.dead_letters, self.offenders, sharers, clock=self.clock)
            for model in self.named.values()
        ]

    def _make_feed(self) -> None:
        settings = self.settings
        assert self.local is not None
        results = TaskResults(
            self.steps,
            result_ttl_ms=round(settings.tasks.result_ttl_s * 1000),
            letter_bounds=self.letter_bounds,
            buried=self.dead_letters.count,
        )
        self.replies = ReplyWriter(
            self.steps,
            results,
            self.name,
            self.clock,
            outcomes=self.local.outcomes,
            waited=self.local.waited,
            events=self.events,
        )
        self.feed = Feed(
            self.steps,
            self.name,
            self.local,
            self.replies,
            self.dead_letters,
            self.services,
            lines=list(line_offsets_ms(settings)),
            tier_target_s=self.targets,
            lease_ms=settings.broker.lease_ms,
            deliveries_max=settings.broker.deliveries_max,
            letter_bounds=self.letter_bounds,
            clock=self.clock,
        )
        for service in self.services:
            service.pool.when_slot_frees(self.feed.ring)
            service.waiting_elsewhere = partial(waiting_in_redis, self.feed, service)
            service.loop.company_comes = partial(company_comes, self.feed, service)

    def _make_tasks(self) -> RedisTasks:
        broker, stored_bytes_max = self.settings.broker, self.settings.tasks.stored_bytes_max
        shards = task_shards(self.settings)
        removals = TaskRemovals(self.steps)
        intake = TaskIntake(
            self.steps,
            removals,
            line_offsets_ms=line_offsets_ms(self.settings),
            held_max=-(-broker.waiting_max // broker.shards),
            input_bytes_max=-(-broker.bytes_max // shards),
            stored_bytes_max=-(-stored_bytes_max // shards),
            lanes_max=broker.lanes_max,
            shards_used=shards,
            replicas=broker.replicas,
            replicas_timeout_ms=broker.replicas_timeout_ms,
            durable_nodes=self._connect(broker.replicas_timeout_ms) if broker.replicas else None,
            is_memory_full=lambda: self.memory.is_full,
            events=self.events,
            clock=self.clock,
        )
        result_ttl_ms = round(self.settings.tasks.result_ttl_s * 1000)
        return RedisTasks(self.steps, self.name, intake, removals, result_ttl_ms, count=self._count_outcome)

    def _make_queue(self, models: list[str]) -> None:
        broker = self.settings.broker
        assert self.tasks is not None
        self.queue = RedisQueue(
            self.steps,
            self.name,
            line_offsets_ms=line_offsets_ms(self.settings),
            waiting_max=broker.waiting_max,
            bytes_max=broker.bytes_max,
            lanes_max=broker.lanes_max,
            models=models,
            local=self.local,
            is_memory_full=lambda: self.memory.is_full,
            task_finished=self.tasks.finished,
            looked_for=self._looked_for,
            mode_changed=lambda mode: self._fleet_changed(),
            events=self.events,
            clock=self.clock,
        )
        self._opened.callback(self.queue.close)

    async def _wait_for_redis(self) -> None:
        """Give Redis a moment, so that the first clients find it; then go on without it."""
        give_up_at = self.clock() + START_TIMEOUT_S
        while not self._is_connected() and self.clock() < give_up_at:  # noqa: ASYNC110 - once, at the start or the end of a process
            await asyncio.sleep(0.01)
        if not self._is_connected():
            logger.warning("Redis cannot be reached; it is tried again and again: %s", self.nodes.trouble)

    def _is_connected(self) -> bool:
        if self.queue is not None:
            return self.queue.mode == "redis"
        return all(self.nodes.is_up(shard.slot) for shard in self.keys.shards)

    async def _send_what_is_staged(self) -> None:
        """Slots are free for it: that takes a moment."""
        give_up_at = self.clock() + self.settings.broker.total_timeout_s
        while self.local is not None and self.local.depth and self.clock() < give_up_at:  # noqa: ASYNC110 - once, at the start or the end of a process
            await asyncio.sleep(0.005)
        if self.local is not None:
            for request in self.local.waiting_requests():
                self.local.settle(request, Draining("this process leaves"))  # back to Redis

    # What changes.

    def _nodes_changed(self) -> None:
        if self.queue is not None:
            self.queue.nodes_changed()
        if self.feed is not None:
            self.feed.ring()

    def _fleet_changed(self) -> None:
        """See whether anybody could serve a request."""
        view = self.registry.view
        now = self.clock()
        if view.live_batchers() or not self.registry.is_fresh():
            self._batchers_seen = now
        is_direct = self.queue is not None and self.queue.mode != "redis"
        for name, availability in self.availability.items():
            if is_direct:
                own = [service.pool.is_down for service in self.services if service.name == name]
                availability.is_down = bool(own) and all(own)
            elif view.live_batchers():
                availability.is_down = self.registry.is_fresh() and view.healthy_slots(name) == 0
            else:
                availability.is_down = now - self._batchers_seen > BATCHERS_GONE_S

    def _count_outcome(self, code: str) -> None:
        """A task has an outcome that no batcher gave it."""
        counts = self._counted().outcomes
        counts[code] = counts.get(code, 0) + 1  # bounded: codes come from the error tree

    def _counted(self) -> Parking | MemoryBroker:
        """Where all outcomes of this process are counted: the two share their counts."""
        if self.queue is not None:
            return self.queue.parking
        assert self.local is not None
        return self.local

    def _heard_of_offenders(self, view: FleetView) -> None:
        """What one batcher has found out about an owner, all of them act upon."""
        found = [(service.name, owner) for service in self.services for owner in view.offenders(service.name)]
        self.offenders.told(found, self.clock())

    async def _refresh_numbers(self) -> None:
        """Numbers for operators that cost a little more."""
        try:
            await self.desk.refresh()
        except CarpoolError:
            pass  # Redis is away; the numbers stay as they were
        if self.queue is not None:
            arrivals = sum(self.queue.parking.arrivals.values())
            self._rate += RATE_WEIGHT * ((arrivals - self._arrivals_then) / REFRESH_S - self._rate)
            self._arrivals_then = arrivals

    def _gateways_last_seen(self) -> int:
        """As Redis told last: while it is gone, that stays."""
        return len(self.registry.view.live_gateways())

    # What operators see; also telemetry.metrics.View

    def heartbeat(self) -> dict[str, Any]:
        """What this process tells the others of itself."""
        return {
            "status": "draining" if self.draining else "ok",
            "mode": self.queue.mode if self.queue is not None else "",
            "rate": self.rate(),
            "in_flight": self.queue.parking.held if self.queue is not None else 0,
            "models": {service.name: service.heartbeat() for service in self.services} if self.is_batcher else {},
        }

    def rate(self) -> float:
        """Requests a second that came in at this process's own door, lately."""
        return self._rate

    def health(self) -> dict[str, Any]:
        """The numbers of `/internal/health`: of the whole fleet."""
        mode = self.queue.mode if self.queue is not None else ("redis" if self._is_connected() else "down")
        numbers = {"broker": mode, **health_numbers(self.registry.view, self.depth.unread())}
        if self.disks is not None and self.disks.found:
            return {"status": "degraded", "problem": self.disks.found, **numbers}
        return {"status": "draining" if self.draining else "healthy", **numbers}

    def fleet(self) -> dict[str, Any]:
        """What `/internal/fleet` shows: the whole fleet; while Redis is away, the endpoints that this process has."""
        view = self.registry.view
        if self.registry.is_fresh():
            return fleet_page(view)
        return fleet_page(view.all_silent()) | (super().fleet() if self.services else {})

    def check_ready(self, answer: Callable[[str | None], None]) -> None:
        """A gateway is ready when Redis answers and a batcher lives, or when it can do the work itself; a batcher when
        it takes work: it looks at the queue, Redis takes its outcomes, and an endpoint may be called and can be.
        """
        if self.draining:
            answer("draining")
        elif not self._is_connected():
            if self.services and self.is_gateway:
                self.in_background(self.try_endpoints(answer))
            else:
                answer(f"Redis cannot be reached: {self.nodes.trouble}")
        elif self.feed is not None:
            if reason := self.feed.why_no_work():
                answer(reason)
            elif all(service.pool.is_down for service in self.services):
                answer("every endpoint has failed, and none may be called for now")
            else:
                self.in_background(self.try_endpoints(answer))
        elif not self.registry.view.live_batchers():
            answer("no batcher lives")
        else:
            answer(None)

    def find_request(self, request_id: str, answer: FoundRequest) -> None:
        """Tell how a request is: one of this process, a task, or one of another gateway."""

        def told_of_task(state: RequestState | CarpoolError | None) -> None:
            if state is None and self.is_gateway:
                self.states.elsewhere(request_id, answer)
            else:
                answer(state)

        if (request := self._find_own(request_id)) is not None:
            self._tell_own(request, answer)
        else:
            self.states.of_task(request_id, told_of_task)

    def _find_own(self, request_id: str) -> Request | None:
        """A live or recent request of this process; None for a task that Redis has."""
        request = self.intake.find_recent(request_id) if self.is_gateway else None
        if request is None and self.local is not None:
            request = next((r for r in self.local.waiting_requests() if r.id == request_id), None)
        return None if request is not None and request.is_task and request.phase == QUEUED else request

    def _tell_own(self, request: Request, answer: FoundRequest) -> None:
        state = state_of(request, self.clock())
        if self.queue is not None and (place := self.queue.place_of(request)) is not None:
            self.states.of_entry(*place, state, answer)
        else:
            answer(state)

    def _looked_for(self, reply: Reply) -> None:
        """Another gateway looks for a request, or has found one that this one looks for."""
        for request_id, state in reply.found:
            self.states.told(request_id, state)
        for gateway, request_id in reply.wanted:
            if (request := self._find_own(request_id)) is not None:
                self._tell_own(request, partial(self._tell_other, gateway, request_id))

    def _tell_other(self, gateway: bytes, request_id: str, state: RequestState | CarpoolError | None) -> None:
        if isinstance(state, RequestState):
            self.states.tell(gateway, request_id, state)

    def _other_gateways(self) -> list[bytes]:
        names = [member.name.encode() for member in self.registry.view.live_gateways()]
        return [name for name in names if name != self.name]

    def numbers(self) -> dict[str, Value]:
        """What `/metrics` shows of this process as a whole."""
        view, counted = self.registry.view, self._counted()
        numbers: dict[str, Value] = {
            "carpool_requests": counted.outcomes,
            "carpool_queue_wait_seconds": counted.waited,
            "carpool_dead_letters": self.dead_letters.buried,
            "carpool_dead_letters_lost": self.dead_letters.failures,
            "carpool_dead_letters_kept": self.desk.total(),
            "carpool_dead_letter_bytes": self.depth.letter_bytes(),
            "carpool_dead_letters_dropped": self.letter_bounds.dropped,
            "carpool_task_bytes": self.depth.task_bytes(),
            "carpool_broker_memory_share": self.memory.fraction,
            "carpool_broker_memory_bytes": self.memory.used_bytes,
            "carpool_queue_unread": self.depth.unread(),
            "carpool_live_gateways": len(view.live_gateways()),
            "carpool_live_batchers": len(view.live_batchers()),
            "carpool_heartbeat_failures": self.registry.failures,
        }
        if self.disks is not None:
            numbers["carpool_broker_disks"] = bool(self.disks.found)
        if self.queue is not None:
            # What a gateway that is no batcher has in its local broker came to it in direct mode.
            direct = None if self.is_batcher else self.local
            numbers |= {
                "carpool_broker_mode": MODE_NUMBERS[self.queue.mode],
                "carpool_held_requests": self.queue.parking.held + (direct.held if direct is not None else 0),
                "carpool_held_bytes": self.queue.parking.held_bytes + (direct.held_bytes if direct is not None else 0),
                "carpool_sent_again": self.queue.sent_again,
                "carpool_late_outcomes": self.queue.parking.late_outcomes,
            }
        if self.feed is not None and self.replies is not None:
            numbers |= {
                "carpool_entries_taken": self.feed.taken,
                "carpool_entries_claimed": self.feed.claimed,
                "carpool_leases_lost": self.feed.leases_lost,
                "carpool_entries_unreadable": self.feed.unreadable,
                "carpool_outcomes_unconfirmed": self.replies.unconfirmed,
                "carpool_outcome_retries": self.replies.retries,
            }
        return super().numbers() | numbers


def waiting_in_redis(feed: BatcherSide, service: ModelService) -> int:
    """How many of a model wait in Redis: those that it told of, and those that have come since, at the usual rate."""
    return round(feed.unread(service.name) + service.rate * feed.unread_s())


def company_comes(feed: BatcherSide, service: ModelService) -> bool:
    """Whether requests that were cleared by a search should wait a moment for others, which the feed fetches."""
    return service.dispatcher.isolation.running > 0 and waiting_in_redis(feed, service) > 0


def task_shards(settings: Settings) -> int:
    """How many shards take tasks: so few that the part of each has room for some of the largest."""
    largest = max(model.body_bytes_max for model in models_of(settings).values())
    bytes_max = min(settings.broker.bytes_max, settings.tasks.stored_bytes_max)
    return min(max(bytes_max // (LARGEST_TASKS_A_SHARD * largest), 1), settings.broker.shards)


def line_offsets_ms(settings: Settings) -> dict[bytes, int]:
    """What each line adds to the time of its entries for their place in the order."""
    offsets: dict[bytes, int] = {}
    for tier, facts in enumerate(settings.tiers):
        target = tier * STRICT_STEP_MS if settings.broker.order == "strict" else round(facts.target_ms)
        offsets[line_name(tier, is_task=False)] = target
        offsets[line_name(tier, is_task=True)] = target + round(settings.tasks.patience_ms)
    return offsets
