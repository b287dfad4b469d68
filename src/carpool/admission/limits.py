"""How often an owner may come in, at one gateway or at several, and how many requests it may have at once. Pure.

An owner has a token bucket (core/token_bucket.py) of `burst` tokens, and `per_minute` more a minute. Each request takes
one. A call of k inputs takes k, or comes in not at all. So

1. at most `burst` come in at once, and in any 60 s at most `per_minute` + `burst`;
2. an owner that keeps to that is never refused;
3. a refusal takes nothing;
4. a call of more than `burst` comes in when the bucket is full, and leaves a debt: no other call of its owner comes in
   until that is paid. In rule 1 such a call stands in the place of `burst`;
5. an owner with two limits (it has two keys, or its limit was changed) has a bucket for each.

A full bucket need not be remembered.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import ceil

from carpool.core.defaults import one
from carpool.core.errors import CarpoolError, RateLimited
from carpool.core.ports import Caller, LimitVerdict, RateAsk, RateLimit, RateTold
from carpool.core.request import Request
from carpool.core.token_bucket import TokenBucket

WINDOW_S = 60.0
# What adding up fractions may get wrong: it must not become a whole second, or a whole request, in what is told.
ROUNDING = 1e-9
# Buckets that are remembered at most: beyond, the oldest ones count as full.
BUCKETS_MAX = 200_000
TIDY_FROM = 1024
# Texts that are written once: most callers get the same text as others did a moment ago.
LINES_KEPT = 4096
# Of leases (`Lease` has the rules).
LEASE_S = 2.0
SLACK_PERCENT = 6
# A lease that ends within this is renewed if it was used.
RENEW_S = 0.6
# Rule 3: it is asked again after so long, or after the time in which so many tokens come back if that is longer.
ASK_AGAIN_S, ASK_AGAIN_TOKENS = 1.0, 2
# The budget rounds the time in which a token comes back up, by so many tokens in all: rather ask once too often.
LEASE_ROUNDING = 0.01
# A rate is not measured over less.
MEASURED_S_MIN = 0.05


class LocalLimits:
    """The limits of one process (core.ports.RateLimits), or its part of them where `sharers` processes have them."""

    def __init__(
        self, clock: Callable[[], float], sharers: Callable[[], int] | None = None, buckets_max: int = BUCKETS_MAX
    ) -> None:
        self._clock = clock
        self._sharers = sharers
        self._parts = 1
        self._buckets_max = buckets_max
        self._buckets: dict[str, TokenBucket] = {}
        self._tidy_above = min(TIDY_FROM, buckets_max)

    def __len__(self) -> int:
        return len(self._buckets)

    def enter(self, caller: Caller, cost: int = 1) -> LimitVerdict:
        """A call that counts as so many, all of them or none. It is always known at once."""
        limit = caller.limit
        if limit is None or not limit.per_minute:
            return b""
        if self._sharers is not None:
            self._share(self._sharers())
        now = self._clock()
        bucket = self._buckets.get(caller.account) or self._open(caller.account, limit, now)
        came_in, tokens = bucket.take(now) if cost == 1 else bucket.borrow(now, cost), bucket.tokens
        full_s = (bucket.burst - tokens) / bucket.rate
        if not came_in:
            return over_limit(limit, (min(cost, bucket.burst) - tokens) / bucket.rate, full_s, cost)
        return limit_lines(limit.per_minute, tokens, full_s)

    def _share(self, sharers: int) -> None:
        """With another number of processes each has another part, and new buckets for it."""
        if self._parts != max(1, sharers):
            self._parts = max(1, sharers)
            self._buckets = {}

    def _open(self, account: str, limit: RateLimit, now: float) -> TokenBucket:
        if len(self._buckets) >= self._tidy_above:
            self._tidy(now)
        rate, burst = limit.per_minute / WINDOW_S / self._parts, max(1, limit.burst // self._parts)
        bucket = self._buckets[account] = TokenBucket(rate, burst, now=now)
        return bucket

    def _tidy(self, now: float) -> None:
        """Forget the full buckets; only from time to time, when there are twice as many as were left."""
        kept = {account: bucket for account, bucket in self._buckets.items() if not bucket.is_full(now)}
        if len(kept) >= self._buckets_max:
            for account in list(kept)[: len(kept) - self._buckets_max // 2]:
                del kept[account]
        self._buckets = kept
        self._tidy_above = min(max(TIDY_FROM, 2 * len(kept)), self._buckets_max)

    def when_known(self, caller: Caller, known: Callable[[LimitVerdict], None], cost: int = 1) -> None:
        """Never called: no caller has to wait here."""
        raise AssertionError("enter always knows")


def limit_lines(per_minute: int, left: float, full_s: float) -> bytes:
    """The headers for a caller: its limit, how many could come now, and seconds until it has all of its burst again."""
    return _lines(per_minute, max(0, int(left + ROUNDING)), ceil(full_s - ROUNDING))


@lru_cache(LINES_KEPT)
def _lines(per_minute: int, left: int, full_s: int) -> bytes:
    """As draft-ietf-httpapi-ratelimit-headers has it."""
    policy = b'RateLimit-Policy: "default";q=%d;w=60\r\n' % per_minute
    return policy + b'RateLimit: "default";r=%d;t=%d\r\n' % (left, full_s)


def over_limit(limit: RateLimit, wait_s: float, full_s: float, cost: int = 1) -> RateLimited:
    """The error for a caller that may come in again, with a call that counts as `cost`, after `wait_s`."""
    retry_after_s = ceil(wait_s - ROUNDING)
    return _over_limit(limit.per_minute, retry_after_s if retry_after_s > 1 else 1, ceil(full_s - ROUNDING), cost)


@lru_cache(LINES_KEPT)
def _over_limit(per_minute: int, retry_after_s: int, full_s: int, cost: int) -> RateLimited:
    """One error for all callers that get the same, so that its answer is written once. It is returned, never raised."""
    counted = "" if cost == 1 else f", and this call counts as {cost}"
    return RateLimited(
        f"over the limit of {per_minute} requests a minute{counted}; try again when Retry-After is over",
        retry_after_s=retry_after_s,
        header_lines=_lines(per_minute, 0, full_s),
    )


def slack(per_minute: int) -> int:
    """How many tokens the shared bucket holds beside the burst."""
    return per_minute * SLACK_PERCENT // 100


class Lease:
    """What one of several gateways knows of one owner, and may let in without asking the budget that all share.

    The budget is a token bucket that holds `burst` and a slack. A gateway lets requests in without asking by a lease:
    tokens that it may use within 2 s. They are taken from the bucket when they are leased; unused ones are lost.

    1. In any 60 s at most `per_minute` + `burst` + 10 % come in, at any number of gateways. The slack is 6 % of the
       limit. Tokens that gateways can still use were taken from the bucket within the last 2 s, and so were those of
       calls whose answer is on its way: with them there are at most as many as the bucket holds, and what came back in
       these 2 s (3.4 %).
    2. An owner that keeps to `per_minute` and `burst`, as one bucket would count it, is never refused, whichever
       gateways it uses. A lease leaves `burst` tokens in the bucket. So there are never fewer than in a bucket of
       `burst` from which the same calls are taken, whatever gateways lease and lose. (The slack is also for calls that
       are on their way.)
    3. Before a gateway refuses, it asks. When the budget has said for how long there is nothing, it does not ask again
       before: until then nothing can come back. But the budget may forget (Redis loses its data): while there is
       nothing for long, it is asked now and then all the same.
    4. There is one question at a time for each owner. If its answer does not come, what it took from the bucket is
       lost.
    5. A call of k inputs is one: it takes k tokens of the lease, or the budget is asked. There a call of more than
       `burst` needs all of the burst, and takes k: what is missing then is a debt. A question is for calls that count
       the same; others wait for the next one.
    """

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
        room_at = self._full_from - (self.capacity - self._fit(cost) + LEASE_ROUNDING) * self._interval_s
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


class Permits:
    """How many requests each owner has at once. An owner with none is not remembered."""

    def __init__(self, sharers: Callable[[], int] = one) -> None:
        # Among so many processes what an owner may have is divided.
        self._sharers = sharers
        self._by_owner: dict[str, OwnerPermit] = {}

    def __len__(self) -> int:
        return len(self._by_owner)

    def give(self, requests: Sequence[Request], concurrent: int) -> CarpoolError | None:
        """Count the requests of one call, which `settle` will end, all or none; or say why not.

        A call over the owner's limit comes in where it has no other request.
        """
        owner = requests[0].owner
        permit = self._by_owner.get(owner)
        if permit is None:
            permit = self._by_owner[owner] = OwnerPermit(owner, self._by_owner)
        elif permit.held + len(requests) > max(1, concurrent // max(1, self._sharers())):
            return RateLimited(
                f"at most {concurrent} requests of yours may wait or run at once; wait for an answer first",
                retry_after_s=1,
            )
        permit.held += len(requests)
        for request in requests:
            request.permit = permit
        return None


class OwnerPermit:
    """The places of one owner; its requests all have this same one (core.request.Permit)."""

    __slots__ = ("_by_owner", "_owner", "held")

    def __init__(self, owner: str, by_owner: "dict[str, OwnerPermit]") -> None:
        self._owner = owner
        self._by_owner = by_owner
        self.held = 0

    def give_back(self) -> None:
        """One request of this owner was settled."""
        self.held -= 1
        if not self.held:
            del self._by_owner[self._owner]
