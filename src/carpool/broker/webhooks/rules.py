"""Where webhooks may go, how they are signed, and when they are sent again. Pure.

A URL comes from a client, so it may aim at what only this machine can reach (SSRF):

1. A host is on the list, as it stands or below a `*.`; with the port that the list names, else with the scheme's own.
2. `https`, unless `http` is allowed too. No user, no fragment, nothing that two parsers could read in two ways.
3. What counts is the address that is connected to, whatever the name said before (`is_allowed`): it is public. Private
   and loopback ones may be allowed. Never allowed are the metadata addresses of clouds, wherever these are, and
   all that IANA's registries of special-purpose addresses have beside: link-local, shared, multicast, reserved.
   An IPv4 address inside an IPv6 one counts as what it is.
4. The registries are written down here: what `ipaddress` has of them differs from one release of Python to the next.

After an attempt:

5. 2xx: delivered. 410: the receiver wants no more of this, given up. Anything else, a redirect too, is sent again.
6. Pauses double up to an hour, with jitter. A `Retry-After` makes a pause longer, never shorter; where it points
   beyond the end, the last attempt is at the end.
7. When the next attempt would come later than `retry_for_s` after the outcome, it is given up.
"""

import base64
import binascii
import hmac
import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Literal, NamedTuple

import msgspec
from yarl import URL

from carpool.core.errors import CallbackDenied
from carpool.core.webhook import URL_CHARS_MAX

_URL_CHARS = re.compile(r"[!-~]+")
_HOST = re.compile(r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\]")
_NAT64 = IPv6Network("64:ff9b::/96")
# May be allowed: RFC 1918, loopback, unique local, and site-local, which is long out of use.
_PRIVATE = tuple(
    map(ip_network, ("10.0.0.0/8", "127.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "::1", "fc00::/7", "fec0::/10"))
)
# Inside of those, and among the public ones: where clouds tell a machine who it is. AWS (IMDS, Pod Identity), Google,
# Oracle, Scaleway, Azure. Others, and these over IPv4, are at addresses of the next list.
_METADATA = tuple(
    map(ip_network, ("fd00:ec2::/32", "fd20:ce::/32", "fd00:c1::a9fe:a9fe", "fd00:42::42", "168.63.129.16"))
)
# What is not public in IPv4, beside the private. 192.0.0.0/24 and 100.64.0.0/10 have metadata too (Oracle, Alibaba).
_SPECIAL_V4 = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",
            "100.64.0.0/10",
            "169.254.0.0/16",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.88.99.0/24",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/3",  # multicast, and what is reserved
        ),
    )
)
# All that is public in IPv6, and what of it is not: protocols, documentation, 6to4.
_PUBLIC_V6 = IPv6Network("2000::/3")
_SPECIAL_V6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
_PORTS = {"https": 443, "http": 80}


class AllowedHost(msgspec.Struct, frozen=True):
    """One entry of the list."""

    # In lower case.
    name: str
    # None: the scheme's own.
    port: int | None
    # It stands for everything below it.
    is_parent: bool

    def covers(self, name: str, port: int, scheme: str) -> bool:
        """Whether a host is meant."""
        is_it = name.endswith("." + self.name) if self.is_parent else name == self.name
        return is_it and port == (self.port or _PORTS[scheme])


def allowed_host(text: str) -> AllowedHost:
    """An entry of the list: `name`, `*.name`, an address, each with `:port` or without; raises ValueError."""
    name, colon, port = text.lower().rpartition(":")
    if not colon or (name.startswith("[") and not name.endswith("]")):
        name, colon, port = text.lower(), "", ""
    if not _HOST.fullmatch(name.removeprefix("*.")) or (
        colon and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536)
    ):
        raise ValueError("a host is like `hooks.example.org`, `*.example.org` or `hooks.example.org:8443`")
    return AllowedHost(name.removeprefix("*.").strip("[]"), int(port) if port else None, name.startswith("*."))


