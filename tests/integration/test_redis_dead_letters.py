"""Dead letters on a real Redis: what becomes one, and that a replay neither loses nor repeats anything."""

import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from carpool.broker.redis.dead_letters import box as box_module
from carpool.broker.redis.dead_letters.bounds import LetterBounds
from carpool.broker.redis.dead_letters.box import RedisDeadLetterBox
from carpool.broker.redis.dead_letters.letters import IDS_A_MS
from carpool.broker.redis.gateway.dead_letters import RedisDeadLetterDesk
from carpool.broker.redis.gateway.tasks import RedisTasks
from carpool.broker.redis.scripts import BURY
from carpool.core.dead_letter import DeadLetterSummary
from carpool.core.errors import (
    BrokerDown,
    CarpoolError,
    InputRefused,
    Malformed,
)
from carpool.core.request import Request
from carpool.testing import Witness, make_request
from support.processes import until
from support.redis_servers import RedisServer, running_redis
from support.redis_tasks import Office, letter_bounds, open_office
from support.tasks import told

REFUSED = InputRefused("the model refused this input: too long")
TARGETS_S = (0.05, 0.5)


class LetterOffice:
    """Both sides of the dead letters."""

    def __init__(self, office: Office, *, bounds: LetterBounds | None = None, **gateway: Any) -> None:
        self.office = office
        self.bounds = bounds or letter_bounds()
        self.box = RedisDeadLetterBox(office.steps, bounds=self.bounds, kept="all")
        self.tasks: RedisTasks = office.gateway(**gateway)
        self.desk = RedisDeadLetterDesk(
            office.steps,
            self.tasks,
            {"m"},
            tier_target_s=TARGETS_S,
            task_timeout_s=600.0,
            prepare=self.prepare,
        )
        self.unacceptable = b""

    def prepare(self, request: Request) -> None:
        request.lane = b"prepared"
        if self.unacceptable and self.unacceptable in request.input:
            raise Malformed("not with this protocol")

    def request(self, name: str, value: bytes = b'"x"', **options: Any) -> Request:
        request = make_request(name, Witness(), now=time.perf_counter(), value=value, **options)
        request.size += len(request.parameters)
        return request

    async def bury(self, *names: str, error: CarpoolError = REFUSED, **options: Any) -> None:
        for name in names:
            self.box.bury(self.request(name, b'"%b"' % name.encode(), **options), error, 2)
        await until(lambda: self.box.burying == 0)
        assert self.box.failures == 0

    async def names(self, after: int = 0, limit: int = 1000) -> list[str]:
        return [letter.request_id for letter in await self.desk.page(after, limit)]

    async def only(self) -> DeadLetterSummary:
        (summary,) = await self.desk.page(0, 10)
        return summary


@pytest.fixture
async def letters(redis_server: RedisServer) -> AsyncIterator[LetterOffice]:
    async with open_office(redis_server.url) as office:
        yield LetterOffice(office)


# What becomes one.


async def test_ids_rise_and_the_oldest_make_room(redis_server: RedisServer) -> None:
    async with open_office(redis_server.url, shards=1) as office:
        letters = LetterOffice(office, bounds=letter_bounds(5))
        await letters.bury(*(f"r{number}" for number in range(20)))  # many in one ms
        page = await letters.desk.page(0, 100)
        assert [letter.request_id for letter in page] == ["r15", "r16", "r17", "r18", "r19"]
        assert all(later.id - earlier.id >= IDS_A_MS for earlier, later in pairwise(page))
        shard = office.keys.shards[0]
        assert await office.nodes.ask(shard.slot, b"HLEN", shard.letter_bodies) == 5
        await letters.desk.drop_all()
        await letters.bury("new")  # above all that were: who reads on after the last one sees it
        assert await letters.names(after=page[-1].id) == ["new"]


