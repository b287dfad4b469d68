"""Who asks (rules at the top of `admission/credentials.py`), and API keys (`core/api_key.py`)."""

from hashlib import sha256
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carpool.admission.credentials import KNOWN_BYTES_MAX, KNOWN_MAX, Credentials, TierTerms
from carpool.admission.gate import Gate
from carpool.admission.owners import Owners
from carpool.admission.tokens import TokenKeys, TokenRules, owner_of_subject
from carpool.core.api_key import ApiKey, decode_keys, encode_key, key_fault, owner_fault
from carpool.core.errors import BrokerDown, Unauthorized
from carpool.core.ports import Caller, Peer, RateLimit
from support.tokens import SECRET, token_of

NOW = 1_800_000_000.0
TIERS = {"paid": TierTerms(0, RateLimit(600, 60, 6)), "free": TierTerms(1, RateLimit(60, 5))}
KEY, OTHER = b"cp_" + b"a" * 43, b"cp_" + b"b" * 43


class Wall:
    now = NOW

    def __call__(self) -> float:
        return self.now


def key_of(secret: bytes = KEY, **facts: Any) -> ApiKey:
    return ApiKey(**{"name": "alice", "sha256": sha256(secret).hexdigest(), **facts})


def credentials(*configured: ApiKey, takes_keys: bool = True, wall: Wall | None = None) -> Credentials:
    return Credentials(TIERS, "free", takes_keys=takes_keys, configured=configured, wall=wall or Wall())


def bearer(value: bytes | str) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + (value if isinstance(value, bytes) else value.encode())}


def token(**claims: Any) -> str:
    return token_of(SECRET, {"sub": "ann", "exp": NOW + 60, **claims})


def refused(asked: Credentials, headers: dict[bytes, bytes]) -> str:
    with pytest.raises(Unauthorized) as fault:
        asked.identify(headers)
    return fault.value.detail


