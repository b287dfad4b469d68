"""Before an endpoint has answered a call well nobody is blamed, tasks wait, and operators are told what happens."""

import asyncio
import json
import logging
from random import Random

import pytest

from carpool.core.errors import CarpoolError, InputRefused, UpstreamFailed, UpstreamRefused
from carpool.core.outcome import Output
from carpool.core.request import Request
from carpool.testing import FakeUpstream, UpstreamCall, UpstreamResponse, echo
from carpool.upstream.first_contact import (
    NAMES_MAX,
    SAY_AGAIN_S,
    SAY_AGAIN_S_MAX,
    Trouble,
    field_names,
    look_at_after,
    status_told,
)
from support.virtual_gateway import SERVICE_S, Stand, failing

STATUSES = [400, 401, 404, 422, 500, 503]


class Letters:
    def __init__(self) -> None:
        self.buried: list[str] = []

    def bury(self, request: Request, error: CarpoolError, sends: int) -> None:
        self.buried.append(error.code)


def never_works(status: int, *names: str) -> tuple[Stand, Letters]:
    letters = Letters()
    upstreams = [
        FakeUpstream(name).then(UpstreamResponse(status, b'{"error":"words"}'), delay_s=SERVICE_S, times=9999)
        for name in names
    ]
    return Stand(*upstreams, dead_letters=letters), letters


@pytest.mark.parametrize("names", ["a", "ab", "abc"])
@pytest.mark.parametrize("status", STATUSES)
def test_nobody_is_an_offender_and_nothing_a_letter_before_the_first_answer(status: int, names: str) -> None:
    stand, letters = never_works(status, *names)

    async def main() -> None:
        told = [await stand.answer(b"input", "X") for _ in range(20)]
        requests = [stand.send(b"input", "Y") for _ in range(16)]
        await asyncio.sleep(10.0)
        told += [stand.witness.outcome(request) for request in requests]
        assert not any(isinstance(outcome, Output) for outcome in told)
        assert not stand.quarantined and not letters.buried and not stand.dispatcher.scheduler.poisoned
        assert stand.pool.has_never_worked() and stand.broker.held == 0
        asked = [member for member in stand.pool.members if member.trouble is not None]
        assert asked and all(f"it answered {status}" in member.trouble.text for member in asked if member.trouble)
        first = told[0]
        assert isinstance(first, CarpoolError) and "has answered no call well so far" in first.detail

    stand.run(main)


@pytest.mark.parametrize("status", STATUSES)
def test_a_task_waits_until_the_endpoint_works(status: int) -> None:
    upstream = FakeUpstream().then(UpstreamResponse(status, b""), delay_s=SERVICE_S, times=7)
    stand = Stand(upstream)

    async def main() -> None:
        task = stand.send(b"input", "X", is_task=True)
        await asyncio.sleep(90.0)
        assert isinstance(stand.witness.outcome(task), Output)
        assert stand.pool.members[0].trouble is None and stand.pool.is_proven
        assert stand.broker.held == 0

    stand.run(main)


@pytest.mark.parametrize("status", [401, 422, 503])
def test_a_task_that_nobody_answers_fails_at_its_own_timeout_with_what_is_worth_a_look(status: int) -> None:
    stand, _ = never_works(status, "a")

    async def main() -> None:
        task = stand.send(b"input", "X", is_task=True)
        await asyncio.sleep(590.0)
        stand.broker.expire(stand.clock())
        assert stand.witness.outcome(task) is None
        # A call in a while, and no storm of them.
        assert 10 < len(stand.upstreams[0].calls) < 2000
        await asyncio.sleep(10.0)
        stand.broker.expire(stand.clock())
        outcome = stand.witness.outcome(task)
        assert isinstance(outcome, InputRefused | UpstreamFailed | UpstreamRefused)  # which make a task a dead letter

    stand.run(main)


