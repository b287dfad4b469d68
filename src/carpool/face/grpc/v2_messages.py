"""The messages of `inference.GRPCInferenceService` (core/protos/inference/grpc_service.proto). Pure.

Raw contents of a request are views of its message. Typed contents are converted in parts: these functions yield
between the parts, so that their caller can let other work have a turn.
"""

import struct
from collections.abc import Generator, Mapping, Sequence
from math import isfinite
from typing import Any

import msgspec

from carpool.core.errors import Malformed
from carpool.core.messages import inference
from carpool.core.protobuf import BadMessageError, cut_out, fields, start_of_field
from carpool.core.tensor_messages import CONTENTS, Parameter, add_elements, raw_of_contents, value_of
from carpool.core.tensors import BYTES_ELEMENTS_MAX, DIMENSIONS_MAX, Data
from carpool.face.grpc.messages import malformed, parse
from carpool.face.http.state import LONG_BODY_BYTES
from carpool.face.http.v2_wire import ID_CHARS_MAX, OF_SEQUENCES, TIMEOUT, V2Call, WantedOutputs, chosen, timeout_s_of
from carpool.face.http.wire import canonical_parameters
from carpool.face.tensor_rows import TENSORS_MAX, GivenTensor, OutputRows, split_rows

# By the names of messages: their fields, which may come one by one. A request's are tensors, raw contents, outputs and
# parameters; a tensor's may be its dimensions.
FIELDS_MAX = {
    "ModelInferRequest": 4 * TENSORS_MAX,
    "InferInputTensor": 32 + DIMENSIONS_MAX,
    "InferRequestedOutputTensor": 32,
    "InferTensorContents": BYTES_ELEMENTS_MAX,
}
# More dimensions than there may be, each of as many bytes as a number may have.
SHAPE_BYTES_MAX = 11 * DIMENSIONS_MAX
_SHARED, _CLASSES = "shared_memory_region", "classification"

_RAW_INPUTS = inference.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
_RAW_OUTPUTS = inference.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER


def read_infer(message: bytes) -> Generator[None, None, tuple[Any, list[memoryview]]]:
    """A ModelInferRequest, and its raw contents apart; raises Malformed."""
    try:
        rest, raw = cut_out(message, (_RAW_INPUTS,), FIELDS_MAX["ModelInferRequest"])
        if len(rest) > LONG_BODY_BYTES:
            yield from _count_fields(memoryview(rest), inference.ModelInferRequest.DESCRIPTOR)
    except BadMessageError as fault:
        raise malformed(fault) from None
    return parse(inference.ModelInferRequest, rest), [view for _, view in raw]


def _count_fields(message: memoryview, kind: Any) -> Generator[None, None, None]:
    """Raise BadMessageError for a message that is long because it has many fields: parsed it is 40 times as large."""
    for number, content, _ in fields(message, FIELDS_MAX[kind.name]):
        known = kind.fields_by_number.get(number)
        if known is not None and content is not None:
            if known.name == "shape" and len(content) > SHAPE_BYTES_MAX:
                raise BadMessageError(f"a shape has more than {DIMENSIONS_MAX} dimensions")
            if known.message_type is not None and known.message_type.name in FIELDS_MAX:
                yield from _count_fields(content, known.message_type)
        yield


def call_of(asked: Any, raw: Sequence[memoryview], size: int) -> Generator[None, None, V2Call]:
    """The call that a message of `size` bytes is, with one input for each row; raises Malformed."""
    if len(asked.id) > ID_CHARS_MAX:
        raise Malformed(f"`id` may have {ID_CHARS_MAX} characters at most")
    if raw and len(raw) != len(asked.inputs):
        raise Malformed("`raw_input_contents` must have one entry for each of the `inputs`, or none")
    parameters = _values(asked.parameters)
    timeout_s = timeout_s_of(parameters.pop(TIMEOUT, None))
    if any(parameters.get(name) for name in OF_SEQUENCES):
        raise Malformed("sequences are not served here: each row may ride in another batch")
    if any(isinstance(value, float) and not isfinite(value) for value in parameters.values()):
        raise Malformed("a parameter is no number that can be passed on")
    canonical = canonical_parameters(msgspec.Raw(msgspec.json.encode(parameters))) if parameters else b""
    wanted: dict[str, bool] = {}
    for output in asked.outputs:
        if any(given and key.startswith((_CLASSES, _SHARED)) for key, given in _values(output.parameters).items()):
            raise Malformed("classification and shared memory are not served here")
        if output.name in wanted:
            raise Malformed("two of the `outputs` that are asked for have the same name")
        wanted[output.name] = True
    tensors: list[GivenTensor] = []
    for place, tensor in enumerate(asked.inputs):
        tensors.append((yield from _tensor(tensor, raw[place] if raw else None)))
    return V2Call(asked.id, canonical, timeout_s, split_rows(tensors, size), WantedOutputs(wanted or None, bool(raw)))


def _values(parameters: Mapping[str, Any]) -> dict[str, Parameter]:
    values: dict[str, Parameter] = {}
    for name, parameter in parameters.items():
        value = value_of(parameter)
        if value is None:
            raise Malformed("a parameter has no value")
        values[name] = value
    return values


def _tensor(tensor: Any, raw: Data | None) -> Generator[None, None, GivenTensor]:
    if any(name.startswith(_SHARED) for name in _values(tensor.parameters)):
        raise Malformed("tensors in shared memory are not served here; send their bytes")
    if raw is None:
        parts: list[bytes] = []
        try:
            for part in raw_of_contents(tensor.contents, tensor.datatype):
                parts.append(part)
                yield
        except (struct.error, BadMessageError):
            raise Malformed("a tensor has contents that its datatype cannot hold") from None
        raw = b"".join(parts)
    elif tensor.contents.ByteSize():
        raise Malformed("a tensor has both `contents` and raw contents; send it once")
    return GivenTensor(tensor.name, tensor.datatype, list(tensor.shape), raw)


def write_infer(
    model: str, version: str, call_id: str, outputs: Sequence[OutputRows], wanted: WantedOutputs
) -> Generator[None, None, bytes]:
    """A ModelInferResponse; raises Malformed for outputs that there are not.

    Raw contents are answered with such; typed ones with typed ones, where all datatypes have some.
    """
    answer = inference.ModelInferResponse(model_name=model, model_version=version, id=call_id)
    picked = [output for output, _ in chosen(outputs, wanted)]
    is_raw = wanted.is_raw or any(output.datatype not in CONTENTS for output in picked)
    tail: list[Data] = []
    for output in picked:
        described = answer.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
        content: list[Data] = []
        for part in output.raw():
            if is_raw:
                content.append(part)
            else:
                add_elements(described.contents, part, output.datatype)
            yield
        if is_raw:
            tail += (start_of_field(_RAW_OUTPUTS, sum(map(len, content))), *content)
    return b"".join((answer.SerializeToString(), *tail))
