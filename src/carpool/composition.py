"""What every role is made of: models with their loops, servers, timers, and how they are given up again."""

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from carpool.core.clock import Clock, monotonic
from carpool.core.events import Events
from carpool.core.ports import DeadLetterDesk
from carpool.core.timers import Every
from carpool.face.http.admin import AdminRoutes, FoundRequest
from carpool.face.http.admin_guard import AdminGuard
from carpool.face.http.gateway import HttpFaceSettings
from carpool.face.http.openapi import admin_openapi
from carpool.face.http.server import HttpServer
from carpool.face.http.state import HttpLimits
from carpool.face.intake import IntakeSettings
from carpool.service import ModelFace, ModelService
from carpool.settings import Model, Settings, admin_port, is_loopback, models_of
from carpool.telemetry.metrics import Exposition, Value
from carpool.upstream.client import make_session
from carpool.upstream.fleet import Endpoints
from carpool.upstream.offenders import Offenders

logger = logging.getLogger("carpool")

# How often deadlines are looked at, and how often rates are worked out.
EXPIRY_TICK_S = 0.01
RATE_TICK_S = 1.0
# Files that are not client connections: upstream connections, the journal, logs.
FILES_RESERVED = 256
FILES_WANTED = 65536

# Endpoints that one question for readiness tries at the same time.
TRIED_AT_ONCE = 16


