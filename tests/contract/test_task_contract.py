"""Tasks, wherever they are kept: in a journal, or in Redis, where one gateway takes a task and another tells of it."""

import asyncio
from typing import Any

import pytest
from sites import ASYNC, LANES_MAX, LONG_MS, ONE_SHARD, TASKS_SHARE, Asking, Embedded, Open, Site, credential

from support.client import Connection
from support.processes import until

pytest_plugins = ("site_fixtures",)
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def occupy(site: Site) -> list[str]:
    """Have every slot of the GPU busy; the tasks that do that."""
    site.gpu.hold()
    tasks = []
    for number in range(site.gpu.slots):
        tasks.append(await site.here.submit(f"busy {number}"))
        await site.gpu.until_called(number + 1)
    return tasks


async def until_status(site: Site, task_id: str, status: Any) -> None:
    """Wait until whoever asks is told so, at either door."""

    async def is_so() -> bool:
        return [await door.status(task_id) for door in (site.here, site.there)] == [status, status]

    await until(is_so)


async def finish_unread(site: Site, value: str) -> str:
    """A task with its result, which nobody has read."""
    task_id = await until_taken(site, value)

    async def is_done() -> bool:
        state: str = (await site.there.admin("GET", f"requests/{task_id}")).json["status"]
        return state == "completed"

    await until(is_done)
    return task_id


async def until_taken(site: Site, value: str) -> str:
    """Submit a task, again and again while there is no room; its id."""
    ids: list[str] = []

    async def is_taken() -> bool:
        offered = await site.here.offer(value)
        ids.append(offered.json.get("task_id", ""))
        return offered.status == 202

    await until(is_taken)
    return ids[-1]


# A task and its outcome.


async def test_a_task_comes_to_its_outcome_and_who_waits_is_told(site: Site) -> None:
    site.gpu.hold()
    task_id = await site.here.submit({"text": "ä"}, parameters={"k": 1})
    polls = [await door.poll(task_id) for door in (site.there, site.here, site.there)]
    await site.gpu.until_called()
    assert (await site.there.look(task_id))["queue"] == {"place": 0, "estimated_wait_ms": 0}
    site.gpu.release()
    told = [await poll.answer() for poll in polls]
    assert [(task["task_id"], task["status"], task["output"]) for task in told] == [
        (task_id, "SUCCESS", {"text": "ä"})
    ] * 3
    assert await site.here.look(task_id) == await site.there.look(task_id) == told[0]
    assert b'"parameters":{"k":1}' in site.gpu.calls[0].call.body


async def test_each_has_its_own_outcome(site: Site) -> None:
    """Whatever comes together: owners, parameters, doors; and the same input twice is two tasks."""
    kinds = [(f"input {number % 30}", ("alice", "bob")[number % 2], number % 3) for number in range(60)]
    doors = [(site.here, site.there)[number % 2] for number in range(60)]
    ids = await asyncio.gather(
        *(
            door.submit(text, owner, **({"parameters": {"p": lane}} if lane else {}))
            for door, (text, owner, lane) in zip(doors, kinds, strict=True)
        )
    )
    outputs = await asyncio.gather(
        *(door.output(task_id, kind[1]) for door, task_id, kind in zip(reversed(doors), ids, kinds, strict=True))
    )
    assert outputs == [text for text, _, _ in kinds]
    assert len(set(ids)) == len(site.gpu.seen()) == 60
    for received in site.gpu.calls:  # and no two lanes ride together
        numbers = [int(value.split()[1].strip(b'"')) for value in received.inputs]
        assert len({number % 3 for number in numbers}) == 1


async def test_a_failure_is_told_and_kept(site: Site) -> None:
    assert await site.here.output(await site.here.submit("good")) == "good"  # the API works
    refused = await site.here.submit("bad")
    task = await site.there.look(refused, LONG_MS)
    error = task["error"]
    assert (task["status"], "output" in task) == ("FAILED", False)
    assert (error["status"], error["type"], error["request_id"]) == (422, "urn:carpool:error:input-refused", refused)
    assert await site.here.look(refused) == task


