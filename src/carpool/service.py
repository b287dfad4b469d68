"""One model: its endpoints, its codec, and the loop that sends its batches, plugged together."""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, inf

from carpool.admission.gate import upstream_down
from carpool.admission.input_policy import InputPolicy
from carpool.batching.cost import TERMS
from carpool.batching.loop import BatchLoop
from carpool.batching.policy import make_policy
from carpool.broker.lanes import FIT_MIN
from carpool.broker.memory import MemoryBroker
from carpool.core.clock import Clock, monotonic
from carpool.core.errors import CarpoolError, QueueFull
from carpool.core.ports import CallTraces, DeadLetters, FetchedQueue, LaneCounts, OtherBatchers, Sharing, Slots
from carpool.core.request import DONE, Nobody, Request
from carpool.core.snapshot import ModelNumbers, ModelState, call_cost
from carpool.core.tensors import is_packed
from carpool.face.intake import ServedModel, ServedTensors
from carpool.face.octets import bytes_in, bytes_out
from carpool.settings import Model
from carpool.upstream.breaker import Breaker
from carpool.upstream.codecs import Codec, TensorCodec, make_codec
from carpool.upstream.dispatch import UpstreamDispatcher
from carpool.upstream.endpoint import AttemptFailedError, Endpoint
from carpool.upstream.fleet import Address, Endpoints, Fleet, MakeEndpoint
from carpool.upstream.grpc_endpoint import GrpcEndpoint
from carpool.upstream.health import BREAKERS, STATES, HasPages, HealthWatch, breaker_shown, state_of
from carpool.upstream.load import parse_load_source
from carpool.upstream.pool import DOUBT_MAX, AskHealth, EndpointState, Pool
from carpool.upstream.quarantine import Quarantine
from carpool.upstream.same import merge_same
from carpool.upstream.scheduler import Scheduler
from carpool.upstream.simulated import SimulatedEndpoint, parse_sim_url
from carpool.upstream.tls import Credentials

logger = logging.getLogger("carpool")
# What makes the endpoints of a model, by their addresses; raises OSError or ValueError if they cannot be used.
EndpointsOf = Callable[[Model], MakeEndpoint]

# Bytes of all inputs of one model that are at its endpoints, each up to twice in memory; one batch is always sent.
IN_FLIGHT_BYTES_MAX = 512 * 1024 * 1024
# Weight of the last second in the rates that are shown.
RATE_WEIGHT = 0.5
# An endpoint is left alone after so many failed calls in a row (rule 8 of breaker.py: or so many that another one
# answered): fewer would be chance, more would fail clients. For how long at first, and at most, for its recovery to be
# noticed soon.
BREAKER_FAILURES, BREAKER_PAUSE_S, BREAKER_PAUSE_S_MAX = 5, 1.0, 4.0
# The upper bound of the first pause between two attempts; it doubles each time.
BACKOFF_S = 0.05
# An endpoint without a good call for this long is asked for its health, and again each time.
HEALTH_INTERVAL_S = 2.0
# The longest answer that is read: 64 results of 1 MiB.
ANSWER_BYTES_MAX = 64 * 1024 * 1024
# How long to wait for the page that states limits.
INFO_TIMEOUT_S = 2.0
QUARANTINED_SHOWN_MAX = 64
# Between two attempts with `upstream.probe_input`.
PROVE_S = 1.0
# Over Redis: how much of quarantined owners may wait in a batcher, in batches.
APART_BATCHES_MAX = 2
# So many requests at a time are taken where the last batches failed, and other batchers have an endpoint that works.
IN_DOUBT_BATCH = 4
# What was fetched ahead, to choose from, may wait so long: twice the time of what is fetched (`AHEAD_WORK_S`).
STUCK_AHEAD_S = 1.0

# Looks at a request before it is admitted; raises an error of the tree.
Prepare = Callable[[Request], None]


