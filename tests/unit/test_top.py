"""`carpool top` in 80 columns: nothing is cut."""

import io
from typing import Any

import pytest
from rich.console import Console

from carpool.cli.top import picture

LONG = "https://models.internal.example.com:8443/v2/models/embedder-large/infer"


def second(**health: Any) -> dict[str, Any]:
    tier = {
        "offered": 12345,
        "admitted": 12345,
        "shed": 0,
        "answered": 12345,
        "failed": 0,
        "p50_ms": 231.0,
        "p99_ms": 1400.0,
    }
    endpoints = [
        {"endpoint": name, "state": "degraded", "in_flight": 64, "limit": 64, "utilization": 1.0}
        for name in ("http://127.0.0.1:42487/infer", "http://10.20.30.40:9000/embed", LONG)
    ]
    slow = {
        "id": "req_5942cbe8c08d-936", "result": "upstream-refused", "total_ms": 1502.0, "queue_ms": 87.0,
        "retry_ms": 1129.0, "call_ms": 286.0, "batch_size": 64, "endpoint": LONG,
    }  # fmt: skip
    return {
        "health": {"status": "degraded", "queue_depth": 1234, "gpu_utilization": 1.0, **health},
        "p50_ms": 231.0,
        "p99_ms": 1400.0,
        "batches_ended": 120,
        "batches": [],
        "max_batch": {},
        "dead_letters": 0,
        "tiers": [{**tier, "name": name, "waiting": 1234} for name in ("enterprise", "paid", "free")],
        "fleet": {"models": {"default": {"endpoints": endpoints}}},
        "slow": [slow],
    }


def shown(columns: int, **health: Any) -> str:
    console = Console(file=io.StringIO(), width=columns, color_system=None)
    console.print(picture(second(**health), columns))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


@pytest.mark.parametrize("columns", [80, 120])
def test_nothing_is_cut(columns: int) -> None:
    text = shown(columns)
    assert "…" not in text and max(map(len, text.splitlines())) <= columns
    lines = text.splitlines()
    for name in ("127.0.0.1:42487/infer", "10.20.30.40:9000/embed"):
        assert [line for line in lines if line.startswith(name)], text
    header = next(line for line in lines if line.startswith("tier"))
    assert "admitted/s" in header and "waiting" in header
    assert ("█" in text) == (columns == 120)


def test_what_is_wrong_stands_on_top() -> None:
    problem = "http://127.0.0.1:42487/infer has answered no call well so far"
    assert problem in shown(80, problem=problem).splitlines()[2]
    assert "no call" not in shown(80)
