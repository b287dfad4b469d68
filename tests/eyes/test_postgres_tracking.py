"""Tracking in a real PostgreSQL: every record there and right, under load, and when the database goes."""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from carpool.tracking.postgres import MIGRATIONS, VERSION_TABLE, PostgresStore
from carpool.tracking.questions import RequestQuestion, UsageQuestion
from carpool.tracking.records import BatchRow, RequestRow
from carpool.tracking.stores import BadRowsError, StoreAwayError, StoreUnusableError
from support.client import Connection, inference_body
from support.postgres import PostgresServer, running_postgres
from support.processes import GatewayProcess, carpool, running_gateway, until
from support.redis_fleet import fleet_over
from support.redis_servers import RedisServer
from support.tracking import batches, outcomes, tracked, until_written
from support.upstreams import scripted_upstream

NOW = 1_700_000_000.0
DAY_S = 86400.0
CLIENTS = 32
SIM = "sim:?latency_ms=20&slots=16"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    with running_postgres(tmp_path_factory.mktemp("postgres") / "server") as server:
        yield server


@pytest.fixture
async def url(server: PostgresServer) -> str:
    """A database of its own."""
    name = f"t{secrets.token_hex(4)}"
    await query(server.url, f"CREATE DATABASE {name}")
    return server.url.replace("/postgres", f"/{name}")


async def query(url: str, text: str) -> list[tuple[Any, ...]]:
    connection = await asyncpg.connect(url)
    try:
        return [tuple(row) for row in await connection.fetch(text)]
    finally:
        await connection.close()


@asynccontextmanager
async def store_at(url: str, retention_days: float = 30, is_made: bool = True) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(url, retention_days=retention_days)
    try:
        if is_made:
            await store.init()
        yield store
    finally:
        await store.close()


def request_row(number: int, completed_s: float = NOW) -> RequestRow:
    at = int(completed_s * 1e6)
    return RequestRow(
        f"r{number}", "alice", "free", "m", False, None, at - 250_000, at, 1.5, "b1", 4, "e", 1, 200.0, False, 7, 0.05
    )


def batch_row(number: int, created_s: float = NOW) -> BatchRow:
    at = int(created_s * 1e6)
    return BatchRow(f"b{number}", "m", 4, at, at + 5, "e", 0.2, 1, "full", "ok")


def settings(url: str, **further: object) -> dict[str, object]:
    return {"tracking.store": "postgres", "tracking.url": url} | {f"tracking.{k}": v for k, v in further.items()}


async def rows_by_outcome(url: str) -> Counter[str]:
    found = await query(url, "SELECT coalesce(error, 'ok'), count(*) FROM carpool_requests GROUP BY 1")
    return Counter(dict(found))


class Load:
    """Clients that ask one after the other until they are told to stop; each answer must be a 200."""

    def __init__(self, *ports: int) -> None:
        self.answered = 0
        self._is_over = False
        self._clients = [asyncio.ensure_future(self._ask(ports[n % len(ports)])) for n in range(CLIENTS)]

    async def _ask(self, port: int) -> None:
        connection = await Connection.open(port)
        while not self._is_over:
            response = await connection.ask("POST", "/v1/inference", inference_body(f"in {self.answered}"))
            assert response.status == 200, response.body
            self.answered += 1
        await connection.close()

    async def more(self, number: int) -> None:
        """Until so many more were answered."""
        wanted = self.answered + number
        await until(lambda: self.answered >= wanted)

    async def stop(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._clients)


# The store


async def test_a_row_reads_back_as_it_was_written(url: str) -> None:
    async with store_at(url) as store:
        failed = request_row(2)._replace(
            error="queue-timeout", queue_ms=None, batch_id=None, endpoint=None, tokens=None
        )
        await store.write([request_row(1), failed], [batch_row(1)])
        found = await store.find("r1")
        assert found is not None
        assert (found.created_at, found.completed_at, found.latency_ms) == (NOW - 0.25, NOW, 250.0)
        assert (found.status, found.batch_size, found.gpu_seconds, found.reason) == ("completed", 4, 0.05, "full")
        [late] = await store.requests(RequestQuestion(is_failed=True, since=NOW - 1))
        assert (late.id, late.error, late.queue_ms, late.tokens) == ("r2", "queue-timeout", None, None)
        [used] = await store.usage(UsageQuestion(since=NOW - 1))
        assert (used.name, used.requests, used.failed, used.tokens) == ("alice", 2, 1, 7)
        assert await store.find("nobody") is None
    [told] = await query(
        url, "SELECT status, latency_ms, extract(epoch FROM created_at)::float FROM carpool_requests WHERE id = 'r2'"
    )
    assert told == ("failed", 250.0, NOW - 0.25)
    [sent] = await query(url, "SELECT extract(epoch FROM sent_to_gpu_at - created_at)::float FROM carpool_batches")
    assert sent == (pytest.approx(5e-6),)


