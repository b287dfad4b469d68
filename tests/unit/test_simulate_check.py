"""What `make simulate-check` makes of the figures: how far off is too far, and which requests count."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from simulate_check import BOUNDS, SETTINGS, Compared, Figures, figures_of, markdown, medians

REAL = Figures(served=100.0, p50_ms=200.0, p99_ms=400.0, refused=50)


def compared(simulated: Figures, real: Figures = REAL) -> Compared:
    return Compared("busy", "all", simulated, real, 0.1)


@pytest.mark.parametrize(
    ("simulated", "broken"),
    [
        (REAL, []),
        (Figures(105.0, 220.0, 460.0, 55), []),
        (Figures(95.0, 180.0, 340.0, 45), []),
        (Figures(105.1, 200.0, 400.0, 50), ["served"]),
        (Figures(100.0, 179.9, 400.0, 50), ["p50_ms"]),
        (Figures(100.0, 200.0, 460.1, 50), ["p99_ms"]),
        (Figures(100.0, 200.0, 400.0, 44), ["refused"]),
        (Figures(0.0, 0.0, 0.0, 0), list(BOUNDS)),
    ],
)
def test_a_figure_may_be_off_by_its_share(simulated: Figures, broken: list[str]) -> None:
    assert compared(simulated).broken == broken


def test_short_latencies_may_be_off_by_milliseconds() -> None:
    real = Figures(100.0, 5.0, 12.0, 0)
    assert compared(Figures(100.0, 2.0, 2.0, 0), real).broken == []
    assert compared(Figures(100.0, 1.9, 1.9, 0), real).broken == ["p50_ms", "p99_ms"]


def test_one_refusal_is_too_many_where_reality_has_none() -> None:
    assert compared(Figures(100.0, 200.0, 400.0, 1), Figures(100.0, 200.0, 400.0, 0)).broken == ["refused"]


figure = st.floats(0, 1e6)


@given(st.sampled_from(sorted(BOUNDS)), figure, figure, st.floats(0, 1))
def test_whoever_is_nearer_holds_as_well(name: str, simulated: float, real: float, way: float) -> None:
    bound, nearer = BOUNDS[name], real + (simulated - real) * way
    # Rounding may put it a hair beyond.
    assert bound.holds(nearer, real) or not bound.holds(simulated, real) or abs(nearer - simulated) < 1e-6


def answer(due_s: float, outcome: str, latency_ms: float) -> dict[str, object]:
    return {"due_s": due_s, "tier": "", "outcome": outcome, "latency_ms": latency_ms}


def test_requests_count_by_when_they_were_due_and_answers_by_when_they_came() -> None:
    answers = [
        answer(0.5, "503", 1.0),  # in the warming up
        answer(1.9, "200", 200.0),  # due in it, answered after
        answer(2.0, "200", 100.0),
        answer(2.5, "503", 1.0),
        answer(3.0, "timeout", 900.0),
        answer(3.9, "200", 300.0),  # answered after the end
    ]
    assert figures_of(answers, begins_s=2.0, seconds=2.0) == Figures(served=1.0, p50_ms=100.0, p99_ms=300.0, refused=2)
    assert figures_of([], begins_s=2.0, seconds=2.0) == Figures(0.0, 0.0, 0.0, 0)


def test_each_figure_has_a_median_of_its_own() -> None:
    runs = [Figures(1.0, 30.0, 5.0, 7), Figures(2.0, 10.0, 6.0, 9), Figures(3.0, 20.0, 4.0, 8)]
    assert medians(runs) == Figures(2.0, 20.0, 5.0, 8)


def test_the_table_names_what_does_not_hold() -> None:
    lines = markdown([compared(REAL), compared(Figures(90.0, 200.0, 400.0, 50))]).splitlines()
    assert lines[2] == "| busy | all | 100 / 100 | 200 / 200 | 400 / 400 | 50 / 50 | 10% | yes |"
    assert lines[3].endswith("| NO: served |")


def test_the_settings_are_told_apart() -> None:
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS) == 6
