"""What clients are told who are refused at the door, on a real process, and that they are counted."""

import asyncio
import re
from math import ceil
from pathlib import Path

from support.client import Connection, Response, ask_once, inference_body
from support.processes import running_gateway

# Ten requests a second.
SCARCE = "sim:?latency_ms=100&slots=1&max_batch=1"
CLIENTS, WANTED = 12, 60
JSON = "Content-Type: application/json\r\n"


async def refused_ones(port: int, headers: str, wanted: int) -> list[Response]:
    """Ask with many connections at once until so many requests were refused."""
    refused: list[Response] = []

    async def ask_on() -> None:
        connection = await Connection.open(port)
        while len(refused) < wanted:
            response = await connection.ask("POST", "/v1/inference", inference_body("x"), headers)
            if response.status == 503:
                refused.append(response)
        await connection.close()

    await asyncio.gather(*(ask_on() for _ in range(CLIENTS)))
    return refused


def total(page: str, metric: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{metric}\S* (\S+)$", page, re.MULTILINE))


async def test_a_shed_client_is_told_how_long_it_would_have_waited(tmp_path: Path) -> None:
    limits = {"limits.anonymous": 1_000_000, "limits.burst": 1000}
    async with running_gateway(tmp_path, SCARCE, "--max-batch", "1", settings=limits) as gateway:
        refused = await refused_ones(gateway.port, JSON, WANTED)
        for response in refused:
            problem = response.json
            assert (problem["type"], problem["status"]) == ("urn:carpool:error:shed", 503)
            assert problem["title"] and "Retry-After" in problem["detail"]
            assert response.headers["retry-after"] == str(max(1, ceil(problem["predicted_wait_ms"] / 1000)))
            assert response.headers["content-type"] == "application/problem+json"
            assert response.headers["ratelimit-policy"] == '"default";q=1000000;w=60'
            assert response.headers["ratelimit"].startswith('"default";r=')
        assert len({response.json["request_id"] for response in refused}) == len(refused)
        page = (await ask_once(gateway.admin_port, "GET", "/metrics")).body.decode()
        assert total(page, "carpool_shed_total") == len(refused)
        assert total(page, 'carpool_problems_total{code="shed"}') == len(refused)


async def test_while_clients_are_shed_a_task_comes_in(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, SCARCE, "--max-batch", "1") as gateway:
        await refused_ones(gateway.port, JSON, 1)
        flood = asyncio.create_task(refused_ones(gateway.port, JSON, WANTED))
        for body, headers in (
            (b'{"input":"x","mode":"async"}', JSON),
            (b'{"mode":"async","input":"x"}', JSON),
            (inference_body("x"), JSON + "Prefer: respond-async\r\n"),
        ):
            for _ in range(2):  # with a head that is not known, and with one that is
                response = await ask_once(gateway.port, "POST", "/v1/inference", body, headers)
                assert response.status == 202
        await flood
