"""Over Redis: what the load of the whole fleet is (pure), and where the decisions of scaling are kept for all of it.

1. Gateways decide, one after the other: the decisions in Redis are replaced by whoever heard the last ones. So the one
   that decided last goes on, the others hear what it decided, and when it is gone the next one does it. Nobody damps
   twice, and all say the same.
2. Times are those of Redis's clock, which came with the heartbeats.
3. An endpoint that several batchers call is one GPU. One on a batcher's own machine (localhost) is that machine's, and
   a simulated one is the batcher's.
4. Batchers have GPUs of their own where no two of them name the same endpoint; one that is alone has its own where all
   of its endpoints are on its machine. An endpoint that fails, or still starts, is there: it counts with its batcher.
5. Versions that do not tell how many endpoints work show which ones do. Where neither is known, nothing is.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import msgspec

from carpool.broker.redis.client.nodes import Nodes
from carpool.broker.redis.fleet.view import OFFLINE, FleetMember, FleetView, ModelHeartbeat
from carpool.broker.redis.keys import Keys
from carpool.broker.redis.scripts import SCALE
from carpool.core.scaling import BATCHER_RPS, GATEWAY_RPS, Decisions, ModelLoad, ServerLoad

# Longer than what must be remembered: the peak of an hour.
KEPT_MS = 2 * 3600 * 1000
DECISIONS_BYTES_MAX = 256 * 1024
LOOPBACK = ("localhost", "127.", "[::1]")

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Decisions).decode


class SharedDecisions:
    """The decisions of a fleet (composition.scaling.Keeper)."""

    def __init__(self, nodes: Nodes, keys: Keys, view: Callable[[], FleetView]) -> None:
        self._nodes = nodes
        self._keys = keys
        self._view = view
        # As Redis last had them, and so encoded.
        self.decisions = Decisions()
        self._kept = b""

    def now(self) -> float:
        """By Redis's clock."""
        return self._view().at_s

    def propose(self, decisions: Decisions | None) -> None:
        """Let them be kept, unless another process decided meanwhile; None: hear what was decided."""
        args = (self._kept, b"" if decisions is None else _encode(decisions), KEPT_MS)
        self._nodes.run(SCALE, self._keys.fleet_slot, [self._keys.scale], args, partial(self._told, decisions))

    def _told(self, proposed: Decisions | None, reply: Any) -> None:
        if isinstance(reply, bytes) and len(reply) <= DECISIONS_BYTES_MAX:
            self._kept = reply
            try:
                self.decisions = _decode(reply) if reply else self.decisions
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                pass  # those of another version are replaced
        elif proposed is not None:
            self.decisions = (
                proposed  # Redis is away, or full: until it is there again, each process says what it knows
            )


def model_loads(
    view: FleetView, models: Sequence[str], unread: int, tiers: Sequence[str], *, drain_s: float, wait_max_s: float
) -> dict[str, ModelLoad | None]:
    """The load of each model, None where it is not known; `unread` requests of all of them wait in Redis."""
    waiting = waiting_by_model(view, models, unread)
    return {
        model: _model_load(view, model, waiting[model], tiers, drain_s=drain_s, wait_max_s=wait_max_s)
        for model in models
    }


def _model_load(
    view: FleetView, model: str, waiting: int, tiers: Sequence[str], *, drain_s: float, wait_max_s: float
) -> ModelLoad | None:
    demands = [each.heartbeat.demand[model] for each in view.live_gateways() if model in each.heartbeat.demand]
    sync_rps = sum(each.sync_rps for each in demands)
    refused = [sum(rates) for rates in zip(*(each.refused_rps for each in demands), strict=False)]
    serving = [heartbeat for _, heartbeat in view.serving(model)]
    working = [_working(heartbeat) for heartbeat in serving]
    if any(heartbeat.healthy_slots and not count for heartbeat, count in zip(serving, working, strict=True)):
        return None
    works = _gpus(view, model, sum(working))
    slots = sum(heartbeat.healthy_slots for heartbeat in serving) or 1
    return ModelLoad(
        works=works,
        failing=_gpus(view, model, sum(heartbeat.failing for heartbeat in serving)),
        gpu_rps=view.capacity_rps(model) / works if works else 0.0,
        sync_rps=sync_rps,
        task_rps=sum(each.task_rps for each in demands),
        refused_rps=dict(zip(tiers, refused, strict=False)),
        busy_share=sum(each.current_utilization * each.healthy_slots for each in serving) / slots,
        fill=sum(each.fill * each.healthy_slots for each in serving) / slots,
        waiting=waiting,
        drain_s=drain_s,
        wait_s=sum(each.wait_s * each.sync_rps for each in demands) / sync_rps if sync_rps else 0.0,
        wait_max_s=wait_max_s,
    )


