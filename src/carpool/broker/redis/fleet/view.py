"""Who lives: what gateways and batchers say of themselves in their heartbeats, and what operators see of it. Pure.

1. A heartbeat is JSON, bounded in bytes. A malformed one, maybe of another version, is left out.
2. Ages are differences of two times on Redis's clock, so no clocks of two machines are ever compared.
3. A process that fell silent is shown as offline until it is forgotten, and counts for nothing meanwhile.
4. Older versions read whole numbers of slots only. So a share of one is written as one, and as it is in `exact`.
5. Older versions refuse an endpoint with fields that they do not know. So its latencies are written in `call_ms`.
"""

from collections.abc import Collection, Iterator
from math import ceil
from operator import mul
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from carpool.core.clock import rfc3339
from carpool.core.scaling import Demand
from carpool.core.snapshot import (
    BatcherState,
    CallCost,
    EndpointHealth,
    FleetState,
    GatewayState,
    Health,
    Mode,
    ModelShare,
    ModelState,
    Status,
    call_cost,
)

BEAT_BYTES_MAX = 256 * 1024
OFFLINE = "offline"
DRAINING = "draining"


class ModelHeartbeat(msgspec.Struct, frozen=True, omit_defaults=True):
    """One model at one batcher."""

    slots: int = 0
    healthy_slots: float = 0
    in_flight: int = 0
    current_utilization: float = 0.0
    rate: float = 0.0
    mean_batch_size: float = 0.0
    # 0 while nothing is known of it.
    capacity_rps: float = 0.0
    # How long a batch takes.
    batch_s: float = 0.0
    # While no endpoint is known to work: slots on offer for calls that find out; seconds until there is one.
    probes: int = 0
    retry_after_s: int = 0
    # An endpoint failed inputs of one owner only, and is closed to that owner: others are let in.
    is_open_to_others: bool = False
    endpoints: tuple[EndpointHealth, ...] = ()
    # Owners whose inputs this batcher saw refused again and again.
    quarantined: tuple[str, ...] = ()
    # For scaling: endpoints that get calls, and that are there and fail; how full batches are, by what they are while
    # all slots are busy; and how many wait for it, as far as this batcher knows.
    works: int = 0
    failing: int = 0
    fill: float = 1.0
    waiting: int = 0
    # Rule 4: `healthy_slots` and the limits of the endpoints, where one of them is no whole number. Only as written.
    exact: tuple[float, ...] = ()
    # Rule 5: by endpoint, half of its calls took so long at most, and 99 %; empty where that is not known. As written.
    call_ms: tuple[tuple[float, ...], ...] = ()
    # What a call takes, in seconds by term (batching/cost.py), once that is known.
    cost: tuple[float, ...] = ()


