"""F8: every task answered with 202 has its outcome, and the right one, whatever became of the process."""

import asyncio
import random
import time
from pathlib import Path

from support.checker import Checker, Verdict
from support.client import Connection, ConnectionBrokenError, inference_body
from support.processes import PATIENCE_S, GatewayProcess, running_gateway, until
from support.scenarios.drain import refuses_connections
from support.upstreams import scripted_upstream

SUBMITTERS, READERS = 8, 2
ASYNC = "Prefer: respond-async\r\n"
# Long enough that no result expires while the rounds run.
KEEP = {"tasks.result_ttl_s": 3600}


class TaskClients:
    """Clients that submit tasks without pause, and readers of results. They know their tasks by id."""

    def __init__(self, checker: Checker) -> None:
        self.checker = checker
        self.inputs: dict[str, str] = {}
        self.done: set[str] = set()

    async def submit_until_killed(self, port: int) -> None:
        """Submit tasks, one after the other, until the gateway is gone."""
        try:
            connection = await Connection.open(port)
        except OSError:
            return
        try:
            while True:
                await self.submit(connection, random.choice((0, 2000)))
        except ConnectionBrokenError:
            pass  # not answered with 202: nothing is owed
        finally:
            await connection.close()

    async def submit(self, connection: Connection, bytes_min: int = 0) -> str:
        """Submit one task; returns its id."""
        text = self.checker.new_input(bytes_min)
        response = await connection.ask("POST", "/v1/inference", inference_body(text), ASYNC)
        assert response.status == 202, response
        task_id: str = response.json["task_id"]
        self.checker.accepted(text, within_s=600)
        self.inputs[task_id] = text
        return task_id

    async def read_until_killed(self, port: int) -> None:
        """Read results, old and new, until the gateway is gone: what was told once must stay true."""
        try:
            connection = await Connection.open(port)
        except OSError:
            return
        try:
            while True:
                await asyncio.sleep(0.002)
                if self.inputs:
                    await self.read(connection, random.choice(list(self.inputs)))
        except ConnectionBrokenError:
            pass
        finally:
            await connection.close()

    async def read(self, connection: Connection, task_id: str, wait_ms: int = 0) -> bool:
        """Read one result; says whether there is one."""
        response = await connection.ask("GET", f"/v1/result/{task_id}?wait_ms={wait_ms}")
        assert response.status == 200, (response, "a task that was accepted is not known")
        task = response.json
        if task["status"] == "PENDING":
            return False
        if task["status"] == "SUCCESS":
            self.checker.output(self.inputs[task_id], task["output"], told_at=task["timestamp"])
        else:
            self.checker.failed(self.inputs[task_id], task["error"]["status"])
        self.done.add(task_id)
        return True

    async def read_all(self, port: int) -> None:
        """Read every task until it has its outcome."""
        give_up_at = time.monotonic() + PATIENCE_S
        left = list(self.inputs)

        async def read_some() -> None:
            connection = await Connection.open(port)
            while left and time.monotonic() < give_up_at:
                task_id = left.pop()
                if not await self.read(connection, task_id, wait_ms=1000):
                    left.append(task_id)
            await connection.close()

        await asyncio.gather(*(read_some() for _ in range(16)))


async def kill_at_random(directory: Path, rounds: int) -> tuple[Verdict, Checker]:
    """Submit and read in a steady stream, kill the gateway at a random moment, start it again on the same journal."""
    checker = Checker("F8")
    clients = TaskClients(checker)
    async with scripted_upstream() as upstream:
        upstream.latency_s = 0.02
        for _ in range(rounds):
            async with running_gateway(directory, upstream.url, "--slots", "2", settings=KEEP) as gateway:
                await load_and_kill(clients, gateway)
        async with running_gateway(directory, upstream.url, "--slots", "2", settings=KEEP) as gateway:
            await clients.read_all(gateway.port)
            assert gateway.log_messages("error") == []
        return checker.verdict(upstream.seen), checker


