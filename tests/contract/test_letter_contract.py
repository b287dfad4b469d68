"""Dead letters, wherever they are kept: what becomes one, and what an operator may do with it at any gateway."""

import asyncio
import re
from typing import Any

import pytest
import pytest_asyncio
from sites import LONG_MS, ONE_SHARD, Door, Open, Site

from support.processes import until

pytest_plugins = ("site_fixtures",)
pytestmark = pytest.mark.asyncio(loop_scope="module")

# In place of letters that are there.
NO_LETTER = 2**53 - 1


@pytest.fixture(scope="module")
def site_settings() -> dict[str, object]:
    """An owner of bad inputs is to be like any other, and a batch has one of them."""
    return {"batching__max_batch": 1}


async def fail(site: Site, *texts: str, owner: str = "alice", **fields: Any) -> list[str]:
    """Tasks that the model refuses, one after the other; their ids."""
    ids = []
    for text in texts:
        ids.append(await site.here.submit(text, owner, **fields))
        assert await site.here.status(ids[-1], LONG_MS, owner) == "FAILED"
    return ids


async def listed(site: Site, query: str = "") -> list[dict[str, Any]]:
    """The letters, as the other gateway has them."""
    letters: list[dict[str, Any]] = (await site.there.admin("GET", f"dead-letters{query}")).json["dead_letters"]
    return letters


async def inputs(site: Site) -> list[Any]:
    """What is in them, the oldest first."""
    return [
        (await site.there.admin("GET", f"dead-letters/{letter['id']}")).json["input"] for letter in await listed(site)
    ]


async def replay(site: Site, letter_id: int) -> str:
    """Make one a task again; its id."""
    replayed = await site.there.admin("POST", f"dead-letters/{letter_id}/replay")
    assert (replayed.status, replayed.json["id"]) == (202, letter_id)
    task_id: str = replayed.json["task_id"]
    return task_id


async def work_once(site: Site) -> Site:
    """No input is blamed before the API has worked."""
    assert (await site.here.ask("works")).status == 200
    return site


@pytest_asyncio.fixture(loop_scope="module")
async def letters(site: Site) -> Site:
    await work_once(site)
    await site.there.admin("DELETE", "dead-letters?all=true")
    return site


# What becomes one.


