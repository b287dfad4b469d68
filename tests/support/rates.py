"""Rate limits for tests: what scripts/rates.lua does, in Python; a budget on virtual time; and how much came in."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from math import floor

from carpool.core.errors import CarpoolError
from carpool.core.ports import Caller, LimitVerdict, RateAsk, RateLimit, RateLimits, RateTold

TICKS_A_SECOND = 8_000_000


class BucketModel:
    """One owner's hash, and what the script makes of it."""

    def __init__(self) -> None:
        self.full = self.at = 0

    def step(self, ask: RateAsk, now: int) -> RateTold:
        """As the script does; `now` in its own ticks."""
        interval = -(-60 * TICKS_A_SECOND // ask.per_minute)
        ahead = max(0, self.full - max(now, self.at))
        there, granted, leased = (ask.capacity * interval - ahead) // interval, 0, 0
        if there >= min(ask.cost, ask.burst):
            granted = min(ask.need, max(1, there // ask.cost))
        if granted == ask.need:
            leased = max(0, min(ask.want, there - granted * ask.cost - ask.burst))
        ahead += (granted * ask.cost + leased) * interval
        self.full, self.at = now + ahead, now
        return RateTold(granted, leased, ahead / TICKS_A_SECOND)


class BudgetModel:
    """A budget that all gateways of a test reach over ways that take their time, or lose what is sent."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.buckets: dict[str, BucketModel] = {}
        self.asked = 0

    def way(self, delays: Callable[[], tuple[float, float, str]]) -> "WayToBudget":
        """How a gateway reaches it; `delays`: seconds there and back, and which of both loses it ("", there, back)."""
        return WayToBudget(self, delays)

    def step(self, ask: RateAsk) -> RateTold:
        self.asked += 1
        bucket = self.buckets.setdefault(ask.owner, BucketModel())
        return bucket.step(ask, floor(self._clock() * TICKS_A_SECOND))


class WayToBudget:
    """A connection: what is sent first arrives first (core.ports.RateBudget)."""

    def __init__(self, budget: BudgetModel, delays: Callable[[], tuple[float, float, str]]) -> None:
        self._budget = budget
        self._delays = delays
        self._last = 0.0

    def ask(self, asks: Sequence[RateAsk], told: Callable[[str, RateTold | None], None]) -> None:
        loop = asyncio.get_running_loop()
        there_s, back_s, lost = self._delays()
        self._last = arrives = max(self._last, loop.time() + there_s)

        def arrived() -> None:
            answers = [None if lost == "there" else self._budget.step(ask) for ask in asks]
            loop.call_later(back_s, answered, [None if lost else answer for answer in answers])

        def answered(answers: list[RateTold | None]) -> None:
            for ask, answer in zip(asks, answers, strict=True):
                told(ask.owner, answer)

        loop.call_at(arrives, arrived)


class LoadShedder:
    """Requests at gateways, and when each of them was let in or refused."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.came_in: list[float] = []
        self.refused: list[tuple[float, CarpoolError]] = []
        self.waiting = 0

    def knock(self, limits: RateLimits, caller: Caller, cost: int = 1) -> None:
        """One request, or a call that counts as so many."""
        entry = limits.enter(caller, cost)
        if entry is not None:
            self._known(entry, cost)
            return
        self.waiting += 1
        limits.when_known(caller, lambda entry: self._waited(entry, cost), cost)

    def _waited(self, entry: LimitVerdict, cost: int) -> None:
        self.waiting -= 1
        self._known(entry, cost)

    def _known(self, entry: LimitVerdict, cost: int) -> None:
        if isinstance(entry, CarpoolError):
            self.refused.append((self._clock(), entry))
        else:
            self.came_in += [self._clock()] * cost


def most_in_a_minute(times: Iterable[float]) -> int:
    """The most in any 60 s."""
    most, ordered, first = 0, sorted(times), 0
    for number, time in enumerate(ordered):
        while time - ordered[first] > 60.0:
            first += 1
        most = max(most, number - first + 1)
    return most


def limited(per_minute: int, burst: int = 1, concurrent: int = 0, owner: str = "o") -> Caller:
    """A caller with a limit."""
    return Caller(owner, 0, limit=RateLimit(per_minute, burst, concurrent))
