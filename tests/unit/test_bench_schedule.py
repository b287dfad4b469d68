import pytest

from carpool.tools.bench.options import (
    BadOption,
    Segment,
    arrivals,
    even_gaps,
    mean_rate,
    parse_duration,
    parse_schedule,
)


@pytest.mark.parametrize("text", ["", "s", "ten", "-1s", "0s", "nan", "inf", "1d"])
def test_a_bad_duration_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadOption, match="is not a time"):
        parse_duration(text)


def test_steps_follow_one_another() -> None:
    assert parse_schedule("1000:10s, 5000:500ms,1000:2m") == [
        Segment(1000, 10),
        Segment(5000, 0.5),
        Segment(1000, 120),
    ]


@pytest.mark.parametrize(
    "text",
    ["", "1000", "1000:", "fast:10s", "ramp:1-2:30s", "1:1s:1s", "-5:10s", "1:1s,,1:1s", "0:5s"],
)
def test_a_bad_schedule_is_refused(text: str) -> None:
    with pytest.raises(BadOption):
        parse_schedule(text)


def test_a_pause_between_steps_holds_no_arrival() -> None:
    times = list(arrivals(parse_schedule("10:1s,0:5s,10:1s"), even_gaps()))
    assert len(times) == 20
    assert not [time for time in times if 1 < time < 6]


def test_the_mean_rate_is_over_the_whole() -> None:
    assert mean_rate(parse_schedule("100:1s,300:3s")) == pytest.approx(250)
