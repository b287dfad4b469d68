"""Whom a request counts for: the rules of `admission/owners.py`, and what the gate makes of them."""

from typing import Any

from carpool.admission.gate import Gate
from carpool.admission.owners import FORWARDED_BYTES_MAX, Owners
from carpool.broker.memory import MemoryBroker
from carpool.core.ports import Caller, Peer

PROXIES = ["10.0.0.0/8", "192.0.2.7", "2001:db8:1::/48"]


def test_a_long_header_is_read_from_its_end_and_never_in_the_middle_of_an_address() -> None:
    owners = Owners(PROXIES)
    client, proxy = b"203.0.113.9", b", 10.1.2.3"
    for hops in range(1, 100):
        for padding in range(12):
            header = b"8.8.8.8, " * 9 + b"9" * padding + b"," + client + proxy * hops
            fits = len(client + proxy * hops) < FORWARDED_BYTES_MAX
            assert owners.behind(header) == (client.decode() if fits else "")
    assert owners.behind(b"9" * 5000 + client) == ""


def make_gate(*proxies: str) -> Gate:
    broker = MemoryBroker(waiting_max=1, bytes_max=1, lanes_max=1, tiers=3)
    no_tasks: Any = None
    return Gate(broker, no_tasks, {}, lowest_tier=2, trusted_proxies=proxies)


FORWARDED = {b"x-forwarded-for": b"203.0.113.9"}


def test_a_proxy_asks_for_many() -> None:
    gate, peer = make_gate("192.0.2.1"), Peer("192.0.2.1")
    assert gate.identify(FORWARDED, peer) == Caller("203.0.113.9", 2)
    assert gate.identify({b"x-forwarded-for": b"203.0.113.10"}, peer) == Caller("203.0.113.10", 2)
    assert gate.identify({}, peer) == gate.identify({b"x-forwarded-for": b"?"}, peer) == Caller("192.0.2.1", 2)
