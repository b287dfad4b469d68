"""`carpool simulate`: figures that are known beforehand, and what is refused. All of it on virtual time."""

import json
import logging
import re
import shlex
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest

from carpool.cli import main
from carpool.settings import Settings
from carpool.settings.schema import BatchingSettings, SheddingSettings
from carpool.tools.bench.run import TierLoad
from carpool.tools.bench.sizes import parse_sizes
from carpool.tools.bench.tally import Segment
from carpool.tools.simulate import Away, Gpus, Load, Simulated, Simulation, parse_away
from carpool.upstream.simulated import SimulationSettings
from support.doc_blocks import blocks_of

DOCS = Path(__file__).parents[2] / "docs"
TIERS = [TierLoad("enterprise", 10, ""), TierLoad("paid", 30, ""), TierLoad("free", 60, "")]
# Of a batch of 64.
CALL_MS = 50.0
CAPACITY_RPS = 4 * 64 / (CALL_MS / 1000)


def run(
    rate: float,
    seconds: float = 1.0,
    *,
    settings: Settings | None = None,
    gpus: Gpus | None = None,
    moments: int = 0,
    **load: Any,
) -> Simulated:
    """Four GPUs."""
    gpus = gpus or Gpus(count=4, each=SimulationSettings(latency_ms=CALL_MS))
    segments = [Segment(rate, seconds)]
    return Simulation(settings or Settings(), Load(segments=segments, **load), gpus, moments=moments).run()


