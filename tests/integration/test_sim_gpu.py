"""Simulated GPUs over real sockets, `carpool sim-gpu` as a process, and the parts of `carpool demo`."""

import asyncio
import errno
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from carpool.cli.sim import show_banner, simulated_gpus
from carpool.face.http.server import HttpServer
from carpool.settings import Settings
from carpool.tools.sim_gpu import PORTS_OF_SERVERS, CannotListenError, GpuFleet, serve_gpus
from carpool.upstream.simulated import SimulationSettings
from support.forks import Started
from support.gateway import eventually
from support.processes import PATIENCE_S, carpool, telling
from support.redis_servers import free_port


@asynccontextmanager
async def fleet_of(workers: int, **settings: Any) -> AsyncIterator[tuple[GpuFleet, aiohttp.ClientSession]]:
    fleet = await serve_gpus(SimulationSettings(**settings), "127.0.0.1", 0, workers)
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as session:
            yield fleet, session
    finally:
        await fleet.close()


def url(fleet: GpuFleet, path: str, worker: int = 0) -> str:
    return f"http://127.0.0.1:{fleet.ports[worker]}{path}"


async def test_both_wire_formats_on_consecutive_ports() -> None:
    async with fleet_of(3, latency_ms=1) as (fleet, session):
        assert fleet.ports == list(range(fleet.ports[0], fleet.ports[0] + 3))
        call = {"inputs": ["añb", {"k": 1}], "parameters": {"p": 1}}
        async with session.post(url(fleet, "/infer", 2), json=call) as answer:
            assert await answer.json() == {"outputs": ["bña", {"echo": {"k": 1}}]}
        async with session.post(url(fleet, "/v1/models/org/m:predict"), json={"instances": ["ab"]}) as answer:
            assert await answer.json() == {"predictions": ["ba"]}
        async with session.get(url(fleet, "/health")) as answer:
            assert await answer.json() == {"status": "ok"}


async def test_stats_tell_of_one_gpu_and_of_all() -> None:
    async with fleet_of(2, latency_ms=1) as (fleet, session):
        for worker, inputs in ((0, ["a", "b", "c"]), (1, ["c"])):
            async with session.post(url(fleet, "/infer", worker), json={"inputs": inputs}) as answer:
                assert answer.status == 200
        async with session.get(url(fleet, "/stats", 1)) as answer:
            stats = await answer.json()
        total = stats.pop("total")
        assert (stats["calls"], stats["inputs"]) == (1, 1)
        assert (total["calls"], total["inputs"]) == (2, 4)
        assert (total["largest_batch"], total["most_in_flight"], total["in_flight"]) == (3, 1, 0)
        assert total["busy_seconds"] >= 0.001


async def test_a_reset_is_a_reset_and_the_gpu_goes_on() -> None:
    async with fleet_of(1, latency_ms=1, reset_rate=1.0) as (fleet, _):
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", fleet.ports[0])
            writer.write(b'POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 14\r\n\r\n{"inputs":[1]}')
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(reader.read(), PATIENCE_S)
            writer.close()
        assert fleet.total().calls == 2
        assert fleet.total().in_flight == 0


async def test_any_ports_are_looked_for_again_when_the_second_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    start = HttpServer.start

    async def start_late(server: HttpServer, host: str, port: int) -> int:
        asked.append(port)
        if len(asked) == 2:
            raise OSError(errno.EADDRINUSE, "address already in use")
        return await start(server, host, port)

    monkeypatch.setattr(HttpServer, "start", start_late)
    async with fleet_of(2) as (fleet, session):
        assert asked[2] in PORTS_OF_SERVERS  # where there is room
        assert fleet.ports == [fleet.ports[0], fleet.ports[0] + 1]
        for worker in range(2):
            async with session.post(url(fleet, "/infer", worker), json={"inputs": ["a"]}) as answer:
                assert answer.status == 200


async def test_many_need_few_files() -> None:
    """A process may have 1,024 in most places, and there are 32 GPUs if nothing else is said."""
    before = len(os.listdir("/proc/self/fd"))
    async with fleet_of(32):
        assert len(os.listdir("/proc/self/fd")) - before < 4 * 32


async def test_one_that_is_gone_keeps_its_port() -> None:
    async with fleet_of(2, latency_ms=1) as (fleet, session):
        fleet.kill("127.0.0.1", 1)
        assert not _accepts(fleet.ports[1])
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", fleet.ports[1]))
        await fleet.revive("127.0.0.1", 1)
        async with session.post(url(fleet, "/infer", 1), json={"inputs": ["a"]}) as answer:
            assert answer.status == 200


async def test_a_taken_port_is_named_and_nothing_is_left_listening() -> None:
    with taken_port_after_a_free_one() as taken:
        with pytest.raises(CannotListenError, match=f"127.0.0.1:{taken}: address already in use"):
            await serve_gpus(SimulationSettings(), "127.0.0.1", taken - 1, 2)
        assert not _accepts(taken - 1)
    with pytest.raises(CannotListenError, match="65536: there is no such port"):
        await serve_gpus(SimulationSettings(), "127.0.0.1", 65535, 2)