class TestKeys:
    @pytest.mark.parametrize(
        "headers",
        [bearer(KEY), {b"authorization": b"bearer " + KEY}, {b"x-api-key": KEY}],
        ids=["Bearer", "bearer", "X"],
    )
    def test_a_key_by_either_header(self, headers: dict[bytes, bytes]) -> None:
        asked = credentials(key_of(tier="paid", models=("m",), per_minute=0))
        caller = asked.identify(headers)
        assert caller == Caller("alice", 0, False, RateLimit(0, 60, 6), frozenset({"m"}))
        assert asked.identify(headers) is caller

    def test_a_tier_that_is_not_configured_is_the_lowest(self, caplog: pytest.LogCaptureFixture) -> None:
        asked = credentials()
        asked.change_stored_keys([key_of(tier="gold")])
        assert asked.identify(bearer(KEY)).tier == 1
        assert "not configured" in caplog.text and KEY.decode() not in caplog.text

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {b"authorization": b""},
            {b"authorization": b"Bearer"},
            {b"authorization": b"Bearer "},
            {b"authorization": KEY},
            {b"authorization": b"Basic " + KEY},
            {b"authorization": b"Bearer  " + KEY},
            {b"authorization": b"Bearer " + KEY + b" "},
            {b"authorization": b"Bearer " + KEY + b", Bearer " + KEY},
            {b"authorization": b"Bearer\t" + KEY},
            {b"x-api-key": b"Bearer " + KEY},
            {b"x-api-key": KEY + b", " + KEY},
            {b"x-api-key": b""},
            {b"x-api-key": KEY, **bearer(KEY)},
            {b"x-api-key": OTHER, **bearer(KEY)},
            {b"x-api-key": KEY, b"authorization": b"Basic x"},
            {b"x-api-key": token().encode()},
            bearer(KEY[:-1]),
            bearer(KEY.upper()),
            bearer(OTHER),
            bearer(sha256(KEY).hexdigest()),
            bearer(b"cp_" + b"x" * 100_000),
            bearer(b"\xff\x00"),
        ],
        ids=lambda headers: str(headers)[:60],
    )
    def test_everything_else_is_refused_in_the_same_words(self, headers: dict[bytes, bytes]) -> None:
        asked = credentials(key_of())
        asked.change_token_keys(TokenKeys(SECRET, TokenRules(["HS256"])))
        asked.identify(bearer(KEY))  # that it is known helps nobody
        asked.identify(bearer(token()))
        assert refused(asked, headers) == refused(asked, {})

    def test_a_key_is_over_and_revoked(self) -> None:
        wall = Wall()
        asked = credentials(key_of(OTHER), wall=wall)
        asked.change_stored_keys([key_of(expires=NOW + 1)])
        assert asked.identify(bearer(KEY)).owner == "alice"
        wall.now += 1
        refused(asked, bearer(KEY))
        asked.change_stored_keys([key_of()])
        assert asked.identify(bearer(KEY)).owner == "alice"
        asked.change_stored_keys([])
        refused(asked, bearer(KEY))
        assert asked.identify(bearer(OTHER)).owner == "alice"
        asked.change_configured_keys([])
        refused(asked, bearer(OTHER))

    def test_until_the_store_was_read_a_key_may_be_a_good_one(self) -> None:
        asked = credentials(key_of(OTHER))
        asked.expect_stored_keys()
        assert asked.identify(bearer(OTHER)).owner == "alice"
        for headers in (bearer(KEY), {b"x-api-key": KEY}):
            with pytest.raises(BrokerDown):
                asked.identify(headers)
        refused(asked, bearer("nothing like a key"))
        asked.change_stored_keys([])
        refused(asked, bearer(KEY))

    @pytest.mark.parametrize(
        "secret", [b"a" * 20, b"sk-live-ABC.def/ghi+jkl==", b"550e8400-e29b-41d4-a716-446655440000", b"~" * 256]
    )
    def test_keys_of_any_form(self, secret: bytes) -> None:
        """A key that an operator brings; beside tokens, for which it is not taken."""
        asked = credentials(key_of(secret, default_mode="async"))
        asked.change_token_keys(TokenKeys(SECRET, TokenRules(["HS256"])))
        for headers in (bearer(secret), {b"x-api-key": secret}):
            assert asked.identify(headers) == Caller("alice", 1, False, RateLimit(60, 5), default_mode="async")
        assert asked.identify(bearer(token())).owner == "jwt:ann"
        refused(asked, bearer(secret[:-1] + b"!"))
        assert not key_fault(secret.decode())

    @pytest.mark.parametrize("secret", [b"a" * 19, b"", b"~" * 257, b"two words of 20 chars", "ä".encode() * 20])
    def test_what_is_no_key_lets_nobody_in(self, secret: bytes) -> None:
        """Not by its digest either, which the configuration may have: of a short one that is no secret."""
        assert "20 to 256" in key_fault(secret.decode())
        if not 20 <= len(secret) <= 256:
            refused(credentials(key_of(secret)), bearer(secret))

    def test_a_token_is_good_before_the_store_was_read(self) -> None:
        asked = credentials()
        asked.change_token_keys(TokenKeys(SECRET, TokenRules(["HS256"])))
        asked.expect_stored_keys()
        assert asked.identify(bearer(token())).owner == "jwt:ann"

    @pytest.mark.parametrize(
        ("owner", "is_good"),
        [
            ("alice", True),
            ("Team/7 ", False),
            ("team@example.org", True),
            ("x" * 64, True),
            ("x" * 65, False),
            ("", False),
            ("jwt:ann", False),
            ("jwt#00", False),
            ("JWT:ann", True),
            ("127.0.0.1", False),
            ("2001:db8::/64", False),
            ("::1", False),
            ("10.0.0.0/8", False),
            ("7", True),
            ("é", False),
        ],
    )
    def test_whose_a_key_may_be(self, owner: str, is_good: bool) -> None:
        assert (not owner_fault(owner)) is is_good

    @given(st.one_of(st.ip_addresses().map(str), st.text(max_size=70)))
    @example("\n")
    def test_no_owner_of_a_key_is_that_of_a_stranger_or_a_token(self, text: str) -> None:
        if not owner_fault(text):
            assert text not in (Owners().of_peer(text), owner_of_subject(text), "")
            assert not text.startswith(owner_of_subject("x")[:3] + ":")

    def test_what_is_stored_can_be_read_again(self) -> None:
        key = key_of(owner="team", models=("a", "b"), per_minute=5, created=NOW, default_mode="sync")
        newer = encode_key(key)[:-1] + b',"newer":1}'
        unusable = [b"", b"{}", b'{"name":"x","sha256":"short"}', encode_key(key_of(owner="127.0.0.1"))]
        assert decode_keys([encode_key(key), newer, *unusable]) == [key, key]

    @pytest.mark.parametrize(
        "more",
        [
            b'"owner":"\xff"',
            b'"newer":' + b"[" * 100_000 + b"]" * 100_000,
            b'"per_minute":-1',
            b'"per_minute":%b' % (b"9" * 400),
            b'"burst":0',
            b'"concurrent":-1',
            b'"expires":null',
        ],
        ids=lambda more: more[:16].decode("latin-1"),
    )
    def test_one_that_cannot_be_read_hides_no_other(self, more: bytes) -> None:
        key = key_of(created=NOW)
        odd = encode_key(key_of())[:-1] + b"," + more + b"}"
        assert decode_keys([odd, encode_key(key), odd]) == [key]