class ModelFace:
    """One model as the face sees it: its limits, and what its protocol wants to know of inputs."""

    def __init__(self, model: Model) -> None:
        upstream = model.upstream
        self.name = model.name
        self.body_bytes_max = model.input.body_bytes_max
        if upstream.pad:  # an input that rides alone is sent `max_batch` times
            self.body_bytes_max = min(self.body_bytes_max, model.batching.batch_bytes_max // model.batching.max_batch)
        self._input = model.input
        self._protocol = upstream.protocol
        self.codec = make_codec(
            upstream.protocol,
            inputs_field=upstream.inputs_field,
            outputs_field=upstream.outputs_field,
            parameters_field=upstream.parameters_field,
            model_version=upstream.model_version,
            tensor=upstream.tensor,
            tensor_binary=upstream.tensor_binary,
            tokens_field=upstream.tokens_field,
            version_field=upstream.version_field,
            completion_text=upstream.completion_output == "text",
        )
        self._task_tiers = model.task_tiers
        self._bytes_as = upstream.bytes_as

    def prepare(self, request: Request) -> None:
        """Let the codec look into a request before it is admitted; raises Malformed."""
        self.codec.check_parameters(request.parameters)
        if self.codec.prepares:
            prepared = self.codec.prepare(request.input)
            request.prepared, request.lane = prepared.value, prepared.lane
            if not is_packed(request.input):
                request.size += len(request.input)  # the decoded tensors are held too

    def served(self, sharing: Sharing | None = None) -> ServedModel:
        """What the face must know of this model."""
        # Most protocols look at nothing: then the hot path need not ask.
        looks = self.codec.prepares or type(self.codec).check_parameters is not Codec.check_parameters
        prepare: Prepare | None = self.prepare if looks else None
        limits = self._input
        if limits.input_bytes_max or limits.deny_patterns or limits.deny:
            # On admission alone: what was let in once is not refused later because the rules have changed.
            policy = InputPolicy(limits.input_bytes_max, limits.deny_patterns, limits.deny)
            prepare = partial(self._check_and_prepare, policy)
        return ServedModel(
            self.name,
            self.body_bytes_max,
            bytes_in(self._bytes_as, self.codec.binary_input),
            prepare,
            sharing,
            self._protocol,
            self.served_tensors(),
            self._task_tiers,
            bytes_out(self._bytes_as),
        )

    def _check_and_prepare(self, policy: InputPolicy, request: Request) -> None:
        policy.check(request)
        self.prepare(request)

    def served_tensors(self) -> ServedTensors | None:
        """What is known of its tensors; None if it takes none."""
        if not isinstance(self.codec, TensorCodec):
            return None
        known = self.codec.defaults
        return ServedTensors(self.codec.model_version, known.name, known.datatype, known.shape)


class SharedSlots:
    """The slots of endpoints that other gateways call as well: this process's share of them."""

    def __init__(self, scheduler: Scheduler, sharers: Callable[[], int]) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._sharers = sharers

    def total(self) -> float:
        """This process's share, of whole slots: at least one, or all there is."""
        total = self._pool.total()
        return min(total, max(1, ceil(total) // max(1, self._sharers())))

    def free(self) -> int:
        """Slots of the share that could take a batch now."""
        return max(0, min(self._pool.free(), ceil(self.total()) - self._pool.busy()))

    def free_for_quarantined(self) -> int:
        """Slots of the share that could take a batch of quarantined owners now."""
        return min(self.free(), self._scheduler.free_for_quarantined())

    def is_quarantined_due(self) -> bool:
        """Whether quarantined owners have waited so long that a batch of them goes before others."""
        return self._scheduler.is_quarantined_due()

    def when_slot_frees(self, notify: Callable[[], None]) -> None:
        """Have `notify` called when a slot becomes free."""
        self._pool.when_slot_frees(notify)


class ModelService(ModelFace):
    """One model: its endpoints, its codec, and the loop that sends its batches."""

    def __init__(
        self,
        model: Model,
        endpoints: EndpointsOf,
        broker: MemoryBroker,
        dead_letters: DeadLetters | None,
        quarantined: Quarantine,
        sharers: Callable[[], int] | None = None,
        others: OtherBatchers | None = None,
        # Where its requests are fetched from, if they wait elsewhere.
        fetched: FetchedQueue | None = None,
        # Sees one request of each batch that leaves.
        sampled: Callable[[Request], None] | None = None,
        traces: CallTraces | None = None,
        clock: Clock = monotonic,
        random_share: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(model)
        self._clock = clock
        upstream, batching = model.upstream, model.batching
        # The longest that one attempt takes.
        self.timeout_s = upstream.timeout_s
        self._endpoints = endpoints
        self.fleet = make_fleet(model, endpoints(model), self.codec.health_path(model.name), clock, random_share)
        self.pool = self.fleet.pool
        self.dispatcher = UpstreamDispatcher(
            self.pool,
            self.codec,
            broker,
            timeout_s=self.timeout_s,
            attempts=upstream.attempts,
            backoff_s=BACKOFF_S,
            model=model.name,
            dead_letters=dead_letters,
            quarantined=quarantined,
            max_batch=batching.max_batch,
            others_waiting=self._others_waiting,
            all_waiting=self._all_waiting,
            when_limit_is_learned=self._limit_is_learned,
            merge=partial(merge_same, is_owned=model.is_cached_by_owner) if upstream.cache else None,
            fill_to=batching.max_batch if upstream.pad else 0,
            others=others,
            events=broker.events,
            traces=traces,
            clock=clock,
            random_share=random_share,
        )
        self.scheduler = self.dispatcher.scheduler
        self._slots: Slots = self.scheduler if sharers is None else SharedSlots(self.scheduler, sharers)
        self.loop = BatchLoop(
            model.name,
            broker,
            self._slots,
            self.dispatcher,
            make_policy(batching.policy),
            max_batch=batching.max_batch,
            max_wait_s=batching.max_wait_ms / 1000,
            batch_bytes_max=batching.batch_bytes_max,
            in_flight_bytes_max=IN_FLIGHT_BYTES_MAX,
            fetched=fetched,
            company_comes=None if fetched is None else self._company_comes,
            sampled=sampled,
            fit=batching.fit,
            batch_seconds_max=batching.batch_seconds_max or inf,
            clock=clock,
        )
        self._broker = broker
        self._fetched = fetched
        # For `prove`.
        self.probe_input = upstream.probe_input.encode()
        self._others = others
        self.quarantine = quarantined
        # Kept by `measure`, once a second.
        self.rate = 0.0
        self.utilization = 0.0
        self._arrivals_then = 0
        self._busy_s_then = 0.0
        # How full batches were lately, by what they are while all slots are busy; requests and batches until then.
        self.fill = 1.0
        self._batched_then = (0.0, 0)

    def lane_counts(self) -> LaneCounts:
        """The requests that wait here, by lane."""
        return self._broker.lane_counts(self.name, self.pool.batch_max(self.loop.max_batch))

    def quarantined_owners(self) -> set[tuple[str, str]]:
        """Model and owner of the quarantined owners whose requests wait, of all models of this process."""
        return self._broker.quarantined_owners()

    def _others_waiting(self) -> int:
        """Requests that could share a batch and wait for a slot; none while there is no room for their bytes."""
        if not self.loop.has_room():
            return 0
        return self._waiting_elsewhere() + self._broker.most_waiting(self.name)

    def _all_waiting(self) -> int:
        """The same for all lanes together."""
        if not self.loop.has_room():
            return 0
        return self._waiting_elsewhere() + self._broker.all_waiting(self.name)

    def _waiting_elsewhere(self) -> int:
        """How many requests wait where they are fetched from: as last seen, and what came since at the present rate."""
        fetched = self._fetched
        return 0 if fetched is None else round(fetched.unread() + self.rate * fetched.unread_s())

    def _company_comes(self) -> bool:
        """Whether requests that a search has cleared should wait a moment for others, which are being fetched."""
        return self.scheduler.searching > 0 and self._waiting_elsewhere() > 0

    def free_slots(self) -> int:
        """Slots that take a batch now, or in a moment.

        While a search is under way every call counts: then one batch is fetched ahead, so that no slot waits for Redis.
        Where batches are put together by size, and more waits elsewhere, some are fetched to choose from.
        """
        if self.pool.is_none_closed:
            return min(self.loop.slots_due(), 1)
        due = max(self.loop.slots_due(), int(self.scheduler.searching > 0))
        if self._fetched is not None and self._fetched.unread() >= FIT_MIN * self.loop.max_batch:
            return due + self.loop.batches_ahead()
        return due

    def stuck_after_s(self) -> float:
        """How long a request may wait here while no slot is free; inf while one is."""
        if self.loop.slots_due() > 0 or (self.scheduler.searching and not self.pool.is_none_closed):
            return inf
        return STUCK_AHEAD_S if self.loop.is_by_size() and not self.pool.is_none_closed else 0.0

    def may_go_elsewhere(self, request: Request) -> bool:
        """Whether another batcher can serve a request that this one cannot."""
        return self._others is not None and self._others.may_serve(request)

    def is_probing(self) -> bool:
        """Whether every endpoint has failed, and one request at a time is wanted to try one with."""
        return self.pool.is_none_closed

    def is_in_doubt(self) -> bool:
        """Whether no endpoint is known to work: each has failed and not answered since."""
        return self.pool.is_in_doubt()

    def is_served_elsewhere(self) -> bool:
        """Whether another batcher has an endpoint that works."""
        return self._others is not None and self._others.are_well()

    def largest_batch(self) -> int:
        """The most requests in a batch that should be taken from the queue."""
        most = self.pool.batch_max(self.loop.max_batch)
        # Two batches failed here, and went to other batchers after a call's time: the next ones are small.
        if self.pool.is_in_doubt(DOUBT_MAX) and self.is_served_elsewhere():
            return min(most, IN_DOUBT_BATCH)
        return most

    def largest_batch_bytes(self) -> float:
        """The most bytes in a batch of several."""
        return self.loop.batch_bytes_max

    def _limit_is_learned(self, member: EndpointState) -> None:
        logger.warning(
            "an endpoint takes %s inputs at once; no more are sent for a while",
            member.batch_limit.learned,
            extra={"fields": {"model": self.name, "endpoint": member.name}},
        )

    def refusal_of(self, request: Request) -> CarpoolError | None:
        """Why a request that another process admitted is not taken up now; None if it is."""
        if self.pool.is_down or (self.pool.is_shut_to_some and self.pool.is_shut_to(request.owner)):
            return upstream_down(self.pool)
        if self.quarantine and (self.name, request.owner) in self.quarantine:
            quarantined_max = APART_BATCHES_MAX * self.largest_batch()
            if self._broker.waiting_quarantined(self.name) >= quarantined_max:
                return QueueFull(
                    "the model refused many of your inputs, and more wait; try again soon", retry_after_s=1
                )
        return None

    def prepare_change(self, model: Model) -> Endpoints:
        """The endpoints for `change`. Whatever may fail fails here."""
        return self.fleet.prepare(addresses(model), self._endpoints(model))

    def change(self, model: Model, prepared: Endpoints) -> tuple[int, int]:
        """Use other endpoints, slots and timeouts from now on; returns how many endpoints came and go."""
        self.timeout_s = model.upstream.timeout_s
        self.dispatcher.change_timeout(self.timeout_s)
        return self.fleet.change_to(prepared)

    async def ask_limits(self) -> None:
        """Ask the endpoints how many inputs they take at once, where the protocol has a page for that."""
        path = self.codec.info_path(self.name)
        if path is None:
            return
        for member in list(self.pool.members):
            if not isinstance(member.endpoint, HasPages):
                continue
            try:
                answer = await member.endpoint.get(path, INFO_TIMEOUT_S)
            except AttemptFailedError:
                continue  # then the first answer that speaks of a limit will teach it
            limit = self.codec.batch_max_from_info(answer.body) if answer.status == 200 else None
            if limit is not None and member.batch_limit.said(limit, self.loop.max_batch, self._clock()):
                self.pool.has_batch_limits = True
                self._limit_is_learned(member)

    def is_unproven(self) -> bool:
        """Whether readiness waits for a call to be answered."""
        return bool(self.probe_input) and not self.pool.is_proven

    async def prove(self) -> None:
        """Send `probe_input`, as a client would, again and again until a call is answered."""
        probe = self.probe_input
        request: Request | None = None
        while self.is_unproven() and not self.loop.draining:
            if request is None or request.phase == DONE:
                now = self._clock()
                until = now + self.timeout_s + PROVE_S
                request = Request("probe", self.name, b"", probe, len(probe), 0, now, now, inf, until, Nobody())
                request.held_by = self  # so it is not counted among the requests of clients
                try:
                    self.prepare(request)
                except CarpoolError as error:
                    logger.error("upstream.probe_input cannot be sent to %s: %s", self.name, error.detail)
                    return
                self._broker.hold(request)
                self._broker.enqueue(request)
            await asyncio.sleep(PROVE_S)

    def state(self) -> ModelState:
        """What `/internal/fleet` shows of this model."""
        return ModelState(
            slots=self.fleet.slots(),
            healthy_slots=round(self.fleet.healthy_slots(), 2),
            capacity_rps=round(self.capacity_rps(), 2),
            endpoints=self.fleet.endpoint_states(),
            quarantined=self.quarantine.of_model(self.name)[:QUARANTINED_SHOWN_MAX],
            cost=call_cost(self.loop.cost.seconds_by_term),
        )

    def mean_batch_size(self) -> float:
        """The mean size of all batches so far."""
        sizes = self.loop.batch_sizes
        return sizes.total / max(1, sum(sizes.counts))

    def quarantined_here(self) -> list[str]:
        """The newest of the owners that this process itself has quarantined."""
        return self.quarantine.seen_at(self.name)[-QUARANTINED_SHOWN_MAX:]

    def measure(self, seconds: float) -> None:
        """Work out the rates of the last `seconds`."""
        self.loop.look(self._clock())
        arrivals, busy_s = self._broker.arrivals(self.name), self.pool.busy_seconds()
        self.rate += RATE_WEIGHT * ((arrivals - self._arrivals_then) / seconds - self.rate)
        used = (busy_s - self._busy_s_then) / (seconds * self.pool.total())
        self.utilization += RATE_WEIGHT * (min(used, 1.0) - self.utilization)
        self._arrivals_then, self._busy_s_then = arrivals, busy_s
        sizes, (requests_then, batches_then) = self.loop.batch_sizes, self._batched_then
        self._batched_then = requests, batches = sizes.total, sum(sizes.counts)
        if batches > batches_then:
            fill = (requests - requests_then) / (batches - batches_then) / self.loop.busy_size
            self.fill += RATE_WEIGHT * (min(fill, 1.0) - self.fill)

    def capacity_rps(self) -> float:
        """Requests a second that the slots that work can serve; where others call them too, this process's share."""
        share = self._slots.total() / self.pool.total()
        # An endpoint that is closed to one owner only has a call at a time for the others.
        slots = self.fleet.healthy_slots() or int(self.pool.is_shut_to_some)
        return self.loop.capacity_rps(slots) * share

    def numbers(self) -> ModelNumbers:
        """What `/metrics` shows of this model."""
        pool, dispatcher, scheduler = self.pool, self.dispatcher, self.scheduler
        strays = (getattr(each, "stray_answers", 0) for each in pool.endpoints)  # only those of HTTP count them
        now = self._clock()
        return ModelNumbers(
            batch_size=self.loop.batch_sizes,
            batches=self.loop.batches,
            batch_fill=self.loop.batch_fills,
            batches_by_size=int(self.loop.is_by_size()),
            call_cost_share=dict.fromkeys(TERMS, 0.0) | self.loop.cost.shares(),
            upstream_calls=dispatcher.calls,
            upstream_latency_seconds=dispatcher.call_seconds,
            upstream_stray_answers=sum(strays),
            isolation={
                "calls": scheduler.steps,
                "at-fault": scheduler.poisoned,
                "unresolved": scheduler.unresolved,
            },
            quarantined=len(self.quarantine.of_model(self.name)),
            slots={"busy": pool.busy(), "free": pool.free()},
            healthy_slots=self.fleet.healthy_slots(),
            capacity_rps=self.capacity_rps(),
            queue_depth=self._broker.depth_of(self.name),
            arrival_rate=self.rate,
            arrival_error_ratio=self.loop.rate_errors,
            utilization=self.utilization,
            endpoint_state={
                (member.name, each): each == state_of(member, now) for member in pool.members for each in STATES
            },
            endpoint_breaker={
                member.name: BREAKERS.index(breaker_shown(member.breaker, now)) for member in pool.members
            },
            endpoint_calls={
                (member.name, result): number
                for member in pool.members
                for result, number in (("ok", member.succeeded), ("failed", member.failed))
            },
            endpoint_latency_seconds={
                (member.name, share): seconds
                for member in pool.members
                if (took := member.latest_calls.quantiles(now)) is not None
                for share, seconds in (("0.5", took.p50), ("0.99", took.p99))
            },
        )


def addresses(model: Model) -> list[Address]:
    """Where the endpoints of a model are."""
    slots = model.upstream.slots
    return [Address(url, None if slots == "auto" else slots) for url in model.upstream.endpoints]


def endpoint_maker(model: Model, clock: Clock) -> MakeEndpoint:
    """What makes the endpoints of a model; raises OSError or ValueError if files that protect them cannot be used."""
    upstream = model.upstream
    credentials = Credentials(model.security, clock)
    credentials.headers()
    load_header = upstream.load if parse_load_source(upstream.load) is None else ""
    if any(url.startswith(("https:", "grpcs:")) for url in upstream.endpoints):
        credentials.ssl_context()

    def make_endpoint(address: Address) -> Endpoint:
        if address.url.startswith("sim:"):
            return SimulatedEndpoint(address.url, parse_sim_url(address.url), clock=clock)
        if upstream.protocol == "kserve_v2_grpc":
            return GrpcEndpoint(address.url, address.slots, ANSWER_BYTES_MAX, model.security, clock)
        # Here: a process without calls over HTTP does not load its client.
        from carpool.upstream.client import HttpEndpoint

        return HttpEndpoint(*address, ANSWER_BYTES_MAX, credentials, load_header)

    return make_endpoint


def make_fleet(
    model: Model,
    make_endpoint: MakeEndpoint,
    health_path: str | None,
    clock: Clock,
    random_share: Callable[[], float],
) -> Fleet:
    """The endpoints of a model, their pool and the watch over them."""
    upstream = model.upstream

    def make_pool(endpoints: Sequence[Endpoint], ask_health: AskHealth) -> Pool:
        return Pool(
            endpoints,
            clock,
            make_breaker=lambda: Breaker(BREAKER_FAILURES, BREAKER_PAUSE_S, BREAKER_PAUSE_S_MAX),
            random_share=random_share,
            ask_health=None if health_path is None else ask_health,
        )

    def make_watch(pool: Pool) -> HealthWatch:
        return HealthWatch(
            pool,
            health_path=health_path,
            interval_s=HEALTH_INTERVAL_S,
            load_source=parse_load_source(upstream.load),
            clock=clock,
            random_share=random_share,
        )

    return Fleet(addresses(model), make_endpoint, make_pool, make_watch, clock)
