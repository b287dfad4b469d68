"""A gRPC client of the real libraries: grpcio, and protobuf with the descriptors that Carpool serves."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from support.otlp import fields
from support.processes import PATIENCE_S

PROTOS = files("carpool.core").joinpath("protos")
_pool = descriptor_pool.DescriptorPool()
_described = descriptor_pb2.FileDescriptorSet.FromString(PROTOS.joinpath("descriptors.binpb").read_bytes())
for _file in _described.file:
    _pool.Add(_file)


def message(name: str) -> Any:
    """The class of a message, by its full name; without a package it is one of `carpool.v1`."""
    full_name = name if "." in name else f"carpool.v1.{name}"
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(full_name))


class GrpcClient:
    """One channel, which is one connection."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel

    def method(self, path: str) -> Any:
        """What calls a method, by `package.Service/Method`; of `carpool.v1.Inference` the last word is enough."""
        service, _, name = path.rpartition("/")
        method = _pool.FindServiceByName(service or "carpool.v1.Inference").FindMethodByName(name)
        kinds = {
            (False, False): self.channel.unary_unary,
            (False, True): self.channel.unary_stream,
            (True, True): self.channel.stream_stream,
        }
        return kinds[method.client_streaming, method.server_streaming](
            f"/{method.containing_service.full_name}/{name}",
            message_factory.GetMessageClass(method.input_type).SerializeToString,
            message_factory.GetMessageClass(method.output_type).FromString,
        )

    def predict(self, text: str = '"abc"', **options: Any) -> Any:
        return self.method("Predict")(message("PredictRequest")(input_json=text), timeout=PATIENCE_S, **options)

    def refused(self, name: str, request: Any, **options: Any) -> "Refusal":
        try:
            answer = self.method(name)(request, timeout=options.pop("timeout", PATIENCE_S), **options)
        except grpc.RpcError as error:
            return Refusal(error)
        raise AssertionError(f"it was not refused: {answer}")


class Refusal:
    """The status of a call, and its google.rpc details, as bytes by their type."""

    def __init__(self, error: Any) -> None:
        self.code: str = error.code().name
        self.text: str = error.details()
        self.metadata = dict(error.trailing_metadata())
        self.details = details_in(self.metadata.get("grpc-status-details-bin", b""))

    @property
    def reason(self) -> str:
        reason: str = parts(self.details["ErrorInfo"])[1][0].decode()
        return reason

    @property
    def request_id(self) -> str:
        facts = {fact[1][0]: fact[2][0] for fact in map(parts, parts(self.details["ErrorInfo"])[3])}
        told: str = facts[b"request_id"].decode()
        return told


def details_in(status: bytes) -> dict[str, bytes]:
    found = (parts(detail) for detail in parts(status).get(3, []))
    return {each[1][0].decode().rpartition(".")[2]: each[2][0] for each in found}


def parts(data: bytes) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for number, value in fields(data):
        found.setdefault(number, []).append(value)
    return found


@contextmanager
def grpc_client(port: int, credentials: Any = None, options: Sequence[tuple[str, Any]] = ()) -> Iterator[GrpcClient]:
    """A channel until the block ends."""
    # Channels to one address would share a connection otherwise.
    options = [("grpc.use_local_subchannel_pool", 1), *options]
    if credentials is None:
        channel = grpc.insecure_channel(f"127.0.0.1:{port}", options)
    else:
        channel = grpc.secure_channel(f"localhost:{port}", credentials, options)
    with channel:
        yield GrpcClient(channel)
