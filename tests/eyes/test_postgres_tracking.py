"""Tracking in a real PostgreSQL: every record there and right, under load, and when the database goes."""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from carpool.core.batch import Batch
from carpool.core.outcome import NO_CALL, CallFacts
from carpool.tracking.postgres import MIGRATIONS, VERSION_TABLE, PostgresStore
from carpool.tracking.questions import RequestQuestion, UsageQuestion
from carpool.tracking.records import RequestEntry
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
def server() -> Iterator[PostgresServer]:
    with running_postgres() as server:
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


CALL = CallFacts(4, 0.2, endpoint="e", attempts=1, batch_id="b1", gpu_s=0.05)


def entry(number: int, ended_s: float = NOW, **other: Any) -> RequestEntry:
    """A request that took a quarter of a second."""
    arrived = ended_s - 0.25
    made = RequestEntry(f"r{number}", "alice", 1, "m", "ok", arrived, arrived + 0.0015, ended_s, False, CALL, 7)
    return made._replace(**other)


def batch(number: int, taken_s: float = NOW) -> Batch:
    return Batch(f"b{number}", "m", 4, "full", taken_s, taken_s + 0.5, "e", 1, taken_s + 0.75, "ok")


async def write(store: PostgresStore, requests: Sequence[RequestEntry], batches: Sequence[Batch] = ()) -> None:
    await store.write([store.pack(requests, batches, 0.0, ("paid", "free"))])


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
        late = entry(2, code="queue-timeout", taken=0.0, call=NO_CALL, tokens=None, is_task=True, owner="böb")
        kept = entry(3, call=CallFacts(0, 0.0, cached=True))
        await write(store, [entry(1), late, kept], [batch(1), Batch("b2", "m", 1, "drain", NOW, result="not-sent")])
        found = await store.find("r1")
        assert found is not None
        assert [found.created_at, found.completed_at] == pytest.approx([NOW - 0.25, NOW], abs=2e-6)
        assert [found.latency_ms, found.queue_ms, found.upstream_ms] == pytest.approx([250, 1.5, 200], abs=2e-3)
        assert (found.owner, found.tier, found.model, found.is_task) == ("alice", "free", "m", False)
        assert (found.status, found.batch_id, found.batch_size, found.reason) == ("completed", "b1", 4, "full")
        assert (found.endpoint, found.attempts, found.gpu_seconds, found.tokens) == ("e", 1, 0.05, 7)
        [failed] = await store.requests(RequestQuestion(is_failed=True, since=NOW - 1))
        assert (failed.id, failed.error, failed.owner, failed.is_task) == ("r2", "queue-timeout", "böb", True)
        nothing = (failed.queue_ms, failed.batch_id, failed.endpoint, failed.upstream_ms, failed.tokens)
        assert nothing == (None, None, None, None, None)
        free = await store.find("r3")
        assert free is not None and (free.cached, free.attempts, free.gpu_seconds) == (True, 0, 0.0)
        used = {each.name: each for each in await store.usage(UsageQuestion(since=NOW - 1))}
        assert (used["alice"].requests, used["alice"].cached, used["böb"].failed) == (2, 1, 1)
        assert await store.find("nobody") is None
    [told] = await query(url, "SELECT status, latency_ms FROM carpool_requests WHERE id = 'r2'")
    assert told == ("failed", pytest.approx(250, abs=2e-3))
    seconds = "extract(epoch FROM sent_to_gpu_at - created_at)::float, seconds, reason, result"
    rows = await query(url, f"SELECT id, request_count, endpoint, {seconds} FROM carpool_batches ORDER BY id")
    assert rows == [
        ("b1", 4, "e", pytest.approx(0.5, abs=2e-6), pytest.approx(0.25), "full", "ok"),
        ("b2", 1, None, None, 0.0, "drain", "not-sent"),
    ]


async def test_days_are_partitions_and_old_ones_are_dropped(url: str) -> None:
    async with store_at(url, retention_days=3) as store:
        for number, age in enumerate([0, 1, 2.9, 5, 40]):
            await write(store, [entry(number, NOW - age * DAY_S)], [batch(number, NOW - age * DAY_S)])
        await store.tidy(NOW)
        assert sorted(record.id for record in await store.requests(RequestQuestion())) == ["r0", "r1", "r2"]
        # What was dropped can come again.
        await write(store, [entry(9, NOW - 40 * DAY_S)])
    found = await query(url, "SELECT relname FROM pg_class WHERE relname LIKE 'carpool_batches_2%'")
    names = [name for [name] in found if "idx" not in name]
    assert sorted(name[-8:] for name in names) == ["20231112", "20231113", "20231114", "20231115"]


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
            await write(store, [entry(1), entry(2, owner="a\0b")])
        await write(store, [entry(3)])
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
        rows = [store.pack([entry(n) for n in range(10)], [batch(1)], 0.0, ("paid", "free"))]
        with pytest.raises(StoreAwayError):
            await store.write(rows)
        assert way.cuts == 1
        await store.write(rows)  # the same come again
        await write(store, [entry(10)])
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
    with running_postgres() as server:
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