async def test_days_are_partitions_and_old_ones_are_dropped(url: str) -> None:
    async with store_at(url, retention_days=3) as store:
        ages = [0, 1, 2.9, 5, 40]
        await store.write(
            [request_row(n, NOW - age * DAY_S) for n, age in enumerate(ages)],
            [batch_row(n, NOW - age * DAY_S) for n, age in enumerate(ages)],
        )
        await store.tidy(NOW)
        assert sorted(record.id for record in await store.requests(RequestQuestion())) == ["r0", "r1", "r2"]
        # What was dropped can come again.
        await store.write([request_row(9, NOW - 40 * DAY_S)], [])
    names = [
        name for [name] in await query(url, "SELECT relname FROM pg_class WHERE relname LIKE 'carpool_batches_2%'")
    ]
    assert sorted(name[-8:] for name in names if "idx" not in name) == ["20231112", "20231113", "20231114", "20231115"]


async def test_without_tables_it_is_not_used(url: str) -> None:
    async with store_at(url, is_made=False) as store:
        with pytest.raises(StoreUnusableError, match="carpool tracking init"):
            await store.open()
        assert "version" in await store.init()
        await store.open()
        assert "nothing to do" in await store.init()
        await query(url, f"DELETE FROM {VERSION_TABLE}")
        await query(url, f"INSERT INTO {VERSION_TABLE} (version) VALUES ({len(MIGRATIONS) - 1})")
    async with store_at(url, is_made=False) as store:
        with pytest.raises(StoreUnusableError, match="carpool tracking init"):
            await store.open()


async def test_rows_that_can_never_be_written_are_told_apart(url: str) -> None:
    async with store_at(url) as store:
        with pytest.raises(BadRowsError):
            await store.write([request_row(1), request_row(2)._replace(owner="a\0b")], [])
        await store.write([request_row(3)], [])
        assert [record.id for record in await store.requests(RequestQuestion())] == ["r3"]


