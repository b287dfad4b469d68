"""The simulated GPU: its mapping, its slots, its faults, and the in-process endpoint."""

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import pytest

from carpool.testing import FakeClock
from carpool.tools.sim_gpu import read_tensors
from carpool.upstream.endpoint import AttemptFailedError, UpstreamCall, UpstreamResponse
from carpool.upstream.simulated import (
    Batch,
    SimulatedEndpoint,
    SimulatedGpu,
    SimulationSettings,
    parse_sim_url,
    read_call,
)


def gpu_on(clock: FakeClock, **settings: Any) -> SimulatedGpu:
    return SimulatedGpu(SimulationSettings(**settings), Random(1), clock=clock)


def answer_to(body: bytes, **settings: Any) -> UpstreamResponse | None:
    """What one call gets in the end."""
    clock, answers = FakeClock(), list[UpstreamResponse | None]()

    async def main() -> None:
        answers.append(await gpu_on(clock, **settings).infer(body))

    clock.run(main())
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
        ("sim:?per_kb_ms=-1", "per_kb_ms"),
        ("sim:?padded_ms_per_kb=nan", "padded_ms_per_kb"),
        ("sim:?jitter=1.1", "jitter"),
        ("sim:?hang_rate=0.6&short_rate=0.6", "hang_rate and short_rate"),
        ("sim://host", "sim:"),
        ("simulate:?slots=1", "sim:"),
    ],
)
def test_a_bad_address_is_refused_by_one_line_that_names_the_key(url: str, named: str) -> None:
    with pytest.raises(ValueError, match=f"^[^\n]*{named}[^\n]*$"):
        parse_sim_url(url)


# Calls


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
async def test_a_malformed_call_gets_400_without_a_slot(body: bytes) -> None:
    gpu = SimulatedGpu(SimulationSettings())
    answer = await gpu.infer(body)
    assert answer is not None
    assert answer.status == 400
    assert json.loads(answer.body)["error"]
    assert gpu.stats().most_in_flight == 0


def test_a_batch_over_the_maximum_gets_400_and_one_at_the_maximum_does_not() -> None:
    refused, taken = answer_to(batch(*["a"] * 65)), answer_to(batch(*["a"] * 64))
    assert refused == UpstreamResponse(400, b'{"error":"batch size 65 > maximum 64"}')
    assert taken is not None
    assert taken.status == 200


# Time


def times_ms(bodies: Sequence[bytes], read: Callable[[bytes], Batch] = read_call, **settings: Any) -> list[float]:
    """What each call takes, one after the other."""
    clock, took = FakeClock(), list[float]()
    gpu = gpu_on(clock, **settings)

    async def main() -> None:
        for body in bodies:
            began = clock()
            await gpu.infer(body, read)
            took.append((clock() - began) * 1000)

    clock.run(main())
    return took


def test_a_call_takes_longer_by_its_bytes_and_by_those_of_its_padding() -> None:
    # Quotes are bytes of an input, and an é has two; spaces between inputs are none's.
    spaced = b'{ "inputs" : [ "%b" ,\n "\xc3\xa9" , {"a": 1} ] }' % (b"x" * 998)
    for body in (batch("x" * 998, "é", {"a": 1}), spaced):
        (took,) = times_ms([body], latency_ms=5, per_item_ms=1, per_kb_ms=100, padded_ms_per_kb=10)
        assert took == pytest.approx(5 + 3 * 1 + 100 * (1.000 + 0.004 + 0.008) + 10 * 3 * 1.000)


def test_without_these_times_no_input_is_measured() -> None:
    assert times_ms([batch("x" * 10_000), batch("x", "y")], latency_ms=5) == pytest.approx([5, 5])


@pytest.mark.parametrize("datatype", ["BYTES", "FP32"])
def test_rows_of_tensors_have_bytes_too(datatype: str) -> None:
    def call(*data: Any) -> bytes:
        tensor = {"name": "a", "datatype": datatype, "shape": [len(data), 1], "data": data}
        return json.dumps({"inputs": [tensor]}).encode()

    rows = ["x" * 100, "y"] if datatype == "BYTES" else [1234.25, 1]
    read = partial(read_tensors, "m", {})
    sizes = [len(row) for row in read(call(*rows)).inputs]
    assert sizes[0] > sizes[1]
    assert times_ms([call(*rows)], read, latency_ms=0, padded_ms_per_kb=10) == pytest.approx([0.01 * 2 * sizes[0]])
    assert times_ms([call(*rows)], read, latency_ms=0, per_kb_ms=10) == pytest.approx([0.01 * sum(sizes)])


def test_jitter_is_even_around_the_time_and_of_the_seed() -> None:
    took = times_ms([batch("a")] * 2000, latency_ms=90, per_item_ms=10, jitter=0.25)
    assert took == times_ms([batch("a")] * 2000, latency_ms=90, per_item_ms=10, jitter=0.25)
    assert 75 <= min(took) < 77 and 123 < max(took) <= 125.001
    assert sum(took) / len(took) == pytest.approx(100, rel=0.02)


# Slots


def test_calls_beyond_the_slots_wait_in_order_and_who_leaves_frees_its_place() -> None:
    clock, ended = FakeClock(), list[tuple[str, float]]()
    gpu = gpu_on(clock, latency_ms=100, slots=2)
    began = clock()

    async def call(name: str) -> None:
        await gpu.infer(batch(name))
        ended.append((name, round(clock() - began, 3)))

    async def main() -> None:
        calls = {name: asyncio.create_task(call(name)) for name in "abcdefg"}
        await asyncio.sleep(0.05)
        assert gpu.stats().in_flight == 7
        calls["d"].cancel()  # it waits
        calls["b"].cancel()  # it runs: the next begins at once
        await asyncio.wait(calls.values())

    clock.run(main())
    assert ended == [("a", 0.1), ("c", 0.15), ("e", 0.2), ("f", 0.25), ("g", 0.3)]
    assert (gpu.stats().most_in_flight, gpu.stats().in_flight, gpu.stats().busy_seconds) == (7, 0, 0.55)


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


def test_the_same_seed_gives_the_same_faults_at_about_the_rate() -> None:
    def statuses() -> list[int]:
        clock, answers = FakeClock(), list[UpstreamResponse | None]()
        gpu = gpu_on(clock, error_rate=0.2, reset_rate=0.1, latency_ms=0)

        async def main() -> None:
            for _ in range(2000):
                answers.append(await gpu.infer(b'{"inputs":["a"]}'))

        clock.run(main())
        return [answer.status if answer else 0 for answer in answers]

    first = statuses()
    assert first == statuses()
    assert 300 < first.count(500) < 500
    assert 130 < first.count(0) < 270


# Counting


async def test_stats_count_calls_and_inputs() -> None:
    gpu = SimulatedGpu(SimulationSettings(latency_ms=0))
    for body in (batch("a", "b"), batch("b", "c", "c"), b"nonsense", batch(*"x" * 65)):
        await gpu.infer(body)
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
