"""One request's story (`core/timeline.py`): what is told of it, by whoever knows it."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from carpool.core.batch import Batch
from carpool.core.errors import InputRefused, QueueTimeout, UpstreamFailed
from carpool.core.outcome import CallFacts, Output
from carpool.core.request import QUEUED, RUNNING, Request, facts_of_failure
from carpool.core.timeline import BatchShown, RequestState, Wait, parts_of, state_of
from carpool.testing import Witness, make_request
from carpool.tracking.record_view import state_of_record
from carpool.tracking.records import RequestRecord


def request_at(phase: int, taken: float = 0.0, batch: Batch | None = None) -> Request:
    """One that arrived at 10 s."""
    request = make_request("r", Witness(), now=10.0, owner="alice")
    request.phase, request.taken, request.batch = phase, taken, batch
    return request


def in_parts(state: RequestState) -> dict[str, float]:
    assert not isinstance(state.waits, msgspec.UnsetType)
    return {wait.what: wait.ms for wait in state.waits}


def test_one_that_waits_has_no_batch() -> None:
    state = state_of(request_at(QUEUED), 10.25)
    assert (state.status, state.latency_ms, state.owner, state.model) == ("queued", 250.0, "alice", "m")
    assert (state.batch, state.waits, state.error) == (UNSET, UNSET, None)


def test_one_under_way_tells_of_its_batch() -> None:
    batch = Batch("b1", "m", 4, "full", 10.2, 10.21, "http://gpu", 1)
    state = state_of(request_at(RUNNING, 10.2, batch), 10.51)
    assert state.status == "processing"
    assert state.batch == BatchShown(id="b1", size=4, neighbours=3, reason="full", endpoint="http://gpu", attempts=1)
    assert in_parts(state) == {"slot": 200.0, "model": 310.0}


def test_one_that_was_answered_tells_of_the_call() -> None:
    request = request_at(RUNNING, 10.03)
    call = CallFacts(2, 0.2, endpoint="e", attempts=3, started_s=0.5, batch_id="b1", reason="idle")
    request.settle(Output(b"1", call), 10.75)
    state = state_of(request, 99.0)
    assert (state.status, state.latency_ms) == ("completed", 750.0)
    assert in_parts(state) == {"company": 30.0, "retry": 500.0, "model": 200.0, "rest": 20.0}
    assert isinstance(state.batch, BatchShown) and (state.batch.attempts, state.batch.neighbours) == (3, 1)


@pytest.mark.parametrize(("company_s_max", "what"), [(0.1, "company"), (0.05, "slot")])
def test_who_waits_longer_than_anybody_for_company_waits_for_a_slot(company_s_max: float, what: str) -> None:
    request = request_at(RUNNING, 10.08, Batch("b", "m", 1, "full", 10.08, 10.08, "e", 1))
    assert what in in_parts(state_of(request, 10.1, company_s_max))


def test_a_kept_result_was_in_no_batch() -> None:
    request = request_at(RUNNING, 10.0)
    request.settle(Output(b"1", CallFacts(0, 0.0, cached=True)), 10.001)
    state = state_of(request, 11.0)
    assert (state.cached, state.batch, state.waits) == (True, UNSET, UNSET)


def test_one_that_failed_tells_of_its_last_call() -> None:
    request = request_at(RUNNING, 10.1, Batch("b1", "m", 2, "full", 10.1, 10.4, "e", 2))
    request.sends = 2
    request.settle(UpstreamFailed("it failed"), 10.6)
    state = state_of(request, 11.0)
    assert (state.status, state.error) == ("failed", "upstream-failed")
    assert in_parts(state) == {"company": 100.0, "retry": 300.0, "model": 200.0}
    # Over Redis a gateway is told the same.
    far = request_at(RUNNING, 10.1)
    far.call = facts_of_failure(request)
    far.settle(UpstreamFailed("it failed"), 10.6)
    assert state_of(far, 11.0) == state


def test_a_search_is_told_from_the_models_work() -> None:
    """Taken at 10.1 s, refused at 10.3 s, looked into until 10.9 s: it was the one at fault."""
    batch = Batch("b1", "m", 8, "full", 10.1, 10.1, "e", 1, ended=10.3, result="upstream-failed")
    request = request_at(RUNNING, 10.1, batch)
    assert in_parts(state_of(request, 10.5)) == {"company": 100.0, "retry": 200.0, "search": 200.0}
    request.settle(InputRefused("no"), 10.9)
    state = state_of(request, 11.0)
    assert in_parts(state) == {"company": 100.0, "retry": 200.0, "search": 600.0}
    far = request_at(RUNNING, 10.1)
    far.call = facts_of_failure(request)
    far.settle(InputRefused("no"), 10.9)
    assert state_of(far, 11.0) == state


def test_one_that_a_search_answered_or_cleared_says_so() -> None:
    request = request_at(RUNNING, 10.1)
    call = CallFacts(4, 0.2, endpoint="e", started_s=0.5, batch_id="b1", reason="full", search_s=0.3)
    request.settle(Output(b"1", call), 10.82)
    assert in_parts(state_of(request, 11.0)) == {
        "company": 100.0, "retry": 200.0, "search": 300.0, "model": 200.0, "rest": 20.0,
    }  # fmt: skip
    cleared = request_at(RUNNING, 10.7)
    call = CallFacts(4, 0.2, endpoint="e", batch_id="b2", reason="full", searched_s=0.55)
    cleared.settle(Output(b"1", call), 10.92)
    assert in_parts(state_of(cleared, 11.0)) == {"slot": 150.0, "search": 550.0, "model": 200.0, "rest": 20.0}


def test_one_that_failed_in_the_queue_was_in_no_batch() -> None:
    request = request_at(QUEUED)
    request.settle(QueueTimeout("no slot"), 12.0)
    assert facts_of_failure(request) is None
    assert (state_of(request, 13.0).error, state_of(request, 13.0).batch) == ("queue-timeout", UNSET)


SECONDS = st.floats(0, 100, allow_subnormal=False)


@given(SECONDS, SECONDS, st.none() | SECONDS, st.none() | SECONDS, st.integers(1, 4), st.sampled_from(["full", "idle"]))
def test_the_parts_are_all_of_the_time(
    queue_s: float, more_s: float, before_s: float | None, call_s: float | None, attempts: int, reason: str
) -> None:
    total_s = queue_s + more_s
    before_s = None if before_s is None else min(before_s, more_s)
    parts = parts_of(total_s, queue_s, before_s, call_s, reason, attempts)
    assert sum(wait.ms for wait in parts) == pytest.approx(total_s * 1000, abs=0.03)
    assert all(wait.ms > 0 for wait in parts)
    whats = [wait.what for wait in parts]
    assert len(set(whats)) == len(whats)
    assert "retry" not in whats or attempts > 1


def test_it_travels_and_comes_back_the_same() -> None:
    state = state_of(request_at(RUNNING, 10.2, Batch("b1", "m", 4, "full", 10.2, 10.21, "e", 1)), 10.51)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=RequestState) == state


def test_an_older_gateway_tells_less() -> None:
    told = msgspec.msgpack.encode({"status": "queued", "latency_ms": 1.0, "error": None, "client_id": None})
    assert msgspec.msgpack.decode(told, type=RequestState).batch is UNSET


def test_latencies_are_whole_numbers() -> None:
    """Also as an older gateway tells them; and as a number that JSON has no point in."""
    told = msgspec.msgpack.encode({"status": "queued", "latency_ms": 202.67, "error": None, "client_id": None})
    state = msgspec.msgpack.decode(told, type=RequestState)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=RequestState)
    assert b'"latency_ms":203,' in msgspec.json.encode(state) == msgspec.json.encode(again)


def test_from_tracking() -> None:
    record = RequestRecord(
        id="r", owner="alice", tier="free", model="m", is_task=True, status="completed", error=None, created_at=1.0,
        completed_at=2.0, latency_ms=1000.0, queue_ms=700.0, batch_id="b1", batch_size=8, endpoint="e", attempts=1,
        upstream_ms=250.0, cached=False, tokens=None, gpu_seconds=0.1, reason="full",
    )  # fmt: skip
    state = state_of_record(record)
    assert (state.status, state.kept, state.is_task, state.owner) == ("completed", True, True, "alice")
    assert state.waits == [Wait("slot", 700.0), Wait("model", 250.0), Wait("rest", 50.0)]
    assert isinstance(state.batch, BatchShown) and state.batch.neighbours == 7
