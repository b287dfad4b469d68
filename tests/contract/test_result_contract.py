"""Results that are kept, and requests that are the same: for whom one call is enough, at one gateway or at several."""

import asyncio
from typing import Any

import pytest
from sites import ONE_SHARD, Door, Open, Site

from support.client import Response
from support.processes import until

pytest_plugins = ("site_fixtures",)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def site_settings() -> dict[str, object]:
    return {"upstream__cache": True}


async def until_given(site: Site, door: Door, value: Any, owner: str = "alice", **fields: Any) -> Response:
    """Wait until a result that was kept is the answer, for the GPU gives none.

    It may be written a moment after it was told, and a Redis that is slow is not asked for a moment.
    """
    site.gpu.hold()
    answers: list[Response] = []

    async def is_given() -> bool:
        answers.append(await door.ask(value, owner, "X-Request-Timeout-Ms: 200\r\n", **fields))
        return answers[-1].status == 200

    await until(is_given)
    site.gpu.release()
    assert is_cached(answers[-1])
    assert answers[-1].json["output"] == value
    return answers[-1]


async def until_held(site: Site, number: int) -> None:
    """Wait until so many wait at a gateway."""

    async def are_held() -> bool:
        return await site.here.metric("held_requests") >= number

    await until(are_held)


def is_cached(answer: Response) -> bool:
    assert answer.status == 200, answer
    cached: bool = answer.json["metadata"]["cached"]
    return cached


async def ask_with(site: Site, value: str, control: str) -> Response:
    """Whether a result may be kept, and given, is the client's to say."""
    return await site.here.ask(value, headers=f"Cache-Control: {control}\r\n")


async def test_what_was_computed_once_is_found_at_every_gateway(site: Site) -> None:
    first = await site.here.ask({"a": "found"}, parameters={"k": 1})
    assert not is_cached(first)
    for door in (site.here, site.there):
        again = await until_given(site, door, {"a": "found"}, parameters={"k": 1})
        assert again.json["request_id"] != first.json["request_id"]


async def test_only_what_is_the_same_is_found(site: Site) -> None:
    variants: list[dict[str, Any]] = [
        {"value": "same"},
        {"value": "same "},
        {"value": "same", "parameters": {"k": 1}},
        {"value": "same", "parameters": {"k": 2}},
        {"value": ["same"]},
    ]
    for fields in variants:
        assert not is_cached(await site.here.ask(**fields))
    assert len(site.gpu.seen()) == len(variants)
    for fields in variants:
        await until_given(site, site.there, **fields)
    await until_given(site, site.here, "same", "bob")


async def test_an_owner_may_have_its_own(open_site: Open) -> None:
    site = await open_site(upstream__cache=True, cache__scope="owner")
    assert not is_cached(await site.here.ask("mine"))
    assert not is_cached(await site.here.ask("mine", "bob"))
    for owner in ("alice", "bob"):
        await until_given(site, site.there, "mine", owner)
    site.gpu.hold()
    both = [asyncio.ensure_future(site.here.ask("ours", owner)) for owner in ("alice", "bob")]
    site.gpu.calls.clear()
    await site.gpu.until_called(2)
    site.gpu.release()
    assert [is_cached(answer) for answer in await asyncio.gather(*both)] == [False, False]


async def test_requests_that_are_the_same_share_one_call(site: Site) -> None:
    site.gpu.hold()
    asked = [asyncio.ensure_future(site.here.ask("shared")) for _ in range(8)]
    await site.gpu.until_called()
    await until_held(site, 8)
    asked.pop(0).cancel()  # a client may leave without harm to the others
    site.gpu.release()
    answers = await asyncio.gather(*asked)
    assert {answer.json["output"] for answer in answers} == {"shared"}
    assert len({answer.json["request_id"] for answer in answers}) == 7
    assert site.gpu.seen() == ["shared"]


async def test_a_refusal_is_for_all_and_is_not_kept(site: Site) -> None:
    assert (await site.here.ask("works")).status == 200
    site.gpu.begin_anew()
    site.gpu.hold()
    asked = [asyncio.ensure_future(site.here.ask("bad shared")) for _ in range(3)]
    await site.gpu.until_called()
    await until_held(site, 3)
    site.gpu.release()
    assert [answer.status for answer in await asyncio.gather(*asked)] == [422] * 3
    site.gpu.is_strict = False
    answer = await site.here.ask("bad shared")
    assert (answer.status, is_cached(answer)) == (200, False)


async def test_a_client_may_want_neither(site: Site) -> None:
    assert not is_cached(await ask_with(site, "secret", "no-store"))
    assert not is_cached(await site.here.ask("secret"))  # that was not kept
    await until_given(site, site.here, "secret")
    assert not is_cached(await ask_with(site, "secret", "no-store"))
    assert not is_cached(await ask_with(site, "secret", "no-cache"))
    await until_given(site, site.here, "secret")


async def test_tasks_find_results_and_fill_the_cache(site: Site) -> None:
    assert await site.here.output(await site.here.submit("by a task")) == "by a task"
    await until_given(site, site.there, "by a task")
    site.gpu.hold()

    async def is_given() -> bool:
        task_id = await site.there.submit("by a task")
        return bool(await site.here.status(task_id, 200) == "SUCCESS")

    await until(is_given)


async def test_results_are_kept_for_a_time(open_site: Open) -> None:
    site = await open_site(upstream__cache=True, cache__ttl_s=1.0)
    assert not is_cached(await site.here.ask("old"))

    async def is_gone() -> bool:
        return not is_cached(await site.here.ask("old"))

    await until(is_gone)
    assert len(site.gpu.seen()) == 2


async def test_bytes_are_bounded_and_what_was_unused_goes(open_site: Open) -> None:
    site = await open_site(**ONE_SHARD, upstream__cache=True, cache__bytes_max=100_000)
    texts = [f"{number:03}" + "x" * 8000 for number in range(40)]
    for text in texts:
        assert not is_cached(await site.here.ask(text))
    for door in (site.here, site.there):
        await until_given(site, door, texts[-1])

    async def kept_bytes() -> list[float]:
        names = ("cache_bytes", "broker_cache_bytes")
        return [await site.here.metric(name) for name in names]

    async def are_counted() -> bool:
        return max(await kept_bytes()) > 8000

    await until(are_counted)
    assert max(await kept_bytes()) <= 100_000
    assert not is_cached(await site.there.ask(texts[0]))


async def test_lookups_are_counted(open_site: Open) -> None:
    site = await open_site(upstream__cache=True)
    await site.here.ask("counted")
    assert await site.here.metric("cache_lookups_total", '"miss"') == 1.0
    await until_given(site, site.here, "counted")
    assert await site.here.metric("cache_lookups_total", '"hit"') == 1.0
