"""What a load needs: figures that people have computed by hand, each line of them, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from carpool.broker.redis.fleet.memory import SHARE_MAX
from carpool.broker.redis.keys import SHARDS_MAX
from carpool.cli import main
from carpool.cli.plan import verified_lines
from carpool.core.scaling import BATCHER_RPS, GATEWAY_RPS
from carpool.settings import load_settings, total_timeout_s
from carpool.tools import plan
from carpool.tools.plan import Plan, PlanError, Sizing, Workload, make_plan, shown
from carpool.tools.verify import Checked, Verified, fewest

DOCS = Path(__file__).parents[2] / "docs"
WORK = Workload(
    rate=10_000.0,
    batch=64,
    batch_ms=200.0,
    target=0.75,
    peak=3.0,
    payload_kb=2.0,
    retention_s=3600.0,
    gpu_price=30_000.0,
    storage_price=0.02,
)
FIFTY_A_CALL = replace(WORK, batch=50, batch_ms=50.0, payload_kb=1.0, retention_s=10.0)
WAIT_CHARGED = replace(WORK, rate=1000.0, batch=32, batch_ms=75.0, target=0.7)


def says(sizing: Sizing, name: str) -> str:
    [line] = [line for line in sizing.lines if line.name == name]
    return line.says


class TestFiguresGiven:
    """The plans of docs/capacity.md; what is off in them is said there."""

    def test_64_inputs_in_200_ms(self) -> None:
        made = make_plan(WORK)
        assert made.rps_per_gpu == 320.0
        assert made.usual.batches_per_s == 156.25
        assert (made.usual.servers.gpus_bare, made.usual.mb_per_s, made.usual.storage_gb) == (32, 20.0, 72.0)
        assert made.usual.servers.gpus == 42
        assert (
            says(made.usual, "GPUs, no headroom") == "10,000/s / 320/s a GPU = 31.25 -> 32 GPUs, 97.66 % used"
        )  # 2 % of headroom

    def test_50_inputs_in_50_ms(self) -> None:
        made = make_plan(FIFTY_A_CALL)
        assert made.rps_per_gpu == 50 * 20
        assert (made.usual.servers.gpus_bare, made.usual.mb_per_s) == (10, 10.0)
        assert made.usual.storage_gb * 1000 == 100.0  # MB: ten seconds of them
        assert "-> 10 GPUs, 100 % used" in says(made.usual, "GPUs, no headroom")

    @pytest.mark.parametrize(("batch_ms", "rps", "gpus"), [(75.0, 426, (4, 34, 101)), (55.0, 581, (3, 25, 74))])
    def test_the_wait_charged_to_the_gpu_and_not(self, batch_ms: float, rps: int, gpus: tuple[int, ...]) -> None:
        small = make_plan(replace(WAIT_CHARGED, batch_ms=batch_ms))
        large = make_plan(replace(WAIT_CHARGED, batch_ms=batch_ms, rate=10_000.0))
        assert int(small.rps_per_gpu) == rps
        assert (small.usual.servers.gpus, large.usual.servers.gpus, large.peak.servers.gpus) == gpus


LINES = {
    "batches": "30,000/s / 64 = 468.75/s",
    "requests a GPU": "64 / 0.2 s = 320/s",
    "GPUs, no headroom": "30,000/s / 320/s a GPU = 93.75 -> 94 GPUs, 99.73 % used",
    "GPUs, with headroom": "30,000/s / (320/s a GPU x 0.75) = 125 -> 125 GPUs, 75 % used",
    "gateways": "30,000/s / (28,000/s a gateway x 0.75) = 1.43 -> 2 gateways, 53.57 % used",
    "batchers": "30,000/s / (40,000/s a batcher x 0.75) = 1 -> 1 batcher, 75 % used",
    "Redis": "30,000/s / 40,000/s a primary = 0.75 -> 1 primary, 75 % used",
    "Redis for tasks": "30,000/s / 2,000/s a primary = 15 -> 15 primaries, 100 % used",
    "Redis memory": "30,000/s x 4 s x 2.2 KB / 1,000 / 0.8 = 330 MB",
    "memory for tasks": "216 GB of outputs / 0.8 = 270 GB more",
    "Redis commands": "30,000/s x 2 + 468.75 batches/s x (3 x 16 shards + 2) = 83,437.5/s, an estimate",
    "bandwidth": "30,000/s x 2 KB / 1,000 = 60 MB/s in, and as much out",
    "storage": "60 MB/s x 3,600 s / 1,000 = 216 GB of outputs",
    "GPUs a year": "125 x 30,000 / 3 years = 1,250,000",
    "storage a year": "216 GB x 0.02 x 12 months = 51.84",
    "money a year": "1,250,000 + 51.84 = 1,250,051.84",
    "a million requests": "1,250,051.84 / (10,000/s x 31,536,000 s) x 1,000,000 = 3.96",
}


def test_each_line_at_the_peak() -> None:
    peak = make_plan(WORK).peak
    assert {line.name: line.says for line in peak.lines} == LINES
    assert (peak.money_per_year, round(peak.money_per_million, 2)) == (1_250_051.84, 3.96)
    assert (peak.redis.memory_mb, peak.redis.more_memory_gb_for_tasks) == (330.0, 270.0)


def test_a_batch_comes_from_no_more_shards_than_it_has_inputs() -> None:
    assert make_plan(replace(WORK, batch=1)).usual.redis.commands_per_s == 10_000 * (2 + 3 + 2)


def test_requests_of_slow_calls_are_held_for_longer() -> None:
    slow = make_plan(replace(WORK, batch_ms=30_000.0)).usual
    assert slow.redis.memory_mb == pytest.approx(10_000 * 31 * 2.2 / 1000 / 0.8)


def test_as_many_as_are_carried_exactly_are_enough() -> None:
    """0.7 * 320 is 224 and 0.1 + 0.2 is 0.3, also where floats are not."""
    made = make_plan(replace(WORK, rate=7 * 224.0, target=0.7, peak=1.1))
    assert (made.usual.servers.gpus, made.peak.servers.gpus) == (7, 8)
    assert make_plan(replace(WORK, rate=0.3, batch=1, batch_ms=10_000.0, target=1.0)).usual.servers.gpus == 3


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (10_000.0, "10,000"),
        (0.75, "0.75"),
        (1 / 3, "0.333"),
        (31.9999, "31.9999"),
        (1e15 + 0.5, "1,000,000,000,000,000.5"),
    ],
)
def test_a_number_is_whole_only_if_it_is(number: float, text: str) -> None:
    assert shown(number) == text


@pytest.mark.parametrize("name", Workload.__struct_fields__)
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 1e300, 1e-7])
def test_what_cannot_be_used_is_named(name: str, value: float) -> None:
    option = "--" + name.removesuffix("_s").replace("_", "-")
    with pytest.raises(PlanError, match=rf"^{option} is {re.escape(str(value))}: give .* from "):
        replace(WORK, **{name: value})


@pytest.mark.parametrize(("name", "value"), [("target", 1.01), ("peak", 0.99)])
def test_some_bounds_are_closer(name: str, value: float) -> None:
    with pytest.raises(PlanError, match=r"from .* to "):
        replace(WORK, **{name: value})


def test_what_was_measured_is_what_the_pages_say() -> None:
    tuning, scaling = ((DOCS / page).read_text(encoding="utf-8") for page in ("tuning.md", "scaling.md"))
    assert f"one gateway for each {GATEWAY_RPS:,} requests/s, one batcher for each {BATCHER_RPS:,}" in tuning
    assert f"Plan one Redis for {plan.REDIS_RPS:,}/s" in scaling
    assert "four primaries 10,000/s" in scaling
    assert "Plan with five primaries for that rate." in scaling
    assert plan.REDIS_TASKS_RPS * 5 == 10_000
    assert (float(plan.REDIS_MEMORY_SHARE), plan.SHARDS) == (SHARE_MAX, SHARDS_MAX)
    assert total_timeout_s(load_settings({}, environ={}, file=None)) == plan.TOTAL_TIMEOUT_S


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


class TestCommand:
    def test_its_defaults_are_the_design(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert json.loads(printed(capsys, "--json"))["workload"] == {
            name: getattr(WORK, name) for name in Workload.__struct_fields__
        }

    def test_the_page_shows_what_it_prints(self, capsys: pytest.CaptureFixture[str]) -> None:
        usual, peak, assumptions = printed(capsys).split("\n\n")
        assert f"```text\n{usual}\n```" in (DOCS / "capacity.md").read_text(encoding="utf-8")
        assert peak.startswith("At the peak\n")
        assert assumptions.splitlines() == list(Plan.__struct_defaults__[0])

    def test_json_has_the_figures_and_their_lines(self, capsys: pytest.CaptureFixture[str]) -> None:
        options = ("--rate", "1000", "--batch", "32", "--batch-ms", "75", "--target", "0.7", "--retention", "10m")
        made: dict[str, Any] = json.loads(printed(capsys, *options, "--json"))
        assert made["usual"]["servers"]["gpus"] == 4
        assert made["workload"]["retention_s"] == 600.0
        assert made["peak"]["lines"][0] == {"name": "batches", "says": "3,000/s / 32 = 93.75/s"}

    def test_without_a_peak_there_is_one_part(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "At the peak" not in printed(capsys, "--peak", "1")

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            (["--rate", "-5"], "carpool plan: --rate is -5.0: give requests a second from"),
            (["--retention", "soon"], "carpool: --retention must be like 30s"),
            (["--retention", "0s"], "carpool plan: --retention is 0.0: give a time such as 10m"),
            (["--batch", "6.4"], "carpool plan: Invalid value for '--batch'"),
        ],
    )
    def test_a_mistake_is_one_line(self, options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", *options]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith(told)


class TestVerify:
    """The cases of docs/capacity.md at their usual rate, simulated."""

    @pytest.mark.parametrize(
        ("options", "lines"),
        [
            (
                [],
                "10,000/s, 42 GPUs: p99 208 ms, 76.4% busy -> p99 500 ms holds\n"
                "the smallest that holds it: 32 GPUs: p99 210 ms, 97.0% busy",
            ),
            (
                ["--batch", "50", "--batch-ms", "50"],
                "10,000/s, 14 GPUs: p99 55 ms, 74.8% busy -> p99 500 ms holds\n"
                "the smallest that holds it: 11 GPUs: p99 56 ms, 91.0% busy",
            ),
            (
                ["--rate", "1000", "--batch", "32", "--batch-ms", "75", "--target", "0.7"],
                "1,000/s, 4 GPUs: p99 100 ms, 74.9% busy -> p99 500 ms holds\n"
                "the smallest that holds it: 3 GPUs: p99 113 ms, 78.8% busy",
            ),
        ],
    )
    def test_the_plans_of_others(self, options: list[str], lines: str, capsys: pytest.CaptureFixture[str]) -> None:
        _, simulated = printed(capsys, *options, "--peak", "1", "--verify").split("Simulated\n")
        told = simulated.split("\n\n")[0].split("\n")
        # The engine may change a little before the pages have to: the fleets may not.
        shape = re.compile(r"(\d+ GPUs): p99 (\d+) ms, ([\d.]+)% busy")
        for now, then in zip(told, lines.split("\n"), strict=True):
            assert shape.sub(r"\1", now.strip()) == shape.sub(r"\1", then)
            figures, expected = shape.findall(now)[0], shape.findall(then)[0]
            assert float(figures[1]) == pytest.approx(float(expected[1]), rel=0.05)
            assert float(figures[2]) == pytest.approx(float(expected[2]), abs=2.0)

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            # Ten GPUs would be busy all the time, as in the second plan there.
            (
                ["--rate", "10000", "--batch", "50", "--batch-ms", "50", "--target", "1"],
                "too few: with no headroom the queue never shrinks\n  the smallest that holds it: 11 GPUs",
            ),
            # Room enough on paper, and waits that are too long all the same.
            (
                ["--rate", "1000", "--batch", "32", "--batch-ms", "75", "--target", "0.99", "--p99-ms", "105"],
                "too few for p99 105 ms\n  the smallest that holds it: 4 GPUs",
            ),
        ],
    )
    def test_too_small_is_called_so(self, options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", *options, "--peak", "1", "--verify"]) == 1
        assert told in capsys.readouterr().out

    def test_a_wish_that_no_fleet_fulfils_is_called_so(self) -> None:
        planned = Checked(3, 80.0, 1.0, 0.5, holds=False)
        told = verified_lines(Verified(10.0, 75.5, planned, None))
        assert told == [
            "10/s, 3 GPUs: p99 80 ms, 50.0% busy -> too few for p99 75.5 ms",
            "no fleet of twice the size holds it either",
        ]

    def test_json_has_both_rates(self, capsys: pytest.CaptureFixture[str]) -> None:
        made = json.loads(printed(capsys, "--rate", "1000", "--batch", "32", "--batch-ms", "50", "--verify", "--json"))
        assert [made["verified"][name]["rate"] for name in ("usual", "peak")] == [1000.0, 3000.0]
        assert made["verified"]["peak"]["smallest"]["holds"]

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            (["--p99-ms", "200"], "--p99-ms is 200, and a call alone takes 200: give more"),
            (["--rate", "2e6"], "--verify takes 1,000,000/s, 4,096 GPUs"),
            (["--rate", "1e4", "--batch-ms", "20000"], "give a part of the rate, or --peak 1"),
        ],
    )
    def test_what_cannot_be_simulated(self, options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
        p99 = () if "--p99-ms" in options else ("--p99-ms", "50000")
        assert main(["plan", *options, *p99, "--verify"]) == 2
        assert told in capsys.readouterr().err

    @pytest.mark.parametrize("least", [1, 30])
    @pytest.mark.parametrize("beyond", [0, 1, 2, 6, 27])
    def test_the_fewest_that_are_enough(self, least: int, beyond: int) -> None:
        asked: list[int] = []

        def is_enough(count: int) -> bool:
            asked.append(count)
            return count >= least + beyond

        assert fewest(is_enough, least) == least + beyond
        assert len(set(asked)) == len(asked) <= 10
        assert fewest(lambda count: False, least) is None
