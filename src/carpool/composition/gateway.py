"""The gateway half: it takes requests from clients and gives them their answers."""

import asyncio
import logging
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from carpool.admission.cache import ResultCache, digest_key, digest_key_of_owner, exact_key, exact_key_of_owner
from carpool.admission.gate import Gate
from carpool.admission.limits import LocalLimits
from carpool.admission.shedding import LoadShedder, pressure
from carpool.broker.coalescer import LOOKUPS, Coalescer
from carpool.composition.credentials import configured_keys, make_credentials, warn_if_open, watch_token_keys
from carpool.composition.runtime import Runtime
from carpool.composition.webhooks import callback_check
from carpool.core.histograms import Histogram
from carpool.core.ports import Availability, FarResults, QueueStats, RateLimit, RateLimits, RequestQueue, TaskBoard
from carpool.core.request import Request
from carpool.core.snapshot import CacheNumbers, SheddingNumbers
from carpool.face.http.cors import Cors
from carpool.face.http.faces import INFER, has_face
from carpool.face.http.gateway import GatewayRoutes, HttpFaceSettings
from carpool.face.http.kserve_v2 import KServeV2Routes
from carpool.face.http.list_routes import add_list_faces
from carpool.face.http.lists import Answers
from carpool.face.http.openapi import gateway_openapi
from carpool.face.http.places import Places
from carpool.face.http.sampling import SAMPLE_S, Sampler
from carpool.face.http.server import HttpServer
from carpool.face.http.state import HttpLimits
from carpool.face.http.stream import StreamLimits
from carpool.face.http.streams import PATH as STREAM
from carpool.face.http.streams import WebSocketStreams
from carpool.face.http.task_events import TaskEvents
from carpool.face.http.tickets import Tickets
from carpool.face.intake import Intake, IntakeSettings, make_uuids
from carpool.service import ModelFace
from carpool.settings import Settings, grpc_port, total_timeout_s
from carpool.settings.schema import LimitSettings

if TYPE_CHECKING:
    from carpool.face.grpc.health import CheckReady
    from carpool.face.grpc.server import GrpcServer

logger = logging.getLogger("carpool")

# Files that are not client connections: upstream connections, the journal, logs, and those by which newcomers come in.
FILES_RESERVED = 256
ACCEPTED_A_TURN = 32
FILES_WANTED = 65536


class DrainedTasks(TaskBoard, Protocol):
    """Tasks of a gateway that leaves one day."""

    def drain(self) -> None:
        """Keep nobody waiting any more."""
        ...


class ExpiringQueue(RequestQueue, Protocol):
    """The way to those who do the work."""

    @property
    def outcomes(self) -> Counter[str]:
        """What became of requests, by code."""
        ...

    @property
    def waited(self) -> Histogram:
        """How long requests waited for a slot."""
        ...

    def expire(self, now: float) -> None:
        """Look at the deadlines."""
        ...

    def queue_stats(self, model: str, tier: int) -> QueueStats:
        """Who has synchronous requests of a model and a tier in it."""
        ...


class Server(Protocol):
    """One way for clients to come in."""

    def drain(self) -> None:
        """Say with every answer that this process leaves."""
        ...

    def stop_listening(self) -> None:
        """Accept no new connection; those there are go on."""
        ...

    async def finish(self, deadline: float) -> None:
        """Close idle connections at once and the others as their last answer leaves; past `deadline` all of them."""
        ...


