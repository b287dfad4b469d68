"""Whom the admin port answers. A browser that a stranger's page sends here is not let in. Pure.

1. `Host` must name this port: a loopback address or `localhost`, or a name of `gateway.admin_hosts`. Where the port is
   bound beyond loopback any address will do too. A page that has its own name resolve to this machine (DNS rebinding)
   says that name. Whoever sends no `Host` (HTTP/1.0) is no browser.
2. What changes something (any method but GET, HEAD and OPTIONS) must not come from another site: an `Origin` must be
   the very `Host`, or a name of `gateway.admin_hosts`, and `Sec-Fetch-Site`, where a browser sends it without an
   `Origin`, must not speak of another origin. Any page may have a browser send a form.
3. A service token, where one is wanted: any of those that are valid, so that they can be changed one by one. A browser
   shows a cookie instead, which was given for a token (`login`): its end, and a MAC of that by the token. It ends with
   its time, or with the token. Browsers send it with what a page of another port of this host asks for too: so with a
   cookie nothing is told to a page of another origin.
"""

import hmac
import re
from collections.abc import Callable, Iterable
from ipaddress import ip_address

from carpool.core.errors import CarpoolError, Forbidden, Unauthorized

_AUTHORITY = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:]*))(?::[0-9]*)?").fullmatch
_SAFE = frozenset((b"GET", b"HEAD", b"OPTIONS"))
# What a browser says of a request of our own page, or of one that a person typed in.
_OWN_SITE = frozenset((b"same-origin", b"none"))
COOKIE = b"carpool_admin"
LOGIN_S = 12 * 3600


class AdminGuard:
    """Says why an operator's request is refused."""

    def __init__(
        self,
        *,
        tokens: Iterable[str] = (),
        hosts: Iterable[str] = (),
        is_loopback: bool = True,
        # Unix time, for cookies.
        wall: Callable[[], float] = lambda: 0.0,
    ) -> None:
        # Empty where none is needed: the port is then bound to loopback.
        self._tokens = [token.encode() for token in tokens]
        self._credentials = [b"Bearer " + token for token in self._tokens]
        self._wall = wall
        self._hosts = frozenset(name.lower().removesuffix(".") for name in hosts)
        self._is_loopback = is_loopback

    def refusal(self, method: bytes, headers: dict[bytes, bytes], *, is_open: bool = False) -> CarpoolError | None:
        """Why this request is refused; None if it is not. `is_open`: it needs no token."""
        host = headers.get(b"host")
        if host is not None and not self._is_ours(name_in(host)):
            return Forbidden("the admin port is not known by this Host; add the name to gateway.admin_hosts")
        origin = headers.get(b"origin")
        if origin is not None and method not in _SAFE and not self._is_own_page(origin, host):
            return Forbidden("a page of another site may not do this; add its host to gateway.admin_hosts")
        is_own_site = headers.get(b"sec-fetch-site", b"none") in _OWN_SITE
        if origin is None and method not in _SAFE and not is_own_site:
            return Forbidden("a page of another site may not do this")
        if is_open or not self._credentials or self._is_credential(headers.get(b"authorization", b"")):
            return None
        if is_own_site and self._is_cookie(cookie_in(headers.get(b"cookie", b""))):
            return None
        return Unauthorized("the admin port needs the header `Authorization: Bearer <service token>`")

    def login(self, token: bytes) -> bytes | None:
        """A cookie for whoever has this token, as `Set-Cookie` wants it; None if it is no token."""
        if not self._is_credential(b"Bearer " + token):
            return None
        end = b"%d" % (self._wall() + LOGIN_S)
        attributes = b"Path=/; Max-Age=%d; HttpOnly; SameSite=Strict" % LOGIN_S
        return b"%b=%b.%b; %b" % (COOKIE, end, mac(token, end), attributes)

    def _is_credential(self, given: bytes) -> bool:
        # All of them each time: how long it takes tells nothing.
        return sum(hmac.compare_digest(given, each) for each in self._credentials) > 0

    def _is_cookie(self, given: bytes) -> bool:
        end, _, proof = given.partition(b".")
        is_proven = sum(hmac.compare_digest(proof, mac(token, end)) for token in self._tokens) > 0
        return is_proven and self._wall() < int(end)

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
    """What shows that somebody who had this token was given a cookie until then."""
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
