"""The faces of a gateway: the sockets by which clients come in, with all that they speak."""

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from carpool.admission.shedding import UTILIZATION_TARGET
from carpool.composition.admission import Admission
from carpool.composition.credentials import warn_if_open
from carpool.composition.runtime import Runtime
from carpool.composition.webhooks import callback_check
from carpool.core.snapshot import SheddingNumbers
from carpool.face.http.cors import Cors
from carpool.face.http.faces import INFER, has_face
from carpool.face.http.gateway import GatewayRoutes
from carpool.face.http.kserve_v2 import KServeV2Routes
from carpool.face.http.list_faces import add_list_faces
from carpool.face.http.lists import Answers
from carpool.face.http.openapi import gateway_openapi
from carpool.face.http.places import Places
from carpool.face.http.server import HttpServer
from carpool.face.http.state import SAMPLE_S, UNREAD_BYTES_MAX, WRITE_TIMEOUT_S, HttpLimits, Sampler
from carpool.face.http.stream import StreamLimits
from carpool.face.http.streams import PATH as STREAM
from carpool.face.http.streams import Tickets, WebSocketStreams
from carpool.face.http.task_events import TaskEvents
from carpool.face.intake import WAIT_MS_MAX
from carpool.service import ModelFace
from carpool.settings import Settings, total_timeout_s

if TYPE_CHECKING:
    from carpool.face.grpc.health import CheckReady
    from carpool.face.grpc.server import GrpcServer

logger = logging.getLogger("carpool")

# Files that are not client connections: upstream connections, the journal, logs, and listening sockets.
FILES_RESERVED = 256
ACCEPTED_A_TURN = 32
FILES_WANTED = 65536


class Server(Protocol):
    """One way for clients to come in."""

    def drain(self) -> None:
        """Say with every answer that this process leaves."""

    def stop_listening(self) -> None:
        """Accept no new connection; those there are go on."""

    async def finish(self, deadline: float) -> None:
        """Close idle connections at once and the others as their last answer leaves; past `deadline` all of them."""


