"""Whether and when to try a batch again. Pure: randomness is an argument."""

# Answers that say nothing about the inputs: another endpoint may do better.
TRY_ELSEWHERE = frozenset({429, 500, 502, 503, 504})


def pause_before(attempt: int, backoff_s: float, random_share: float) -> float:
    """Seconds to pause before attempt 2, 3, …: exponential with full jitter; `random_share` is in [0, 1)."""
    ceiling: float = backoff_s * 2 ** (attempt - 2)
    return ceiling * random_share
