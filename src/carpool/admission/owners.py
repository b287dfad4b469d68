"""The owner that a request counts for where there are no credentials: the client's address. Pure.

1. It is the address of the TCP peer, unless that is a trusted proxy. Then it is the rightmost address of
   `X-Forwarded-For` that is not a trusted proxy itself: a proxy that we trust has seen that one. What stands left of it
   is the client's own word, and is not looked at.
2. Where that header is missing, or has something else than an address there, it is the peer's address after all.
3. An IPv6 address counts as its /64, for one client usually has all of it; an IPv4 address that is written as IPv6
   (`::ffff:192.0.2.1`) counts as IPv4.
4. A peer without an address (a Unix socket) has the owner "".
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

# Of a longer header only the end is looked at, so that no client can make the gateway look for long.
FORWARDED_BYTES_MAX = 256
# Headers that are understood once: behind a proxy a client sends the same one with each request.
FORWARDED_KEPT_MAX = 4096

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# Some proxies write the port too; an IPv6 address has brackets then.
_WITH_PORT = re.compile(r"\[([^\]]+)\](?::[0-9]{1,5})?|([^:]+):[0-9]{1,5}")
_MAPPED_BITS = 96


class Owners:
    """Says whom requests count for."""

    def __init__(self, trusted_proxies: Iterable[str] = ()) -> None:
        self._trusted = [parse_network(text) for text in trusted_proxies]
        self._find_behind_once = lru_cache(FORWARDED_KEPT_MAX)(self._find_behind)

    def is_trusted(self, peer: str) -> bool:
        """Whether this peer may say for whom it asks."""
        address = parse_address(peer)
        return address is not None and self._is_trusted(address)

    def of_peer(self, peer: str) -> str:
        """The owner that an address stands for; "" if it is none."""
        address = parse_address(peer)
        return "" if address is None else owner_of(address)

    def behind(self, forwarded: bytes) -> str:
        """The owner that the `X-Forwarded-For` of a trusted proxy tells of; "" if it tells of none."""
        if len(forwarded) > FORWARDED_BYTES_MAX:
            # Without the first address of what is left: if the cut went through it, it might read as another one.
            forwarded = forwarded[-FORWARDED_BYTES_MAX:].partition(b",")[2]
        return self._find_behind_once(forwarded)

    def _find_behind(self, forwarded: bytes) -> str:
        for part in reversed(forwarded.decode("latin-1").split(",")):
            address = parse_address(without_port(part.strip()))
            if address is None:
                return ""
            if not self._is_trusted(address):
                return owner_of(address)
        return ""

    def _is_trusted(self, address: Address) -> bool:
        return any(address in network for network in self._trusted)


def parse_network(text: str) -> Network:
    """A network, or an address as a network of its own; raises ValueError."""
    network = ip_network(text)
    mapped = network.network_address.ipv4_mapped if isinstance(network, IPv6Network) else None
    if mapped is not None and network.prefixlen >= _MAPPED_BITS:
        return IPv4Network((int(mapped), network.prefixlen - _MAPPED_BITS))
    return network


def parse_address(text: str) -> Address | None:
    """An address, IPv4 where it is that in truth; None for anything else."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def owner_of(address: Address) -> str:
    """What is written down: the address, or the /64 that it is in. At most 43 characters."""
    if isinstance(address, IPv4Address):
        return str(address)
    return str(IPv6Network((int(address) >> 64 << 64, 64)))


def without_port(text: str) -> str:
    """An address as some proxies write it, without its port and brackets."""
    match = _WITH_PORT.fullmatch(text)
    return (match[1] or match[2]) if match else text