async def test_a_poll_ends_with_what_there_is(site: Site) -> None:
    site.gpu.hold()
    task_id = await site.here.submit()
    for wait_ms in (0, 1, 30):
        task = await site.there.look(task_id, wait_ms)
        assert (task["status"], "output" in task, "error" in task) == ("PENDING", False, False)


async def test_who_waits_in_the_queue_is_told_its_place(open_site: Open) -> None:
    site = await open_site(**ONE_SHARD, batching__max_batch=1)
    await occupy(site)
    ids = [await site.here.submit(f"waits {number}") for number in range(3)]
    # What the batcher took before has gone; the last ones are still in line.
    places = [(await site.there.look(task_id))["queue"]["place"] for task_id in ids]
    assert places == [1, 2, 3]
    assert await site.here.delete(ids[0]) == 204
    assert [(await site.there.look(task_id))["queue"]["place"] for task_id in ids[1:]] == [1, 2]
    site.gpu.release()
    for number in (1, 2):
        assert await site.there.output(ids[number]) == f"waits {number}"


async def test_operators_see_how_far_it_is(site: Site) -> None:
    site.gpu.hold()
    task_id = await site.here.submit(client_id="nightly")
    await site.gpu.until_called()

    async def state() -> dict[str, Any]:
        found: dict[str, Any] = (await site.there.admin("GET", f"requests/{task_id}")).json
        return found

    assert (await state())["status"] in ("queued", "processing")
    site.gpu.release()
    await site.here.output(task_id)
    told = await state()
    assert (told["status"], told["client_id"], told["error"]) == ("completed", "nightly", None)
    assert told["latency_ms"] >= 0
    assert (await site.there.admin("GET", "requests/" + "0" * 32)).status == 404


async def test_it_outlives_a_client_that_leaves_at_once(site: Site) -> None:
    site.gpu.hold()
    asking = Asking(await Connection.open(site.here.process.port))
    asking.send("POST", "/v1/inference", b'{"input":"left"}', ASYNC + credential("alice"))
    await asking.leave()  # before it is told the task's id
    await site.gpu.until_called()
    assert site.gpu.seen() == ["left"]


# Who reads it.


async def test_somebody_elses_task_is_not_there(site: Site) -> None:
    site.gpu.hold()
    task_id = await site.here.submit()
    for is_done in (False, True):
        if is_done:
            site.gpu.release()
            assert await site.there.output(task_id) == "x"
        for door in (site.here, site.there):
            assert await door.status(task_id, 0, "bob") == 404
            assert await door.status(task_id, LONG_MS, "bob") == 404  # at once
            assert await door.delete(task_id, "bob") == 404
            assert await door.status(task_id, 0, "") == 401
    assert await site.here.output(task_id) == "x"
    assert await site.there.delete(task_id) == 204


async def test_unknown_tasks_are_all_told_the_same(site: Site) -> None:
    task_id = await site.here.submit()
    assert await site.there.output(task_id) == "x"
    assert await site.there.delete(task_id) == 204
    told = [
        await door.look(each, wait_ms)
        for door in (site.here, site.there)
        for each in (task_id, "0" * 32, "what", "-")
        for wait_ms in (0, LONG_MS)
    ]
    assert {(each["status"], each["detail"]) for each in told} == {(404, told[0]["detail"])}
    assert await site.here.delete(task_id) == await site.here.delete("what") == 404


async def test_forgotten_after_the_first_read(open_site: Open) -> None:
    site = await open_site(tasks__forget_after_read=True)
    site.gpu.hold()
    task_id, left = await site.here.submit("read"), await site.here.submit("left")
    assert await site.there.status(task_id) == "PENDING"  # it has no result: it stays
    polls = [await door.poll(task_id) for door in (site.here, site.there)]
    gone = await site.there.poll(left)
    await gone.leave()
    site.gpu.release()
    told = [await poll.answer() for poll in polls]
    assert "read" in [task.get("output") for task in told]  # at two doors, maybe of one alone
    await until_status(site, task_id, 404)
    # Nobody was there to read the other: it is still kept.
    assert await site.there.output(left) == "left"
    await until_status(site, left, 404)


async def test_results_are_kept_for_a_time(open_site: Open) -> None:
    site = await open_site(tasks__result_ttl_s=1.0)
    task_id = await site.here.submit()
    assert await site.there.output(task_id) == "x"
    await until_status(site, task_id, 404)