class Faces:
    """HTTP and gRPC for clients, before an admission."""

    def __init__(self, runtime: Runtime, admission: Admission) -> None:
        settings = runtime.settings
        self._runtime = runtime
        self._admission = admission
        self._tls = tls_context(settings)
        runtime.reloads.append(self._prepare_reload)
        intake = admission.intake
        routes = GatewayRoutes(
            intake,
            gateway_openapi(
                list(runtime.models),
                settings.model,
                WAIT_MS_MAX,
                [model.name for model in intake.models() if has_face(model, INFER)],
                takes_callbacks=bool(settings.webhooks.hosts),
                names_models=settings.auth.mode == "off",
            ),
            runtime.tracer,
            callback_check(settings.webhooks),
            forget_after_read=settings.tasks.forget_after_read,
        )
        answers = self._answers = Answers(UNREAD_BYTES_MAX, intake.turns)
        add_list_faces(routes.router, intake, answers, admission.is_down, runtime.tracer)
        v2 = KServeV2Routes(intake, is_up=admission.is_up, answers=answers, traces=runtime.tracer)
        v2.add_to(routes.router)
        cors = Cors(settings.gateway.cors_origins, routes.router.serve)
        serve, extra_lines = (cors, cors.lines) if settings.gateway.cors_origins else (routes.router.serve, None)
        self.http = HttpServer(serve, http_limits(settings, admission.models), runtime.clock, extra_lines)
        self.http.state.traces, self.http.state.turns = runtime.tracer, intake.long_turns
        self.streams, self.events = self._make_streams(cors)
        self.http.state.upgrades[STREAM, b"websocket"] = self.streams.open
        routes.router.add(b"GET", STREAM, self.streams.no_upgrade)
        routes.router.add(b"POST", STREAM + b"/tickets", self.streams.ticket)
        routes.router.add(b"GET", b"/v1/result/*/events", self.events.listen)
        self.servers: list[Server] = [self.http]
        # None where there is no gRPC.
        self.grpc: GrpcServer | None = None
        self.port = 0

    def _make_streams(self, cors: Cors) -> tuple[WebSocketStreams, TaskEvents]:
        runtime, settings = self._runtime, self._runtime.settings
        streams = WebSocketStreams(
            self._admission.intake,
            self.http.state,
            Tickets(settings.service.token),
            Places("streams", settings.limits.streams),
            StreamLimits(message_bytes_max=self.http.state.limits.body_bytes_max),
            allows=cors.allows,
            traces=runtime.tracer,
            clock=runtime.clock,
        )
        places = Places("event streams", settings.limits.streams)
        return streams, TaskEvents(self._admission.intake, places, forget_after_read=settings.tasks.forget_after_read)

    async def start(self, listening: socket.socket | None, check_ready: "CheckReady") -> None:
        """Serve clients, on a socket that other processes share if one is given."""
        gateway = self._runtime.settings.gateway
        if gateway.grpc_port is not None:
            await self._start_grpc(gateway.grpc_port, check_ready)
        for server in self.servers:
            self._runtime.opened.push_async_callback(close_server, server)
        self._runtime.do_every(SAMPLE_S, Sampler(self.http.state, self._runtime.seconds).take)
        self.port = await self.http.start(gateway.host, gateway.port, self._tls, listening)
        warn_if_open(self._runtime.settings)

    async def _start_grpc(self, port: int, check_ready: "CheckReady") -> None:
        from carpool.composition.grpc_face import make_grpc_server, pems_of  # here: it loads grpcio

        settings = self._runtime.settings
        gateway = settings.gateway
        self.grpc = make_grpc_server(
            self._runtime,
            self._admission.intake,
            self.http.state,
            check_ready,
            self._admission.is_up,
            self._answers,
        )
        self.servers.append(self.grpc)
        await self.grpc.start(gateway.host, port, pems_of(settings), is_shared=gateway.processes > 1)
        logger.info("gRPC on %s:%d", gateway.host, self.grpc.port)

    def _prepare_reload(self, settings: Settings) -> Callable[[], None]:
        """Let new connections get the certificate that there is now; raises OSError."""
        tls, grpc = tls_context(settings), self.grpc
        pems = None
        if grpc is not None:
            from carpool.composition.grpc_face import pems_of

            pems = pems_of(settings)

        def change() -> None:
            if tls is not None:
                self.http.change_certificate(tls)
            if grpc is not None and pems is not None:
                grpc.change_certificate(pems)

        return change

    async def stop_accepting(self) -> None:
        """Say that this process leaves, and a little later accept no more connections and end the waits for tasks."""
        for server in self.servers:
            server.drain()
        await asyncio.sleep(self._runtime.settings.gateway.drain_grace_s)
        for server in self.servers:
            server.stop_listening()
        self.streams.drain()
        self.events.drain()
        self._admission.tasks.drain()

    async def drain(self) -> None:
        """Answer what was received; after that nothing is admitted."""
        settings = self._runtime.settings
        give_up_at = self._runtime.clock() + settings.gateway.receive_timeout_s + total_timeout_s(settings)
        await asyncio.gather(*(server.finish(give_up_at) for server in self.servers))
        self._admission.close()

    def describe(self, held: int, held_bytes: int) -> SheddingNumbers:
        """What `/metrics` shows of it; the broker knows what is held."""
        admission, settings = self._admission, self._runtime.settings
        held, held_bytes = admission.held_with(held, held_bytes)
        return SheddingNumbers(
            problems=self.http.state.problems,
            connections=len(self.http.connections),
            streams=len(self.streams),
            event_listeners=len(self.events),
            grpc_calls=0 if self.grpc is None else self.grpc.calls,
            held_requests=held,
            held_bytes=held_bytes,
            pressure={model: admission.pressure(model) for model in admission.shedders},
            shed={
                (model, tier.name): count
                for model, shedder in admission.shedders.items()
                for tier, count in zip(settings.tiers, shedder.shed, strict=True)
            },
            wait_error_seconds={
                (model, direction): seconds
                for model, shedder in admission.shedders.items()
                for direction, seconds in shedder.wait_errors.items()
            },
            utilization_target=UTILIZATION_TARGET,
        )


async def close_server(server: Server) -> None:
    """Close whatever is open, now."""
    server.stop_listening()
    await server.finish(0.0)


def http_limits(settings: Settings, models: Sequence[ModelFace]) -> HttpLimits:
    """What is taken from a client. The body may be as long as the most generous model allows."""
    gateway = settings.gateway
    files = raise_file_limit()
    return HttpLimits(
        body_bytes_max=max(model.body_bytes_max for model in models),
        unread_bytes_max=UNREAD_BYTES_MAX,
        receive_timeout_s=gateway.receive_timeout_s,
        idle_timeout_s=gateway.idle_timeout_s,
        write_timeout_s=WRITE_TIMEOUT_S,
        connections_max=files - min(FILES_RESERVED, files // 2),
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
