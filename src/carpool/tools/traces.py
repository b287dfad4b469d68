"""What was recorded and is simulated: requests that came to a gateway, or that `carpool bench` sent; what calls took.

1. A trace is one of: `tracking.db`; what `carpool requests --json` printed; the report of `carpool bench --json`, from
   which the same requests are made again; lines of JSON such as `carpool bench --answers` writes: `due_s`, and `tier`,
   `owner`, `bytes` where they are known.
2. Rows of tracking are those of requests that got an outcome: who was refused is not among them. Requests of other
   models, and those that were answered with a kept result, are left out.
"""

import sqlite3
from array import array
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType

from carpool.core.snapshot import CallCost
from carpool.tools.bench.run import BadOption
from carpool.tools.bench.tally import SentLoad
from carpool.upstream.simulated import SimulationSettings

ROWS_MAX, BYTES_MAX = 5_000_000, 1 << 30
SQLITE = b"SQLite format 3\0"
ROWS_OF_MODEL = (
    "SELECT created_at / 1e6, tier, owner, 0 FROM carpool_requests WHERE model = ? AND NOT cached ORDER BY created_at"
)


class Row(NamedTuple):
    """One request. "" and 0: not known."""

    at_s: float
    tier: str
    owner: str
    bytes: int


class Rows:
    """Requests in the order in which they came, the first at 0. A million of them are some 20 MB."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.times = array("d")
        self.sizes = array("L")
        tiers: dict[str, int] = {}
        owners: dict[str, int] = {}
        self.picks = array("L"), array("L")
        for at_s, tier, owner, size in rows:
            self.times.append(at_s)
            self.sizes.append(size)
            self.picks[0].append(tiers.setdefault(tier, len(tiers)))
            self.picks[1].append(owners.setdefault(owner, len(owners)))
        if not self.times:
            raise BadOption("no request is in it")
        if len(self.times) > ROWS_MAX:
            raise BadOption(f"it has more than {ROWS_MAX:,} requests; give a part of it")
        self.tiers, self.owners = list(tiers), list(owners)
        self.began_s = self.times[0]
        self.seconds = self.times[-1] - self.began_s


class _Line(msgspec.Struct):
    due_s: float
    tier: str = ""
    owner: str = ""
    bytes: int = 0


class _Record(msgspec.Struct):
    created_at: datetime
    tier: str
    owner: str
    model: str
    cached: bool


class _Whole(msgspec.Struct):
    """Either of the two, which are one JSON object."""

    load: SentLoad | None = None
    requests: list[_Record] | None = None


def read_trace(path: Path, model: str) -> Rows | SentLoad:
    """What came, of this model where a trace tells; raises BadOption."""
    try:
        with path.open("rb") as file:
            if file.read(len(SQLITE)) == SQLITE:
                return Rows(islice(_rows_of_database(path, model), ROWS_MAX + 1))
            file.seek(0)
            text = file.read(BYTES_MAX + 1)
    except (OSError, sqlite3.Error) as fault:
        raise BadOption(f"{path} cannot be read: {getattr(fault, 'strerror', None) or fault}") from None
    if len(text) > BYTES_MAX:
        raise BadOption(f"{path} is over {BYTES_MAX >> 20} MiB; give a part of it")
    return _parse(text, path, model)


def _parse(text: bytes, path: Path, model: str) -> Rows | SentLoad:
    try:
        return Rows(Row(each.due_s, each.tier, each.owner, each.bytes) for each in _lines(text))
    except msgspec.DecodeError as not_lines:
        try:
            whole = msgspec.json.decode(text, type=_Whole)
        except msgspec.DecodeError:
            whole = _Whole()
        if whole.load is not None:
            return whole.load
        if whole.requests is None:
            raise BadOption(
                f"{path} is neither tracking.db, nor what `carpool requests --json` or `carpool bench --json` give, "
                f"nor lines with `due_s`: {not_lines}"
            ) from None
    came = [each for each in whole.requests if each.model == model and not each.cached]
    return Rows(sorted(Row(each.created_at.timestamp(), each.tier, each.owner, 0) for each in came))


def _lines(text: bytes) -> list[_Line]:
    lines = msgspec.json.Decoder(_Line).decode_lines(text)
    return sorted(lines, key=lambda line: line.due_s)


def _rows_of_database(path: Path, model: str) -> Iterator[Row]:
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        yield from map(Row._make, connection.execute(ROWS_OF_MODEL, (model,)))
    finally:
        connection.close()


class _Model(msgspec.Struct):
    slots: int
    endpoints: list[Raw]
    cost: CallCost | UnsetType = UNSET


class _Fleet(msgspec.Struct):
    """What is used of `core.snapshot.FleetState`, of whatever version."""

    models: dict[str, _Model]


def read_costs(path: Path, model: str, gpu: SimulationSettings) -> tuple[SimulationSettings, int]:
    """A GPU that takes as long as a fleet's calls do, and how many there are; raises BadOption.

    The file is what `/internal/fleet` says. What else a GPU does is as `gpu` has it.
    """
    try:
        fleet = msgspec.json.decode(path.read_bytes(), type=_Fleet)
    except (OSError, msgspec.DecodeError) as fault:
        why = getattr(fault, "strerror", None) or fault
        raise BadOption(f"{path} is not what /internal/fleet says: {why}") from None
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