async def load_and_kill(clients: TaskClients, gateway: GatewayProcess) -> None:
    """One round: at least one task is accepted, for a round without any would prove nothing."""
    before = len(clients.inputs)
    streams = [clients.submit_until_killed(gateway.port) for _ in range(SUBMITTERS)]
    streams += [clients.read_until_killed(gateway.port) for _ in range(READERS)]
    running = asyncio.gather(*streams)
    await until(lambda: len(clients.inputs) > before)
    await asyncio.sleep(random.uniform(0.0, 0.4))
    gateway.kill()
    await running


async def submit_many(clients: TaskClients, gateway: GatewayProcess, count: int) -> None:
    """Submit `count` tasks."""
    connection = await Connection.open(gateway.port)
    for _ in range(count):
        await clients.submit(connection)
    await connection.close()


async def terminate_with_a_queue(directory: Path, count: int) -> tuple[Verdict, Checker, int]:
    """SIGTERM while most tasks wait: running batches finish, the others run after the restart, none of them twice."""
    checker = Checker("F8-term")
    clients = TaskClients(checker)
    async with scripted_upstream() as upstream:
        upstream.gate.clear()
        settings = KEEP | {"gateway.drain_grace_s": 0.1, "upstream.timeout_s": 600}
        async with running_gateway(directory, upstream.url, "--max-batch", "4", settings=settings) as gateway:
            await submit_many(clients, gateway, count)
            gateway.terminate()
            await until(lambda: refuses_connections(gateway))  # from then on nothing more is sent
            upstream.gate.set()
            assert await gateway.exit_code() == 0
        sent_before = len(upstream.seen)
        async with running_gateway(directory, upstream.url, settings=KEEP) as gateway:
            await clients.read_all(gateway.port)
        return checker.verdict(upstream.seen), checker, sent_before


async def terminate_while_the_upstream_hangs(directory: Path) -> tuple[Verdict, Checker]:
    """SIGTERM while a batch of tasks hangs: it is given up without an outcome, and runs after the restart."""
    checker = Checker("F8-hang")
    clients = TaskClients(checker)
    async with scripted_upstream() as upstream:
        upstream.gate.clear()
        settings = KEEP | {"upstream.timeout_s": 1.5, "gateway.drain_grace_s": 0.1}
        async with running_gateway(directory, upstream.url, settings=settings) as gateway:
            await submit_many(clients, gateway, 4)
            await until(lambda: upstream.in_flight > 0)
            gateway.terminate()
            assert await gateway.exit_code() == 0
        upstream.gate.set()
        async with running_gateway(directory, upstream.url, settings=settings) as gateway:
            await clients.read_all(gateway.port)
        return checker.verdict(), checker


async def deadline_counts_uptime_only(directory: Path, timeout_s: float) -> tuple[str, str, float]:
    """A task whose process is killed early and then down for longer than its timeout still succeeds. Another one,
    stuck after the restart too, ends when its uptime is over. Returns both statuses and the other's last seconds.
    """
    settings = KEEP | {"tasks.timeout_s": timeout_s, "upstream.timeout_s": 60.0}
    clients = TaskClients(Checker("F8-uptime", {"": {504}}))
    statuses: list[str] = []
    async with scripted_upstream() as upstream:
        upstream.gate.clear()
        for directory_name in ("answered", "stuck"):
            async with running_gateway(directory / directory_name, upstream.url, settings=settings) as gateway:
                await submit_many(clients, gateway, 1)
                await asyncio.sleep(0.3)
        answered, stuck = clients.inputs
        await asyncio.sleep(timeout_s)
        async with running_gateway(directory / "stuck", upstream.url, settings=settings) as gateway:
            started = time.monotonic()
            statuses.append(await final_status(clients, gateway, stuck))
            seconds = time.monotonic() - started
        upstream.gate.set()
        async with running_gateway(directory / "answered", upstream.url, settings=settings) as gateway:
            statuses.append(await final_status(clients, gateway, answered))
    return statuses[1], statuses[0], seconds


async def final_status(clients: TaskClients, gateway: GatewayProcess, task_id: str) -> str:
    """The status of a task once it has an outcome."""
    connection = await Connection.open(gateway.port)
    before = clients.checker.tally["ok"]
    has_outcome = await clients.read(connection, task_id, wait_ms=30000)
    await connection.close()
    return "PENDING" if not has_outcome else "SUCCESS" if clients.checker.tally["ok"] > before else "FAILED"
