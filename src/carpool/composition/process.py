"""A process of Carpool, whatever its role: it starts, serves operators, reads its configuration again, and drains."""

import logging
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, NamedTuple, Protocol

import msgspec

from carpool.composition.faces import close_server
from carpool.composition.live import Watch, lanes_of
from carpool.composition.runtime import Runtime
from carpool.composition.serving import Serving
from carpool.composition.tracking import look_up_ended, start_tracking
from carpool.core.clock import Clock, monotonic
from carpool.core.defaults import do_nothing
from carpool.core.events import Events
from carpool.core.live import LaneWaiting
from carpool.core.names import Role
from carpool.core.ports import Caller, DeadLetterDesk
from carpool.core.snapshot import Snapshot
from carpool.core.webhook import Outbox
from carpool.face.http.admin import AdminRoutes, FoundRequest
from carpool.face.http.admin_guard import AdminGuard
from carpool.face.http.openapi import admin_openapi
from carpool.face.http.server import HttpServer
from carpool.face.http.state import HttpLimits
from carpool.service import ModelService
from carpool.settings import Model, Settings, admin_port, is_loopback, models_of, total_timeout_s
from carpool.telemetry.metrics import Exposition
from carpool.tracking.recorder import Recorder
from carpool.upstream.fleet import Endpoints

logger = logging.getLogger("carpool")


class Part(NamedTuple):
    """A part of a process: what starts it, and what ends its work."""

    start: Callable[[], Awaitable[None] | None]
    drain: Callable[[], Awaitable[None] | None] = do_nothing


class Panel(Protocol):
    """What the demo adds to a process: controls on the live page, and the load that they steer."""

    # The callers that send that load, by their `Authorization` header.
    callers: Mapping[bytes, Caller]

    def state(self) -> dict[str, object]:
        """What the page shows of it."""

    def plug(self, process: "Process") -> None:
        """The process serves."""


