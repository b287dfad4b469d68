"""The simulated GPU under any input and any order of events."""

import asyncio
import json
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from carpool.testing import FakeClock
from carpool.upstream.endpoint import UpstreamResponse
from carpool.upstream.simulated import SimulatedGpu, SimulationSettings

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
value = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=8,
)


def answer_to(body: bytes, **settings: Any) -> UpstreamResponse:
    answers = list[UpstreamResponse | None]()

    async def main() -> None:
        answers.append(await SimulatedGpu(SimulationSettings(**settings), Random(0)).infer(body))

    FakeClock().run(main())
    (answer,) = answers
    assert answer is not None
    return answer


@given(
    st.lists(value, min_size=1, max_size=64),
    st.booleans(),
    st.booleans(),
    st.sampled_from([("inputs", "outputs"), ("instances", "predictions")]),
    st.sampled_from([(",", ":"), (" , ", " : ")]),
)
def test_every_input_gets_its_own_answer_in_its_place(
    inputs: list[Any],
    ascii_only: bool,
    with_parameters: bool,
    fields: tuple[str, str],
    separators: tuple[str, str],
) -> None:
    call: dict[str, Any] = {fields[0]: inputs}
    if with_parameters:
        call["parameters"] = {"inputs": "\\"}
    body = json.dumps(call, ensure_ascii=ascii_only, separators=separators).encode()
    answer = answer_to(body)
    assert answer.status == 200
    assert json.loads(answer.body) == {
        fields[1]: [item[::-1] if isinstance(item, str) else {"echo": item} for item in inputs]
    }


@given(st.lists(text, min_size=1, max_size=8), text, text)
def test_a_batch_is_refused_or_failed_as_a_whole_for_the_text_of_one_input(
    inputs: list[str], refuse: str, poison: str
) -> None:
    bodies = [json.dumps(item, ensure_ascii=False) for item in inputs]
    body = '{"inputs":[' + ",".join(bodies) + "]}"
    answer = answer_to(body.encode(), refuse=refuse, poison=poison)
    if refuse and any(refuse in item for item in bodies):
        expected = 400
    elif poison and any(poison in item for item in bodies):
        expected = 500
    else:
        expected = 200
    assert answer.status == expected


@given(
    st.binary(max_size=60)
    | st.binary(max_size=40).map(lambda data: b'{"inputs":["' + data + b'"]}')
    | st.text('{}[]",:\\inputs0 ', max_size=40).map(str.encode)
)
def test_any_bytes_get_an_answer_that_is_json(body: bytes) -> None:
    answer = answer_to(body)
    assert answer.status in (200, 400)
    assert set(json.loads(answer.body)) in ({"error"}, {"outputs"})


@given(st.integers(1, 4), st.lists(st.sampled_from(["submit", "submit", "pass", "leave"]), max_size=60), st.data())
def test_slots_are_never_exceeded_never_idle_with_work_and_served_in_order(
    slots: int, steps: list[str], data: st.DataObject
) -> None:
    running, ended = 0, list[int]()

    async def sleep(seconds: float) -> None:
        nonlocal running
        running += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            running -= 1

    async def main() -> None:
        gpu = SimulatedGpu(SimulationSettings(slots=slots, latency_ms=100), Random(0), sleep)
        calls: list[asyncio.Task[None]] = []

        async def call(number: int) -> None:
            await gpu.infer(b'{"inputs":[1]}')
            ended.append(number)

        for step in steps:
            if step == "submit":
                calls.append(asyncio.create_task(call(len(calls))))
            elif step == "leave" and calls:
                calls[data.draw(st.integers(0, len(calls) - 1))].cancel()
            await asyncio.sleep(0.03 if step == "pass" else 0.001)
            in_flight = sum(not each.done() for each in calls)
            assert gpu.stats().in_flight == in_flight
            assert running == min(slots, in_flight)
        await asyncio.gather(*calls, return_exceptions=True)
        assert gpu.stats().in_flight == running == 0

    FakeClock().run(main())
    assert ended == sorted(set(ended))  # in the order of submission, and each once
