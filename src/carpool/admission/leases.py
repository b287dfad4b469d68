"""One owner's rate limit at one of several gateways: what it may let in without asking the budget that all share. Pure.

The budget is a bucket as in limits.py, with `burst` places and a slack. A gateway lets requests in without asking by
a lease: so many may be used within a second. A lease takes nothing from the bucket; the gateway reports what it used,
and the budget takes that then. If a gateway never reports (it died), the budget takes all of its lease.

1. All leases of an owner together are at most 1.5 % of its limit, the slack is 2.5 %. The bucket never has less than
   minus what may be leased, counting all leases as used. So in any 60 s at most `per_minute` + `burst` + 5 % come in,
   at any number of gateways: what the bucket had, what came back in that time, what was leased, and up to 1 % for
   answers that were on their way (0.5 s).
2. What is reported late is taken late, and the bucket may have been full meanwhile. It can lose no more by that than
   was leased, and the slack is more. So an owner that keeps to `per_minute` and `burst`, as one bucket would count it,
   is never refused, whichever gateways it uses. The rest of the slack is for requests that wait for the answer.
3. Before a gateway refuses, it asks. When the budget has said for how long there is nothing, it does not ask again
   before: until then nothing can come back.
4. There is one question at a time for each owner. If its answer does not come, this gateway forgets what it had leased,
   and has the budget take all of it.
5. A call of k inputs is one: it takes k places of the lease, or the budget is asked. In the budget, as in limits.py,
   a call of more than `burst` needs all of the burst, and takes k: what is missing then is a debt. A question is for
   calls that count the same; others wait for the next one. A call that needs more places than there can be yet is
   refused without asking, but once a second the budget is asked all the same: it may have forgotten a debt.
"""

from math import ceil

from carpool.admission.limits import ROUNDING_S, WINDOW_S, limit_lines, over_limit
from carpool.core.errors import RateLimited
from carpool.core.ports import RateAsk, RateLimit, RateTold

LEASE_S = 1.0
# A lease that ends within this is renewed if it was used, else given up.
RENEW_S = 0.4
# So long the budget remembers a lease of which it hears nothing.
LEASE_KEPT_S = 3.0
# Rule 5: for so long the gateway does not ask for a call of several after an answer that left too little.
ASK_AGAIN_S = 1.0
# A rate is not measured over less.
MEASURED_S_MIN = 0.05


def leased_max(per_minute: int) -> int:
    """How many all gateways together may have leased."""
    return per_minute * 15 // 1000


def slack(per_minute: int) -> int:
    """How many places the shared bucket has beside the burst."""
    return per_minute * 40 // 1000 - leased_max(per_minute)


