"""When requests are due: steps of constant rates, turned into arrival times. Pure; randomness is an argument.

Arrivals are made on a scale where one arrival is expected per unit, so the gaps do not depend on the rate, and mapped
back to seconds through the rate of their step: a pause between two steps holds none.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from math import log

import msgspec

DURATION_UNITS_S = (("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0))

SCHEDULE_HELP = (
    "Rates over time, RATE:TIME each, one after the other; TIME is 500ms, 10s, 2m or 1h. "
    "Example: 1000:10s,5000:2s,1000:10s"
)


class BadOption(ValueError):
    """An option cannot be used; the message says which and why, in one line, and shows no key."""


class Segment(msgspec.Struct, frozen=True):
    """A stretch of time with one rate."""

    rate: float
    duration_s: float

    @property
    def expected(self) -> float:
        """How many arrivals this segment is expected to bring."""
        return self.rate * self.duration_s


def parse_duration(text: str) -> float:
    """Seconds meant by `500ms`, `10s`, `2m`, `1h` or a plain number of seconds."""
    number, unit_s = text.strip(), 1.0
    for suffix, seconds in DURATION_UNITS_S:
        if number.endswith(suffix):
            number, unit_s = number.removesuffix(suffix), seconds
            break
    duration_s = _number(number, f"{text!r} is not a time such as 500ms, 10s or 2m") * unit_s
    if duration_s <= 0:
        raise BadOption(f"{text!r} is not a time above 0")
    return duration_s


def parse_schedule(text: str) -> list[Segment]:
    """The segments of a schedule in the syntax of SCHEDULE_HELP."""
    segments = [_parse_part(part.strip()) for part in text.split(",")]
    if not any(segment.expected for segment in segments):
        raise BadOption(f"{text!r} never sends anything: every rate is 0")
    return segments


def _parse_part(part: str) -> Segment:
    text, colon, time = part.partition(":")
    if not colon:
        raise BadOption(f"{part!r} is not RATE:TIME")
    rate = _number(text, f"{text!r} is not a rate in requests per second")
    if rate < 0:
        raise BadOption(f"{text!r} is a rate below 0")
    return Segment(rate, parse_duration(time))


def _number(text: str, complaint: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise BadOption(complaint) from None
    if not abs(number) < float("inf"):  # also refuses NaN
        raise BadOption(complaint)
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
        while ahead < segment.expected:
            yield begun_s + ahead / segment.rate
            ahead += next(gaps)
        ahead -= segment.expected
        begun_s += segment.duration_s


def mean_rate(segments: Sequence[Segment]) -> float:
    """Requests per second over the whole schedule."""
    return sum(segment.expected for segment in segments) / sum(segment.duration_s for segment in segments)
