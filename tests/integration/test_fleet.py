"""The fleet as operators see it: endpoints that die and come back, report load, and change while running."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("per_s", [0, 50], ids=["idle", "under load"])
async def test_a_dead_endpoint_is_offline_and_comes_back(tmp_path: Path, per_s: int) -> None:
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
            story = asyncio.ensure_future(die_and_return())
            if per_s:
                load = Load(gateway.port, checker)
                await load.run_until(story, per_s)
                assert load.succeeded == 1.0, checker.tally
            await story
            assert checker.verdict().is_clean


async def test_what_the_page_shows(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, "sim:?latency_ms=20&slots=4", settings=HEALTH) as gateway:
        load = Load(gateway.port, Checker("page"))
        await load.run(50, 0.5)
        shown = (await ask_once(gateway.admin_port, "GET", "/internal/fleet")).json
        [(name, model)] = shown["models"].items()
        [endpoint] = model["endpoints"]
        assert (name, model["slots"], model["healthy_slots"]) == ("default", 4, 4)
        # Timers of an event loop have a step of a millisecond, and may be early by that.
        assert 0 < model["capacity_rps"] <= 4 * 64 / 0.019
        assert await gateway.metric("carpool_capacity_rps") == pytest.approx(model["capacity_rps"], rel=0.01)
        assert endpoint["endpoint"] == "sim:?latency_ms=20&slots=4"
        assert (endpoint["state"], endpoint["limit"], endpoint["slots"], endpoint["breaker"]) == (
            "healthy",
            4,
            4,
            "closed",
        )
        age = datetime.now().astimezone() - datetime.fromisoformat(endpoint["last_heartbeat"])
        assert -1 < age.total_seconds() < PATIENCE_S


@asynccontextmanager
async def two_upstreams() -> AsyncIterator[list[ScriptedUpstream]]:
    async with AsyncExitStack() as stack:
        upstreams = [await stack.enter_async_context(scripted_upstream()) for _ in range(2)]
        for upstream in upstreams:
            upstream.latency_s = 0.05
        yield upstreams


async def test_an_endpoint_that_reports_load_in_a_header_gets_less_until_it_is_well(tmp_path: Path) -> None:
    async with two_upstreams() as (loaded, calm):
        flags = ("--upstream", calm.url, "--slots", "4", "--max-batch", "1")
        settings = {**QUICK, "upstream.load_header": "X-Load", "shedding.mode": "off"}
        async with running_gateway(tmp_path, loaded.url, *flags, settings=settings) as gateway:
            checker = Checker("header")
            load = Load(gateway.port, checker)

            async def limit_is(limit: int) -> bool:
                await asyncio.sleep(0.05)
                return bool((await gateway.fleet())["endpoints"][0]["limit"] == limit)

            async def story() -> None:
                capacity = (await gateway.fleet())["capacity_rps"]
                loaded.headers, calm.headers = "X-Load: 97\r\n", "X-Load: 0.3\r\n"
                await until(lambda: limit_is(1))
                shown = (await gateway.fleet())["endpoints"]
                assert [(each["state"], each["utilization"], each["limit"]) for each in shown] == [
                    ("degraded", 0.97, 1),
                    ("healthy", 0.3, 4),
                ]
                assert await gateway.metric("carpool_healthy_slots") == 5
                assert (await gateway.fleet())["capacity_rps"] != capacity
                await until(lambda: loaded.in_flight <= 1)  # what was under way
                loaded.most_in_flight, before = 0, [loaded.calls, calm.calls]
                # Both have as much as they take: one call at a time here, four there.
                await until(lambda: calm.calls >= before[1] + 80)
                calls = [loaded.calls - before[0], calm.calls - before[1]]
                assert calls[0] < 0.5 * calls[1], calls
                assert loaded.most_in_flight == 1
                loaded.headers = "X-Load: 0.1\r\n"
                await until(lambda: limit_is(2))  # and so on, a step at a time

            await load.saturate_until(asyncio.ensure_future(story()), 12)
            assert load.succeeded == 1.0, checker.tally


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


async def test_sighup_with_a_bad_configuration_changes_nothing_but_the_log(tmp_path: Path) -> None:
    async with two_upstreams() as (first, second):
        write_toml(tmp_path, first.url)
        async with running_gateway(tmp_path, "", settings=QUICK) as gateway:
            for text in ("[upstream]\nendpoints = ['ftp://x']\n", "[upstream", "[upstream]\nendpoints = []\n"):
                errors = gateway.log_messages("error")
                (tmp_path / "carpool.toml").write_text(text)
                gateway.reload()
                await until(lambda errors=errors: len(gateway.log_messages("error")) > len(errors))
                [said] = gateway.log_messages("error")[len(errors) :]
                assert said.startswith("the configuration was not changed: ")
                assert "\n" not in said
                assert await names(gateway) == [first.url]
            write_toml(tmp_path, second.url)
            gateway.reload()
            await until(lambda: one_is(gateway, second.url))


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


async def one_is(gateway: GatewayProcess, url: str) -> bool:
    await asyncio.sleep(0.01)
    return await names(gateway) == [url]


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
