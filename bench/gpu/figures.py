"""What bench/gpu/drive.py writes and bench/gpu/report.py reads: a file for each section."""

import msgspec

CURVE, ONE_BY_ONE, RATE, MIXED, REDIS = SECTIONS = ("curve", "one-by-one", "rate", "mixed", "redis")
ALONE = "server alone"
SATURATION = "saturation"


class Options(msgspec.Struct, frozen=True):
    """What the command line says."""

    shapes: list[str]
    device: str
    # A folder with real ones, or "".
    weights: str
    processes: int
    slots: int
    generators: int
    gateways: int
    # Of load for each figure, in the curve, and of the long one.
    seconds: float
    curve_s: float
    long_s: float
    # So much less load, to try this on a small machine.
    scale: float


class Point(msgspec.Struct, frozen=True):
    """One size of batch, one call at a time."""

    shape: str
    text_bytes: int
    batch: int
    call_ms: float
    gpu_ms: float
    rate: float


class Row(msgspec.Struct, frozen=True):
    """What a load was answered with, and what it took."""

    shape: str
    # Who stands in front of the server; and what was sent.
    system: str
    load: str
    # Right answers a second.
    rate: float
    p50_ms: float | None
    p99_ms: float | None
    errors: int
    wrong: int
    # Of the time: a call was on its way to the GPU and back, by the server's own clock (the mean of its processes); and
    # a kernel ran, by nvidia-smi.
    busy: float
    kernels: float | None
    # Texts in a call; tokens that were computed for each one that was asked for.
    batch: float
    padding: float
    # Of a core, the busiest process of Carpool; and of those that sent the load: near 1 the rate is theirs.
    carpool_busy: float
    generator_busy: float


class Section(msgspec.Struct, frozen=True):
    """What a section writes."""

    device: str
    machine: str
    options: Options
    points: list[Point] = []
    rows: list[Row] = []
