"""KServe V2 over HTTP, as JSON and with the binary tensor extension: bodies to rows, outputs to bodies. Pure.

With the extension a body is JSON of `Inference-Header-Content-Length` bytes, and behind it the raw tensors in their
order, each of `binary_data_size` bytes. What a client writes is parsed piece by piece, each with a bound: a short
text must not become many objects.
"""

from collections.abc import Generator, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Raw

from carpool.core.errors import Malformed
from carpool.core.finite import finite_float
from carpool.core.tensors import DIMENSIONS_MAX, Data
from carpool.face.http.strict_json import json_fault
from carpool.face.http.wire import PARAMETERS_BYTES_MAX, body_fault, canonical_parameters
from carpool.face.tensor_rows import TENSORS_MAX, GivenTensor, OutputRows, split_rows

HEADER_LENGTH = b"inference-header-content-length"
ID_CHARS_MAX = 256
# A shape, and the outputs that are asked for, are no longer.
SHAPE_BYTES_MAX = 32 * DIMENSIONS_MAX
OUTPUTS_BYTES_MAX = 64 * 1024
TIMEOUT_US_MAX = 10**12

# Of the request's parameters, those that the gateway itself looks at; and what makes no sense for a row among others.
BINARY_OUTPUT, TIMEOUT = "binary_data_output", "timeout"
OF_SEQUENCES = ("sequence_id", "sequence_start", "sequence_end")
_BINARY_SIZE, _BINARY, _CLASSES, _SHARED = "binary_data_size", "binary_data", "classification", "shared_memory_region"


class _Head(msgspec.Struct):
    inputs: Raw
    id: str | None = None
    parameters: Raw = Raw()
    outputs: Raw = Raw()


class _Input(msgspec.Struct):
    name: str
    datatype: str
    shape: Raw
    parameters: Raw = Raw()
    data: Raw = Raw()

    def __post_init__(self) -> None:
        # Called for each tensor as it is read: the error stops the parser at the first one too many.
        _inputs_read.append(None)
        if len(_inputs_read) > TENSORS_MAX:
            raise ValueError(f"more than {TENSORS_MAX} tensors")


class _Wanted(msgspec.Struct):
    name: str
    parameters: Raw = Raw()


_inputs_read: list[None] = []
_decode_head = msgspec.json.Decoder(_Head).decode
_decode_inputs = msgspec.json.Decoder(list[_Input]).decode
_decode_wanted = msgspec.json.Decoder(list[_Wanted]).decode
_decode_shape = msgspec.json.Decoder(list[Annotated[int, Meta(ge=0)]]).decode
_decode_parameters = msgspec.json.Decoder(dict[str, Any], float_hook=finite_float).decode
_encode = msgspec.json.Encoder().encode


class WantedOutputs(NamedTuple):
    """What a call asks for."""

    # Each with whether it is to be raw; None: all there are.
    by_name: dict[str, bool] | None
    # Whether outputs without a `binary_data` of their own are to be raw.
    is_raw: bool


class V2Call(msgspec.Struct, frozen=True):
    """One call of `infer`."""

    # The client's own; "" if it gave none.
    id: str
    # Canonical JSON.
    parameters: bytes
    # How long the client wants to wait; None if it does not say.
    timeout_s: float | None
    # One input for each row.
    rows: list[bytes]
    wanted: WantedOutputs


def parse_call(headers: dict[bytes, bytes], body: bytes) -> V2Call:
    """Parse and check the body of a call; raises Malformed."""
    text, tail = _parts_of(headers, body)
    try:
        head = _decode_head(text)
        _inputs_read.clear()
        inputs = _decode_inputs(head.inputs)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as failure:
        hint = ""
        if b"NaN" in bytes(text) or b"Infinity" in bytes(text):
            hint = "; JSON has no NaN and no Infinity, raw tensors do"
        raise Malformed(body_fault(failure) + hint) from None
    if len(head.id or "") > ID_CHARS_MAX:
        raise Malformed(f"`id` may have {ID_CHARS_MAX} characters at most")
    parameters = _parameters(head.parameters, "parameters")
    is_raw = _flag(parameters.pop(BINARY_OUTPUT, False), BINARY_OUTPUT)
    timeout_s = timeout_s_of(parameters.pop(TIMEOUT, None))
    if any(parameters.get(name) for name in OF_SEQUENCES):
        raise Malformed("sequences are not served here: each row may ride in another batch")
    wanted = _wanted(head.outputs, is_raw)
    rows = split_rows(_tensors(inputs, tail), len(body))
    return V2Call(head.id or "", canonical_parameters(Raw(_encode(parameters))), timeout_s, rows, wanted)


def _parts_of(headers: dict[bytes, bytes], body: bytes) -> tuple[memoryview, memoryview]:
    """The JSON, and what is behind it."""
    given, view = headers.get(HEADER_LENGTH), memoryview(body)
    if given is None:
        return view, view[:0]
    if not (given.isdigit() and len(given) < 12 and int(given) <= len(body)):
        raise Malformed("`Inference-Header-Content-Length` must be the bytes of the JSON at the start of the body")
    return view[: int(given)], view[int(given) :]


