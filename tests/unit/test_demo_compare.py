"""One by one beside carpool (`tools/demo/compare.py`), and how the load is shared among tiers."""

from itertools import pairwise

import pytest

from carpool.tools.demo.compare import compare
from carpool.tools.demo.panel import tier_shares


def test_carpool_needs_fewer_gpus() -> None:
    found = compare(400.0, 8, 200.0)
    # 400 a second for 200 ms: 80 calls at once.
    assert found["one_by_one"]["p99_ms"] is None
    assert 80 <= found["one_by_one"]["gpus_needed"] <= 100
    assert found["carpool"]["gpus_needed"] <= 4
    assert found["carpool"]["p99_ms"] is not None
    assert 200 <= found["carpool"]["p99_ms"] <= 500


def test_where_nobody_waits_both_are_the_same() -> None:
    found = compare(1.0, 8, 20.0)
    assert found["one_by_one"]["p99_ms"] == found["carpool"]["p99_ms"] == 20.0


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_every_tier_has_load_and_the_lower_the_more(count: int) -> None:
    shares = tier_shares(count)
    assert len(shares) == count and sum(shares) == pytest.approx(1)
    assert shares[0] > 0 and all(higher < lower for higher, lower in pairwise(shares))
    assert count != 3 or shares == pytest.approx([0.1, 0.3, 0.6])