@pytest.fixture
def simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command, where nothing is configured."""
    monkeypatch.chdir(tmp_path)

    def simulated(*arguments: str) -> tuple[int, str, str]:
        status = main(["simulate", *arguments])
        return status, *capsys.readouterr()

    return simulated


def test_the_same_seed_gives_the_same_figures() -> None:
    gpus = Gpus(count=2, each=SimulationSettings(latency_ms=CALL_MS, jitter=0.2, error_rate=0.1))
    load: dict[str, Any] = {"tiers": TIERS, "sizes": parse_sizes("lognormal:240,0.9", 1)}
    first = run(1000.0, gpus=gpus, **load)
    assert first == run(1000.0, gpus=gpus, **load)
    assert first != run(1000.0, gpus=gpus, **load, seed=2)


def test_a_quiet_load_takes_the_time_of_a_call() -> None:
    found = run(20.0, 10.0)
    assert found.all.ok == found.all.offered > 150
    assert found.all.latency_ms.p50 == pytest.approx(CALL_MS, rel=0.1)
    assert found.batch_mean is not None and found.batch_mean < 1.5
    # 20 calls a second of 50 ms, over 4 GPUs; fewer where two shared one.
    assert found.busy_share == pytest.approx(0.25, abs=0.05)


def test_at_twice_the_capacity_all_of_it_is_used_and_the_rest_refused() -> None:
    found = run(2 * CAPACITY_RPS, 1.5, warm_s=1.5)
    assert found.all.goodput >= 0.95 * CAPACITY_RPS
    assert found.all.shed == found.all.offered - found.all.ok > 0.4 * found.all.offered
    assert found.busy_share > 0.99 and found.batch_mean is not None and found.batch_mean > 60
    assert found.all.latency_ms.p99 is not None and found.all.latency_ms.p99 < 1000


def test_the_lowest_tier_is_refused_first() -> None:
    found = run(2 * CAPACITY_RPS, 1.5, warm_s=1.0, tiers=TIERS)
    enterprise, paid, free = (found.tiers[tier.name] for tier in TIERS)
    assert enterprise.shed == paid.shed == 0 < free.shed == found.all.shed
    assert free.ok > 0
    assert enterprise.latency_ms.p99 is not None and free.latency_ms.p99 is not None
    assert enterprise.latency_ms.p99 < free.latency_ms.p99
    counts = [(tier.ok, tier.shed, tier.timed_out, tier.failed) for tier in found.tiers.values()]
    assert sum(map(sum, counts)) == found.all.offered == sum(tier.offered for tier in found.tiers.values())


def test_where_gpus_pad_batches_of_a_size_serve_more() -> None:
    gpus = Gpus(each=SimulationSettings(latency_ms=2.0, padded_ms_per_kb=0.15, slots=2))
    load: dict[str, Any] = {"sizes": parse_sizes("lognormal:240,0.875,2048", 1), "warm_s": 1.5}
    auto, off = (
        run(12_000.0, settings=Settings(batching=BatchingSettings(fit=fit)), gpus=gpus, **load)
        for fit in ("auto", "off")
    )
    assert auto.all.goodput > 1.3 * off.all.goodput


def test_nobody_is_failed_by_a_gpu_that_dies_beside_others() -> None:
    half = 0.5 * CAPACITY_RPS
    gpus = Gpus(count=4, each=SimulationSettings(latency_ms=CALL_MS), away={1: [Away(0.5, 1.5)]})
    found = run(half, 2.0, warm_s=0.5, gpus=gpus)
    assert found.all.ok == found.all.offered
    # Its own time, less what it was dead.
    assert found.busy_share < run(half, 2.0, warm_s=0.5).busy_share
    alone = Gpus(each=SimulationSettings(latency_ms=CALL_MS), away={1: [Away(0.5)]})
    assert 0 < run(100.0, gpus=alone).all.ok < 60


def test_without_shedding_requests_wait_as_long_as_they_may() -> None:
    found = run(1.5 * CAPACITY_RPS, 1.0, settings=Settings(shedding=SheddingSettings(mode="off")))
    assert found.all.shed == 0
    assert found.all.latency_ms.max is not None and found.all.latency_ms.max > 400


def test_the_page_shows_what_its_command_prints(simulated: Callable[..., tuple[int, str, str]]) -> None:
    command, shown, *_ = (block.text for block in blocks_of(DOCS / "simulate.md"))
    program, name, *arguments = shlex.split(command)
    status, printed, _ = simulated(*arguments)
    assert (program, name, status) == ("carpool", "simulate", 0)
    on_page, now = (
        [re.split(r"  +", line.strip()) for line in text.strip("\n").splitlines()] for text in (shown, printed)
    )
    assert on_page[0] == now[0]
    assert [row[:3] for row in on_page] == [row[:3] for row in now]
    # What the engine made of it may change a little before the page has to.
    assert [_rps(row[3]) for row in on_page[1:]] == [pytest.approx(_rps(row[3]), rel=0.1) for row in now[1:]]


def _rps(cell: str) -> float:
    return float(cell.removesuffix("/s").replace(",", ""))


@pytest.mark.parametrize("rate", [500.0, 2000.0, 8000.0])
def test_adaptive_waits_less_than_fixed_and_serves_as_much(rate: float) -> None:
    """What decision 3 wants of it, on 32 GPUs of 200 ms."""
    fixed, adaptive = (
        run(
            rate,
            min(4.0, 8000 / rate),
            warm_s=1.0,
            gpus=Gpus(count=32),
            settings=Settings(batching=BatchingSettings(policy=policy)),
        )
        for policy in ("fixed", "adaptive")
    )
    assert fixed.queue_ms.p50 and adaptive.queue_ms.p50 and fixed.queue_ms.p99 and adaptive.queue_ms.p99
    assert adaptive.queue_ms.p50 <= fixed.queue_ms.p50 / 3 or rate > 2000
    assert adaptive.queue_ms.p99 <= fixed.queue_ms.p99 + 2
    assert adaptive.all.ok >= 0.995 * fixed.all.ok


def test_a_gpu_may_start_late_and_die_twice() -> None:
    away = parse_away(["2@1..2", "2@3"], ["2@0.5"], 2)
    assert away == {2: [Away(-inf, 0.5), Away(1.0, 2.0), Away(3.0, inf)]}
    gpus = Gpus(count=2, each=SimulationSettings(latency_ms=CALL_MS), away=away)
    found = run(200.0, 4.0, warm_s=1.0, gpus=gpus, moments=8)
    assert found.all.ok == found.all.offered
    for number in (0, 2, 3, 6, 7):
        assert 0 < found.moments[number].gpus_busy <= 1


GPU = "sim:?latency_ms=50"
SMALL = ("--rate", "200", "--seconds", "1", "--warm", "0.5", "--gpu", GPU)


def test_values_of_a_setting_are_compared_in_one_table(simulated: Callable[..., tuple[int, str, str]]) -> None:
    compare = (*SMALL, "--tiers", "paid=30,free=70", "--compare", "policy=fixed,adaptive,pid")
    status, table, complaint = simulated(*compare)
    assert (status, complaint) == (0, "")
    heading, *rows = (re.split(r"  +", line.strip()) for line in table.splitlines())
    assert heading[:4] == ["batching.policy", "tier", "offered", "served"]
    assert heading[-5:] == ["503", "other errors", "mean batch", "GPUs busy", "a million"]
    policies = ("fixed", "adaptive", "pid")
    assert [row[:2] for row in rows] == [[policy, tier] for policy in policies for tier in ("all", "paid", "free")]
    assert len({row[2] for row in rows}) == 3  # the same requests
    status, text, _ = simulated(*compare, "--json")
    found = json.loads(text)
    assert (status, found["compared"], tuple(found["runs"])) == (0, "batching.policy", policies)
    assert found["runs"]["fixed"]["all"]["ok"] == found["runs"]["fixed"]["all"]["offered"]


def test_settings_come_from_all_of_their_places(
    simulated: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("carpool.toml").write_text('[batching]\nmax_batch = 4\n[[tiers]]\nname = "all-alike"\ntarget_ms = 100\n')
    _, text, _ = simulated(*SMALL, "--gpus", "1", "--json")
    found = json.loads(text)
    assert found["batch_mean"] <= 4 and list(found["tiers"]) == ["all-alike"]
    monkeypatch.setenv("CARPOOL_BATCHING_MAX_BATCH", "3")
    assert json.loads(simulated(*SMALL, "--json")[1])["batch_mean"] <= 3
    assert json.loads(simulated(*SMALL, "--set", "batching.max_batch=1", "--json")[1])["batch_mean"] == 1


def test_figures_tell_of_gpus_that_fail_and_no_log_does(
    simulated: Callable[..., tuple[int, str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    faulty = (*SMALL, "--gpu", GPU + "&short_rate=0.5", "--dies", "1@0.5")
    assert json.loads(simulated(*faulty, "--json")[1])["all"]["failed"] > 0
    assert caplog.records == []
    logging.getLogger("carpool").warning("heard again")
    assert len(caplog.records) == 1


def test_a_schedule_takes_the_place_of_rate_and_seconds(simulated: Callable[..., tuple[int, str, str]]) -> None:
    _, text, _ = simulated("--schedule", "100:500ms,300:1s", "--warm", "1", "--gpu", GPU, "--json")
    found = json.loads(text)
    assert found["seconds"] == 1.5
    assert found["all"]["offered"] == pytest.approx(350, rel=0.2)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--rate", "0"], "--rate and --seconds: '0.0:30.0' never sends anything"),
        (["--rate", "nan"], "--rate and --seconds: 'nan' is not a rate"),
        (["--rate", "2e6"], "a rate is over 1,000,000/s; give a lower one"),
        (["--seconds", "-1"], "'-1.0' is not a time above 0"),
        (["--seconds", "1e7"], "it goes on for over 2,592,000 s; give less"),
        (["--warm", "-1"], "--warm"),
        (["--warm", "nan"], "--warm"),
        (["--rate", "1e6", "--seconds", "1000"], "at most 100,000,000 may: give a lower rate, or less time"),
        (["--schedule", "10"], "--schedule: '10' is not RATE:TIME"),
        (["--gpus", "0"], "--gpus"),
        (["--gpu", "http://gpu/"], "--gpu: a simulated GPU looks like sim:"),
        (["--gpu", "sim:?speed=1"], "--gpu: unknown key 'speed'"),
        (["--dies", "1"], "--dies and --starts: '1' is not GPU@SECOND"),
        (["--dies", "5@3"], "'5@3': there are GPUs 1 to 4 (--gpus)"),
        (["--dies", "1@3..2"], "'1@3..2': a GPU comes back after it has died"),
        (["--tiers", "free=:70"], "--tiers: 'free=:70' is not NAME=SHARE"),
        (["--tiers", "gold=1"], "--tiers: there is no tier 'gold'; there are enterprise, paid, free"),
        (["--owners", "0"], "--owners"),
        (["--sizes", "normal"], "--sizes: 'normal' is not fixed"),
        (["--payload-bytes", "1"], "--payload-bytes"),
        (["--seed", "-1"], "--seed"),
        (["--set", "fixed"], "--set: 'fixed' is not SECTION.KEY=VALUE"),
        (["--set", "cache.ttl_s=1"], "--set: 'cache.ttl_s' is no setting that a simulation goes by; these are: batch"),
        (
            ["--set", "batching.polcy=fixed"],
            "batching.polcy (flag --set or --compare) is not a known key; did you mean batching.policy?",
        ),
        (["--compare", "batching.policy=fixed"], "--compare: 'batching.policy=fixed' must have 2 to 20 different"),
        (["--compare", "batching.policy=fixed,fast"], 'batching.policy (flag --set or --compare) must be "adaptive"'),
    ],
)
def test_what_cannot_be_used_is_refused(
    simulated: Callable[..., tuple[int, str, str]], arguments: list[str], complaint: str
) -> None:
    status, printed, told = simulated(*arguments)
    assert (status, printed, told.count("\n")) == (2, "", 1)
    assert complaint in told


def test_a_setting_that_a_model_has_itself_is_not_set_in_vain(simulated: Callable[..., tuple[int, str, str]]) -> None:
    Path("carpool.toml").write_text('[models.one]\npolicy = "pid"\n')
    status, _, told = simulated(*SMALL, "--set", "batching.policy=fixed")
    assert status == 2
    assert "batching.policy would change nothing, as the file has models.one.policy: take that out of it" in told
