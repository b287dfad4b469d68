"""A waiting task's poll tells its place, and how long it will wait."""

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.broker.task_places import TaskPlaces
from carpool.core.errors import InputRefused
from carpool.core.request import Request
from carpool.core.task import QueuePlace, StoredTask, place_behind
from carpool.face.http.gateway import task_json
from carpool.testing import Witness, make_request
from support.tasks import Office, open_office

ROUND = st.tuples(st.sampled_from(["add", "remove", "look"]), st.integers(0, 12), st.integers(0, 2))


def task(name: str, place: float = 0.0, tier: int = 0, model: str = "m") -> Request:
    return make_request(name, Witness(), now=0.0, target_s=place, tier=tier, model=model, is_task=True)


@given(st.lists(ROUND), st.booleans())
def test_it_is_the_number_of_those_before(rounds: list[tuple[str, int, int]], strict: bool) -> None:
    places = TaskPlaces(strict_order=strict)
    waiting: dict[str, tuple[int, int]] = {}
    now = 0.0
    for act, number, tier in rounds:
        now += 1.0  # a moment: all is put in order again
        name = f"{number}.{tier}"
        each = task(name, number, tier)
        if act == "add":
            places.add(each)
            waiting[name] = (tier if strict else 0, number)
        elif act == "remove":
            places.remove(each)
            waiting.pop(name, None)
        key = waiting.get(name)
        before = None if key is None else sum(other < key for other in waiting.values())
        assert places.before(each, now) == before
        assert places.waiting == places.waiting_of("m") == len(waiting)


@pytest.mark.parametrize(
    ("ahead", "capacity", "place"),
    [(0, 100.0, QueuePlace(1, 10)), (99, 100.0, QueuePlace(100, 1000)), (3, 0.0, QueuePlace(4, None))],
)
def test_the_wait_is_the_work_by_the_capacity(ahead: int, capacity: float, place: QueuePlace) -> None:
    assert place_behind(ahead, capacity) == place


def test_what_a_poll_is_told() -> None:
    def told(queue: QueuePlace | None) -> bytes:
        return task_json(StoredTask("t", "", "PENDING", None, None, 0.0, queue=queue))

    assert b'"status":"PENDING","queue":{"place":3,"estimated_wait_ms":null},"timestamp"' in told(QueuePlace(3, None))
    assert b'"queue":{"place":1,"estimated_wait_ms":20}' in told(QueuePlace(1, 20))
    assert b"queue" not in told(None)


@pytest.fixture
async def office() -> AsyncIterator[Office]:
    async with open_office() as office:
        yield office


async def test_from_the_end_of_the_line_to_the_outcome(office: Office) -> None:
    async def places(*names: str) -> list[int | None]:
        office.clock.advance(0.01)
        found = [(await office.look(name)).queue for name in names]
        return [None if queue is None else queue.place for queue in found]

    for number in range(4):
        await office.submit(f"t{number}")
        office.clock.advance(0.01)
    assert await places("t0", "t1", "t2", "t3") == [1, 2, 3, 4]
    sync = make_request("sync", Witness(), now=office.clock(), tier=2)
    assert office.broker.submit(sync) is None
    assert await places("t0", "t3") == [2, 5]  # somebody waits for that one
    await office.delete("t1")
    assert await places("t0", "t2", "t3") == [2, 3, 4]
    office.broker.cancel(sync)
    (first,) = office.take(1)
    assert first.id == "t0"
    assert await places("t0", "t2", "t3") == [0, 1, 2]
    office.broker.put_back([first])
    assert await places("t0", "t2", "t3") == [1, 2, 3]
    office.capacity_rps = 10.0
    assert (await office.look("t3")).queue == QueuePlace(3, 300)
    assert len(office.take()) == 3
    office.broker.settle(first, InputRefused("no"))
    assert await places("t2", "t3") == [0, 0]


async def test_a_process_that_leaves_says_nothing_of_it(office: Office) -> None:
    await office.submit()
    office.tasks.drain()
    assert (await office.look()).queue is None
