"""The messages of protos/, as classes of the protobuf library. Only what speaks gRPC imports this: `carpool[grpc]`.

They are made from what `make protos` compiled, in a pool of their own: protobuf's default pool takes each name once per
process, and `inference.ModelInferRequest` is tritonclient's and KServe's too, which a program may use beside Carpool.
For the same reason there is no generated code, which would only run with the versions of protobuf that suit it.
"""

from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

__all__ = ["POOL", "DecodeError", "Message", "message_class"]

POOL = descriptor_pool.DescriptorPool()
_compiled = files("carpool.core").joinpath("protos", "descriptors.binpb").read_bytes()
for _file in descriptor_pb2.FileDescriptorSet.FromString(_compiled).file:
    POOL.Add(_file)


def message_class(name: str) -> Any:
    """The class of a message, by its full name."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(name))
