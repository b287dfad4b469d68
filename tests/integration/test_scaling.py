"""What is wanted, and who says so: one process, and a fleet whose gateways come, go, and lose Redis."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.client import ask_once
from support.gateway import HeldGpu
from support.processes import GatewayProcess, running_gateway, until
from support.quick_scaling import QUICK, SLOW
from support.redis_fleet import fleet_over
from support.redis_servers import RedisServer, running_redis

# And what is not needed goes quickly.
QUICK_TO_NONE: dict[str, object] = {
    "carpool.core.scaling.COOLDOWN_S": 0.5,
    "carpool.core.scaling.PEAK_S": 1.0,
    "carpool.core.scaling.BUCKET_S": 0.25,
}


async def scale(process: GatewayProcess) -> dict[str, Any]:
    shown: dict[str, Any] = (await ask_once(process.admin_port, "GET", "/internal/scale")).json
    return shown


async def wanted(process: GatewayProcess, model: str = "default") -> int | None:
    found: int | None = (await scale(process))["models"].get(model, {}).get("wanted")
    return found


@asynccontextmanager
async def flood(process: GatewayProcess, at_once: int = 40, headers: str = "") -> AsyncIterator[list[int]]:
    """Many more requests than a GPU serves, until the block ends; the statuses of the answers."""
    statuses: list[int] = []

    async def ask_on(name: int) -> None:
        while True:
            statuses.append((await process.ask(f"{name} {len(statuses)}", headers)).status)

    asking = [asyncio.create_task(ask_on(name)) for name in range(at_once)]
    try:
        yield statuses
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def until_wanted(process: GatewayProcess, least: int) -> int:
    """Until so many GPUs are wanted at least; how many."""

    async def are() -> bool:
        return (await wanted(process) or 0) >= least

    await until(are)
    return await wanted(process) or 0


async def test_more_than_can_be_served_wants_more_gpus_also_after_a_restart(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, SLOW, settings={**QUICK, "broker.queue_timeout_s": 1.0}) as gateway:
        assert (await gateway.ask("first")).status == 200
        async with flood(gateway) as statuses:
            # Few are admitted, and many more than those four could serve are refused: they count, too.
            await until(lambda: statuses.count(503) > 100)
            await until_wanted(gateway, 10)
        shown = (await scale(gateway))["models"]["default"]
        assert shown["there"] == 1
        assert "gateways" not in await scale(gateway)
        most = 0  # the last that was told

        async def is_kept() -> bool:
            """What is wanted may still have grown once."""
            nonlocal most
            most = await wanted(gateway) or 0
            kept = json.loads((tmp_path / "scale.json").read_text())["models"]["default"]["wanted"]
            return bool(kept == most == await gateway.metric("carpool_wanted"))

        await until(is_kept)
        gateway.kill()
    async with running_gateway(tmp_path, SLOW, settings=QUICK) as gateway:
        # Nothing comes, and what came before is remembered.
        assert await until_wanted(gateway, 1) == most
        assert "the number falls slowly" in (await scale(gateway))["models"]["default"]["why"]


async def test_a_broken_file_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "scale.json").write_bytes(b'{"models": {"default": {"wanted": "many"}}}')
    async with running_gateway(tmp_path, SLOW, settings=QUICK) as gateway:
        assert await until_wanted(gateway, 1) == 1


async def test_the_flood_of_an_owner_beyond_its_limit_wants_nothing(tmp_path: Path) -> None:
    # Ten a second may come: that is two GPUs busy all the time, and hundreds come.
    limits = {"limits.anonymous": 600, "limits.burst": 1}
    async with running_gateway(tmp_path, SLOW, settings={**QUICK, **limits}) as gateway:
        assert (await gateway.ask("first")).status == 200
        async with flood(gateway) as statuses:
            await until_wanted(gateway, 2)
            enough = statuses.count(429) + 1000
            await until(lambda: statuses.count(429) > enough)
            assert (await wanted(gateway) or 0) <= 4


async def test_endpoints_that_answer_with_errors_want_no_more_of_their_kind(tmp_path: Path) -> None:
    broken = "sim:?latency_ms=200&slots=1&error_rate=1"
    async with (
        running_gateway(tmp_path, broken, settings={**QUICK, "carpool.service.HEALTH_INTERVAL_S": 0.1}) as gateway,
        flood(gateway),
    ):

        async def says_so() -> bool:
            shown = (await scale(gateway))["models"].get("default", {"why": ""})
            return "answer with errors" in shown["why"]

        await until(says_so)
        assert await wanted(gateway) == 1


async def test_over_redis_all_say_the_same_also_after_a_restart(tmp_path: Path, redis_server: RedisServer) -> None:
    settings = {**QUICK, "broker.namespace": tmp_path.name}
    async with fleet_over(tmp_path, redis_server.url, settings) as fleet:
        batcher = await fleet.add("batcher", "--upstream", SLOW)
        first, second = await fleet.add("gateway"), await fleet.add("gateway")
        assert (await first.process.ask("first")).status == 200
        async with flood(first.process):
            await until_wanted(second.process, 4)
        everyone = [place.process for place in (first, second, batcher)]

        async def is_the_same_everywhere() -> bool:
            shown = [await scale(process) for process in everyone]
            numbers = [(each["models"]["default"]["wanted"], each["gateways"]["wanted"]) for each in shown]
            return len(set(numbers)) == 1 and all("batchers" in each for each in shown)

        await until(is_the_same_everywhere)
        most = await wanted(first.process)
        first.end()  # it decided, maybe; now the other one does
        await second.replace()

        async def is_as_before() -> bool:
            return await wanted(second.process) == await wanted(batcher.process) == most

        await until(is_as_before)

        async def is_there() -> bool:
            return bool((await scale(second.process))["models"]["default"]["there"] == 1)

        await until(is_there)
        text = (await ask_once(second.process.admin_port, "GET", "/metrics")).body.decode()
        assert f'carpool_wanted{{model="default",what="gpus"}} {most}.0' in text
        assert 'carpool_wanted{model="",what="gateways"} ' in text


async def test_without_redis_nothing_is_known_and_the_number_stays(tmp_path: Path) -> None:
    async with running_redis(tmp_path / "redis") as server, fleet_over(tmp_path, server.url, QUICK) as fleet:
        await fleet.add("batcher", "--upstream", SLOW)
        gateway = (await fleet.add("gateway")).process
        assert (await gateway.ask("first")).status == 200
        async with flood(gateway):
            await until_wanted(gateway, 4)
        before = await wanted(gateway)
        server.kill()

        async def says_so() -> bool:
            return "not known" in (await scale(gateway))["models"]["default"]["why"]

        await until(says_so)
        assert await wanted(gateway) == before


async def test_a_model_without_batchers_comes_back_for_synchronous_requests(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    gone = {"carpool.composition.redis_admission.BATCHERS_GONE_S": 0.0}
    settings = {**QUICK, **QUICK_TO_NONE, **gone, "broker.namespace": tmp_path.name}
    async with fleet_over(tmp_path, redis_server.url, settings) as fleet:
        batcher = await fleet.add("batcher", "--upstream", SLOW)
        gateway = (await fleet.add("gateway")).process
        await gateway.until_ready()
        assert (await gateway.ask("first")).status == 200

        async def none_are() -> bool:
            return await wanted(gateway) == 0

        await until(none_are)
        batcher.end()

        async def is_alone() -> bool:
            return (await ask_once(gateway.admin_port, "GET", "/internal/ready")).status == 503

        # What comes earlier is admitted, and waits for a batcher.
        await until(is_alone)
        assert await wanted(gateway) == 0
        async with flood(gateway, at_once=2) as statuses:
            await until_wanted(gateway, 1)
        assert set(statuses) == {503}
        await batcher.replace()

        async def is_served() -> bool:
            return (await gateway.ask("again")).status == 200

        await until(is_served)


async def test_a_model_with_tasks_alone_has_no_gpu_until_one_comes(tmp_path: Path, redis_server: RedisServer) -> None:
    settings = {**QUICK, "broker.namespace": tmp_path.name, **QUICK_TO_NONE}
    gpu = HeldGpu()
    with gpu.running():
        async with fleet_over(tmp_path, redis_server.url, settings) as fleet:
            await fleet.add("batcher", "--upstream", gpu.url)
            gateway = (await fleet.add("gateway")).process
            assert (await gateway.result(await gateway.submit("first")))["status"] == "SUCCESS"

            async def none_are() -> bool:
                return await wanted(gateway) == 0

            await until(none_are)
            gpu.hold()
            waiting = [await gateway.submit(f"task {number}") for number in range(3)]
            await until_wanted(gateway, 1)
            gpu.release()
            for task in waiting:
                assert (await gateway.result(task))["status"] == "SUCCESS"
