"""Tracking in a real PostgreSQL: every record there and right, under load, and when the database goes."""

import asyncio
import json
import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import pytest

from carpool.composition.tracking import look_up_ended
from carpool.core.batch import Batch
from carpool.core.outcome import NO_CALL, CallFacts, Output
from carpool.core.request import Request
from carpool.testing import Witness, make_request
from carpool.tracking.postgres import MIGRATIONS, VERSION_TABLE, PostgresStore
from carpool.tracking.recorder import Recorder
from carpool.tracking.records import (
    BadRowsError,
    RequestQuestion,
    RequestRow,
    StoreAwayError,
    StoreUnusableError,
    batch_row,
    request_row,
)
from support.client import Connection, inference_body
from support.flights import STEPS, flight, write_steps
from support.postgres import PostgresServer, running_postgres
from support.processes import PATIENCE_S, GatewayProcess, carpool, carpool_for, running_gateway, until
from support.redis_fleet import fleet_over
from support.redis_servers import RedisServer
from support.tracking import batches, outcomes, tracked, until_written
from support.upstreams import scripted_upstream

NOW = 1_700_000_000.0
DAY_S = 86400.0
TIERS = ("paid", "free")
CLIENTS = 32
SIM = "sim:?latency_ms=20&slots=16"
BUFFER_MAX = "carpool.composition.tracking.BUFFER_MAX"
# A steady load, and how long the database is gone; it is built for 10,000 a second, for 60 s, and 20 s.
RATE = float(os.environ.get("EYES_RATE", "500"))
SECONDS = float(os.environ.get("EYES_SECONDS", "4"))
GONE_S = float(os.environ.get("EYES_GONE_SECONDS", "5"))


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


class Ended(NamedTuple):
    """A request, and what became of it."""

    id: str
    ended: float
    arrived: float
    taken: float
    owner: str = "alice"
    is_task: bool = False
    error: str | None = None
    call: CallFacts = CALL
    tokens: int | None = 7

    @property
    def request(self) -> Request:
        made = make_request(
            self.id, Witness(), now=self.arrived, owner=self.owner, tier=1, model="m", is_task=self.is_task
        )
        made.taken, made.ended = self.taken, self.ended
        return made

    @property
    def row(self) -> RequestRow:
        return request_row(self.request, self.error, self.call, self.tokens, TIERS, 0.0)


def entry(number: int, ended_s: float = NOW, **other: Any) -> Ended:
    """A request that took a quarter of a second."""
    return Ended(f"r{number}", ended_s, ended_s - 0.25, ended_s - 0.25 + 0.0015)._replace(**other)


def batch(number: int, taken_s: float = NOW) -> Batch:
    return Batch(f"b{number}", "m", 4, "full", taken_s, taken_s + 0.5, "e", 1, taken_s + 0.75, "ok")


async def write(store: PostgresStore, requests: Sequence[Ended], batches: Sequence[Batch] = ()) -> None:
    await store.write([each.row for each in requests], [batch_row(each, 0.0) for each in batches])


def settings(url: str) -> dict[str, object]:
    return {"tracking.store": "postgres", "tracking.url": url}


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
        late = entry(2, error="queue-timeout", taken=0.0, call=NO_CALL, tokens=None, is_task=True, owner="böb")
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
        used = {each.name: each for each in await store.usage(since=NOW - 1)}
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


async def test_of_a_task_that_ended_twice_the_last_row_stays(url: str) -> None:
    """After a failover of Redis some had two, and `usage` counted both."""
    async with store_at(url) as store:
        await write(store, [entry(1, is_task=True, error="draining"), entry(2, is_task=True), entry(3)])
        later = [entry(1, NOW + 5, is_task=True), entry(3, NOW + 5), entry(1, NOW + DAY_S / 2, is_task=True)]
        await write(store, later)
        found = await query(url, "SELECT id, error FROM carpool_requests ORDER BY id")
        assert found == [("r1", None), ("r2", None), ("r3", None), ("r3", None)]
        [used] = await store.usage(since=NOW - 1)
        assert (used.requests, used.failed) == (4, 0)


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


