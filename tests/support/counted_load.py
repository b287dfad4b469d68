"""Clients that write down by id what became of each of their requests, to be compared with what Carpool counts."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from carpool.core.problem import code_of as code_in
from support.client import Connection, ConnectionBrokenError, Response, inference_body
from support.processes import GatewayProcess, until

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
        """So far."""
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
