"""How often an owner may come in, and how many requests it may have at once. Pure.

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
from carpool.core.ports import Caller, LimitVerdict, RateLimit
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
