"""What becomes of a webhook after an attempt. Pure.

1. 2xx: delivered. 410: the receiver wants no more of this, given up. Anything else, a redirect too, is sent again.
2. Pauses double up to an hour, with jitter. A `Retry-After` makes a pause longer, never shorter; where it points
   beyond the end, the last attempt is at the end.
3. When the next attempt would come later than `retry_for_s` after the outcome, it is given up.
"""

from typing import Literal, NamedTuple

PAUSE_S_MAX = 3600.0
# Doubling ends long before.
_DOUBLINGS_MAX = 30


class Answered(NamedTuple):
    """What a receiver said: a status, or why there is none."""

    status: int
    failure: str = ""
    # Seconds; 0 if it does not say.
    retry_after_s: float = 0.0


class Verdict(NamedTuple):
    """What becomes of the webhook after that."""

    what: Literal["delivered", "failed", "given_up"]
    # Until the next attempt.
    pause_s: float = 0.0
    # Why not delivered.
    failure: str = ""


def verdict(
    answered: Answered, attempts: int, age_s: float, luck: float, *, backoff_s: float, retry_for_s: float
) -> Verdict:
    """Judge an attempt before which there were so many others; `luck` is between 0 and 1."""
    if 200 <= answered.status < 300:
        return Verdict("delivered")
    failure = answered.failure or f"status {answered.status}"
    if answered.status == 410:
        return Verdict("given_up", failure=failure)
    longest = min(PAUSE_S_MAX, backoff_s * (1 << min(attempts, _DOUBLINGS_MAX)))
    pause_s, left_s = longest * (0.5 + 0.5 * luck), retry_for_s - age_s
    if pause_s > left_s:
        return Verdict("given_up", failure=failure)
    return Verdict("failed", max(pause_s, min(answered.retry_after_s, left_s)), failure)


def retry_after_of(header: str | None) -> float:
    """Seconds in a Retry-After header; a date, or what is no number, counts as none."""
    return float(header) if header and header.isascii() and header.isdigit() and len(header) < 10 else 0.0
