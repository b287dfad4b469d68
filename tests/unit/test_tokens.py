"""Tokens (rules at the top of `admission/tokens.py`): every attack ends as nobody."""

import json
from itertools import count
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import example, given
from hypothesis import strategies as st
from joserfc.jwk import ECKey, Key, OctKey

from carpool.admission.tokens import TOKEN_BYTES_MAX, TokenKeys, TokenRules, owner_of_subject
from support.tokens import ALGORITHMS, SECRET, Signers, encode, token_of

NOW = 1_800_000_000.0
RULES = TokenRules()
SECRET_RULES = TokenRules(["HS256"])
SIGNERS = Signers()
SET = TokenKeys(SIGNERS.key_set(), RULES)
HS = TokenKeys(SECRET, SECRET_RULES)


def claims(**others: Any) -> dict[str, Any]:
    said = {"sub": "ann", "exp": NOW + 60, "tier": "paid", **others}
    return {name: value for name, value in said.items() if value is not None}


def owner(keys: TokenKeys, token: str | bytes) -> str | None:
    found = keys.verify(token if isinstance(token, bytes) else token.encode(), NOW)
    return found and found.owner


def public_pem(key: Key) -> bytes:
    pem: bytes = key.public_key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[union-attr]
    return pem


def short_rsa_pem() -> bytes:
    public = generate_private_key(65537, 1024).public_key()
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


class TestKeys:
    @pytest.mark.parametrize("signer", [SIGNERS.rsa, SIGNERS.ec, SIGNERS.okp], ids=lambda key: key.key_type)
    def test_a_pem_takes_tokens_with_any_kid_and_without(self, signer: Key) -> None:
        keys = TokenKeys(public_pem(signer), RULES)
        assert owner(keys, token_of(signer, claims())) == "jwt:ann"
        assert owner(keys, token_of(signer, claims(), {"kid": "../../dev/null"})) == "jwt:ann"
        assert owner(keys, token_of(Signers().ec, claims())) is None

    def test_a_set_of_one_needs_no_kid_but_another_kid_is_not_it(self) -> None:
        keys = TokenKeys(SIGNERS.key_set(SIGNERS.ec), RULES)
        assert owner(keys, token_of(SIGNERS.ec, claims())) == "jwt:ann"
        assert owner(keys, token_of(SIGNERS.ec, claims(), {"kid": "ec-2"})) is None

    def test_what_a_set_has_for_other_purposes_is_passed_over(self) -> None:
        listed = json.loads(SIGNERS.key_set(SIGNERS.ec))["keys"]
        others = [
            {**SIGNERS.rsa.as_dict(private=False), "use": "enc"},
            {**SIGNERS.rsa.as_dict(private=False), "alg": "RS512", "kid": "rsa-512"},
            ECKey.generate_key("P-384").as_dict(private=False),
            {"kty": "new"},
        ]
        keys = TokenKeys(json.dumps({"keys": [*others, *listed]}).encode(), RULES)
        assert owner(keys, token_of(SIGNERS.ec, claims())) == "jwt:ann"
        assert owner(keys, token_of(SIGNERS.rsa, claims(), {"kid": "rsa-1"})) is None

    def test_algorithms_may_be_fewer(self) -> None:
        keys = TokenKeys(SIGNERS.key_set(), TokenRules(["RS256"]))
        assert owner(keys, token_of(SIGNERS.rsa, claims(), {"kid": "rsa-1"})) == "jwt:ann"
        assert owner(keys, token_of(SIGNERS.ec, claims(), {"kid": "ec-1"})) is None
        with pytest.raises(ValueError, match="no key for ES256"):
            TokenKeys(SIGNERS.key_set(SIGNERS.rsa), TokenRules(["ES256"]))

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            (b"", "neither"),
            (b"short-and-secret", "neither"),
            (b"{", "not a JSON Web Key Set"),
            (b'{"keys": 7}', "not a JSON Web Key Set"),
            (b'{"keys": []}', "no key for"),
            (b'{"keys": [{"kty": "RSA", "n": "AQAB", "e": "canary"}]}', "of type RSA cannot be read"),
            (b'{"kty": "oct", "k": "c2hvcnQ"}', "at least 32 bytes"),
            (b'{"kty": "oct", "alg": "RS256", "k": "c2hvcnQ"}', "cannot be for RS256"),
            (b'{"kty": "oct", "kid": 7, "k": "c2hvcnQ"}', "not a text"),
            (b"-----BEGIN PUBLIC KEY-----\ncanary\n-----END PUBLIC KEY-----", "not a PEM"),
            (short_rsa_pem(), "at least 2048 bits"),
            (public_pem(ECKey.generate_key("P-384")), "not a PEM .* RSA"),
            (
                SIGNERS.ec.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),  # type: ignore[union-attr]
                "private key",
            ),
            (SIGNERS.key_set(SIGNERS.ec, SIGNERS.ec), "does not tell apart"),
        ],
        ids=count(),  # keys are drawn anew in each process, and a test has the same name in all of them
    )
    def test_files_that_cannot_be_used(self, content: bytes, says: str) -> None:
        with pytest.raises(ValueError, match=says) as fault:
            TokenKeys(content, RULES)
        assert "canary" not in str(fault.value) and "short-and-secret" not in str(fault.value)

    @pytest.mark.parametrize(
        ("secret", "says"),
        [(b"", "at least 32"), (b"short-and-secret\n", "at least 32"), (bytes(64), "again and again")],
    )
    def test_secrets_that_are_none(self, secret: bytes, says: str) -> None:
        with pytest.raises(ValueError, match=says) as fault:
            TokenKeys(secret, SECRET_RULES)
        assert "short-and-secret" not in str(fault.value)


