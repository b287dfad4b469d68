"""What a simulated GPU makes of a KServe V2 call: every tensor comes back as an output of its name, texts reversed."""

from typing import Any

import msgspec

from carpool.core.errors import CarpoolError
from carpool.core.finite import finite_float
from carpool.core.tensors import Data, RawTensor, is_packed, pack, pack_tensors, unpack, unpack_tensors
from carpool.face.http.v2_wire import V2Call, parse_call, write_answer
from carpool.face.tensor_rows import join_rows, read_row
from carpool.upstream.endpoint import UpstreamResponse
from carpool.upstream.simulated import CallRefusedError

_decode = msgspec.json.Decoder(float_hook=finite_float).decode


class TensorAnswer(UpstreamResponse, frozen=True, gc=False):
    """An answer with raw tensors behind its JSON."""

    header_length: int | None = None


class TensorBatch:
    """The rows of a call."""

    def __init__(self, model: str, call: V2Call) -> None:
        self._model = model
        self._call = call
        self.inputs: list[bytes] = call.rows

    def answer(self, count: int) -> UpstreamResponse:
        """The answer to the first `count` rows."""
        if not count:
            return UpstreamResponse(200, b'{"outputs":[]}')
        outputs = join_rows([read_row(mirrored(row)) for row in self.inputs[:count]])
        steps = write_answer(self._model, "1", self._call.id, outputs, self._call.wanted)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return TensorAnswer(200, b"".join(end.value.body), header_length=end.value.header_length)


def read_tensors(model: str, headers: dict[bytes, bytes], body: bytes) -> TensorBatch:
    """The batch of a call; raises CallRefusedError."""
    try:
        return TensorBatch(model, parse_call(headers, body))
    except CarpoolError as error:
        raise CallRefusedError(error.detail) from None


def mirrored(row: bytes) -> Data:
    """What comes back for one row."""
    if is_packed(row):
        return pack_tensors([_mirrored_raw(tensor) for tensor in unpack_tensors(row)])
    given: dict[str, Any] = _decode(row)
    tensors = [given] if "data" in given and isinstance(given["data"], list) else list(given.values())
    for tensor in tensors:
        if tensor["datatype"] == "BYTES":
            tensor["data"] = [text[::-1] for text in tensor["data"]]
    return msgspec.json.encode(tensors)


def _mirrored_raw(tensor: RawTensor) -> RawTensor:
    if tensor.datatype != "BYTES":
        return tensor
    try:
        return tensor._replace(data=pack([text[::-1] for text in unpack(tensor.data, "BYTES")], "BYTES"))
    except UnicodeDecodeError:
        return tensor  # no text
