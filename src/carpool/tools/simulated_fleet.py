"""GPUs of a simulation that are ordered as the rules of scaling say: `carpool simulate --scale`.

1. The rules, what they go by, and how often they decide are those of a process that is alone (composition/scaling.py).
2. Who acts on the number does so at once, and damps nothing. A GPU that is ordered comes after `start_up_s`.
3. A GPU that dies for good is replaced: another one is ordered at once, and takes its place in the fleet when it comes.
4. Those that are too many go from the last one on: first those that have not come yet.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol

import msgspec

from carpool.composition.engine import Engine
from carpool.composition.scaling import Demands, Scaling, own_loads
from carpool.core import scaling
from carpool.core.scaling import PEAK_SHARE, Decisions
from carpool.tools.bench.tally import Segment
from carpool.upstream.fleet import Address, MakeEndpoint

# A fall to half takes four steps of a fifth, with a cooldown before each.
STEPS_TO_HALF = 4


class Change(msgspec.Struct, frozen=True):
    """A new number that was wanted."""

    at_s: float
    gpus_wanted: int
    gpus_there: int
    why: str


class Scaled(msgspec.Struct, frozen=True, kw_only=True):
    """What the rules of scaling made of a fleet."""

    gpus_mean: float
    gpus_most: int
    # How busy the GPUs that were there were at the moments that `is_steady` takes; None: there were none. The moments
    # in order, the lowest and the highest 5 % left out.
    steady_busy_share: float | None = None
    steady_lowest: float | None = None
    steady_highest: float | None = None
    steady_s: float = 0.0
    changes: list[Change] = []


class ScaledFleet:
    """Keeps what is decided, and has as many GPUs as that."""

    def __init__(
        self,
        engine: Engine,
        model: str,
        numbers: Sequence[int],
        start_up_s: float,
        address_of: Callable[[int], Address],
        make_endpoint: MakeEndpoint,
        # Whether the GPU with this number has died, and will not come back.
        is_lost: Callable[[int], bool],
    ) -> None:
        runtime, broker = engine.runtime, engine.broker
        self._model, self._start_up_s = model, start_up_s
        self._address_of, self._make_endpoint, self._is_lost = address_of, make_endpoint, is_lost
        self._service = next(service for service in engine.serving.services if service.name == model)
        self._clock = runtime.clock
        # By number: those that the fleet has, lost ones included; and when those come that were ordered.
        self._there = list(numbers)
        self._coming: dict[int, float] = {}
        self._last_number = max(numbers)
        self._looked_at = self._clock()
        self.decisions = Decisions()
        self.changes: list[Change] = []
        self._gpu_seconds = 0.0
        admission = engine.admission
        demands = Demands(
            runtime,
            admission.shedders,
            admission.gate.turned_away,
            sync_arrivals=broker.arrivals,
            task_arrivals=lambda _: 0,
        )
        services, settings = engine.serving.services, runtime.settings
        Scaling(runtime, lambda _: own_loads(services, demands, broker.depth_of, settings), self).start()

    @property
    def wanted(self) -> int:
        """How many there should be."""
        decision = self.decisions.models.get(self._model)
        return len(self._living()) if decision is None else decision.wanted

    @property
    def there(self) -> int:
        """How many there are that live."""
        return len(self._living())

    def now(self) -> float:
        """On the clock of the simulation."""
        return self._clock()

    def gpu_seconds(self) -> float:
        """How long all of them together were there and lived."""
        now = self._clock()
        self._gpu_seconds += self.there * (now - self._looked_at)
        self._looked_at = now
        return self._gpu_seconds

    def propose(self, decisions: Decisions | None) -> None:
        """Keep what was decided, and do it."""
        self.gpu_seconds()
        now, living, before = self._clock(), self._living(), self.wanted
        if decisions is not None:
            self.decisions = decisions
        wanted = self.wanted
        if wanted != before:
            why = self.decisions.models[self._model].why
            self.changes.append(Change(now, wanted, len(living), why))
        while len(living) + len(self._coming) < wanted:
            self._last_number += 1
            self._coming[self._last_number] = now + self._start_up_s
        while len(living) + len(self._coming) > wanted and self._coming:
            self._coming.popitem()
        staying = living[:wanted]
        came = [number for number, at in self._coming.items() if at <= now]
        if came or len(staying) < len(living):
            self._there = [*staying, *came]
            for number in came:
                del self._coming[number]
            fleet = self._service.fleet
            fleet.change_to(fleet.prepare(map(self._address_of, self._there), self._make_endpoint))

    def _living(self) -> list[int]:
        return [number for number in self._there if not self._is_lost(number)]


class Seen(Protocol):
    """The GPUs at a moment: how many were wanted and there at its end, and how busy those were since the one before."""

    @property
    def at_s(self) -> float:
        """When it was, in seconds of the time that counts."""

    @property
    def gpus_wanted(self) -> int:
        """How many there should have been."""

    @property
    def gpus_there(self) -> int:
        """How many there were."""

    @property
    def busy_share(self) -> float:
        """How busy those were."""


def steady_shares(segments: Sequence[Segment], seen: Sequence[Seen]) -> list[float]:
    """How busy GPUs were at the moments that are steady, in order.

    A moment is steady if nothing had to change any more: the rate of the schedule was the same for 20 minutes, and
    never so high in the last hour that its peak alone keeps GPUs (rule 8 of core/scaling.py), and as many were there
    as were wanted, the same number for 5 minutes.
    """
    shares = []
    for moment in seen:
        lately = [
            (each.gpus_wanted, each.gpus_there)
            for each in seen
            if moment.at_s - scaling.COOLDOWN_S < each.at_s <= moment.at_s
        ]
        is_same = len(set(lately)) == 1 and moment.gpus_wanted == moment.gpus_there
        if is_same and _is_settled(segments, moment.at_s):
            shares.append(moment.busy_share)
    return sorted(shares)


def _is_settled(segments: Sequence[Segment], at_s: float) -> bool:
    begins, spans = 0.0, []
    for segment in segments:
        spans.append((begins, begins + segment.duration_s, segment.rate))
        begins += segment.duration_s
    rate = next((rate for first, last, rate in spans if first < at_s <= last), spans[-1][2])
    # The first rate came before, too.
    spans[0] = (-inf, *spans[0][1:])

    def rates_since(since: float) -> tuple[float, float]:
        rates = [rate for first, last, rate in spans if first < at_s and last > since]
        return min(rates), max(rates)

    settled_s = STEPS_TO_HALF * scaling.COOLDOWN_S
    lowest, highest = rates_since(at_s - settled_s)
    _, peak = rates_since(at_s - scaling.PEAK_S - settled_s)
    return lowest == highest == rate and rate > PEAK_SHARE * peak
