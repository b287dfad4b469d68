"""What a process has of Redis, whatever its role: where gateways and batchers meet."""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable

from carpool.broker.memory import MemoryBroker
from carpool.broker.pending import PendingRequests
from carpool.broker.redis.client.nodes import Nodes
from carpool.broker.redis.dead_letters import LetterBounds, RedisDeadLetterBox
from carpool.broker.redis.fleet.memory import DepthWatch, MemoryWatch
from carpool.broker.redis.fleet.registry import Registry
from carpool.broker.redis.fleet.scale import SharedDecisions, batcher_load, gateway_load, model_loads
from carpool.broker.redis.fleet.servers import INTERVAL_S, Inspection, PersistenceWatch
from carpool.broker.redis.fleet.view import DRAINING, FleetView, Heartbeat, fleet_health, fleet_state
from carpool.broker.redis.gateway.dead_letters import RedisDeadLetterDesk
from carpool.broker.redis.gateway.results import RedisResults
from carpool.broker.redis.gateway.task_intake import TaskIntake, TaskRemovals
from carpool.broker.redis.gateway.tasks import RedisTasks, RequestStates
from carpool.broker.redis.gateway.webhooks import RedisOutbox
from carpool.broker.redis.keys import SHARDS_MAX, Keys, line_name
from carpool.broker.redis.redis_ops import EndedTask, RedisOps
from carpool.broker.redis.types import LEASE_MS
from carpool.broker.task_places import TASK_DELAY_S
from carpool.composition.runtime import Runtime
from carpool.composition.scaling import Cores, Scaling, drain_s
from carpool.composition.serving import Serving
from carpool.composition.shedding import queue_timeout_s
from carpool.core.errors import CarpoolError
from carpool.core.names import Role
from carpool.core.request import ended_elsewhere
from carpool.core.scaling import Decisions, Loads
from carpool.core.snapshot import FleetState, Health, Mode, OutcomeNumbers, RedisNumbers, ScaleNumbers, problem_of
from carpool.core.task import QueuePlace, place_behind
from carpool.core.webhook import WEBHOOK_BYTES_MAX
from carpool.service import ModelFace
from carpool.settings import ConfigError, Settings, broker_address, models_of

logger = logging.getLogger("carpool")

# With strict order, what a tier adds to the place of its entries, in ms: more than any clock counts.
STRICT_STEP_MS = 10**13
# So many tasks of the largest size have room in a shard.
LARGEST_TASKS_A_SHARD = 4
# How long to wait for the replicas that must have a task: they are near, or `WAIT` would slow every task down.
REPLICAS_TIMEOUT_MS = 200
# Dead letters kept in each shard, and their bytes in all of them; the oldest go. They are for people to look at.
LETTERS_A_SHARD_MAX = 10_000
LETTER_BYTES_MAX = 256 * 1024 * 1024
REFRESH_S = 1.0
START_TIMEOUT_S = 2.0


