"""The fleet as operators see it: endpoints that die and come back, report load, and change while running."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from support.checker import Checker
from support.client import ask_once
from support.forks import Started
from support.processes import PATIENCE_S, GatewayProcess, running_gateway, start_role, telling, until
from support.redis_servers import free_port
from support.scenarios.resilience import QUICK, Load
from support.upstreams import ScriptedUpstream, scripted_upstream

HEALTH = {"carpool.service.HEALTH_INTERVAL_S": 0.3}


@contextmanager
def sim_gpu(port: int) -> Iterator[tuple[Started, int]]:
    """One `carpool sim-gpu` with one GPU of 10 ms, and its port."""
    with telling("sim-gpu", "--workers", "1", "--latency-ms", "10", "--port", str(port)) as (process, told):
        found = re.search(r":(\d+)/infer", told.readline())
        assert found is not None
        yield process, int(found[1])


async def states(gateway: GatewayProcess) -> dict[int, str]:
    """The states of the endpoints by port."""
    shown = (await gateway.fleet())["endpoints"]
    return {int(re.findall(r":(\d+)/", each["endpoint"])[0]): each["state"] for each in shown}


async def test_a_dead_endpoint_is_offline_and_comes_back(tmp_path: Path) -> None:
    # A port that the system gives to no client: it is still free when the endpoint comes back.
    with sim_gpu(free_port()) as (victim, port), sim_gpu(0) as (_, second), sim_gpu(0) as (_, third):
        urls = [f"http://127.0.0.1:{each}/infer" for each in (port, second, third)]
        more = [part for url in urls[1:] for part in ("--upstream", url)]
        async with running_gateway(tmp_path, urls[0], *more, settings={**QUICK, **HEALTH}) as gateway:

            async def shows(state: str) -> bool:
                await asyncio.sleep(0.02)
                return (await states(gateway)).get(port) == state

            async def die_and_return() -> None:
                await until(lambda: shows("healthy"))
                assert (await gateway.fleet())["healthy_slots"] == 3
                victim.kill()
                victim.wait(PATIENCE_S)
                await until(lambda: shows("offline"))
                fleet = await gateway.fleet()
                assert (fleet["slots"], fleet["healthy_slots"]) == (3, 2)
                assert await gateway.metric("carpool_healthy_slots") == 2
                text = (await ask_once(gateway.admin_port, "GET", "/metrics")).body.decode()
                assert f'endpoint="{urls[0]}",model="default",state="offline"}} 1.0' in text
                with sim_gpu(port):
                    await until(lambda: shows("healthy"))
                    assert (await gateway.fleet())["healthy_slots"] == 3

            checker = Checker("fleet")
            load = Load(gateway.port, checker)
            await load.run_until(asyncio.ensure_future(die_and_return()), 50)
            assert load.succeeded == 1.0, checker.tally
            assert checker.verdict().is_clean


@asynccontextmanager
async def two_upstreams() -> AsyncIterator[list[ScriptedUpstream]]:
    async with AsyncExitStack() as stack:
        upstreams = [await stack.enter_async_context(scripted_upstream()) for _ in range(2)]
        for upstream in upstreams:
            upstream.latency_s = 0.05
        yield upstreams


# SIGHUP


def write_toml(directory: Path, *upstreams: str, more: str = "") -> None:
    directory.mkdir(exist_ok=True)
    (directory / "carpool.toml").write_text(f"[upstream]\nendpoints = {list(upstreams)!r}\n{more}")


async def until_called(upstream: ScriptedUpstream, more: int) -> None:
    """Until so many more calls came."""
    enough = upstream.calls + more
    await until(lambda: upstream.calls >= enough)


async def names(gateway: GatewayProcess) -> list[str]:
    return [each["endpoint"] for each in (await gateway.fleet())["endpoints"]]


async def test_sighup_adds_and_removes_endpoints_under_load_without_an_error(tmp_path: Path) -> None:
    async with two_upstreams() as (first, second):
        write_toml(tmp_path, first.url)
        async with running_gateway(tmp_path, "", "--slots", "2", settings=QUICK) as gateway:
            checker = Checker("sighup")
            load = Load(gateway.port, checker)

            async def has(*urls: str) -> bool:
                await asyncio.sleep(0.01)
                return await names(gateway) == list(urls)

            async def change() -> None:
                for _ in range(2):
                    await until_called(first, 5)
                    write_toml(tmp_path, first.url, second.url)
                    gateway.reload()
                    await until(lambda: has(first.url, second.url))
                    await until_called(second, 5)
                    write_toml(tmp_path, second.url)
                    gateway.reload()
                    await until(lambda: has(second.url))
                    await until_called(second, 10)
                    await until(lambda: first.in_flight == 0)  # what it had is finished
                    calls = first.calls
                    await until_called(second, 10)
                    assert first.calls == calls  # and nothing more comes
                    write_toml(tmp_path, first.url)
                    gateway.reload()
                    await until(lambda: has(first.url))

            await load.run_until(asyncio.ensure_future(change()), 100)
            assert load.succeeded == 1.0, checker.tally
            verdict = checker.verdict([*first.seen, *second.seen])
            assert verdict.is_clean and verdict.duplicate_work == 0, verdict
            assert gateway.log_messages("error") == []


async def test_a_sighup_during_the_start_waits_for_its_end(tmp_path: Path) -> None:
    write_toml(tmp_path, "http://127.0.0.1:9")
    silent = socket.create_server(("127.0.0.1", 0))
    silent.setblocking(False)
    gateway = start_role(tmp_path, "gateway", ["--broker", f"redis://127.0.0.1:{silent.getsockname()[1]}"], {})
    try:
        connection, _ = await asyncio.get_running_loop().sock_accept(silent)  # it looks for Redis before it serves
        (tmp_path / "carpool.toml").write_text("[upstream")
        gateway.reload()
        await gateway.wait_until_serving()
        await until(lambda: "the configuration was not changed" in str(gateway.log_messages("error")))
        gateway.terminate()
        assert await gateway.exit_code() == 0
    finally:
        gateway.process.kill()
        silent.close()
        connection.close()


async def test_sighup_changes_timeouts_and_says_what_waits_for_the_next_start(tmp_path: Path) -> None:
    async with two_upstreams() as (first, _):
        write_toml(tmp_path, first.url, more="timeout_s = 30.0\n")
        settings: dict[str, Any] = {"broker.total_timeout_s": 90, "broker.queue_timeout_s": 60, "upstream.attempts": 1}
        async with running_gateway(tmp_path, "", settings=settings) as gateway:
            first.behaviour = "hang"
            write_toml(tmp_path, first.url, more="timeout_s = 0.2\n[batching]\nmax_batch = 3\n")
            gateway.reload()
            await until(lambda: gateway.log_messages("warning") != [])
            assert gateway.log_messages("warning") == ["a change of batching takes effect at the next start"]
            load = Load(gateway.port, Checker("timeouts"))
            await load.run(1, 1)
            [(status, _)] = load.answers
            assert status == 502  # and no 504 a minute later
