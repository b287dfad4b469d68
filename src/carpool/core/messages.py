"""The messages of protos/, as classes of the protobuf library. Only what speaks gRPC imports this: `carpool[grpc]`.

They are made from what `make protos` compiled, in a pool of their own: protobuf's default pool takes each name once per
process, and `inference.ModelInferRequest` is tritonclient's and KServe's too, which a program may use beside Carpool.
"""

from collections import defaultdict
from importlib.resources import files
from types import SimpleNamespace

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

__all__ = ["POOL", "DecodeError", "Message", "carpool_v1", "google_rpc", "health_v1", "inference"]

POOL = descriptor_pool.DescriptorPool()
_packages: defaultdict[str, SimpleNamespace] = defaultdict(SimpleNamespace)
_compiled = files("carpool.core").joinpath("protos", "descriptors.binpb").read_bytes()
for _file in descriptor_pb2.FileDescriptorSet.FromString(_compiled).file:
    POOL.Add(_file)
    for _kind in _file.message_type:
        _descriptor = POOL.FindMessageTypeByName(f"{_file.package}.{_kind.name}")
        setattr(_packages[_file.package], _kind.name, message_factory.GetMessageClass(_descriptor))

# The classes of each package, by their names.
carpool_v1, health_v1 = _packages["carpool.v1"], _packages["grpc.health.v1"]
inference, google_rpc = _packages["inference"], _packages["google.rpc"]
