"""Simulated GPUs over real sockets, `carpool sim-gpu` as a process, and the parts of `carpool demo`."""

import asyncio
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import pytest

from carpool.cli.sim import show_banner
from carpool.settings import Settings
from carpool.tools.sim_gpu import CannotListenError, GpuFleet, serve_gpus
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
        (["--jitter=2"], "jitter"),
        (["--per-kb-ms=-1"], "per_kb_ms"),
        (["--padded-ms-per-kb=inf"], "padded_ms_per_kb"),
        (["--workers=0"], "--workers"),
    ],
)
def test_a_bad_option_is_one_clear_line_and_exit_2(flags: list[str], named: str) -> None:
    ended = carpool("sim-gpu", *flags)
    assert ended.returncode == 2
    assert named in ended.stderr
    assert ended.stderr.count("\n") == 1


# The parts of `carpool demo`


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