class GatewayHalf:
    """Servers for clients, admission, and the way into a broker."""

    def __init__(
        self,
        runtime: Runtime,
        queue: ExpiringQueue,
        tasks: DrainedTasks,
        availability: Mapping[str, Availability],
        models: Sequence[ModelFace],
        shedders: Mapping[str, LoadShedder],
        *,
        # Where several gateways share the limits of owners: these, and how many gateways there are.
        rates: RateLimits | None = None,
        sharers: Callable[[], int] = lambda: 1,
        # Where results are kept that all gateways share.
        far: FarResults | None = None,
    ) -> None:
        settings = runtime.settings
        self._runtime = runtime
        self._queue = queue
        self._tasks = tasks
        self._availability = availability
        self.shedders = shedders
        self.credentials = make_credentials(settings)
        if self.credentials is not None:
            watch_token_keys(runtime, self.credentials)
        self._tls = tls_context(settings)
        runtime.reloads.append(self._prepare_reload)
        self.gate = Gate(
            queue,
            tasks,
            availability,
            lowest_tier=len(settings.tiers) - 1,
            trusted_proxies=settings.gateway.trusted_proxies,
            shedders=shedders,
            decides_early=not any(model.is_cached for model in runtime.models.values()),
            clock=runtime.clock,
            credentials=self.credentials,
            anonymous=anonymous_limit(settings.limits),
            rates=rates or LocalLimits(runtime.clock),
            sharers=sharers,
        )
        if settings.gateway.request_ids == "uuid":
            make_uuids()
        self.results = ResultCache(bytes_max=settings.cache.bytes_max, ttl_s=settings.cache.ttl_s)
        cached = {name for name, model in runtime.models.items() if model.is_cached}
        self.coalescer = self._make_coalescer(far) if cached else None
        self.intake = Intake(
            self.gate,
            self.coalescer or queue,
            tasks,
            {model.name: model.served(self.coalescer if model.name in cached else None) for model in models},
            intake_settings(runtime),
            clock=runtime.clock,
        )
        routes = GatewayRoutes(
            self.intake,
            face_settings(settings),
            gateway_openapi(
                list(runtime.models),
                settings.model,
                settings.tasks.wait_ms_max,
                [model.name for model in self.intake.models() if has_face(model, INFER)],
                takes_callbacks=bool(settings.webhooks.hosts),
                names_models=settings.auth.mode == "off",
            ),
            runtime.tracer,
            callback_check(settings.webhooks),
        )
        answers = self._answers = Answers(settings.gateway.unread_bytes_max, self.intake.turns)
        add_list_faces(
            routes.router,
            self.intake,
            answers,
            self._is_down,
            runtime.tracer,
        )
        v2 = KServeV2Routes(self.intake, is_up=self._is_up, answers=answers, traces=runtime.tracer)
        v2.add_to(routes.router)
        cors = Cors(settings.gateway.cors_origins, routes.router.serve)
        serve = cors if settings.gateway.cors_origins else routes.router.serve
        self.http = HttpServer(serve, http_limits(settings, models), runtime.clock)
        self.http.state.traces, self.http.state.turns = runtime.tracer, self.intake.long_turns
        if settings.gateway.cors_origins:
            self.http.state.extra_lines = cors.lines
        self.streams, self.events = self._make_streams(cors)
        self.http.state.upgrades[STREAM, b"websocket"] = self.streams.open
        routes.router.add(b"GET", STREAM, self.streams.no_upgrade)
        routes.router.add(b"POST", STREAM + b"/tickets", self.streams.ticket)
        routes.router.add(b"GET", b"/v1/result/*/events", self.events.listen)
        self.servers: list[Server] = [self.http]
        # None where there is no gRPC.
        self.grpc: GrpcServer | None = None
        self.port = 0

    def _is_up(self, model: str) -> bool:
        """Whether requests for a model are taken, and somebody answers them."""
        return not self._runtime.draining and not self._is_down(model)

    def _is_down(self, model: str) -> bool:
        """Whether requests for a model are refused: not while one is wanted, for some clients ask first."""
        upstream = self._availability[model]
        return upstream.is_down and not upstream.probes

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
            outcomes=self._queue.outcomes,
            waited=self._queue.waited,
            seconds=self._runtime.seconds,
            waiting_max=broker.waiting_max,
            bytes_max=broker.bytes_max,
            far=far,
            strict_order=broker.order == "strict",
            quarantined=self._runtime.quarantined.riders,
            queue_stats=self._queue.queue_stats,
            events=self._runtime.events,
            clock=self._runtime.clock,
        )

    def _make_streams(self, cors: Cors) -> tuple[WebSocketStreams, TaskEvents]:
        runtime, settings = self._runtime, self._runtime.settings.stream
        streams = WebSocketStreams(
            self.intake,
            self.http.state,
            Tickets(runtime.settings.service.token),
            Places("streams", settings.streams_max, settings.per_owner_max),
            StreamLimits(settings.requests_max, settings.message_bytes_max, settings.idle_timeout_s),
            allows=cors.allows,
            traces=runtime.tracer,
            clock=runtime.clock,
        )
        places = Places("event streams", settings.listeners_max, settings.per_owner_max)
        return streams, TaskEvents(self.intake, places, forget_after_read=runtime.settings.tasks.forget_after_read)

    async def start(self, listening: socket.socket | None, check_ready: "CheckReady") -> None:
        """Serve clients, on a socket that other processes share if one is given."""
        gateway = self._runtime.settings.gateway
        if (own_port := grpc_port(gateway)) is not None:
            await self._start_grpc(own_port, check_ready)
        for server in self.servers:
            self._runtime.opened.push_async_callback(close_server, server)
        self._runtime.do_every(SAMPLE_S, Sampler(self.http.state, self._runtime.seconds).take)
        self.port = await self.http.start(gateway.host, gateway.port, self._tls, listening)
        warn_if_open(self._runtime.settings)

    async def _start_grpc(self, port: int, check_ready: "CheckReady") -> None:
        from carpool.composition.grpc_face import make_grpc_server, pems_of  # here: nobody else waits for grpcio

        settings = self._runtime.settings
        gateway = settings.gateway
        self.grpc = make_grpc_server(
            self._runtime, self.intake, self.http.state, check_ready, self._is_up, self._answers
        )
        self.servers.append(self.grpc)
        await self.grpc.start(gateway.host, port, pems_of(settings), is_shared=gateway.processes > 1)
        logger.info("gRPC on %s:%d", gateway.host, self.grpc.port)

    def _prepare_reload(self, settings: Settings) -> Callable[[], None]:
        """Let new connections get the certificate that there is now, and take the configured keys; raises OSError."""
        tls, credentials, grpc = tls_context(settings), self.credentials, self.grpc
        pems = None
        if grpc is not None:
            from carpool.composition.grpc_face import pems_of

            pems = pems_of(settings)

        def change() -> None:
            if tls is not None:
                self.http.change_certificate(tls)
            if grpc is not None and pems is not None:
                grpc.change_certificate(pems)
            if credentials is not None:
                credentials.change_configured_keys(configured_keys(settings))

        return change

    async def stop_accepting(self) -> None:
        """Say that this process leaves, and a little later accept no more connections; tasks keep nobody waiting."""
        for server in self.servers:
            server.drain()
        await asyncio.sleep(self._runtime.settings.gateway.drain_grace_s)
        for server in self.servers:
            server.stop_listening()
        self.streams.drain()
        self.events.drain()
        self._tasks.drain()

    async def drain(self) -> None:
        """Answer what was received; after that nothing is admitted."""
        settings = self._runtime.settings
        give_up_at = self._runtime.clock() + settings.gateway.receive_timeout_s + total_timeout_s(settings)
        await asyncio.gather(*(server.finish(give_up_at) for server in self.servers))
        self.gate.closed = True

    def expire(self, now: float) -> None:
        """Look at the deadlines."""
        self._queue.expire(now)
        if self.coalescer is not None:
            self.coalescer.expire(now)

    def find_recent(self, request_id: str) -> Request | None:
        """A live or recent request of this gateway, or a slow one that somebody was shown."""
        return self.intake.find_recent(request_id) or self._runtime.find_slow(request_id)

    def describe(self, held: int, held_bytes: int) -> SheddingNumbers:
        """What `/metrics` shows of it; the broker knows what is held."""
        if self.coalescer is not None:
            held, held_bytes = (
                held + self.coalescer.held - self.coalescer.queued,
                held_bytes + self.coalescer.held_bytes,
            )
        return SheddingNumbers(
            problems=self.http.state.problems,
            connections=self.http.connected(),
            streams=len(self.streams),
            event_listeners=len(self.events),
            grpc_calls=0 if self.grpc is None else self.grpc.calls,
            held_requests=held,
            held_bytes=held_bytes,
            pressure={model: self.pressure(model) for model in self.shedders},
            shed={
                (model, tier.name): count
                for model, shedder in self.shedders.items()
                for tier, count in zip(self._runtime.settings.tiers, shedder.shed, strict=True)
            },
            wait_error_seconds={
                (model, direction): seconds
                for model, shedder in self.shedders.items()
                for direction, seconds in shedder.wait_errors.items()
            },
            utilization_target=self._runtime.settings.shedding.utilization_target,
        )

    def pressure(self, model: str) -> float:
        """How much comes in, as a share of what should."""
        shedder, target = self.shedders[model], self._runtime.settings.shedding.utilization_target
        return pressure(shedder.rates, shedder.capacity[-1], target)

    def describe_cache(self) -> CacheNumbers:
        """What `/metrics` shows of results that are kept."""
        return CacheNumbers(
            cache_lookups=dict.fromkeys(LOOKUPS, 0) if self.coalescer is None else self.coalescer.lookups(),
            cache_entries=len(self.results),
            cache_bytes=self.results.bytes,
        )


