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
    others = clients.keys() - {"the flood"}
    is_as_quick = all(clients[name].p99_ms <= RATIO_MAX * before[name].p99_ms + NOISE_MS for name in others)
    passed = (
        one.run.verdict.is_clean
        and many.run.verdict.is_clean
        and all(clients[name].statuses.keys() == {200} for name in others)
        and (is_as_quick or lanes.is_disturbed)
        and many.redis_cpu_s <= RATIO_MAX * one.redis_cpu_s
    )
    figures = "; ".join(f"{name}: {client} (before: {before[name]})" for name, client in clients.items())
    what = (
        f"one client at {PER_S}/s with distinct parameters, {broker} (before: with one set of them): CPU of Redis "
        f"{many.redis_cpu_s:.1f} s (before: {one.redis_cpu_s:.1f} s); {figures}; {many.run.about} (before: "
        f"{one.run.about}){'; p99 not judged, other programs were in the way' * lanes.is_disturbed}"
    )
    many.run.verdict.report("L1", what, passed=passed)
    assert passed
