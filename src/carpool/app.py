"""The composition root: the one module that knows every stage. Start and drain are read here, top to bottom."""

import asyncio
import gc
import logging
import os
import resource
import signal
import ssl
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from carpool.admission.gate import Gate
from carpool.broker.dead_letters import DeadLetterBox, DeadLetterDesk
from carpool.broker.journal import Journal
from carpool.broker.journal_records import JournalLocked, JournalUnusable
from carpool.broker.memory import MemoryBroker
from carpool.broker.tasks import Tasks
from carpool.core.clock import monotonic
from carpool.core.request import Request
from carpool.core.tally import Histogram
from carpool.face.http.admin import AdminRoutes
from carpool.face.http.gateway import FaceSettings, GatewayRoutes
from carpool.face.http.openapi import admin_openapi, gateway_openapi
from carpool.face.http.server import HttpLimits, HttpServer
from carpool.service import ModelService, named_models
from carpool.settings import Settings
from carpool.telemetry.logs import configure_logging
from carpool.telemetry.metrics import Exposition
from carpool.upstream.client import make_session

logger = logging.getLogger("carpool")

# How often deadlines are looked at, and how often rates are worked out.
EXPIRY_TICK_S = 0.01
RATE_TICK_S = 1.0
# Files that are not client connections: upstream connections, the journal, logs.
FILES_RESERVED = 256
FILES_WANTED = 65536

# Endpoints that one question for readiness tries at the same time.
TRIED_AT_ONCE = 16

OnReady = Callable[[int, int], None]


