"""What a server's clock shows now, at least, by this process's own monotonic clock. Pure.

1. A server tells its time between a question and its answer. So how far its clock is ahead of ours lies between two
   bounds, as far apart as that took; an answer that took long says less, and nothing wrong.
2. Of the last few answers the best lower bound counts. So what is said is never later than the server's time, and
   earlier by no more than the quickest of them took on its way.
3. An answer contradicts those before it when the server's clock was set: then those are forgotten.
"""

from collections import deque

# Answers that count. Both clocks run nearly alike, and one is asked for every second.
ANSWERS_KEPT = 5


class ServerClock:
    """The clock of the server at the other end of one connection."""

    def __init__(self) -> None:
        # Of each answer: by how many seconds the server's clock is ahead of ours, at least and at most.
        self._answers: deque[tuple[float, float]] = deque(maxlen=ANSWERS_KEPT)
        self._ahead_s: float | None = None

    def told(self, time_s: float, asked_at: float, answered_at: float) -> None:
        """The server said that it is `time_s`."""
        least, most = time_s - answered_at, time_s - asked_at
        if any(other_least > most or other_most < least for other_least, other_most in self._answers):
            self._answers.clear()
        self._answers.append((least, most))
        self._ahead_s = max(least for least, _ in self._answers)

    def at_least_ms(self, now: float) -> int:
        """Whole milliseconds that its clock shows by now; 0 while nothing is known of it."""
        return 0 if self._ahead_s is None else int((now + self._ahead_s) * 1000)
