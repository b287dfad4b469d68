"""What requests and responses of KServe V2 over gRPC have in common: typed contents and parameters. Pure."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from carpool.core.messages import inference
from carpool.core.protobuf import cut_out, field
from carpool.core.tensors import Data, element_starts, length_of, pack, unpack

Parameter = bool | int | float | str

# The field of an InferTensorContents that has the elements of a datatype. FP16 and BF16 have none.
CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
# The numbers of these two: packed, as protobuf serializes them, their elements have the raw form already.
_FLOATS = {
    "FP32": inference.InferTensorContents.FP32_CONTENTS_FIELD_NUMBER,
    "FP64": inference.InferTensorContents.FP64_CONTENTS_FIELD_NUMBER,
}
# As objects of Python all elements of a tensor would be much larger.
ELEMENTS_AT_ONCE = 16384
# Of contents that protobuf has written: one for each datatype, but texts have one each.
FIELDS_MAX = 16
_LENGTH_BYTES = len(length_of(b""))


def raw_of_contents(contents: Any, datatype: str) -> Iterator[bytes]:
    """The elements of an InferTensorContents in raw form, some at a time; raises struct.error, or BadMessageError."""
    if datatype in _FLOATS:
        for _, view in cut_out(contents.SerializeToString(), (_FLOATS[datatype],), FIELDS_MAX)[1]:
            yield bytes(view)
        return
    elements = getattr(contents, CONTENTS[datatype]) if datatype in CONTENTS else ()
    for start in range(0, len(elements), ELEMENTS_AT_ONCE):
        yield pack(elements[start : start + ELEMENTS_AT_ONCE], datatype)


def add_elements(contents: Any, data: Data, datatype: str) -> None:
    """Add raw elements to an InferTensorContents; BYTES need not be UTF-8."""
    elements = getattr(contents, CONTENTS[datatype])
    if datatype in _FLOATS:
        contents.MergeFromString(field(_FLOATS[datatype], bytes(data)))
    elif datatype == "BYTES":
        view = memoryview(data)
        elements.extend([bytes(view[start + _LENGTH_BYTES : end]) for start, end in pairwise(element_starts(view))])
    else:
        elements.extend(unpack(data, datatype))


def parameter_of(value: Parameter) -> Any:
    """An InferParameter."""
    if isinstance(value, bool):
        return inference.InferParameter(bool_param=value)
    if isinstance(value, int):
        return inference.InferParameter(int64_param=value)
    if isinstance(value, float):
        return inference.InferParameter(double_param=value)
    return inference.InferParameter(string_param=value)


def value_of(parameter: Any) -> Parameter | None:
    """What an InferParameter has; None if that is nothing."""
    kind = parameter.WhichOneof("parameter_choice")
    value: Parameter | None = None if kind is None else getattr(parameter, kind)
    return value
