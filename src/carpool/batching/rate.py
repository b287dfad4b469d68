"""rate"""
from math import exp, sqrt

FAST_S = 0.01
SLOW_S = 0.2

class ArrivalRate:
    def __init__(self) -> None:
        self._total = 0
        self._at: float | None = None
        self._fast = 0.0
        self._slow = 0.0

    def update(self, arrivals_total: int, now: float) -> float:
        if self._at is None:
            self._at, self._total = now, arrivals_total
            return 0.0
        dt = now - self._at
        if dt <= 0.0:
            return self._slow
        n = arrivals_total - self._total
        if n < 0:
            n = arrivals_total
        self._at, self._total = now, arrivals_total
        r = n / dt
        self._fast = r + (self._fast - r) * exp(-dt / FAST_S)
        self._slow = r + (self._slow - r) * exp(-dt / SLOW_S)
        surplus = (self._fast - self._slow) * FAST_S
        if surplus > 1.0 + 3.0 * sqrt(self._slow * FAST_S / 2):
            self._slow = self._fast
        return self._slow