class Heartbeat(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a process says of itself."""

    status: str
    current_utilization: float = 0.0
    in_flight: int = 0
    # Requests a second that clients send to this process.
    rate: float = 0.0
    # How a gateway reaches the GPUs: over the broker, or by itself.
    mode: str = ""
    models: dict[str, ModelHeartbeat] = {}
    # Of a gateway: requests a second that come, by model and tier, also those that it refuses.
    wanted: dict[str, tuple[float, ...]] = {}
    # Of a gateway: what comes, by model, for scaling; and of each process the processor cores that it uses.
    demand: dict[str, Demand] = {}
    cores: float = 0.0
    # By model: synchronous requests without an outcome, and how many are admitted a second; where thresholds count.
    queued: dict[str, tuple[int, float]] = {}
    # An operator looks at its live page: the others publish what happens at theirs.
    is_watched: bool = False


class FleetMember(msgspec.Struct, frozen=True):
    """One process of the fleet and its last heartbeat."""

    name: str
    age_s: float
    is_live: bool
    # RFC 3339, on Redis's clock.
    last_heartbeat: str
    heartbeat: Heartbeat

    @property
    def status(self) -> str:
        """What it said of itself, unless it fell silent."""
        return self.heartbeat.status if self.is_live else OFFLINE


class FleetView(msgspec.Struct, frozen=True):
    """The fleet at one moment."""

    # On this process's own monotonic clock.
    seen_at: float
    stale_s: float
    gateways: tuple[FleetMember, ...]
    batchers: tuple[FleetMember, ...]
    # Heartbeats that could not be understood.
    unreadable: int
    # When that was, in seconds on Redis's clock.
    at_s: float = 0.0

    def is_fresh(self, now: float) -> bool:
        """Whether Redis sent this lately."""
        return now - self.seen_at <= self.stale_s

    def all_silent(self) -> "FleetView":
        """The same fleet when Redis has told of no process for too long."""
        gateways, batchers = (
            tuple(replace(member, is_live=False) for member in members) for members in (self.gateways, self.batchers)
        )
        return replace(self, gateways=gateways, batchers=batchers)

    def live_gateways(self) -> list[FleetMember]:
        """Gateways heard of lately."""
        return [member for member in self.gateways if member.is_live]

    def live_batchers(self) -> list[FleetMember]:
        """Batchers heard of lately."""
        return [member for member in self.batchers if member.is_live]

    def healthy_slots(self, model: str) -> float:
        """Calls that the endpoints of a model that work may have at once, over all live batchers."""
        return sum(heartbeat.healthy_slots for _, heartbeat in self.serving(model))

    def is_served_elsewhere(self, model: str, name: str) -> bool:
        """Whether a batcher other than this one, and not draining, has an endpoint of a model that works."""
        return any(
            heartbeat.healthy_slots and member.name != name and member.status != DRAINING
            for member, heartbeat in self.serving(model)
        )

    def is_open_to_others(self, model: str) -> bool:
        """Where no endpoint of a model is known to work: whether one failed inputs of one owner only."""
        return any(heartbeat.is_open_to_others for _, heartbeat in self.serving(model))

    def probes(self, model: str) -> int:
        """Where no endpoint of a model is known to work: calls that are wanted to try some with."""
        return sum(heartbeat.probes for _, heartbeat in self.serving(model))

    def retry_after_s(self, model: str) -> int:
        """Where no endpoint of a model is known to work: whole seconds until one is tried, at least one."""
        return max(1, min((heartbeat.retry_after_s for _, heartbeat in self.serving(model)), default=1))

    def capacity_rps(self, model: str) -> float:
        """Requests a second that all live batchers together can serve; 0 while none of them knows.

        Batchers that do not know yet, or are too old to tell, are taken to be like the others, slot by slot.
        """
        known = self._measured(model)
        slots = sum(heartbeat.healthy_slots for heartbeat in known)
        return sum(heartbeat.capacity_rps for heartbeat in known) * self.healthy_slots(model) / (slots or 1)

    def batch_s(self, model: str) -> float:
        """How long a batch takes, on average over what can be served."""
        known = self._measured(model)
        weighed = sum(heartbeat.capacity_rps * heartbeat.batch_s for heartbeat in known)
        return weighed / max(sum(heartbeat.capacity_rps for heartbeat in known), 1e-9)

    def wanted(self, model: str, tiers: int, without: str = "") -> list[float]:
        """Requests a second that come to the live gateways, by tier; `without` one of them."""
        found = [0.0] * tiers
        for member in self.live_gateways():
            for tier, rate in enumerate(member.heartbeat.wanted.get(model, ())[:tiers]):
                found[tier] += rate if member.name != without else 0.0
        return found

    def queued(self, model: str, without: str) -> list[tuple[int, float]]:
        """What each live gateway but one has without an outcome, and admits a second."""
        members = [member for member in self.live_gateways() if member.name != without]
        return [member.heartbeat.queued.get(model, (0, 0.0)) for member in members]

    def problems(self) -> Iterator[tuple[str, str]]:
        """Endpoints that have answered no call well, and what becomes of their calls."""
        for member in self.live_batchers():
            for heartbeat in member.heartbeat.models.values():
                yield from (
                    (endpoint.endpoint, endpoint.problem) for endpoint in heartbeat.endpoints if endpoint.problem
                )

    def has_never_worked(self, model: str) -> bool:
        """Whether no endpoint of a model has answered a call well, though some were made."""
        endpoints = [endpoint for _, heartbeat in self.serving(model) for endpoint in heartbeat.endpoints]
        return bool(endpoints) and all(endpoint.problem for endpoint in endpoints)

    def live_names(self) -> set[str]:
        """Every process heard of lately."""
        return {member.name for member in (*self.live_gateways(), *self.live_batchers())}

    def is_watched(self, without: str) -> bool:
        """Whether an operator looks at the live page of another process than this one."""
        members = (*self.live_gateways(), *self.live_batchers())
        return any(member.heartbeat.is_watched and member.name != without for member in members)

    def quarantined(self, model: str) -> list[str]:
        """Owners that some live batcher has quarantined."""
        return sorted({owner for _, heartbeat in self.serving(model) for owner in heartbeat.quarantined})

    def models(self) -> list[str]:
        """Every model that a live batcher serves."""
        return list(dict.fromkeys(name for member in self.live_batchers() for name in member.heartbeat.models))

    def _measured(self, model: str) -> list[ModelHeartbeat]:
        """The heartbeats of batchers that tell what they can serve."""
        return [
            heartbeat
            for _, heartbeat in self.serving(model)
            if heartbeat.capacity_rps > 0.0 and heartbeat.batch_s > 0.0
        ]

    def serving(self, model: str) -> Iterator[tuple[FleetMember, ModelHeartbeat]]:
        """The live batchers of a model."""
        for member in self.live_batchers():
            heartbeat = member.heartbeat.models.get(model)
            if heartbeat is not None:
                yield member, heartbeat


_encode = msgspec.json.Encoder().encode
_decode_heartbeat = msgspec.json.Decoder(Heartbeat).decode


def encode_heartbeat(said: Heartbeat, *, with_models: bool) -> bytes:
    """A heartbeat within its bound. A batcher's own `in_flight` and `current_utilization` follow from its models."""
    if not with_models:
        return _encode(replace(said, models={}))
    said = replace(said, models={name: _as_written(heartbeat) for name, heartbeat in said.models.items()})
    models = said.models.values()
    if models:
        in_flight = sum(heartbeat.in_flight for heartbeat in models)
        said = replace(said, in_flight=in_flight, current_utilization=round(_utilization(models), 4))
    encoded = _encode(said)
    if len(encoded) <= BEAT_BYTES_MAX:
        return encoded
    # Its slots count even where its endpoints are too many to be shown.
    bare = {name: replace(heartbeat, endpoints=(), call_ms=()) for name, heartbeat in said.models.items()}
    return _encode(replace(said, models=bare))


def read_view(reply: Any, *, seen_at: float, stale_s: float) -> FleetView:
    """The reply of the heartbeat script; raises ValueError where it is no such reply."""
    if not (isinstance(reply, list) and len(reply) == 3 and isinstance(reply[0], int)):
        raise ValueError("this is no reply to a heartbeat")
    now_ms, *groups = reply
    said = [
        [_read_member(*pair, now_ms, stale_s) for pair in zip(flat[::2], flat[1::2], strict=True)] for flat in groups
    ]
    gateways, batchers = (
        tuple(sorted((member for member in members if member is not None), key=lambda member: member.name))
        for members in said
    )
    unreadable = sum(members.count(None) for members in said)
    return FleetView(seen_at, stale_s, gateways, batchers, unreadable, now_ms / 1000)


def fleet_state(view: FleetView) -> FleetState:
    """What `/internal/fleet` shows: the models over all batchers, and every process."""
    names = dict.fromkeys(name for member in view.batchers for name in member.heartbeat.models)
    return FleetState(
        models={name: _model_state(view, name) for name in names},
        gateways=[GatewayState(**_facts(member), mode=member.heartbeat.mode) for member in view.gateways],
        batchers=[
            BatcherState(
                **_facts(member),
                models={name: _share_of(heartbeat) for name, heartbeat in member.heartbeat.models.items()},
            )
            for member in view.batchers
        ],
    )


def fleet_health(view: FleetView, unread: int, *, status: Status, broker: Mode, problem: str = "") -> Health:
    """`/internal/health` over the whole fleet; `unread` requests wait in Redis."""
    serving = [heartbeat for member in view.live_batchers() for heartbeat in member.heartbeat.models.values()]
    return Health(
        status=status,
        problem=problem or UNSET,
        gpu_utilization=round(_utilization(serving), 4),
        queue_depth=unread,
        requests_per_second=round(sum(member.heartbeat.rate for member in view.live_gateways()), 2),
        broker=broker,
        healthy_slots=sum(heartbeat.healthy_slots for heartbeat in serving),
        gateways=len(view.live_gateways()),
        batchers=len(view.live_batchers()),
    )


def _read_member(name: bytes, value: bytes, now_ms: int, stale_s: float) -> FleetMember | None:
    stamp_text, _, body = value.partition(b" ")
    try:
        stamp_ms = int(stamp_text)
        stamped, heartbeat = rfc3339(stamp_ms / 1000), _decode_heartbeat(body)
        if any(each.exact or each.call_ms for each in heartbeat.models.values()):
            heartbeat = replace(heartbeat, models={name: _as_it_is(each) for name, each in heartbeat.models.items()})
    except (msgspec.MsgspecError, ValueError, OverflowError, OSError, RecursionError):
        return None
    # A heartbeat from the future is as silent as an old one: the clock was set back, and none came since.
    age_s = abs(now_ms - stamp_ms) / 1000
    return FleetMember(name.decode(errors="replace"), age_s, age_s <= stale_s, stamped, heartbeat)


def _as_written(heartbeat: ModelHeartbeat) -> ModelHeartbeat:
    """For older versions (rules 4 and 5)."""
    if any(endpoint.call_p50_ms is not UNSET for endpoint in heartbeat.endpoints):
        call_ms = tuple(
            () if each.call_p50_ms is UNSET or each.call_p99_ms is UNSET else (each.call_p50_ms, each.call_p99_ms)
            for each in heartbeat.endpoints
        )
        bare = tuple(replace(each, call_p50_ms=UNSET, call_p99_ms=UNSET) for each in heartbeat.endpoints)
        heartbeat = replace(heartbeat, endpoints=bare, call_ms=call_ms)
    exact = (heartbeat.healthy_slots, *(endpoint.limit for endpoint in heartbeat.endpoints))
    if all(isinstance(number, int) for number in exact):
        return heartbeat
    whole = tuple(replace(endpoint, limit=ceil(endpoint.limit)) for endpoint in heartbeat.endpoints)
    return replace(heartbeat, healthy_slots=ceil(heartbeat.healthy_slots), endpoints=whole, exact=exact)


def _as_it_is(heartbeat: ModelHeartbeat) -> ModelHeartbeat:
    """As it was said, before it was written."""
    endpoints, call_ms = heartbeat.endpoints, heartbeat.call_ms
    if len(call_ms) == len(endpoints):
        endpoints = tuple(
            replace(each, call_p50_ms=took[0], call_p99_ms=took[1]) if len(took) == 2 else each
            for each, took in zip(endpoints, call_ms, strict=True)
        )
    heartbeat = replace(heartbeat, endpoints=endpoints, call_ms=())
    if not heartbeat.exact:
        return heartbeat
    healthy_slots, *limits = heartbeat.exact
    if len(limits) == len(endpoints):  # else they were too many to be written
        endpoints = tuple(replace(each, limit=limit) for each, limit in zip(endpoints, limits, strict=True))
    return replace(heartbeat, healthy_slots=healthy_slots, endpoints=endpoints, exact=())


def _model_state(view: FleetView, model: str) -> ModelState:
    """One model in the shape that a gateway without Redis shows, each endpoint with the batcher that calls it.

    The endpoints of a batcher that fell silent are shown as offline.
    """
    heartbeats = [heartbeat for _, heartbeat in view.serving(model)]
    return ModelState(
        slots=sum(heartbeat.slots for heartbeat in heartbeats),
        healthy_slots=view.healthy_slots(model),
        endpoints=[
            replace(endpoint, batcher=member.name)
            if member.is_live
            else replace(endpoint, batcher=member.name, state=OFFLINE, utilization=0.0, in_flight=0, problem=UNSET)
            for member in view.batchers
            if model in member.heartbeat.models
            for endpoint in member.heartbeat.models[model].endpoints
        ],
        capacity_rps=round(sum(heartbeat.capacity_rps for heartbeat in heartbeats), 2),
        quarantined=view.quarantined(model),
        cost=mean_cost(heartbeats),
    )


def mean_cost(heartbeats: Collection[ModelHeartbeat]) -> CallCost | UnsetType:
    """Over the slots of the batchers that know theirs."""
    terms = len(CallCost.__struct_fields__)
    known = [heartbeat for heartbeat in heartbeats if heartbeat.slots and len(heartbeat.cost) == terms]
    slots = [heartbeat.slots for heartbeat in known]
    by_term = zip(*(heartbeat.cost for heartbeat in known), strict=True)
    return call_cost([sum(map(mul, term, slots)) / sum(slots) for term in by_term])


def _facts(member: FleetMember) -> dict[str, Any]:
    """What the page says of gateways and batchers alike."""
    return {
        "name": member.name,
        "status": member.status,
        "current_utilization": member.heartbeat.current_utilization,
        "in_flight": member.heartbeat.in_flight,
        "last_heartbeat": member.last_heartbeat,
    }


def _share_of(heartbeat: ModelHeartbeat) -> ModelShare:
    facts = msgspec.structs.asdict(heartbeat)
    return ModelShare(**{field: facts[field] for field in ModelShare.__struct_fields__})


def _utilization(heartbeats: Collection[ModelHeartbeat]) -> float:
    slots = sum(heartbeat.slots for heartbeat in heartbeats)
    return sum(heartbeat.current_utilization * heartbeat.slots for heartbeat in heartbeats) / slots if slots else 0.0
