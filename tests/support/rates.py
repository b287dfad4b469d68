"""Rate limits for tests: what scripts/rates.lua does, in Python; a budget on virtual time; and how much came in."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from math import floor

from carpool.core.errors import CarpoolError
from carpool.core.ports import Caller, LimitVerdict, RateAsk, RateLimit, RateLimits, RateTold

TICKS_A_SECOND = 8_000_000
DEBT_MAX = 65536
KEPT_S = 3.0


class BucketModel:
    """One owner's hash, and what the script makes of it."""

    def __init__(self) -> None:
        self.full = 0
        # How full a call that borrowed made it.
        self.debt = 0
        # By gateway: how many are leased, until when.
        self.leases: dict[str, tuple[int, int]] = {}

    def step(self, gateway: str, ask: RateAsk, now: int) -> RateTold:
        """As the script does; `now` in its own ticks."""
        interval = -(-60 * TICKS_A_SECOND // ask.per_minute)
        kept_for = floor(KEPT_S * TICKS_A_SECOND)
        full, charge = max(now, self.full), 0
        for name, (count, ends) in list(self.leases.items()):
            if not now < ends <= now + kept_for:
                charge += count
                del self.leases[name]
        others = sum(count for name, (count, _) in self.leases.items() if name != gateway)
        lease, _ = self.leases.pop(gateway, (0, 0))
        is_kept, kept = bool(lease) and ask.used is not None, 0
        if is_kept and ask.used is not None:
            used = min(ask.used, lease)
            kept = min(ask.kept, lease - used)
            charge += used
        else:
            charge += lease
        all_of_it = now + ask.capacity * interval
        if not all_of_it < self.debt <= all_of_it + DEBT_MAX * interval:
            self.debt = 0
        full = min(full + charge * interval, (self.debt or all_of_it) + ask.leased_max * interval)
        there, granted = (all_of_it - full) // interval, 0
        if there >= ask.fit:
            granted = min(ask.need, max(1, there // ask.cost))
        full += granted * ask.cost * interval
        if granted * ask.cost > there:
            self.debt = full
        leased = 0
        if granted == ask.need:
            free = (now + ask.capacity * interval - full) // interval
            leased = max(0, min(ask.want, min(ask.leased_max, free) - others - kept))
        if kept + leased:
            self.leases[gateway] = (kept + leased, now + kept_for)
        self.full = full
        return RateTold(granted, leased, is_kept, (full - now) / TICKS_A_SECOND)


class BudgetModel:
    """A budget that all gateways of a test reach over ways that take their time, or lose what is sent."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.buckets: dict[str, BucketModel] = {}
        self.asked = 0

    def way(self, gateway: str, delays: Callable[[], tuple[float, float, str]]) -> "WayToBudget":
        """How a gateway reaches it; `delays`: seconds there and back, and which of both loses it ("", there, back)."""
        return WayToBudget(self, gateway, delays)

    def step(self, gateway: str, ask: RateAsk) -> RateTold:
        self.asked += 1
        bucket = self.buckets.setdefault(ask.owner, BucketModel())
        return bucket.step(gateway, ask, floor(self._clock() * TICKS_A_SECOND))


class WayToBudget:
    """A connection: what is sent first arrives first (core.ports.RateBudget)."""

    def __init__(self, budget: BudgetModel, gateway: str, delays: Callable[[], tuple[float, float, str]]) -> None:
        self._budget = budget
        self._gateway = gateway
        self._delays = delays
        self._last = 0.0

    def ask(self, asks: Sequence[RateAsk], told: Callable[[str, RateTold | None], None]) -> None:
        loop = asyncio.get_running_loop()
        there_s, back_s, lost = self._delays()
        self._last = arrives = max(self._last, loop.time() + there_s)

        def arrived() -> None:
            answers = [None if lost == "there" else self._budget.step(self._gateway, ask) for ask in asks]
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
        entry = limits.enter(caller) if cost == 1 else limits.enter_many(caller, cost)
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