def _tensors(inputs: Sequence[_Input], tail: memoryview) -> list[GivenTensor]:
    tensors: list[GivenTensor] = []
    place = 0
    for number, given in enumerate(inputs):
        which = f"inputs[{number}]"
        parameters = _parameters(given.parameters, f"{which}.parameters")
        if _SHARED in parameters:
            raise Malformed("tensors in shared memory are not served here; send their bytes")
        size = parameters.get(_BINARY_SIZE)
        text, raw = bytes(given.data), None
        if size is not None:
            if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(tail) - place:
                raise Malformed(f"`binary_data_size` of {which} is more than what is behind the JSON, or no size")
            if text:
                raise Malformed(f"{which} has both `data` and `binary_data_size`; send it once")
            raw = tail[place : place + size]
            place += size
        elif text and (fault := json_fault(text)) is not None:
            raise Malformed(f"`data` of {which} cannot be passed on: {fault}")
        tensors.append(GivenTensor(given.name, given.datatype, _shape(given.shape, which), raw, text))
    if place != len(tail):
        raise Malformed(
            f"{len(tail)} bytes are behind the JSON, but the inputs' `binary_data_size` are {place} together; "
            "`Inference-Header-Content-Length` says where the JSON ends"
        )
    return tensors


def _shape(raw: Raw, which: str) -> list[int]:
    text = bytes(raw)
    if len(text) <= SHAPE_BYTES_MAX:
        try:
            return _decode_shape(text)
        except msgspec.DecodeError:
            pass
    raise Malformed(f"the shape of {which} must be an array of at most {DIMENSIONS_MAX} whole numbers, none negative")


def _parameters(raw: Raw, which: str) -> dict[str, Any]:
    text = bytes(raw)
    if not text or text == b"null":
        return {}
    if len(text) <= PARAMETERS_BYTES_MAX:
        try:
            return _decode_parameters(text)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            pass
    raise Malformed(f"`{which}` must be an object of at most {PARAMETERS_BYTES_MAX} bytes")


def _flag(value: object, which: str) -> bool:
    if not isinstance(value, bool):
        raise Malformed(f"`{which}` must be true or false")
    return value


def timeout_s_of(value: object) -> float | None:
    """Triton's: microseconds; 0 for none."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= TIMEOUT_US_MAX:
        raise Malformed("`timeout` must be a whole number of microseconds")
    return value / 1_000_000 if value else None


def _wanted(raw: Raw, is_raw: bool) -> WantedOutputs:
    text = bytes(raw)
    if not text or text == b"null":
        return WantedOutputs(None, is_raw)
    try:
        given = _decode_wanted(text) if len(text) <= OUTPUTS_BYTES_MAX else []
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        given = []
    if not given and text != b"[]":
        raise Malformed(f"`outputs` must be an array of objects with a `name`, of at most {OUTPUTS_BYTES_MAX} bytes")
    by_name: dict[str, bool] = {}
    for number, output in enumerate(given):
        which = f"outputs[{number}].parameters"
        parameters = _parameters(output.parameters, which)
        if parameters.get(_CLASSES) or _SHARED in parameters:
            raise Malformed(f"`{which}`: classification and shared memory are not served here")
        if output.name in by_name:
            raise Malformed("two of the `outputs` that are asked for have the same name")
        by_name[output.name] = _flag(parameters.get(_BINARY, is_raw), f"{which}.{_BINARY}")
    return WantedOutputs(by_name or None, is_raw)


class V2Answer(NamedTuple):
    """The 200 of a call."""

    # To be put one behind the other.
    body: tuple[Data, ...]
    # Where the JSON in it ends; None if that is all.
    header_length: int | None


def write_answer(
    model: str, version: str | None, call_id: str, outputs: Sequence[OutputRows], wanted: WantedOutputs
) -> Generator[None, None, V2Answer]:
    """Write a 200, some of it at a time; raises Malformed for outputs that there are not, or that JSON cannot carry."""
    named: dict[str, Any] = {"model_name": model}
    if version:
        named["model_version"] = version
    if call_id:
        named["id"] = call_id
    text: list[Data] = [_encode(named)[:-1], b',"outputs":[']
    tail: list[Data] = []
    for number, (output, is_raw) in enumerate(chosen(outputs, wanted)):
        described = {"name": output.name, "datatype": output.datatype, "shape": output.shape}
        text.append((b"," if number else b"") + _encode(described)[:-1])
        size, comma = 0, b""
        if is_raw:
            for part in output.raw():
                tail.append(part)
                size += len(part)
                yield
            text.append(b',"parameters":{"binary_data_size":%d}}' % size)
            continue
        text.append(b',"data":[')
        for piece in output.text():
            text += (comma, piece)
            comma = b","
            yield
        text.append(b"]}")
    text.append(b"]}")
    is_binary = any(is_raw for _, is_raw in chosen(outputs, wanted))
    return V2Answer((*text, *tail), sum(map(len, text)) if is_binary else None)


def chosen(outputs: Sequence[OutputRows], wanted: WantedOutputs) -> list[tuple[OutputRows, bool]]:
    """The outputs that were asked for, in that order, each with whether it is to be raw."""
    if wanted.by_name is None:
        return [(output, wanted.is_raw) for output in outputs]
    there = {output.name: output for output in outputs}
    if any(name not in there for name in wanted.by_name):
        raise Malformed("one of the `outputs` that were asked for is none that the model has")
    return [(there[name], is_raw) for name, is_raw in wanted.by_name.items()]
