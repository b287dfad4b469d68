"""The messages of `inference.GRPCInferenceService` (protos/inference/grpc_service.proto). Pure.

Raw contents of a request are views of its message. Typed contents are converted in parts: these functions yield
between the parts, so that their caller can let other work have a turn.
"""

import struct
from collections.abc import Generator, Mapping, Sequence
from math import isfinite
from typing import Any

import msgspec

from carpool.core.errors import Malformed
from carpool.core.protobuf import (
    BYTES,
    BadMessageError,
    Message,
    as_message,
    as_numbers,
    as_text,
    field,
    fields,
    number_field,
    tag,
    varint,
)
from carpool.core.tensor_messages import CONTENTS_FIELD, Parameter, contents_of_raw, raw_of_contents, read_parameter
from carpool.core.tensors import BYTES_ELEMENTS_MAX, DIMENSIONS_MAX, Data
from carpool.face.grpc.messages import FIELDS_MAX, malformed
from carpool.face.http.v2_wire import ID_CHARS_MAX, OF_SEQUENCES, TIMEOUT, WantedOutputs, chosen, timeout_s_of
from carpool.face.http.wire import canonical_parameters
from carpool.face.tensor_rows import TENSORS_MAX, GivenTensor, OutputRows, split_rows

# Tensors, raw contents, outputs and parameters of a call; and the fields of a tensor, whose shape may come one by one.
CALL_FIELDS_MAX = 4 * TENSORS_MAX
TENSOR_FIELDS_MAX = FIELDS_MAX + DIMENSIONS_MAX
# More dimensions than there may be, each of as many bytes as a number may have.
SHAPE_BYTES_MAX = 11 * DIMENSIONS_MAX
_SHARED, _CLASSES = "shared_memory_region", "classification"


class ModelName(msgspec.Struct):
    """Which model is meant; no version: whichever is served."""

    name: str = ""
    version: str = ""


class InferCall(msgspec.Struct):
    """A ModelInferRequest whose tensors are still undecoded."""

    model: ModelName
    id: str
    parameters: dict[str, Parameter]
    tensors: list[Message]
    raw: list[Message]
    wanted: WantedOutputs

    @property
    def is_raw(self) -> bool:
        """Raw contents are answered with such; typed ones with typed ones, where the datatypes have some."""
        return bool(self.raw)


def read_model(message: bytes) -> ModelName:
    """A ModelReadyRequest, or a ModelMetadataRequest; raises Malformed."""
    found = ModelName()
    try:
        for number, value in fields(message, FIELDS_MAX):
            if number == 1:
                found.name = as_text(value)
            elif number == 2:
                found.version = as_text(value)
    except BadMessageError as fault:
        raise malformed(fault) from None
    return found


def read_infer(message: bytes) -> InferCall:
    """A ModelInferRequest; raises Malformed."""
    call = InferCall(ModelName(), "", {}, [], [], WantedOutputs(None, True))
    wanted: dict[str, bool] = {}
    try:
        for number, value in fields(memoryview(message), CALL_FIELDS_MAX):
            if number == 1:
                call.model.name = as_text(value)
            elif number == 2:
                call.model.version = as_text(value)
            elif number == 3:
                call.id = as_text(value)
            elif number == 4:
                name, given = read_parameter(value)
                call.parameters[name] = given
            elif number == 5:
                call.tensors.append(as_message(value))
            elif number == 6:
                name = _read_wanted(as_message(value))
                if name in wanted:
                    raise Malformed("two of the `outputs` that are asked for have the same name")
                wanted[name] = True
            elif number == 7:
                call.raw.append(as_message(value))
    except BadMessageError as fault:
        raise malformed(fault) from None
    if len(call.id) > ID_CHARS_MAX:
        raise Malformed(f"`id` may have {ID_CHARS_MAX} characters at most")
    if call.raw and len(call.raw) != len(call.tensors):
        raise Malformed("`raw_input_contents` must have one entry for each of the `inputs`, or none")
    call.wanted = WantedOutputs(wanted or None, True)
    return call


def _read_wanted(message: Message) -> str:
    name = ""
    for number, value in fields(message, FIELDS_MAX):
        if number == 1:
            name = as_text(value)
        elif number == 2:
            key, given = read_parameter(value)
            if given and key.startswith((_CLASSES, _SHARED)):
                raise Malformed("classification and shared memory are not served here")
    return name


