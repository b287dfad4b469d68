"""What a call costs, learned from the calls that are made anyway. Pure: seconds are arguments.

1. A call takes so long for itself, and longer with each input, with each KB of its inputs, and with each KB of padding:
   what its inputs are short of the largest, together. An endpoint that pads pays for padding as for inputs; one that
   computes each input for itself does not. No term is below zero.
2. Least squares. Old calls are forgotten slowly: MEMORY_CALLS of them count. A call that took much longer than expected
   counts as OUTLIER times that: one that stood still somewhere says little.
3. Endpoints differ by a factor each; their mean is 1. The factor follows sooner than the rest.
4. Padding counts as known when it is well above chance (`SURE_ERRORS` standard errors) and worth something: `PADDED_ON`
   of the time of a batch in order. It counts as gone below half of both, so that it does not come and go.
"""

from math import inf, sqrt
from statistics import median

TERMS = ("call", "inputs", "size", "padding")
PADDING = TERMS.index("padding")
KB = 1000.0
MEMORY_CALLS = 500
# The terms are worked out once in so many calls; padding counts after so many.
SOLVED_EVERY, CALLS_MIN = 32, 96
KEPT = 1.0 - 1.0 / MEMORY_CALLS
OUTLIER = 3.0
FACTOR_WEIGHT, MEAN_WEIGHT = 0.05, 0.05
ENDPOINTS_MAX = 4096
SURE_ERRORS, PADDED_ON = 4.0, 0.2
# Where two terms tell nearly the same, each gets a part of it.
RIDGE, SAME = 1e-4, 1e-3
SECONDS_MIN = 1e-6


