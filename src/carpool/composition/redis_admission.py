"""Admission over Redis: requests wait there, for batchers of the whole fleet."""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from msgspec.structs import replace

from carpool.admission.gate import upstream_down
from carpool.admission.shared_limits import SharedLimits
from carpool.admission.shedding import TICK_S, Elsewhere, LoadShedder, pressure
from carpool.broker.redis.fleet.api_keys import ApiKeyWatch
from carpool.broker.redis.fleet.view import FleetView, Heartbeat
from carpool.broker.redis.formats import Reply
from carpool.broker.redis.gateway.queue import RedisQueue
from carpool.broker.redis.gateway.rates import RedisRateBudget
from carpool.composition.admission import Admission
from carpool.composition.credentials import TAKES_KEYS
from carpool.composition.redis_context import RedisContext
from carpool.composition.scaling import Demands
from carpool.composition.serving import Serving
from carpool.composition.shedding import (
    SOME_RPS,
    learn_own,
    learn_share,
    make_shedders,
    sample,
    stats_of_tiers,
    wanted,
)
from carpool.core.errors import CarpoolError, UpstreamFailed, UpstreamProtocolFault, UpstreamRefused
from carpool.core.ports import QueueStats
from carpool.core.request import DONE, QUEUED, Request
from carpool.core.snapshot import Mode, RedisGatewayNumbers
from carpool.core.timeline import Queue, RequestState, state_of
from carpool.face.http.admin import FoundRequest

# For so long after the last batcher was seen, requests are still queued: it may be about to come back.
BATCHERS_GONE_S = 3.0
WATCH_S = 0.25
RATE_TICK_S = 1.0
# A rate so many times what the other gateways know is worth a heartbeat of its own.
MORE_TIMES = 2.0
# Weight of the last second in the rate that is shown.
RATE_WEIGHT = 0.5
# Codes of requests that say something of the upstream: it answered, or failed. With others there may have been no call.
TELLS = frozenset(("ok", UpstreamFailed.code, UpstreamProtocolFault.code, UpstreamRefused.code))
# Where one owner's probe said nothing, or nothing good, the next probe is for other owners, who have so long to come;
# so many such owners are remembered.
OTHERS_FIRST_S = 0.25
OTHERS_FIRST_MAX = 64
MODE_NUMBERS: dict[Mode, int] = {"down": 0, "redis": 1, "direct": 2}


class FleetAvailability:
    """What admission sees of the upstreams of a model: those of all batchers, or in direct mode our own."""

    def __init__(self) -> None:
        self.is_down = False
        # By what batchers said; requests that come later may be probes.
        self.down_since = inf
        # Batchers answer for owners of their own.
        self.is_shut_to_some = False
        # While it is down: requests that are let in all the same, until batchers are heard of again.
        self.probes = 0
        # The last of them; and by owner whose probe was in vain, until when it is the turn of other owners.
        self._probe: Request | None = None
        self._others_until: dict[str, float] = {}
        self._retry_after_s = 1
        self._has_never_worked = False

    def heard(self, view: FleetView, model: str) -> None:
        """Heartbeats of batchers came. One request at a time is a probe: once it is answered all are admitted, and
        until then all other requests are refused at once.
        """
        probe = self._probe
        if probe is not None and not (probe.phase == DONE and probe.result_code == "ok"):
            self._let_others_first(probe.owner, view.seen_at)
        self.probes, self._probe = min(view.probes(model), 1), None
        self._retry_after_s = view.retry_after_s(model)
        self._has_never_worked = view.has_never_worked(model)

    def takes_probe(self, request: Request) -> bool:
        """While it is down: whether one more request is let in. Batchers want it to try an endpoint with.

        A probe that says nothing of the upstream (it was given up, or refused elsewhere) does not count; and its owner
        lets other owners go first. Else an owner that comes often, and never waits or is refused, would block them.
        """
        probe = self._probe
        if probe is not None and probe.phase == DONE and probe.result_code not in TELLS:
            self.probes, self._probe = 1, None
            self._let_others_first(probe.owner, probe.ended)
        if not self.probes or request.arrived < self._others_until.get(request.owner, -inf):
            return False
        self.probes -= 1
        self._probe = request
        return True

    def _let_others_first(self, owner: str, now: float) -> None:
        waiting = {each: until for each, until in self._others_until.items() if until > now and each != owner}
        if len(waiting) == OTHERS_FIRST_MAX:
            del waiting[next(iter(waiting))]
        self._others_until = {**waiting, owner: now + OTHERS_FIRST_S}

    def is_shut_to(self, owner: str) -> bool:
        """Never: a gateway shuts no owner out, batchers do."""
        return False

    def retry_after_s(self) -> int:
        """While it is down: whole seconds until it is tried again."""
        return self._retry_after_s

    def has_never_worked(self) -> bool:
        """Whether no endpoint of the batchers has answered a call well, though some were made."""
        return self._has_never_worked


