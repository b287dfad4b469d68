"""gRPC's server reflection, `v1` and `v1alpha`: what services there are, and their descriptors, for tools.

grpcio-reflection answers. It knows `v1alpha` alone; the messages of `v1` are the same.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from grpc_reflection.v1alpha.reflection import aio
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from carpool.core.errors import Malformed
from carpool.core.messages import POOL
from carpool.face.grpc.call import GrpcCall, Method, leaving
from carpool.face.grpc.messages import parse
from carpool.face.http.places import Places

NAMES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
# A tool asks for some names, one after the other.
QUESTIONS_MAX = 1000


class Reflection:
    """The service, under one of its two names. `services` are all that there are here."""

    def __init__(self, name: str, services: Sequence[str], places: Places) -> None:
        self.name = name
        self._places = places
        self._servicer = aio.ReflectionServicer(services, Symbols())
        self._open: set[GrpcCall] = set()
        self.methods: Mapping[str, Method] = {"ServerReflectionInfo": Method(self.info, is_stream=True)}

    def drain(self) -> None:
        """Take no more questions."""
        for call in self._open:
            call.interrupt(leaving())

    async def info(self, call: GrpcCall) -> None:
        """Answer question after question."""
        with self._places.held_by(call.peer.address):
            self._open.add(call)
            try:
                async for answer in self._servicer.ServerReflectionInfo(questions(call), call.context):
                    await call.write(answer.SerializeToString())
            finally:
                self._open.discard(call)


class Symbols:
    """The pool of all messages, which by itself does not find the file of a method."""

    def __getattr__(self, name: str) -> Any:
        return getattr(POOL, name)

    def FindFileContainingSymbol(self, name: str) -> Any:
        """The file that declares it; raises KeyError."""
        try:
            return POOL.FindFileContainingSymbol(name)
        except KeyError:
            return POOL.FindMethodByName(name).containing_service.file


async def questions(call: GrpcCall) -> AsyncIterator[Any]:
    """What a tool asks; raises Malformed."""
    for _ in range(QUESTIONS_MAX):
        message = await call.next()
        if message is None:
            return
        yield parse(ServerReflectionRequest, message)
    raise Malformed(f"at most {QUESTIONS_MAX} questions on one stream")
