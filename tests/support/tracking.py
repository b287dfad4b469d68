"""What tracking has kept, and what `/metrics` counts, for a comparison of both."""

import re
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from support.client import ask_once
from support.processes import GatewayProcess, until


async def page(process: GatewayProcess) -> str:
    return (await ask_once(process.admin_port, "GET", "/metrics")).body.decode()


async def outcomes(*processes: GatewayProcess) -> Counter[str]:
    """`carpool_requests_total` by outcome, summed over processes as Prometheus does."""
    counted: Counter[str] = Counter()
    for process in processes:
        for code, number in re.findall(r'^carpool_requests_total{outcome="(.+)"} (\S+)$', await page(process), re.M):
            counted[code] += int(float(number))
    return +counted


async def problems(*processes: GatewayProcess) -> Counter[str]:
    """`carpool_problems_total` by code: what clients were told."""
    counted: Counter[str] = Counter()
    for process in processes:
        for code, number in re.findall(r'^carpool_problems_total{code="(.+)"} (\S+)$', await page(process), re.M):
            counted[code] += int(float(number))
    return +counted


async def batches(*processes: GatewayProcess) -> int:
    """`carpool_batches_total`, over all reasons."""
    found = [re.findall(r"^carpool_batches_total{.+} (\S+)$", await page(process), re.M) for process in processes]
    return sum(int(float(number)) for numbers in found for number in numbers)


async def tracked(name: str, row: str, *processes: GatewayProcess) -> int:
    """`carpool_tracking_written_total`, or `dropped`, of rows of one kind."""
    pattern = rf'^carpool_tracking_{name}_total{{row="{row}"}} (\S+)$'
    found = [re.findall(pattern, await page(process), re.M) for process in processes]
    return sum(int(float(number)) for numbers in found for number in numbers)


async def until_written(*processes: GatewayProcess) -> None:

    async def is_all_written() -> bool:
        return sum([await process.metric("carpool_tracking_waiting") for process in processes]) == 0

    await until(is_all_written)


def rows(path: Path, statement: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(statement).fetchall()


def rows_by_outcome(path: Path) -> Counter[str]:
    return Counter(dict(rows(path, "SELECT coalesce(error, 'ok'), count(*) FROM carpool_requests GROUP BY 1")))
