"""Whom a request counts for: the rules of `admission/owners.py`, and what the gate makes of them."""

from typing import Any

import pytest

from carpool.admission.gate import Gate
from carpool.admission.owners import FORWARDED_BYTES_MAX, FORWARDED_KEPT_MAX, Owners, parse_address, parse_network
from carpool.broker.memory import MemoryBroker
from carpool.core.ports import Caller, Peer
from carpool.testing import Witness, make_request

PROXIES = ["10.0.0.0/8", "192.0.2.7", "2001:db8:1::/48"]


@pytest.mark.parametrize(
    ("peer", "owner"),
    [
        ("203.0.113.9", "203.0.113.9"),
        ("::ffff:203.0.113.9", "203.0.113.9"),
        ("2001:db8:0:1:2:3:4:5", "2001:db8:0:1::/64"),
        ("2001:db8:0:1::", "2001:db8:0:1::/64"),
        ("::1", "::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "ffff:ffff:ffff:ffff::/64"),
        ("", ""),
        ("/run/carpool.sock", ""),
        ("localhost", ""),
    ],
)
def test_the_owner_that_an_address_stands_for(peer: str, owner: str) -> None:
    assert Owners().of_peer(peer) == owner
    assert len(owner) <= 64


@pytest.mark.parametrize(
    ("forwarded", "owner"),
    [
        ("203.0.113.9", "203.0.113.9"),
        ("1.1.1.1, 203.0.113.9", "203.0.113.9"),
        ("1.1.1.1, 203.0.113.9, 10.1.2.3,192.0.2.7", "203.0.113.9"),
        ("junk, 203.0.113.9 ,  ::ffff:10.1.2.3", "203.0.113.9"),
        ("2001:db8:2::1, 2001:db8:1::1", "2001:db8:2::/64"),
        ("203.0.113.9:1234, 10.1.2.3:80", "203.0.113.9"),
        ("[2001:db8:2::1]:1234", "2001:db8:2::/64"),
        ("[2001:db8:2::1]", "2001:db8:2::/64"),
        # None that could be told.
        ("", ""),
        (",", ""),
        ("10.1.2.3, 10.1.2.4", ""),
        ("203.0.113.9, unknown", ""),
        ("203.0.113.9, unknown, 10.1.2.3", ""),
        ("203.0.113.9,", ""),
        ("203.0.113.9, [2001:db8:2::1", ""),
        ("203.0.113.256", ""),
        ("203.0.113.9:port", ""),
        ("203.0.113.9/32", ""),
        ("\u00b2.1.1.1", ""),
    ],
)
def test_the_owner_behind_a_trusted_proxy(forwarded: str, owner: str) -> None:
    owners = Owners(PROXIES)
    for _ in range(2):  # also from memory
        assert owners.behind(forwarded.encode("latin-1")) == owner


def test_a_long_header_is_read_from_its_end_and_never_in_the_middle_of_an_address() -> None:
    owners = Owners(PROXIES)
    client, proxy = b"203.0.113.9", b", 10.1.2.3"
    for hops in range(1, 100):
        for padding in range(12):
            header = b"8.8.8.8, " * 9 + b"9" * padding + b"," + client + proxy * hops
            fits = len(client + proxy * hops) < FORWARDED_BYTES_MAX
            assert owners.behind(header) == (client.decode() if fits else "")
    assert owners.behind(b"9" * 5000 + client) == ""


def test_headers_are_remembered_but_not_for_ever() -> None:
    owners = Owners(PROXIES)
    first = owners.behind(b"203.0.113.9")
    assert owners.behind(b"203.0.113.9") is first
    for number in range(FORWARDED_KEPT_MAX):
        owners.behind(b"1.2.%d.%d" % divmod(number, 256))
    assert owners.behind(b"203.0.113.9") == first
    assert owners.behind(b"203.0.113.9") is not first


def test_networks_are_ipv4_where_they_are_in_truth() -> None:
    assert str(parse_network("::ffff:10.0.0.0/104")) == "10.0.0.0/8"
    assert str(parse_network("::ffff:10.0.0.1")) == "10.0.0.1/32"
    assert str(parse_network("::/64")) == "::/64"
    assert parse_address("10.0.0.0/8") is None


def make_gate(*proxies: str) -> Gate:
    broker = MemoryBroker(waiting_max=1, bytes_max=1, lanes_max=1, tiers=3)
    no_tasks: Any = None
    return Gate(broker, no_tasks, {}, lowest_tier=2, trusted_proxies=proxies)


FORWARDED = {b"x-forwarded-for": b"203.0.113.9"}


def test_the_peer_is_asked_about_once_a_connection() -> None:
    gate, peer = make_gate(), Peer("192.0.2.1")
    first = gate.identify({}, peer)
    assert first == Caller("192.0.2.1", 2)
    assert gate.identify(FORWARDED, peer) is first  # and its word does not count


def test_a_proxy_asks_for_many() -> None:
    gate, peer = make_gate("192.0.2.1"), Peer("192.0.2.1")
    assert gate.identify(FORWARDED, peer) == Caller("203.0.113.9", 2)
    assert gate.identify({b"x-forwarded-for": b"203.0.113.10"}, peer) == Caller("203.0.113.10", 2)
    assert gate.identify({}, peer) == gate.identify({b"x-forwarded-for": b"?"}, peer) == Caller("192.0.2.1", 2)


def test_whoever_is_not_in_the_list_is_not_believed() -> None:
    gate = make_gate("192.0.2.1", "10.0.0.0/8")
    assert gate.identify(FORWARDED, Peer("192.0.2.2")) == Caller("192.0.2.2", 2)
    assert gate.identify(FORWARDED, Peer("")) == Caller("", 2)


def test_a_request_without_an_owner_is_nobodys() -> None:
    assert make_request("r", Witness(), now=0.0).owner == ""