class TestTokens:
    def asked(self, wall: Wall | None = None, **rules: Any) -> Credentials:
        asked = credentials(key_of(), takes_keys=False, wall=wall)
        asked.change_token_keys(TokenKeys(SECRET, TokenRules(["HS256"], **rules)))
        return asked

    def test_it_is_made_once_and_known_until_it_is_over(self) -> None:
        wall = Wall()
        asked, headers = self.asked(wall), bearer(token())
        caller = asked.identify(headers)
        wall.now += 89.9
        assert asked.identify(headers) is caller
        wall.now += 0.1
        refused(asked, headers)

    def test_other_keys_make_all_tokens_unknown(self) -> None:
        asked, headers = self.asked(), bearer(token())
        asked.identify(headers)
        asked.change_token_keys(TokenKeys(b"another secret, of more than 32 bytes", TokenRules(["HS256"])))
        refused(asked, headers)

    def test_so_many_are_known_at_most(self) -> None:
        asked = self.asked()
        first = bearer(token(sub="first"))
        caller = asked.identify(first)
        for number in range(KNOWN_MAX):
            asked.identify(bearer(token(sub=str(number))))
        assert 0 < int(repr(asked).split()[-2]) <= KNOWN_MAX
        again = asked.identify(first)
        assert again == caller and again is not caller

    def test_long_ones_have_so_many_bytes_at_most(self) -> None:
        asked = self.asked()
        long = [bearer(token(sub=str(number), more="x" * 5000)) for number in range(2000)]
        for headers in long:
            asked.identify(headers)
        size = len(long[0][b"authorization"]) + 5
        assert 0 < int(repr(asked).split()[-2]) <= KNOWN_BYTES_MAX // (size - 5)
        assert 1000 * size < KNOWN_BYTES_MAX < 2000 * size


def test_the_gate_asks_each_time() -> None:
    """A connection may carry requests of several callers, as behind a proxy."""
    nobody: Any = None
    gate = Gate(nobody, nobody, {}, lowest_tier=1, credentials=credentials(key_of(), key_of(OTHER, name="bob")))
    peer = Peer("127.0.0.1")
    assert [gate.identify(bearer(key), peer).owner for key in (KEY, OTHER, KEY)] == ["alice", "bob", "alice"]
    with pytest.raises(Unauthorized):
        gate.identify({}, peer)
    assert peer.caller is None