class RedisContext:
    """Connections, watches over Redis, tasks and dead letters, and this process's place in the fleet."""

    def __init__(self, runtime: Runtime, role: Role, describe: Callable[[], Heartbeat]) -> None:
        settings, broker = runtime.settings, runtime.settings.broker
        self.runtime = runtime
        self.role = role
        # Unique: what belongs to a process that is gone must not reach another one.
        self.name = f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}".encode()
        # Called when a node came or went.
        self.when_nodes_change: list[Callable[[], None]] = []
        # Called with each view of the fleet, twice a second.
        self.when_heard: list[Callable[[FleetView], None]] = []
        # Where the outcomes of this process are counted; its gateway or batcher half sets it before the start.
        self.counted: PendingRequests | MemoryBroker
        self.faces = {name: ModelFace(model) for name, model in runtime.models.items()}
        self.line_offsets_ms = line_offsets_ms(settings)
        self.lease_ms = LEASE_MS
        self.keys = Keys(broker.namespace, SHARDS_MAX)
        # Where Redis must not write to a disk.
        self.disks = PersistenceWatch(Inspection(broker_address(broker), self.keys))
        self._all_nodes: list[Nodes] = []
        self.nodes = self._make_nodes()
        self.memory = MemoryWatch(self.nodes)
        self.depth = DepthWatch(self.nodes, self.keys, list(self.line_offsets_ms))
        self.steps = RedisOps(self.nodes, self.keys)
        self.letter_bounds = LetterBounds(
            letters_max=LETTERS_A_SHARD_MAX,
            bytes_max=-(-LETTER_BYTES_MAX // SHARDS_MAX),
            ttl_ms=round(settings.tasks.dead_letter_ttl_s * 1000),
            is_memory_short=lambda: self.memory.is_short,
            memory_bytes_max=lambda: self.memory.letter_bytes_max(len(self.keys.shards)),
            clock=runtime.clock,
        )
        self.dead_letters = RedisDeadLetterBox(
            self.steps, bounds=self.letter_bounds, kept=settings.dead_letters.synchronous
        )
        self.tasks = self._make_tasks()
        self.outbox = RedisOutbox(self.steps, self.depth.webhooks, self.depth.shards_with_webhooks)
        self.states = RequestStates(self.steps, self.name, lease_ms=self.lease_ms, others=self._other_gateways)
        self.desk = RedisDeadLetterDesk(
            self.steps,
            self.tasks,
            frozenset(runtime.models),
            tier_target_s=runtime.tier_target_s,
            task_timeout_s=settings.tasks.timeout_s,
            prepare=lambda request: self.faces[request.model].prepare(request),
            clock=runtime.clock,
        )
        self.registry = Registry(
            self.nodes,
            self.keys,
            name=self.name,
            role=role,
            describe=describe,
            heard=self._heard,
            clock=runtime.clock,
        )

        self.cores = Cores(runtime)
        self.scaling = Scaling(runtime, self._loads, SharedDecisions(self.nodes, self.keys, lambda: self.registry.view))

    async def check_disks(self) -> None:
        """Refuse to start where Redis writes to a disk, or does not tell; later, look again and again."""
        if self.runtime.settings.broker.persistence != "forbidden":
            return
        if faults := await self.disks.faults():
            raise ConfigError(faults)
        self.runtime.do_every(INTERVAL_S, lambda: self.runtime.in_background(self.disks.look()))

    def start(self) -> None:
        """Connect, watch, and be seen by the others from now on."""
        opened = self.runtime.opened
        for nodes in self._all_nodes:
            nodes.start()
        for part in (self.memory, self.depth, self.registry):
            part.start()
            opened.callback(part.close)
        opened.callback(self.tasks.close)
        self.scaling.start(decides=self.role != "batcher")
        self.runtime.do_every(REFRESH_S, lambda: self.runtime.in_background(self._refresh()))

    async def wait_for_redis(self, is_connected: Callable[[], bool]) -> None:
        """Give Redis a moment, so that the first clients find it; then go on without it."""
        give_up_at = self.runtime.clock() + START_TIMEOUT_S
        while not (is_connected() and self.registry.is_fresh()) and self.runtime.clock() < give_up_at:  # noqa: ASYNC110 - at the start
            await asyncio.sleep(0.01)
        if not is_connected():
            logger.warning("Redis cannot be reached; it is tried again and again: %s", self.nodes.trouble)

    def are_all_nodes_up(self) -> bool:
        """Whether every shard can be reached."""
        return all(self.nodes.is_up(shard.slot) for shard in self.keys.shards)

    def gateways_last_seen(self) -> int:
        """How many gateways lived by the last answer of Redis: while it is gone, that number stays."""
        return len(self.registry.view.live_gateways())

    def is_served_elsewhere(self, model: str) -> bool:
        """Whether another batcher has an endpoint of a model that works, by the last heartbeats."""
        return self.registry.view.is_served_elsewhere(model, self.name.decode())

    # What others see.

    def beat_status(self) -> str:
        """The status that heartbeats report."""
        return DRAINING if self.runtime.draining else "ok"

    def health(self, mode: Mode) -> Health:
        """The health of the whole fleet."""
        found = self.disks.found or problem_of(self.registry.view.problems())
        return fleet_health(
            self.registry.view,
            self.depth.unread(),
            status=self.runtime.status_with(found),
            broker=mode,
            problem=found,
        )

    def fleet(self, own: Serving) -> FleetState:
        """The whole fleet; while Redis is away, the endpoints that this process has."""
        view = self.registry.view
        if self.registry.is_fresh():
            return fleet_state(view)
        silent = fleet_state(view.all_silent())
        if not own.services:
            return silent
        return FleetState(models=own.states(), gateways=silent.gateways, batchers=silent.batchers)

    def _loads(self, before: Decisions) -> Loads:
        """What scaling goes by; nothing is known while Redis is away."""
        view, settings = self.registry.view, self.runtime.settings
        models = list(dict.fromkeys((*self.runtime.models, *view.models())))
        if not self.registry.is_fresh():
            return Loads(models=dict.fromkeys(models))
        tiers = [tier.name for tier in settings.tiers]
        wait_max_s = queue_timeout_s(settings)
        gpus = {model: decision.wanted for model, decision in before.models.items()}
        return Loads(
            models=model_loads(
                view, models, self.depth.unread(), tiers, drain_s=drain_s(settings), wait_max_s=wait_max_s
            ),
            gateways=gateway_load(view),
            batchers=batcher_load(view, gpus),
        )

    def describe(self) -> tuple[OutcomeNumbers, RedisNumbers, ScaleNumbers]:
        """What `/metrics` shows, whatever the role."""
        runtime, view, counted = self.runtime, self.registry.view, self.counted
        outcomes = OutcomeNumbers(
            requests=counted.outcomes,
            queue_wait_seconds=counted.waited,
            request_seconds=runtime.by_tier_name(runtime.seconds.by_tier.__getitem__),
            stage_seconds=runtime.seconds.stages(),
            waiting=runtime.by_tier_name(self.depth.unread_of_tier),
            dead_letters=self.dead_letters.buried,
            dead_letters_lost=self.dead_letters.failures,
            dead_letters_kept=self.desk.total(),
            dead_letter_bytes=self.depth.total("letter_bytes"),
        )
        redis = RedisNumbers(
            broker_memory_share=self.memory.fraction,
            broker_memory_bytes=self.memory.used_bytes,
            broker_disks=bool(self.disks.found),
            queue_unread=self.depth.unread(),
            broker_cache_bytes=self.depth.total("cache_bytes"),
            task_bytes=sum(map(self.depth.total, ("input_bytes", "result_bytes", "read_bytes"))),
            dead_letters_dropped=self.letter_bounds.dropped,
            live_gateways=len(view.live_gateways()),
            live_batchers=len(view.live_batchers()),
            heartbeat_failures=self.registry.failures,
        )
        return outcomes, redis, self.scaling.numbers()

    # The parts.

    def make_results(self) -> RedisResults:
        """The way to results that are kept for requests that are the same."""
        cache = self.runtime.settings.cache
        results = RedisResults(
            self.steps,
            bytes_max=cache.bytes_max,
            ttl_s=cache.ttl_s,
            is_memory_short=lambda: self.memory.is_short,
            clock=self.runtime.clock,
        )
        self.runtime.opened.callback(results.close)
        return results

    def _make_nodes(self, delay_ms: int = 0) -> Nodes:
        broker = self.runtime.settings.broker
        timeout_s = (broker.redis_timeout_ms + delay_ms) / 1000
        nodes = Nodes(broker_address(broker), timeout_s=timeout_s, changed=lambda: call_all(self.when_nodes_change))
        self._all_nodes.append(nodes)
        self.runtime.opened.push_async_callback(nodes.close)  # after the parts that say goodbye over them
        return nodes

    def _make_tasks(self) -> RedisTasks:
        settings, broker = self.runtime.settings, self.runtime.settings.broker
        shards = task_shards(settings)
        removals = TaskRemovals(self.steps)
        self.when_nodes_change.append(removals.nodes_changed)
        result_ttl_ms = round(settings.tasks.result_ttl_s * 1000)
        intake = TaskIntake(
            self.steps,
            removals,
            line_offsets_ms=self.line_offsets_ms,
            held_max=-(-broker.waiting_max // SHARDS_MAX),
            input_bytes_max=-(-broker.bytes_max // shards),
            stored_bytes_max=-(-settings.tasks.stored_bytes_max // shards),
            lanes_max=self.runtime.lanes_max,
            shards_used=shards,
            replicas=broker.replicas,
            replicas_timeout_ms=REPLICAS_TIMEOUT_MS,
            durable_nodes=self._make_nodes(REPLICAS_TIMEOUT_MS) if broker.replicas else None,
            is_memory_full=lambda: self.memory.is_full,
            are_webhooks_full=lambda: self.depth.webhooks()[1] >= WEBHOOK_BYTES_MAX,
            result_ttl_ms=result_ttl_ms,
            count=self._count_outcome,
            events=self.runtime.events,
            clock=self.runtime.clock,
        )
        return RedisTasks(self.steps, self.name, intake, removals, result_ttl_ms, self._task_ended, self._queue_place)

    def _queue_place(self, task_id: str, model: str, ahead: int) -> QueuePlace:
        """Where a task stands, if all shards are like its own."""
        times = self.depth.times_of(self.keys.shard_of_task(task_id))
        return place_behind(ahead * times, self.registry.view.capacity_rps(model))

    def _count_outcome(self, code: str) -> None:
        """A task has an outcome that no batcher gave it."""
        counts = self.counted.outcomes
        counts[code] = counts.get(code, 0) + 1  # bounded: codes come from the error tree

    def _task_ended(self, task: EndedTask, error: CarpoolError) -> None:
        """A task got its outcome in Redis."""
        self._count_outcome(error.code)
        if self.runtime.events.subscribers:
            now = self.runtime.clock()
            request = ended_elsewhere(task.id, task.owner, task.tier, task.model, now - task.age_ms / 1000, now, error)
            self.runtime.events.settled(request, error)

    def _heard(self, view: FleetView) -> None:
        """An owner that one batcher has quarantined is quarantined in all processes."""
        found = [(name, owner) for name in self.runtime.models for owner in view.quarantined(name)]
        self.runtime.quarantined.told(found, self.runtime.clock())
        for listener in self.when_heard:
            listener(view)

    def _other_gateways(self) -> list[bytes]:
        names = [member.name.encode() for member in self.registry.view.live_gateways()]
        return [name for name in names if name != self.name]

    async def _refresh(self) -> None:
        """Numbers for operators that cost a little more."""
        try:
            await self.desk.refresh()
        except CarpoolError:
            pass  # Redis is away; the numbers stay as they were


def call_all(listeners: list[Callable[[], None]]) -> None:
    """Call every listener."""
    for listener in listeners:
        listener()


def task_shards(settings: Settings) -> int:
    """How many shards take tasks: so few that the part of each has room for some of the largest."""
    largest = max(model.input.body_bytes_max for model in models_of(settings).values())
    bytes_max = min(settings.broker.bytes_max, settings.tasks.stored_bytes_max)
    return min(max(bytes_max // (LARGEST_TASKS_A_SHARD * largest), 1), SHARDS_MAX)


def line_offsets_ms(settings: Settings) -> dict[bytes, int]:
    """What each line adds to the time of its entries for their place in the order."""
    offsets: dict[bytes, int] = {}
    for tier, facts in enumerate(settings.tiers):
        target = tier * STRICT_STEP_MS if settings.broker.order == "strict" else round(facts.target_ms)
        offsets[line_name(tier, is_task=False)] = target
        offsets[line_name(tier, is_task=False, is_over=True)] = target
        if settings.shedding.mode == "predicted":
            offsets[line_name(tier, is_task=False, is_late=True)] = target + round(queue_timeout_s(settings) * 1000)
        offsets[line_name(tier, is_task=True)] = target + round(TASK_DELAY_S * 1000)
    return offsets


def late_ms(settings: Settings) -> dict[bytes, int]:
    """How much later than others of its tier a request over its owner's share stands: as long as any request waits."""
    queue_ms = settings.broker.queue_timeout_s * 1000
    is_predicted = settings.shedding.mode == "predicted"
    return {
        line_name(tier, is_task=False, is_over=True): round(facts.wait_max_ms if is_predicted else queue_ms)
        for tier, facts in enumerate(settings.tiers)
    }