async def close_server(server: Server) -> None:
    """Close whatever is open, now."""
    server.stop_listening()
    await server.finish(0.0)


def anonymous_limit(limits: LimitSettings) -> RateLimit | None:
    """What those without a credential may ask for; None: as much as they like."""
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


def face_settings(settings: Settings) -> HttpFaceSettings:
    """What the HTTP face must know of the configuration."""
    tasks = settings.tasks
    return HttpFaceSettings(tasks.wait_ms_max, tasks.forget_after_read)


def http_limits(settings: Settings, models: Sequence[ModelFace]) -> HttpLimits:
    """What is taken from a client. The body may be as long as the most generous model allows."""
    gateway = settings.gateway
    files = raise_file_limit()
    return HttpLimits(
        header_bytes_max=gateway.header_bytes_max,
        header_count_max=gateway.header_count_max,
        body_bytes_max=max(model.body_bytes_max for model in models),
        receiving_bytes_max=gateway.receiving_bytes_max,
        unread_bytes_max=gateway.unread_bytes_max,
        receive_timeout_s=gateway.receive_timeout_s,
        idle_timeout_s=gateway.idle_timeout_s,
        write_timeout_s=gateway.write_timeout_s,
        pipeline_max=gateway.pipeline_max,
        connections_max=gateway.connections_max or files - min(FILES_RESERVED, files // 2),
        accepted_a_turn=ACCEPTED_A_TURN,
    )


def raise_file_limit() -> int:
    """Allow this process as many open files as the system lets it; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (max(hard, FILES_WANTED), hard):  # only root may go past the hard limit
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
        except (OSError, ValueError):
            continue
        return wanted
    return soft


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """The server's TLS, if configured."""
    gateway = settings.gateway
    if not gateway.tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(gateway.tls_cert, gateway.tls_key)
    context.set_alpn_protocols(["http/1.1"])
    return context
