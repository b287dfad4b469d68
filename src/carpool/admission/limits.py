"""How often an owner may come in (GCRA), and how many requests it may have at once. Pure.

An owner has a bucket of `burst` places. Each request takes one; one comes back every 60 / `per_minute` seconds. A call
of k inputs takes k, or comes in not at all. So

1. at most `burst` come in at once, and in any 60 s at most `per_minute` + `burst`;
2. an owner that keeps to that is never refused;
3. a refusal takes nothing;
4. a call of more than `burst` comes in when the bucket is full, and leaves a debt: no other call of its owner comes in
   until that is paid. In rule 1 such a call stands in the place of `burst`;
5. what was taken under another limit counts for an empty bucket at most: an owner that gets a higher limit may use it.
   That is a bucket of its own, until the other one is full: an owner that comes now with one limit, now with the other
   (it has two keys) has both, and a limit that is soon full again does not fill the other.

A bucket is one number: the time at which it will be full again. A full bucket need not be remembered.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import ceil

from carpool.core.defaults import one
from carpool.core.errors import CarpoolError, RateLimited
from carpool.core.ports import Caller, LimitVerdict, RateLimit
from carpool.core.request import Request

WINDOW_S = 60.0
# What adding up fractions of seconds may get wrong; no request comes so much too early to matter.
ROUNDING_S = 1e-6
# Buckets that are remembered at most: beyond, the oldest ones count as full.
OWNERS_MAX = 200_000
TIDY_FROM = 1024
# Texts that are written once: most callers get the same text as others did a moment ago.
LINES_KEPT = 4096


class Buckets:
    """The buckets of all owners. Times are seconds on any clock."""

    def __init__(self, owners_max: int = OWNERS_MAX) -> None:
        self._owners_max = owners_max
        # When each will be full again.
        self._full_at: dict[str, float] = {}
        self._tidy_above = min(TIDY_FROM, owners_max)
        # The same of buckets of their own (rule 5), or in debt (rule 4), by owner, time for a place, and places.
        self._apart: dict[tuple[str, float, int], float] = {}
        self._tidy_apart_above = TIDY_FROM

    def __len__(self) -> int:
        return len(self._full_at) + len(self._apart)

    def take(self, owner: str, now: float, interval_s: float, capacity: int) -> float:
        """Take a place, and return the seconds until the bucket is full; if there is none, minus those until one is.

        A place comes back every `interval_s`.
        """
        full_at, all_s = self._full_at.get(owner, 0.0), capacity * interval_s
        is_apart = self._apart and (owner, interval_s, capacity) in self._apart
        if is_apart or full_at - now > all_s + ROUNDING_S:
            return self.take_many(owner, now, interval_s, capacity, 1)
        ahead = (full_at - now if full_at > now else 0.0) + interval_s
        missing = ahead - all_s
        if missing > ROUNDING_S:
            return -missing
        self._full_at[owner] = now + ahead
        if len(self._full_at) > self._tidy_above:
            self._tidy(now)
        return ahead

    def take_many(self, owner: str, now: float, interval_s: float, capacity: int, cost: int) -> float:
        """The same for a call that takes so many places, or none."""
        bucket, all_s, cost_s = (owner, interval_s, capacity), capacity * interval_s, cost * interval_s
        full_at, apart = self._full_at.get(owner, 0.0), self._apart.get(bucket)
        if apart is None and full_at - now > all_s + ROUNDING_S:
            apart = self._set_apart(bucket, now + all_s, now)  # it fills from here on
        elif apart is not None and full_at <= now and apart - now <= all_s + ROUNDING_S:
            del self._apart[bucket]  # no debt any more, and nothing to be apart from
            full_at, apart = apart, None
            self._full_at[owner] = full_at
        ahead = max((full_at if apart is None else apart) - now, 0.0) + cost_s
        missing = ahead - max(all_s, cost_s)
        if missing > ROUNDING_S:
            return -missing
        if apart is not None or ahead > all_s + ROUNDING_S:
            self._set_apart(bucket, now + ahead, now)
        else:
            self._full_at[owner] = now + ahead
        if len(self._full_at) > self._tidy_above:
            self._tidy(now)
        return ahead

    def _set_apart(self, bucket: tuple[str, float, int], full_at: float, now: float) -> float:
        if bucket not in self._apart and len(self._apart) >= self._tidy_apart_above:
            self._tidy_apart(now)
        self._apart[bucket] = full_at
        return full_at

    def _tidy_apart(self, now: float) -> None:
        """Forget the buckets without a debt whose owner's other bucket is full."""
        kept = {
            (owner, interval_s, capacity): at
            for (owner, interval_s, capacity), at in self._apart.items()
            if self._full_at.get(owner, 0.0) > now or at - now > capacity * interval_s
        }
        self._apart = kept if len(kept) <= self._owners_max else {}
        self._tidy_apart_above = max(TIDY_FROM, 2 * len(self._apart))

    def _tidy(self, now: float) -> None:
        """Forget the full buckets; only from time to time, when there are twice as many as were left."""
        kept = {owner: full_at for owner, full_at in self._full_at.items() if full_at > now}
        if len(kept) > self._owners_max:
            for owner in list(kept)[: len(kept) - self._owners_max // 2]:
                del kept[owner]
        self._full_at = kept
        self._tidy_above = min(max(TIDY_FROM, 2 * len(kept)), self._owners_max)


class LocalLimits:
    """The limits of one process (core.ports.RateLimits), or its part of them where `sharers` processes have them."""

    def __init__(self, clock: Callable[[], float], sharers: Callable[[], int] | None = None) -> None:
        self._clock = clock
        self._sharers = sharers
        self._buckets = Buckets()

    def enter(self, caller: Caller) -> LimitVerdict:
        """One more request of a caller with a limit. It is always known at once."""
        limit = caller.limit
        if limit is None or not limit.per_minute:
            return b""
        interval_s, capacity = WINDOW_S / limit.per_minute, limit.burst
        if self._sharers is not None:
            interval_s, capacity = self._part_of(limit)
        ahead = self._buckets.take(caller.owner, self._clock(), interval_s, capacity)
        if ahead < 0:
            return over_limit(limit, -ahead, (capacity - 1) * interval_s - ahead)
        left = capacity - int(ahead / interval_s + 0.999)
        return _lines(limit.per_minute, left if left > 0 else 0, ceil(ahead))  # `limit_lines`, a call less

    def enter_many(self, caller: Caller, cost: int) -> LimitVerdict:
        """A call that counts as so many, all of them or none."""
        limit = caller.limit
        if limit is None or not limit.per_minute:
            return b""
        interval_s, capacity = self._part_of(limit)
        ahead = self._buckets.take_many(caller.owner, self._clock(), interval_s, capacity, cost)
        if ahead < 0:
            return over_limit(limit, -ahead, max(capacity - cost, 0) * interval_s - ahead, cost)
        return limit_lines(limit.per_minute, capacity - int(ahead / interval_s + 0.999), ahead)

    def _part_of(self, limit: RateLimit) -> tuple[float, int]:
        """In which time a place comes back here, and how many there are."""
        sharers = 1 if self._sharers is None else max(1, self._sharers())
        return WINDOW_S / limit.per_minute * sharers, max(1, limit.burst // sharers)

    def when_known(self, caller: Caller, known: Callable[[LimitVerdict], None], cost: int = 1) -> None:
        """Never called: no caller has to wait here."""
        raise AssertionError("enter always knows")


def limit_lines(per_minute: int, left: int, full_s: float) -> bytes:
    """The headers for a caller: its limit, how many could come now, and seconds until it has all of its burst again."""
    return _lines(per_minute, left if left > 0 else 0, ceil(full_s))


@lru_cache(LINES_KEPT)
def _lines(per_minute: int, left: int, full_s: int) -> bytes:
    """As draft-ietf-httpapi-ratelimit-headers has it."""
    policy = b'RateLimit-Policy: "default";q=%d;w=60\r\n' % per_minute
    return policy + b'RateLimit: "default";r=%d;t=%d\r\n' % (left, full_s)


def over_limit(limit: RateLimit, wait_s: float, full_s: float, cost: int = 1) -> RateLimited:
    """The error for a caller that may come in again, with a call that counts as `cost`, after `wait_s`."""
    retry_after_s = ceil(wait_s - ROUNDING_S)
    return _over_limit(limit.per_minute, retry_after_s if retry_after_s > 1 else 1, ceil(full_s), cost)


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

    def give_all(self, requests: Sequence[Request], concurrent: int) -> CarpoolError | None:
        """Count the requests of one call, all or none. A call over the owner's limit comes in where it has none."""
        owner = requests[0].owner
        permit = self._by_owner.get(owner)
        if permit is None:
            permit = self._by_owner[owner] = OwnerPermit(owner, self._by_owner)
        elif permit.held + len(requests) > self._most(concurrent):
            return too_many_at_once(concurrent)
        permit.held += len(requests)
        for request in requests:
            request.permit = permit
        return None

    def _most(self, concurrent: int) -> int:
        return max(1, concurrent // max(1, self._sharers()))

    def give(self, request: Request, concurrent: int) -> CarpoolError | None:
        """Count a request that `settle` will end, or say why not."""
        permit = self._by_owner.get(request.owner)
        if permit is None:
            permit = self._by_owner[request.owner] = OwnerPermit(request.owner, self._by_owner)
        elif permit.held >= self._most(concurrent):
            return too_many_at_once(concurrent)
        permit.held += 1
        request.permit = permit
        return None


def too_many_at_once(concurrent: int) -> RateLimited:
    """The error for an owner that has as many requests as it may."""
    return RateLimited(
        f"at most {concurrent} requests of yours may wait or run at once; wait for an answer first", retry_after_s=1
    )


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
