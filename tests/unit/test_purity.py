"""The pure modules read no clock, draw no random number and touch no socket: those are arguments."""

import ast
from pathlib import Path

import pytest

import carpool

ROOT = Path(carpool.__file__).parent
IMPURE = {"asyncio", "random", "secrets", "selectors", "socket", "ssl", "subprocess", "threading", "time", "uvloop"}
PURE = [
    "admission/input_policy.py",
    "admission/input_rules.py",
    "admission/limits.py",
    "broker/result_cache.py",
    "admission/owners.py",
    "admission/shedding.py",
    "batching/cost.py",
    "batching/policy.py",
    "batching/rate.py",
    "broker/fair_queue.py",
    "broker/journal_records.py",
    "broker/lanes.py",
    "broker/queue_stats.py",
    "broker/size_index.py",
    "broker/deadlines.py",
    "broker/task_places.py",
    "broker/webhooks/rules.py",
    "broker/redis/client/address.py",
    "broker/redis/client/server_clock.py",
    "broker/redis/keys.py",
    "broker/redis/gateway/entries.py",
    "broker/redis/formats.py",
    "broker/redis/batcher/shards.py",
    "broker/redis/types.py",
    "core/scaling.py",
    "core/token_bucket.py",
    "client/wire.py",
    "tools/plan.py",
    "tracking/records.py",
    "upstream/quarantine.py",
    "upstream/poison.py",
    "upstream/refusals.py",
    "upstream/bisection.py",
    "upstream/slot_share.py",
    "upstream/scheduler.py",
    "upstream/pool.py",
    "upstream/first_contact.py",
    "upstream/endpoint.py",
    "upstream/codecs/base.py",
    "upstream/codecs/refusals.py",
    "upstream/breaker.py",
    "upstream/call_ids.py",
    "upstream/latency.py",
    "upstream/limits.py",
    "upstream/controller.py",
    "upstream/load.py",
    "upstream/retry.py",
    "upstream/same.py",
    "face/http/admin_guard.py",
    "face/http/known_heads.py",
    "face/http/places.py",
    "face/http/strict_json.py",
    "telemetry/spans.py",
    "telemetry/live.py",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "core").glob("*.py")),
]
# The one function that reads the clock, and what is set off by the event loop.
ALLOWED = {"core/clock.py": {"time"}, "core/timers.py": {"asyncio"}}


def imported(path: Path) -> set[str]:
    """Top-level names of what a module imports; of Carpool's own modules, the whole name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names.add(node.module or "")
    return {name if name.startswith("carpool") else name.partition(".")[0] for name in names}


@pytest.mark.parametrize("module", PURE)
def test_imports_nothing_impure(module: str) -> None:
    assert imported(ROOT / module) & IMPURE == ALLOWED.get(module, set())


@pytest.mark.parametrize("module", [module for module in PURE if not module.startswith("core/")])
def test_imports_pure_modules_alone(module: str) -> None:
    """Else it could get at a clock through somebody else. The type of a clock is fine; the clock is not."""
    own = {name for name in imported(ROOT / module) if name.startswith("carpool")}
    pure = {"carpool." + name.removesuffix(".py").replace("/", ".") for name in PURE if name not in ALLOWED}
    assert own <= pure


def test_the_test_can_fail(tmp_path: Path) -> None:
    impure = tmp_path / "impure.py"
    impure.write_text("def f():\n    from time import time\n    import socket as s\n    import os.path\n")
    assert imported(impure) == {"time", "socket", "os"}
