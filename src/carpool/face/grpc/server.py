"""The gRPC port: services on grpcio's asyncio server, with limits, and a drain.

1. An error of the tree, or a defect, ends its own call alone, with a status. That of a defect has no details.
2. There are at most `calls_max` calls at once, streams included; others are refused at once. Slow ones: slow.py.
3. grpcio makes two tasks for each call; this package adds one for each PredictStream, and none for other calls.

This module imports grpcio: only processes that serve gRPC import it.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc

from carpool.core.clock import Clock, monotonic
from carpool.core.defaults import do_nothing, no
from carpool.core.errors import GRPC_STATUS, CarpoolError, QueueFull, without_frames
from carpool.core.messages import Message
from carpool.core.ports import Peer
from carpool.face.grpc.call import GrpcCall, Problems, Service, address_of, metadata_of
from carpool.face.grpc.messages import status_message, status_text
from carpool.face.grpc.slow import SlowCalls
from carpool.face.http.state import HttpLimits
from carpool.face.intake import as_error

CALLS_MAX = 10_000
PEERS_KEPT_MAX = 4096
# What a message may have beside the input that it carries.
ENVELOPE_BYTES = 65536
STREAMS_PER_CONNECTION_MAX = 4096
# A client that is gone without a word is noticed by a ping after so long; clients may ping every so often themselves.
KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS = 60_000, 20_000
CLIENT_PINGS_MS = 10_000
# Longer than any drain: `finish` says when it is over.
DRAIN_S_MAX = 86400.0
_CODES = {name: grpc.StatusCode[name] for name in GRPC_STATUS}


class Pems(NamedTuple):
    """The server's private key and its certificate chain."""

    key: bytes
    chain: bytes


class GrpcServer:
    """Serves services on one address."""

    def __init__(
        self,
        services: Sequence[Service],
        limits: HttpLimits,
        problems: Problems,
        clock: Clock = monotonic,
        *,
        calls_max: int = CALLS_MAX,
        when_draining: Callable[[], None] = do_nothing,
        # Whether the peer with this address is a proxy, over whose connections many clients come.
        is_proxy: Callable[[str], bool] = no,
    ) -> None:
        self.services = services
        self._when_draining = when_draining
        self._limits = limits
        self._calls_max = calls_max
        self._problems = problems
        self._clock = clock
        self._server: Any = None
        self._stopping: asyncio.Task[None] | None = None
        self._certificate: Any = None
        self.port = 0
        # Calls under way, streams included.
        self.calls = 0
        self.slow = SlowCalls(
            limits.receive_timeout_s,
            limits.write_timeout_s,
            limits.unread_bytes_max,
            clock,
            is_shared=lambda peer_name: is_proxy(address_of(peer_name)),
        )
        # By grpcio's names for them.
        self._peers: dict[str, Peer] = {}

    def __repr__(self) -> str:
        return f"<GrpcServer calls={self.calls} {self.slow}>"

    async def start(self, host: str, port: int, tls: Pems | None = None, *, is_shared: bool = False) -> None:
        """Listen, together with other processes if `is_shared`; raises OSError."""
        handlers = [
            grpc.method_handlers_generic_handler(
                service.name, {name: self._handler(service, name) for name in service.methods}
            )
            for service in self.services
        ]
        server = grpc.aio.server(handlers=handlers, options=self._options(is_shared))
        address = f"[{host}]:{port}" if ":" in host else f"{host or '[::]'}:{port}"
        try:
            if tls is None:
                self.port = server.add_insecure_port(address)
            else:
                self.change_certificate(tls)
                credentials = grpc.dynamic_ssl_server_credentials(self._certificate, lambda: self._certificate)
                self.port = server.add_secure_port(address, credentials)
        except RuntimeError:
            raise OSError(f"the gRPC address {address} cannot be used") from None
        self._server = server
        await server.start()
        self.slow.start()

    def change_certificate(self, tls: Pems) -> None:
        """Use this certificate for new connections."""
        self._certificate = grpc.ssl_server_certificate_configuration([tls])

    def drain(self) -> None:
        """Announce the drain by the health service; other clients see it when listening stops."""
        self._when_draining()

    def stop_listening(self) -> None:
        """Accept no new connection and no new call. Those there are go on; streams end when they are answered."""
        if self._server is not None and self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._server.stop(DRAIN_S_MAX))
            for service in self.services:
                service.drain()

    async def finish(self, deadline: float) -> None:
        """Wait until the last call has ended; at `deadline`, end those that are left."""
        if self._stopping is None:
            return
        await self._server.stop(max(0.0, deadline - self._clock()))
        await self._stopping
        self.slow.stop()

    def _options(self, is_shared: bool) -> list[tuple[str, int]]:
        limits = self._limits
        return [
            ("grpc.so_reuseport", int(is_shared)),
            ("grpc.max_receive_message_length", limits.body_bytes_max + ENVELOPE_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", limits.header_bytes_max),
            ("grpc.absolute_max_metadata_size", limits.header_bytes_max),
            ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION_MAX),
            ("grpc.max_allowed_incoming_connections", limits.connections_max),
            ("grpc.server_handshake_timeout_ms", int(limits.receive_timeout_s * 1000)),
            ("grpc.max_connection_idle_ms", int(limits.idle_timeout_s * 1000)),
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", CLIENT_PINGS_MS),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", CLIENT_PINGS_MS),
            # No compression: unpacking what unknown clients send could exhaust memory.
            ("grpc.compression_enabled_algorithms_bitset", 1),
        ]

    def _handler(self, service: Service, name: str) -> Any:
        """A method as grpcio calls it (rule 1)."""
        path, method = f"/{service.name}/{name}", service.methods[name]
        handle = method.handle

        async def serve(_: Any, context: Any) -> bytes | None:
            peer_name: str = context.peer()
            call = GrpcCall(context, path, peer_name, self._peer(peer_name), self.slow)
            answer: bytes | Message | CarpoolError | None
            if self.calls >= self._calls_max:
                await self._refuse(call, QueueFull("too many calls at once; try again soon", retry_after_s=1))
                return None
            self.calls += 1
            try:
                answer = await handle(call)
                if isinstance(answer, Message):
                    answer = answer.SerializeToString()
            except grpc.aio.BaseError:
                return None  # the call has ended meanwhile; of what is raised grpcio would write a line for each
            except Exception as failure:
                answer = as_error(failure)
            finally:
                self.calls -= 1
            if isinstance(answer, CarpoolError):
                await self._refuse(call, answer)
            elif answer is not None:
                self.slow.answered(peer_name, len(answer))
                return answer
            return None

        # A unary call looks the same on the wire, and this way we are called before its message is there.
        unary, stream = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        return stream(serve) if method.is_stream else unary(serve)

    async def _refuse(self, call: GrpcCall, error: CarpoolError) -> None:
        """End a call with an error.

        grpcio keeps what `abort` raises with the call, and raises it once more when the handler has returned. With the
        frames of the handler it would be a reference cycle.
        """
        self._problems.note(call, error, came_in=call.came_in)
        details = ("grpc-status-details-bin", status_message(error, call.request_id()))
        metadata = (details, *call.context.trailing_metadata(), *metadata_of(error.header_lines))
        try:
            await call.context.abort(_CODES[error.grpc_code], status_text(error), metadata)
        except grpc.aio.AbortError as aborted:
            without_frames(aborted)

    def _peer(self, name: str) -> Peer:
        peer = self._peers.get(name)
        if peer is None:
            if len(self._peers) >= PEERS_KEPT_MAX:
                self._peers.clear()
            peer = self._peers[name] = Peer(address_of(name))
        return peer
