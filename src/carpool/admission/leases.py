"""One owner's rate limit at one of several gateways: what it may let in without asking the budget that all share. Pure.

The budget is a token bucket that holds `burst` and a slack. A gateway lets requests in without asking by a lease:
tokens that it may use within 2 s. They are taken from the bucket when they are leased; unused ones are lost.

1. In any 60 s at most `per_minute` + `burst` + 10 % come in, at any number of gateways. The slack is 6 % of the limit.
   Tokens that gateways can still use were taken from the bucket within the last 2 s, and so were those of calls whose
   answer is on its way: with them there are at most as many as the bucket holds, and what came back in these 2 s
   (3.4 %).
2. An owner that keeps to `per_minute` and `burst`, as one bucket would count it, is never refused, whichever gateways
   it uses. A lease leaves `burst` tokens in the bucket. So there are never fewer than in a bucket of `burst` from which
   the same calls are taken, whatever gateways lease and lose. (The slack is also for calls that are on their way.)
3. Before a gateway refuses, it asks. When the budget has said for how long there is nothing, it does not ask again
   before: until then nothing can come back. But the budget may forget (Redis loses its data): while there is nothing
   for long, it is asked now and then all the same.
4. There is one question at a time for each owner. If its answer does not come, what it took from the bucket is lost.
5. A call of k inputs is one: it takes k tokens of the lease, or the budget is asked. There, as in limits.py, a call of
   more than `burst` needs all of the burst, and takes k: what is missing then is a debt. A question is for calls that
   count the same; others wait for the next one.
"""

from math import ceil

from carpool.admission.limits import WINDOW_S, limit_lines, over_limit
from carpool.core.errors import RateLimited
from carpool.core.ports import RateAsk, RateLimit, RateTold

LEASE_S = 2.0
SLACK_PERCENT = 6
# A lease that ends within this is renewed if it was used.
RENEW_S = 0.6
# Rule 3: it is asked again after so long, or after the time in which so many tokens come back if that is longer.
ASK_AGAIN_S, ASK_AGAIN_TOKENS = 1.0, 2
# The budget rounds the time in which a token comes back up, by so many tokens in all: rather ask once too often.
ROUNDING = 0.01
# A rate is not measured over less.
MEASURED_S_MIN = 0.05


def slack(per_minute: int) -> int:
    """How many tokens the shared bucket holds beside the burst."""
    return per_minute * SLACK_PERCENT // 100


class Lease:
    """What one gateway knows of one owner."""

    __slots__ = (
        "_asked_at",
        "_ends_at",
        "_entered",
        "_full_at",
        "_full_from",
        "_interval_s",
        "_left",
        "_next_ends_at",
        "_next_left",
        "capacity",
        "limit",
        "lines",
    )

    def __init__(self, limit: RateLimit) -> None:
        self.limit = limit
        # What the shared bucket holds, and in which time a token comes back.
        self.capacity = limit.burst + slack(limit.per_minute)
        self._interval_s = WINDOW_S / limit.per_minute
        # How many may come in without asking, and until when; and the lease that follows, which ends later.
        self._left, self._ends_at = 0, 0.0
        self._next_left, self._next_ends_at = 0, 0.0
        # What came in by a lease since the last question, for the next one.
        self._asked_at = float("-inf")
        self._entered = 0
        # As the budget said last: when the bucket is full, at the earliest and at the latest; the headers for callers.
        self._full_from = 0.0
        self._full_at = 0.0
        self.lines = b""

    def __repr__(self) -> str:
        return f"<Lease left={self._left + self._next_left}>"

    def enter(self, now: float, cost: int = 1) -> bytes | None:
        """Let a call in that counts as so many, without asking: the headers for its caller; None if it cannot."""
        if self._left < cost or now >= self._ends_at:
            if self._next_left < cost:
                return None
            self._left, self._ends_at, self._next_left = self._next_left, self._next_ends_at, 0
            return self.enter(now, cost)
        self._left -= cost
        self._entered += cost
        return self.lines

    def is_over(self, now: float, cost: int) -> bool:
        """Whether it is known that there is no room for a call that counts as so many."""
        room_at = self._full_from - (self.capacity - self._fit(cost) + ROUNDING) * self._interval_s
        return now < room_at and now < self._asked_at + max(ASK_AGAIN_S, ASK_AGAIN_TOKENS * self._interval_s)

    def is_due(self, now: float) -> bool:
        """Whether it is time to renew it."""
        return now >= max(self._ends_at, self._next_ends_at) - RENEW_S

    def is_used(self) -> bool:
        """Whether some came in by it since the last question."""
        return self._entered > 0

    def is_forgettable(self, now: float) -> bool:
        """Whether a new lease would be as good."""
        return now >= max(self._ends_at, self._next_ends_at) and not self.is_over(now, 1)

    def ask(self, owner: str, need: int, now: float, cost: int = 1) -> RateAsk:
        """The next question: for so many calls that wait and count as `cost` each, and for a lease."""
        limit = self.limit
        seconds = max(now - self._asked_at, MEASURED_S_MIN)
        rate = min((self._entered + need * cost) / seconds, limit.per_minute / WINDOW_S)
        self._asked_at, self._entered = now, 0
        left = (self._left if now < self._ends_at else 0) + (self._next_left if now < self._next_ends_at else 0)
        want = max(0, ceil(rate * LEASE_S) - left)
        return RateAsk(owner, limit.per_minute, self.capacity, limit.burst, need, want, cost)

    def told(self, told: RateTold, now: float) -> None:
        """The answer to the last question."""
        limit = self.limit
        if told.leased:
            if now < self._ends_at:
                self._left += self._next_left
            else:
                self._left, self._ends_at = self._next_left, self._next_ends_at
            self._next_left, self._next_ends_at = told.leased, self._asked_at + LEASE_S
        # From when it was sent: rather ask once too often.
        self._full_from, self._full_at = self._asked_at + told.ahead_s, now + told.ahead_s
        missing_s = self._missing_s(now)
        self.lines = limit_lines(limit.per_minute, limit.burst - missing_s / self._interval_s, missing_s)

    def _fit(self, cost: int) -> int:
        """How many tokens must be there for a call that counts as so many."""
        return min(cost, self.limit.burst)

    def refusal(self, now: float, cost: int = 1) -> RateLimited:
        """The error for a call that did not come in."""
        wait_s = self._full_at - now - (self.capacity - self._fit(cost)) * self._interval_s
        return over_limit(self.limit, wait_s, max(self._missing_s(now), wait_s), cost)

    def _missing_s(self, now: float) -> float:
        """Seconds until the burst is whole again; what other gateways let in since is not known."""
        return max(self._full_at - now - (self.capacity - self.limit.burst) * self._interval_s, 0.0)