async def test_letters_are_bounded_in_bytes(redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async with open_office(redis_server.url, shards=2) as office:
        letters = LetterOffice(office, bounds=letter_bounds(bytes_max=5000))
        for number in range(40):
            letters.box.bury(letters.request(f"r{number}", b'"%b"' % (b"x" * 800)), REFUSED, 1)
        await until(lambda: letters.box.burying == 0)
        names = await letters.names()
        assert 8 <= len(names) <= 12
        assert set(names) == {f"r{number}" for number in range(40 - len(names), 40)}
        assert letters.bounds.dropped == 40 - len(names)
        letters.box.bury(letters.request("large", b'"%b"' % (b"x" * 5000)), REFUSED, 1)
        await until(lambda: letters.box.burying == 0)
        assert await letters.names() == names
        assert letters.bounds.dropped == 41 - len(names)
    assert [record.message for record in caplog.records] == ["1 dead letters were dropped to make room"]


async def test_without_memory_nothing_is_half_buried(tmp_path: Path) -> None:
    async with running_redis(tmp_path) as server, open_office(server.url) as office:
        letters = LetterOffice(office)
        await office.nodes.ask(0, b"CONFIG", b"SET", b"maxmemory", b"1")
        letters.box.bury(letters.request("r"), REFUSED, 1)
        await until(lambda: letters.box.failures == 1)
        assert await office.nodes.ask(0, b"DBSIZE") == 0
        assert letters.box.buried["input-refused"] == 1
        await office.nodes.ask(0, b"CONFIG", b"SET", b"maxmemory", b"0")
        server.kill()
        await until(lambda: not office.nodes.is_up(0))
        letters.box.bury(letters.request("r"), REFUSED, 1)
        assert letters.box.failures == 2


async def test_letters_on_their_way_are_bounded(letters: LetterOffice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_module, "BURYING_MAX", 3)
    for number in range(5):
        letters.box.bury(letters.request(str(number)), REFUSED, 1)
    assert letters.box.failures == 2
    await until(lambda: letters.box.burying == 0)
    assert len(await letters.names()) == 3
    monkeypatch.setattr(box_module, "BURYING_BYTES_MAX", 5)
    letters.box.bury(letters.request("fits"), REFUSED, 1)
    letters.box.bury(letters.request("does not"), REFUSED, 1)
    assert letters.box.failures == 3


# Pages.


async def test_a_letter_of_another_version_can_be_seen_and_dropped(letters: LetterOffice) -> None:
    shard = letters.office.keys.shards[3]
    head = msgspec.msgpack.encode([99, "r", "m", 0, "new-cause", "new", 1])
    letter = len(head).to_bytes(4, "big") + bytes(4) + head
    arguments = (b"", 3, 10, 10**6, 0, b"\0\5owner" + letter, b'"x"')
    await letters.office.nodes.ask_script(BURY, shard.slot, (shard.counts,), arguments)
    summary = await letters.only()
    assert (summary.cause, summary.size) == ("unknown", 3)
    with pytest.raises(Malformed):
        await letters.desk.show(summary.id)
    with pytest.raises(Malformed):
        await letters.desk.replay_all(None)
    await letters.desk.drop(summary.id)
    assert await letters.names() == []


# When Redis is gone.


async def test_without_redis_the_desk_says_so(tmp_path: Path) -> None:
    async with running_redis(tmp_path) as server, open_office(server.url) as office:
        letters = LetterOffice(office)
        await letters.bury("r1")
        letter_id = (await letters.only()).id
        server.kill()
        await until(lambda: not office.nodes.is_up(0))
        for asked in (
            letters.desk.page(0, 10),
            letters.desk.show(letter_id),
            letters.desk.replay(letter_id),
            letters.desk.replay_all(None),
            letters.desk.drop(letter_id),
            letters.desk.drop_all(),
            letters.desk.refresh(),
        ):
            with pytest.raises(BrokerDown):
                await asked
        assert letters.desk.total() == 1


async def test_a_replay_whose_answer_was_lost_loses_no_letter(tmp_path: Path) -> None:
    """The task of a letter is never removed: the letter went with it."""
    async with running_redis(tmp_path) as server, open_office(server.url, timeout_s=1.0) as office:
        letters = LetterOffice(office)
        await letters.bury("r1")
        letter_id = (await letters.only()).id
        await office.submit(letters.tasks)  # now Redis knows the script
        await office.take()
        request = office.request(b'"r1"')
        request.id = f"{request.id[:-1]}{letter_id % IDS_A_MS:x}"
        server.stop()
        error = await told(lambda done: letters.tasks.submit(request, done, letter_id))
        assert isinstance(error, BrokerDown)
        server.go_on()
        await until(lambda: office.nodes.is_up(0))
        assert letters.tasks.doubtful == 0
        assert [entry.input for entry in await office.take()] == [b'"r1"']
        assert await letters.names() == []
