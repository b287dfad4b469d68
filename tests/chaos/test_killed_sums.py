"""Sums agree: what became of requests, by metrics, by tracking, on the live page, and as the load itself counted it.

With `kill -9` no more than a second of the dead process's records is missing, and tasks are exact. That they agree
exactly without a kill, `tests/integration/test_sums_of_faces.py` shows.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from carpool.core.problem import code_of as code_in
from support.client import Connection, ConnectionBrokenError, Response, inference_body
from support.live import viewing
from support.processes import GatewayProcess, start_gateway, until
from support.redis_fleet import Place, fleet_over
from support.redis_servers import RedisServer, running_redis
from support.tracking import outcomes, rows, rows_by_outcome, until_written

ASYNC = "Prefer: respond-async\r\n"
# Every so many requests are a task, others are cut off by their own deadline.
TASK_EVERY, HURRIED_EVERY = 5, 7
AGAIN_S = 0.02


class Told(NamedTuple):
    """The end of a request, as its client saw it."""

    at: float
    code: str
    by: GatewayProcess


class CountedLoad:
    """Clients that ask one after the other until they are told to stop. Who is cut off goes to the next gateway."""

    def __init__(
        self, gateways: Callable[[], Sequence[GatewayProcess]], clients: int = 24, *, may_refuse: bool = False
    ) -> None:
        self._gateways = gateways
        self.told: dict[str, Told] = {}
        # Tasks that were accepted, and what was read of them in the end.
        self.tasks: dict[str, Told | None] = {}
        self.broken = 0
        # Tasks that were not accepted, where that may be.
        self.refused = 0
        self._may_refuse = may_refuse
        self._is_over = False
        self._clients = [asyncio.ensure_future(self._run(number)) for number in range(clients)]

    @property
    def answered(self) -> int:
        return len(self.told) + sum(1 for told in self.tasks.values() if told is not None)

    async def more(self, number: int) -> None:
        """Until so many more were answered."""
        wanted = self.answered + number
        await until(lambda: self.answered >= wanted)

    async def stop(self) -> None:
        """Ask no more; those under way come to their end."""
        self._is_over = True
        await asyncio.gather(*self._clients)

    def counts(self, *, by: GatewayProcess | None = None) -> Counter[str]:
        """Outcomes of synchronous requests, at one gateway or at all."""
        return Counter(told.code for told in self.told.values() if by is None or told.by is by)

    async def _run(self, client: int) -> None:
        number, turn = 0, client
        while not self._is_over:
            gateways = self._gateways()
            gateway = gateways[turn % len(gateways)]
            turn += 1
            try:
                connection = await Connection.open(gateway.port)
            except OSError:
                await asyncio.sleep(AGAIN_S)
                continue
            try:
                while not self._is_over:
                    number += 1
                    await self._ask(connection, gateway, f"{client}-{number}", number)
            except ConnectionBrokenError:
                self.broken += 1
            finally:
                await connection.close()

    async def _ask(self, connection: Connection, gateway: GatewayProcess, name: str, number: int) -> None:
        if number % TASK_EVERY == 0:
            accepted = await connection.ask("POST", "/v1/inference", inference_body(name), ASYNC)
            if accepted.status == 503 and self._may_refuse:
                self.refused += 1
                await asyncio.sleep(AGAIN_S)
                return
            assert accepted.status == 202, accepted.body
            task_id: str = accepted.json["task_id"]
            self.tasks[task_id] = None
            await self._read(task_id, name)
            return
        headers = f"X-Request-Id: {name}\r\n" + ("X-Request-Timeout-Ms: 1\r\n" if number % HURRIED_EVERY == 0 else "")
        answer = await connection.ask("POST", "/v1/inference", inference_body(name), headers)
        if answer.status == 200:
            assert answer.json["output"] == name[::-1], "somebody else's output"
        self.told[name] = Told(time.monotonic(), code_of(answer), gateway)

    async def _read(self, task_id: str, name: str) -> None:
        """Wait for a task's end, at whatever gateway lives."""
        turn = 0
        while True:
            gateways = self._gateways()
            gateway = gateways[turn % len(gateways)]
            turn += 1
            try:
                connection = await Connection.open(gateway.port)
            except OSError:
                await asyncio.sleep(AGAIN_S)
                continue
            try:
                answer = await connection.ask("GET", f"/v1/result/{task_id}?wait_ms=5000")
            except ConnectionBrokenError:
                continue
            finally:
                await connection.close()
            if answer.status == 200 and answer.json["status"] != "PENDING":
                assert answer.json["output"] == name[::-1], "somebody else's output"
                self.tasks[task_id] = Told(time.monotonic(), "ok", gateway)
                return
            assert answer.status in (200, 503), answer.body
            await asyncio.sleep(AGAIN_S)


def code_of(answer: Response) -> str:
    """`ok`, or the code of the error."""
    return "ok" if answer.status == 200 else code_in(answer.body)


POISON = "arsenic"
SIM = f"sim:?latency_ms=5&slots=8&poison={POISON}"
LOST_S_MAX = 1.0
STALLS, STALL_S = 10, 0.8


def tracked_in(path: Path) -> dict[str, object]:
    return {"tracking.store": "sqlite", "tasks.data_dir": str(path.parent), "shedding.mode": "off"}


async def shown_on_the_page(process: GatewayProcess, expected: Counter[str]) -> bool:
    """Whether the page comes to show these; the parts of other processes come a second or two later."""

    def look() -> bool:
        with viewing(process.admin_port) as viewer:
            viewer.until(lambda event: +Counter(event["requests"]) == expected)
        return True

    return await asyncio.to_thread(look)


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
