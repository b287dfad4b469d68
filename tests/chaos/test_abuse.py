"""Abuse over HTTP in the sizes of the list of faults: S1, S2, S3, S5, S9. One line each."""

from pathlib import Path

import pytest

from support import abuse
from support.processes import running_gateway

UPSTREAM = "sim:?latency_ms=20&slots=8"


async def test_s1_slow_clients(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, UPSTREAM) as gateway:
        line = await abuse.slow_clients(gateway, trickling=940, not_reading=60, timeout_s=10.0, slack_s=1.0)
        print("\n" + line)  # noqa: T201


@pytest.mark.timeout(300)
async def test_s2_to_s9(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, UPSTREAM, "--policy", "fixed") as gateway:
        print("\n" + abuse.big_bodies(gateway, rounds=100, in_figures=True))  # noqa: T201
        print(abuse.big_heads(gateway, pipelined=5000, in_figures=True))  # noqa: T201
        print(await abuse.bad_json(gateway, rounds=50))  # noqa: T201
        print(abuse.many_names(gateway, count=10_000, in_figures=True))  # noqa: T201
        assert gateway.log_messages("error") == []