async def test_odd_rows_are_cleaned_and_cost_no_other(url: str) -> None:
    """Too long for an index, without a meaning as text, too large, of a day that nobody expects."""
    async with store_at(url) as store:
        recorder = Recorder(store, TIERS, buffer_max=10_000, clock=lambda: 0.0, wall=lambda: 0.0)
        random_text = secrets.token_hex(5000)
        odd: list[dict[str, Any]] = [
            {"id": "nul \0"},
            {"id": "half \ud800"},
            {"id": "long " + random_text},
            {"owner": "a\0b"},
            {"tokens": 2**80},
            {"call": CallFacts(2**40, float("inf"), endpoint="e\0", batch_id="b" + random_text, gpu_s=float("nan"))},
            {"ended": NOW - 3 * DAY_S},
        ]
        entries = [entry(number) for number in range(1500)]
        for number, change in enumerate(odd):
            entries[200 * number + 7] = entry(200 * number + 7, **change)
        await recorder.start()
        for each in entries:
            request = each.request
            outcome = Output(b"1", each.call, each.tokens)
            request.settle(outcome, each.ended)
            recorder.settled(request, outcome)
        await until(lambda: recorder.waiting == 0)
        assert (recorder.written["request"], recorder.dropped["request"], recorder.failures) == (1500, 0, 0)
        assert len(await store.requests(RequestQuestion(limit=5000))) == 1500
        await recorder.close()
    async with store_at(url) as store:
        assert (await query(url, "SELECT count(*) FROM carpool_requests WHERE id LIKE 'long %'")) == [(1,)]


async def test_whoever_asks_for_a_name_that_no_row_can_have_is_answered(url: str) -> None:
    async with store_at(url) as store:
        told: list[object] = []
        await look_up_ended(store, "nul \0", None, told.append)
        assert told == [None]


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
        rows = [entry(n).row for n in range(10)], [batch_row(batch(1), 0.0)]
        with pytest.raises(StoreAwayError):
            await store.write(*rows)
        assert way.cuts == 1
        await store.write(*rows)  # the same come again
        await write(store, [entry(10)])
    assert await query(url, "SELECT count(*), count(DISTINCT id) FROM carpool_requests") == [(11, 11)]


# In flight


async def test_any_order_of_writes_ends_in_the_outcome(url: str) -> None:
    async with store_at(url) as store:
        await store.announce("w", [])
        for is_task in (False, True):
            for number, steps in enumerate(permutations(STEPS)):
                await write_steps(store, f"{is_task} {number}", steps, NOW, is_task=is_task)
    ends = await query(url, "SELECT error, count(*), count(DISTINCT id) FROM carpool_requests GROUP BY 1")
    assert ends == [(None, 240, 240)]
    async with store_at(url) as store:
        found = await store.requests(RequestQuestion(limit=10_000))
        assert {each.status for each in found} == {"completed"} and len(found) == 240
        one = await store.find("True 7")
        assert one is not None and one.status == "completed"


async def test_a_row_in_flight_reads_back_as_it_was_written(url: str) -> None:
    async with store_at(url) as store:
        rows = [flight("r1", at=NOW, owner="böb"), flight("r2", "processing", at=NOW + 1), flight("r3", at=NOW - 1)]
        await store.write_flights(rows, [])
        await store.write_flights([flight("r3", "processing", at=NOW - 1, changed=NOW + 5)], [])
        await store.write_flights([flight("r3", at=NOW - 1, changed=NOW)], [])  # late: it was sent meanwhile
        found = await store.requests(RequestQuestion())
        states = [(each.id, each.status, each.owner, each.batch_id, each.completed_at) for each in found]
        assert states == [
            ("r2", "processing", "alice", "b1", None),
            ("r1", "queued", "böb", None, None),
            ("r3", "processing", "alice", "b1", None),
        ]
        assert found[0].created_at == pytest.approx(NOW + 1, abs=2e-6) and found[0].latency_ms > DAY_S
        assert [each.id for each in await store.requests(RequestQuestion(status="queued", owner="böb"))] == ["r1"]
        assert await store.requests(RequestQuestion(is_failed=True)) == []
        await store.write_flights([], [("w", "r1"), ("w", "r2"), ("other", "r3")])
        assert [each.id for each in await store.requests(RequestQuestion())] == ["r3"]
        with pytest.raises(BadRowsError):
            await store.write_flights([flight("r4", at=NOW, owner="a\0b")], [])