class Process(ABC):
    """What a command starts. Each role has its own; all have models, if only none, and an admin port."""

    role: ClassVar[Role] = "serve"

    def __init__(
        self,
        settings: Settings,
        listening: socket.socket | None = None,
        clock: Clock = monotonic,
        panel: Panel | None = None,
    ) -> None:
        self.runtime = Runtime(settings, clock, known_callers={} if panel is None else panel.callers)
        # The socket that this process shares with others, if it does.
        self.listening = listening
        # 0 where no clients are served.
        self.port = 0
        self.admin_port = 0
        self.serving: Serving
        self._parts: Sequence[Part] = ()
        # None: nothing is kept of what became of requests.
        self.tracking: Recorder | None = None
        self.watch = Watch(self.runtime, self.snapshot, self.lanes, self.role, None if panel is None else panel.state)
        self.admin: AdminRoutes

    @property
    def events(self) -> Events:
        """What happens to requests, for subscribers that come before the start."""
        return self.runtime.events

    async def start(self) -> None:
        """Start the parts, from the back to the front: the last ones let clients and operators in."""
        self.tracking = await start_tracking(self.runtime)  # it subscribes before there are requests
        self._parts = await self.plug()
        for part in self._parts:
            if (starting := part.start()) is not None:
                await starting

    async def drain(self) -> None:
        """Stop taking new work, finish the old, leave: the front first, so that each part may rely on those behind."""
        logger.info("draining")
        self.runtime.draining = True  # readiness turns false
        for part in reversed(self._parts):
            if (draining := part.drain()) is not None:
                await draining
        await self.close()
        logger.info("drained")

    @abstractmethod
    async def plug(self) -> Sequence[Part]:
        """Make the parts of this role, in the order in which they start. They drain in the reverse order."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """What operators see."""

    @abstractmethod
    def check_ready(self, answer: Callable[[str | None], None]) -> None:
        """Ready when work can be done and this process does not drain; else the reason why not."""

    @abstractmethod
    def find_request(self, request_id: str, answer: FoundRequest) -> None:
        """Tell how a live or recent request is, or a task that is kept."""

    def find_anywhere(self, request_id: str, answer: FoundRequest) -> None:
        """Tell how a request is, from memory, else from tracking."""
        tracking = self.tracking
        if tracking is None:
            self.find_request(request_id, answer)
        else:
            look_up = partial(look_up_ended, tracking.store, request_id)
            self.find_request(request_id, lambda found: self.runtime.in_background(look_up(found, answer)))

    def lanes(self) -> list[LaneWaiting]:
        """The lanes in which requests wait in this process, for the live page."""
        return lanes_of(self.serving.broker, [service.name for service in self.serving.services])

    async def close(self) -> None:
        """Give up everything that was opened."""
        await self.runtime.close()

    async def listen_for_operators(self, dead_letters: DeadLetterDesk, webhooks: Outbox) -> None:
        """Serve the admin port."""
        gateway, service = self.runtime.settings.gateway, self.runtime.settings.service
        self.admin = AdminRoutes(
            guard=AdminGuard(
                tokens=service.token,
                hosts=gateway.admin_hosts,
                is_loopback=is_loopback(gateway.admin_host),
                wall=time.time,
                clock=self.runtime.clock,
            ),
            snapshot=self.snapshot,
            ready=self.check_ready,
            metrics=Exposition(self.snapshot),
            find_request=self.find_anywhere,
            dead_letters=dead_letters,
            webhooks=webhooks,
            openapi=admin_openapi(),
            live=self.watch.viewers,
        )
        admin = HttpServer(self.admin, HttpLimits(body_bytes_max=1024, connections_max=256), self.runtime.clock)
        self.runtime.opened.push_async_callback(close_server, admin)
        self.admin_port = await admin.start(gateway.admin_host, admin_port(gateway))

    def reload(self, load: Callable[[], Settings]) -> None:
        """Read the configuration again. What changes now is endpoints, slots and upstream timeouts; API keys; the
        certificate for clients; the secrets of webhooks. The rest does not.

        All that may fail is done for every model first: a fault of one changes none.
        """
        runtime = self.runtime
        if runtime.draining:
            return
        prepared: list[tuple[ModelService, Model, Endpoints]] = []
        try:
            settings = load()
            named = models_of(settings)
            changes = [prepare(settings) for prepare in runtime.reloads]
            for service in self.serving.services:
                if service.name in named:
                    model = named[service.name]
                    prepared.append((service, model, service.prepare_change(model)))
        except Exception as fault:  # whatever it is, this process goes on
            for service, _, endpoints in prepared:
                service.fleet.give_up(endpoints)
            logger.error("the configuration was not changed: %s", " ".join(str(fault).split()))
            return
        for change in changes:
            change()
        changed = [service.change(model, endpoints) for service, model, endpoints in prepared]
        for section in changed_for_the_next_start(runtime.settings, settings):
            logger.warning("a change of %s takes effect at the next start", section)
        came, gone = sum(each[0] for each in changed), sum(each[1] for each in changed)
        logger.info("read the configuration again", extra={"fields": {"endpoints_added": came, "endpoints_gone": gone}})


def changed_for_the_next_start(old: Settings, new: Settings) -> list[str]:
    """The sections with a change that a running gateway does not make."""

    def fixed(settings: Settings) -> Settings:
        replace = msgspec.structs.replace
        upstream = replace(settings.upstream, endpoints=[], slots=1, timeout_s=1.0)
        at_once = {"endpoints", "slots", "timeout_s"}
        models = {
            name: {key: value for key, value in own.items() if key not in at_once}
            for name, own in settings.models.items()
        }
        has_tls = "yes" if settings.gateway.tls_cert else ""
        gateway = replace(settings.gateway, tls_cert=has_tls, tls_key=has_tls)
        webhooks = replace(settings.webhooks, secrets=[])
        broker = replace(settings.broker, total_timeout_s=total_timeout_s(settings))  # it may follow the upstreams'
        return replace(
            settings, gateway=gateway, keys={}, upstream=upstream, models=models, webhooks=webhooks, broker=broker
        )

    before, after = fixed(old), fixed(new)
    return [name for name in Settings.__struct_fields__ if getattr(before, name) != getattr(after, name)]
