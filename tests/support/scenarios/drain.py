"""C3: SIGTERM under load. What was received is answered; clients that honour `Connection: close` and know a second
gateway see no error, though they never repeat a request.
"""

import asyncio
import random
import time
from contextlib import AsyncExitStack
from pathlib import Path

from carpool.app import SAME_WORD_S
from support.checker import Checker, Verdict
from support.client import Connection, ConnectionBrokenError, ask_once, inference_body
from support.processes import GatewayProcess, running_gateway, until
from support.upstreams import scripted_upstream

UPSTREAM = "sim:?latency_ms=30&slots=4"
# Timeouts that nobody meets.
PATIENT: dict[str, float] = {
    "broker.queue_timeout_s": 600,
    "broker.total_timeout_s": 600,
    "upstream.timeout_s": 600,
}
# Longer than a client takes to see that it was told goodbye, also on a busy machine.
SETTINGS = {**PATIENT, "gateway.drain_grace_s": 1.5}


class Fleet:
    """The gateways that clients know: they try the first, and the next when a connection is refused."""

    def __init__(self, checker: Checker) -> None:
        self.checker = checker
        self.ports: list[int] = []
        self.stopped = False

    async def connect(self) -> Connection:
        """A connection to the first gateway that accepts one."""
        for port in list(self.ports):
            try:
                return await Connection.open(port)
            except (ConnectionRefusedError, ConnectionResetError):
                continue  # refused: nothing has been sent
        raise AssertionError("every gateway refuses connections")

    async def client(self) -> None:
        """Requests on one connection after the other, none of them sent twice."""
        connection: Connection | None = None
        while not self.stopped:
            connection = connection or await self.connect()
            text = self.checker.new_input()
            self.checker.accepted(text)
            try:
                response = await connection.ask("POST", "/v1/inference", inference_body(text))
            except ConnectionBrokenError:
                self.checker.broke_off(text)
                await connection.close()
                connection = None
                continue
            self.checker.answered(text, response)
            if response.is_last:
                await connection.close()
                connection = None
            await asyncio.sleep(random.uniform(0, 0.02))
        if connection is not None:
            await connection.close()


async def rolling_restarts(directory: Path, rounds: int, clients: int) -> tuple[Verdict, Checker, list[float]]:
    """Start a replacement, SIGTERM the one in service, again and again; also returns how long each took to leave."""
    checker = Checker("C3")
    fleet = Fleet(checker)
    seconds: list[float] = []
    async with AsyncExitStack() as stack:
        serving = await stack.enter_async_context(running_gateway(directory / "0", UPSTREAM, settings=SETTINGS))
        fleet.ports = [serving.port]
        load = [asyncio.create_task(fleet.client()) for _ in range(clients)]
        for number in range(1, rounds + 1):
            replacement = await stack.enter_async_context(
                running_gateway(directory / str(number), UPSTREAM, settings=SETTINGS)
            )
            fleet.ports = [serving.port, replacement.port]
            await asyncio.sleep(random.uniform(0.05, 0.2))
            started = time.monotonic()
            serving.terminate()
            code = await serving.exit_code()
            seconds.append(time.monotonic() - started)
            assert code == 0, serving.log.read_text()
            assert serving.log_messages("error") == []
            serving = replacement
        fleet.stopped = True
        await asyncio.gather(*load)
    return checker.verdict(), checker, seconds


async def says_not_ready(gateway: GatewayProcess) -> bool:
    """Whether it told whoever balances the load that it leaves."""
    return (await ask_once(gateway.admin_port, "GET", "/internal/ready")).status == 503


async def refuses_connections(gateway: GatewayProcess) -> bool:
    """Whether nobody listens on the gateway's port."""
    try:
        connection = await Connection.open(gateway.port)
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:
        return False  # it closed in the moment in which this came: ask once more
    await connection.close()
    return False


async def second_sigterm(directory: Path) -> None:
    """SIGTERM twice while a call hangs: the second does not wait for it."""
    async with scripted_upstream() as upstream:
        upstream.gate.clear()
        async with running_gateway(directory, upstream.url, settings=PATIENT) as gateway:
            waiting = await Connection.open(gateway.port)
            waiting.send("POST", "/v1/inference", inference_body("never answered"))
            await until(lambda: upstream.in_flight > 0)
            gateway.terminate()
            await until(lambda: says_not_ready(gateway))
            await asyncio.sleep(2 * SAME_WORD_S)
            assert gateway.process.poll() is None
            gateway.terminate()
            await gateway.exit_code()
            await waiting.close()


async def received_before_the_listener_closes(directory: Path) -> list[int]:
    """Requests that are queued, in flight, half received or just connected when the listener closes are answered."""
    async with scripted_upstream() as upstream:
        upstream.gate.clear()
        settings = {**PATIENT, "gateway.drain_grace_s": 0.2}
        async with running_gateway(directory, upstream.url, "--max-batch", "1", settings=settings) as gateway:
            sent = [await Connection.open(gateway.port) for _ in range(3)]
            for number, connection in enumerate(sent):
                connection.send("POST", "/v1/inference", inference_body(f"sent {number}"))
            half = await Connection.open(gateway.port)
            body = inference_body("half")
            half.send_part(f"POST /v1/inference HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            await until(lambda: upstream.in_flight > 0)
            gateway.terminate()
            await until(lambda: refuses_connections(gateway))
            half.send_part(body)
            upstream.gate.set()
            statuses = [(await connection.read()).status for connection in (*sent, half)]
            for connection in (*sent, half):
                await connection.close()
            assert await gateway.exit_code() == 0
    return statuses
