"""What was recorded and is simulated: requests that came to a gateway, or that `carpool bench` sent; what calls took.

1. A trace is one of: `tracking.db`; what `carpool requests --json` printed; the report of `carpool bench --json`, from
   which the same requests are made again; lines of JSON such as `carpool bench --answers` writes: `due_s`, and `tier`,
   `owner`, `bytes` where they are known.
2. Rows of tracking are those of requests that got an outcome: who was refused is not among them. Requests of other
   models, and those that were answered with a kept result, are left out.
3. Files may come from anybody: each value has bounds, in the structs here and in `SentLoad`; what does not keep them,
   and a file with too many requests, is a BadOption that says where. No file names another that is then opened.
"""

import sqlite3
from array import array
from collections.abc import Iterable, Iterator
from contextlib import closing
from datetime import datetime
from io import BytesIO
from itertools import pairwise
from operator import le
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from carpool.tools.bench.run import BadOption
from carpool.tools.bench.tally import INPUT_BYTES_MAX, SentLoad, Text
from carpool.upstream.simulated import Milliseconds, SimulationSettings

ROWS_MAX, BYTES_MAX = 5_000_000, 1 << 30
# What a gateway says of its fleet; and what a report says of its load.
FLEET_BYTES_MAX, LOAD_BYTES_MAX = 16 << 20, 1 << 20
NULL = Raw(b"null")
SQLITE = b"SQLite format 3\0"
# One more than may be tells that there are too many. They are counted before they are sorted.
ROWS_OF_MODEL = (
    "SELECT * FROM (SELECT created_at, tier, owner FROM carpool_requests WHERE model = ? AND NOT cached "
    f"LIMIT {ROWS_MAX + 1}) ORDER BY created_at"
)
TOO_MANY = f"it has more than {ROWS_MAX:,} requests; give a part of it"

Decoded = TypeVar("Decoded")


class Row(NamedTuple):
    """One request. "" and 0: not known."""

    at_s: float
    tier: str
    owner: str
    bytes: int


class Rows:
    """Requests in the order in which they came, the first at 0. A million of them are some 20 MB."""

    def __init__(self, rows: Iterable[Row]) -> None:
        times, sizes = array("d"), array("L")
        tiers: dict[str, int] = {}
        owners: dict[str, int] = {}
        picks = [array("L"), array("L")]
        for at_s, tier, owner, size in rows:
            times.append(at_s)
            sizes.append(size)
            picks[0].append(tiers.setdefault(tier, len(tiers)))
            picks[1].append(owners.setdefault(owner, len(owners)))
            if len(times) > ROWS_MAX:
                raise BadOption(TOO_MANY)
        if not times:
            raise BadOption("no request is in it")
        if not all(le(*two) for two in pairwise(times)):
            order = sorted(range(len(times)), key=times.__getitem__)
            times = array("d", map(times.__getitem__, order))
            sizes, *picks = (array("L", map(each.__getitem__, order)) for each in (sizes, *picks))
        self.times, self.sizes, self.picks = times, sizes, picks
        self.tiers, self.owners = list(tiers), list(owners)
        self.began_s = self.times[0]
        self.seconds = self.times[-1] - self.began_s


class _Line(msgspec.Struct, gc=False):
    due_s: Annotated[float, Meta(ge=-1e12, le=1e12)]
    tier: Text = ""
    owner: Text = ""
    bytes: Annotated[int, Meta(ge=0, le=INPUT_BYTES_MAX)] = 0


class _Record(msgspec.Struct, gc=False):
    created_at: Annotated[datetime, Meta(tz=True)]
    tier: Text
    owner: Text
    model: str
    cached: bool


class _Tracked(msgspec.Struct, gc=False):
    # In microseconds.
    created_at: Annotated[int, Meta(ge=0, le=10**18)]
    tier: Text
    owner: Text


class _Whole(msgspec.Struct):
    """Either of the two, which are one JSON object."""

    load: Raw = NULL
    requests: Raw = NULL


def read_trace(path: Path, model: str) -> Rows | SentLoad:
    """What came, of this model where a trace tells; raises BadOption."""
    text = _read(path, BYTES_MAX, but_not=SQLITE)
    return _parse(text, path, model) if text is not None else Rows(_rows_of_database(path, model))


def _read(path: Path, bytes_max: int, but_not: bytes = b"\0") -> bytes | None:
    """What a file holds; None if it begins with `but_not`."""
    try:
        with path.open("rb") as file:
            if (begin := file.read(len(but_not))) == but_not:
                return None
            text = begin + file.read(bytes_max)
    except OSError as fault:
        raise BadOption(f"{path} cannot be read: {fault.strerror or fault}") from None
    if len(text) > bytes_max:
        raise BadOption(f"{path} is over {bytes_max >> 20} MiB; give a part of it")
    return text