# Deleting, in each state.


async def test_deleting_one_that_waits(open_site: Open) -> None:
    site = await open_site(**ONE_SHARD, batching__max_batch=1)
    busy = await occupy(site)
    deleted, stays = await site.here.submit("deleted"), await site.here.submit("stays")
    polls = [await door.poll(deleted) for door in (site.here, site.there)]
    assert await site.there.delete(deleted) == 204
    assert [(await poll.answer())["status"] for poll in polls] == [404, 404]
    assert [await door.delete(deleted) for door in (site.here, site.there)] == [404, 404]
    site.gpu.release()
    for task_id in (*busy, stays):
        assert await site.here.status(task_id, LONG_MS) == "SUCCESS"
    assert "deleted" not in site.gpu.seen()
    left = [await door.metric("requests_total", 'outcome="client-left"') for door in (site.here, site.there)]
    assert left[1] == 1.0 and sum(left) == (2.0 if site.here is site.there else 1.0)


async def test_deleting_one_that_runs(site: Site) -> None:
    site.gpu.hold()
    task_id = await site.here.submit()
    await site.gpu.until_called()
    poll = await site.here.poll(task_id)
    assert await site.there.delete(task_id) == 204
    assert (await poll.answer())["status"] == 404
    other = await site.here.submit("other")
    site.gpu.release()
    assert await site.there.output(other) == "other"
    assert await site.here.status(task_id) == await site.there.status(task_id) == 404


async def test_a_result_that_comes_while_its_task_is_deleted(site: Site) -> None:
    """Whichever is first: it is gone in the end."""
    for _ in range(5):
        site.gpu.hold()
        task_id = await site.here.submit()
        deleting = asyncio.ensure_future(site.there.delete(task_id))
        site.gpu.release()
        assert await deleting == 204
        assert await site.here.status(task_id) == 404


# Deadlines.


async def test_one_that_is_late_fails_and_is_not_sent(open_site: Open) -> None:
    site = await open_site(**ONE_SHARD, batching__max_batch=1)
    busy = await occupy(site)
    late = (await site.here.offer("late", headers="X-Request-Timeout-Ms: 300\r\n")).json["task_id"]
    await until_status(site, late, "FAILED")
    error = (await site.there.look(late))["error"]
    assert (error["status"], error["type"]) == (504, "urn:carpool:error:deadline-exceeded")
    stays = await site.here.submit("stays")
    site.gpu.release()
    for task_id in (*busy, stays):
        assert await site.here.status(task_id, LONG_MS) == "SUCCESS"
    assert "late" not in site.gpu.seen()
    assert await site.there.status(late) == "FAILED"


async def test_a_result_that_comes_too_late_changes_nothing(open_site: Open) -> None:
    site = await open_site(tasks__timeout_s=0.5)
    site.gpu.hold()
    task_id = await site.here.submit()
    await until_status(site, task_id, "FAILED")
    site.gpu.release()
    other = await site.here.submit("other")
    assert await site.there.status(other, LONG_MS) in ("SUCCESS", "FAILED")
    assert await site.there.status(task_id) == "FAILED"


# Bounds.


async def test_no_more_tasks_than_there_is_room_for(open_site: Open) -> None:
    """In one process they leave room for those who wait on the line."""
    site = await open_site(**ONE_SHARD, broker__waiting_max=4, **{TASKS_SHARE: 0.75})
    site.gpu.hold()
    ids = [await site.here.submit() for _ in range(3 if isinstance(site, Embedded) else 4)]
    refused = await site.there.offer()
    assert (refused.status, refused.json["type"]) == (503, "urn:carpool:error:queue-full")
    assert int(refused.headers["retry-after"]) >= 1
    assert await site.there.delete(ids[0]) == 204
    await site.there.submit()


async def test_bytes_of_inputs_are_bounded(open_site: Open) -> None:
    site = await open_site(**ONE_SHARD, broker__bytes_max=10_000)
    site.gpu.hold()
    ids = [await site.here.submit("x" * 4000) for _ in range(2)]
    assert (await site.there.offer("x" * 4000)).status == 503
    site.gpu.release()
    for task_id in ids:
        await site.there.output(task_id)
    await site.there.submit("x" * 4000)  # a task with its result makes room