class CutAtCommit:
    """A way to the server that is cut when the word of the first commit comes back."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.cuts = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near, far = (reader, writer), await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, far[1]]
        await asyncio.gather(self._pass(near[0], far[1], False), self._pass(far[0], near[1], True))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_answer: bool) -> None:
        while data := await reader.read(2**16):
            if is_answer and b"COMMIT\0" in data and not self.cuts:
                self.cuts += 1
                break
            writer.write(data)
        for each in self._writers:
            each.close()


async def test_a_commit_in_doubt_is_not_written_twice(url: str, server: PostgresServer) -> None:
    async with store_at(url) as store:
        await store.tidy(NOW)  # the days are there: the next commit is that of rows
    way = CutAtCommit(server.port)
    listening = await asyncio.start_server(way.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    async with listening, store_at(url.replace(f":{server.port}/", f":{port}/"), is_made=False) as store:
        rows = [request_row(n) for n in range(10)]
        with pytest.raises(StoreAwayError):
            await store.write(rows, [])
        assert way.cuts == 1
        await store.write(rows, [])  # the same come again
        await store.write([request_row(10)], [])
    assert await query(url, "SELECT count(*), count(DISTINCT id) FROM carpool_requests") == [(11, 11)]


# Processes


async def init(url: str) -> None:
    done = await asyncio.to_thread(
        carpool, "tracking", "init", CARPOOL_TRACKING_STORE="postgres", CARPOOL_TRACKING_URL=url
    )
    assert done.returncode == 0, done.stderr


async def test_a_start_without_tables_says_what_to_do(url: str, tmp_path: Path) -> None:
    given = {"CARPOOL_TRACKING_STORE": "postgres", "CARPOOL_TRACKING_URL": url}
    started = await asyncio.to_thread(carpool, "serve", "--upstream", SIM, "--port", "0", cwd=tmp_path, **given)
    assert started.returncode == 2
    assert "run `carpool tracking init` once" in started.stderr and started.stderr.count("\n") == 1


async def test_every_record_is_there_under_load(url: str, tmp_path: Path) -> None:
    await init(url)
    async with running_gateway(tmp_path, SIM, settings=settings(url)) as gateway:
        load = Load(gateway.port)
        await load.more(20_000)
        await load.stop()
        gateway_counts = await outcomes(gateway)
        sent = await batches(gateway)
        gateway.terminate()
        assert await gateway.exit_code() == 0  # with all that waited written
    assert await rows_by_outcome(url) == gateway_counts == Counter(ok=load.answered)
    [[total, ids]] = await query(url, "SELECT count(*), count(DISTINCT id) FROM carpool_requests")
    assert total == ids
    [[count, seats]] = await query(url, "SELECT count(*), sum(request_count) FROM carpool_batches")
    assert (count, seats) == (sent, load.answered)
    wrong = await query(
        url,
        "SELECT b.id FROM carpool_batches b JOIN carpool_requests r ON r.batch_id = b.id GROUP BY b.id "
        "HAVING count(*) != max(b.request_count) OR abs(sum(r.gpu_seconds) - max(r.upstream_ms) / 1000) > 1e-6",
    )
    assert wrong == []
    odd = await query(
        url, "SELECT id FROM carpool_requests WHERE latency_ms < queue_ms + upstream_ms - 1 OR attempts != 1"
    )
    assert odd == []


@pytest.mark.parametrize("fault", ["stopped", "frozen"])
async def test_a_database_that_goes_costs_rows_and_no_request(tmp_path: Path, fault: str) -> None:
    with running_postgres(tmp_path / "server") as server:
        await init(server.url)
        async with running_gateway(
            tmp_path / "gateway", SIM, settings=settings(server.url, buffer_max=1000)
        ) as gateway:
            load = Load(gateway.port)
            await load.more(2000)
            await (asyncio.to_thread(server.stop) if fault == "stopped" else asyncio.to_thread(server.freeze))

            async def has_dropped() -> bool:
                has_failed = await gateway.metric("carpool_tracking_failures_total") > 0
                return has_failed and await tracked("dropped", "request", gateway) > 1000

            await until(has_dropped)  # the buffer is full; all the while clients get their answers
            await (asyncio.to_thread(server.start) if fault == "stopped" else asyncio.to_thread(server.thaw))
            before = await tracked("written", "request", gateway)

            async def goes_on() -> bool:
                return await tracked("written", "request", gateway) > before + 2000

            await until(goes_on)
            await load.stop()
            await until_written(gateway)
            counted, dropped = await outcomes(gateway), await tracked("dropped", "request", gateway)
            assert counted == Counter(ok=load.answered)
            assert await rows_by_outcome(server.url) == Counter(ok=load.answered - dropped)
            said = gateway.log_messages("error")
            assert any("cannot be kept for now" in each for each in said) and len(said) < 20


async def test_a_fleet_writes_each_record_once(url: str, tmp_path: Path, redis_server: RedisServer) -> None:
    await init(url)
    given = settings(url) | {"broker.namespace": tmp_path.name}
    async with scripted_upstream() as upstream, fleet_over(tmp_path, redis_server.url, given) as fleet:
        for _ in range(2):
            await fleet.add("gateway")
            await fleet.add("batcher", "--upstream", upstream.url)
        await fleet.wait_until_ready()
        load = Load(*fleet.ports())
        await load.more(3000)
        await load.stop()
        everybody: list[GatewayProcess] = [place.process for place in (*fleet.gateways, *fleet.batchers)]
        await until_written(*everybody)
        assert await rows_by_outcome(url) == await outcomes(*everybody) == Counter(ok=load.answered)
        sent = await batches(*everybody)
        assert await query(url, "SELECT count(*), sum(request_count) FROM carpool_batches") == [(sent, load.answered)]
