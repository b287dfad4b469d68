"""Rows in flight: whatever the order of writes, and whatever fails meanwhile, an outcome is what stays."""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from carpool.core.batch import Batch
from carpool.core.clock import monotonic
from carpool.core.outcome import CallFacts, Output
from carpool.core.request import QUEUED, RUNNING, Request
from carpool.testing import Witness, make_request
from carpool.tracking import recorder as recorder_module
from carpool.tracking.flights import FlightRecorder
from carpool.tracking.records import FlightRow, RequestQuestion, StoreAwayError
from carpool.tracking.sqlite import SqliteStore
from support.flights import STEPS, Step, told, write_steps
from support.processes import until

AT = 1_700_000_000.0
OTHERS = st.lists(st.sampled_from([step for step in STEPS if step != "outcome"]))
CALL = CallFacts(4, 0.2, endpoint="http://gpu", attempts=1, batch_id="b1", gpu_s=0.05)


@settings(deadline=None, max_examples=80)
@given(before=OTHERS, after=OTHERS, is_task=st.booleans())
@example(before=[], after=["queued"], is_task=True)
@example(before=["queued", "look"], after=["processing", "look"], is_task=True)
def test_any_order_of_writes_ends_in_the_outcome(before: list[Step], after: list[Step], is_task: bool) -> None:
    async def main(path: Path) -> None:
        store = SqliteStore(path, retention_days=10_000, bytes_max=2**30)
        try:
            await write_steps(store, "r", [*before, "outcome", *after], AT, is_task=is_task)
            assert await told(store, "r") == [("completed", None)] * 2
            [used] = await store.usage()
            assert (used.requests, used.failed) == (1, 0)
        finally:
            await store.close()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(Path(directory) / "t.db"))


class Shaky(SqliteStore):
    """A store that goes away now and then: before it writes rows in flight, or after."""

    def __init__(self, path: Path, faults: Sequence[str]) -> None:
        super().__init__(path, retention_days=10_000, bytes_max=2**30)
        self._faults = list(faults)

    async def write_flights(self, rows: Sequence[FlightRow], over: Sequence[tuple[str, str]]) -> None:
        fault = self._faults.pop() if self._faults else ""
        if fault == "before":
            raise StoreAwayError(fault)
        await super().write_flights(rows, over)
        if fault == "after":
            raise StoreAwayError(fault)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["admitted", "sent", "back", "settled", "all_settled", "wait"]), st.integers(0, 5)),
    max_size=40,
)


@settings(deadline=None, max_examples=60)
@given(events=EVENTS, faults=st.lists(st.sampled_from(["", "before", "after"]), max_size=6))
def test_what_is_in_flight_is_there_and_what_is_over_is_not(events: list[tuple[str, int]], faults: list[str]) -> None:
    live: dict[str, Request] = {}
    ended: list[str] = []

    async def main(path: Path) -> None:
        recorder = FlightRecorder(Shaky(path, faults), ("gold", "free"), buffer_max=1000, are_tasks_kept=True)
        await recorder.start()
        for number, (event, which) in enumerate(events):
            await happen(recorder, event, f"r{which}", number)
        await until(lambda: recorder.waiting == 0)
        await recorder.close()
        store = SqliteStore(path, retention_days=10_000, bytes_max=2**30)
        found = await store.requests(RequestQuestion())
        await store.close()
        states = {each.id: each.status for each in found if each.completed_at is None}
        assert states == {key: "processing" if each.phase == RUNNING else "queued" for key, each in live.items()}
        assert sorted(each.id for each in found if each.completed_at is not None) == sorted(ended)

    async def happen(recorder: FlightRecorder, event: str, request_id: str, number: int) -> None:
        """The odd ones are tasks."""
        if event == "wait":
            await asyncio.sleep(0.002)
        elif event == "admitted" and request_id not in live:
            request_id = f"{request_id}-{number}"
            made = make_request(request_id, Witness(), now=monotonic(), is_task=number % 2 == 1)
            live[request_id] = made
            made.phase = QUEUED
            recorder.admitted(made)
        for key in [each for each in live if each.startswith(f"{request_id}-")][:1]:
            request = live[key]
            batch = Batch("b", "m", 1, "full", monotonic())
            if event == "sent":
                request.phase, request.taken, request.batch = RUNNING, monotonic(), batch
                recorder.sent([request], "http://gpu", 1, monotonic())
            elif event == "back" and request.phase == RUNNING:
                request.phase, batch.ended = QUEUED, monotonic()
                recorder.ended(batch, [request])
            elif event in ("settled", "all_settled"):
                output = Output(b"1", CALL)
                request.settle(output, monotonic())
                if event == "settled":
                    recorder.settled(request, output)
                else:
                    recorder.all_settled([request], [output])
                ended.append(key)
                del live[key]

    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder_module, "WRITE_EVERY_S", 0.001)
        patch.setattr(recorder_module, "RETRY_S", 0.001)
        asyncio.run(main(Path(directory) / "t.db"))
