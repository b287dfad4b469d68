"""The simulated GPU: its mapping, its slots, its faults, and the in-process endpoint."""

import asyncio
import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from carpool.testing import FakeClock
from carpool.upstream.endpoint import AttemptFailedError, UpstreamCall, UpstreamResponse
from carpool.upstream.simulated import (
    HANG_S_MAX,
    SimulatedEndpoint,
    SimulatedGpu,
    SimulationSettings,
    parse_sim_url,
)


class FakeTimer:
    """One timer of FakeTime."""

    def __init__(self, due: float, callback: Callable[[], None]) -> None:
        self.due = due
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeTime:
    """A clock and its timers, moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[FakeTimer] = []

    def call_later(self, seconds: float, callback: Callable[[], None]) -> FakeTimer:
        self.timers.append(FakeTimer(self.now + seconds, callback))
        return self.timers[-1]

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while due := [t for t in self.timers if not t.cancelled and t.due <= until + 1e-9]:
            first = min(due, key=lambda timer: timer.due)
            self.timers.remove(first)
            self.now = max(self.now, first.due)
            first.callback()
        self.now = until


def gpu_on(time: FakeTime, **settings: Any) -> SimulatedGpu:
    return SimulatedGpu(SimulationSettings(**settings), Random(1), call_later=time.call_later, clock=lambda: time.now)


def answer_to(body: bytes, **settings: Any) -> UpstreamResponse | None:
    """What one call gets in the end."""
    time, answers = FakeTime(), list[UpstreamResponse | None]()
    gpu_on(time, **settings).submit(body, answers.append)
    time.advance(HANG_S_MAX)
    assert len(answers) == 1
    return answers[0]


def batch(*inputs: Any) -> bytes:
    return json.dumps({"inputs": inputs}, ensure_ascii=False).encode()


# Settings


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("sim:?latency=50", "latency"),
        ("sim:?latency_ms=soon", "latency_ms"),
        ("sim:?latency_ms=-1", "latency_ms"),
        ("sim:?latency_ms=nan", "latency_ms"),
        ("sim:?latency_ms=inf", "latency_ms"),
        ("sim:?latency_ms=", "latency_ms"),
        ("sim:?slots=0", "slots"),
        ("sim:?slots=1.5", "slots"),
        ("sim:?slots=1&slots=2", "slots"),
        ("sim:?error_rate=1.1", "error_rate"),
        ("sim:?hang_rate=0.6&short_rate=0.6", "hang_rate and short_rate"),
        ("sim://host", "sim:"),
        ("simulate:?slots=1", "sim:"),
    ],
)
def test_a_bad_address_is_refused_by_one_line_that_names_the_key(url: str, named: str) -> None:
    with pytest.raises(ValueError, match=f"^[^\n]*{named}[^\n]*$"):
        parse_sim_url(url)


# Mapping


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (b'{"inputs":["abc"]}', b'{"outputs":["cba"]}'),
        (b'{"inputs":["ab",""]}', b'{"outputs":["ba",""]}'),
        (b'{"instances":["ab"]}', b'{"predictions":["ba"]}'),
        (b'{ "parameters" : {"k":"\\n"}, "inputs" : [ "ab" , 12 ] }', b'{"outputs":["ba",{"echo":12}]}'),
        (b'{"inputs":[{"a" : [1, 2.50]}]}', b'{"outputs":[{"echo":{"a" : [1, 2.50]}}]}'),
        ('{"inputs":["añb","c"]}'.encode(), '{"outputs":["bña","c"]}'.encode()),
        (b'{"inputs":["a\\u00f1\\"\\\\b"]}', '{"outputs":["b\\\\\\"ña"]}'.encode()),
        (b'{"inputs":["x\\ud83d\\ude00"]}', '{"outputs":["😀x"]}'.encode()),
    ],
)
def test_a_string_comes_back_reversed_and_anything_else_as_an_echo(body: bytes, answer: bytes) -> None:
    assert answer_to(body) == UpstreamResponse(200, answer)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"inputs":[]}',
        b'{"inputs":null}',
        b'{"inputs":"ab"}',
        b'{"inputs":["ab"',
        b'{"inputs":["ab"],"instances":["ab"]}',
        b'{"inputs":["\xff"]}',
        b'{"inputs":[{"a":"\xff"}]}',
        b'{"inputs":["\\ud800"]}',
        b'{"inputs":[' + b"[" * 100_000 + b"]" * 100_000 + b"]}",
    ],
)
def test_a_malformed_call_gets_400_at_once(body: bytes) -> None:
    time, answers = FakeTime(), list[UpstreamResponse | None]()
    gpu_on(time).submit(body, answers.append)
    assert answers[0] is not None
    assert answers[0].status == 400
    assert json.loads(answers[0].body)["error"]
    assert time.timers == []


def test_a_batch_over_the_maximum_gets_400_and_one_at_the_maximum_does_not() -> None:
    refused, taken = answer_to(batch(*["a"] * 65)), answer_to(batch(*["a"] * 64))
    assert refused == UpstreamResponse(400, b'{"error":"batch size 65 > maximum 64"}')
    assert taken is not None
    assert taken.status == 200


# Slots


def test_calls_beyond_the_slots_wait_in_order() -> None:
    time, ended = FakeTime(), list[tuple[str, float]]()
    gpu = gpu_on(time, latency_ms=100, slots=2)

    def submit(name: str) -> None:
        gpu.submit(batch(name), lambda _: ended.append((name, round(time.now, 3))))

    for name in "abcde":
        submit(name)
    time.advance(1.0)
    assert ended == [("a", 0.1), ("b", 0.1), ("c", 0.2), ("d", 0.2), ("e", 0.3)]
    assert gpu.stats().most_in_flight == 5
    assert gpu.stats().in_flight == 0
    assert gpu.stats().busy_seconds == 0.5


def test_who_leaves_frees_its_slot_or_its_place_in_the_queue() -> None:
    time, ended = FakeTime(), list[str]()
    gpu = gpu_on(time, latency_ms=100)
    running, waiting, last = (
        gpu.submit(batch(name), lambda answer: ended.append(answer.body.decode() if answer else ""))
        for name in ("run", "wait", "last")
    )
    time.advance(0.05)
    gpu.leave(waiting)
    gpu.leave(running)
    assert gpu.stats().in_flight == 1
    time.advance(0.1)
    assert ended == ['{"outputs":["tsal"]}']
    for call in (running, waiting, last):
        gpu.leave(call)  # again, and after the end: nothing happens
    assert gpu.stats().in_flight == 0
    assert gpu.stats().busy_seconds == 0.15


# Faults


def test_a_short_answer_to_one_input_is_empty() -> None:
    assert answer_to(batch("a"), short_rate=1) == UpstreamResponse(200, b'{"outputs":[]}')


def test_garbage_is_no_json() -> None:
    answer = answer_to(batch("a"), garbage_rate=1)
    assert answer is not None
    assert answer.status == 200
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer.body)


@pytest.mark.parametrize("option", ["poison", "refuse"])
def test_bad_text_outside_of_the_inputs_does_no_harm(option: str) -> None:
    answer = answer_to(b'{"inputs":["a"],"parameters":{"note":"bad"}}', **{option: "bad"})
    assert answer == UpstreamResponse(200, b'{"outputs":["a"]}')


def test_a_hang_holds_its_slot_until_the_client_leaves() -> None:
    time, answers = FakeTime(), list[UpstreamResponse | None]()
    gpu = gpu_on(time, hang_rate=1)
    hanging = gpu.submit(batch("a"), answers.append)
    time.advance(HANG_S_MAX - 1)
    assert (answers, gpu.stats().in_flight) == ([], 1)
    gpu.leave(hanging)
    time.advance(2)
    assert (answers, gpu.stats().in_flight) == ([], 0)


def test_the_same_seed_gives_the_same_faults_at_about_the_rate() -> None:
    def statuses() -> list[int]:
        time, answers = FakeTime(), list[UpstreamResponse | None]()
        gpu = gpu_on(time, error_rate=0.2, reset_rate=0.1, latency_ms=0)
        for _ in range(2000):
            gpu.submit(b'{"inputs":["a"]}', answers.append)
            time.advance(0.001)
        return [answer.status if answer else 0 for answer in answers]

    first = statuses()
    assert first == statuses()
    assert 300 < first.count(500) < 500
    assert 130 < first.count(0) < 270


# Counting


def test_stats_count_calls_and_inputs() -> None:
    gpu = gpu_on(FakeTime())
    for body in (batch("a", "b"), batch("b", "c", "c"), b"nonsense", batch(*"x" * 65)):
        gpu.submit(body, lambda _: None)
    stats = gpu.stats()
    assert (stats.calls, stats.inputs, stats.largest_batch) == (4, 5, 65)


# The in-process endpoint


@pytest.mark.parametrize(("fault", "text"), [("hang_rate", "no answer within"), ("reset_rate", "reset")])
def test_no_answer_is_a_failed_attempt_and_frees_the_slot(fault: str, text: str) -> None:
    async def main() -> None:
        endpoint = SimulatedEndpoint("sim:", parse_sim_url(f"sim:?latency_ms=1&{fault}=1"))
        with pytest.raises(AttemptFailedError, match=text):
            await endpoint.post(UpstreamCall(batch("a")), 0.02)
        assert endpoint.gpu.stats().in_flight == 0

    FakeClock().run(main())


async def test_a_cancelled_post_frees_its_slot_for_the_next() -> None:
    endpoint = SimulatedEndpoint("sim:", SimulationSettings(latency_ms=5_000))
    first = asyncio.create_task(endpoint.post(UpstreamCall(batch("a")), 10.0))
    await asyncio.sleep(0.01)
    assert endpoint.gpu.stats().in_flight == 1
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert endpoint.gpu.stats().in_flight == 0


def test_a_post_that_times_out_in_the_queue_leaves_it() -> None:
    async def main() -> None:
        endpoint = SimulatedEndpoint("sim:", SimulationSettings(latency_ms=60))
        first = asyncio.create_task(endpoint.post(UpstreamCall(batch("ab")), 5.0))
        await asyncio.sleep(0)
        with pytest.raises(AttemptFailedError):
            await endpoint.post(UpstreamCall(batch("b")), 0.02)
        assert endpoint.gpu.stats().in_flight == 1
        assert (await first).body == b'{"outputs":["ba"]}'

    FakeClock().run(main())
