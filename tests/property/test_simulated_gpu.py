"""The simulated GPU under any input and any order of events."""

import json
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from carpool.upstream.endpoint import UpstreamResponse
from carpool.upstream.simulated import SimulatedCall, SimulatedGpu, SimulationSettings

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
value = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=8,
)


class Clockwork:
    """Runs timers in the order they fall due, when told."""

    def __init__(self) -> None:
        self.timers: deque[Clockwork.Timer] = deque()

    class Timer:
        """A timer that can be forgotten; all have the same latency, so they end in the order they began."""

        def __init__(self, callback: Callable[[], None]) -> None:
            self.callback = callback
            self.cancelled = False

        def cancel(self) -> None:
            self.cancelled = True

    def call_later(self, _seconds: float, callback: Callable[[], None]) -> "Clockwork.Timer":
        self.timers.append(self.Timer(callback))
        return self.timers[-1]

    def running(self) -> int:
        return sum(not timer.cancelled for timer in self.timers)

    def fire(self) -> None:
        while self.timers:
            timer = self.timers.popleft()
            if not timer.cancelled:
                timer.callback()
                return


def answer_to(body: bytes, **settings: Any) -> UpstreamResponse:
    clockwork, answers = Clockwork(), list[UpstreamResponse | None]()
    gpu = SimulatedGpu(SimulationSettings(**settings), Random(0), call_later=clockwork.call_later, clock=lambda: 0.0)
    gpu.submit(body, answers.append)
    clockwork.fire()
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


@given(st.integers(1, 4), st.lists(st.sampled_from(["submit", "submit", "fire", "leave"]), max_size=60), st.data())
def test_slots_are_never_exceeded_never_idle_with_work_and_served_in_order(
    slots: int, steps: list[str], data: st.DataObject
) -> None:
    clockwork = Clockwork()
    gpu = SimulatedGpu(SimulationSettings(slots=slots), Random(0), call_later=clockwork.call_later, clock=lambda: 0.0)
    calls: dict[int, SimulatedCall] = {}
    ended: list[int] = []

    def submit(number: int) -> None:
        calls[number] = gpu.submit(b'{"inputs":[1]}', lambda _: ended.append(number))

    for step in steps:
        if step == "submit":
            submit(len(calls))
        elif step == "fire":
            clockwork.fire()
        elif calls:
            gpu.leave(calls[data.draw(st.sampled_from(sorted(calls)))])
        in_flight = sum(not call.ended for call in calls.values())
        assert gpu.stats().in_flight == in_flight
        assert clockwork.running() == min(slots, in_flight)
    while clockwork.running():
        clockwork.fire()
    assert all(call.ended for call in calls.values())
    assert ended == sorted(set(ended))  # in the order of submission, and each once
