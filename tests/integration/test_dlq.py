"""`carpool dlq` and the admin port against a real gateway whose upstream refuses inputs."""

import asyncio
import json
import os
import re
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from carpool.cli.main import main
from support.client import Response, ask_once, inference_body
from support.processes import CLEAN_ENVIRONMENT, GatewayProcess, running_gateway
from support.stream_server import stream_server
from support.upstreams import ScriptedUpstream, let_work_once, scripted_upstream

JSON = "Content-Type: application/json\r\n"
ASYNC = JSON + "Prefer: respond-async\r\n"
TOKEN = "hunter2"


@pytest.fixture
async def upstream() -> AsyncIterator[ScriptedUpstream]:
    async with scripted_upstream() as running:
        running.behaviour = "status 400"
        yield running


@pytest.fixture
async def gateway(tmp_path: Path, upstream: ScriptedUpstream) -> AsyncIterator[GatewayProcess]:
    async with running_gateway(tmp_path, upstream.url, "--max-batch", "1") as running:
        await let_work_once(running.port)
        yield running


async def run_dlq(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run `carpool dlq` in this process, in a wide terminal; whom it asks may be in this event loop."""

    def run() -> "subprocess.CompletedProcess[str]":
        with ExitStack() as opened:
            opened.enter_context(
                patch.dict(os.environ, CLEAN_ENVIRONMENT | {"COLUMNS": "200"} | environment, clear=True)
            )
            stdout = opened.enter_context(redirect_stdout(StringIO()))
            stderr = opened.enter_context(redirect_stderr(StringIO()))
            code = main(["dlq", *arguments])
        return subprocess.CompletedProcess(arguments, code, stdout.getvalue(), stderr.getvalue())

    return await asyncio.to_thread(run)


async def dlq(gateway: GatewayProcess, *arguments: str) -> str:
    """What `carpool dlq` prints, which works."""
    done = await run_dlq(*arguments, "--admin", f"http://127.0.0.1:{gateway.admin_port}")
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


async def admin(gateway: GatewayProcess, method: str, target: str) -> Response:
    return await ask_once(gateway.admin_port, method, target)


async def fail_tasks(gateway: GatewayProcess, *texts: str) -> list[str]:
    """Submit tasks that the upstream refuses, one after the other; their ids."""
    ids = []
    for text in texts:
        accepted = await ask_once(gateway.port, "POST", "/v1/inference", inference_body(text), ASYNC)
        assert accepted.status == 202
        ids.append(accepted.json["task_id"])
        assert (await result(gateway, ids[-1]))["status"] == "FAILED"
    return ids


async def result(gateway: GatewayProcess, task_id: str) -> Any:
    return (await ask_once(gateway.port, "GET", f"/v1/result/{task_id}?wait_ms=30000")).json


async def test_list_show_replay_and_drop_on_the_command_line(
    gateway: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    assert await dlq(gateway, "list") == "no dead letters\n"
    task_ids = await fail_tasks(gateway, "one", "two", "three [bold]", "four")

    listed = await dlq(gateway, "list")
    assert re.findall(r"^ *(\d+) ", listed, re.MULTILINE) == ["1", "2", "3", "4"]
    assert listed.count("input-refused") == 4
    assert "two" not in listed
    shorter = await dlq(gateway, "list", "--limit", "1", "--after", "1")
    assert re.findall(r"^ *(\d+) ", shorter, re.MULTILINE)[0] == "2"
    assert "1 of 4" in shorter

    letter = json.loads(await dlq(gateway, "show", "3", "--json"))
    assert letter["request_id"] == task_ids[2]
    assert (letter["cause"], letter["sends"], letter["input"], letter["parameters"]) == (
        "input-refused",
        1,
        "three [bold]",
        None,
    )
    assert '"three [bold]"' in await dlq(gateway, "show", "3")

    upstream.behaviour = "good"
    said = await dlq(gateway, "replay", "2")
    found = re.fullmatch(r"2 is now task ([0-9a-f]{32})\n", said)
    assert found is not None
    assert (await result(gateway, found[1]))["output"] == "owt"
    assert await dlq(gateway, "drop", "4") == "1 dropped\n"

    report = json.loads(await dlq(gateway, "replay", "--all", "--cause", "input-refused", "--json"))
    assert [task["id"] for task in report["tasks"]] == [1, 3]
    outputs = [(await result(gateway, task["task_id"]))["output"] for task in report["tasks"]]
    assert outputs == ["eno", "]dlob[ eerht"]
    assert await dlq(gateway, "replay", "--all") == "no dead letters to replay\n"

    upstream.behaviour = "status 400"
    await fail_tasks(gateway, "five", "six")
    assert [letter["id"] for letter in json.loads(await dlq(gateway, "list", "--json"))["dead_letters"]] == [5, 6]
    assert await dlq(gateway, "drop", "--all") == "2 dropped\n"
    assert await dlq(gateway, "list") == "no dead letters\n"
    assert await gateway.metric("carpool_dead_letters_total") == 6
    assert await gateway.metric("carpool_dead_letters_kept") == 0


async def test_the_admin_port_says_what_is_wrong(gateway: GatewayProcess) -> None:
    await fail_tasks(gateway, "canary-5d1e")
    listed = await admin(gateway, "GET", "/internal/dead-letters")
    assert (listed.status, listed.json["total"]) == (200, 1)
    assert b"canary" not in listed.body
    (letter,) = listed.json["dead_letters"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", letter["buried_at"])
    for method, target, status in (
        ("GET", "/internal/dead-letters?limit=0", 400),
        ("GET", "/internal/dead-letters?limit=1001", 400),
        ("GET", "/internal/dead-letters?after=-1", 400),
        ("GET", "/internal/dead-letters?after=x", 400),
        ("DELETE", "/internal/dead-letters", 400),
        ("DELETE", "/internal/dead-letters?all=yes", 400),
        ("POST", "/internal/dead-letters/replay?cause=bad", 400),
        ("POST", "/internal/dead-letters", 405),
        ("GET", "/internal/dead-letters/replay", 405),
        ("GET", "/internal/dead-letters/2", 404),
        ("GET", "/internal/dead-letters/x", 404),
        ("GET", "/internal/dead-letters/99999999999999999999", 404),
        ("DELETE", "/internal/dead-letters/2", 404),
        ("POST", "/internal/dead-letters/2/replay", 404),
    ):
        answer = await admin(gateway, method, target)
        assert (answer.status, answer.headers["content-type"]) == (status, "application/problem+json"), target
    assert (await admin(gateway, "GET", "/internal/dead-letters")).json["total"] == 1
    assert (await ask_once(gateway.port, "GET", "/internal/dead-letters")).status == 404
    assert "canary" not in gateway.log.read_text()
    replayed = await admin(gateway, "POST", f"/internal/dead-letters/{letter['id']}/replay")
    assert replayed.status == 202
    assert (await result(gateway, replayed.json["task_id"]))["status"] == "FAILED"
    assert (await admin(gateway, "DELETE", "/internal/dead-letters?all=true")).json == {"dropped": 1}


async def test_letters_and_replayed_tasks_survive_a_kill(tmp_path: Path, upstream: ScriptedUpstream) -> None:
    async with running_gateway(tmp_path, upstream.url, "--max-batch", "1") as gateway:
        await let_work_once(gateway.port)
        await fail_tasks(gateway, "one", "two")
        upstream.gate.clear()  # the replayed task hangs
        task_id = (await admin(gateway, "POST", "/internal/dead-letters/1/replay")).json["task_id"]
        gateway.kill()
    upstream.gate.set()
    upstream.behaviour = "good"
    async with running_gateway(tmp_path, upstream.url, "--max-batch", "1") as gateway:
        assert (await result(gateway, task_id))["output"] == "eno"
        letters = (await admin(gateway, "GET", "/internal/dead-letters")).json["dead_letters"]
        assert [letter["id"] for letter in letters] == [2]


async def test_with_a_token(tmp_path: Path, upstream: ScriptedUpstream) -> None:
    async with running_gateway(tmp_path, upstream.url, settings={"service.token": TOKEN}) as gateway:
        where = ("--admin", f"http://127.0.0.1:{gateway.admin_port}")
        refused = await run_dlq("list", *where)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "CARPOOL_SERVICE_TOKEN or --token" in refused.stderr and refused.stderr.count("\n") == 1
        assert (await run_dlq("list", *where, "--token", "wrong")).returncode == 1
        assert (await run_dlq("list", *where, "--token", TOKEN)).stdout == "no dead letters\n"
        assert (await run_dlq("list", *where, CARPOOL_SERVICE_TOKEN=f"{TOKEN},older")).returncode == 0
        # The clients' port knows nothing of it.
        done = await run_dlq("list", "--admin", f"http://127.0.0.1:{gateway.port}")
        assert done.returncode == 1


async def test_letters_that_are_left_are_told_and_what_strangers_sent_does_not_drive_the_terminal(
    gateway: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    await fail_tasks(gateway, "bell \x07 and \x1b[2J and \x9b2J")
    shown = await dlq(gateway, "show", "1")
    assert not set(shown) & {"\x07", "\x1b", "\x9b"}
    missing = await run_dlq("show", "7", "--admin", f"http://127.0.0.1:{gateway.admin_port}")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr.startswith("carpool dlq: there is no such dead letter")
    wrong = await run_dlq("replay", "--all", "--cause", "bad", "--admin", f"http://127.0.0.1:{gateway.admin_port}")
    assert wrong.returncode == 2 and "`cause` must be one of" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["replay"], "name one dead letter by its id, or --all"),
        (["drop", "3", "--all"], "name one dead letter by its id, or --all"),
        (["replay", "3", "--cause", "input-refused"], "--cause goes with --all"),
        (["show"], "Missing argument 'ID'"),
        (["show", "x"], "Invalid value for 'ID'"),
        (["list", "--admin", "127.0.0.1:8001"], "is not a URL"),
        (["list", "--admin", "http://127.0.0.1:99999999"], "is not a URL"),
        (["list", "--admin", "file:///etc/passwd"], "is not a URL"),
        (["list", "--token", "a\nb"], "the token has characters"),
    ],
)
async def test_a_wrong_command_line(arguments: list[str], says: str) -> None:
    done = await run_dlq(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr and done.stderr.count("\n") == 1


async def test_no_gateway_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        done = await run_dlq("list", "--admin", f"http://127.0.0.1:{free.getsockname()[1]}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no gateway at" in done.stderr and "is `carpool serve` running?" in done.stderr
    assert done.stderr.count("\n") == 1


async def test_something_else_there() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 2\r\n\r\nhi")

    async with stream_server(answer) as server:
        done = await run_dlq("list", "--admin", f"http://127.0.0.1:{server.port}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "is not the admin port of a gateway" in done.stderr