class CostModel:
    """Seconds of a call by its number of inputs, their size, and their padding."""

    __slots__ = (
        "_calls",
        "_error",
        "_first",
        "_is_padded",
        "_mean",
        "_mean_s",
        "_moments",
        "_sums",
        "_terms",
        "factors",
    )

    def __init__(self) -> None:
        # The normal equations.
        self._moments = [[0.0] * len(TERMS) for _ in TERMS]
        self._sums = [0.0] * len(TERMS)
        self._terms: list[float] | None = None
        self._calls = 0
        # The first calls, until the terms are worked out: a very first one often takes long.
        self._first: list[tuple[list[float], float]] = []
        # The mean square of the error.
        self._error = 0.0
        self.factors: dict[str, float] = {}
        # Of batches in order: what the terms are multiplied with, and the seconds.
        self._mean = [0.0] * len(TERMS)
        self._mean_s = 0.0
        self._is_padded = False

    def __repr__(self) -> str:
        return f"<CostModel {self.explains() or 'unknown'}>"

    @property
    def is_known(self) -> bool:
        """Whether enough calls have ended."""
        return self._terms is not None

    @property
    def seconds_by_term(self) -> tuple[float, ...]:
        """Of an endpoint like the mean; empty while that is not known."""
        return tuple(self._terms or ())

    @property
    def is_padded(self) -> bool:
        """Rule 4: whether padding costs so much that it pays to avoid it."""
        return self._is_padded

    def seconds(self, count: float, size: float, largest: float, endpoint: str = "") -> float:
        """How long a call with so many inputs takes, `size` bytes together, the largest `largest`; 0 if not known."""
        if self._terms is None:
            return 0.0
        expected = sum(map(float.__mul__, self._terms, _row(count, size, largest)))
        return max(expected, SECONDS_MIN) * self.factors.get(endpoint, 1.0)

    def seen(self, count: int, size: int, largest: int, seconds: float, endpoint: str, *, in_order: bool) -> None:
        """A call took so long. `in_order`: its inputs were not chosen by size."""
        self._calls += 1
        row, seconds = _row(count, size, largest), max(seconds, SECONDS_MIN)
        if self._terms is None:
            self._first.append((row, seconds))
            if len(self._first) == SOLVED_EVERY:
                usual_s = median(each_s for _, each_s in self._first)
                for each, each_s in self._first:
                    self._add(each, min(each_s, OUTLIER * usual_s), in_order=True)
                self._first = []
                self._error = usual_s * usual_s
                self._work_out()
            return
        expected = self.seconds(count, size, largest)
        seconds = self._for_endpoint(endpoint, seconds, expected)
        self._error += MEAN_WEIGHT * ((seconds - expected) ** 2 - self._error)
        self._add(row, seconds, in_order)
        if self._calls % SOLVED_EVERY == 0:
            self._work_out()

    def _add(self, row: list[float], seconds: float, in_order: bool) -> None:
        for index, moments in enumerate(self._moments):
            each = row[index]
            self._sums[index] = KEPT * self._sums[index] + each * seconds
            for other in range(index + 1):  # it is symmetric
                moments[other] = KEPT * moments[other] + each * row[other]
        if in_order:
            weight = MEAN_WEIGHT if self._mean_s else 1.0
            self._mean_s += weight * (seconds - self._mean_s)
            self._mean = [mean + weight * (each - mean) for mean, each in zip(self._mean, row, strict=True)]

    def explains(self) -> str:
        """The term that most of the time of a batch in order goes to; "" while that is not known."""
        return max(self.shares().items(), key=lambda share: share[1])[0] if self._terms is not None else ""

    def shares(self) -> dict[str, float]:
        """By term, the share of the time of a batch in order that it explains; empty while that is not known."""
        if self._terms is None:
            return {}
        parts = [term * mean for term, mean in zip(self._terms, self._mean, strict=True)]
        whole = max(sum(parts), SECONDS_MIN)
        return {name: part / whole for name, part in zip(TERMS, parts, strict=True)}

    def _for_endpoint(self, endpoint: str, seconds: float, expected: float) -> float:
        """The seconds as they would be at the mean of the endpoints, without outliers."""
        factors = self.factors
        factor = factors.get(endpoint, 1.0)
        seconds = min(max(seconds, factor * expected / OUTLIER), factor * expected * OUTLIER)
        if endpoint not in factors and len(factors) >= ENDPOINTS_MAX:
            factors.clear()
        factor += FACTOR_WEIGHT * (seconds / expected - factor)
        factors[endpoint] = factor
        if self._calls % SOLVED_EVERY == 0:
            mean = sum(factors.values()) / len(factors)
            self.factors = {name: each / mean for name, each in factors.items()}
        return seconds / self.factors[endpoint]

    def _work_out(self) -> None:
        """Solve for the terms; one that comes out below zero is left out."""
        used = [index for index, moments in enumerate(self._moments) if moments[index] > 0.0]
        (calls, *_), (together, inputs, *_), *_ = self._moments
        if calls * inputs - together * together < SAME * calls * inputs:
            used.remove(TERMS.index("inputs"))  # all calls have the same number: it is part of the first term
        terms, variance = _solve(self._moments, self._sums, used)
        while min(terms) < 0.0:
            used.remove(terms.index(min(terms)))
            terms, variance = _solve(self._moments, self._sums, used)
        self._terms = terms
        share = terms[PADDING] * self._mean[PADDING] / max(self._mean_s, SECONDS_MIN)
        standard_error = sqrt(max(0.0, variance * self._error)) if PADDING in used else inf
        bound = 0.5 if self._is_padded else 1.0
        is_sure = terms[PADDING] > bound * SURE_ERRORS * standard_error
        self._is_padded = is_sure and share > bound * PADDED_ON and self._calls >= CALLS_MIN


def _row(count: float, size: float, largest: float) -> list[float]:
    """What each of the terms is multiplied with."""
    return [1.0, float(count), size / KB, max(0.0, count * largest - size) / KB]


def _solve(moments: list[list[float]], sums: list[float], used: list[int]) -> tuple[list[float], float]:
    """The solution of the normal equations with the terms `used`, the others 0; and, but for the error's, the variance
    of the last of them. Gauss, without pivots: with the ridge the matrix is positive definite.
    """
    rows = [
        [moments[max(i, j)][min(i, j)] * (1.0 + RIDGE * (i == j)) for j in used] + [sums[i], float(i == used[-1])]
        for i in used
    ]
    for number, row in enumerate(rows):
        pivot = row[number] or 1e-300
        for below in rows[number + 1 :]:
            times = below[number] / pivot
            for column in range(number, len(row)):
                below[column] -= times * row[column]
    found = [0.0] * len(moments)
    size = len(used)
    variance = 0.0
    for number in range(size - 1, -1, -1):
        row = rows[number]
        pivot = row[number] or 1e-300
        if number == size - 1:
            variance = row[size + 1] / pivot
        known = sum(row[other] * found[used[other]] for other in range(number + 1, size))
        found[used[number]] = (row[size] - known) / pivot
    return found, variance