def rows_of(call: InferCall, size: int) -> Generator[None, None, list[bytes]]:
    """One input for each row of a call whose message has `size` bytes; raises Malformed."""
    tensors: list[GivenTensor] = []
    try:
        for place, message in enumerate(call.tensors):
            raw = call.raw[place] if call.raw else None
            tensors.append((yield from _read_tensor(message, raw)))
    except BadMessageError as fault:
        raise malformed(fault) from None
    except (struct.error, OverflowError):
        raise Malformed("a tensor has a number that its datatype cannot hold") from None
    return split_rows(tensors, size)


def _read_tensor(message: Message, raw: Message | None) -> Generator[None, None, GivenTensor]:
    name = datatype = ""
    shape: list[int] = []
    contents: list[Message] = []
    for number, value in fields(message, TENSOR_FIELDS_MAX):
        if number == 1:
            name = as_text(value)
        elif number == 2:
            datatype = as_text(value)
        elif number == 3:
            shape += as_numbers(value if isinstance(value, int) else value[:SHAPE_BYTES_MAX])
        elif number == 4:
            if read_parameter(value)[0].startswith(_SHARED):
                raise Malformed("tensors in shared memory are not served here; send their bytes")
        elif number == 5:
            contents.append(as_message(value))
    if raw is None:
        parts: list[bytes] = []
        for each in contents:
            for part in raw_of_contents(each, datatype, BYTES_ELEMENTS_MAX):
                parts.append(part)
                yield
        raw = b"".join(parts)
    elif any(map(len, contents)):
        raise Malformed("a tensor has both `contents` and raw contents; send it once")
    return GivenTensor(name, datatype, shape, raw)


def own_parameters(call: InferCall) -> tuple[bytes, float | None]:
    """The parameters that go on with the rows, canonical, and how long the client wants to wait; raises Malformed."""
    given = dict(call.parameters)
    timeout_s = timeout_s_of(given.pop(TIMEOUT, None))
    if any(given.get(name) for name in OF_SEQUENCES):
        raise Malformed("sequences are not served here: each row may ride in another batch")
    if any(isinstance(value, float) and not isfinite(value) for value in given.values()):
        raise Malformed("a parameter is no number that can be passed on")
    return canonical_parameters(msgspec.Raw(msgspec.json.encode(given))) if given else b"", timeout_s


def write_infer(
    model: str, version: str, call_id: str, outputs: Sequence[OutputRows], wanted: WantedOutputs, *, is_raw: bool
) -> Generator[None, None, bytes]:
    """A ModelInferResponse; raises Malformed for outputs that there are not."""
    named = field(1, model.encode())
    named += field(2, version.encode()) if version else b""
    parts: list[Data] = [named, field(3, call_id.encode())] if call_id else [named]
    picked = [output for output, _ in chosen(outputs, wanted)]
    is_raw = is_raw or any(output.datatype not in CONTENTS_FIELD for output in picked)
    tail: list[Data] = []
    for output in picked:
        described = field(1, output.name.encode()) + field(2, output.datatype.encode())
        described += field(3, b"".join(map(varint, output.shape)))
        content: list[Data] = []
        for part in output.raw():
            content.append(part if is_raw else contents_of_raw(part, output.datatype))
            yield
        size = sum(map(len, content))
        if is_raw:
            parts.append(field(5, described))
            tail += (tag(6, BYTES), varint(size), *content)
        else:
            head = described + tag(5, BYTES) + varint(size)
            parts += (tag(5, BYTES), varint(len(head) + size), head, *content)
    return b"".join((*parts, *tail))


def is_so(value: bool) -> bytes:
    """A ServerLiveResponse, ServerReadyResponse or ModelReadyResponse."""
    return number_field(1, value)


def server_metadata(name: str, version: str) -> bytes:
    """A ServerMetadataResponse."""
    return field(1, name.encode()) + field(2, version.encode())


def model_metadata(about: Mapping[str, Any]) -> bytes:
    """A ModelMetadataResponse, of what the HTTP face tells."""
    message = field(1, about["name"].encode())
    for version in about.get("versions", ()):
        message += field(2, version.encode())
    message += field(3, about["platform"].encode())
    for number, kind in ((4, "inputs"), (5, "outputs")):
        for tensor in about[kind]:
            shape = b"".join(map(varint, tensor["shape"]))
            described = field(1, tensor["name"].encode()) + field(2, tensor["datatype"].encode()) + field(3, shape)
            message += field(number, described)
    return message
