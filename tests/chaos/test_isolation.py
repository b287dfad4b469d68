"""U4, U6, U7 at the load that Carpool is built for: bad inputs, bad clients, a replica with the wrong model.

The load runs on uvloop, beside the gateway on a few cores: it costs half as much there.
"""

from pathlib import Path

import pytest
import uvloop

from support.scenarios.isolation import (
    bursts_with_invalid,
    one_bad_client,
    one_client_fails_always,
    poison_at_load,
    wrong_model_on_one,
)
from support.stage import Broker, Upstream

SECONDS = 20


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("every", "ok_min", "p90_ratio_max"), [(2000, 0.995, 1.2), (1000, 0.96, 1.5)])
@pytest.mark.parametrize("broker", ["embedded", "redis"])
def test_poison_at_78_percent_load(
    tmp_path: Path, broker: Broker, every: int, ok_min: float, p90_ratio_max: float
) -> None:
    clean, bad = uvloop.run(poison_at_load(tmp_path, broker, every, per_s=1000, seconds=30))
    before, innocents = clean.innocents, bad.innocents
    ratio = innocents.p90_ms / before.p90_ms
    passed = (
        clean.verdict.is_clean
        and bad.verdict.is_clean
        and innocents.ok >= ok_min
        and ratio <= p90_ratio_max
        and (every < 2000 or innocents.p99_ms <= 1800)
        and bad.breakers == {"closed"}
    )
    what = (
        f"poison, 1 in {every} at 78 % load, {broker}: innocents {innocents}, p90 {ratio:.2f} x, worst client "
        f"{bad.worst_client()}; poison {bad.bad.statuses}; {bad.about}; without poison {before}; {clean.about}"
    )
    bad.verdict.report("U4", what, passed=passed)
    assert passed


@pytest.mark.parametrize("share", [0.3, 0.5])
@pytest.mark.parametrize("kind", ["sim", "http"])
def test_bursts_in_which_many_inputs_are_refused(tmp_path: Path, kind: Upstream, share: float) -> None:
    seen = uvloop.run(bursts_with_invalid(tmp_path, kind, share, seconds=SECONDS))
    passed = (
        seen.verdict.is_clean
        and seen.innocents.ok == 1.0
        and seen.bad.statuses.keys() == {422}
        and seen.breakers == {"closed"}
    )
    bursts = len(seen.answers) // 64
    what = (
        f"{bursts} bursts of 64, {share:.0%} refused with 400, {kind}: innocents {seen.innocents}; refused {seen.bad}; "
        f"{seen.calls / bursts:.0f} calls a burst, {seen.about}"
    )
    seen.verdict.report("U6", what, passed=passed)
    assert passed


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["sim", "http"])
def test_one_client_of_ten_sends_nothing_that_is_valid(tmp_path: Path, kind: Upstream) -> None:
    clean, bad = uvloop.run(one_bad_client(tmp_path, kind, per_s=640, seconds=SECONDS))
    before, nine = clean.innocents_warm, bad.innocents_warm
    ratio = nine.p99_ms / before.p99_ms
    passed = (
        clean.verdict.is_clean
        and bad.verdict.is_clean
        and nine.ok >= 0.999
        and ratio <= 1.2
        and bad.breakers == {"closed"}
    )
    what = (
        f"one of ten clients all bad (400) at 50 % load, {kind}: the nine after the first second {nine}, p99 "
        f"{ratio:.2f} x, worst client {bad.worst_client(after_s=1.0)}; the one {bad.bad}; {bad.about}; without "
        f"{before}; {clean.about}"
    )
    bad.verdict.report("U6", what, passed=passed)
    assert passed


def test_a_replica_with_the_wrong_model_is_left_alone(tmp_path: Path) -> None:
    seen = uvloop.run(wrong_model_on_one(tmp_path, per_s=300, seconds=SECONDS))
    warm = seen.run.innocents_warm
    passed = seen.run.verdict.is_clean and warm.ok >= 0.999 and seen.run.dead_letters == 0
    what = (
        f"one of three with the wrong model: after the first second {warm}; from the start "
        f"{seen.run.innocents.statuses}; {seen.run.dead_letters} dead letters, {seen.share_warm:.1%} of the inputs "
        f"still sent to it; {seen.run.about}"
    )
    seen.run.verdict.report("U6", what, passed=passed)
    assert passed


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["sim", "http"])
def test_one_client_whose_inputs_all_fail_after_a_quiet_time(tmp_path: Path, kind: Upstream) -> None:
    seen = uvloop.run(one_client_fails_always(tmp_path, kind, quiet_s=10, seconds=60))
    passed = seen.verdict.is_clean and seen.innocents.statuses == {200: 30}
    what = (
        f"10/s that fail with 500 from one client after 10 quiet seconds, {kind}: the other {seen.innocents}; "
        f"the one {seen.bad.statuses}; {seen.about}"
    )
    seen.verdict.report("U7", what, passed=passed)
    assert passed
