"""Who lives: what gateways and batchers say of themselves in their heartbeats, and what operators see of it. Pure.

1. A heartbeat is JSON that its sender bounds and its readers do not trust: a malformed one is left out.
2. Ages are differences of two times on Redis's clock, so no clocks of two machines are ever compared.
3. A process that fell silent is shown as offline until it is forgotten, and counts for nothing meanwhile.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from carpool.core.clock import rfc3339
from carpool.core.snapshot import (
    BatcherState,
    EndpointHealth,
    FleetState,
    GatewayState,
    Health,
    Mode,
    ModelShare,
    ModelState,
    Status,
)

BEAT_BYTES_MAX = 256 * 1024
MEMBERS_MAX = 1000
MODELS_MAX = 256
# Of all models of a batcher together. Its slots count even where its endpoints are too many to be shown.
ENDPOINTS_MAX = 1024
NAME_LENGTH_MAX = 256
# Problems of endpoints that a batcher tells, and how long each may be.
PROBLEMS_MAX, PROBLEM_LENGTH_MAX = 16, 512
# What stands for the problems beyond these.
SAME_PROBLEM = "has answered no call well so far"
OWNERS_MAX = 64
TIERS_MAX = 64
OFFLINE = "offline"
DRAINING = "draining"
# The end of year 9999, the last that can be written.
_STAMP_MS_MAX = 253_402_300_799_000

Name = Annotated[str, Meta(max_length=NAME_LENGTH_MAX)]
Word = Annotated[str, Meta(max_length=32)]
Problem = Annotated[str, Meta(max_length=PROBLEM_LENGTH_MAX)]
Owner = Annotated[str, Meta(max_length=64)]
Count = Annotated[int, Meta(ge=0, le=10**9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Rate = Annotated[float, Meta(ge=0, le=1e9)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]


class EndpointHeartbeat(msgspec.Struct, frozen=True, omit_defaults=True):
    """One endpoint, as the batcher that calls it sees it."""

    name: Name
    status: Word
    current_utilization: Share = 0.0
    in_flight: Count = 0
    limit: Count = 0
    slots: Count = 0
    breaker: Word = ""
    last_heartbeat: Word | None = None
    # What its calls become, while none was answered well.
    problem: Problem = ""


class ModelHeartbeat(msgspec.Struct, frozen=True, omit_defaults=True):
    """One model at one batcher."""

    slots: Count = 0
    healthy_slots: Count = 0
    in_flight: Count = 0
    current_utilization: Share = 0.0
    rate: Rate = 0.0
    mean_batch_size: Rate = 0.0
    # 0 while nothing is known of it.
    capacity_rps: Rate = 0.0
    # How long a batch takes.
    batch_s: Seconds = 0.0
    # While no endpoint is known to work: slots on offer for calls that find out; seconds until there is one.
    probes: Count = 0
    retry_after_s: Count = 0
    # An endpoint failed inputs of one owner only, and is closed to that owner: others are let in.
    is_open_to_others: bool = False
    endpoints: Annotated[tuple[EndpointHeartbeat, ...], Meta(max_length=ENDPOINTS_MAX)] = ()
    # Owners whose inputs this batcher saw refused again and again.
    quarantined: Annotated[tuple[Owner, ...], Meta(max_length=OWNERS_MAX)] = ()


class Heartbeat(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a process says of itself."""

    status: Word
    current_utilization: Share = 0.0
    in_flight: Count = 0
    # Requests a second that clients send to this process.
    rate: Rate = 0.0
    # How a gateway reaches the GPUs: over the broker, or by itself.
    mode: Word = ""
    models: Annotated[dict[Name, ModelHeartbeat], Meta(max_length=MODELS_MAX)] = {}
    # Of a gateway: requests a second that come, by model and tier, also those that it refuses.
    wanted: Annotated[
        dict[Name, Annotated[tuple[Rate, ...], Meta(max_length=TIERS_MAX)]], Meta(max_length=MODELS_MAX)
    ] = {}
    # An operator looks at its live page: the others publish what happens at theirs.
    is_watched: bool = False
    # Into how many parts it takes the queue to be cut (scripts/heartbeat.lua reads this); 0: it does not say.
    shards: Count = 0


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

    def is_fresh(self, now: float) -> bool:
        """Whether Redis sent this lately."""
        return now - self.seen_at <= self.stale_s

    def all_silent(self) -> "FleetView":
        """The same fleet when Redis has told of no process for too long."""
        gateways, batchers = (
            tuple(msgspec.structs.replace(member, is_live=False) for member in members)
            for members in (self.gateways, self.batchers)
        )
        return msgspec.structs.replace(self, gateways=gateways, batchers=batchers)

    def live_gateways(self) -> list[FleetMember]:
        """Gateways heard of lately."""
        return [member for member in self.gateways if member.is_live]

    def live_batchers(self) -> list[FleetMember]:
        """Batchers heard of lately."""
        return [member for member in self.batchers if member.is_live]

    def healthy_slots(self, model: str) -> int:
        """Calls that the endpoints of a model that work may have at once, over all live batchers."""
        return sum(heartbeat.healthy_slots for _, heartbeat in self._serving(model))

    def is_served_elsewhere(self, model: str, name: str) -> bool:
        """Whether a batcher other than this one, and not draining, has an endpoint of a model that works."""
        return any(
            heartbeat.healthy_slots and member.name != name and member.status != DRAINING
            for member, heartbeat in self._serving(model)
        )

    def is_open_to_others(self, model: str) -> bool:
        """Where no endpoint of a model is known to work: whether one failed inputs of one owner only."""
        return any(heartbeat.is_open_to_others for _, heartbeat in self._serving(model))

    def probes(self, model: str) -> int:
        """Where no endpoint of a model is known to work: calls that are wanted to try some with."""
        return sum(heartbeat.probes for _, heartbeat in self._serving(model))

    def retry_after_s(self, model: str) -> int:
        """Where no endpoint of a model is known to work: whole seconds until one is tried, at least one."""
        return max(1, min((heartbeat.retry_after_s for _, heartbeat in self._serving(model)), default=1))

    def capacity_rps(self, model: str) -> float:
        """Requests a second that all live batchers together can serve; 0 while none of them knows.

        Batchers that do not know yet, or are too old to tell, are taken to be like the others, slot by slot.
        """
        known = self._measured(model)
        slots = sum(heartbeat.healthy_slots for heartbeat in known)
        return sum(heartbeat.capacity_rps for heartbeat in known) * self.healthy_slots(model) / max(1, slots)

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

    def problems(self) -> Iterator[tuple[str, str]]:
        """Endpoints that have answered no call well, and what becomes of their calls."""
        for member in self.live_batchers():
            for heartbeat in member.heartbeat.models.values():
                yield from ((endpoint.name, endpoint.problem) for endpoint in heartbeat.endpoints if endpoint.problem)

    def has_never_worked(self, model: str) -> bool:
        """Whether no endpoint of a model has answered a call well, though some were made."""
        endpoints = [endpoint for _, heartbeat in self._serving(model) for endpoint in heartbeat.endpoints]
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
        return sorted({owner for _, heartbeat in self._serving(model) for owner in heartbeat.quarantined})

    def models(self) -> list[str]:
        """Every model that a live batcher serves."""
        return list(dict.fromkeys(name for member in self.live_batchers() for name in member.heartbeat.models))

    def outline(self) -> Any:
        """What is worth telling when it differs: who lives, in which state, with how much that works."""
        return (
            [(member.name, member.status, member.heartbeat.mode) for member in self.gateways],
            [
                (
                    member.name,
                    member.status,
                    [(name, heartbeat.healthy_slots) for name, heartbeat in member.heartbeat.models.items()],
                )
                for member in self.batchers
            ],
        )

    def _measured(self, model: str) -> list[ModelHeartbeat]:
        """The heartbeats of batchers that tell what they can serve."""
        return [
            heartbeat
            for _, heartbeat in self._serving(model)
            if heartbeat.capacity_rps > 0.0 and heartbeat.batch_s > 0.0
        ]

    def _serving(self, model: str) -> Iterator[tuple[FleetMember, ModelHeartbeat]]:
        for member in self.live_batchers():
            heartbeat = member.heartbeat.models.get(model)
            if heartbeat is not None:
                yield member, heartbeat


