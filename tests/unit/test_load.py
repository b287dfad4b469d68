"""What endpoints say of their load."""

import pytest

from carpool.upstream.load import metric_value, parse_load


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