def test_such_a_task_takes_no_room_from_others_while_it_rests() -> None:
    stand, _ = never_works(422, "a")

    async def main() -> None:
        task = stand.send(b"input", "X", is_task=True)
        await asyncio.sleep(1.0)
        assert stand.upstreams[0].calls and stand.witness.outcome(task) is None
        assert stand.broker.bytes_running("m") == 0 and stand.broker.held == 1
        stand.broker.cancel(task)
        await asyncio.sleep(5.0)
        assert stand.broker.bytes_running("m") == 0 and stand.broker.held == 0

    stand.run(main)


def test_at_the_end_of_a_process_such_a_task_is_left_to_the_next() -> None:
    stand, _ = never_works(404, "a")

    async def main() -> None:
        task = stand.send(b"input", "X", is_task=True)
        await asyncio.sleep(1.0)
        await stand.dispatcher.finish(1.0)
        outcome = stand.witness.outcome(task)
        assert isinstance(outcome, CarpoolError) and outcome.code == "draining"

    stand.run(main)


def test_after_the_first_answer_a_bad_input_is_at_fault_as_ever() -> None:
    letters = Letters()
    stand = Stand(FakeUpstream().then(failing(422), delay_s=SERVICE_S, times=9999), dead_letters=letters)

    async def main() -> None:
        before = await stand.answer(b"bad", "X")
        assert isinstance(before, InputRefused) and letters.buried == []
        assert isinstance(await stand.answer(b"good", "Y"), Output)
        told = [await stand.answer(b"bad", "X") for _ in range(4)]
        assert {type(outcome) for outcome in told} == {InputRefused}
        assert "so far" not in told[0].detail
        assert letters.buried == ["input-refused"] * 4
        assert ("m", "X") in stand.quarantined

    stand.run(main)


def test_the_log_says_it_once_and_then_at_growing_intervals(caplog: pytest.LogCaptureFixture) -> None:
    stand, _ = never_works(404, "a")

    async def main() -> None:
        for _ in range(600):
            await stand.answer(b"secret", "X")
            await asyncio.sleep(1.0)

    with caplog.at_level(logging.DEBUG):
        stand.run(main)
    said = [record.getMessage() for record in caplog.records if "no call well so far" in record.getMessage()]
    assert said[0] == (
        "a has answered no call well so far (1 failed, the last one so: it answered 404); "
        "look at the path in upstream.endpoints; `carpool doctor` finds out more"
    )
    assert 4 <= len(said) <= 7 and not [line for line in said if "secret" in line or "words" in line]


def test_a_failure_of_another_kind_is_said_soon() -> None:
    trouble = Trouble()
    assert trouble.failed("404", "path", 0.0)
    assert not trouble.failed("404", "path", 9.0)
    assert trouble.failed("404", "path", 10.0) and not trouble.failed("404", "path", 29.0)
    assert not trouble.failed("422", "field", 11.0)
    assert trouble.failed("422", "field", 16.0)
    now, pauses = 16.0, []
    for _ in range(12):
        began = now
        while not trouble.failed("422", "field", now):
            now += 1.0
        pauses.append(now - began)
    assert pauses == sorted(pauses) and pauses[0] == SAY_AGAIN_S and pauses[-1] == SAY_AGAIN_S_MAX


def fastapi(*places: object) -> bytes:
    return json.dumps(
        {"detail": [{"type": "missing", "loc": place, "msg": "words", "input": "x"} for place in places]}
    ).encode()


def test_of_a_422_only_names_of_fields_are_repeated() -> None:
    assert field_names(fastapi(["body", "texts"], ["body", "texts", 0, "client"], ["body", "top_k"]), b"") == [
        "texts",
        "top_k",
    ]
    for odd in (
        ["query", "q"],
        ["body"],
        ["body", 0],
        ["body", "two words"],
        ["body", "a" * 41],
        "body",
        None,
        ["body", "<b>"],
    ):
        assert field_names(fastapi(odd), b"") == []
    # A client may have chosen it.
    assert field_names(fastapi(["body", "canary"], ["body", "texts"]), b'{"canary":1}') == ["texts"]
    assert len(field_names(fastapi(*(["body", f"f{number}"] for number in range(99))), b"")) == NAMES_MAX
    for nonsense in (b"", b"[]", b'{"detail":"words"}', b'{"detail":["words"]}', b"\xff", b"[" * 10_000):
        assert field_names(nonsense, b"") == []


