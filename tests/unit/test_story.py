"""One request's story (`core/timeline.py`): what is told of it, by whoever knows it."""

import msgspec
from msgspec import UNSET

from carpool.core.batch import Batch
from carpool.core.errors import InputRefused, UpstreamFailed
from carpool.core.request import QUEUED, RUNNING, Request, facts_of_failure
from carpool.core.timeline import BatchShown, RequestState, Wait, state_of
from carpool.testing import Witness, make_request
from carpool.tracking.records import RequestRecord, state_of_record


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


def test_it_travels_and_comes_back_the_same() -> None:
    state = state_of(request_at(RUNNING, 10.2, Batch("b1", "m", 4, "full", 10.2, 10.21, "e", 1)), 10.51)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=RequestState) == state


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
