"""The same pace over gRPC: a connection of the generator is a seat for one call, and seats share channels."""

import asyncio
import os
from typing import Any, cast

from carpool.core.clock import monotonic
from carpool.core.errors import CarpoolError, all_errors
from carpool.core.messages import DecodeError, carpool_v1, google_rpc
from carpool.tools.bench.connection import Connection, Due, Held
from carpool.tools.bench.faces import PredictPayload
from carpool.tools.bench.generator import LoadGenerator
from carpool.tools.bench.response import RETRY_AFTER_S

# Before grpc is imported, which reads it once: the report says what failed.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
import grpc

PREDICT = "/carpool.v1.Inference/Predict"
# What servers of HTTP/2 commonly let one connection have.
SEATS_A_CHANNEL = 100
CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # or channels to one address would share a connection
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
]
DETAILS = "grpc-status-details-bin"
_BY_REASON = {error.code.replace("-", "_").upper(): error for error in all_errors()}


class _Seat(asyncio.Transport):
    """Stands for a transport: a channel connects anew by itself."""

    def is_closing(self) -> bool:
        """Never: calls fail by themselves while no server is there."""
        return False


_SEAT = _Seat()


class GrpcSeat(Connection):
    """One call at a time, over a channel that other seats use too."""

    __slots__ = ("calling", "method")

    def __init__(self, generator: LoadGenerator, held: Held | None) -> None:
        super().__init__(generator, held)
        self.method: Any = cast(GrpcGenerator, generator).next_method()
        self.calling: asyncio.Task[None] | None = None

    def begin(self, due: Due) -> None:
        """Call with this request."""
        self.due = due
        self.calling = self.generator.loop.create_task(self._call(cast(PredictPayload, due.part.payload), due.number))

    async def _call(self, payload: PredictPayload, due_number: int) -> None:
        number = payload.number(due_number)
        try:
            answer = await self.method(payload.request(number), metadata=payload.metadata)
        except grpc.aio.AioRpcError as error:
            self.answered += 1
            self._refused_with(error)
        else:
            self.answered += 1
            self.settle(payload.verify(answer, 0, number))
        self.next_request(True)

    def _refused_with(self, error: Any) -> None:
        """Count it under the status that HTTP has for it; what is not Carpool's own, under its gRPC code."""
        kind, after_s = read_refusal(dict(error.trailing_metadata() or ()).get(DETAILS, b""))
        generator, due, now = self.generator, self.in_flight, monotonic()
        if kind is None:
            due.part.tally.failed(error.code().name, now - due.asked, now)
        elif not generator.may_repeat(kind.status) or not generator.try_again(due, after_s, now):
            due.part.tally.failed(str(kind.status), now - due.asked, now)

    def drop(self) -> None:
        """Cancel the call, and make place for a new seat."""
        self.due = None
        if self.transport is not None:
            self.transport = None
            if self.calling is not None:
                self.calling.cancel()
            # Not at once: the caller may be iterating over all seats.
            self.generator.loop.call_soon(self.generator.lost, self, None)


def read_refusal(status: bytes) -> tuple[type[CarpoolError] | None, float]:
    """Which error a google.rpc.Status tells of, if it is one of Carpool's, and after how long to come again."""
    kind, after_s = None, RETRY_AFTER_S
    try:
        for detail in google_rpc.Status.FromString(status).details:
            name = detail.type_url.rpartition(".")[2]
            if name == "ErrorInfo":
                kind = _BY_REASON.get(google_rpc.ErrorInfo.FromString(detail.value).reason)
            elif name == "RetryInfo":
                after_s = float(google_rpc.RetryInfo.FromString(detail.value).retry_delay.seconds)
    except DecodeError:
        return None, after_s
    return kind, after_s


def read_response(data: bytes) -> Any:
    """A PredictResponse; raises ValueError."""
    try:
        return carpool_v1.PredictResponse.FromString(data)
    except DecodeError:
        raise ValueError("no such message") from None


class GrpcGenerator(LoadGenerator):
    """Sends each request when it is due, in calls of `Predict`."""

    def __init__(self, *, connections: int, **options: Any) -> None:
        super().__init__(connections=connections, **options)
        self._protocol = GrpcSeat
        address, port = self.target.address, self.target.port
        where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        self._channels = [
            grpc.aio.insecure_channel(where, CHANNEL_OPTIONS) for _ in range(-(-connections // SEATS_A_CHANNEL))
        ]
        self._methods = [channel.unary_unary(PREDICT) for channel in self._channels]
        self._seats = 0

    def next_method(self) -> Any:
        """What a new seat calls with: the channels take turns."""
        self._seats += 1
        return self._methods[self._seats % len(self._methods)]

    async def open(self) -> None:
        """Connect every channel; raises ConnectionError if one could not be."""
        try:
            async with asyncio.timeout(self.timeout_s):
                # A channel would go on trying where no server listens.
                probe, _ = await self.loop.create_connection(asyncio.Protocol, self.target.address, self.target.port)
                probe.abort()
                for channel in self._channels:
                    await channel.channel_ready()
        except TimeoutError:
            raise ConnectionError("no gRPC there; `carpool serve --grpc` has it on its port + 2") from None
        except OSError as fault:
            raise ConnectionError(os.strerror(fault.errno) if fault.errno else str(fault)) from None
        await super().open()

    async def _connect(self, connection: Connection) -> None:
        connection.connection_made(_SEAT)

    async def close(self) -> None:
        """Take back what is under way, and close every channel."""
        await super().close()
        for channel in self._channels:
            await channel.close()