def _decode(text: bytes | Raw, kind: type[Decoded], where: str) -> Decoded:
    """This JSON, in the bounds of its kind; raises BadOption, which says where it is not."""
    try:
        return msgspec.json.decode(text, type=kind)
    # It gives these two as they come: for bytes that are no text, and for lists in lists in lists.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise BadOption(f"{where}: {fault}") from None


def _parse(text: bytes, path: Path, model: str) -> Rows | SentLoad:
    """The first line says what it is."""
    first = BytesIO(text.lstrip()).readline()
    try:
        _decode(first or b'{"due_s":0}', _Line, "line 1")
    except BadOption as no_line:
        # Each request is an object, and has no other in it.
        if text.count(b"{") > ROWS_MAX + 1:
            raise BadOption(TOO_MANY) from None
        try:
            whole = _decode(text, _Whole, "")
        except BadOption:
            whole = _Whole()
        if whole.load != NULL:
            return _sent_load(whole.load, path)
        if whole.requests != NULL:
            return _recorded_rows(whole.requests, path, model)
        raise BadOption(
            f"{path} is neither tracking.db, nor what `carpool requests --json` or `carpool bench --json` give, "
            f"nor lines with `due_s`: {no_line}"
        ) from None
    if text.count(b"\n") > ROWS_MAX:
        raise BadOption(TOO_MANY)
    return Rows(
        Row(each.due_s, each.tier, each.owner, each.bytes)
        for number, line in enumerate(BytesIO(text), 1)
        if line.strip()
        for each in [_decode(line, _Line, f"{path}, line {number}")]
    )


def _sent_load(text: Raw, path: Path) -> SentLoad:
    if memoryview(text).nbytes > LOAD_BYTES_MAX:
        raise BadOption(f"{path}: `load` is over {LOAD_BYTES_MAX >> 20} MiB")
    return _decode(text, SentLoad, f"{path}, `load`")


def _recorded_rows(text: Raw, path: Path, model: str) -> Rows:
    came = _decode(text, list[_Record], f"{path}, `requests`")
    return Rows(
        Row(each.created_at.timestamp(), each.tier, each.owner, 0)
        for each in came
        if each.model == model and not each.cached
    )


def _rows_of_database(path: Path, model: str) -> Iterator[Row]:
    names, number = _Tracked.__struct_fields__, 0
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            for values in connection.execute(ROWS_OF_MODEL, (model,)):
                number += 1
                row = msgspec.convert(dict(zip(names, values, strict=True)), _Tracked)
                yield Row(row.created_at / 1e6, row.tier, row.owner, 0)
    except msgspec.ValidationError as fault:
        raise BadOption(f"{path}, request {number} of {model!r} by time: {fault}") from None
    except sqlite3.Error as fault:
        raise BadOption(f"{path} cannot be read: {fault}") from None


class _Cost(msgspec.Struct):
    """As `core.snapshot.CallCost`, in bounds."""

    call_ms: Milliseconds
    input_ms: Milliseconds
    kb_ms: Milliseconds
    padding_kb_ms: Milliseconds


class _Model(msgspec.Struct):
    # How many a simulation takes, it says itself.
    slots: Annotated[int, Meta(ge=0, le=1 << 31)]
    endpoints: list[Raw]
    cost: _Cost | UnsetType = UNSET


class _Fleet(msgspec.Struct):
    """What is used of `core.snapshot.FleetState`, of whatever version."""

    models: dict[str, _Model]


def read_costs(path: Path, model: str, gpu: SimulationSettings) -> tuple[SimulationSettings, int]:
    """A GPU that takes as long as a fleet's calls do, and how many there are; raises BadOption.

    The file is what `/internal/fleet` says. What else a GPU does is as `gpu` has it.
    """
    text = _read(path, FLEET_BYTES_MAX)
    fleet = _decode(text or b"", _Fleet, f"{path} is not what /internal/fleet says")
    if (state := fleet.models.get(model)) is None:
        raise BadOption(f"{path} has no model {model!r}; it has {', '.join(fleet.models) or 'none'}")
    if (cost := state.cost) is UNSET:
        raise BadOption(f"{path} has no `cost` of {model!r}: ask the gateway again when some calls have ended")
    # Inputs and padding together are what a batch padded to its largest has: a KB of inputs costs `kb_ms` in all.
    learned = msgspec.structs.replace(
        gpu,
        latency_ms=cost.call_ms,
        per_item_ms=cost.input_ms,
        per_kb_ms=cost.kb_ms - cost.padding_kb_ms,
        padded_ms_per_kb=cost.padding_kb_ms,
        slots=max(1, round(state.slots / max(1, len(state.endpoints)))),
    )
    return learned, max(1, len(state.endpoints))