async def test_results_are_bounded_and_those_that_were_read_make_room(open_site: Open) -> None:
    site = await open_site(**ONE_SHARD, tasks__stored_bytes_max=40_000)
    read, unread = await finish_unread(site, "r" * 18_000), await finish_unread(site, "u" * 18_000)
    refused = await site.there.offer("x" * 10_000)
    assert (refused.status, refused.json["type"]) == (503, "urn:carpool:error:queue-full")
    assert "delete results you have read" in refused.json["detail"]
    assert await site.there.status(read) == "SUCCESS"
    await until_taken(site, "x" * 10_000)
    assert await site.here.status(read) == 404
    assert await site.here.status(unread) == "SUCCESS"


async def test_what_was_read_while_there_was_room_makes_room_later(open_site: Open) -> None:
    site = await open_site(**ONE_SHARD, tasks__stored_bytes_max=40_000)
    read = await site.here.submit("r" * 14_000)
    assert await site.there.status(read, LONG_MS) == "SUCCESS"
    unread = await finish_unread(site, "u" * 21_000)
    await until_taken(site, "x" * 10_000)
    assert await site.here.status(read) == 404
    assert await site.here.status(unread) == "SUCCESS"


async def test_parameters_of_one_owner_are_bounded_and_not_anothers(open_site: Open) -> None:
    site = await open_site(**ONE_SHARD, **{LANES_MAX: 2}, batching__max_batch=1)
    await occupy(site)
    for number in range(2):
        await site.here.submit(parameters={"p": number})
    refused = await site.there.offer(parameters={"p": 2})
    assert (refused.status, "different `parameters`" in refused.json["detail"]) == (503, True)
    await site.there.submit(parameters={"p": 1})  # a lane that is there
    await site.there.submit()
    await site.there.submit(owner="bob", parameters={"p": 2})


# The end of a process, and the next one.


async def test_what_waits_is_left_to_the_next_process(open_site: Open) -> None:
    site = await open_site(**ONE_SHARD, batching__max_batch=1)
    done = await site.here.submit("done", client_id="me")
    await site.here.output(done)
    site.gpu.begin_anew()
    busy = await occupy(site)
    waiting = [await site.here.submit(f"waits {number}", client_id="me") for number in range(5)]
    poll = await site.there.poll(waiting[0])
    leaving = asyncio.ensure_future(site.stop())
    assert (await poll.answer())["status"] == "PENDING"  # nobody is kept waiting any more
    site.gpu.release()
    await leaving
    assert site.gpu.seen() == [f"busy {number}" for number in range(4)]  # what ran has come to its end
    site.gpu.hold()
    await site.start()
    for task_id in (done, waiting[-1]):
        assert (await site.there.admin("GET", f"requests/{task_id}")).json["client_id"] == "me"
    assert await site.there.status(waiting[0], 0, "bob") == 404  # and they are their owner's still
    site.gpu.release()
    for task_id in (done, *busy, *waiting):
        assert await site.there.status(task_id, LONG_MS) == "SUCCESS"
    for number, task_id in enumerate(waiting):
        assert await site.here.output(task_id) == f"waits {number}"
    assert len(site.gpu.seen()) == len(set(site.gpu.seen())) == len(busy) + len(waiting)  # each was sent once
    assert (await site.there.admin("GET", f"requests/{waiting[0]}")).json["client_id"] == "me"


async def test_what_was_accepted_is_kept_though_there_is_less_room(open_site: Open) -> None:
    site = await open_site(**ONE_SHARD, batching__max_batch=1)
    await occupy(site)
    ids = [await site.here.submit(f"waits {number}") for number in range(6)]
    poll = await site.there.poll(ids[0])
    leaving = asyncio.ensure_future(site.stop())
    await poll.answer()
    site.gpu.release()
    await leaving
    site.gpu.hold()
    await site.restart(broker__waiting_max=3)
    assert (await site.there.offer()).status == 503  # they count
    site.gpu.release()
    for number, task_id in enumerate(ids):
        assert await site.there.output(task_id) == f"waits {number}"
    await site.there.submit()
