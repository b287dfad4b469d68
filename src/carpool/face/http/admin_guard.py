"""Which requests the admin port answers. It refuses those that another site's page has a browser send. Pure.

1. `Host` must name this port: a loopback address or `localhost`, or a name of `gateway.admin_hosts`. Where the port is
   bound beyond loopback any address will do too. A page that has its own name resolve to this machine (DNS rebinding)
   says that name. A client without `Host` (HTTP/1.0) is no browser.
2. What changes something (any method but GET, HEAD and OPTIONS) must not come from another site: an `Origin` must be
   the very `Host`, or a name of `gateway.admin_hosts`, and `Sec-Fetch-Site`, where a browser sends it without an
   `Origin`, must not speak of another origin. Any page may have a browser send a form.
3. A service token, where one is wanted: any of those that are valid, so that they can be changed one by one. A browser
   shows a cookie instead, which was given for a token (`login`): its end, and a MAC of that by the token. It ends with
   its time, or with the token. Browsers also send it with requests of pages on other ports of this host: so it does
   not count where `Sec-Fetch-Site` speaks of another origin.
4. Guesses of tokens, and of cookies, which can be made from guessed tokens, are slowed (`GuessPace`): beyond, 429.
"""

import hmac
import re
from collections.abc import Callable, Iterable
from ipaddress import IPv6Address, ip_address
from math import ceil

from carpool.core.errors import CarpoolError, Forbidden, RateLimited, Unauthorized
from carpool.core.token_bucket import TokenBucket

_AUTHORITY = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:]*))(?::[0-9]*)?").fullmatch
_SAFE = frozenset((b"GET", b"HEAD", b"OPTIONS"))
# What a browser says of a request of our own page, or of one that a person typed in.
_OWN_SITE = frozenset((b"same-origin", b"none"))
COOKIE = b"carpool_admin"
LOGIN_S = 12 * 3600
# Places of one address, and of all together: so many at once, and one comes back each so many seconds.
OWN_MAX, OWN_S = 10, 6.0
ALL_MAX, ALL_S = 100, 1.0
# Addresses that are remembered for wrong tokens, and as many for right ones; the latter are trusted for so long.
ADDRESSES_MAX = 1024
TRUSTED_S = 86400.0


