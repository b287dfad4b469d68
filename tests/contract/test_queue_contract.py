"""The queue between those who ask and the GPU, wherever it is: who comes in, who goes first, who is told what."""

import asyncio
import random
from typing import Any

import pytest
from sites import LANES_MAX, ONE_SHARD, SHARDS_MAX, Asking, Door, Embedded, Open, Site

from carpool.testing import UpstreamResponse, echo
from support.client import Response
from support.processes import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
pytest_plugins = ("site_fixtures",)

# Bounds and orders are exact inside one shard, and to be seen where one call is made after the other.
ONE_BY_ONE = ONE_SHARD | {"gpu_slots": 1}


async def occupy(site: Site) -> Asking:
    """The only slot is busy with this one."""
    site.gpu.hold()
    asking = await site.here.begin_to_ask("busy")
    await site.gpu.until_called()
    return asking


def code(response: Response) -> str:
    """Of the error that a client was told."""
    found: str = response.json["type"].rpartition(":")[2]
    return found


async def until_empty(site: Site) -> None:
    """Wait until nobody waits for anything, and nothing is in the queue."""

    async def is_empty() -> bool:
        depth = [(await door.admin("GET", "health")).json["queue_depth"] for door in (site.here, site.there)]
        return await site.here.held() == await site.there.held() == 0 and depth == [0, 0]

    await until(is_empty)


# Batches.


async def test_each_has_its_own_answer_in_batches_of_one_lane(open_site: Open) -> None:
    site = await open_site(batching__max_batch=8)
    texts = [f"{number % 3} {number}" for number in range(120)]
    lanes: list[dict[str, Any]] = [{"parameters": {"p": int(text[0])}} if text[0] != "0" else {} for text in texts]
    doors = [(site.here, site.there)[number % 2] for number in range(120)]
    asked = (door.ask(text, **lane) for door, text, lane in zip(doors, texts, lanes, strict=True))
    answers = await asyncio.gather(*asked)
    assert [answer.json["output"] for answer in answers] == texts
    assert sorted(site.gpu.seen()) == sorted(texts)
    for received in site.gpu.calls:
        assert len(received.inputs) <= 8
        assert len({value[1] for value in received.inputs}) == 1
    await until_empty(site)


async def test_batches_fill_while_slots_are_busy_and_no_more_is_taken_than_they_can_use(open_site: Open) -> None:
    site = await open_site(batching__max_batch=8, **ONE_BY_ONE)
    busy = await occupy(site)
    waiting = [await site.here.begin_to_ask(f"{number}") for number in range(20)]
    site.gpu.is_one_by_one = True
    for sent in (1, 9, 17, 21):
        await site.gpu.until_called(sent)
        if not isinstance(site, Embedded):
            assert await Door(site.processes[0]).metric("entries_taken_total") == sent
        site.gpu.release()
    assert (await busy.answer())["output"] == "busy"
    answers = [await asking.answer() for asking in waiting]
    assert [answer["output"] for answer in answers] == [f"{number}" for number in range(20)]
    assert [len(received.inputs) for received in site.gpu.calls] == [1, 8, 8, 4]


async def test_outputs_that_are_not_one_each_are_given_to_nobody(open_site: Open) -> None:
    site = await open_site(upstream__attempts=1, batching__max_batch=8, **ONE_BY_ONE)
    busy = await occupy(site)
    waiting = [await site.here.begin_to_ask(f"{number}") for number in range(3)]
    site.gpu.then(UpstreamResponse(200, b'{"outputs":["0","1"]}'), times=10)
    site.gpu.release()
    assert (await busy.answer())["output"] == "busy"
    answers = [await asking.response() for asking in waiting]
    assert {answer.status for answer in answers} <= {502, 503}
    await until_empty(site)


async def test_what_fails_is_sent_again(open_site: Open) -> None:
    site = await open_site()
    site.gpu.then(UpstreamResponse(503, b"{}"))
    answer = await site.here.ask("again")
    assert (answer.status, answer.json["output"]) == (200, "again")
    assert site.gpu.seen() == ["again", "again"]


# Order.


async def test_the_best_place_goes_first(open_site: Open) -> None:
    site = await open_site(batching__max_batch=1, **ONE_BY_ONE)
    busy = await occupy(site)
    order = ["free 1", "free 2", "rich 1", "free 3", "rich 2"]
    waiting = [await site.here.begin_to_ask(text, "rich" if "rich" in text else "alice") for text in order]
    site.gpu.release()
    for asking in (busy, *waiting):
        assert (await asking.response()).status == 200
    assert site.gpu.seen() == ["busy", "rich 1", "rich 2", "free 1", "free 2", "free 3"]


