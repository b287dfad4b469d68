"""How many calls an endpoint may have at once, by what is known of its load. Pure: `now` is an argument.

1. Additive increase, multiplicative decrease. `step` is called once a second: an endpoint that was overloaded since the
   last step gets DECREASE of what it had, at least one call; any other gets INCREASE of its slots more, at most all.
2. Overloaded is: it reported a load over LOAD_MAX on average (by a header or a metric); or it answered 429; or, where
   it reports nothing, most of its calls took LATENCY_RATIO times as long as calls of about their size did lately.
3. Time is a hint and not a report: inputs may just have become longer. It takes away half of the slots at most, and
   after WINDOW_S to twice that, what was slow is normal.
"""

import re
from math import inf, isfinite
from typing import NamedTuple

LOAD_MAX = 0.9
DECREASE = 0.7
INCREASE = 0.05
# Rule 3: how long the shortest call counts.
WINDOW_S = 60.0
# Rule 2. Inputs that are twice as long, or a neighbour on the same GPU, make calls that much slower now and then.
LATENCY_RATIO = 2.0
# Calls needed to say that they are slow, and the least excess: less may be the gateway's own delay.
CALLS_MIN = 8
EXCESS_S_MIN = 0.05


_SOURCE = re.compile(
    r"((?:https?://[^\s/?#@]+|:[0-9]{1,5})?/[^\s#]*)#([A-Za-z_:][A-Za-z0-9_:]*)(?:/([0-9]{1,15}(?:\.[0-9]{1,9})?))?"
)


class LoadSource(NamedTuple):
    """Where the load of an endpoint is read."""

    # A path, `:PORT/PATH` on the endpoint's host, or a URL.
    where: str
    metric: str
    # The value that means full.
    full: float


def parse_load_source(text: str) -> LoadSource:
    """A page of metrics, and a metric on it, as settings have them; raises ValueError."""
    match = _SOURCE.fullmatch(text)
    if match is None or not (full := float(match[3] or 1)):
        raise ValueError(
            "must look like :8002/metrics#nv_gpu_utilization, /metrics#NAME/512 or http://host/metrics#NAME"
        )
    return LoadSource(match[1], match[2], full)


class ServiceTimes:
    """Whether calls take much longer than they did lately. A batch is compared with those of about its size."""

    __slots__ = ("_before", "_calls", "_least", "_slow", "_window_end")

    def __init__(self) -> None:
        # The shortest call by size (in powers of two), in this window and in the one before.
        self._least: dict[int, float] = {}
        self._before: dict[int, float] = {}
        self._window_end = -inf
        # Calls since the last verdict, and those of them that were slow.
        self._calls = 0
        self._slow = 0

    def add(self, size: int, seconds: float, now: float) -> None:
        """A batch of this size took so long."""
        if now >= self._window_end:
            # After a long silence both windows are old.
            self._before = self._least if now < self._window_end + WINDOW_S else {}
            self._least = {}
            self._window_end = now + WINDOW_S
        group = size.bit_length()
        this_window = self._least.get(group, inf)
        least = min(this_window, self._before.get(group, inf))
        self._calls += 1
        self._slow += seconds > least * LATENCY_RATIO and seconds > least + EXCESS_S_MIN
        self._least[group] = min(seconds, this_window)

    def verdict(self) -> bool | None:
        """Whether most calls since the last verdict were slow; None while they are too few to say."""
        if 0 < self._calls < CALLS_MIN:
            return None
        slow = 2 * self._slow > self._calls
        self._calls = self._slow = 0
        return slow


class LoadLimit:
    """The concurrency limit of one endpoint."""

    __slots__ = ("_allowed", "_is_refusing", "_reported_sum", "_reports", "_slots", "_times", "reported_load")

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._allowed = float(slots)
        self._times = ServiceTimes()
        # Since the last step: reports, the sum of their loads, and whether a 429 came.
        self._reports = 0
        self._reported_sum = 0.0
        self._is_refusing = False
        # What it reported last, 0 to 1; None if it never did.
        self.reported_load: float | None = None

    def __repr__(self) -> str:
        return f"<LoadLimit {self.limit} of {self._slots}>"

    @property
    def limit(self) -> int:
        """Calls that it may have at once."""
        return int(self._allowed)

    def report(self, load: float) -> None:
        """The endpoint says how loaded it is; 1 is full."""
        self._reports += 1
        self._reported_sum += load
        self.reported_load = load

    def refused(self) -> None:
        """The endpoint answered 429."""
        self._is_refusing = True

    def answered(self, size: int, seconds: float, now: float) -> None:
        """A batch of this size was answered after so long."""
        self._times.add(size, seconds, now)

    def step(self) -> int:
        """Judge what came since the last step, and return the new limit."""
        slow = self._times.verdict() if self.reported_load is None else False
        if self._is_refusing or self._reported_sum > LOAD_MAX * self._reports:
            self._allowed = max(1.0, self._allowed * DECREASE)
        elif slow:
            self._allowed = min(self._allowed, max(1.0, self._slots / 2, self._allowed * DECREASE))
        elif slow is not None:  # else: too few calls to say; wait for more
            self._allowed = min(float(self._slots), self._allowed + INCREASE * self._slots)
        self._reports, self._reported_sum, self._is_refusing = 0, 0.0, False
        return self.limit


def parse_load(text: str) -> float | None:
    """A load as an endpoint writes it, `0.93`, `93` or `93%`; what is over 1 is per cent. None if it is no load."""
    number = _finite(text.strip().removesuffix("%"))
    if number is None or number < 0:
        return None
    return number / 100 if number > 1 or "%" in text else number


def metric_value(text: str, name: str) -> float | None:
    """The largest value of a metric in Prometheus's text format, over its labels; None if it is not there."""
    found = None
    for line in text.splitlines():
        rest = line.removeprefix(name)
        if len(rest) == len(line) or not rest.startswith(("{", " ", "\t")):
            continue
        # A label may contain anything, but after its last brace there are only the value and a timestamp.
        words = rest.rpartition("}")[2].split()
        value = _finite(words[0]) if words else None
        if value is not None and (found is None or value > found):
            found = value
    return found


def _finite(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None
