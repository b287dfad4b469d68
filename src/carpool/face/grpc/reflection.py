"""gRPC's server reflection, `v1` and `v1alpha`: what services there are, and their descriptors, for tools.

The descriptors are those of protos/, compiled by `make protos` into one file, which is read at the first question.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from carpool.core.errors import GRPC_STATUS, CarpoolError, Malformed
from carpool.core.protobuf import BadMessageError, Message, as_bytes, as_message, as_text, field, fields, number_field
from carpool.face.grpc.call import GrpcCall, Method, leaving
from carpool.face.grpc.messages import FIELDS_MAX, malformed
from carpool.face.http.places import Places

NAMES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
# A tool asks for some names, one after the other.
QUESTIONS_MAX = 1000


class Files(NamedTuple):
    """Descriptors of files, by the name of the file, and by each name that is declared in one."""

    by_name: Mapping[str, bytes]
    by_symbol: Mapping[str, str]
    # The files that a file needs.
    needs: Mapping[str, Sequence[str]]

    def with_needs(self, name: str) -> list[bytes]:
        """A file and all that it needs, each once."""
        found: dict[str, bytes] = {}
        wanted = [name]
        while wanted:
            each = wanted.pop()
            if each in self.by_name and each not in found:
                found[each] = self.by_name[each]
                wanted += self.needs[each]
        return list(found.values())


@cache
def compiled() -> Files:
    """What `make protos` wrote: a FileDescriptorSet."""
    described = files(__package__).joinpath("protos", "descriptors.binpb").read_bytes()
    by_name: dict[str, bytes] = {}
    by_symbol: dict[str, str] = {}
    needs: dict[str, list[str]] = {}
    for _, value in fields(described):
        descriptor = as_bytes(value)
        parts = list(fields(descriptor))
        name, package = (as_text(next((part for number, part in parts if number == each), b"")) for each in (1, 2))
        by_name[name] = descriptor
        needs[name] = [as_text(part) for number, part in parts if number == 3]
        for number, part in parts:
            if number in (4, 5, 6):  # messages, enums, services
                by_symbol.update(dict.fromkeys(_symbols(as_message(part), package, is_service=number == 6), name))
    return Files(by_name, by_symbol, needs)


def _symbols(descriptor: Message, scope: str, *, is_service: bool) -> list[str]:
    """The full names of what is declared: a message with those in it, or a service with its methods."""
    parts = list(fields(descriptor))
    own = f"{scope}.{as_text(next(part for number, part in parts if number == 1))}"
    found = [own]
    for number, part in parts:
        if is_service and number == 2:
            found.append(f"{own}.{_name(as_message(part))}")
        elif not is_service and number in (3, 4) and not isinstance(part, int):
            found += _symbols(part, own, is_service=False)
    return found


def _name(descriptor: Message) -> str:
    return as_text(next(part for number, part in fields(descriptor) if number == 1))


class Reflection:
    """The service, under one of its two names. `services` are all that there are here."""

    def __init__(self, name: str, services: Sequence[str], places: Places) -> None:
        self.name = name
        self._places = places
        self._services = services
        self._open: set[GrpcCall] = set()
        self.methods: Mapping[str, Method] = {"ServerReflectionInfo": Method(self.info, is_stream=True)}

    def drain(self) -> None:
        """Take no more questions."""
        for call in self._open:
            call.interrupt(leaving())

    async def info(self, call: GrpcCall) -> CarpoolError | None:
        """Answer question after question."""
        if (refusal := self._places.refusal(call.peer.address)) is not None:
            return refusal
        self._open.add(call)
        try:
            for _ in range(QUESTIONS_MAX):
                message = await call.next()
                if message is None:
                    return None
                await call.write(answer(message, self._services))
        except BadMessageError as fault:
            raise malformed(fault) from None
        finally:
            self._open.discard(call)
            self._places.give_back(call.peer.address)
        return Malformed(f"at most {QUESTIONS_MAX} questions on one stream")


def answer(question: bytes, services: Sequence[str]) -> bytes:
    """The ServerReflectionResponse to a ServerReflectionRequest; raises BadMessageError."""
    asked = dict(fields(question, FIELDS_MAX))
    known = compiled()
    if 7 in asked:
        found = field(6, b"".join(field(1, field(1, name.encode())) for name in services))
    elif 3 in asked:
        found = _described(known.with_needs(as_text(asked[3])))
    elif 4 in asked:
        found = _described(known.with_needs(known.by_symbol.get(as_text(asked[4]), "")))
    elif 6 in asked and as_text(asked[6]) in known.by_symbol:
        found = field(5, field(1, as_bytes(asked[6])))  # nothing here has extensions
    else:
        found = _described([])
    host = field(1, as_text(asked[1]).encode()) if 1 in asked else b""
    return host + field(2, question) + found


def _described(descriptors: Sequence[bytes]) -> bytes:
    if descriptors:
        return field(4, b"".join(field(1, each) for each in descriptors))
    return field(7, number_field(1, GRPC_STATUS["NOT_FOUND"]) + field(2, b"there is nothing of this name here"))
