"""O5: one owner at ten times its rate limit, one at 99 % of it, over several gateways."""

from pathlib import Path

import pytest
import uvloop

from support.scenarios.rate_limits import owners_over_gateways

SECONDS = 60.0


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("gateways", "per_minute", "burst"), [(2, 1000, 100), (8, 60, 10)])
def test_one_budget_over_gateways(tmp_path: Path, gateways: int, per_minute: int, burst: int) -> None:
    seen = uvloop.run(owners_over_gateways(tmp_path, gateways, per_minute, burst, SECONDS))
    most = per_minute * 1.10 + burst
    passed = (
        seen.verdict.is_clean
        and seen.greedy.keys() == {200, 429}
        # What is its own it gets; of the burst, too.
        and 0.95 * per_minute <= seen.greedy_most <= most
        and seen.steady.keys() == {200}
        and seen.unclear == 0
        and not seen.errors
    )
    what = (
        f"{gateways} gateways, {per_minute} a minute, burst {burst}: ten times the limit {dict(seen.greedy)}, at most "
        f"{seen.greedy_most} in 60 s (bound {most:g}); 99 % of it {dict(seen.steady)}; Redis asked {seen.asks} times"
    )
    seen.verdict.report("O5", what, passed=passed)
    assert passed
