"""How endpoints are written: URLs, port ranges, Unix sockets, simulated GPUs."""

import re
from collections.abc import Iterable

from carpool.settings.errors import ConfigError, shown

ENDPOINTS_MAX = 4096
# What the kernel has room for in a socket's address.
UNIX_SOCKET_BYTES_MAX = 107
GRPC_ENDPOINTS = ("grpc://", "grpcs://")
PLAIN_ENDPOINTS = ("http://", "grpc://", "unix:", "sim:")

_URL = re.compile(
    r"(?P<head>(?:https?|grpcs?)://(?:\[[0-9A-Fa-f:.]+\]|[^\s/?#@:\[\]]+))"
    r"(?::(?P<first>[0-9]{1,5})(?:-(?P<last>[0-9]{1,5}))?)?"
    r"(?P<rest>[/?][^\s#]*)?"
)
_UNIX = re.compile(r"unix:(?P<socket>/[^\s:?#]+)(?::/[^\s#]*)?")


def expand_endpoints(endpoints: Iterable[str]) -> list[str]:
    """One address for each endpoint, port ranges written out; raises ConfigError where one is not valid."""
    found: dict[str, None] = {}
    for text in endpoints:
        for address in _expand(text):
            if address in found:
                raise ConfigError(f"names {shown(address)} twice; `slots` says how much it takes at once")
            if len(found) == ENDPOINTS_MAX:
                raise ConfigError(f"names more than {ENDPOINTS_MAX} endpoints")
            found[address] = None
    return list(found)


def _expand(text: str) -> list[str]:
    if text.startswith("sim:"):
        return _check_sim(text)
    return _check_unix(text) if text.startswith("unix:") else _expand_ports(text)


def _check_sim(text: str) -> list[str]:
    from carpool.upstream.simulated import parse_sim_url  # here, so that other commands start without asyncio

    try:
        parse_sim_url(text)
    except ValueError as fault:
        raise ConfigError(f"has {shown(text)}: {fault}") from None
    return [text]


def _check_unix(text: str) -> list[str]:
    match = _UNIX.fullmatch(text)
    if match is None:
        raise ConfigError(f"has {shown(text)}: a Unix socket looks like unix:/run/model.sock:/path")
    if len(match["socket"].encode()) > UNIX_SOCKET_BYTES_MAX:
        raise ConfigError(f"has {shown(text)}: the path of a socket has at most {UNIX_SOCKET_BYTES_MAX} bytes")
    return [text]


def _expand_ports(text: str) -> list[str]:
    match = _URL.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"has {shown(text)}: an endpoint looks like http://host:9000/path, or with a range of ports "
            "http://host:9000-9031/path, or unix:/run/model.sock:/path, or sim:?latency_ms=50&slots=64; "
            "user names are not taken"
        )
    if match["first"] is None:
        return [text]
    first, last = int(match["first"]), int(match["last"] or match["first"])
    if not 1 <= first <= last <= 65535:
        raise ConfigError(f"has {shown(text)}: ports go from 1 to 65535, the lower one first")
    if last - first >= ENDPOINTS_MAX:
        raise ConfigError(f"names more than {ENDPOINTS_MAX} endpoints")
    return [f"{match['head']}:{port}{match['rest'] or ''}" for port in range(first, last + 1)]
