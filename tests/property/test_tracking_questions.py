"""Questions to tracking: SQL finds what a plain look at all rows finds, and sums agree."""

import asyncio
import tempfile
from math import fsum
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.tracking.records import RequestQuestion, RequestRecord, RequestRow, UsageRecord
from carpool.tracking.sqlite import SqliteStore

NAMES = st.sampled_from(["a", "b", "c"])
MAYBE = st.none() | NAMES
ROWS = st.lists(
    st.builds(
        RequestRow,
        id=st.integers(0, 10**6).map(str),
        owner=NAMES,
        tier=NAMES,
        model=NAMES,
        is_task=st.booleans(),
        error=MAYBE,
        created_at=st.integers(0, 10**7),
        completed_at=st.integers(0, 10**7),
        queue_ms=st.none() | st.floats(0, 1e6),
        batch_id=MAYBE,
        batch_size=st.integers(0, 64),
        endpoint=MAYBE,
        attempts=st.integers(0, 4),
        upstream_ms=st.none() | st.floats(0, 1e6),
        cached=st.booleans(),
        tokens=st.none() | st.integers(0, 1000),
        gpu_seconds=st.floats(0, 10),
    ),
    max_size=30,
    unique_by=lambda row: row.id,  # of a task the last row stays
)
QUESTIONS = st.builds(
    RequestQuestion,
    since=st.floats(0, 10),
    owner=MAYBE,
    model=MAYBE,
    tier=MAYBE,
    batch_id=MAYBE,
    error=MAYBE,
    is_failed=st.booleans(),
    limit=st.integers(1, 40),
)


def ask(
    rows: list[RequestRow], question: RequestQuestion, by: Literal["owner", "model", "tier"]
) -> tuple[list[RequestRecord], list[UsageRecord]]:
    async def main(path: Path) -> tuple[list[RequestRecord], list[UsageRecord]]:
        store = SqliteStore(path, retention_days=1, bytes_max=2**30)
        try:
            await store.write(rows, [])
            return await store.requests(question), await store.usage(question.since, by)
        finally:
            await store.close()

    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(main(Path(directory) / "t.db"))


@settings(deadline=None, max_examples=60)
@given(rows=ROWS, question=QUESTIONS, by=st.sampled_from(["owner", "model", "tier"]))
def test_sql_finds_what_a_look_at_all_rows_finds(
    rows: list[RequestRow], question: RequestQuestion, by: Literal["owner", "model", "tier"]
) -> None:
    found, usage = ask(rows, question, by)
    since = int(question.since * 1e6)
    wanted = [
        row
        for row in rows
        if row.completed_at >= since
        and all(
            getattr(question, name) in (None, getattr(row, name))
            for name in ("owner", "model", "tier", "batch_id", "error")
        )
        and (row.error is not None or not question.is_failed)
    ]
    times = sorted((row.completed_at for row in wanted), reverse=True)[: question.limit]
    assert [round((record.completed_at or 0) * 1e6) for record in found] == times
    if question.limit >= len(wanted):
        assert sorted((each.id, each.owner, each.gpu_seconds, each.tokens or 0) for each in found) == sorted(
            (row.id, row.owner, row.gpu_seconds, row.tokens or 0) for row in wanted
        )
    recent = [row for row in rows if row.completed_at >= since]
    assert sum(each.requests for each in usage) == len(recent)
    assert fsum(each.gpu_seconds for each in usage) == pytest.approx(fsum(row.gpu_seconds for row in recent))
    for each in usage:
        own = [row for row in recent if getattr(row, by) == each.name]
        assert (each.requests, each.failed, each.cached, each.tokens) == (
            len(own),
            sum(row.error is not None for row in own),
            sum(row.cached for row in own),
            sum(row.tokens or 0 for row in own),
        )
