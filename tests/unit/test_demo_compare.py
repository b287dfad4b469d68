"""One by one beside carpool (`tools/demo/compare.py`)."""

import pytest

from carpool.tools.demo.compare import compare, fewest


@pytest.mark.parametrize("enough", [1, 2, 7, 40, 333])
def test_the_fewest_that_are_enough(enough: int) -> None:
    assert fewest(lambda count: count >= enough, 1.0) == max(enough, 2)


def test_carpool_needs_fewer_gpus() -> None:
    found = compare(400.0, 8, 200.0)
    # 400 a second for 200 ms: 80 calls at once.
    assert found.one_by_one.p99_ms is None
    assert 80 <= found.one_by_one.gpus_needed <= 100
    assert found.carpool.gpus_needed <= 4
    assert found.carpool.p99_ms is not None
    assert 200 <= found.carpool.p99_ms <= 500


def test_where_nobody_waits_both_are_the_same() -> None:
    found = compare(1.0, 8, 20.0)
    assert found.one_by_one.p50_ms == found.carpool.p50_ms == 20.0