async def test_with_strict_order_the_lowest_tier_gets_its_trickle(open_site: Open) -> None:
    shares = {f"carpool.composition.{half}.LOWEST_TIER_SHARE": 0.25 for half in ("serving", "redis_serving")}
    strict = {"broker.order": "strict", **shares}
    site = await open_site(batching__max_batch=4, **strict, **ONE_BY_ONE)
    busy = await occupy(site)
    owners = ["alice", "rich"] * 30
    waiting = [await site.here.begin_to_ask(f"{owner} {n}", owner) for n, owner in enumerate(owners)]
    site.gpu.release()
    for asking in (busy, *waiting):
        assert (await asking.response()).status == 200
    first = site.gpu.seen()[1:25]
    assert 2 <= sum(text.startswith("alice") for text in first) <= 10
    served = [text for text in site.gpu.seen() if text.startswith("rich")]
    assert served == sorted(served, key=lambda text: int(text.split()[1]))  # and one's own order stays


# Bounds.


async def test_full_by_count_until_somebody_is_answered_or_leaves(open_site: Open) -> None:
    site = await open_site(broker__waiting_max=3, batching__max_batch=1, **ONE_BY_ONE)
    busy = await occupy(site)
    waiting = [await site.here.begin_to_ask(f"{number}") for number in range(2)]
    refused = await site.here.ask("refused")
    assert (refused.status, code(refused)) == (503, "queue-full")
    assert int(refused.headers["retry-after"]) >= 1
    await waiting[0].leave()

    async def has_room() -> bool:
        return await site.here.held() == 2

    await until(has_room)
    waiting[0] = await site.here.begin_to_ask("instead")
    assert (await site.here.ask("refused")).status == 503
    site.gpu.release()
    for asking in (busy, *waiting):
        assert (await asking.response()).status == 200
    assert (await site.here.ask("later")).status == 200
    assert "refused" not in site.gpu.seen()
    await until_empty(site)


async def test_full_by_bytes(open_site: Open) -> None:
    site = await open_site(broker__bytes_max=10_000, **ONE_BY_ONE)
    busy = await occupy(site)
    large = await site.here.begin_to_ask("x" * 6000)
    assert code(await site.here.ask("x" * 6000)) == "queue-full"
    small = await site.here.begin_to_ask("x" * 2000)
    site.gpu.release()
    for asking in (busy, large, small):
        assert (await asking.response()).status == 200
    assert (await site.here.ask("x" * 6000)).status == 200


async def test_full_by_lanes_but_the_lanes_that_are_there_go_on(open_site: Open) -> None:
    site = await open_site(**{LANES_MAX: 2}, **ONE_BY_ONE)
    busy = await occupy(site)
    waiting = [await site.here.begin_to_ask(parameters={"p": number}) for number in (1, 2)]
    refused = await site.here.ask(parameters={"p": 3})
    assert (refused.status, "parameters" in refused.json["detail"]) == (503, True)
    waiting += [await site.here.begin_to_ask(parameters={"p": 2}), await site.here.begin_to_ask()]
    waiting.append(await site.here.begin_to_ask(owner="bob", parameters={"p": 4}))  # one has some of its own
    site.gpu.release()
    for asking in (busy, *waiting):
        assert (await asking.response()).status == 200
    assert (await site.here.ask(parameters={"p": 3})).status == 200


# Who leaves.


async def test_a_client_that_left_is_not_sent(open_site: Open) -> None:
    site = await open_site(batching__max_batch=4, **ONE_BY_ONE)
    busy = await occupy(site)
    leaves, stays = await site.here.begin_to_ask("leaves"), await site.here.begin_to_ask("stays")
    before = await site.here.held()
    await leaves.leave()

    async def is_seen() -> bool:
        return await site.here.held() < before

    await until(is_seen)
    site.gpu.release()
    assert [(await asking.answer())["output"] for asking in (busy, stays)] == ["busy", "stays"]
    assert "leaves" not in site.gpu.seen()
    await until_empty(site)


async def test_a_client_that_leaves_while_it_runs_harms_nobody(open_site: Open) -> None:
    site = await open_site(batching__max_batch=4, **ONE_BY_ONE)
    busy = await occupy(site)
    batch = [await site.here.begin_to_ask(f"{number}") for number in range(3)]
    site.gpu.then(lambda call: UpstreamResponse(200, b'{"outputs":["a","b","c"]}'), delay_s=0.3)
    site.gpu.release()
    await busy.answer()
    await site.gpu.until_called(4)
    await batch[1].leave()
    assert [(await batch[number].answer())["output"] for number in (0, 2)] == ["a", "c"]
    await until_empty(site)