class AdminGuard:
    """Says why an operator's request is refused."""

    def __init__(
        self,
        *,
        tokens: Iterable[str] = (),
        hosts: Iterable[str] = (),
        is_loopback: bool = True,
        # Unix time, for cookies.
        wall: Callable[[], float],
        # For the pace of guesses.
        clock: Callable[[], float],
    ) -> None:
        # Empty where none is needed: the port is then bound to loopback.
        self._tokens = [token.encode() for token in tokens]
        self._credentials = [b"Bearer " + token for token in self._tokens]
        self._wall = wall
        self._clock = clock
        self._guesses = GuessPace()
        self._hosts = frozenset(name.lower().removesuffix(".") for name in hosts)
        self._is_loopback = is_loopback

    def refusal(
        self, method: bytes, headers: dict[bytes, bytes], address: str = "", *, is_open: bool = False
    ) -> CarpoolError | None:
        """Why this request from an address is refused; None if it is not. `is_open`: it needs no token."""
        host = headers.get(b"host")
        if host is not None and not self._is_ours(name_in(host)):
            return Forbidden("the admin port is not known by this Host; add the name to gateway.admin_hosts")
        origin = headers.get(b"origin")
        if origin is not None and method not in _SAFE and not self._is_own_page(origin, host):
            return Forbidden("a page of another site may not do this; add its host to gateway.admin_hosts")
        is_own_site = headers.get(b"sec-fetch-site", b"none") in _OWN_SITE
        if origin is None and method not in _SAFE and not is_own_site:
            return Forbidden("a page of another site may not do this")
        if is_open or not self._credentials:
            return None
        cookie = cookie_in(headers.get(b"cookie", b"")) if is_own_site else b""
        given = headers.get(b"authorization", b"")
        if (is_right := self._is_credential(given)) or not cookie:
            return self._look_at(given, is_right, address)
        end, is_proven = self._read_cookie(cookie)
        return self._look_at(cookie, is_proven, address) or (None if self._wall() < end else self._wanted())

    def login(self, token: bytes, address: str = "") -> bytes | CarpoolError:
        """A cookie for a client with this token, as `Set-Cookie` wants it; or why it is refused."""
        refusal = self._look_at(token, self._is_credential(b"Bearer " + token), address)
        if refusal is not None:
            return refusal if isinstance(refusal, RateLimited) else Unauthorized("this is not a service token")
        end = b"%d" % (self._wall() + LOGIN_S)
        attributes = b"Path=/; Max-Age=%d; HttpOnly; SameSite=Strict" % LOGIN_S
        return b"%b=%b.%b; %b" % (COOKIE, end, mac(token, end), attributes)

    def _look_at(self, given: bytes, is_right: bool, address: str) -> CarpoolError | None:
        """Why a client that shows this is refused: it is wrong, or too many wrong ones came before (rule 4)."""
        now = self._clock()
        if not self._credentials or not given:
            return None if is_right else self._wanted()
        if (wait_s := self._guesses.wait_s(address, now)) > 0.0:
            return RateLimited("too many wrong tokens came; try again later", retry_after_s=ceil(wait_s))
        if is_right:
            self._guesses.was_right(address, now)
            return None
        self._guesses.was_wrong(address, now)
        return self._wanted()

    def _wanted(self) -> Unauthorized:
        return Unauthorized("the admin port needs the header `Authorization: Bearer <service token>`")

    def _is_credential(self, given: bytes) -> bool:
        # Compare with all of them each time: the time that it takes tells nothing.
        return sum(hmac.compare_digest(given, each) for each in self._credentials) > 0

    def _read_cookie(self, given: bytes) -> tuple[int, bool]:
        """When it ends, and whether it was given for a token."""
        end, _, proof = given.partition(b".")
        is_proven = sum(hmac.compare_digest(proof, mac(token, end)) for token in self._tokens) > 0
        return int(end) if is_proven else 0, is_proven

    def _is_ours(self, name: str) -> bool:
        if name == "localhost" or name in self._hosts:
            return True
        try:
            address = ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self._is_loopback

    def _is_own_page(self, origin: bytes, host: bytes | None) -> bool:
        _, separator, authority = origin.partition(b"://")
        return bool(separator) and (authority.lower() == (host or b"").lower() or name_in(authority) in self._hosts)


def mac(token: bytes, end: bytes) -> bytes:
    """The proof that this cookie, valid until `end`, was given for this token."""
    return hmac.digest(token, b"the admin port's cookie until " + end, "sha256").hex().encode()


def cookie_in(header: bytes) -> bytes:
    """The admin port's cookie among those that a browser sent; b"" if it is not there."""
    for each in header.split(b";"):
        name, _, value = each.strip().partition(b"=")
        if name == COOKIE:
            return value
    return b""


def name_in(authority: bytes) -> str:
    """The name or address of `name:port`, in lower case, IPv6 without its brackets; "" for what is neither."""
    found = _AUTHORITY(authority.decode("latin-1").strip().lower())
    return "" if found is None else (found[1] or found[2]).removesuffix(".")


class GuessPace:
    """How fast service tokens may be guessed. `now` is seconds on any clock that does not go back.

    1. A wrong token costs its address a place, and all addresses together one. Places come back one by one.
    2. While no place is left, the guard refuses whatever an address shows, right or wrong: further guesses learn
       nothing, and cost no place.
    3. An address that has shown a right token lately is held up by its own wrong tokens only, not by those of others.
    4. An IPv6 address stands for its network of 64 bits: a client with one address there can use them all.
    """

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
