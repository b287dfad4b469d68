"""Where the time of requests went: the stages sum up to the whole, through retries, searches, sharing and kept results.

In virtual time, with the classes of a gateway.
"""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UnsetType

from carpool.broker.coalescer import Coalescer
from carpool.broker.result_cache import ResultCache, exact_key
from carpool.core.errors import InputRefused
from carpool.core.outcome import Outcome, Output
from carpool.core.ports import NO_OPTIONS
from carpool.core.request import Request
from carpool.core.timeline import state_of
from carpool.telemetry.live import slow_request
from carpool.testing import AttemptFailedError, ConnectionWasDeadError, FakeUpstream, UpstreamResponse, make_request
from support.virtual_gateway import Stand, failing

# What becomes of calls one after the other: most are answered, unless a bad input is among theirs.
REACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                failing(400),
                failing(500),
                UpstreamResponse(503, b""),
                AttemptFailedError("reset"),
                ConnectionWasDeadError("dead"),
            ]
        ),
        st.sampled_from([0.0, 0.003, 0.05, 0.2]),
    ),
    max_size=12,
)
# Seconds before each request comes, and which input it has; those with an odd number are at fault.
ARRIVALS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.001, 0.01, 0.1]), st.sampled_from([0, 0, 2, 4, 6, 8, 1])), min_size=1, max_size=30
)
ROUNDING_MS = 0.05


@settings(max_examples=60)
@given(REACTIONS, ARRIVALS, st.booleans(), st.integers(1, 2))
def test_the_stages_are_all_of_the_time(
    reactions: list[tuple[UpstreamResponse, float]], arrivals: list[tuple[float, int]], is_shared: bool, slots: int
) -> None:
    upstream = FakeUpstream(slots=slots)
    for reaction, delay_s in reactions:
        upstream.then(reaction, delay_s=delay_s)
    upstream.then(failing(400), delay_s=0.02, times=9999)
    stand = Stand(upstream, FakeUpstream("other").then(failing(400), delay_s=0.03, times=9999))
    sent: list[Request] = []

    async def main() -> None:
        def no_task(request: Request, accepted: object) -> None:
            raise AssertionError("there are no tasks")

        seats = Coalescer(
            stand.broker.submit,
            no_task,
            stand.broker,
            ResultCache(bytes_max=10**6, ttl_s=600.0),
            exact_key,
            seconds=stand.broker.seconds,
            waiting_max=1000,
            bytes_max=10**6,
            events=stand.events,
            clock=stand.clock,
        )
        for number, (pause_s, kind) in enumerate(arrivals):
            await asyncio.sleep(pause_s)
            value = b'"%b %d"' % (b"bad" if kind % 2 else b"good", kind if is_shared else number)
            request = make_request(f"r{number}", stand.witness, now=stand.clock(), value=value, owner=f"o{number % 3}")
            refusal = seats.ask(request, NO_OPTIONS) if is_shared else stand.broker.submit(request)
            assert refusal is None
            sent.append(seats.own(request))
        for _ in range(500):
            await asyncio.sleep(0.01)
            stand.broker.expire(stand.clock())
            seats.expire(stand.clock())
        sent[:] = map(seats.own, sent)

    stand.run(main)
    seconds = stand.broker.seconds
    stages = [seconds.queue, seconds.dispatch, seconds.upstream, seconds.reply]
    [count] = {sum(stage.counts) for stage in stages}
    assert count == sum(sum(each.counts) for each in seconds.by_tier.values())
    whole = sum(each.total for each in seconds.by_tier.values())
    assert sum(stage.total for stage in stages) == pytest.approx(whole, abs=1e-9)
    outcomes = [(request, stand.witness.outcome(request)) for request in sent]
    for request, outcome in outcomes:
        assert outcome is not None
        check_story(request, outcome)
    # Each that was answered from a batch counts once, also where several shared a seat in it.
    answered = [request for request, outcome in outcomes if isinstance(outcome, Output) and not outcome.call.cached]
    assert whole == pytest.approx(sum(request.ended - request.arrived for request in answered), abs=1e-9)
    assert count == len(answered)


def check_story(request: Request, outcome: Outcome) -> None:
    """What is told of one request."""
    total_ms = (request.ended - request.arrived) * 1000
    state, slow = state_of(request, request.ended), slow_request(request, outcome)
    assert slow.queue_ms + slow.retry_ms + slow.call_ms <= total_ms + 4 * ROUNDING_MS
    if not isinstance(state.waits, UnsetType):
        assert sum(wait.ms for wait in state.waits) == pytest.approx(total_ms, abs=ROUNDING_MS)
        model_ms = sum(wait.ms for wait in state.waits if wait.what == "model")
        if isinstance(outcome, Output):
            assert model_ms <= outcome.call.upstream_s * 1000 + ROUNDING_MS
        elif isinstance(outcome, InputRefused):
            assert model_ms <= 200 + ROUNDING_MS, "no call took longer"
