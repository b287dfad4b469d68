"""How fast service tokens may be guessed. Pure: `now` is an argument, seconds on any clock that does not go back.

1. A wrong token costs its address a place, and all addresses together one. Places come back one by one.
2. While no place is left, the guard refuses whatever an address shows, right or wrong: further guesses learn nothing,
   and cost no place.
3. An address that has shown a right token lately is held up by its own wrong tokens only, not by those of others.
4. An IPv6 address stands for its network of 64 bits: a client with one address there can use them all.
"""

from ipaddress import IPv6Address, ip_address

from carpool.core.token_bucket import TokenBucket

# Places of one address, and of all together: so many at once, and one comes back each so many seconds.
OWN_MAX, OWN_S = 10, 6.0
ALL_MAX, ALL_S = 100, 1.0
# Addresses that are remembered for wrong tokens, and as many for right ones; the latter are trusted for so long.
ADDRESSES_MAX = 1024
TRUSTED_S = 86400.0


class GuessPace:
    """Counts wrong tokens."""

    def __init__(self) -> None:
        # The places of each address that lacks one, and of all together.
        self._own: dict[str, TokenBucket] = {}
        self._all = TokenBucket(1 / ALL_S, ALL_MAX)
        # When an address last showed a right token, the oldest first.
        self._right: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._own) + len(self._right)

    def wait_s(self, address: str, now: float) -> float:
        """How long an address must wait before its token is checked; 0.0: it need not."""
        address = network_of(address)
        own = self._own.get(address)
        is_trusted = now - self._right.get(address, now - TRUSTED_S) < TRUSTED_S
        return max(own.wait_s(now) if own else 0.0, 0.0 if is_trusted else self._all.wait_s(now))

    def was_wrong(self, address: str, now: float) -> None:
        """An address that did not have to wait has shown a wrong token."""
        address = network_of(address)
        self._all.take(now)
        own = self._own.pop(address) if address in self._own else TokenBucket(1 / OWN_S, OWN_MAX)
        own.take(now)
        self._own[address] = own  # behind the others: those that were not wrong for longest are forgotten first
        if len(self._own) > ADDRESSES_MAX:
            self._own = {each: bucket for each, bucket in self._own.items() if not bucket.is_full(now)}
            while len(self._own) > ADDRESSES_MAX // 2:
                del self._own[next(iter(self._own))]

    def was_right(self, address: str, now: float) -> None:
        """An address has shown a right token."""
        address = network_of(address)
        self._right.pop(address, None)
        self._right[address] = now
        if len(self._right) > ADDRESSES_MAX:
            del self._right[next(iter(self._right))]


def network_of(address: str) -> str:
    """Rule 4; what is no address stands for itself."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is None:
        return str(IPv6Address(int(parsed) >> 64 << 64))
    return address