class Gateway:
    """Everything in one process: face, admission, embedded broker, batching, upstream."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.draining = False
        self.port = 0
        self.admin_port = 0
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._background: set[asyncio.Task[None]] = set()
        # How to give up what has been opened so far.
        self._opened = AsyncExitStack()

    async def start(self) -> None:
        """Plug the stages together, from the back to the front, and listen."""
        settings = self.settings
        gateway = settings.gateway
        loop = asyncio.get_running_loop()
        self.session = make_session()
        self._opened.push_async_callback(self.session.close)
        self.journal = Journal.open(
            Path(settings.tasks.data_dir) / "journal.db" if settings.tasks.journal else None,
            loop,
            result_ttl_s=settings.tasks.result_ttl_s,
            dead_letter_ttl_s=settings.tasks.dead_letter_ttl_s,
            stored_bytes_max=settings.tasks.stored_bytes_max,
        )
        self._opened.push_async_callback(self.journal.close)
        self.broker = MemoryBroker(
            waiting_max=settings.broker.waiting_max,
            bytes_max=settings.broker.bytes_max,
            lanes_max=settings.broker.lanes_max,
            tiers=len(settings.tiers),
            strict_order=settings.broker.order == "strict",
            task_patience_s=settings.tasks.patience_ms / 1000,
        )
        named = named_models(settings)
        dead_letters = DeadLetterBox(self.journal)
        self.services = [
            ModelService(name, own, settings, self.session, self.broker, dead_letters) for name, own in named.items()
        ]
        for service in self.services:
            self._opened.push_async_callback(service.fleet.close)
            service.fleet.start()
        self.tasks = Tasks(self.broker, self.journal, prepare=self._prepare, waiting_max=settings.tasks.waiting_max)
        self.gate = Gate(
            self.broker,
            self.tasks,
            {service.name: service.pool for service in self.services},
            lowest_tier=len(settings.tiers) - 1,
        )
        targets = tuple(tier.target_ms / 1000 for tier in settings.tiers)
        restored = self.tasks.restore(frozenset(named), lambda tier, now: now + targets[min(tier, len(targets) - 1)])
        self.routes = GatewayRoutes(
            self.gate,
            self.broker,
            self.tasks,
            {service.name: service.served() for service in self.services},
            face_settings(settings, targets),
            gateway_openapi(list(named), settings.model, settings.tasks.wait_ms_max),
        )
        self.server = HttpServer(self.routes.router, http_limits(settings, self.services))
        self.admin = HttpServer(
            AdminRoutes(
                token=gateway.admin_token,
                health=self.health,
                ready=self.check_ready,
                fleet=self.fleet,
                metrics=Exposition(self),
                find_request=self.find_request,
                dead_letters=DeadLetterDesk(
                    self.journal,
                    self.tasks,
                    frozenset(named),
                    tier_target_s=targets,
                    task_timeout_s=settings.tasks.timeout_s,
                ),
                openapi=admin_openapi(),
            ),
            HttpLimits(body_bytes_max=1024, connections_max=256),
        )
        self._opened.callback(self._stop_timers)
        self._expire()
        self._measure()
        self._opened.push_async_callback(self._close_server, self.server)
        self._opened.push_async_callback(self._close_server, self.admin)
        self.port = await self.server.start(gateway.host, gateway.port, tls_context(settings))
        wanted = gateway.admin_port if gateway.admin_port is not None else (gateway.port + 1 if gateway.port else 0)
        self.admin_port = await self.admin.start(gateway.admin_host, wanted)
        for service in self.services:
            self._in_background(service.ask_limits())
        if not settings.tasks.journal:
            logger.warning("the journal is off: tasks are kept in memory only and do not survive this process")
        logger.info(
            "serving on %s:%d, admin on %s:%d",
            gateway.host,
            self.port,
            gateway.admin_host,
            self.admin_port,
            extra={"fields": {"models": list(named), "slots": self.slots_total(), "restored_tasks": restored}},
        )

    async def drain(self) -> None:
        """Stop taking new work, finish the old, leave. Every step may rely on those before it."""
        settings = self.settings
        logger.info("draining")
        self.draining = True  # readiness turns false
        self.server.draining = True  # every answer says `Connection: close`
        await asyncio.sleep(settings.gateway.drain_grace_s)
        self.server.stop_listening()
        self.tasks.drain()  # waiting tasks stay in the journal
        for service in self.services:
            service.loop.drain()  # company will not come
        patience_s = settings.gateway.receive_timeout_s + settings.broker.total_timeout_s
        await self.server.finish(monotonic() + patience_s)  # what was received is answered
        self.gate.closed = True
        for service in self.services:
            await service.dispatcher.finish(service.timeout_s)  # running batches, of tasks, finish
        await self.close()
        logger.info("drained")

    def reload(self, load: Callable[[], Settings]) -> None:
        """Read the configuration again: endpoints, slots and upstream timeouts change now, the rest does not."""
        if self.draining:
            return
        came = gone = 0
        try:
            settings = load()
            named = named_models(settings)
            for service in self.services:
                if service.name in named:
                    more, fewer = service.change(named[service.name], settings, self.session)
                    came, gone = came + more, gone + fewer
        except Exception as fault:  # whatever it is, this process goes on
            logger.error("the configuration was not changed: %s", " ".join(str(fault).split()))
            return
        for section in changed_for_the_next_start(self.settings, settings):
            logger.warning("a change of %s takes effect at the next start", section)
        logger.info("read the configuration again", extra={"fields": {"endpoints_added": came, "endpoints_gone": gone}})

    async def close(self) -> None:
        """Give up everything that was opened, in the reverse order."""
        await self._opened.aclose()

    def _prepare(self, request: Request) -> None:
        for service in self.services:
            if service.name == request.model:
                service.prepare(request)

    def _stop_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    async def _close_server(self, server: HttpServer) -> None:
        server.stop_listening()
        await server.finish(0.0)

    # What operators see; also telemetry.metrics.View

    def slots_total(self) -> int:
        """Slots of all models."""
        return sum(service.pool.total() for service in self.services)

    def health(self) -> dict[str, Any]:
        """The numbers of `/internal/health`."""
        slots = self.slots_total()
        busy = sum(service.utilization * service.pool.total() for service in self.services)
        return {
            "status": "draining" if self.draining else "ok",
            "gpu_utilization": round(busy / slots, 4),
            "queue_depth": self.broker.depth,
            "requests_per_second": round(sum(service.rate for service in self.services), 2),
        }

    def fleet(self) -> dict[str, Any]:
        """What `/internal/fleet` shows."""
        return {"models": {service.name: service.describe() for service in self.services}}

    def check_ready(self, answer: Callable[[str | None], None]) -> None:
        """Ready when an endpoint accepts a connection and this process does not drain; else the reason why not."""
        if self.draining:
            answer("draining")
            return
        self._in_background(self._try_endpoints(answer))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        # The event loop holds its tasks only weakly.
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def find_request(self, request_id: str) -> Request | None:
        """A live or recent request."""
        recent = self.routes.find_recent(request_id)
        if recent is not None:
            return recent
        return next((r for r in self.broker.waiting_requests() if r.id == request_id), None)

    def models(self) -> Sequence[ModelService]:
        """Every model."""
        return self.services

    def outcomes(self) -> Mapping[str, int]:
        """Requests that got an outcome, by code."""
        return self.broker.outcomes

    def problems(self) -> Mapping[str, int]:
        """Answers to clients that were errors, by code."""
        return self.server.problems

    def buried(self) -> Mapping[str, int]:
        """Requests that became dead letters, by cause."""
        return self.journal.buried

    def queue_wait_seconds(self) -> Histogram:
        """Seconds that requests waited for a slot."""
        return self.broker.waited

    def gauges(self) -> Mapping[str, tuple[str, float]]:
        """Further values of the moment."""
        journal = self.journal
        return {
            "carpool_connections": ("Open client connections.", len(self.server.connections)),
            "carpool_held_requests": ("Requests admitted and without an outcome.", self.broker.held),
            "carpool_held_bytes": ("Bytes of their inputs.", self.broker.held_bytes),
            "carpool_tasks_pending": ("Tasks without an outcome.", journal.tasks_pending),
            "carpool_results_stored": ("Results of tasks that are kept.", journal.results),
            "carpool_dead_letters": ("Dead letters that are kept.", journal.dead_letters),
            "carpool_dead_letter_bytes": ("Bytes of their inputs.", journal.dead_letter_bytes),
            "carpool_journal_bytes": ("Bytes of inputs and results in the journal.", journal.stored_bytes),
        }

    async def _try_endpoints(self, answer: Callable[[str | None], None]) -> None:
        """Try some endpoints at a time, until one accepts a connection."""
        endpoints = [endpoint for service in self.services for endpoint in service.pool.endpoints]
        reason: str | None = "no endpoint accepts a connection"
        try:
            for first in range(0, len(endpoints), TRIED_AT_ONCE):
                tried = endpoints[first : first + TRIED_AT_ONCE]
                if any(await asyncio.gather(*(endpoint.accepts_connections() for endpoint in tried))):
                    reason = None
                    return
        finally:
            answer(reason)

    def _expire(self) -> None:
        self._timers["expire"] = asyncio.get_running_loop().call_later(EXPIRY_TICK_S, self._expire)
        self.broker.expire(monotonic())

    def _measure(self) -> None:
        self._timers["measure"] = asyncio.get_running_loop().call_later(RATE_TICK_S, self._measure)
        for service in self.services:
            service.measure(RATE_TICK_S)


def changed_for_the_next_start(old: Settings, new: Settings) -> list[str]:
    """The sections with a change that a running gateway does not make."""

    def fixed(settings: Settings) -> Settings:
        replace = msgspec.structs.replace
        upstream = replace(settings.upstream, endpoints=[], slots=1, timeout_s=1.0)
        models = {
            name: replace(own, endpoints=None, slots=None, timeout_s=None) for name, own in settings.models.items()
        }
        return replace(settings, upstream=upstream, models=models)

    before, after = fixed(old), fixed(new)
    return [name for name in Settings.__struct_fields__ if getattr(before, name) != getattr(after, name)]


def face_settings(settings: Settings, targets: tuple[float, ...]) -> FaceSettings:
    """What the face must know of the configuration."""
    broker, tasks = settings.broker, settings.tasks
    return FaceSettings(
        default_model=settings.model,
        default_mode=settings.gateway.default_mode,
        tier_target_s=targets,
        queue_timeout_s=min(broker.queue_timeout_s, broker.total_timeout_s),
        total_timeout_s=broker.total_timeout_s,
        task_timeout_s=tasks.timeout_s,
        wait_ms_max=tasks.wait_ms_max,
        forget_after_read=tasks.forget_after_read,
    )


def http_limits(settings: Settings, services: Sequence[ModelService]) -> HttpLimits:
    """What is taken from a client. The body may be as long as the most generous model allows."""
    gateway = settings.gateway
    return HttpLimits(
        header_bytes_max=gateway.header_bytes_max,
        header_count_max=gateway.header_count_max,
        body_bytes_max=max(service.body_bytes_max for service in services),
        receiving_bytes_max=gateway.receiving_bytes_max,
        unread_bytes_max=gateway.unread_bytes_max,
        receive_timeout_s=gateway.receive_timeout_s,
        idle_timeout_s=gateway.idle_timeout_s,
        write_timeout_s=gateway.write_timeout_s,
        pipeline_max=gateway.pipeline_max,
        connections_max=gateway.connections_max or raise_file_limit() - FILES_RESERVED,
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


def run(settings: Settings, on_ready: OnReady | None = None, reload: Callable[[], Settings] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, then drain; returns the exit code. SIGHUP calls `reload` for new settings."""
    configure_logging(settings.log.level, settings.log.format)
    try:
        return uvloop.run(_serve(settings, on_ready, reload))
    except (JournalLocked, JournalUnusable, ssl.SSLError) as failure:
        print(f"carpool: {failure}", file=sys.stderr)  # noqa: T201 - for the person at the terminal
    except OSError as failure:
        where = f"{settings.gateway.host}:{settings.gateway.port}"
        print(f"carpool: cannot serve on {where} (or its admin port): {failure.strerror or failure}", file=sys.stderr)  # noqa: T201
    return 2


def spare_the_collector() -> None:
    """Let the garbage collector run rarely.

    Requests make no reference cycles, so it finds next to nothing; with tens of thousands of them waiting its passes
    would cost milliseconds each. What was built at start never dies: it need not be looked at again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


async def _serve(settings: Settings, on_ready: OnReady | None, reload: Callable[[], Settings] | None) -> int:
    told_to_leave = asyncio.Event()

    def leave() -> None:
        if told_to_leave.is_set():
            os._exit(1)  # told twice: at once; the journal survives that
        told_to_leave.set()

    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, leave)
    gateway = Gateway(settings)
    try:
        await gateway.start()
    except BaseException:
        await gateway.close()
        raise
    if reload is not None:
        loop.add_signal_handler(signal.SIGHUP, gateway.reload, reload)
    spare_the_collector()
    if on_ready is not None:
        on_ready(gateway.port, gateway.admin_port)
    await told_to_leave.wait()
    await gateway.drain()
    return 0
