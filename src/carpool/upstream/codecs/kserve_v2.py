"""KServe V2 (Open Inference Protocol) over HTTP, as JSON or with the binary tensor extension: Triton, KServe, ….

`input` is a tensor as the server would take it for a batch of one, `{"name","shape":[1,…],"datatype","data":[…]}`, or
with `"b64"` (raw, little-endian) in place of `data`, or an object of several by name. The output is the array of the
output tensors, in the form that the client sent: `data` for `data`, `b64` for `b64` (from a server that answers JSON
even so: `data`). An octet-stream body is a raw tensor whose name, datatype and shape are configured; that, and the raw
tensors of V2's own clients, travel packed (core/tensors.py).

The URL is the whole path, `http://host:port/v2/models/NAME/infer`; one without a path gets it from the model's name.
Parameters are the request's `parameters`.
Lane key: model, parameters, raw or JSON, and of each tensor its name, datatype and `shape[1:]`.
"""

import re
from collections.abc import Sequence
from typing import cast

import msgspec

from carpool.core.errors import Malformed
from carpool.core.request import DONE, Request
from carpool.core.tensors import DATATYPES, Data, RawTensor, length_of, pack_tensors
from carpool.upstream.codecs.base import (
    Codec,
    Decoded,
    Prepared,
    ProtocolFaultError,
    Refusal,
    check_id,
    check_text,
    nulls_for_not_a_number,
    parse_answer,
)
from carpool.upstream.codecs.refusals import classify_status, limit_words
from carpool.upstream.codecs.tensors import (
    Form,
    OutputTensor,
    TensorDefaults,
    TensorInput,
    cut_outputs,
    prepare_tensors,
)
from carpool.upstream.endpoint import UpstreamCall, UpstreamResponse

HEADER_LENGTH = "Inference-Header-Content-Length"


class TensorCodec(Codec):
    """What both transports of V2 share: tensors in."""

    prepares = True
    # Triton's; it does not name the size.
    limit_words = limit_words(r"inference request batch-size must be <= MAX for '[^']{1,255}'")
    health = "/v2/health/ready"

    def __init__(self, defaults: TensorDefaults | None = None, model_version: str = "") -> None:
        self.defaults = defaults or TensorDefaults()
        self.model_version = model_version

    def prepare(self, value: bytes) -> Prepared:
        """Decode and check the tensors."""
        return prepare_tensors(value, self.defaults)

    def classify(self, answer: UpstreamResponse, size: int, call_id: str = "") -> Refusal:
        """By the status, and Triton's words for too large a batch. It puts the id of the call before them."""
        return classify_status(answer, size, self.limit_words, start=f"[request id: {call_id or '<id_unknown>'}] ")

    def binary_input(self, data: bytes) -> bytes:
        """A raw tensor as configured, packed; for BYTES, of one element."""
        name, datatype, shape = self.defaults.name, self.defaults.datatype, self.defaults.shape
        if not datatype:
            raise Malformed("binary input is not set up for this model (`upstream.tensor`); send a tensor as JSON")
        before = length_of(data) if datatype == "BYTES" else b""
        count = 1 if before else len(data) // max(1, DATATYPES[datatype].size)
        return pack_tensors([RawTensor(name, datatype, shape or (1, count), data)], before)

    def _inputs_of(self, batch: Sequence[Request]) -> list[TensorInput]:
        """The prepared input of each member; an input that did not come through the face is prepared now."""
        inputs = [request.prepared or self.prepare(request.input).value for request in batch]
        return cast(list[TensorInput], inputs)


def forms_of(batch: Sequence[Request]) -> list[Form | None]:
    """The form in which each member has its outputs. A request that has ended needs none."""
    inputs: list[TensorInput | None] = [request.prepared for request in batch]
    forms: list[Form] = ["data" if each is None else each.form for each in inputs]
    return [None if request.phase == DONE else form for request, form in zip(batch, forms, strict=True)]


class _OutputParameters(msgspec.Struct):
    binary_data_size: int | None = None