async def test_only_what_a_process_that_is_gone_had_fails(url: str) -> None:
    """Many look at once. One that could not say that it lives takes back what was said of its requests."""
    async with store_at(url) as one, store_at(url, is_made=False) as other, store_at(url, is_made=False) as third:
        for store, writer in ((one, "one"), (other, "other")):
            await store.announce(writer, [])
        await one.write_flights([flight(f"r{n}", "processing", at=NOW, writer="one") for n in range(1500)], [])
        await other.write_flights([flight("living", at=NOW, writer="other")], [])
        await asyncio.gather(*(store.fail_gone(time.time()) for store in (one, other, third)))
        assert await query(url, "SELECT status, count(*) FROM carpool_in_flight GROUP BY 1 ORDER BY 1") == [
            ("processing", 1500),
            ("queued", 1),
        ]
        assert await query(url, "SELECT count(*) FROM carpool_requests") == [(0,)]
        await query(url, "UPDATE carpool_writers SET seen_at = now() - interval '31 s' WHERE id = 'one'")
        await asyncio.gather(*(store.fail_gone(time.time()) for store in (one, other, third)))
        failed = await query(url, "SELECT status, error, count(*) FROM carpool_requests GROUP BY 1, 2")
        assert failed == [("failed", "process-gone", 1500)]
        assert await query(url, "SELECT id FROM carpool_in_flight") == [("living",)]
        # It was only cut off.
        await one.announce("one", [f"r{n}" for n in range(1499)])
        assert await query(url, "SELECT id FROM carpool_requests") == [("r1499",)]
        await one.announce("one", ["r1499"])
        assert await query(url, "SELECT id FROM carpool_requests") == [("r1499",)]
        await one.leave("one")
        assert await query(url, "SELECT id FROM carpool_writers") == [("other",)]


# Processes


# A call is held as long as a test wants.
HELD = {"tracking.in_flight": "true", "upstream.timeout_s": 100, "broker.total_timeout_s": 120}


async def listed(url: str, *flags: str) -> dict[str, tuple[str, str | None]]:
    asked = partial(carpool, CARPOOL_TRACKING_STORE="postgres", CARPOOL_TRACKING_URL=url)
    done = await asyncio.to_thread(asked, "requests", "--json", *flags)
    assert done.returncode == 0, done.stderr
    return {each["id"]: (each["status"], each["error"]) for each in json.loads(done.stdout)["requests"]}


async def test_of_two_gateways_only_the_requests_of_the_killed_one_fail(url: str, tmp_path: Path) -> None:
    await init(url)
    short = {"carpool.tracking.postgres.GONE_S": 3.0, "carpool.tracking.flights.ANNOUNCE_EVERY_S": 0.5}
    given = settings(url) | HELD | {"carpool.tracking.flights.LOOK_EVERY_S": 0.5} | short
    async with (
        scripted_upstream() as upstream,
        running_gateway(tmp_path / "one", upstream.url, settings=given) as one,
        running_gateway(tmp_path / "other", upstream.url, settings=given) as other,
    ):
        upstream.gate.clear()
        asked = [
            asyncio.ensure_future(gateway.ask("a", f"X-Request-Id: {name}\r\n"))
            for gateway, name in ((one, "lost"), (other, "kept"))
        ]

        async def are_running() -> bool:
            return await listed(url) == dict.fromkeys(("lost", "kept"), ("processing", None))

        await until(are_running)
        one.kill()

        async def is_told() -> bool:
            return await listed(url) == {"lost": ("failed", "process-gone"), "kept": ("processing", None)}

        await until(is_told)
        upstream.gate.set()
        assert (await asked[1]).status == 200
        await until_written(other)
        assert await listed(url) == {"lost": ("failed", "process-gone"), "kept": ("completed", None)}
        assert isinstance((await asyncio.gather(asked[0], return_exceptions=True))[0], Exception)
    assert await query(url, "SELECT id FROM carpool_in_flight") == []


