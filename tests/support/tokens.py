"""JSON Web Tokens for tests: made by hand, so that they can be as wrong as an attacker likes."""

import json
import time
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from typing import Any

from joserfc.jwk import ECKey, Key, OctKey, OKPKey, RSAKey
from joserfc.jws import JWSRegistry

SECRET = b"a secret of thirty-two bytes or more, for tests"
ALGORITHMS = {"RSA": "RS256", "EC": "ES256", "OKP": "EdDSA", "oct": "HS256"}


def encode(value: bytes) -> bytes:
    """Base64url without padding."""
    return urlsafe_b64encode(value).rstrip(b"=")


def token_of(key: Key | bytes, claims: Any = None, header: Mapping[str, Any] | None = None, signed_as: str = "") -> str:
    """A token with these claims, by default good ones; `signed_as` is another algorithm than the header says."""
    if isinstance(key, bytes):
        key = OctKey.import_key(key)
    algorithm = ALGORITHMS[key.key_type]
    head = {"alg": algorithm, "typ": "JWT", **(header or {})}
    body = good_claims() if claims is None else claims
    signed = encode(json.dumps(head).encode()) + b"." + encode(json.dumps(body).encode())
    return (signed + b"." + encode(JWSRegistry.algorithms[signed_as or algorithm].sign(signed, key))).decode()


def good_claims(**others: Any) -> dict[str, Any]:
    """Claims that are valid for a while; None leaves one out."""
    claims = {"sub": "ann", "exp": int(time.time()) + 600, **others}
    return {name: value for name, value in claims.items() if value is not None}


class Signers:
    """One key of each kind, and the set of their public halves."""

    def __init__(self) -> None:
        self.rsa = RSAKey.generate_key(2048, {"kid": "rsa-1"})
        self.ec = ECKey.generate_key("P-256", {"kid": "ec-1"})
        self.okp = OKPKey.generate_key("Ed25519", {"kid": "okp-1"})
        self.secret = OctKey.import_key(SECRET, {"kid": "secret-1"})

    def key_set(self, *keys: Key) -> bytes:
        """A JWKS with these, or all four."""
        chosen = keys or (self.rsa, self.ec, self.okp, self.secret)
        return json.dumps({"keys": [key.as_dict(private=key.key_type == "oct") for key in chosen]}).encode()

    def all(self) -> list[Key]:
        return [self.rsa, self.ec, self.okp, self.secret]
