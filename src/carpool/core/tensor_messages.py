"""What requests and responses of KServe V2 over gRPC have in common: typed contents and parameters. Pure."""

from collections.abc import Iterator
from itertools import pairwise

from carpool.core.protobuf import (
    BadMessageError,
    Message,
    Value,
    as_bytes,
    as_message,
    as_number,
    as_text,
    double_field,
    field,
    fields,
    number_field,
    numbers_in,
    read_double,
    varint,
)
from carpool.core.tensors import Data, element_starts, length_of, pack, unpack

Parameter = bool | int | float | str

# InferTensorContents: the field of a datatype. FP16 and BF16 have none.
CONTENTS_FIELD = {
    "BOOL": 1,
    **dict.fromkeys(("INT8", "INT16", "INT32"), 2),
    "INT64": 3,
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), 4),
    "UINT64": 5,
    "FP32": 6,
    "FP64": 7,
    "BYTES": 8,
}
# InferParameter
_BOOL, _INT64, _STRING, _FP64, _UINT64 = 1, 2, 3, 4, 5
_64_BITS = 0xFFFF_FFFF_FFFF_FFFF


def raw_of_contents(contents: Message, datatype: str, most: int = 0) -> Iterator[bytes]:
    """The elements of an InferTensorContents in raw form, some at a time.

    Raises BadMessageError, also for more than `most` fields, and struct.error for a number that does not fit.
    """
    wanted = CONTENTS_FIELD.get(datatype)
    is_unsigned = datatype.startswith("UINT")
    for number, value in fields(contents, most):
        if number != wanted:
            continue
        if datatype in ("FP32", "FP64"):  # packed, that is the raw form; one by one, it is their concatenation
            yield as_bytes(value)
        elif datatype == "BYTES":
            element = as_bytes(value)
            yield length_of(element) + element
        else:
            for numbers in numbers_in(value):
                yield pack([each & _64_BITS for each in numbers] if is_unsigned else numbers, datatype)


def contents_of_raw(data: Data, datatype: str) -> bytes:
    """A part of an InferTensorContents with these elements; BYTES need not be UTF-8."""
    wanted = CONTENTS_FIELD[datatype]
    if datatype in ("FP32", "FP64"):
        return field(wanted, bytes(data))
    if datatype == "BYTES":
        view, starts = memoryview(data), element_starts(data)
        return b"".join([field(wanted, bytes(view[start + 4 : end])) for start, end in pairwise(starts)])
    return field(wanted, b"".join([varint(each) for each in unpack(data, datatype)]))


def write_parameter(value: Parameter) -> bytes:
    """An InferParameter."""
    if isinstance(value, bool):
        return number_field(_BOOL, value)
    if isinstance(value, int):
        return number_field(_INT64, value)
    if isinstance(value, float):
        return double_field(_FP64, value)
    return field(_STRING, value.encode())


def read_parameter(entry: Value, most: int = 8) -> tuple[str, Parameter]:
    """A name and a value: an entry of a map of InferParameters; raises BadMessageError."""
    name, value = "", None
    for number, part in fields(as_message(entry), most):
        if number == 1:
            name = as_text(part)
        elif number == 2:
            value = _read_value(as_message(part), most)
    if value is None:
        raise BadMessageError("a parameter has no value")
    return name, value


def _read_value(message: Message, most: int) -> Parameter | None:
    value: Parameter | None = None
    for number, part in fields(message, most):
        if number == _BOOL:
            value = bool(as_number(part))
        elif number == _INT64:
            value = as_number(part)
        elif number == _STRING:
            value = as_text(part)
        elif number == _FP64:
            value = read_double(part)
        elif number == _UINT64:
            value = as_number(part) & _64_BITS
    return value
