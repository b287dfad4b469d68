"""How many GPUs, gateways and batchers a load needs, and how much Redis, bandwidth, storage and money. Pure.

1. Every figure comes with a line of arithmetic, so that a reader can check it.
2. Figures are exact fractions of what was typed until they are told: what 7 GPUs carry to the last request never takes
   8 because of how floats are rounded.
3. What gateways, batchers and Redis carry was measured: the constants below say where.
"""

from fractions import Fraction
from math import ceil

import msgspec

from carpool.core.scaling import BATCHER_RPS, GATEWAY_RPS

# One primary, as the same page plans it, headroom included: synchronous requests; tasks, 10,000/s of them on five.
REDIS_RPS, REDIS_TASKS_RPS = 40_000, 2_000
# What a request that waits takes beside its input: docs/redis.md, "Bounds".
REDIS_ENTRY_KB = Fraction("0.2")
# Above this share of `maxmemory` new requests get a 429: broker/redis/fleet/memory.py.
REDIS_MEMORY_SHARE = Fraction("0.8")
# The default of `broker.total_timeout_s`: 4 s, or 1 s more than the longest call, if that is more.
TOTAL_TIMEOUT_S, BEYOND_CALL_S = 4, 1
# Commands that Carpool sends for requests of one lane and tier: an estimate, counted in its code (those in scripts are
# not among them). A request: XADD, and at most one script that tells of it. A batch: from each shard that it comes
# from, the read, the script behind it and the one that deletes; and the reply, and the gateway's read of it.
COMMANDS_A_REQUEST, COMMANDS_A_SHARD, COMMANDS_A_BATCH = 2, 3, 2
SHARDS = 16
# A GPU is bought, and is worth nothing after so many years.
WRITE_OFF_YEARS = 3
YEAR_S, MONTHS, MILLION = 365 * 24 * 3600, 12, 1_000_000
LEAST, MOST = 0.000001, 1_000_000_000
PLACES_MAX = 30

ASSUMPTIONS = (
    "Every batch is full, and a GPU takes one call at a time.",
    "Inputs and outputs have the same size; a KB is 1,000 bytes, and a GB 1,000,000 KB.",
    "Gateways, batchers and Redis carry what they did with 2 KB each way (docs/scaling.md); larger payloads cost more.",
    f"GPUs are bought, and written off over {WRITE_OFF_YEARS} years. Power, hosting, other machines and people are not "
    "in the money, which is in the currency of the prices.",
    "Over the year the usual rate is served, also by a fleet that is large enough for the peak.",
)
# The lowest and the highest value of an option, and what it is.
_BOUNDS: dict[str, tuple[float, float, str]] = {
    "rate": (LEAST, MOST, "requests a second"),
    "batch": (1, MOST, "the inputs of a call"),
    "batch_ms": (LEAST, MOST, "the milliseconds of a call"),
    "target": (LEAST, 1, "the share of their time that GPUs are to be busy, such as 0.75,"),
    "peak": (1, MOST, "the highest rate as a multiple of --rate"),
    "payload_kb": (LEAST, MOST, "the KB of an input"),
    "retention_s": (LEAST, MOST, "a time such as 10m, in seconds"),
    "gpu_price": (LEAST, MOST, "what a GPU costs to buy"),
    "storage_price": (LEAST, MOST, "what a GB costs for a month"),
}
P99_BOUNDS = LEAST, MOST, "the milliseconds by when 99 of 100 requests are to be answered"


class PlanError(ValueError):
    """An input cannot be used; the message says which one, and what to give."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be served, on which GPUs, at which prices. Raises PlanError."""

    # Requests a second.
    rate: float
    # Inputs in a call, and how long a GPU takes for it.
    batch: int
    batch_ms: float
    # The share of their time that GPUs, gateways and batchers are to be busy.
    target: float
    # The highest rate, as a multiple of `rate`.
    peak: float
    # Of an input, and of an output.
    payload_kb: float
    # How long an output is kept.
    retention_s: float
    gpu_price: float
    # Of a GB for a month.
    storage_price: float

    def __post_init__(self) -> None:
        for name, bounds in _BOUNDS.items():
            check_bounds("--" + name.removesuffix("_s").replace("_", "-"), getattr(self, name), bounds)


