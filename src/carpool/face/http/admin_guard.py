"""Whom the admin port answers. A browser that a stranger's page sends here is not let in. Pure.

1. `Host` must name this port: a loopback address or `localhost`, or a name of `gateway.admin_hosts`. Where the port is
   bound beyond loopback any address will do too. A page that has its own name resolve to this machine (DNS rebinding)
   says that name. Whoever sends no `Host` (HTTP/1.0) is no browser.
2. What changes something (any method but GET, HEAD and OPTIONS) must not come from another site: an `Origin` must be
   the very `Host`, or a name of `gateway.admin_hosts`. Any page may have a browser send a form.
3. A service token, where one is wanted: any of those that are valid, so that they can be changed one by one.
"""

import hmac
import re
from collections.abc import Iterable
from ipaddress import ip_address

from carpool.core.errors import CarpoolError, Forbidden, Unauthorized

_AUTHORITY = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:]*))(?::[0-9]*)?").fullmatch
_SAFE = frozenset((b"GET", b"HEAD", b"OPTIONS"))


class AdminGuard:
    """Says why an operator's request is refused."""

    def __init__(self, *, tokens: Iterable[str] = (), hosts: Iterable[str] = (), is_loopback: bool = True) -> None:
        # Empty where none is needed: the port is then bound to loopback.
        self._credentials = [b"Bearer " + token.encode() for token in tokens]
        self._hosts = frozenset(name.lower().removesuffix(".") for name in hosts)
        self._is_loopback = is_loopback

    def refusal(self, method: bytes, headers: dict[bytes, bytes]) -> CarpoolError | None:
        """Why this request is refused; None if it is not."""
        host = headers.get(b"host")
        if host is not None and not self._is_ours(name_in(host)):
            return Forbidden("the admin port is not known by this Host; add the name to gateway.admin_hosts")
        origin = headers.get(b"origin")
        if origin is not None and method not in _SAFE and not self._is_own_page(origin, host):
            return Forbidden("a page of another site may not do this; add its host to gateway.admin_hosts")
        if self._credentials and not self._is_credential(headers.get(b"authorization", b"")):
            return Unauthorized("the admin port needs the header `Authorization: Bearer <service token>`")
        return None

    def _is_credential(self, given: bytes) -> bool:
        # All of them each time: how long it takes tells nothing.
        return sum(hmac.compare_digest(given, each) for each in self._credentials) > 0

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


def name_in(authority: bytes) -> str:
    """The name or address of `name:port`, in lower case, IPv6 without its brackets; "" for what is neither."""
    found = _AUTHORITY(authority.decode("latin-1").strip().lower())
    return "" if found is None else (found[1] or found[2]).removesuffix(".")