class Lease:
    """What one gateway knows of one owner."""

    __slots__ = (
        "_asked_at",
        "_ends_at",
        "_entered",
        "_full_at",
        "_full_from",
        "_interval_s",
        "_slack_s",
        "_unknown_until",
        "_used",
        "_used_since",
        "_whole_lines",
        "left",
        "limit",
        "over_until",
    )

    def __init__(self, limit: RateLimit) -> None:
        self.limit = limit
        self._interval_s = WINDOW_S / limit.per_minute
        self._slack_s = slack(limit.per_minute) * self._interval_s
        # The headers for callers while the burst is whole: those of most answers.
        self._whole_lines = limit_lines(limit.per_minute, limit.burst, 0.0)
        # How many may come in without asking, until `_ends_at`; how many of the lease were used and not reported.
        self.left = 0
        self._used = 0
        self._ends_at = 0.0
        # Until then there is nothing in the bucket.
        self.over_until = 0.0
        # Until then the budget may remember a lease that is not known here.
        self._unknown_until = 0.0
        # What came in since the last question, for the next lease.
        self._asked_at = float("-inf")
        self._entered = 0
        # As the budget said last: when the bucket is full, at the earliest and at the latest; and what was used since.
        self._full_from = 0.0
        self._full_at = 0.0
        self._used_since = 0

    def __repr__(self) -> str:
        return f"<Lease left={self.left} used={self._used}>"

    @property
    def capacity(self) -> int:
        """Places of the shared bucket."""
        return self.limit.burst + slack(self.limit.per_minute)

    @property
    def longest_over_s(self) -> float:
        """The longest that the bucket can stay empty, whatever an answer says, and the time of one more place."""
        per_minute = self.limit.per_minute
        return (leased_max(per_minute) + 2) * WINDOW_S / per_minute

    def enter(self, now: float) -> bytes | None:
        """Let one request in without asking: the headers for its caller; None if that is not possible."""
        if not self.left or now >= self._ends_at:
            return None
        self.left -= 1
        self._used += 1
        self._entered += 1
        used = self._used_since = self._used_since + 1
        # `lines`, on the hot path: without a call where the burst is whole.
        ahead_s, beyond_slack_s = self._full_at - now, used * self._interval_s - self._slack_s
        if beyond_slack_s <= 0.0 and ahead_s + beyond_slack_s <= 0.0:
            return self._whole_lines
        return self.lines(now)

    def enter_many(self, now: float, cost: int) -> bytes | None:
        """The same for a call that counts as so many."""
        if self.left < cost or now >= self._ends_at:
            return None
        self.left -= cost
        self._used += cost
        self._entered += cost
        self._used_since += cost
        return self.lines(now)

    def is_over(self, now: float, cost: int) -> bool:
        """Whether it is known that there is no room for a call that counts as so many."""
        if now < self.over_until:
            return True
        room_at = self._full_from + (min(cost, self.limit.burst) - self.capacity) * self._interval_s
        return now < min(room_at, self._asked_at + ASK_AGAIN_S)

    def is_due(self, now: float) -> bool:
        """Whether it is time to report what was used."""
        return now >= self._ends_at - RENEW_S

    def is_open(self) -> bool:
        """Whether something is leased, or was used and is yet to be reported."""
        return bool(self.left or self._used)

    def is_forgettable(self, now: float) -> bool:
        """Whether a new lease would be as good."""
        return not self.is_open() and now >= self.over_until and now >= self._unknown_until

    def ask(self, owner: str, need: int, now: float, cost: int = 1, *, is_last: bool = False) -> RateAsk:
        """The next question, for so many calls that wait and count as `cost` each; from now on the lease has what it
        keeps. `is_last`: nothing.
        """
        limit, most = self.limit, leased_max(self.limit.per_minute)
        if now >= self._ends_at or not self._used or is_last:
            self.left = 0
        entered = self._entered + need * cost
        seconds = max(now - self._asked_at, MEASURED_S_MIN)
        expected = 0 if is_last else min(int(entered / seconds * LEASE_S), most, ceil(limit.per_minute / WINDOW_S))
        used = self._used if now >= self._unknown_until else None
        self._asked_at, self._entered, self._used = now, 0, 0
        want = max(0, expected - self.left)
        fit = min(cost, limit.burst)
        return RateAsk(owner, limit.per_minute, self.capacity, most, used, self.left, need, want, cost, fit)

    def told(self, told: RateTold, need: int, now: float, cost: int = 1) -> None:
        """The answer to the last question, which was for so many calls that count as `cost`."""
        if not told.is_kept:
            self.left = self._used = 0  # all of it was taken from the bucket already
        self.left += told.leased
        self._ends_at = self._asked_at + LEASE_S
        self._unknown_until = 0.0
        self._full_from, self._full_at, self._used_since = self._asked_at + told.ahead_s, now + told.ahead_s, 0
        self._entered += told.granted * cost
        if told.granted < need and cost == 1:
            # From when it was sent: rather ask once too often.
            over_s = told.ahead_s - (self.capacity - 1) * self._interval_s
            self.over_until = self._asked_at + min(over_s, self.longest_over_s)

    def failed(self, now: float) -> None:
        """No answer came: the budget may have got the question, or not."""
        self.left = self._used = 0
        self._unknown_until = now + LEASE_KEPT_S

    # What callers get to read.

    def lines(self, now: float) -> bytes:
        """The headers for a request that came in."""
        limit, missing_s = self.limit, self._missing_s(now)
        return limit_lines(limit.per_minute, limit.burst - int(missing_s / self._interval_s + 0.999), missing_s)

    def refusal(self, now: float, cost: int = 1) -> RateLimited:
        """The error for a call that did not come in."""
        wait_s = max(self.over_until - now, self._wait_s(now, cost), ROUNDING_S)
        return over_limit(self.limit, wait_s, max(self._missing_s(now), wait_s), cost)

    def _wait_s(self, now: float, cost: int) -> float:
        """Seconds until there may be room for a call that counts as so many, as far as is known."""
        fit = min(cost, self.limit.burst)
        return self._full_at - now + (self._used_since + fit - self.capacity) * self._interval_s

    def _missing_s(self, now: float) -> float:
        """Seconds until the burst is whole again; what other gateways let in since is not known."""
        ahead_s = max(self._full_at - now, 0.0) + self._used_since * self._interval_s
        return max(ahead_s - self._slack_s, 0.0)
