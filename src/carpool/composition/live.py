"""What the live page and `carpool top` show, second by second: collected while a viewer looks, here or elsewhere.

Over Redis a process with viewers says so in its heartbeats. The others then collect too, and put each of their seconds
where this one finds it. Without viewers no process collects anything.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol
from zlib import crc32

import msgspec

from carpool.broker.memory import MemoryBroker
from carpool.composition.runtime import Runtime
from carpool.core.live import BATCHES_MAX, LaneWaiting, LivePart
from carpool.core.names import Role
from carpool.core.request import Request
from carpool.core.snapshot import Snapshot
from carpool.core.timers import Every
from carpool.face.http.live import Viewers
from carpool.telemetry.live import Collector, Merger

SECOND_S = 1.0


class OtherParts(Protocol):
    """The seconds of the other processes of a fleet."""

    def publish(self, part: LivePart) -> None:
        """Let the others have this one."""

    def latest(self) -> Sequence[LivePart]:
        """The last one of each, as far as it is known, those of processes that are gone left out; asks for more."""

    def members(self) -> int:
        """How many processes share the batches that an event may have."""


class Watch:
    """Collects seconds, and shows them to the viewers."""

    def __init__(
        self,
        runtime: Runtime,
        snapshot: Callable[[], Snapshot],
        lanes: Callable[[], Sequence[LaneWaiting]],
        role: Role,
        demo: Callable[[], dict[str, object]] | None = None,
    ) -> None:
        self._runtime = runtime
        self._snapshot = snapshot
        self._lanes = lanes
        self._role = role
        self.name = "this process"
        # None: this process is alone.
        self.others: OtherParts | None = None
        # Another process of the fleet has viewers.
        self._is_wanted = False
        # What the demo adds.
        self._demo = demo
        self._tiers = [tier.name for tier in runtime.settings.tiers]
        self._max_batch = {name: model.batching.max_batch for name, model in runtime.models.items()}
        self._collector: Collector | None = None
        self._merger: Merger | None = None
        self._last = b""
        self._every = Every(SECOND_S, self._second)
        self.viewers = Viewers(self._look, self._first)
        runtime.opened.callback(self._stop)

    @property
    def is_looked_at(self) -> bool:
        """Whether this process has viewers."""
        return len(self.viewers) > 0

    def find_slow(self, request_id: str) -> Request | None:
        """One of the slow requests that viewers were shown."""
        return None if self._collector is None else self._collector.find_slow(request_id)

    def want(self, is_wanted: bool) -> None:
        """Whether another process of the fleet has viewers."""
        if is_wanted != self._is_wanted:
            self._is_wanted = is_wanted
            self._look()

    def _look(self) -> None:
        """A viewer came or went."""
        if not self.is_looked_at:
            self._merger, self._last = None, b""
        elif self._merger is None:
            self._merger = Merger(self._tiers, self._max_batch)
        if not self.is_looked_at and not self._is_wanted:
            self._stop()
        elif self._collector is None:
            self._collector = Collector(self._tiers, self._runtime.clock())
            self._cut(self._collector)  # what was shed is counted from here on
            self._runtime.events.subscribe(self._collector)
            self._every.start()

    def _stop(self) -> None:
        self._every.stop()
        if self._collector is not None:
            self._runtime.events.unsubscribe(self._collector)
            self._collector = None

    def _first(self) -> bytes:
        """What a new viewer sees first: the last event, or the numbers of the moment."""
        if not self._last and self._merger is not None:
            self._last = self._encode(self._merger, [])
        return self._last

    def _second(self) -> None:
        if self._collector is None:
            return
        part = self._cut(self._collector)
        if self._is_wanted and self.others is not None:
            self.others.publish(part)
        if self._merger is not None:
            others = [] if self.others is None else self.others.latest()
            self._last = self._encode(self._merger, [part, *(each for each in others if each.name != part.name)])
            self.viewers.show(self._last)

    def _cut(self, collector: Collector) -> LivePart:
        batches_max = BATCHES_MAX if self.others is None else max(1, BATCHES_MAX // self.others.members())
        now = self._runtime.clock()
        return collector.cut(self.name, self._role, self._snapshot(), self._lanes(), now, batches_max)

    def _encode(self, merger: Merger, parts: Sequence[LivePart]) -> bytes:
        event = merger.event(self._snapshot(), parts, round(time.time(), 3), len(self.viewers))
        if self._demo is not None:
            event = msgspec.structs.replace(event, demo=self._demo())
        return msgspec.json.encode(event)


def lanes_of(broker: MemoryBroker, models: Iterable[str]) -> list[LaneWaiting]:
    """The lanes of a broker, the longest first. Their parameters are not shown."""
    found = [
        LaneWaiting(model, f"{crc32(lane.key):08x}" if lane.key else "", lane.waiting)
        for model in models
        for lane in broker.lanes(model)
    ]
    return sorted(found, key=lambda lane: -lane.waiting)