@contextmanager
def taken_port_after_a_free_one() -> Iterator[int]:
    """Two ports that the system gives to no client: the first one is still free when it is wanted."""
    for _ in range(20):
        with socket.socket() as holder, socket.socket() as probe:
            taken = free_port() + 1
            try:
                holder.bind(("127.0.0.1", taken))
                probe.bind(("127.0.0.1", taken - 1))
            except OSError:
                continue
            holder.listen()
            probe.close()
            yield taken
            return
    pytest.fail("found no such pair of ports")


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# The process


@contextmanager
def sim_gpu(*flags: str) -> Iterator[tuple[Started, list[int]]]:
    """`carpool sim-gpu` and its ports; whatever happens, it is gone afterwards."""
    with telling("sim-gpu", "--port=0", *flags) as (process, told):
        line = told.readline()
        ports = re.search(r"http://127\.0\.0\.1:(\d+)(?:-(\d+))?/infer", line)
        assert ports, line
        yield process, list(range(int(ports[1]), int(ports[2] or ports[1]) + 1))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_listens_and_leaves_with_0_when_told(number: signal.Signals) -> None:
    with sim_gpu("--workers=3", "--latency-ms=5000") as (process, ports):
        assert len(ports) == 3
        assert all(map(_accepts, ports))
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0


def test_a_taken_port_is_one_clear_line_and_exit_2() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        ended = carpool("sim-gpu", f"--port={port}")
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr == f"carpool sim-gpu: cannot listen on 127.0.0.1:{port}: address already in use\n"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--latency-ms=-1"], "latency_ms"),
        (["--latency-ms=nan"], "latency_ms"),
        (["--error-rate=0.6", "--hang-rate=0.6"], "error_rate and hang_rate"),
        (["--slots=0"], "slots"),
        (["--workers=0"], "--workers"),
    ],
)
def test_a_bad_option_is_one_clear_line_and_exit_2(flags: list[str], named: str) -> None:
    ended = carpool("sim-gpu", *flags)
    assert ended.returncode == 2
    assert named in ended.stderr
    assert ended.stderr.count("\n") == 1


# The parts of `carpool demo`


def test_the_gpus_of_the_demo_end_with_it() -> None:
    with simulated_gpus({"--port": 0, "--workers": 2}) as gpus:
        assert gpus.address is not None
        first = int(re.findall(r":(\d+)-", gpus.address)[0])
        assert _accepts(first)
        assert os.getpgid(gpus.process.pid) != os.getpgid(0)  # so that Ctrl-C does not reach it
    assert gpus.process.returncode == 0
    assert not _accepts(first)


def test_gpus_that_cannot_start_have_no_address() -> None:
    with simulated_gpus({"--port": 65535, "--workers": 2}) as gpus:
        assert gpus.address is None
    assert gpus.process.returncode == 2


def test_the_gpus_of_the_demo_leave_when_it_is_killed() -> None:
    demo = "import sys, time; from carpool.cli.sim import simulated_gpus\n"
    demo += "with simulated_gpus({'--port': 0, '--workers': 1}) as gpus:\n"
    demo += "    print(gpus.address, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", demo], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        port = int(re.findall(r":(\d+)/infer", parent.stdout.readline())[0])
        assert _accepts(port)
        parent.kill()
    assert eventually(lambda: not _accepts(port)), "the child has outlived its parent"


@pytest.mark.parametrize("is_on_path", [True, False])
def test_the_banner_names_a_command_that_is_there(
    is_on_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = tmp_path / ".venv" / "bin" / "carpool"
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(command.parent) if is_on_path else "/nowhere")
    monkeypatch.setattr(sys, "argv", [".venv/bin/carpool", "demo"])
    show_banner(Settings(), 8000, 8001, "32 simulated GPUs", "http://127.0.0.1:9000-9031/infer")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if " bench " in line)
    assert line.split()[0] == ("carpool" if is_on_path else ".venv/bin/carpool")


def test_the_banner_shows_lines_that_can_be_copied(capsys: pytest.CaptureFixture[str]) -> None:
    show_banner(Settings(), 8000, 8001, "32 simulated GPUs", "http://127.0.0.1:9000-9031/infer")
    shown = capsys.readouterr().out
    commands = [line.strip() for line in shown.splitlines() if "curl" in line]
    assert len(commands) == 4
    # A shell whose curl tells what it was called with, and gives every task the id "T".
    curl = 'curl() { echo "$*" >&2; echo "{\\"task_id\\":\\"T\\"}"; }\n'
    told = subprocess.run(
        ["bash", "-c", curl + "\n".join(commands)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    post = r"-sw \n http://127.0.0.1:8000/v1/inference -H Content-Type: application/json"
    assert told.stderr.splitlines() == [
        f'{post} -d {{"input": "hello"}}',
        f'{post} -H Prefer: respond-async -d {{"input": "later"}}',
        r"-sw \n http://127.0.0.1:8000/v1/result/T",
        r"-sw \n http://127.0.0.1:8000/v1/result/T?wait_ms=5000",
    ]
    for address in ("http://127.0.0.1:8001/internal/health", "http://127.0.0.1:9000/stats"):
        assert address in shown
    assert "Ctrl-C" in shown