class _Output(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    data: msgspec.Raw = msgspec.Raw()
    parameters: _OutputParameters | None = None


class _Answer(msgspec.Struct):
    outputs: list[_Output]
    # A text where the server keeps to the protocol.
    id: object = None
    model_version: str | int | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode
# Strings are matched in order to be skipped.
_BRACE = re.compile(rb'"(?:[^"\\]++|\\.)*+"|\{|\}', re.DOTALL)


class KServeV2Codec(TensorCodec):
    """Tensors in, tensors out, by the batch dimension."""

    # Triton's; 0 there means that the server does not know which dimension is the batch.
    info, info_field = "/v2/models/{model}/config", "max_batch_size"

    def encode(self, batch: Sequence[Request], call_id: str = "") -> UpstreamCall:
        """The members' tensors, joined: JSON, or a JSON head with the raw bytes behind it."""
        inputs = self._inputs_of(batch)
        first = inputs[0]
        version = f"/versions/{self.model_version}" if self.model_version else ""
        path = f"/v2/models/{batch[0].model}{version}/infer"
        heads: list[bytes] = []
        tail: list[Data] = []
        for index, tensor in enumerate(first.tensors):
            described = {"name": tensor.name, "shape": [len(batch), *tensor.shape], "datatype": tensor.datatype}
            start = msgspec.json.encode(described)[:-1]
            data = [member.tensors[index].data for member in inputs]
            if first.is_raw:
                tail += data
                heads.append(start + b',"parameters":{"binary_data_size":%d}}' % sum(map(len, data)))
            else:
                # Of a tensor without elements there is nothing to join.
                heads.append(start + b',"data":[' + b",".join([part for part in data if part]) + b"]}")
        named = b'"id":' + msgspec.json.encode(call_id) + b"," if call_id else b""
        head = b"{" + named + b'"inputs":[' + b",".join(heads) + b"]"
        parameters = batch[0].parameters
        if first.is_raw:
            # Last, so that it wins over what a client may have written.
            given = parameters[:-1] + b"," if len(parameters) > 2 else b"{"
            head += b',"parameters":' + given + b'"binary_data_output":true}}'
            headers = ((HEADER_LENGTH, str(len(head))),)
            return UpstreamCall(head, path, "application/octet-stream", headers, tuple(tail))
        if parameters:
            head += b',"parameters":' + parameters
        return UpstreamCall(head + b"}", path)

    def decode(self, answer: UpstreamResponse, batch: Sequence[Request], call_id: str = "") -> Sequence[Decoded]:
        """Each output cut along its first dimension."""
        parsed, tail = _parse(answer.body)
        check_id(parsed.id, call_id)
        outputs: list[OutputTensor] = []
        place = 0
        for output in parsed.outputs:
            size = output.parameters.binary_data_size if output.parameters else None
            data: Data
            if size is not None:
                data = tail[place : place + size]
                place += size
            elif output.data:
                data = bytes(output.data)
            else:
                raise ProtocolFaultError("an output has no data")
            outputs.append(OutputTensor(output.name, output.datatype, output.shape, data, size is not None))
        parts = cut_outputs(outputs, forms_of(batch))
        version = str(parsed.model_version) if parsed.model_version is not None else None
        return [Decoded(part, model_version=version) for part in parts]


def _parse(body: bytes) -> tuple[_Answer, memoryview]:
    """The JSON of an answer, and a view of the raw tensors behind it, which are as long as the JSON says."""
    end = len(body)
    try:
        parsed = _decode_answer(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        # Something behind it, or numbers that JSON does not have.
        end = _end_of_object(body)
        parsed = parse_answer(_decode_answer, nulls_for_not_a_number(body[:end]))
    sizes = [output.parameters.binary_data_size or 0 for output in parsed.outputs if output.parameters]
    if end == len(body):  # raw tensors that look like white space have been taken for it
        end -= sum(sizes)
    if min(sizes, default=0) < 0 or end < 0 or sum(sizes) != len(body) - end:
        raise ProtocolFaultError("the raw tensors are not as long as the answer says")
    check_text(body[:end])
    return parsed, memoryview(body)[end:]


def _end_of_object(body: bytes) -> int:
    """Where the JSON object at the start of `body` ends.

    The header that says so is not needed: an object ends where its brace is closed.
    """
    depth = 0
    for match in _BRACE.finditer(body):
        token = body[match.start()]
        if token == 0x7B:
            depth += 1
        elif token == 0x7D:
            depth -= 1
            if depth == 0:
                return match.end()
    return len(body)
