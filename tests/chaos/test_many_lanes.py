"""L1: one client that never repeats its parameters.

The load runs on uvloop, beside Carpool on a few cores: it costs half as much there.
"""

from pathlib import Path

import pytest
import uvloop

from support.scenarios.many_lanes import many_parameter_sets
from support.stage import Broker

PER_S, SECONDS = 600, 15
RATIO_MAX = 2.0
# So much slower are the slowest of a few hundred requests by chance.
NOISE_MS = 50.0


@pytest.mark.timeout(400)
@pytest.mark.parametrize("broker", ["embedded", "redis"])
def test_a_client_that_never_repeats_its_parameters(tmp_path: Path, broker: Broker) -> None:
    lanes = uvloop.run(many_parameter_sets(tmp_path, broker, PER_S, SECONDS))
    one, many = lanes
    before, clients = one.clients(), many.clients()
    usual, usual_before = many.usual_p99_ms(), one.usual_p99_ms()
    passed = (
        one.run.verdict.is_clean
        and many.run.verdict.is_clean
        and all(client.statuses.keys() == {200} for client in clients.values())
        and usual <= RATIO_MAX * usual_before + NOISE_MS
        and (lanes.is_disturbed or all(c.p99_ms <= RATIO_MAX * before[n].p99_ms + NOISE_MS for n, c in clients.items()))
        and many.redis_cpu_s <= RATIO_MAX * one.redis_cpu_s
    )
    figures = "; ".join(f"{name}: {client} (before: {before[name]})" for name, client in clients.items())
    what = (
        f"one client at {PER_S}/s with distinct parameters, {broker}: p99 of the others in a usual second {usual:.0f} "
        f"ms (before, with one set of them: {usual_before:.0f} ms), CPU of Redis {many.redis_cpu_s:.1f} s (before: "
        f"{one.redis_cpu_s:.1f} s); {figures}; {many.run.about} (before: {one.run.about})"
    )
    many.run.verdict.report("L1", what, passed=passed)
    assert passed
