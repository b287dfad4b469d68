"""How many calls an endpoint gets at once, by what is known of its load."""

import pytest

from carpool.upstream.load import CALLS_MIN, WINDOW_S, LoadLimit, ServiceTimes, metric_value, parse_load


def test_a_loaded_endpoint_gets_less_and_then_slowly_more() -> None:
    limit = LoadLimit(20)
    assert limit.limit == 20
    limit.report(0.95)
    assert limit.step() == 14
    limit.report(0.91)
    assert limit.step() == 9
    assert repr(limit) == "<LoadLimit 9 of 20>"
    for expected in range(10, 20):
        limit.report(0.5)
        assert limit.step() == expected  # from 9.8, by a twentieth of the slots a step
    assert limit.step() == 20
    assert limit.step() == 20


def answer_many(limit: LoadLimit, count: int, seconds: float, now: float = 0.0, size: int = 64) -> None:
    for _ in range(count):
        limit.answered(size, seconds, now)


def test_calls_that_take_much_longer_than_lately_mean_overload_but_take_half_at_most() -> None:
    limit = LoadLimit(10)
    answer_many(limit, 20, 0.2)
    assert limit.step() == 10
    answer_many(limit, 20, 0.5)
    assert limit.step() == 7
    answer_many(limit, 20, 0.5)
    assert limit.step() == 5
    answer_many(limit, 20, 0.5)
    assert limit.step() == 5
    answer_many(limit, 20, 0.3)
    assert limit.step() == 5  # 5.5
    assert limit.step() == 6


def test_few_slow_calls_hold_the_limit_until_there_are_enough() -> None:
    limit = LoadLimit(10)
    answer_many(limit, 20, 0.2)
    limit.step()
    answer_many(limit, 20, 0.5)
    assert limit.step() == 7
    answer_many(limit, CALLS_MIN - 1, 0.5)
    assert [limit.step() for _ in range(5)] == [7] * 5
    answer_many(limit, 1, 0.5)
    assert limit.step() == 5


def test_after_a_while_what_was_slow_is_normal() -> None:
    times = ServiceTimes()

    def are_slow(seconds: float, now: float) -> bool | None:
        for _ in range(CALLS_MIN):
            times.add(64, seconds, now)
        return times.verdict()

    assert are_slow(0.2, 0.0) is False
    assert are_slow(1.0, 1.0) is True
    assert are_slow(1.0, WINDOW_S + 1) is True  # the window before still counts
    assert are_slow(1.0, 2 * WINDOW_S + 2) is False
    assert are_slow(0.2, 2 * WINDOW_S + 3) is False
    assert are_slow(1.0, 9 * WINDOW_S) is False  # nothing is known of a night ago


def test_where_load_is_reported_time_does_not_count() -> None:
    limit = LoadLimit(10)
    limit.report(0.5)
    answer_many(limit, 20, 0.2)
    limit.step()
    answer_many(limit, 20, 2.0)
    assert limit.step() == 10


@pytest.mark.parametrize(
    ("text", "load"),
    [
        ("0.93", 0.93),
        (" 0 ", 0.0),
        ("1", 1.0),
        ("93", 0.93),
        ("93%", 0.93),
        ("0.5%", 0.005),
        ("150", 1.5),
        ("1e1", 0.1),
        ("", None),
        ("-1", None),
        ("nan", None),
        ("inf", None),
        ("high", None),
        ("0.9, 0.1", None),
    ],
)
def test_a_header_s_load(text: str, load: float | None) -> None:
    assert parse_load(text) == (pytest.approx(load) if load is not None else None)


TRITON = """\
# HELP nv_gpu_utilization GPU utilization rate [0.0 - 1.0)
# TYPE nv_gpu_utilization gauge
nv_gpu_utilization{gpu_uuid="GPU-1"} 0.310000
nv_gpu_utilization{gpu_uuid="odd } 7 {"} 0.970000 1700000000000
nv_gpu_utilization_total 5
nv_gpu_power_usage{gpu_uuid="GPU-1"} 61
te_queue_size 37
te_batch_size\t12
nv_broken{a="b"}
nv_text NaN
nv_endless +Inf
"""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nv_gpu_utilization", 0.97),
        ("te_queue_size", 37.0),
        ("te_batch_size", 12.0),
        ("te_queue", None),
        ("nv_broken", None),
        ("nv_text", None),
        ("nv_endless", None),
        ("absent", None),
    ],
)
def test_a_metric_s_value_is_the_largest_of_its_series(name: str, value: float | None) -> None:
    assert metric_value(TRITON, name) == value
