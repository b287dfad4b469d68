"""Tracking by whole processes: rows are what metrics count, exactly; and what people ask of them by commands."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.processes import carpool, running_gateway, until
from support.tracking import outcomes, rows, rows_by_outcome, until_written
from support.upstreams import scripted_upstream


async def test_shared_seats_share_their_seconds_and_kept_results_cost_none(tmp_path: Path) -> None:
    path = tmp_path / "tracking.db"
    settings = {"tracking.store": "sqlite", "upstream.cache": "true"}
    async with (
        scripted_upstream() as upstream,
        running_gateway(tmp_path, upstream.url, settings=settings) as gateway,
    ):
        upstream.gate.clear()
        same = asyncio.gather(*(gateway.ask("the same") for _ in range(5)))

        async def are_all_here() -> bool:
            return await gateway.metric("carpool_held_requests") == 5

        await until(are_all_here)
        upstream.gate.set()
        assert {response.status for response in await same} == {200}
        assert (await gateway.ask("the same")).json["metadata"]["cached"] is True
        await until_written(gateway)
        assert rows_by_outcome(path) == await outcomes(gateway) == Counter(ok=6)
    shared = rows(path, "SELECT gpu_seconds, upstream_ms FROM carpool_requests WHERE NOT cached")
    assert len(shared) == 5
    assert sum(gpu_s for gpu_s, _ in shared) == pytest.approx(shared[0][1] / 1000)
    assert rows(path, "SELECT gpu_seconds, batch_id, attempts FROM carpool_requests WHERE cached") == [(0.0, None, 0)]


# Commands


async def test_commands_read_what_the_configuration_names(tmp_path: Path) -> None:
    (tmp_path / "carpool.toml").write_text('[tasks]\ndata_dir = "."\n[tracking]\nstore = "sqlite"\n')
    async with scripted_upstream() as upstream, running_gateway(tmp_path, upstream.url) as gateway:
        upstream.poison = "bad"
        assert (await gateway.ask("good", "X-Request-Id: mine\r\n")).status == 200
        assert (await gateway.ask("bad", "X-Request-Id: theirs\r\n")).status == 422
        await until_written(gateway)

    async def run(*arguments: str) -> Any:
        done = await asyncio.to_thread(carpool, *arguments, cwd=tmp_path)
        return done.stdout if done.returncode == 0 else (done.returncode, done.stderr)

    listed = json.loads(await run("requests", "--json"))["requests"]
    assert [each["id"] for each in listed] == ["theirs", "mine"]
    assert listed[1]["status"] == "completed" and listed[1]["batch_size"] == 1
    failed = json.loads(await run("requests", "--failed", "--since", "10m", "--json"))["requests"]
    assert [each["error"] for each in failed] == ["input-refused"]
    assert "theirs" in (text := await run("requests")) and "input-refused" in text
    assert json.loads(await run("requests", "--owner", "nobody", "--json")) == {"requests": []}
    [used] = json.loads(await run("usage", "--json"))["usage"]
    assert (used["name"], used["requests"], used["failed"]) == ("127.0.0.1", 2, 1)
    assert used["gpu_seconds"] > 0
    assert "default" in await run("usage", "--by", "model", "--since", "1d")
    assert "is ready" in await run("tracking", "init")
    assert await run("requests", "--since", "yesterday") == (
        2,
        "carpool: --since must be like 30s, 10m, 1h or 7d\n",
    )


def test_commands_say_when_nothing_is_kept(tmp_path: Path) -> None:
    for command in (("requests",), ("usage",), ("tracking", "init")):
        done = carpool(*command, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert 'tracking.store is "off"' in done.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"STORE": "postgres"}, "tracking.url must be like postgresql://"),
        ({"STORE": "postgres", "URL": "mysql://user:secret@host/db"}, "must be like postgresql://"),
        ({"URL": "postgresql://host/db"}, "is of no use unless tracking.store is postgres"),
    ],
)
def test_what_does_not_go_together_is_said(tmp_path: Path, given: dict[str, str], said: str) -> None:
    done = carpool("config", cwd=tmp_path, **{f"CARPOOL_TRACKING_{name}": value for name, value in given.items()})
    assert done.returncode == 2 and said in done.stderr and "secret" not in done.stderr


def test_the_password_in_the_url_is_not_shown(tmp_path: Path) -> None:
    given = {"CARPOOL_TRACKING_STORE": "postgres", "CARPOOL_TRACKING_URL": "postgresql://me:secret@host/db"}
    done = carpool("config", cwd=tmp_path, **given)
    assert done.returncode == 0 and "me:secret" not in done.stdout and "postgresql://me:***@host/db" in done.stdout