class Process:
    """One process of Carpool. What it shows to operators is also telemetry.metrics.View."""

    def __init__(self, settings: Settings, listening: socket.socket | None = None, clock: Clock = monotonic) -> None:
        self.settings = settings
        self.named = models_of(settings)
        self.clock = clock
        # The socket that this process shares with others, if it does.
        self.listening = listening
        self.draining = False
        self.port = 0
        self.admin_port = 0
        self.services: list[ModelService] = []
        # None for a process that serves no clients.
        self.server: HttpServer | None = None
        self.session = make_session()
        # Owners whose inputs keep being refused.
        self.offenders = Offenders()
        # What happens to requests, for those who subscribe.
        self.events = Events()
        self._background: set[asyncio.Task[None]] = set()
        # How to give up what has been opened so far.
        self._opened = AsyncExitStack()
        self._opened.push_async_callback(self.session.close)

    async def start(self) -> None:
        """Plug the stages together, from the back to the front, and listen."""
        raise NotImplementedError

    async def drain(self) -> None:
        """Stop taking new work, finish the old, leave."""
        raise NotImplementedError

    def expire(self) -> None:
        """Look at the deadlines."""
        raise NotImplementedError

    def reload(self, load: Callable[[], Settings]) -> None:
        """Read the configuration again: endpoints, slots and upstream timeouts change now, the rest does not.

        All that may fail is done for every model first: a fault of one changes none.
        """
        if self.draining:
            return
        prepared: list[tuple[ModelService, Model, Endpoints]] = []
        try:
            settings = load()
            named = models_of(settings)
            for service in self.services:
                if service.name in named:
                    model = named[service.name]
                    prepared.append((service, model, service.prepare_change(model, self.session)))
        except Exception as fault:  # whatever it is, this process goes on
            for service, _, endpoints in prepared:
                service.fleet.give_up(endpoints)
            logger.error("the configuration was not changed: %s", " ".join(str(fault).split()))
            return
        changed = [service.change(model, endpoints) for service, model, endpoints in prepared]
        for section in changed_for_the_next_start(self.settings, settings):
            logger.warning("a change of %s takes effect at the next start", section)
        came, gone = sum(each[0] for each in changed), sum(each[1] for each in changed)
        logger.info("read the configuration again", extra={"fields": {"endpoints_added": came, "endpoints_gone": gone}})

    async def close(self) -> None:
        """Give up everything that was opened, in the reverse order."""
        await self._opened.aclose()

    # For those that start.

    def start_fleets(self) -> None:
        """Watch the endpoints of every model."""
        for service in self.services:
            self._opened.push_async_callback(service.fleet.close)
            service.fleet.start()

    def start_timers(self) -> None:
        """Look at deadlines and rates from now on."""
        self.do_every(EXPIRY_TICK_S, self.expire)
        self.do_every(RATE_TICK_S, self._measure)

    def do_every(self, seconds: float, work: Callable[[], None]) -> None:
        """Do something now and from now on, until this process gives up what it opened."""
        every = Every(seconds, work)
        self._opened.callback(every.stop)
        every.start_now()

    async def listen_for_clients(self, server: HttpServer) -> None:
        """Serve clients."""
        gateway = self.settings.gateway
        self.server = server
        self._opened.push_async_callback(self._close_server, server)
        self.port = await server.start(gateway.host, gateway.port, tls_context(self.settings), self.listening)

    async def listen_for_operators(self, dead_letters: DeadLetterDesk) -> None:
        """Serve the admin port."""
        gateway = self.settings.gateway
        routes = AdminRoutes(
            guard=AdminGuard(
                token=gateway.admin_token, hosts=gateway.admin_hosts, is_loopback=is_loopback(gateway.admin_host)
            ),
            health=self.health,
            ready=self.check_ready,
            fleet=self.fleet,
            metrics=Exposition(self),
            find_request=self.find_request,
            dead_letters=dead_letters,
            openapi=admin_openapi(),
        )
        admin = HttpServer(routes, HttpLimits(body_bytes_max=1024, connections_max=256), self.clock)
        self._opened.push_async_callback(self._close_server, admin)
        self.admin_port = await admin.start(gateway.admin_host, admin_port(gateway))

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Let something run beside."""
        # The event loop holds its tasks only weakly.
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def finish_batches(self) -> None:
        """Let the batches under way come to their end."""
        for service in self.services:
            await service.dispatcher.finish(service.timeout_s)

    async def stop_accepting(self) -> None:
        """Say that this process leaves, and a little later accept no more connections."""
        self.draining = True  # readiness turns false
        if self.server is not None:
            self.server.state.draining = True  # every answer says `Connection: close`
            await asyncio.sleep(self.settings.gateway.drain_grace_s)
            self.server.stop_listening()

    async def answer_the_rest(self) -> None:
        """Wait until what was received is answered."""
        if self.server is not None:
            patience_s = self.settings.gateway.receive_timeout_s + self.settings.broker.total_timeout_s
            await self.server.finish(self.clock() + patience_s)

    # What operators see; also telemetry.metrics.View

    def slots_total(self) -> int:
        """Slots of all models."""
        return sum(service.pool.total() for service in self.services)

    def utilization(self) -> float:
        """The share of all slots that was used lately."""
        busy = sum(service.utilization * service.pool.total() for service in self.services)
        return busy / max(1, self.slots_total())

    def health(self) -> dict[str, Any]:
        """The numbers of `/internal/health`."""
        raise NotImplementedError

    def fleet(self) -> dict[str, Any]:
        """What `/internal/fleet` shows."""
        return {"models": {service.name: service.describe() for service in self.services}}

    def check_ready(self, answer: Callable[[str | None], None]) -> None:
        """Ready when work can be done and this process does not drain; else the reason why not."""
        raise NotImplementedError

    def find_request(self, request_id: str, answer: FoundRequest) -> None:
        """Tell how a live or recent request is, or a task that is kept."""
        raise NotImplementedError

    def models(self) -> Sequence[ModelService]:
        """Every model."""
        return self.services

    def numbers(self) -> dict[str, Value]:
        """What `/metrics` shows of this process as a whole."""
        if self.server is None:
            return {}
        return {"carpool_problems": self.server.state.problems, "carpool_connections": len(self.server.connections)}

    async def try_endpoints(self, answer: Callable[[str | None], None]) -> None:
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

    async def _close_server(self, server: HttpServer) -> None:
        server.stop_listening()
        await server.finish(0.0)

    def _measure(self) -> None:
        for service in self.services:
            service.measure(RATE_TICK_S)
        waiting = self.services[0].owners_apart() if self.services and self.offenders else frozenset()
        self.offenders.look(self.clock(), waiting)


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


def intake_settings(settings: Settings, targets: tuple[float, ...]) -> IntakeSettings:
    """What the way in must know of the configuration."""
    broker = settings.broker
    return IntakeSettings(
        default_model=settings.model,
        tier_target_s=targets,
        queue_timeout_s=min(broker.queue_timeout_s, broker.total_timeout_s),
        total_timeout_s=broker.total_timeout_s,
        task_timeout_s=settings.tasks.timeout_s,
    )


def face_settings(settings: Settings) -> HttpFaceSettings:
    """What the HTTP face must know of the configuration."""
    tasks = settings.tasks
    return HttpFaceSettings(settings.gateway.default_mode, tasks.wait_ms_max, tasks.forget_after_read)


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