def test_what_to_look_at() -> None:
    told = status_told(422, "http://host:1/", "/v2/models/m/infer", ["texts", "top_k"])
    assert told == "it answered 422 to POST /v2/models/m/infer, and spoke of the fields texts, top_k"
    assert status_told(404, "http://host:1/infer", "/v2/models/m/infer", ()) == "it answered 404"
    assert "`inputs`" in look_at_after(422, "inputs") and "inputs_field" in look_at_after(400, "inputs")
    assert "inputs_field" not in look_at_after(422, "")
    assert "path" in look_at_after(404, "inputs") and "token_file" in look_at_after(401, "inputs")
    assert "redirects" in look_at_after(307, "inputs") and "log" in look_at_after(500, "inputs")


def test_one_bad_client_of_ten_from_the_first_request_on_is_found_within_a_second_mostly() -> None:
    found = [found_within_a_second(seed) for seed in range(8)]
    assert found.count(["owner 5"]) >= 7 and all(each in (["owner 5"], []) for each in found), found


def found_within_a_second(seed: int) -> list[str]:
    """Who is quarantined after a second, and in the end the one who should be."""
    upstream = FakeUpstream(slots=4).then(failing(400), delay_s=0.2, times=9999)
    stand, choose = Stand(upstream, max_batch=64), Random(seed)

    async def main() -> None:
        for _ in range(20):  # a second, half of what the endpoint can do
            for _ in range(32):
                owner = choose.randrange(10)
                stand.send(b"bad" if owner == 5 else b"good", f"owner {owner}")
            await asyncio.sleep(0.05)
        found.extend(stand.quarantined.of_model("m"))
        await asyncio.sleep(8.0)

    found: list[str] = []
    stand.run(main)
    return found


@pytest.mark.parametrize(
    ("seed", "well_from_s", "fails_s", "slots", "weights", "rate", "max_batch"),
    [
        (867228, 0.2532720924956051, 0.8, 16, (3, 1, 1), 40, 8),
        (534909, 0.4765938546622043, 0.8, 16, (3, 1, 1), 200, 2),
        (796452, 0.3136287226087985, 0.1, 4, (9, 1), 100, 2),
        (45665, 0.22503649630520137, 0.3, 16, (9, 1, 1), 200, 8),
        (175896, 0.3577412178004421, 0.3, 16, (9, 1, 1), 100, 8),
    ],
)
def test_no_owner_is_quarantined_for_calls_that_began_before_an_endpoint_worked(
    seed: int, well_from_s: float, fails_s: float, slots: int, weights: tuple[int, ...], rate: float, max_batch: int
) -> None:
    """Their failures come after the first answer. Of some hundred such starts these did quarantine somebody."""
    choose = Random(seed)

    class Slow(FakeUpstream):
        async def post(self, call: UpstreamCall, timeout_s: float) -> UpstreamResponse:
            if stand.clock() < began + well_from_s:
                self.then(UpstreamResponse(500, b'{"error":"x"}'), delay_s=fails_s * choose.uniform(0.3, 1.7))
            else:
                self.then(echo, delay_s=SERVICE_S)
            return await super().post(call, timeout_s)

    stand = Stand(Slow("e0", slots), max_batch=max_batch, dead_letters=Letters(), random_share=lambda: 0.5)
    began = stand.clock()

    async def main() -> None:
        seen = set[tuple[str, str]]()
        while stand.clock() < began + well_from_s + 4.0:
            (owner,) = choose.choices("ABC"[: len(weights)], weights)
            if not (stand.pool.is_down or stand.pool.is_shut_to(owner)):
                stand.send(b"in", owner)
            await asyncio.sleep(choose.expovariate(rate))
            stand.broker.expire(stand.clock())
            seen |= stand.quarantined.riders
        await asyncio.sleep(8.0)
        assert not seen

    stand.run(main)