async def test_over_redis_a_task_is_seen_and_survives_the_gateway_that_took_it(
    url: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    """The row of a synchronous request says `queued` until its outcome: its gateway is not told when it is sent."""
    await init(url)
    given = settings(url) | HELD | {"broker.namespace": tmp_path.name}
    async with scripted_upstream() as upstream, fleet_over(tmp_path, redis_server.url, given) as fleet:
        await fleet.add("gateway")
        await fleet.add("gateway")
        await fleet.add("batcher", "--upstream", upstream.url)
        await fleet.wait_until_ready()
        one, other = (place.process for place in fleet.gateways)
        upstream.gate.clear()
        task_id = await one.submit("a")
        asked = asyncio.ensure_future(other.ask("b", "X-Request-Id: sync\r\n"))

        async def are_seen() -> bool:
            return await listed(url) == {task_id: ("processing", None), "sync": ("queued", None)}

        await until(are_seen)
        one.kill()
        upstream.gate.set()
        assert (await asked).status == 200
        assert (await other.result(task_id))["status"] == "SUCCESS"

        async def have_ended() -> bool:
            return await listed(url) == dict.fromkeys((task_id, "sync"), ("completed", None))

        await until(have_ended)


async def test_every_record_is_there_under_load_with_rows_in_flight(url: str, tmp_path: Path) -> None:
    await init(url)
    given = settings(url) | HELD
    async with running_gateway(tmp_path, "sim:?latency_ms=300&slots=4", settings=given) as gateway:
        load = Load(gateway.port)
        await load.more(500)
        await load.stop()
        gateway.terminate()
        assert await gateway.exit_code() == 0
        assert Counter(gateway.log_messages("error")) == Counter()
    assert await rows_by_outcome(url) == Counter(ok=load.answered)
    assert await query(url, "SELECT id FROM carpool_in_flight UNION ALL SELECT id FROM carpool_writers") == []


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
            tmp_path / "gateway", SIM, settings=settings(server.url) | {BUFFER_MAX: 1000}
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


async def bench(port: int, report: Path, seconds: float) -> dict[str, Any]:
    """RATE requests a second for so long; each must get its own output."""
    url, rate = f"http://127.0.0.1:{port}", f"{RATE:g}"
    flags = ["--rate", rate, "--duration", f"{seconds:g}s", "--payload-bytes", "200", "--timeout", "60s"]
    flags += ["--json", str(report), "--quiet"]
    done = await asyncio.to_thread(carpool_for, seconds + PATIENCE_S, ["bench", url, *flags])
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(await asyncio.to_thread(report.read_text))
    assert (told["errors"], told["wrong"], told["unanswered"]) == (0, 0, 0)
    return told


PATIENT = {"broker.queue_timeout_s": 60, "broker.total_timeout_s": 60, "shedding.mode": "off"}


@pytest.mark.timeout(600)
async def test_a_steady_load_is_there_whole(url: str, tmp_path: Path) -> None:
    """`EYES_RATE=10000 EYES_SECONDS=60` is what it is built for; by default less, for small machines."""
    await init(url)
    async with running_gateway(tmp_path, "sim:?latency_ms=50&slots=64", settings=settings(url) | PATIENT) as gateway:
        told = await bench(gateway.port, tmp_path / "report.json", SECONDS)
        await until_written(gateway)
        assert await outcomes(gateway) == Counter(ok=told["ok"])
        assert await tracked("dropped", "request", gateway) == 0
        sent = await batches(gateway)
    [row] = await query(
        url,
        "SELECT count(*), count(DISTINCT id), count(error), sum(gpu_seconds), "
        "min(latency_ms - queue_ms - upstream_ms), count(batch_id), min(upstream_ms) FROM carpool_requests",
    )
    total, ids, failed, gpu_s, rest_ms, batched, upstream_ms = row
    assert (total, ids, failed, batched) == (told["ok"], told["ok"], 0, told["ok"])
    assert rest_ms > -0.01 and upstream_ms >= 49
    [[count, seats, seconds]] = await query(
        url,
        "SELECT count(*), sum(request_count), sum(call.ms) / 1000 FROM carpool_batches b JOIN "
        "(SELECT batch_id, max(upstream_ms) AS ms FROM carpool_requests GROUP BY 1) call ON call.batch_id = b.id",
    )
    assert (count, seats) == (sent, told["ok"])
    assert gpu_s == pytest.approx(seconds)
    print(f"\nPostgreSQL: {told['ok']} at {told['rate']:.0f}/s, all there; p99 {told['latency_ms']['p99']:.0f} ms")  # noqa: T201


@pytest.mark.timeout(600)
async def test_a_database_that_is_gone_for_a_while_costs_rows_and_no_request(tmp_path: Path) -> None:
    with running_postgres() as server:
        await init(server.url)
        given = settings(server.url) | PATIENT | {BUFFER_MAX: max(1000, round(RATE))}
        async with running_gateway(tmp_path / "gateway", "sim:?latency_ms=50&slots=64", settings=given) as gateway:
            load = asyncio.ensure_future(bench(gateway.port, tmp_path / "report.json", 2 * SECONDS + GONE_S))
            await asyncio.sleep(SECONDS)
            await asyncio.to_thread(server.stop)
            await asyncio.sleep(GONE_S)
            await asyncio.to_thread(server.start)
            told = await load
            await until_written(gateway)
            dropped = await tracked("dropped", "request", gateway)
            assert await outcomes(gateway) == Counter(ok=told["ok"])
            assert await rows_by_outcome(server.url) == Counter(ok=told["ok"] - dropped)
            # It goes on: what came last is there.
            span = "extract(epoch FROM max(completed_at) - min(completed_at))::float"
            [[seconds]] = await query(server.url, f"SELECT {span} FROM carpool_requests")
        assert dropped > 0 and seconds > SECONDS + GONE_S
        print(f"\nPostgreSQL gone for {GONE_S:g} s: {told['ok']} answered, {dropped} records dropped")  # noqa: T201