_encode = msgspec.json.Encoder().encode
_decode_heartbeat = msgspec.json.Decoder(Heartbeat).decode


def encode_heartbeat(said: Heartbeat, *, with_models: bool) -> bytes:
    """A heartbeat within its bounds. A batcher's own `in_flight` and `current_utilization` follow from its models."""
    if not with_models:
        return _encode(_bounded(said, {}))
    models = _bounded_models(said.models)
    encoded = _encode(_bounded(said, models))
    if len(encoded) <= BEAT_BYTES_MAX:
        return encoded
    bare = {name: msgspec.structs.replace(heartbeat, endpoints=()) for name, heartbeat in models.items()}
    return _encode(_bounded(said, bare))


def read_view(reply: Any, *, seen_at: float, stale_s: float) -> FleetView:
    """The reply of the heartbeat script; raises ValueError where it is no such reply."""
    if not (isinstance(reply, list) and len(reply) == 3 and isinstance(reply[0], int)):
        raise ValueError("this is no reply to a heartbeat")
    now_ms, unreadable = reply[0], 0
    groups: list[tuple[FleetMember, ...]] = []
    for flat in reply[1:]:
        members = []
        for name, value in zip(flat[: 2 * MEMBERS_MAX : 2], flat[1 : 2 * MEMBERS_MAX : 2], strict=True):
            member = _read_member(name, value, now_ms, stale_s)
            if member is None:
                unreadable += 1
            else:
                members.append(member)
        groups.append(tuple(sorted(members, key=lambda member: member.name)))
    return FleetView(seen_at, stale_s, groups[0], groups[1], unreadable)


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