class TestAttacks:
    def test_a_public_key_is_never_a_secret(self) -> None:
        """The classic: the RSA key that everybody may read, used to sign with HS256."""
        pem = public_pem(SIGNERS.rsa)
        keys = TokenKeys(pem, RULES)
        forged = OctKey(pem, pem)
        for header in ({"alg": "HS256"}, {"alg": "RS256"}, {"alg": "HS256", "kid": "rsa-1"}):
            assert owner(keys, token_of(forged, claims(), header, signed_as="HS256")) is None
            assert owner(SET, token_of(forged, claims(), header, signed_as="HS256")) is None

    @pytest.mark.parametrize(
        "kid",
        ["../../../dev/null", "/dev/null", "rsa-1' OR '1'='1", "", "rsa-1\0", "http://127.0.0.1/", 7, ["rsa-1"], {}],
    )
    def test_a_kid_that_names_no_key(self, kid: Any) -> None:
        empty = OctKey(b"", b"")
        for signer in (SIGNERS.rsa, OctKey.import_key(b"x" * 32)):
            assert owner(SET, token_of(signer, claims(), {"kid": kid})) is None
        with pytest.raises(ValueError, match="empty"):
            token_of(empty, claims(), {"kid": kid})

    @pytest.mark.parametrize(
        "header", [{"crit": ["exp"]}, {"crit": []}, {"b64": False, "crit": ["b64"]}, {"b64": True}]
    )
    def test_what_is_critical_is_not_done_here(self, header: dict[str, Any]) -> None:
        assert owner(HS, token_of(SECRET, claims(), header)) is None

    @pytest.mark.parametrize(
        "other",
        [
            {"exp": None},
            {"exp": NOW - 31},
            {"exp": "soon"},
            {"exp": True},
            {"exp": [NOW + 60]},
            {"exp": -1},
            {"exp": 10**400},
            {"exp": {}},
            {"nbf": NOW + 31},
            {"nbf": "now"},
            {"nbf": False},
            {"iat": "then"},
            {"sub": None},
            {"sub": ""},
            {"sub": 7},
            {"sub": ["ann"]},
            {"sub": {"a": 1}},
            {"tier": 7},
            {"tier": ["enterprise"]},
        ],
        ids=str,
    )
    def test_claims_that_are_missing_or_odd(self, other: dict[str, Any]) -> None:
        assert owner(HS, token_of(SECRET, claims(**other))) is None

    @pytest.mark.parametrize("body", [[], "ann", 7, None, True, [{"sub": "ann"}]])
    def test_claims_that_are_no_object(self, body: Any) -> None:
        signed = encode(b'{"alg":"HS256"}') + b"." + encode(json.dumps(body).encode())
        good = token_of(SECRET, claims())
        assert owner(HS, signed + b"." + good.rpartition(".")[2].encode()) is None
        assert owner(HS, token_of(SECRET, body if body is not None else "null")) is None

    def test_the_leeway(self) -> None:
        for other in ({"exp": NOW - 29}, {"nbf": NOW + 29}):
            assert owner(HS, token_of(SECRET, claims(**other))) == "jwt:ann"

    @pytest.mark.parametrize(
        ("said", "is_good"),
        [
            ({"iss": "us", "aud": "carpool"}, True),
            ({"iss": "us", "aud": ["other", "carpool"]}, True),
            ({"iss": "us"}, False),
            ({"aud": "carpool"}, False),
            ({"iss": "them", "aud": "carpool"}, False),
            ({"iss": ["us"], "aud": "carpool"}, False),
            ({"iss": "us", "aud": "carpool2"}, False),
            ({"iss": "us", "aud": ["carpool", 7]}, False),
            ({"iss": "us", "aud": {"carpool": 1}}, False),
            ({"iss": "us", "aud": []}, False),
        ],
    )
    def test_issuer_and_audience(self, said: dict[str, Any], is_good: bool) -> None:
        keys = TokenKeys(SECRET, TokenRules(["HS256"], issuer="us", audience="carpool"))
        assert (owner(keys, token_of(SECRET, claims(**said))) == "jwt:ann") is is_good

    def test_a_long_token_is_not_looked_at(self) -> None:
        short = token_of(SECRET, claims(more="x" * 5000))
        assert len(short) < TOKEN_BYTES_MAX and owner(HS, short) == "jwt:ann"
        assert owner(HS, token_of(SECRET, claims(more="x" * 75_000))) is None
        deep = encode(b'{"alg":' + b"[" * 4000) + b".AAAA.AAAA"
        assert owner(HS, deep) is None

    @given(st.integers(min_value=0), st.integers(1, 255))
    def test_a_token_that_was_changed_is_another(self, where: int, how: int) -> None:
        token = bytearray(token_of(SECRET, claims()).encode())
        end = token.rindex(b".") - 1  # in what is signed: of the signature's last digit, some bits say nothing
        token[where % end] ^= how
        assert owner(HS, bytes(token)) is None

    def test_the_kinds_are_the_documented_ones(self) -> None:
        assert sorted(ALGORITHMS.values()) == ["ES256", "EdDSA", "HS256", "RS256"]


class TestOwners:
    @given(st.lists(st.text(min_size=1, max_size=80), unique=True, min_size=2, max_size=8))
    @example(["a", "a ", " a"])
    @example(["x" * 60, "x" * 61, "x" * 62])
    @example(["é", "e\u0301"])
    @example(["\ud800", "\udbff"])
    def test_two_subjects_never_become_one_owner(self, subjects: list[str]) -> None:
        owners = [owner_of_subject(subject) for subject in subjects]
        assert len(set(owners)) == len(subjects)
        assert all(len(each) <= 64 and each.isascii() and each.isprintable() for each in owners)

    def test_a_subject_that_reads_like_the_owner_of_another(self) -> None:
        hashed = owner_of_subject("é")
        assert hashed.startswith("jwt#")
        assert owner_of_subject(hashed) != hashed
        assert owner_of_subject("127.0.0.1") == "jwt:127.0.0.1"
