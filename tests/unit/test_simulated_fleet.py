"""`carpool simulate --scale`: a fleet that follows the rules of scaling, small, on virtual time.

Each of the four cases of docs/scaling-rules.md, with the GPUs' start-up of three minutes.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from carpool.cli import main
from carpool.core import scaling
from carpool.settings import Settings
from carpool.settings.schema import BatchingSettings
from carpool.tools.bench.run import TierLoad
from carpool.tools.bench.tally import Segment
from carpool.tools.simulate import Away, Gpus, Load, Moment, Simulated, Simulation, picture
from carpool.tools.simulated_fleet import Scaled, steady_shares
from carpool.upstream.simulated import SimulationSettings

# A GPU serves one input in two seconds: with 5/s, 14 GPUs are busy for 71 % of their time, and 13 for 77 %.
EACH = SimulationSettings(latency_ms=2000.0)
RATE, ENOUGH = 5.0, 14
# How long a GPU takes to come; the 15 s that a need must last, and a bit; whole GPUs.
START_UP_S, SOON_S, TOLERANCE = 180.0, 25.0, 0.02
# Where the rules' five minutes and their hour would take too long, they and the start-up are so many times as quick.
QUICKER = 10
TIERS = [TierLoad("enterprise", 10, ""), TierLoad("paid", 30, ""), TierLoad("free", 60, "")]


def run(
    segments: Sequence[Segment],
    *,
    away: Mapping[int, Sequence[Away]] | None = None,
    count: int = ENOUGH,
    start_up_s: float = START_UP_S,
) -> tuple[Simulated, Scaled]:
    load = Load(segments=list(segments), warm_s=20.0, tiers=TIERS, payload_bytes=8, arrivals="uniform")
    gpus = Gpus(count=count, each=EACH, away=away or {}, start_up_s=start_up_s)
    found = Simulation(Settings(batching=BatchingSettings(max_batch=1)), load, gpus).run()
    assert found.scaled is not None
    return found, found.scaled


def busy_at_end(found: Simulated, seconds: float) -> list[float]:
    return [each.busy_share for each in found.moments if each.at_s > found.seconds - seconds]


def is_in_band(shares: Sequence[float]) -> bool:
    return bool(shares) and all(0.70 - TOLERANCE <= each <= 0.80 + TOLERANCE for each in shares)


def numbers(scaled: Scaled, first: int = ENOUGH) -> list[int]:
    return [first, *(each.gpus_wanted for each in scaled.changes)]


@pytest.fixture
def _quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COOLDOWN_S", "PEAK_S", "BUCKET_S"):
        monkeypatch.setattr(scaling, name, getattr(scaling, name) / QUICKER)


def test_traffic_that_doubles_within_a_minute() -> None:
    ramp = [Segment(RATE * (1 + step / 4), 15.0) for step in (1, 2, 3)]
    found, scaled = run([Segment(RATE, 60.0), *ramp, Segment(2 * RATE, 600.0)])
    wanted = numbers(scaled)
    assert wanted == sorted(wanted), "up only"
    assert 25 <= wanted[-1] <= 28  # 20 are busy all the time
    last = scaled.changes[-1]
    assert last.at_s <= 60 + 45 + SOON_S
    # They are there three minutes later, and nobody is refused from then on.
    assert all(each.gpus_there == wanted[-1] for each in found.moments if each.at_s > last.at_s + START_UP_S + 10)
    assert not any(each.refused for each in found.moments if each.at_s > last.at_s + START_UP_S + 30)
    assert is_in_band(busy_at_end(found, 200.0))
    shed = {name: tier.shed / tier.offered for name, tier in found.tiers.items()}
    assert shed["enterprise"] == 0.0
    assert shed["free"] > 0.1


@pytest.mark.usefixtures("_quicker")
def test_three_times_the_mean_for_an_hour() -> None:
    segments = [Segment(RATE, 60.0), Segment(3 * RATE, 360.0), Segment(RATE, 720.0)]
    found, scaled = run(segments, start_up_s=START_UP_S / QUICKER)
    wanted = numbers(scaled)
    most = wanted.index(max(wanted))
    assert wanted[:most] == sorted(wanted[:most])
    assert 38 <= max(wanted) <= 42  # 30 are busy all the time
    assert wanted[most:] == sorted(wanted[most:], reverse=True), "no oscillation"
    steps = list(pairwise(scaled.changes[most - 1 :]))
    assert all(before.gpus_wanted - after.gpus_wanted <= max(1, before.gpus_wanted // 5) for before, after in steps)
    assert all(after.at_s - before.at_s >= 300 / QUICKER for before, after in steps)
    # Half of what the peak needed for an hour, and then what is needed.
    held = [each.gpus_wanted for each in found.moments if 420 < each.at_s < 420 + 330]
    assert min(held) == 20  # 40 GPUs would have been busy for 75 %
    assert 13 <= wanted[-1] <= 14
    assert scaled.steady_busy_share is not None
    assert is_in_band([scaled.steady_busy_share])
    assert is_in_band(busy_at_end(found, 100.0))


def test_half_of_the_gpus_die() -> None:
    dead = {number: [Away(120.0)] for number in range(1, 8)}
    found, scaled = run([Segment(RATE, 700.0)], away=dead)
    # Machines that died are replaced, and the same number is wanted: the load is as it was.
    assert set(numbers(scaled)) == {ENOUGH}
    assert min(each.gpus_there for each in found.moments) == ENOUGH - 7
    assert all(each.gpus_there == ENOUGH for each in found.moments if each.at_s > 120 + START_UP_S + 10)
    assert is_in_band(busy_at_end(found, 200.0))
    shed = {name: tier.shed / tier.offered for name, tier in found.tiers.items()}
    assert shed["enterprise"] < 0.02 < shed["free"]


@pytest.mark.usefixtures("_quicker")
def test_a_day_with_a_peak() -> None:
    day = [3.0, 2.0, 3.0, 5.0, 6.0, 8.0, 10.0, 7.0, 4.0]
    found, scaled = run([Segment(rate, 200.0) for rate in day], count=8, start_up_s=START_UP_S / QUICKER)
    wanted = [each.gpus_wanted for each in found.moments]
    # Down to the night, up to the peak, down again, and nothing between.
    night, peak = wanted.index(min(wanted)), wanted.index(max(wanted))
    assert night < peak
    assert wanted[:night] == sorted(wanted[:night], reverse=True)
    assert wanted[night:peak] == sorted(wanted[night:peak])
    assert wanted[peak:] == sorted(wanted[peak:], reverse=True)
    assert 5 <= min(wanted) <= 6
    assert 25 <= max(wanted) <= 28
    assert scaled.steady_busy_share is not None
    assert is_in_band([scaled.steady_busy_share])


def moment(at_s: float, wanted: int, there: int, busy: float = 0.75) -> Moment:
    return Moment(at_s, 1.0, 1.0, 0.0, None, there * busy, wanted, there, busy)


def test_what_is_steady() -> None:
    schedule = [Segment(10.0, 3600.0), Segment(30.0, 3600.0), Segment(10.0, 4 * 3600.0)]

    def is_steady(at_s: float, *moments: Moment) -> bool:
        return 0.123 in steady_shares(schedule, [*moments, moment(at_s, 10, 10, 0.123)])

    # The first rate came before, too.
    assert is_steady(60.0)
    assert is_steady(3600.0)
    # A GPU that is wanted is not there; the number changed four minutes ago, and six.
    assert steady_shares(schedule, [moment(60.0, 10, 9)]) == []
    assert not is_steady(500.0, moment(260.0, 11, 11))
    assert is_steady(600.0, moment(240.0, 11, 11))
    # 20 minutes after a change; and behind a peak an hour more.
    assert not is_steady(3600.0 + 1199.0)
    assert is_steady(3600.0 + 1201.0)
    assert not is_steady(7200.0 + 4799.0)
    assert is_steady(7200.0 + 4801.0)


def test_the_command_tells_how_many_and_draws_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["simulate", "--scale", "--start-up", "20", "--schedule", "20:30s,40:60s", "--gpus", "6"]
    arguments += ["--gpu", "sim:?latency_ms=200", "--set", "batching.max_batch=1", "--arrivals", "uniform"]
    assert main([*arguments, "--svg", "run.svg"]) == 0
    printed = capsys.readouterr().out
    assert "GPUs in the mean, 10 at most" in printed
    assert printed.splitlines()[-1].split()[:1] == ["0:01:30"]
    assert printed.splitlines()[-1].split()[-3:-1] == ["10", "10"]
    drawn = Path("run.svg").read_text()
    assert "<title>wanted</title>" in drawn
    assert main([*arguments, "--json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=Simulated)
    assert found.scaled is not None
    assert [each.gpus_wanted for each in found.scaled.changes][-1] == 10
    assert "come" in found.scaled.changes[-1].why
    assert picture(found) == drawn


def test_gpus_too_many_go_at_once_and_those_that_come_back_are_not_replaced() -> None:
    found, scaled = run([Segment(RATE, 400.0)], away={1: [Away(50.0, 100.0)]}, count=20)
    assert scaled.gpus_most == 20
    first = scaled.changes[0]
    assert (first.gpus_wanted, first.at_s >= 270) == (16, True)
    assert found.moments[-1].gpus_there == 16