def endpoint_heartbeat(state: EndpointHealth) -> EndpointHeartbeat:
    """What a batcher says of an endpoint."""
    return EndpointHeartbeat(
        name=state.endpoint,
        status=state.state,
        current_utilization=state.utilization,
        in_flight=state.in_flight,
        limit=state.limit,
        slots=state.slots,
        breaker=state.breaker,
        last_heartbeat=state.last_heartbeat,
        problem="" if isinstance(state.problem, UnsetType) else state.problem,
    )


def _bounded(said: Heartbeat, models: dict[str, ModelHeartbeat]) -> Heartbeat:
    heartbeats = list(models.values())
    return Heartbeat(
        status=_word(said.status),
        current_utilization=_share(_utilization(heartbeats) if models else said.current_utilization),
        in_flight=_count(sum(heartbeat.in_flight for heartbeat in heartbeats) if models else said.in_flight),
        rate=_rate(said.rate),
        mode=_word(said.mode),
        models=models,
        wanted={
            name[:NAME_LENGTH_MAX]: tuple(map(_rate, rates[:TIERS_MAX]))
            for name, rates in list(said.wanted.items())[:MODELS_MAX]
        },
        is_watched=said.is_watched,
        shards=_count(said.shards),
    )


def _bounded_models(said: Mapping[str, ModelHeartbeat]) -> dict[str, ModelHeartbeat]:
    models: dict[str, ModelHeartbeat] = {}
    room = ENDPOINTS_MAX
    problems = iter(range(PROBLEMS_MAX))
    for name, heartbeat in list(said.items())[:MODELS_MAX]:
        endpoints = tuple(_bounded_endpoint(endpoint, problems) for endpoint in heartbeat.endpoints[:room])
        room -= len(endpoints)
        models[name[:NAME_LENGTH_MAX]] = ModelHeartbeat(
            slots=_count(heartbeat.slots),
            healthy_slots=_count(heartbeat.healthy_slots),
            in_flight=_count(heartbeat.in_flight),
            current_utilization=_share(heartbeat.current_utilization),
            rate=_rate(heartbeat.rate),
            mean_batch_size=_rate(heartbeat.mean_batch_size),
            capacity_rps=_rate(heartbeat.capacity_rps),
            batch_s=max(0.0, min(heartbeat.batch_s, 1e6)),
            probes=_count(heartbeat.probes),
            retry_after_s=_count(heartbeat.retry_after_s),
            is_open_to_others=bool(heartbeat.is_open_to_others),
            endpoints=endpoints,
            quarantined=tuple(owner[:64] for owner in heartbeat.quarantined[:OWNERS_MAX]),
        )
    return models


