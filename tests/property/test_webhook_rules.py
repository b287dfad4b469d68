"""Webhooks: signatures, the schedule, and where nothing may be sent."""

import base64
import hashlib
import hmac
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carpool.broker.webhooks.rules import (
    PAUSE_S_MAX,
    Answered,
    Callbacks,
    allowed_host,
    retry_after_of,
    secret_of,
    signed_headers,
    verdict,
)
from carpool.core.errors import CallbackDenied

DAY_S = 86400.0


class TestSignatures:
    def test_the_example_of_the_specification(self) -> None:
        """From https://www.standardwebhooks.com, as its libraries test it."""
        secret = secret_of("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
        headers = signed_headers("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}', [secret])
        assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="

    @given(body=st.binary(max_size=200), secrets=st.lists(st.binary(min_size=24, max_size=64), min_size=1, max_size=3))
    def test_each_secret_verifies(self, body: bytes, secrets: list[bytes]) -> None:
        headers = signed_headers("id", 5, body, secrets)
        signatures = headers["webhook-signature"].split(" ")
        for secret, signature in zip(secrets, signatures, strict=True):
            expected = hmac.new(secret, b"id.5." + body, hashlib.sha256).digest()
            assert signature == "v1," + base64.b64encode(expected).decode()

    @given(secret=st.binary(max_size=100))
    def test_a_secret_has_24_to_64_bytes(self, secret: bytes) -> None:
        text = "whsec_" + base64.b64encode(secret).decode()
        if 24 <= len(secret) <= 64:
            assert secret_of(text) == secret
        else:
            with pytest.raises(ValueError, match="whsec_") as caught:
                secret_of(text)
            assert not secret or text not in str(caught.value)

    @pytest.mark.parametrize("text", ["", "whsec_", "whsec_*", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_é" * 9])
    def test_what_is_none(self, text: str) -> None:
        with pytest.raises(ValueError, match="random bytes"):
            secret_of(text)


class TestSchedule:
    @given(
        status=st.integers(0, 599),
        attempts=st.integers(0, 10_000),
        age_s=st.floats(0, 2 * DAY_S),
        luck=st.floats(0, 1),
        asked_s=st.floats(0, 2 * DAY_S),
    )
    def test_what_follows_an_attempt(
        self, status: int, attempts: int, age_s: float, luck: float, asked_s: float
    ) -> None:
        answered = Answered(status, retry_after_s=asked_s)
        found = verdict(answered, attempts, age_s, luck, backoff_s=5.0, retry_for_s=DAY_S)
        if 200 <= status < 300:
            assert found.what == "delivered"
        elif status == 410:
            assert found.what == "given_up"
        elif found.what == "failed":
            assert age_s + found.pause_s <= DAY_S + 1e-6
            assert min(asked_s, DAY_S - age_s) <= found.pause_s <= max(asked_s, PAUSE_S_MAX)
            assert found.pause_s >= 2.5
        else:  # whatever the receiver asked for
            assert found.what == "given_up"
            assert age_s + PAUSE_S_MAX > DAY_S
        assert (found.failure != "") == (found.what != "delivered")

    def test_it_is_sent_again_for_a_day(self) -> None:
        age_s, attempts = 0.0, 0
        while (
            found := verdict(Answered(500), attempts, age_s, 0.5, backoff_s=5.0, retry_for_s=DAY_S)
        ).what == "failed":
            age_s += found.pause_s
            attempts += 1
        assert age_s > DAY_S - PAUSE_S_MAX
        assert 20 < attempts < 60

    @given(st.text(max_size=12))
    @example("120")
    @example("²")
    @example("Wed, 21 Oct 2026 07:28:00 GMT")
    def test_retry_after_is_a_number_or_nothing(self, text: str) -> None:
        assert retry_after_of(text) >= 0
        assert retry_after_of("120") == 120
        assert retry_after_of(None) == 0


def embedded(address: IPv4Address) -> list[str]:
    """IPv6 addresses that stand for an IPv4 address."""
    number = int(address)
    return [
        f"::ffff:{address}",
        f"64:ff9b::{address}",
        f"::{address}",
        str(IPv6Address((0x2002 << 112) | (number << 80))),
        str(IPv6Address((0x20010000 << 96) | (number ^ 0xFFFFFFFF))),
    ]


PRIVATE = ["10.0.0.1", "127.0.0.1", "172.16.5.5", "192.168.1.1"]
NEVER = [
    *("169.254.169.254", "169.254.170.2", "0.0.0.0", "0.1.2.3", "224.0.0.1", "255.255.255.255", "240.0.0.1"),
    *("192.0.0.0", "192.0.0.8", "192.0.0.9", "192.0.0.192", "192.0.0.255", "192.0.2.1", "192.88.99.1", "198.18.0.1"),
    *("198.51.100.1", "203.0.113.1", "100.64.0.1", "100.100.100.200", "168.63.129.16"),
]
NEVER_V6 = [
    *("::", "fe80::1", "fe80::1%eth0", "fe80::a9fe:a9fe", "ff02::1", "64:ff9b:1::1", "100::1", "5f00::1", "4000::1"),
    *("2001:2::1", "2001:10::1", "2001:db8::1", "3fff::1", "::ffff:0:8.8.8.8"),
    # Metadata: AWS, Google, Oracle, Scaleway.
    *("fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "fd00:c1::a9fe:a9fe", "fd00:42::42"),
]
PUBLIC = ["8.8.8.8", "1.1.1.1", "192.0.1.1", "100.128.0.1", "2606:4700::1111", "2001:4860:4860::8888", "2a00::1"]


class TestAddresses:
    public_only = Callbacks([allowed_host("example.org")])
    private_too = Callbacks([allowed_host("example.org")], allow_private=True)

    @given(st.ip_addresses(v=4))
    def test_an_ipv4_address_is_the_same_inside_an_ipv6_one(self, address: IPv4Address) -> None:
        for callbacks in (self.public_only, self.private_too):
            is_allowed = callbacks.is_allowed(str(address))
            if int(address) > 1:
                assert {callbacks.is_allowed(each) for each in embedded(address)} == {is_allowed}

    @given(st.ip_addresses())
    def test_only_what_is_public(self, address: IPv4Address | IPv6Address) -> None:
        if self.public_only.is_allowed(str(address)):
            assert address.is_global
            assert not (address.is_multicast or address.is_loopback or address.is_private or address.is_link_local)
            assert self.private_too.is_allowed(str(address))

    @pytest.mark.parametrize("address", PUBLIC)
    def test_public_ones(self, address: str) -> None:
        assert self.public_only.is_allowed(address) and self.private_too.is_allowed(address)

    @pytest.mark.parametrize("address", [*PRIVATE, "::1", "fc00::1", "fd00:ec3::254", "fd12:3456::1", "fec0::1"])
    def test_private_ones_if_they_are_allowed(self, address: str) -> None:
        assert not self.public_only.is_allowed(address)
        assert self.private_too.is_allowed(address)

    @pytest.mark.parametrize("address", [*NEVER, *NEVER_V6, "nonsense", ""])
    def test_these_never(self, address: str) -> None:
        assert not self.public_only.is_allowed(address)
        assert not self.private_too.is_allowed(address)

    def test_and_these_may(self) -> None:
        assert self.public_only.is_allowed("93.184.216.34")
        assert self.public_only.is_allowed("2606:2800:220:1:248:1893:25c8:1946")


class TestUrls:
    callbacks = Callbacks(map(allowed_host, ("hooks.example.org", "*.example.com", "other.example:8443")))

    @pytest.mark.parametrize(
        "url",
        [
            "https://hooks.example.org",
            "https://HOOKS.example.org/a/b?x=1&y=%20",
            "https://hooks.example.org:443/a",
            "https://a.b.example.com/",
            "https://other.example:8443/x",
        ],
    )
    def test_that_may_be_sent_to(self, url: str) -> None:
        assert (self.callbacks.check(url).host or "-") in url.lower()

    @pytest.mark.parametrize(
        "url",
        [
            "",
            "x",
            "https://",
            "https:///path",
            "http://hooks.example.org/",
            "ftp://hooks.example.org/",
            "file:///etc/passwd",
            "https://example.org/",
            "https://example.com/",
            "https://xexample.com/",
            "https://hooks.example.org:8443/",
            "https://other.example/",
            "https://hooks.example.org.evil.test/",
            "https://hooks.example.org@evil.test/",
            "https://user:pw@hooks.example.org/",
            "https://@hooks.example.org/",
            "https://evil.test\\@hooks.example.org/",
            "https://evil.test#@hooks.example.org/",
            "https://hooks.example.org/#fragment",
            "https://hooks.example.org/a b",
            "https://hooks.example.org/\r\nHost: x",
            "https://hooks.example.org:99999/",
            "https://hooks.example.org:x/",
            "https://hööks.example.org/",
            "https://169.254.169.254/latest/meta-data",
            "https://[::1]/",
            "https://0x7f.1/",
            "https://hooks.example.org:/",
            "https://hooks.example.org./",
            "https://.example.com/",
            "https://a..example.com/",
            "https://*.example.com/",
            "https://evil.test%2f.example.com/",
            "https://evil.test;.example.com/",
            "https://hooks.example.org/" + "a" * 2048,
        ],
    )
    def test_that_may_not(self, url: str) -> None:
        with pytest.raises(CallbackDenied):
            self.callbacks.check(url)

    @given(st.text(max_size=60))
    @example("https://[hooks.example.org")
    @example("https://[::1")
    def test_nothing_else_is_raised(self, url: str) -> None:
        for text in (url, "https://" + url, "https://hooks.example.org" + url):
            try:
                found = self.callbacks.check(text)
            except CallbackDenied:
                continue
            assert (found.host or "").lower() == "hooks.example.org" or (found.host or "").lower().endswith(
                ".example.com"
            )

    def test_without_a_list_nothing_is_sent(self) -> None:
        with pytest.raises(CallbackDenied, match="no webhooks"):
            Callbacks([]).check("https://hooks.example.org")

    def test_an_address_on_the_list_must_be_allowed_too(self) -> None:
        hosts = [allowed_host("127.0.0.1:9000"), allowed_host("[::1]:9000")]
        for url in ("http://127.0.0.1:9000/", "http://[::1]:9000/"):
            with pytest.raises(CallbackDenied, match="address"):
                Callbacks(hosts, allow_http=True).check(url)
            assert Callbacks(hosts, allow_http=True, allow_private=True).check(url).port == 9000

    @pytest.mark.parametrize(
        "text", ["", "*", "a b", "https://a.b", "a/b", "a:b", "a:0", "a:70000", "*.*", "[::1", "a..b"]
    )
    def test_entries_of_the_list_that_are_none(self, text: str) -> None:
        with pytest.raises(ValueError, match="a host is like"):
            allowed_host(text)
