"""The owner behind trusted proxies, whatever clients write into the header that the proxies pass on."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from hypothesis import example, given
from hypothesis import strategies as st

from carpool.admission.owners import FORWARDED_BYTES_MAX, Owners, owner_of, parse_address

TRUSTED = ("10.0.0.0/8", "2001:db8::/32")
OWNERS = Owners(TRUSTED)


def is_trusted(address: IPv4Address | IPv6Address) -> bool:
    return any(address in ip_network(network) for network in TRUSTED)


proxies = st.one_of(st.ip_addresses(network=TRUSTED[0]), st.ip_addresses(network=TRUSTED[1]))
clients = (
    st.ip_addresses().map(lambda address: parse_address(str(address)) or address).filter(lambda a: not is_trusted(a))
)
spaces = st.sampled_from(["", " ", "\t", "  "])
# A client's own header may have anything in it that HTTP lets through.
spoofed = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=300)


@st.composite
def written(draw: st.DrawFn, address: IPv4Address | IPv6Address) -> str:
    """An address as one proxy or another writes it."""
    port = draw(st.integers(0, 65535))
    forms = [str(address)]
    if isinstance(address, IPv4Address):
        forms += [f"{address}:{port}", f"::ffff:{address}", f"[::ffff:{address}]:{port}"]
    else:
        forms += [address.exploded, str(address).upper(), f"[{address}]", f"[{address}]:{port}"]
    return draw(spaces) + draw(st.sampled_from(forms)) + draw(spaces)


@given(clients, st.lists(proxies, max_size=3), st.lists(spoofed, max_size=3), st.data())
def test_the_client_that_the_outermost_proxy_saw(
    client: IPv4Address | IPv6Address,
    behind: list[IPv4Address | IPv6Address],
    before: list[str],
    data: st.DataObject,
) -> None:
    seen = [data.draw(written(address)) for address in (client, *behind)]
    header = ",".join([*before, *seen]).encode("latin-1")
    told = len(",".join(seen)) < FORWARDED_BYTES_MAX
    assert OWNERS.behind(header) == (owner_of(client) if told else "")


@given(st.binary(max_size=600))
@example(b"::ffff:10.0.0.1")
@example(b"fe80::1%" + b"x" * 200)
@example(b"10.0.0.1," * 60)
def test_any_bytes_give_an_owner_or_none(header: bytes) -> None:
    owner = OWNERS.behind(header)
    assert len(owner) <= 64 and owner.isascii()
    if owner:
        network = ip_network(owner)  # raises where it is none
        assert network.prefixlen == (32 if network.version == 4 else 64)
        assert network.version == 4 or network.network_address.ipv4_mapped is None


@given(st.ip_addresses())
def test_one_client_has_one_owner(address: IPv4Address | IPv6Address) -> None:
    owner = OWNERS.of_peer(str(address))
    assert ip_address(owner.partition("/")[0])
    if isinstance(address, IPv4Address):
        assert owner == OWNERS.of_peer(f"::ffff:{address}") == str(address)
    elif address.ipv4_mapped is None:
        neighbour = IPv6Address(int(address) ^ 1)
        stranger = IPv6Address(int(address) ^ 1 << 64)
        assert owner == OWNERS.of_peer(str(neighbour)) != OWNERS.of_peer(str(stranger))