def check_bounds(option: str, value: float, bounds: tuple[float, float, str]) -> None:
    """Raise PlanError if an option is outside of its bounds."""
    low, high, what = bounds
    if not low <= value <= high:  # NaN is outside, too
        raise PlanError(f"{option} is {value}: give {what} from {shown(low)} to {shown(high)}")


class Line(msgspec.Struct, frozen=True):
    """A figure, and the arithmetic that it is from."""

    name: str
    says: str


class Servers(msgspec.Struct, frozen=True):
    """What works on requests. `gpus_bare`: with no headroom; the others have what the target leaves."""

    gpus_bare: int
    gpus: int
    gateways: int
    batchers: int


class Redis(msgspec.Struct, frozen=True):
    """What is between gateways and batchers; if every request is a task, that takes more."""

    primaries: int
    primaries_for_tasks: int
    memory_mb: float
    more_memory_gb_for_tasks: float
    commands_per_s: float


class Sizing(msgspec.Struct, frozen=True):
    """What one rate needs. Bandwidth is that of clients, in and as much out. Money is for what is bought for this rate,
    by the year, and by a million requests of the usual rate.
    """

    rate: float
    batches_per_s: float
    servers: Servers
    redis: Redis
    mb_per_s: float
    storage_gb: float
    money_per_year: float
    money_per_million: float
    lines: list[Line]


class Plan(msgspec.Struct, frozen=True):
    """What a workload needs, at its usual rate and at its peak."""

    workload: Workload
    rps_per_gpu: float
    usual: Sizing
    peak: Sizing
    assumptions: tuple[str, ...] = ASSUMPTIONS


def make_plan(work: Workload) -> Plan:
    """The plan for a workload."""
    usual = _Sheet(work, _exact(work.rate))
    peak = _Sheet(work, _exact(work.rate) * _exact(work.peak))
    return Plan(work, float(usual.per_gpu), _size(usual), _size(peak))


class _Sheet:
    """The exact figures of a workload at one rate, and the lines so far."""

    def __init__(self, work: Workload, rate: Fraction) -> None:
        self.work = work
        self.rate, self.target, self.payload_kb = rate, _exact(work.target), _exact(work.payload_kb)
        self.batch_s = _exact(work.batch_ms) / 1000
        self.per_gpu = work.batch / self.batch_s
        self.batches = rate / work.batch
        self.mb_per_s = rate * self.payload_kb / 1000
        self.storage_gb = self.mb_per_s * _exact(work.retention_s) / 1000
        self.lines: list[Line] = []

    def line(self, name: str, says: str) -> None:
        self.lines.append(Line(name, says))

    def needed(self, name: str, one: str, many: str, each: Fraction | int, target: Fraction | int = 1) -> int:
        """How many of a thing carry the rate, if each may be used for the target's share of what it carries."""
        wanted = self.rate / (each * target)
        count = ceil(wanted)
        carries = f"{shown(each)}/s a {one}"
        carries = carries if target == 1 else f"({carries} x {shown(target)})"
        used = shown(100 * self.rate / (each * count))
        things = f"{count:,} {one if count == 1 else many}, {used} % used"
        self.line(name, f"{shown(self.rate)}/s / {carries} = {shown(wanted)} -> {things}")
        return count


def _size(sheet: _Sheet) -> Sizing:
    rate, batch, bandwidth = shown(sheet.rate), shown(sheet.work.batch), shown(sheet.mb_per_s)
    retention, storage = shown(sheet.work.retention_s), shown(sheet.storage_gb)
    sheet.line("batches", f"{rate}/s / {batch} = {shown(sheet.batches)}/s")
    sheet.line("requests a GPU", f"{batch} / {shown(sheet.batch_s)} s = {shown(sheet.per_gpu)}/s")
    servers, redis = _servers(sheet), _redis(sheet)
    sheet.line("bandwidth", f"{rate}/s x {shown(sheet.payload_kb)} KB / 1,000 = {bandwidth} MB/s in, and as much out")
    sheet.line("storage", f"{bandwidth} MB/s x {retention} s / 1,000 = {storage} GB of outputs")
    costs = _costs(sheet, servers.gpus)
    traffic = float(sheet.mb_per_s), float(sheet.storage_gb)
    return Sizing(float(sheet.rate), float(sheet.batches), servers, redis, *traffic, *costs, sheet.lines)


