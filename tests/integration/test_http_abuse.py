"""Abuse over HTTP, in short: S1, S2, S3, S5, S9. `tests/chaos/test_abuse.py` has the sizes of the list."""

from pathlib import Path

from support import abuse
from support.processes import PATIENCE_S, running_gateway


async def test_slow_clients_are_cut_off_and_harm_nobody(tmp_path: Path) -> None:
    timeouts = {"gateway.receive_timeout_s": 1.5, "carpool.composition.faces.WRITE_TIMEOUT_S": 1.5}
    async with running_gateway(tmp_path, "sim:?latency_ms=5&slots=8", settings=timeouts) as gateway:
        line = await abuse.slow_clients(gateway, trickling=20, not_reading=2, timeout_s=1.5, slack_s=PATIENCE_S)
        assert "pass" in line


async def test_large_and_bad_requests_cost_only_their_sender(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, "sim:?latency_ms=20&slots=8", "--policy", "fixed") as gateway:
        for line in (
            abuse.big_bodies(gateway, rounds=2),
            abuse.big_heads(gateway, pipelined=300),
            await abuse.bad_json(gateway, rounds=2),
            abuse.many_names(gateway, count=300),
        ):
            assert line.endswith(": pass")
        assert gateway.log_messages("error") == []
