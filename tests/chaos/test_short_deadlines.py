"""O6: requests with short deadlines of their own, on both brokers."""

from pathlib import Path

from support.scenarios.deadlines import embedded_deadlines, redis_deadlines


async def test_short_deadlines_in_one_process(tmp_path: Path) -> None:
    seen = await embedded_deadlines(tmp_path, seconds=20)
    seen.verdict.report("O6", str(seen), passed=seen.passed)
    assert seen.passed


async def test_short_deadlines_over_redis(tmp_path: Path) -> None:
    seen = await redis_deadlines(tmp_path, seconds=20)
    seen.verdict.report("O6 over Redis", str(seen), passed=seen.passed)
    assert seen.passed
