"""Tracking by whole processes: rows are what metrics count, exactly; and what people ask of them by commands."""

import asyncio
import json
import os
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


# In flight


async def test_what_a_killed_process_had_is_seen_and_failed_at_the_next_start(tmp_path: Path) -> None:
    """Synchronous requests fail with their process; a task is in the journal, and runs again."""
    (tmp_path / "carpool.toml").write_text('[tasks]\ndata_dir = "."\n[tracking]\nstore = "sqlite"\nin_flight = true\n')
    settings = {"upstream.slots": 1, "batching.max_batch": 1, "upstream.timeout_s": 100, "broker.total_timeout_s": 120}

    async def listed(*flags: str) -> dict[str, tuple[str, str | None]]:
        done = await asyncio.to_thread(carpool, "requests", "--json", *flags, cwd=tmp_path)
        return {each["id"]: (each["status"], each["error"]) for each in json.loads(done.stdout)["requests"]}

    async with scripted_upstream() as upstream:
        async with running_gateway(tmp_path, upstream.url, settings=settings) as gateway:
            assert (await gateway.ask("early", "X-Request-Id: early\r\n")).status == 200
            upstream.gate.clear()
            asked = [asyncio.create_task(gateway.ask("a", "X-Request-Id: first\r\n"))]

            async def is_running() -> bool:
                return (await listed()).get("first") == ("processing", None)

            await until(is_running)
            asked.append(asyncio.create_task(gateway.ask("b", "X-Request-Id: second\r\n")))
            task_id = await gateway.submit("c")
            expected = {"first": ("processing", None), "second": ("queued", None), task_id: ("queued", None)}

            async def are_seen() -> bool:
                return await listed() == expected | {"early": ("completed", None)}

            await until(are_seen)
            assert await listed("--status", "queued") == {key: each for key, each in expected.items() if key != "first"}
            assert await listed("--status", "completed") == {"early": ("completed", None)}
            assert await listed("--failed") == {}
            shown = await asyncio.to_thread(carpool, "requests", cwd=tmp_path)
            assert "processing" in shown.stdout and shown.returncode == 0, shown
            used = json.loads((await asyncio.to_thread(carpool, "usage", "--json", cwd=tmp_path)).stdout)["usage"]
            assert [each["requests"] for each in used] == [1]
            gateway.kill()
            broken = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(each, Exception) for each in broken)
            assert await listed() == expected | {"early": ("completed", None)}
        async with running_gateway(tmp_path, upstream.url, settings=settings) as gateway:

            async def are_failed() -> bool:
                found = await listed("--failed")
                return found == {"first": ("failed", "process-gone"), "second": ("failed", "process-gone")}

            await until(are_failed)
            admin = f"http://127.0.0.1:{gateway.admin_port}"
            story = await asyncio.to_thread(carpool, "why", "first", "--admin", admin, cwd=tmp_path)
            assert "failed (process-gone)" in story.stdout, story
            assert (await listed())[task_id][0] in ("queued", "processing")
            upstream.gate.set()
            assert (await gateway.result(task_id))["status"] == "SUCCESS"
            await until_written(gateway)
            gateway.terminate()
            assert await gateway.exit_code() == 0
    assert await listed() == {
        "early": ("completed", None),
        "first": ("failed", "process-gone"),
        "second": ("failed", "process-gone"),
        task_id: ("completed", None),
    }
    path = tmp_path / "tracking.db"
    assert rows(path, "SELECT id FROM carpool_in_flight") == []
    left = [name for name in await asyncio.to_thread(os.listdir, tmp_path) if name.endswith(".lock")]
    assert not [name for name in left if name.startswith("tracking")]


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
        ({"IN_FLIGHT": "true"}, "is of no use while tracking.store is off"),
    ],
)
def test_what_does_not_go_together_is_said(tmp_path: Path, given: dict[str, str], said: str) -> None:
    done = carpool("config", cwd=tmp_path, **{f"CARPOOL_TRACKING_{name}": value for name, value in given.items()})
    assert done.returncode == 2 and said in done.stderr and "secret" not in done.stderr


def test_the_password_in_the_url_is_not_shown(tmp_path: Path) -> None:
    given = {"CARPOOL_TRACKING_STORE": "postgres", "CARPOOL_TRACKING_URL": "postgresql://me:secret@host/db"}
    done = carpool("config", cwd=tmp_path, **given)
    assert done.returncode == 0 and "me:secret" not in done.stdout and "postgresql://me:***@host/db" in done.stdout