class Callbacks:
    """Says which URLs webhooks may go to."""

    def __init__(self, hosts: Iterable[AllowedHost], *, allow_http: bool = False, allow_private: bool = False) -> None:
        self._hosts = tuple(hosts)
        self._schemes = ("https", "http") if allow_http else ("https",)
        self._allow_private = allow_private

    def check(self, text: str) -> URL:
        """The URL that a client wrote; raises CallbackDenied."""
        if not self._hosts:
            raise CallbackDenied("this gateway sends no webhooks; poll the task instead")
        if len(text) > URL_CHARS_MAX or not _URL_CHARS.fullmatch(text) or "\\" in text:
            raise CallbackDenied(f"`callback_url` must be a URL of at most {URL_CHARS_MAX} characters, in ASCII")
        try:
            url = URL(text, encoded=True)
            name, port = (url.host or "").lower(), url.port
        except ValueError:
            raise CallbackDenied("`callback_url` is not a URL") from None
        if url.scheme not in self._schemes or not name or port is None:
            raise CallbackDenied(f"`callback_url` must begin with {' or '.join(self._schemes)}:// and a host")
        if not _HOST.fullmatch(f"[{name}]" if ":" in name else name) or (url.raw_authority or "").endswith(":"):
            raise CallbackDenied("the host of `callback_url` is not written as hosts are")
        if url.user is not None or url.password is not None or "#" in text or "@" in (url.raw_authority or ""):
            raise CallbackDenied("`callback_url` must have neither a user nor a fragment")
        if not any(host.covers(name, port, url.scheme) for host in self._hosts):
            raise CallbackDenied("the host of `callback_url` is not one that this gateway sends to")
        if _is_literal(name) and not self.is_allowed(name):
            raise CallbackDenied("`callback_url` names an address that this gateway does not send to")
        return url

    def is_allowed(self, address: str) -> bool:
        """Whether an address may be connected to."""
        try:
            found = _innermost(ip_address(address.partition("%")[0]))
        except ValueError:
            return False
        if _is_in(found, _METADATA):
            return False
        return self._allow_private if _is_in(found, _PRIVATE) else _is_public(found)


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether the whole internet knows an address that is not private."""
    if isinstance(address, IPv4Address):
        return not _is_in(address, _SPECIAL_V4)
    return address in _PUBLIC_V6 and not _is_in(address, _SPECIAL_V6)


def _is_in(address: IPv4Address | IPv6Address, networks: Iterable[IPv4Network | IPv6Network]) -> bool:
    return any(address in network for network in networks)


def _is_literal(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _innermost(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address that an IPv6 address stands for, where it does."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64 or (int(address) >> 32 == 0 and int(address) > 1):  # ::a.b.c.d, long out of use
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else address)


PREFIX = "whsec_"
# What the Standard Webhooks specification (https://www.standardwebhooks.com) asks for.
SECRET_BYTES_MIN, SECRET_BYTES_MAX = 24, 64


def secret_of(text: str) -> bytes:
    """The bytes of a secret as it is written in the configuration; raises ValueError, which does not quote it."""
    try:
        secret = base64.b64decode(text.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if not text.startswith(PREFIX) or not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise ValueError(
            f"a secret is `{PREFIX}` and the base64 of {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} random bytes, "
            f"like that of `openssl rand -base64 32`"
        )
    return secret


def signed_headers(webhook_id: str, timestamp: int, body: bytes, secrets: Sequence[bytes]) -> dict[str, str]:
    """The headers that a receiver verifies: a signature with each secret, so that receivers survive a change of it."""
    signatures = []
    for secret in secrets:
        signature = hmac.new(secret, b"%b.%d." % (webhook_id.encode(), timestamp), "sha256")
        signature.update(body)  # apart: a long one is not copied
        signatures.append(base64.b64encode(signature.digest()).decode())
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }


PAUSE_S_MAX = 3600.0
# Doubling ends long before.
_DOUBLINGS_MAX = 30


class Answered(NamedTuple):
    """What a receiver said: a status, or why there is none."""

    status: int
    failure: str = ""
    # Seconds; 0 if it does not say.
    retry_after_s: float = 0.0


class Verdict(NamedTuple):
    """What becomes of the webhook after that."""

    what: Literal["delivered", "failed", "given_up"]
    # Until the next attempt.
    pause_s: float = 0.0
    # Why not delivered.
    failure: str = ""


def verdict(
    answered: Answered, attempts: int, age_s: float, luck: float, *, backoff_s: float, retry_for_s: float
) -> Verdict:
    """Judge an attempt before which there were so many others; `luck` is between 0 and 1."""
    if 200 <= answered.status < 300:
        return Verdict("delivered")
    failure = answered.failure or f"status {answered.status}"
    if answered.status == 410:
        return Verdict("given_up", failure=failure)
    longest = min(PAUSE_S_MAX, backoff_s * (1 << min(attempts, _DOUBLINGS_MAX)))
    pause_s, left_s = longest * (0.5 + 0.5 * luck), retry_for_s - age_s
    if pause_s > left_s:
        return Verdict("given_up", failure=failure)
    return Verdict("failed", max(pause_s, min(answered.retry_after_s, left_s)), failure)


def retry_after_of(header: str | None) -> float:
    """Seconds in a Retry-After header; a date, or what is no number, counts as none."""
    return float(header) if header and header.isascii() and header.isdigit() and len(header) < 10 else 0.0
