import pytest

from carpool.tools.bench.schedule import (
    BadSchedule,
    Segment,
    arrivals,
    even_gaps,
    mean_rate,
    parse_duration,
    parse_schedule,
    total_duration,
)


@pytest.mark.parametrize("text", ["", "s", "ten", "-1s", "0s", "nan", "inf", "1d"])
def test_a_bad_duration_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadSchedule, match="is not a time"):
        parse_duration(text)


def test_steps_ramps_and_spikes_follow_one_another() -> None:
    assert parse_schedule("1000:10s, ramp:100-5000:30s,spike:1000-8000:20s") == [
        Segment(1000, 1000, 10),
        Segment(100, 5000, 30),
        Segment(1000, 1000, 8),
        Segment(8000, 8000, 20 * (1 - 0.8)),
        Segment(1000, 1000, 8),
    ]


def test_peaks_keep_the_mean() -> None:
    segments = parse_schedule("peaks:1000-3000:1s/10s:20s")
    base = (1000 * 10 - 3000 * 1) / 9
    assert segments == [Segment(base, base, 9), Segment(3000, 3000, 1)] * 2
    assert mean_rate(segments) == pytest.approx(1000)


@pytest.mark.parametrize("text", ["3000-1000:1s/10s:20s", "1000-3000:9s/10s:20s", "1000-3000:1s/10s:5s", "1-2:3s:9s"])
def test_peaks_that_do_not_fit_are_refused(text: str) -> None:
    with pytest.raises(BadSchedule):
        parse_schedule(f"peaks:{text}")


@pytest.mark.parametrize(
    "text",
    ["", "1000", "1000:", "fast:10s", "ramp:100:30s", "ramp:1-2", "wave:1-2:3s", "-5:10s", "1:1s,,1:1s", "0:5s"],
)
def test_a_bad_schedule_is_refused(text: str) -> None:
    with pytest.raises(BadSchedule):
        parse_schedule(text)


def test_a_pause_between_steps_holds_no_arrival() -> None:
    times = list(arrivals(parse_schedule("10:1s,0:5s,10:1s"), even_gaps()))
    assert len(times) == 20
    assert not [time for time in times if 1 < time < 6]


def test_duration_and_mean_rate_are_over_the_whole() -> None:
    segments = parse_schedule("100:1s,ramp:100-300:3s")
    assert total_duration(segments) == 4
    assert mean_rate(segments) == pytest.approx(175)