async def test_a_task_that_was_refused_is_kept_as_it_was(letters: Site) -> None:
    (task_id,) = await fail(letters, "bad ä", parameters={"k": 1})
    (letter,) = await listed(letters)
    assert (letter["request_id"], letter["model"], letter["cause"], letter["sends"]) == (
        task_id,
        "m",
        "input-refused",
        1,
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", letter["buried_at"])
    assert letter["size"] == len('"bad \\u00e4"') + len('{"k":1}')
    assert "input" not in letter
    assert letter["detail"] == (await letters.here.look(task_id))["error"]["detail"]
    shown = (await letters.here.admin("GET", f"dead-letters/{letter['id']}")).json
    assert shown == letter | {"owner": "alice", "input": "bad ä", "parameters": {"k": 1}}
    assert (await letters.there.admin("GET", "dead-letters")).json["total"] == 1


@pytest.mark.parametrize(
    ("kept", "causes"),
    [("poison", ["input-refused"]), ("all", ["input-refused", "upstream-failed"]), ("none", [])],
)
async def test_which_synchronous_requests_are_kept(open_site: Open, kept: str, causes: list[str]) -> None:
    site = await work_once(await open_site(dead_letters__synchronous=kept))
    assert (await site.here.ask("bad", parameters={"k": 1})).status == 422
    late = await site.here.offer("late", headers="X-Request-Timeout-Ms: 1\r\n")
    assert await site.here.status(late.json["task_id"], LONG_MS) in ("FAILED", "SUCCESS")  # never a letter
    site.gpu.failing = 503
    assert (await site.here.ask("failed")).status == 502
    (task_id,) = await fail(site, "task")  # always is one

    async def are_kept() -> bool:
        return sorted(letter["cause"] for letter in await listed(site)) == sorted([*causes, "upstream-failed"])

    await until(are_kept)
    by_id = {letter["request_id"]: letter for letter in await listed(site)}
    assert by_id[task_id]["cause"] == "upstream-failed"
    refused = [letter for letter in by_id.values() if letter["cause"] == "input-refused"]
    for letter in refused:
        shown = (await site.there.admin("GET", f"dead-letters/{letter['id']}")).json
        assert (shown["input"], shown["parameters"], shown["owner"]) == ("bad", {"k": 1}, "alice")


async def test_a_task_that_is_late_or_deleted_is_none(letters: Site) -> None:
    letters.gpu.hold()
    late = (await letters.here.offer("late", headers="X-Request-Timeout-Ms: 1\r\n")).json["task_id"]
    deleted = await letters.here.submit("bad deleted")

    async def is_late() -> bool:
        return bool(await letters.here.status(late) == "FAILED")

    await until(is_late)
    assert await letters.here.delete(deleted) == 204
    letters.gpu.release()
    await fail(letters, "bad last")
    assert await inputs(letters) == ["bad last"]


# Pages and drops.


async def test_pages_are_in_order(letters: Site) -> None:
    texts = [f"bad {number}" for number in range(12)]
    await fail(letters, *texts)
    whole = await listed(letters)
    assert [letter["id"] for letter in whole] == sorted({letter["id"] for letter in whole})
    assert await inputs(letters) == texts
    for limit in (1, 5, 12, 100):
        after, pages = 0, []
        while page := await listed(letters, f"?limit={limit}&after={after}"):
            assert len(page) <= limit
            pages += page
            after = page[-1]["id"]
        assert pages == whole


async def test_letters_are_dropped_one_by_one_or_all(letters: Site) -> None:
    await fail(letters, "bad 1", "bad 2", "bad 3", "bad 4")
    gone = (await listed(letters))[1]["id"]
    assert (await letters.here.admin("DELETE", f"dead-letters/{gone}")).status == 204
    for missing in (gone, 1_000_000, NO_LETTER):
        for method, target in (("DELETE", ""), ("GET", ""), ("POST", "/replay")):
            assert (await letters.there.admin(method, f"dead-letters/{missing}{target}")).status == 404
    assert await inputs(letters) == ["bad 1", "bad 3", "bad 4"]
    assert (await letters.here.admin("DELETE", "dead-letters?all=true")).json == {"dropped": 3}
    assert (await letters.there.admin("DELETE", "dead-letters?all=true")).json == {"dropped": 0}
    assert (await letters.there.admin("GET", "dead-letters")).json == {"dead_letters": [], "total": 0}
    await fail(letters, "bad 5")
    (new,) = await listed(letters, f"?after={gone}")  # above all that were: who reads on sees it
    assert new["id"] > gone


# Replays.


async def test_a_replay_is_a_new_task_in_place_of_the_letter(letters: Site) -> None:
    await fail(letters, "bad 1", owner="bob", parameters={"k": 1})
    (letter,) = await listed(letters)
    letters.gpu.is_strict = False
    task_id = await replay(letters, letter["id"])
    assert await letters.here.output(task_id, "bob") == "bad 1"
    assert await letters.here.status(task_id, 0, "alice") == 404  # it is whose it was
    assert b'"parameters":{"k":1}' in letters.gpu.calls[-1].call.body
    assert await listed(letters) == []
    assert (await letters.there.admin("POST", f"dead-letters/{letter['id']}/replay")).status == 404


async def test_a_replay_that_fails_again_is_a_letter_again(letters: Site) -> None:
    await fail(letters, "bad 1")
    (letter,) = await listed(letters)
    task_id = await replay(letters, letter["id"])
    assert await letters.here.status(task_id, LONG_MS) == "FAILED"
    (again,) = await listed(letters)
    assert again["id"] > letter["id"]
    assert again["request_id"] == task_id


async def test_of_many_replays_of_one_letter_one_wins(letters: Site) -> None:
    await fail(letters, "bad 1")
    (letter,) = await listed(letters)
    letters.gpu.begin_anew()
    letters.gpu.is_strict = False
    target = f"dead-letters/{letter['id']}/replay"
    doors = (letters.here, letters.there) * 5
    answers = await asyncio.gather(*(door.admin("POST", target) for door in doors))
    assert sorted(answer.status for answer in answers) == [202] + [404] * 9
    (winner,) = (answer.json["task_id"] for answer in answers if answer.status == 202)
    assert await letters.there.output(winner) == "bad 1"
    assert letters.gpu.seen() == ["bad 1"]


async def test_replay_of_all_takes_those_there_were(letters: Site) -> None:
    """What comes back as letters meanwhile is not replayed again."""
    texts = [f"bad {number}" for number in range(10)]
    await fail(letters, *texts)
    before = [letter["id"] for letter in await listed(letters)]
    report = (await letters.there.admin("POST", "dead-letters/replay")).json
    assert sorted(task["id"] for task in report["tasks"]) == before
    assert report["reason"] is None
    for task in report["tasks"]:
        assert await letters.here.status(task["task_id"], LONG_MS) == "FAILED"
    again = await listed(letters)
    assert min(letter["id"] for letter in again) > max(before)
    assert sorted(await inputs(letters)) == texts


async def test_replay_of_one_cause(open_site: Open) -> None:
    site = await work_once(await open_site())
    await fail(site, "bad 1")
    site.gpu.failing = 503
    await fail(site, "failed")
    site.gpu.failing = 0
    report = (await site.there.admin("POST", "dead-letters/replay?cause=upstream-failed")).json
    assert len(report["tasks"]) == 1
    assert await site.here.status(report["tasks"][0]["task_id"], LONG_MS) == "SUCCESS"
    assert await inputs(site) == ["bad 1"]


async def test_what_cannot_be_replayed_stays(open_site: Open) -> None:
    site = await work_once(await open_site(**ONE_SHARD, broker__waiting_max=3))
    await fail(site, "bad 1", "bad 2", "bad 3", "bad 4")
    site.gpu.is_strict = False
    site.gpu.hold()
    await site.here.submit("another")
    report = (await site.there.admin("POST", "dead-letters/replay")).json
    assert (len(report["tasks"]), "the queue is full" in report["reason"]) == (2, True)
    letters = await listed(site)
    assert len(letters) == 2
    for target in ("replay", f"{letters[0]['id']}/replay"):
        refused = await site.there.admin("POST", f"dead-letters/{target}")
        assert (refused.status, refused.json["type"]) == (503, "urn:carpool:error:queue-full")
    assert await listed(site) == letters
    site.gpu.release()
    for task in report["tasks"]:
        assert await site.here.status(task["task_id"], LONG_MS) == "SUCCESS"
    await site.restart(model="n")
    unserved = await site.there.admin("POST", f"dead-letters/{letters[0]['id']}/replay")
    assert (unserved.status, "no longer served" in unserved.json["detail"]) == (404, True)
    assert await listed(site) == letters


# How long, and how many.


async def test_letters_and_replayed_tasks_outlive_the_process(open_site: Open) -> None:
    site = await work_once(await open_site())
    await fail(site, "bad 1", "bad 2")
    before = await listed(site)
    site.gpu.is_strict = False
    site.gpu.hold()
    task_id = await replay(site, before[0]["id"])
    leaving = asyncio.ensure_future(site.stop())
    site.gpu.release()
    await leaving
    await site.start()
    assert await site.here.output(task_id) == "bad 1"
    assert await listed(site) == before[1:]


async def test_bytes_are_bounded_and_the_oldest_go(open_site: Open) -> None:
    # A journal gives them a quarter.
    bounds = {"carpool.composition.redis_context.LETTER_BYTES_MAX": 20_000, "tasks__stored_bytes_max": 80_000}
    site = await work_once(await open_site(**ONE_SHARD, **bounds))
    texts = [f"bad {number}" + "x" * 4000 for number in range(8)]
    for text in texts:
        (task_id,) = await fail(site, text)
        assert await site.here.delete(task_id) == 204
    kept = await inputs(site)
    assert 2 <= len(kept) <= 4
    assert kept == texts[-len(kept) :]


async def test_they_are_kept_for_a_time(open_site: Open) -> None:
    site = await work_once(await open_site(tasks__dead_letter_ttl_s=1.0))
    await fail(site, "bad 1")

    async def is_gone() -> bool:
        return await listed(site) == []

    await until(is_gone)


async def test_they_are_counted(open_site: Open) -> None:
    site = await work_once(await open_site())
    await fail(site, "bad 1", "bad 2")
    await listed(site)

    async def are_counted() -> bool:
        counted = [await Door(process).metric("dead_letters_total") for process in site.processes]
        kept = [await Door(process).metric("dead_letters_kept") for process in site.processes]
        return sum(counted) == 2.0 and set(kept) == {2.0}

    await until(are_counted)