def _servers(sheet: _Sheet) -> Servers:
    return Servers(
        gpus_bare=sheet.needed("GPUs, no headroom", "GPU", "GPUs", sheet.per_gpu),
        gpus=sheet.needed("GPUs, with headroom", "GPU", "GPUs", sheet.per_gpu, sheet.target),
        gateways=sheet.needed("gateways", "gateway", "gateways", GATEWAY_RPS, sheet.target),
        batchers=sheet.needed("batchers", "batcher", "batchers", BATCHER_RPS, sheet.target),
    )


def _redis(sheet: _Sheet) -> Redis:
    primaries = sheet.needed("Redis", "primary", "primaries", REDIS_RPS)
    for_tasks = sheet.needed("Redis for tasks", "primary", "primaries", REDIS_TASKS_RPS)

    rate, share, storage = shown(sheet.rate), shown(REDIS_MEMORY_SHARE), shown(sheet.storage_gb)
    held_s = max(Fraction(TOTAL_TIMEOUT_S), sheet.batch_s + BEYOND_CALL_S)
    entry_kb = sheet.payload_kb + REDIS_ENTRY_KB
    memory_mb = sheet.rate * held_s * entry_kb / 1000 / REDIS_MEMORY_SHARE
    more_gb = sheet.storage_gb / REDIS_MEMORY_SHARE
    held = f"{rate}/s x {shown(held_s)} s x {shown(entry_kb)} KB / 1,000"
    sheet.line("Redis memory", f"{held} / {share} = {shown(memory_mb)} MB")
    sheet.line("memory for tasks", f"{storage} GB of outputs / {share} = {shown(more_gb)} GB more")

    shards = min(SHARDS, sheet.work.batch)
    commands = sheet.rate * COMMANDS_A_REQUEST + sheet.batches * (COMMANDS_A_SHARD * shards + COMMANDS_A_BATCH)
    of_batches = f"{shown(sheet.batches)} batches/s x ({COMMANDS_A_SHARD} x {shards} shards + {COMMANDS_A_BATCH})"
    sheet.line("Redis commands", f"{rate}/s x {COMMANDS_A_REQUEST} + {of_batches} = {shown(commands)}/s, an estimate")
    return Redis(primaries, for_tasks, float(memory_mb), float(more_gb), float(commands))


def _costs(sheet: _Sheet, gpus: int) -> tuple[float, float]:
    gpu_price, storage_price = _exact(sheet.work.gpu_price), _exact(sheet.work.storage_price)
    for_gpus, for_storage = gpus * gpu_price / WRITE_OFF_YEARS, sheet.storage_gb * storage_price * MONTHS
    total, usual = for_gpus + for_storage, _exact(sheet.work.rate)
    of_a_million = total / (usual * YEAR_S) * MILLION
    storage, year = f"{shown(sheet.storage_gb)} GB x {shown(storage_price)}", f"{shown(usual)}/s x {YEAR_S:,} s"
    sheet.line("GPUs a year", f"{gpus:,} x {shown(gpu_price)} / {WRITE_OFF_YEARS} years = {shown(for_gpus)}")
    sheet.line("storage a year", f"{storage} x {MONTHS} months = {shown(for_storage)}")
    sheet.line("money a year", f"{shown(for_gpus)} + {shown(for_storage)} = {shown(total)}")
    sheet.line("a million requests", f"{shown(total)} / ({year}) x {MILLION:,} = {shown(of_a_million)}")
    return float(total), float(of_a_million)


def shown(value: Fraction | float) -> str:
    """A number for a line: within a thousandth, and a whole number only if it is one."""
    exact = _exact(value)
    if exact.denominator == 1:
        return f"{exact.numerator:,}"
    for places in range(2, PLACES_MAX + 1):
        scale = 10**places
        digits = round(exact * scale)
        if digits % scale and abs(Fraction(digits, scale) - exact) <= exact / 1000:
            return f"{digits // scale:,}.{digits % scale:0{places}}".rstrip("0")
    return f"{float(exact):.3g}"


def _exact(value: Fraction | float) -> Fraction:
    """The number as it was typed: 0.7 is seven tenths."""
    return value if isinstance(value, Fraction) else Fraction(repr(value))
