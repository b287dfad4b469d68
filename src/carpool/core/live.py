"""What the live page and `carpool top` get each second, in types. Never inputs, parameters, owners or credentials.

Each process cuts its last second into a `LivePart`; over Redis the process that serves the page adds up those of all.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from carpool.core.snapshot import FleetState, Health, Scale

# Batches in one event, those under way included.
BATCHES_MAX = 500
# Requests in one event that took longest, and lanes in which most wait.
SLOW_MAX = 5
# For so long a page shows slow requests, and their details can be asked for.
SLOW_KEPT_S = 60
LANES_MAX = 8
# Buckets for each doubling of a latency: a quantile is at most 9 % too large.
STEPS_A_DOUBLING = 8

Text = Annotated[str, Meta(max_length=256)]
Few = Meta(max_length=64)


class LiveBatch(msgspec.Struct, frozen=True, array_like=True):
    """One call of a batch. Times are seconds on the clock of its process; `ended` is 0 while it is under way."""

    id: Text
    model: Text
    endpoint: Text
    size: int
    sent: float
    ended: float
    # `ok`, or the code of an error; "" while it is under way.
    result: Text
    # Why it left, and which attempt this is.
    reason: Text
    attempt: int
    # Its requests by tier.
    tiers: Annotated[tuple[int, ...], Few] = ()


class LiveTier(msgspec.Struct, frozen=True, array_like=True):
    """One tier in a second: what came in, was refused because it would have waited too long, and got its outcome."""

    admitted: int = 0
    shed: int = 0
    answered: int = 0
    failed: int = 0


class SlowRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that took long, with where its time went."""

    id: Text
    model: Text
    tier: int
    # `ok`, or the code of an error.
    result: Text
    total_ms: float
    # For a slot; then earlier attempts and their pauses; then the call that was answered.
    queue_ms: float
    retry_ms: float = 0.0
    call_ms: float = 0.0
    endpoint: Text = ""
    attempts: int = 0
    batch: Text = ""
    batch_size: int = 0


class LaneWaiting(msgspec.Struct, frozen=True, array_like=True):
    """A lane in which requests wait: its model, a short name that says nothing of its parameters, how many."""

    model: Text
    lane: Text
    waiting: int


class LivePart(msgspec.Struct, frozen=True, kw_only=True):
    """The last second of one process."""

    name: Text
    role: Text
    # Grows with each part of a process.
    number: int
    # When it was cut, on the clock of the process, and how long it is.
    at: float
    seconds: float
    tiers: Annotated[tuple[LiveTier, ...], Few]
    # By tier: how many took how long; a latency of n ms counts at STEPS_A_DOUBLING x log2(n).
    latencies: Annotated[tuple[dict[int, int], ...], Few]
    batches: Annotated[tuple[LiveBatch, ...], Meta(max_length=BATCHES_MAX)]
    # How many there were, and requests in them.
    batches_ended: int
    slow: Annotated[tuple[SlowRequest, ...], Meta(max_length=SLOW_MAX)] = ()
    lanes: Annotated[tuple[LaneWaiting, ...], Meta(max_length=LANES_MAX)] = ()
    # `carpool_requests_total` and `carpool_problems_total`, since this process started.
    requests: Annotated[dict[Text, int], Few] = {}
    problems: Annotated[dict[Text, int], Few] = {}


class LiveRates(msgspec.Struct, frozen=True, kw_only=True):
    """One tier: requests a second in the last second, and latencies of the last ten."""

    name: str
    offered: float
    admitted: float
    shed: float
    answered: float
    failed: float
    # At this moment, for a slot; over Redis for a batcher.
    waiting: int
    # Of synchronous requests that were answered; None: there were none.
    p50_ms: float | None
    p99_ms: float | None


class LiveProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process whose second is in an event."""

    name: str
    role: str
    at: float


class LiveEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A second of this process, or of the whole fleet."""

    # Unix time.
    at: float
    # 0: the numbers of the moment alone; the first second is not over.
    seconds: float
    health: Health
    fleet: FleetState
    scale: Scale
    # The most requests in a batch, by model.
    max_batch: Mapping[str, int]
    tiers: Sequence[LiveRates]
    # Of all tiers together.
    p50_ms: float | None
    p99_ms: float | None
    processes: Sequence[LiveProcess]
    # Each with the place of its process before it.
    batches: Sequence[tuple[int, LiveBatch]]
    batches_ended: int
    slow: Sequence[SlowRequest]
    lanes: Sequence[LaneWaiting]
    # Since the processes started.
    requests: Mapping[str, int]
    problems: Mapping[str, int]
    dead_letters: int
    viewers: int
    # What the demo's panel shows; there is none elsewhere.
    demo: Mapping[str, object] | UnsetType = UNSET