def _bounded_endpoint(said: EndpointHeartbeat, problems: Iterator[int]) -> EndpointHeartbeat:
    problem = said.problem
    if problem:
        problem = problem[:PROBLEM_LENGTH_MAX] if next(problems, None) is not None else SAME_PROBLEM
    return EndpointHeartbeat(
        name=said.name[:NAME_LENGTH_MAX],
        status=_word(said.status),
        current_utilization=_share(said.current_utilization),
        in_flight=_count(said.in_flight),
        limit=_count(said.limit),
        slots=_count(said.slots),
        breaker=_word(said.breaker),
        last_heartbeat=None if said.last_heartbeat is None else _word(said.last_heartbeat),
        problem=problem,
    )


def _read_member(name: bytes, value: bytes, now_ms: int, stale_s: float) -> FleetMember | None:
    stamp_text, _, body = value.partition(b" ")
    if len(name) > NAME_LENGTH_MAX or len(body) > BEAT_BYTES_MAX or not stamp_text.isdigit() or len(stamp_text) > 16:
        return None
    stamp_ms = int(stamp_text)
    if stamp_ms > _STAMP_MS_MAX:
        return None
    try:
        heartbeat = _decode_heartbeat(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    # A heartbeat from the future is as silent as an old one: the clock was set back, and none came since.
    age_s = abs(now_ms - stamp_ms) / 1000
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name.decode(errors="replace"))
    return FleetMember(shown, age_s, age_s <= stale_s, rfc3339(stamp_ms / 1000), heartbeat)


def _model_state(view: FleetView, model: str) -> ModelState:
    """One model in the shape that a gateway without Redis shows, each endpoint with the batcher that calls it.

    The endpoints of a batcher that fell silent are shown as offline.
    """
    heartbeats = [member.heartbeat.models[model] for member in view.live_batchers() if model in member.heartbeat.models]
    return ModelState(
        slots=sum(heartbeat.slots for heartbeat in heartbeats),
        healthy_slots=view.healthy_slots(model),
        endpoints=[
            EndpointHealth(
                endpoint=endpoint.name,
                state=endpoint.status if member.is_live else OFFLINE,
                utilization=endpoint.current_utilization if member.is_live else 0.0,
                in_flight=endpoint.in_flight if member.is_live else 0,
                limit=endpoint.limit,
                slots=endpoint.slots,
                breaker=endpoint.breaker,
                last_heartbeat=endpoint.last_heartbeat,
                batcher=member.name,
                problem=(endpoint.problem if member.is_live else "") or UNSET,
            )
            for member in view.batchers
            if model in member.heartbeat.models
            for endpoint in member.heartbeat.models[model].endpoints
        ],
        capacity_rps=round(sum(heartbeat.capacity_rps for heartbeat in heartbeats), 2),
        quarantined=view.quarantined(model),
    )


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
    for own in ("endpoints", "batch_s", "probes", "retry_after_s", "is_open_to_others"):
        del facts[own]
    return ModelShare(**facts)


def _utilization(heartbeats: Sequence[ModelHeartbeat]) -> float:
    slots = sum(heartbeat.slots for heartbeat in heartbeats)
    return sum(heartbeat.current_utilization * heartbeat.slots for heartbeat in heartbeats) / slots if slots else 0.0


def _word(value: object) -> str:
    return str(value)[:32]


def _count(value: float) -> int:
    return max(0, min(int(value), 10**9))


def _share(value: float) -> float:
    return round(max(0.0, min(float(value), 1.0)), 4)


def _rate(value: float) -> float:
    return round(max(0.0, min(float(value), 1e9)), 2)
