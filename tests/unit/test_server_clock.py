"""What is known of a server's clock is never later than that clock, and nearly as late as a quick answer tells."""

from hypothesis import given
from hypothesis import strategies as st

from carpool.broker.redis.client.server_clock import ANSWERS_KEPT, ServerClock

AHEAD_S = 1_700_000_000.0
HOUR_S = 3600.0


def tell(clock: ServerClock, asked_at: float, there_s: float, back_s: float, ahead_s: float = AHEAD_S) -> float:
    """One question that took so long on its way there and back; when its answer came."""
    clock.told(asked_at + there_s + ahead_s, asked_at, asked_at + there_s + back_s)
    return asked_at + there_s + back_s


def test_a_stall_does_not_spoil_what_is_known() -> None:
    clock = ServerClock()
    now = tell(clock, 100.0, 0.001, 0.001)
    for _ in range(ANSWERS_KEPT - 1):
        now = tell(clock, now + 1.0, 1.0, 1.0)
    assert (now + AHEAD_S) * 1000 - clock.at_least_ms(now) <= 2


@given(st.sampled_from([HOUR_S, -HOUR_S, 0.5, -0.5]))
def test_a_clock_that_is_set_is_believed_at_once(step_s: float) -> None:
    clock, now = ServerClock(), 100.0
    for _ in range(ANSWERS_KEPT):
        now = tell(clock, now + 1.0, 0.001, 0.001)
    now = tell(clock, now + 1.0, 0.001, 0.001, AHEAD_S + step_s)
    assert abs((now + AHEAD_S + step_s) * 1000 - clock.at_least_ms(now)) <= 3
