"""Signatures as the Standard Webhooks specification has them (https://www.standardwebhooks.com). Pure."""

import base64
import binascii
import hmac
from collections.abc import Sequence

PREFIX = "whsec_"
# What the specification asks for.
SECRET_BYTES_MIN, SECRET_BYTES_MAX = 24, 64


def secret_of(text: str) -> bytes:
    """The bytes of a secret as it is written in the configuration; raises ValueError, which does not quote it."""
    try:
        secret = base64.b64decode(text.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if not text.startswith(PREFIX) or not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise ValueError(
            f"a secret is `{PREFIX}` and the base64 of {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} random bytes, "
            f"like that of `openssl rand -base64 32`"
        )
    return secret


def signed_headers(webhook_id: str, timestamp: int, body: bytes, secrets: Sequence[bytes]) -> dict[str, str]:
    """The headers that a receiver verifies: a signature with each secret, so that receivers survive a change of it."""
    signatures = []
    for secret in secrets:
        signature = hmac.new(secret, b"%b.%d." % (webhook_id.encode(), timestamp), "sha256")
        signature.update(body)  # apart: a long one is not copied
        signatures.append(base64.b64encode(signature.digest()).decode())
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }
