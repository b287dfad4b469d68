"""Sums agree: what became of requests, by metrics, by tracking, on the live page, and as the load itself counted it.

Exactly; and with `kill -9` no more than a second of the dead process's records is missing, and tasks are exact.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from carpool.core.errors import all_errors
from support.counted_load import CountedLoad
from support.live import viewing
from support.processes import GatewayProcess, carpool, running_gateway, start_gateway, until
from support.redis_fleet import Place, fleet_over
from support.redis_servers import RedisServer, running_redis
from support.tracking import outcomes, problems, rows, rows_by_outcome, until_written

POISON = "arsenic"
SIM = f"sim:?latency_ms=5&slots=8&poison={POISON}"
BENCH = ["--rate", "300", "--duration", "5s", "--payload-bytes", "100", "--poison", POISON, "--poison-every", "100"]
LOST_S_MAX = 1.0
STALLS, STALL_S = 10, 0.8


def tracked_in(path: Path) -> dict[str, object]:
    return {"tracking.store": "sqlite", "tasks.data_dir": str(path.parent), "shedding.mode": "off"}


def all_rows(paths: Sequence[Path]) -> Counter[str]:
    return sum((rows_by_outcome(path) for path in paths), Counter())


async def shown_on_the_page(process: GatewayProcess, expected: Counter[str]) -> bool:
    """Whether the page comes to show these; the parts of other processes come a second or two later."""

    def look() -> bool:
        with viewing(process.admin_port) as viewer:
            viewer.until(lambda event: +Counter(event["requests"]) == expected)
        return True

    return await asyncio.to_thread(look)


async def bench(port: int, report: Path) -> Counter[int]:
    """How many answers of each status `carpool bench` got."""
    url = f"http://127.0.0.1:{port}"
    done = await asyncio.to_thread(carpool, "bench", url, *BENCH, "--json", str(report), "--quiet")
    assert done.returncode in (0, 1), done.stderr  # 1: some were refused
    told = json.loads(await asyncio.to_thread(report.read_text))
    assert (told["wrong"], told["unanswered"]) == (0, 0)
    return Counter({int(status): count for status, count in told["status"].items()})


def by_status(codes: Counter[str]) -> Counter[int]:
    statuses = {error.code: error.status for error in all_errors()} | {"ok": 200}
    counted: Counter[int] = Counter()
    for code, count in codes.items():
        counted[statuses[code]] += count
    return counted


async def compare(processes: Sequence[GatewayProcess], paths: Sequence[Path], benched: Counter[int]) -> None:
    """All four of them."""

    async def is_all_counted() -> bool:
        return (await outcomes(*processes))["ok"] == benched[200]

    await until(is_all_counted)
    await until_written(*processes)
    counted, told = await outcomes(*processes), await problems(*processes)
    # Who was refused at the door was told so, and has no outcome.
    assert by_status(told) + Counter({200: counted["ok"]}) == benched
    assert not counted - told - Counter(ok=counted["ok"])
    assert all_rows(paths) == counted
    for process in processes:
        assert await shown_on_the_page(process, counted)
    assert counted["ok"] > 2000 and len(counted) > 1


@pytest.mark.timeout(240)
async def test_alone_all_sums_agree(tmp_path: Path) -> None:
    path = tmp_path / "tracking.db"
    async with running_gateway(tmp_path, SIM, settings=tracked_in(path)) as gateway:
        both = await asyncio.gather(*(bench(gateway.port, tmp_path / f"report-{n}.json") for n in range(2)))
        await compare([gateway], [path], both[0] + both[1])


@pytest.mark.timeout(240)
async def test_over_redis_all_sums_agree(tmp_path: Path, redis_server: RedisServer) -> None:
    paths: list[Path] = []
    async with fleet_over(tmp_path, redis_server.url, {"broker.namespace": tmp_path.name}) as fleet:
        for number in range(2):
            for role, flags in (("gateway", []), ("batcher", ["--upstream", SIM])):
                paths.append(tmp_path / f"{role}-{number}" / "tracking.db")
                await fleet.add(role, *flags, settings=tracked_in(paths[-1]))
        await fleet.wait_until_ready()
        both = await asyncio.gather(*(bench(port, tmp_path / f"report-{port}.json") for port in fleet.ports()))
        await compare([place.process for place in (*fleet.gateways, *fleet.batchers)], paths, both[0] + both[1])


def ids_in(path: Path, *, are_tasks: bool) -> Counter[str]:
    found = rows(path, f"SELECT id FROM carpool_requests WHERE {'' if are_tasks else 'NOT'} is_task")
    return Counter(request_id for [request_id] in found)


def report(what: str, load: CountedLoad, missing: int) -> None:
    tasks = len(load.tasks)
    print(  # noqa: T201
        f"\nSums with kills: {what}; {len(load.told)} answers, {tasks} tasks, {load.broken} cut off, "
        f"records missing {missing}",
        flush=True,
    )


def check_tasks(load: CountedLoad, found: Counter[str], kills: Sequence[float]) -> int:
    """Each that was accepted has its one outcome, and one record, but for those of the last second of the dead."""
    assert all(told is not None and told.code == "ok" for told in load.tasks.values())
    assert set(found.values()) <= {1}, "a task was recorded twice"
    missing = [told for task, told in load.tasks.items() if task not in found and told is not None]
    assert all(any(told.at > killed - LOST_S_MAX for killed in kills) for told in missing)
    return len(missing)


@pytest.mark.timeout(240)
async def test_over_redis_a_kill_costs_a_second_of_the_dead(tmp_path: Path, redis_server: RedisServer) -> None:
    settings = {"broker.namespace": tmp_path.name}
    async with fleet_over(tmp_path, redis_server.url, settings) as fleet:
        path_of: dict[Place, Path] = {}
        for number in range(2):
            for role, flags in (("gateway", []), ("batcher", ["--upstream", SIM])):
                path = tmp_path / f"{role}-{number}" / "tracking.db"
                path_of[await fleet.add(role, *flags, settings=tracked_in(path))] = path
        await fleet.wait_until_ready()
        alive = list(fleet.gateways)
        load = CountedLoad(lambda: [place.process for place in alive])
        await load.more(1000)
        kills = []
        dead_batcher = fleet.batchers[0]
        kills.append(time.monotonic())
        dead_batcher.process.kill()
        await load.more(1000)
        dead = alive.pop()
        killed = time.monotonic()
        dead.process.kill()
        await load.more(1000)
        await load.stop()
        survivors = [place for place in path_of if place not in (dead, dead_batcher)]
        processes = [place.process for place in survivors]
        await until_written(*processes)
        for place in survivors:
            assert rows_by_outcome(path_of[place]) == await outcomes(place.process), "its own, exactly"
        [here] = alive
        codes = rows(path_of[here], "SELECT coalesce(error, 'ok') FROM carpool_requests WHERE NOT is_task")
        assert Counter(code for [code] in codes) == load.counts(by=here.process)
        assert await shown_on_the_page(here.process, await outcomes(*processes))
        found = ids_in(path_of[dead], are_tasks=False)
        assert set(found.values()) <= {1}
        missing = [told for name, told in load.told.items() if told.by is dead.process and name not in found]
        assert all(told.at > killed - LOST_S_MAX for told in missing), "older than a second"
        tasks = sum((ids_in(path, are_tasks=True) for path in path_of.values()), Counter())
        lost = check_tasks(load, tasks, [*kills, killed])
        report("two gateways and two batchers, one of each killed", load, len(missing) + lost)
        assert load.broken > 0 and len(load.counts()) > 1


@pytest.mark.timeout(240)
async def test_over_redis_stalls_cost_no_record(tmp_path: Path) -> None:
    """Replies that a stall had swallowed were asked for again, and then no process counted: 80 of 967 had no record."""
    async with running_redis(tmp_path / "redis") as redis, fleet_over(tmp_path, redis.url, {}) as fleet:
        paths = [tmp_path / str(number) / "tracking.db" for number in range(3)]
        await fleet.add("gateway", settings=tracked_in(paths[0]))
        for path in paths[1:]:
            await fleet.add("batcher", "--upstream", SIM, settings=tracked_in(path))
        await fleet.wait_until_ready()
        processes = [place.process for place in (*fleet.gateways, *fleet.batchers)]
        load = CountedLoad(lambda: processes[:1], may_refuse=True)
        for _ in range(STALLS):
            await load.more(150)
            redis.stop()
            await asyncio.sleep(STALL_S)
            redis.go_on()
        await load.more(150)
        await load.stop()
        await until(lambda: is_all_confirmed(redis))
        await until_written(*processes)
        tasks = sum((ids_in(path, are_tasks=True) for path in paths), Counter())
        told = sum(1 for each in load.tasks.values() if each is not None)
        what = f"{STALLS} stalls of {STALL_S:g} s, {load.refused} tasks refused"
        report(what, load, told - len(tasks))
        assert tasks == dict.fromkeys(load.tasks, 1), "each that was accepted once, and none that was refused"
        for path, process in zip(paths, processes, strict=True):
            assert rows_by_outcome(path) == await outcomes(process)


async def is_all_confirmed(redis: RedisServer) -> bool:
    """Whether no entry is left in Redis: each has its outcome."""
    async with redis.client() as client:
        return not any([await client.xlen(key) for key in await client.keys("*:q:*")])


@pytest.mark.timeout(240)
async def test_alone_a_kill_costs_a_second(tmp_path: Path) -> None:
    path = tmp_path / "tracking.db"
    serving = start_gateway(tmp_path, SIM, (), tracked_in(path))
    alive = [serving]
    try:
        await serving.wait_until_serving()
        load = CountedLoad(lambda: alive)
        await load.more(1000)
        killed = time.monotonic()
        serving.kill()
        again = start_gateway(tmp_path, SIM, (), tracked_in(path))
        alive[:] = [again]
        await again.wait_until_serving()
        await load.more(1000)
        await load.stop()
        await until_written(again)
        found = ids_in(path, are_tasks=False)
        assert set(found.values()) <= {1}
        missing = [told for name, told in load.told.items() if name not in found]
        assert all(told.by is serving and told.at > killed - LOST_S_MAX for told in missing)
        now = Counter(told.code for told in load.told.values() if told.by is again)
        tasks = ids_in(path, are_tasks=True)
        lost = check_tasks(load, tasks, [killed])
        counted = await outcomes(again)
        assert {code: count for code, count in counted.items() if code != "ok"} == {
            code: count for code, count in now.items() if code != "ok"
        }
        assert await shown_on_the_page(again, counted)
        report("one process, killed and started again", load, len(missing) + lost)
    finally:
        for process in alive:
            if process.process.poll() is None:
                process.kill()