class RedisAdmission(Admission):
    """Admission into a queue that is in Redis. What `own` has of endpoints serves requests while Redis is gone."""

    def __init__(self, redis_context: RedisContext, own: Serving, find_slow: Callable[[str], Request | None]) -> None:
        runtime, broker = redis_context.runtime, redis_context.runtime.settings.broker
        self.redis_context = redis_context
        self._own = own
        # Finds a slow request that viewers of the live page were shown, by its id.
        self._find_slow = find_slow
        self.queue = RedisQueue(
            redis_context.steps,
            redis_context.name,
            line_offsets_ms=redis_context.line_offsets_ms,
            waiting_max=broker.waiting_max,
            bytes_max=broker.bytes_max,
            lanes_max=runtime.lanes_max,
            models=list(runtime.models),
            local=own.broker if own.services else None,
            is_memory_full=lambda: redis_context.memory.is_full,
            task_finished=redis_context.tasks.finished,
            looked_for=self._looked_for,
            mode_changed=lambda mode: self._look_at_fleet(),
            sampled=None if runtime.settings.shedding.mode == "off" else self._sampled,
            seconds=runtime.seconds,
            events=runtime.events,
            clock=runtime.clock,
        )
        runtime.opened.callback(self.queue.close)
        self.availability = {name: FleetAvailability() for name in runtime.models}
        shedders = make_shedders(runtime.settings, runtime.models, self.queue.pending.queue_stats)
        self.rates = SharedLimits(
            RedisRateBudget(redis_context.steps),
            is_reachable=self.is_connected,
            sharers=redis_context.gateways_last_seen,
            clock=runtime.clock,
        )
        runtime.opened.callback(self.rates.close)
        super().__init__(
            runtime,
            self.queue,
            redis_context.tasks,
            self.availability,
            list(redis_context.faces.values()),
            shedders,
            rates=self.rates,
            sharers=redis_context.gateways_last_seen,
            far=redis_context.make_results(),
        )
        redis_context.counted = self.queue.pending
        redis_context.when_nodes_change.append(self.queue.nodes_changed)
        redis_context.when_heard.append(self._heard)
        self._demands = Demands(
            runtime,
            shedders,
            self.gate.turned_away,
            sync_arrivals=self.queue.pending.arrivals.__getitem__,
            task_arrivals=self.tasks.arrivals.__getitem__,
        )
        # By thresholds: how many wait at all gateways together.
        self._counts_whole = runtime.settings.shedding.mode == "thresholds"
        # Requests a second of each model, as the last heartbeat reported them to the other gateways.
        self._told_rates: dict[str, float] = {}
        self._batchers_seen = runtime.clock()
        # Requests a second that clients sent to this process lately.
        self.rate = 0.0
        self._arrivals_then = 0

    def watch(self) -> None:
        """Watch from now on which batchers could serve a request."""
        self._runtime.do_every(WATCH_S, self._look_at_fleet)
        self._runtime.do_every(RATE_TICK_S, self._measure)
        self._runtime.do_every(TICK_S, self._update_shedders)
        self._watch_api_keys()
        self.rates.start()

    def is_connected(self) -> bool:
        """Whether requests go over Redis."""
        return self.queue.mode == "redis"

    def find(self, request_id: str, answer: FoundRequest) -> None:
        """Tell how a request is: one of this process, a task, or one of another gateway."""
        states = self.redis_context.states

        def told_of_task(state: RequestState | CarpoolError | None) -> None:
            if state is None:
                states.elsewhere(request_id, answer)
            else:
                answer(state)

        if (request := self._find_own(request_id)) is not None:
            self._tell_own(request, answer)
        else:
            self.redis_context.tasks.state(request_id, told_of_task)

    def heartbeat(self) -> Heartbeat:
        """What this gateway tells the other processes of itself."""
        self._told_rates = {model: max(SOME_RPS, sum(shedder.rates)) for model, shedder in self.shedders.items()}
        return Heartbeat(
            status=self.redis_context.beat_status(),
            mode=self.queue.mode,
            rate=round(self.rate, 2),
            in_flight=self.queue.pending.held,
            wanted=wanted(self.shedders),
            demand={model: self._demands.of(model) for model in self._runtime.models},
            queued={
                model: (shedder.requests(), round(shedder.admitted_rps(), 2))
                for model, shedder in self.shedders.items()
                if self._counts_whole and self.is_connected()
            },
        )

    def pressure(self, model: str) -> float:
        """The pressure on the whole fleet; while Redis is gone, on this process."""
        if not self.is_connected():
            return super().pressure(model)
        view = self.redis_context.registry.view
        return pressure(view.wanted(model, len(self._runtime.settings.tiers)), view.capacity_rps(model) or inf)

    def describe_queue(self) -> RedisGatewayNumbers:
        """What `/metrics` shows of the way through Redis."""
        return RedisGatewayNumbers(
            broker_mode=MODE_NUMBERS[self.queue.mode],
            sent_again=self.queue.sent_again,
            late_outcomes=self.queue.pending.late_outcomes,
            rate_limit_asks=self.rates.asks,
            rate_limit_failures=self.rates.failures,
        )

    def _watch_api_keys(self) -> None:
        if self.credentials is None or self._runtime.settings.auth.mode not in TAKES_KEYS:
            return
        self.credentials.expect_stored_keys()
        watch = ApiKeyWatch(self.redis_context.nodes, self.redis_context.keys, self.credentials.change_stored_keys)
        watch.start()
        self._runtime.opened.callback(watch.close)
        self.redis_context.when_nodes_change.append(watch.nodes_changed)

    def _look_at_fleet(self) -> None:
        registry, now = self.redis_context.registry, self._runtime.clock()
        view = registry.view
        if view.live_batchers() or not registry.is_fresh():
            self._batchers_seen = now
        for name, availability in self.availability.items():
            if not self.is_connected():
                own = [service.pool.is_down for service in self._own.services if service.name == name]
                availability.is_down = bool(own) and all(own)
            elif view.live_batchers():
                is_closed = view.healthy_slots(name) == 0 and not view.is_open_to_others(name)
                availability.is_down = registry.is_fresh() and is_closed
                if not availability.is_down:
                    availability.down_since = inf
                elif availability.down_since == inf:
                    availability.down_since = now
                if availability.is_down:
                    self.queue.fail_waiting(name, availability.down_since, upstream_down(availability))
            else:
                availability.is_down = now - self._batchers_seen > BATCHERS_GONE_S

    def _heard(self, view: FleetView) -> None:
        for name, availability in self.availability.items():
            availability.heard(view, name)
        self._look_at_fleet()

    def _update_shedders(self) -> None:
        """Tell the shedders what can be served: by the fleet, or while Redis is gone by this process."""
        view, tiers = self.redis_context.registry.view, len(self._runtime.settings.tiers)
        for model, shedder in self.shedders.items():
            if not self.is_connected():
                for service in self._own.services:
                    if service.name == model:
                        learn_own(shedder, service, stats_of_tiers(self._own.broker.queue_stats, model, tiers))
                continue
            stats_by_tier = stats_of_tiers(self.queue.pending.queue_stats, model, tiers)
            slots, gateways = view.healthy_slots(model), max(1, len(view.live_gateways()))
            if (capacity := view.capacity_rps(model)) and self._counts_whole:
                self._learn_whole(shedder, model, stats_by_tier)
            elif capacity:
                others, batch_s = (
                    view.wanted(model, tiers, without=self.redis_context.name.decode()),
                    view.batch_s(model),
                )
                batch = capacity * batch_s / (slots or 1)
                learn_share(shedder, capacity, batch, others, stats_by_tier, batch_s, gateways)
            else:
                at_once = slots * self._runtime.models[model].batching.max_batch / gateways
                first_call = partial(self._first_call, model, at_once)
                shedder.suppose(first_call, stats_by_tier, counts_running=True)
        for shedder in self.shedders.values():
            shedder.tick(self._runtime.clock())
        told = self._told_rates
        if self.is_connected() and any(
            sum(shedder.rates) > MORE_TIMES * told.get(model, SOME_RPS) for model, shedder in self.shedders.items()
        ):
            # The others share the capacity with this one: from now on, not from the next heartbeat on.
            self.redis_context.registry.heartbeat()

    def _learn_whole(self, shedder: LoadShedder, model: str, stats_by_tier: Sequence[QueueStats]) -> None:
        """By thresholds: what the whole fleet can serve, and what the other gateways have of it."""
        view, own_name, count = self.redis_context.registry.view, self.redis_context.name.decode(), len(stats_by_tier)
        queued = view.queued(model, without=own_name)
        rate, others_rate = sum(shedder.rates), sum(view.wanted(model, count, without=own_name))
        part = max(1 / max(1, len(view.live_gateways())), rate / max(rate + others_rate, SOME_RPS))
        others = Elsewhere(sum(each[0] for each in queued), sum(each[1] for each in queued), part, view.seen_at)
        capacity, batch_s = view.capacity_rps(model), view.batch_s(model)
        shedder.learn([capacity] * count, [1.0] * count, stats_by_tier, call_s=batch_s, batch_s=batch_s, others=others)

    def _first_call(self, model: str, at_once: float) -> tuple[float, float]:
        """Since when the first call runs: since its first request came, or so."""
        return at_once, self.queue.pending.oldest(model)

    def sampled_here(self, request: Request) -> None:
        """A request that goes to an endpoint of this process; one that went over Redis is sampled with its outcome."""
        if self.shedders and not self.is_connected():
            self._sampled(request)

    def _sampled(self, request: Request) -> None:
        sample(self.shedders, request)

    def _measure(self) -> None:
        arrivals = sum(self.queue.pending.arrivals.values())
        self.rate += RATE_WEIGHT * ((arrivals - self._arrivals_then) / RATE_TICK_S - self.rate)
        self._arrivals_then = arrivals

    def _find_own(self, request_id: str) -> Request | None:
        """A live or recent request of this process; None for a task that Redis has."""
        recent = self.find_recent(request_id) or self._find_slow(request_id)
        request = recent or self._own.find_waiting(request_id)
        return None if request is not None and request.is_task and request.phase == QUEUED else request

    def _tell_own(self, request: Request, answer: FoundRequest) -> None:
        state = state_of(request, self._runtime.clock(), self._runtime.company_s_max(request.model))
        if state.status == "queued":
            state = replace(state, queue=Queue(waiting=self.redis_context.depth.unread()))
        if (place := self.queue.place_of(request)) is not None:
            self.redis_context.states.of_entry(*place, state, answer)
        else:
            answer(state)

    def _looked_for(self, reply: Reply) -> None:
        """Another gateway looks for a request, or has found a request that this gateway looks for."""
        for request_id, state in reply.found:
            self.redis_context.states.told(request_id, state)
        for gateway, request_id in reply.wanted:
            if (request := self._find_own(request_id)) is not None:
                self._tell_own(request, partial(self._tell_other, gateway, request_id))

    def _tell_other(self, gateway: bytes, request_id: str, state: RequestState | CarpoolError | None) -> None:
        if isinstance(state, RequestState):
            self.redis_context.states.tell(gateway, request_id, state)
