"""U1, U4, U5: bad endpoints, poison, a slow endpoint."""

from pathlib import Path

import pytest

from support.scenarios.resilience import ALL_BAD, ONE_BAD, all_are_bad, one_is_slow, one_of_three_is_bad, poison


@pytest.mark.parametrize("behaviour", ONE_BAD)
async def test_one_bad_endpoint_of_three_is_not_noticed(tmp_path: Path, behaviour: str) -> None:
    seen = await one_of_three_is_bad(tmp_path, behaviour, per_s=250, seconds=20)
    passed = seen.verdict.is_clean and seen.succeeded >= 0.999
    what = f"one of three: {behaviour}: {seen.succeeded:.2%} succeed, {seen.statuses}"
    seen.verdict.report("U1", what, passed=passed)
    assert passed


@pytest.mark.parametrize("behaviour", ALL_BAD)
async def test_all_bad_fails_fast_and_spares_the_upstream(tmp_path: Path, behaviour: str) -> None:
    seen = await all_are_bad(tmp_path, behaviour, per_s=150, seconds=20)
    passed = (
        seen.verdict.is_clean
        and seen.statuses <= {502, 503, 504}
        and seen.refusal_ms <= 50
        and seen.sends_per_request <= 1.2
    )
    what = (
        f"all: {behaviour}: refused within {seen.refusal_ms:.1f} ms (p99), {seen.sends_per_request:.2f} sends a "
        f"request, back {seen.back_s:.1f} s after the upstream"
    )
    seen.verdict.report("U1", what, passed=passed)
    assert passed


async def test_poison_harms_nobody_else(tmp_path: Path) -> None:
    seen = await poison(tmp_path, every=1000, per_s=500, seconds=20)
    passed = (
        seen.verdict.is_clean
        and seen.innocents_ok >= 0.999
        and seen.poison_refused == 1.0
        and seen.poison_sends_max <= 7
        and seen.dead_letters == 10
        and seen.breakers == {"closed"}
    )
    what = (
        f"poison, 1 in 1,000: {seen.innocents_ok:.2%} of the innocents succeed, {seen.dead_letters} dead letters after "
        f"at most {seen.poison_sends_max} sends, breakers {'/'.join(seen.breakers)}, mean batch {seen.mean_batch:.1f}"
    )
    seen.verdict.report("U4", what, passed=passed)
    assert passed


async def test_a_slow_endpoint_gets_what_it_can_serve(tmp_path: Path) -> None:
    seen = await one_is_slow(tmp_path, per_s=135, seconds=20)
    passed = seen.verdict.is_clean and seen.succeeded >= 0.999 and seen.share < 0.08
    what = (
        f"ten times slower: {seen.share:.1%} of the inputs (4.8 % is what it can serve), {seen.succeeded:.2%} succeed"
    )
    seen.verdict.report("U5", what, passed=passed)
    assert passed
