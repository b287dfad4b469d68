"""When requests are due: a rate over time, turned into arrival times. Pure; randomness is an argument.

A schedule is a list of segments whose rate changes linearly. Arrivals are made on a scale where one arrival
is expected per unit (so the gaps do not depend on the rate) and mapped back to seconds through the integral
of the rate. Poisson and even arrivals, constant rates and ramps then need only this one mapping.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from math import log, sqrt

import msgspec

# A spike holds its base rate for this share of the time before and again after the peak.
SPIKE_SHOULDER = 0.4
DURATION_UNITS_S = (("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0))

SCHEDULE_HELP = (
    "Rates over time, comma-separated parts run one after the other: RATE:TIME holds a rate, "
    "ramp:FROM-TO:TIME changes it evenly, spike:BASE-PEAK:TIME is BASE for 40 % of TIME, PEAK for 20 %, "
    "BASE again, peaks:MEAN-PEAK:LENGTH/EVERY:TIME has MEAN on average and PEAK for the last LENGTH of EVERY so "
    "long. TIME is 500ms, 10s, 2m or 1h. "
    "Examples: 1000:10s,5000:10s · ramp:100-5000:30s · spike:1000-8000:20s · peaks:1000-3000:1s/10s:60s"
)


class BadSchedule(ValueError):
    """The text does not describe a schedule; the message says what to change."""


class Segment(msgspec.Struct, frozen=True):
    """A stretch of time in which the rate goes evenly from one value to another."""

    rate_from: float
    rate_to: float
    duration_s: float

    @property
    def expected(self) -> float:
        """How many arrivals this segment is expected to bring."""
        return (self.rate_from + self.rate_to) / 2 * self.duration_s


def parse_duration(text: str) -> float:
    """Seconds meant by `500ms`, `10s`, `2m`, `1h` or a plain number of seconds."""
    number, unit_s = text.strip(), 1.0
    for suffix, seconds in DURATION_UNITS_S:
        if number.endswith(suffix):
            number, unit_s = number.removesuffix(suffix), seconds
            break
    duration_s = _number(number, f"{text!r} is not a time such as 500ms, 10s or 2m") * unit_s
    if duration_s <= 0:
        raise BadSchedule(f"{text!r} is not a time above 0")
    return duration_s


def parse_schedule(text: str) -> list[Segment]:
    """The segments of a schedule in the syntax of SCHEDULE_HELP."""
    segments = list(chain.from_iterable(_parse_part(part.strip()) for part in text.split(",")))
    if not any(segment.expected for segment in segments):
        raise BadSchedule(f"{text!r} never sends anything: every rate is 0")
    return segments


def _parse_part(part: str) -> list[Segment]:
    match part.split(":"):
        case [rate, time]:
            held = _rate(rate)
            return [Segment(held, held, parse_duration(time))]
        case ["ramp", span, time]:
            low, high = _span(span, part)
            return [Segment(low, high, parse_duration(time))]
        case ["spike", span, time]:
            base, peak = _span(span, part)
            duration_s = parse_duration(time)
            shoulder = Segment(base, base, duration_s * SPIKE_SHOULDER)
            return [shoulder, Segment(peak, peak, duration_s * (1 - 2 * SPIKE_SHOULDER)), shoulder]
        case ["peaks", span, pattern, time]:
            return _peaks(*_span(span, part), pattern, parse_duration(time))
    raise BadSchedule(
        f"{part!r} is none of RATE:TIME, ramp:FROM-TO:TIME, spike:BASE-PEAK:TIME, peaks:MEAN-PEAK:LENGTH/EVERY:TIME"
    )


def _peaks(mean: float, peak: float, pattern: str, duration_s: float) -> list[Segment]:
    length, _, every = pattern.partition("/")
    length_s, every_s = parse_duration(length), parse_duration(every)
    base_s = every_s - length_s
    if base_s <= 0 or duration_s < every_s:
        raise BadSchedule(f"peaks of {length} in every {every} do not fit")
    base = (mean * every_s - peak * length_s) / base_s
    if not 0 <= base <= mean:
        raise BadSchedule(f"with peaks of {peak:g} for {length} in every {every}, {mean:g} is no mean")
    return [Segment(base, base, base_s), Segment(peak, peak, length_s)] * round(duration_s / every_s)


def _span(span: str, part: str) -> tuple[float, float]:
    first, dash, second = span.partition("-")
    if not dash:
        raise BadSchedule(f"{part!r} needs two rates such as 100-5000")
    return _rate(first), _rate(second)


def _rate(text: str) -> float:
    rate = _number(text, f"{text!r} is not a rate in requests per second")
    if rate < 0:
        raise BadSchedule(f"{text!r} is a rate below 0")
    return rate


def _number(text: str, complaint: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise BadSchedule(complaint) from None
    if not abs(number) < float("inf"):  # also refuses NaN
        raise BadSchedule(complaint)
    return number


def poisson_gaps(uniform: Callable[[], float]) -> Iterator[float]:
    """Endless exponential gaps of mean 1, from `uniform` numbers in [0, 1)."""
    while True:
        yield -log(1.0 - uniform())


def even_gaps() -> Iterator[float]:
    """Endless gaps of exactly 1, the first half as long so that rounding cannot add an arrival at the end."""
    return chain((0.5,), repeat(1.0))


def arrivals(segments: Sequence[Segment], gaps: Iterator[float]) -> Iterator[float]:
    """Arrival times in seconds after the start, ascending, one for each gap until the segments end."""
    begun_s = 0.0
    # Arrivals expected between the start of this segment and the next arrival.
    ahead = next(gaps)
    for segment in segments:
        rate, duration_s, expected = segment.rate_from, segment.duration_s, segment.expected
        double_slope = 2 * (segment.rate_to - rate) / duration_s
        while ahead < expected:
            # Solves rate * x + slope / 2 * x^2 = ahead in the form that also holds for slope 0.
            root = sqrt(max(0.0, rate * rate + double_slope * ahead))
            offset_s = 2 * ahead / (rate + root) if ahead else 0.0
            yield begun_s + min(offset_s, duration_s)
            ahead += next(gaps)
        ahead -= expected
        begun_s += duration_s


def total_duration(segments: Sequence[Segment]) -> float:
    """Seconds from the first segment's start to the last one's end."""
    return sum(segment.duration_s for segment in segments)


def mean_rate(segments: Sequence[Segment]) -> float:
    """Requests per second over the whole schedule."""
    return sum(segment.expected for segment in segments) / total_duration(segments)