# Time.


async def test_a_time_in_the_queue_and_a_time_in_all(open_site: Open) -> None:
    site = await open_site(broker__queue_timeout_s=1.0, broker__total_timeout_s=2.0, **ONE_BY_ONE)
    runs = await occupy(site)
    task_id = await site.here.submit("task")
    waits = await (await site.here.begin_to_ask("waits")).response()
    assert (waits.status, code(waits)) == (504, "queue-timeout")
    assert "within 1 s (`broker.queue_timeout_s`)" in waits.json["detail"]
    late = await runs.response()
    assert (late.status, code(late)) == (504, "deadline-exceeded")
    assert late.json["detail"] == "no result within 2 s (`broker.total_timeout_s`)"
    site.gpu.release()
    assert await site.there.output(task_id) == "task"  # which has no time in the queue
    assert "waits" not in site.gpu.seen()
    await until_empty(site)


async def test_a_time_of_its_own_ends_a_request_whether_it_waits_or_runs(open_site: Open) -> None:
    site = await open_site(batching__max_batch=1, **ONE_BY_ONE)
    site.gpu.hold()
    runs = await site.here.begin_to_ask("runs", headers="X-Request-Timeout-Ms: 1500\r\n")
    await site.gpu.until_called()
    usual = await site.here.begin_to_ask("usual")
    for timeout_ms in (200, 100):  # in the order of their times, whatever the order in which they came
        waits = await site.here.ask("waits", headers=f"X-Request-Timeout-Ms: {timeout_ms}\r\n")
        assert (waits.status, code(waits)) == (504, "deadline-exceeded")
        assert f"within the {timeout_ms} ms that the request itself allowed" in waits.json["detail"]
    assert (await runs.response()).status == 504
    site.gpu.release()
    assert (await usual.answer())["output"] == "usual"
    assert "waits" not in site.gpu.seen()
    await until_empty(site)


# Any order of events.


@pytest.mark.parametrize("seed", range(3))
async def test_any_order_of_events(open_site: Open, seed: int) -> None:
    """Clients come, wait, leave and have little time, at both doors, and the GPU fails now and then."""
    site = await open_site(batching__max_batch=4, broker__waiting_max=60, **{SHARDS_MAX: 2})
    chance = random.Random(seed)
    for _ in range(12):
        site.gpu.then(UpstreamResponse(chance.choice((200, 503)), b"{}"), delay_s=chance.random() / 50)
        site.gpu.then(echo, delay_s=chance.random() / 50, times=3)
    told: dict[str, tuple[int, Any]] = {}

    async def client(number: int) -> None:
        door: Door = chance.choice((site.here, site.there))
        text, way = f"{number}", chance.choice(("ask", "ask", "leave", "hasty", "task", "deleted"))
        lane: dict[str, Any] = {"parameters": {"p": number % 3}} if number % 3 else {}
        await asyncio.sleep(chance.random() / 5)
        if way == "leave":
            asking = asyncio.ensure_future(door.ask(text, **lane))
            await asyncio.sleep(chance.random() / 20)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        elif way in ("task", "deleted"):
            offered = await door.offer(text, **lane)
            if offered.status == 202:
                task_id = offered.json["task_id"]
                other = chance.choice((site.here, site.there))
                if way == "deleted":
                    assert await other.delete(task_id) == 204
                    assert await door.status(task_id) == 404
                else:
                    task = await other.look(task_id, 30_000)
                    told[text] = (200 if task["status"] == "SUCCESS" else 502, task.get("output"))
        else:
            headers = "X-Request-Timeout-Ms: 20\r\n" if way == "hasty" else ""
            answer = await door.ask(text, headers=headers, **lane)
            told[text] = (answer.status, answer.json.get("output"))

    await asyncio.gather(*(client(number) for number in range(120)))
    assert {status for status, _ in told.values()} <= {200, 502, 503, 504}
    assert all(output == text for text, (status, output) in told.items() if status == 200)
    await until_empty(site)

    async def is_well() -> bool:
        return (await site.there.ask("last")).status == 200

    await until(is_well)  # a breaker that opened is tried again


# Load shedding.


async def test_the_load_shedder_sees_how_long_requests_waited(open_site: Open) -> None:
    """It compares that with what it had predicted; over Redis its gateway sees it with the outcomes."""
    site = await open_site(shedding__mode="predicted")

    async def has_seen() -> bool:
        assert (await site.here.ask("x")).status == 200
        return await site.here.metric("wait_error_seconds_count") > 0

    await until(has_seen)
