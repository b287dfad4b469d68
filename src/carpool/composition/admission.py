"""Admission: which requests come in, and how they get into the queue. The engine's first half; it has no socket."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from carpool.admission.gate import Gate
from carpool.admission.limits import LocalLimits
from carpool.admission.shedding import LoadShedder, pressure
from carpool.broker.coalescer import LOOKUPS, Coalescer
from carpool.broker.result_cache import ResultCache, digest_key, digest_key_of_owner, exact_key, exact_key_of_owner
from carpool.composition.credentials import make_credentials, watch_token_keys
from carpool.composition.runtime import Runtime
from carpool.core.defaults import one
from carpool.core.ports import (
    Availability,
    Caller,
    CountingQueue,
    FarResults,
    Peer,
    RateLimit,
    RateLimits,
    TaskBoard,
)
from carpool.core.request import Request
from carpool.core.snapshot import CacheNumbers
from carpool.face.intake import Intake, IntakeSettings, make_uuids
from carpool.service import ModelFace
from carpool.settings import Settings, configured_keys, total_timeout_s
from carpool.settings.schema import LimitSettings


class DrainedTasks(TaskBoard, Protocol):
    """The tasks of a gateway, which may be drained."""

    # By model: how many came so far.
    arrivals: Counter[str]

    def drain(self) -> None:
        """Answer all clients that wait, and let none wait any more."""


class Admission:
    """Credentials, limits, load shedding, the cache, coalescing, and the queue's way in."""

    def __init__(
        self,
        runtime: Runtime,
        queue: CountingQueue,
        tasks: DrainedTasks,
        availability: Mapping[str, Availability],
        models: Sequence[ModelFace],
        shedders: Mapping[str, LoadShedder],
        *,
        # Where several gateways share the limits of owners: these, and how many gateways there are.
        rates: RateLimits | None = None,
        sharers: Callable[[], int] = one,
        # Where results are kept that all gateways share.
        far: FarResults | None = None,
    ) -> None:
        settings = runtime.settings
        self._runtime = runtime
        self._queue = queue
        self.tasks = tasks
        self._availability = availability
        self.models = models
        self.shedders = shedders
        self.credentials = make_credentials(settings)
        if self.credentials is not None:
            watch_token_keys(runtime, self.credentials)
            runtime.reloads.append(self._prepare_reload)
        self.gate = Gate(
            queue,
            tasks,
            availability,
            lowest_tier=len(settings.tiers) - 1,
            trusted_proxies=settings.gateway.trusted_proxies,
            shedders=shedders,
            decides_early=not any(model.upstream.cache for model in runtime.models.values()),
            clock=runtime.clock,
            credentials=self.credentials,
            anonymous=anonymous_limit(settings.limits),
            rates=rates or LocalLimits(runtime.clock),
            sharers=sharers,
        )
        if settings.gateway.request_ids == "uuid":
            make_uuids()
        self.results = ResultCache(bytes_max=settings.cache.bytes_max, ttl_s=settings.cache.ttl_s)
        cached = {name for name, model in runtime.models.items() if model.upstream.cache}
        self.coalescer = self._make_coalescer(far) if cached else None
        self.intake = Intake(
            self.gate,
            self.coalescer or queue,
            tasks,
            {model.name: model.served(self.coalescer if model.name in cached else None) for model in models},
            intake_settings(runtime),
            clock=runtime.clock,
            identify=self._identify_known if runtime.known_callers else None,
        )

    def _identify_known(self, headers: dict[bytes, bytes], peer: Peer) -> Caller:
        known = self._runtime.known_callers.get(headers.get(b"authorization", b""))
        return known or self.gate.identify(headers, peer)

    def is_up(self, model: str) -> bool:
        """Whether requests for a model are taken, and an endpoint may answer them."""
        return not self._runtime.draining and not self.is_down(model)

    def is_down(self, model: str) -> bool:
        """Whether requests for a model are refused: not while a probe is wanted, as some clients ask this first."""
        upstream = self._availability[model]
        return upstream.is_down and not upstream.probes

    def close(self) -> None:
        """Admit nothing any more."""
        self.gate.closed = True

    def expire(self, now: float) -> None:
        """Look at the deadlines."""
        self._queue.expire(now)
        if self.coalescer is not None:
            self.coalescer.expire(now)

    def find_recent(self, request_id: str) -> Request | None:
        """A live or recent request of this gateway."""
        return self.intake.find_recent(request_id)

    def pressure(self, model: str) -> float:
        """How much comes in, as a share of what should."""
        shedder = self.shedders[model]
        return pressure(shedder.rates, shedder.capacity[-1])

    def held_with(self, held: int, held_bytes: int) -> tuple[int, int]:
        """Requests and bytes that this process has, where its broker has so many."""
        if self.coalescer is None:
            return held, held_bytes
        return held + self.coalescer.held - self.coalescer.queued, held_bytes + self.coalescer.held_bytes

    def describe_cache(self) -> CacheNumbers:
        """What `/metrics` shows of results that are kept."""
        return CacheNumbers(
            cache_lookups=dict.fromkeys(LOOKUPS, 0) if self.coalescer is None else dict(self.coalescer.lookups),
            cache_entries=len(self.results),
            cache_bytes=self.results.bytes,
        )

    def _prepare_reload(self, settings: Settings) -> Callable[[], None]:
        """Take the configured keys that there are then."""
        credentials, keys = self.credentials, configured_keys(settings)
        assert credentials is not None
        return lambda: credentials.change_configured_keys(keys)

    def _make_coalescer(self, far: FarResults | None) -> Coalescer:
        settings, broker = self._runtime.settings, self._runtime.settings.broker
        is_owned = settings.cache.scope == "owner"
        if far is None:
            key_of = exact_key_of_owner if is_owned else exact_key
        else:
            key_of = digest_key_of_owner if is_owned else digest_key
        return Coalescer(
            self.gate.admit,
            self.gate.admit_task,
            self._queue,
            self.results,
            key_of,
            seconds=self._runtime.seconds,
            waiting_max=broker.waiting_max,
            bytes_max=broker.bytes_max,
            far=far,
            strict_order=broker.order == "strict",
            quarantined=self._runtime.quarantined.riders,
            events=self._runtime.events,
            clock=self._runtime.clock,
        )


def anonymous_limit(limits: LimitSettings) -> RateLimit | None:
    """What callers without a credential may ask for; None: as much as they like."""
    if not limits.anonymous:
        return None
    return RateLimit(limits.anonymous, min(limits.burst, limits.anonymous), limits.concurrent)


def intake_settings(runtime: Runtime) -> IntakeSettings:
    """What the way in must know of the configuration."""
    settings = runtime.settings
    total_s = total_timeout_s(settings)
    return IntakeSettings(
        default_model=settings.model,
        tier_target_s=runtime.tier_target_s,
        queue_timeout_s=min(settings.broker.queue_timeout_s, total_s),
        total_timeout_s=total_s,
        task_timeout_s=settings.tasks.timeout_s,
    )