def waiting_by_model(view: FleetView, models: Sequence[str], unread: int) -> Mapping[str, int]:
    """What waits in Redis, by model: Redis counts by tier; batchers know of each model what they last saw of it."""
    seen = {model: max((each.waiting for _, each in view.serving(model)), default=0) for model in models}
    if len(models) == 1:
        return dict.fromkeys(models, max(unread, *seen.values()))
    if total := sum(seen.values()):
        return {model: max(round(unread * count / total), count) for model, count in seen.items()}
    # No batcher has seen any, as none asks for a model without GPUs: there is one at least.
    return {model: min(unread, 1) if not view.healthy_slots(model) else 0 for model in models}


def gateway_load(view: FleetView) -> ServerLoad:
    """What the gateways do."""
    gateways = view.live_gateways()
    rps = sum(each.heartbeat.rate for each in gateways)
    return ServerLoad(live=len(gateways), cores=_cores(gateways), rps=rps, rps_each=GATEWAY_RPS)


def batcher_load(view: FleetView, gpus_wanted: Mapping[str, int]) -> ServerLoad:
    """What the batchers do, and how many the GPUs need that are wanted: each has its own, or all call the same."""
    batchers = view.live_batchers()
    least = 1
    for model, wanted in gpus_wanted.items():
        owners = sum(bool(heartbeat.endpoints) for _, heartbeat in view.serving(model))
        named = _named(view, model)
        is_told = owners > 1 or all(machine for machine, _ in named)
        if named and is_told and len(set(named)) == len(named):  # rule 4
            least = max(least, -(-wanted * owners // len(named)))
    rps = sum(heartbeat.rate for each in batchers for heartbeat in each.heartbeat.models.values())
    return ServerLoad(live=len(batchers), least=least, cores=_cores(batchers), rps=rps, rps_each=BATCHER_RPS)


def _cores(members: Sequence[FleetMember]) -> float:
    """What they use together: those that do not tell, as they are too old or have just begun, are like the others."""
    told = [each.heartbeat.cores for each in members if each.heartbeat.cores]
    return sum(told) * len(members) / len(told) if told else 0.0


def _working(heartbeat: ModelHeartbeat) -> int:
    """How many endpoints get calls (rule 5)."""
    return heartbeat.works or sum(each.breaker == "closed" and each.state != OFFLINE for each in heartbeat.endpoints)


def _gpus(view: FleetView, model: str, count: int) -> int:
    """How many GPUs so many endpoints are, over all batchers (rule 3)."""
    named = _named(view, model)
    return round(count * len(set(named)) / len(named)) if named else count


def _named(view: FleetView, model: str) -> list[tuple[str, str]]:
    """The endpoints of all batchers."""
    return [_machine(member.name, each.endpoint) for member, beat in view.serving(model) for each in beat.endpoints]


def _machine(batcher: str, endpoint: str) -> tuple[str, str]:
    """What tells an endpoint from others: where it is, "" for one that any batcher could call, and its name."""
    if endpoint.startswith("sim:"):
        return batcher, endpoint
    is_local = not (host := urlsplit(endpoint).netloc) or host.startswith(LOOPBACK)
    return batcher.rsplit("-", 2)[0] if is_local else "", endpoint
