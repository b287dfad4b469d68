"""Broker URLs: every form that is allowed, every mistake that is named, and passwords that never show."""

import pytest
from rich.pretty import pretty_repr

from carpool.broker.redis.client.address import BadBrokerUrlError, parse_broker_url
from carpool.core.names import TlsFiles

SECRET = "hunter2-canary"


def test_ipv6_in_brackets() -> None:
    assert parse_broker_url("redis://[2001:DB8::1]").hosts == (("2001:db8::1", 6379),)
    assert parse_broker_url("redis://ann:pw@[::1]:7000/1").hosts == (("::1", 7000),)


BAD = {
    "redis://a:{}@h1,h2": "several hosts",
    "{}@host": "begin with",
    "http://a:{}@host": "begin with",
    "REDIS://a:{}@host": "begin with",
    "redis://a:{}@": "host is missing",
    "redis://a:{}@host:0": "port",
    "redis://a:{}@host:65536": "port",
    "redis://a:{}@host:x": "host is missing or malformed",
    "redis://a:{}@ho st": "malformed",
    "redis://a:{}@::1": "brackets",
    "redis://a:{}@[::1": "malformed",
    "redis://a:{}@[:::1]": "no IPv6 address",
    "redis://a:{}/x@host": "%2F",
    "redis://a:{}?x@host": "%3F",
    "redis://a:{}#x@host": "%23",
    "redis://a:{}%@host": "%25",
    "redis://a:{}%ff@host": "UTF-8",
    "redis://a:{}@host/x": "database",
    "redis://a:{}@host/-1": "database",
    "redis://a:{}@host/1/2": "database",
    "redis://a:{}@host/99999999999999999999": "database",
    "redis://a:{}@host?db=1": "query",
    "redis+sentinel://a:{}@h1": "master is missing",
    "redis+sentinel://a:{}@h1/": "master is missing",
    "redis+sentinel://a:{}@h1/mymaster/x": "database",
    "redis+cluster://a:{}@h1/1": "no databases",
    "redis+cluster://a:{}@h1,,h2": "host is missing",
    "redis+cluster://a:{}@" + ",".join(["h"] * 65): "more than 64",
    "redis://a:{}@" + "h" * 5000: "longer than",
}


@pytest.mark.parametrize(("url", "hint"), BAD.items(), ids=[*map(str, range(len(BAD)))])
def test_mistakes_are_named_and_passwords_are_not(url: str, hint: str) -> None:
    with pytest.raises(BadBrokerUrlError) as caught:
        parse_broker_url(url.format(SECRET))
    assert hint in str(caught.value)
    # Neither here nor in what a traceback would print above it.
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None and (caught.value.__suppress_context__ or caught.value.__context__ is None)


def test_two_passwords_are_one_too_many() -> None:
    with pytest.raises(BadBrokerUrlError, match="give one of them") as caught:
        parse_broker_url(f"redis://:{SECRET}@host", password=SECRET)
    assert SECRET not in str(caught.value)


def test_files_for_tls_without_tls() -> None:
    with pytest.raises(BadBrokerUrlError, match=r"write rediss\+cluster://"):
        parse_broker_url("redis+cluster://host", files=TlsFiles("ca.pem"))


@pytest.mark.parametrize(("cert", "key"), [("cert.pem", ""), ("", "key.pem")])
def test_a_certificate_needs_its_key(cert: str, key: str) -> None:
    with pytest.raises(BadBrokerUrlError, match="belong together"):
        parse_broker_url("rediss://host", files=TlsFiles("", cert, key))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"redis://ann:{SECRET}@host/2", "redis://ann:…@host:6379/2"),
        (f"rediss+sentinel://:{SECRET}@h1,[::1]/main", "rediss+sentinel://:…@h1:26379,[::1]:26379/main"),
        ("redis+cluster://ann@h1:7000", "redis+cluster://ann@h1:7000"),
    ],
)
def test_what_is_shown_hides_the_password(url: str, shown: str) -> None:
    address = parse_broker_url(url)
    assert str(address) == shown
    for text in (str(address), repr(address), f"{address}", pretty_repr(address), repr([address])):
        assert SECRET not in text
        assert shown in text
