"""The checker of FAULTS.md: every request carries a nonce, every GPU here reverses a string, so each output proves
whose it is. At the end the checker counts what was lost, wrong, doubled or late.

Over all checkers of a run it is counted how many requests were answered as promised: with their own output, or with an
error that docs/guarantees.md has for such a case, once and in time.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import count
from typing import NamedTuple

from support.client import Response


class Verdict(NamedTuple):
    """What the checker found."""

    lost: int
    wrong: int
    duplicate_outcomes: int
    duplicate_work: int
    late: int

    @property
    def is_clean(self) -> bool:
        """Nothing lost, wrong, told twice or late. Work may be done twice: that a kill cannot be undone is no fault."""
        return self.lost == self.wrong == self.duplicate_outcomes == self.late == 0

    def report(self, row: str, what: str, *, passed: bool) -> None:
        """Print the one line that a chaos test owes its reader."""
        print(  # noqa: T201
            f"\n{row}: {what}; lost {self.lost}, wrong {self.wrong}, duplicate outcomes {self.duplicate_outcomes}, "
            f"duplicate work {self.duplicate_work}, late {self.late}: {'pass' if passed else 'FAIL'}",
            flush=True,
        )


class Promises:
    """How many requests there were, and how many of them were answered as promised."""

    def __init__(self) -> None:
        self.requests = 0
        self.kept = 0

    @property
    def share(self) -> float:
        return self.kept / self.requests if self.requests else 1.0

    def stated(self, on: str, passed: int, tests: int) -> str:
        """The line of docs/guarantees.md about a whole run."""
        return (
            f"The last whole run, on {on}: {self.kept:,} of {self.requests:,} requests were answered as promised; "
            f"{passed} of {tests} tests passed."
        )


# Of all checkers in this process.
PROMISES = Promises()


class Checker:
    """The journal of one run. A request is known by its input, which contains its nonce.

    `errors` are the statuses that are as promised in place of an output, by what an input contains; "" is in every one.
    `may_tell_again`: a result that Redis forgot is made, and told, again.
    """

    def __init__(
        self, name: str, errors: Mapping[str, Collection[int]] | None = None, *, may_tell_again: bool = False
    ) -> None:
        self._name = name
        self._errors = errors or {}
        self._may_tell_again = may_tell_again
        self._numbers = count()
        # Accepted and without an outcome, with the time by which it must have one.
        self._open: dict[str, float] = {}
        self._outcomes: dict[str, str] = {}
        self._lost = 0
        self._late = 0
        self._duplicates = 0
        self._wrong = 0
        # Outcomes by what they were: "ok", or a status.
        self.tally: Counter[str] = Counter()

    def new_input(self, bytes_min: int = 0) -> str:
        """An input that no other request has."""
        nonce = f"{self._name}-{next(self._numbers)}"
        return nonce + "." * max(0, bytes_min - len(nonce))

    def accepted(self, text: str, *, within_s: float = 60.0) -> None:
        """From now on an outcome is owed."""
        self._open[text] = time.monotonic() + within_s
        PROMISES.requests += 1

    def answered(self, text: str, response: Response) -> None:
        """A request was answered, with its output or an error."""
        if response.status == 200:
            self.output(text, response.json["output"])
        else:
            self.failed(text, response.status)

    def output(self, text: str, output: object, *, told_at: str = "") -> None:
        """An output came. `told_at` tells two outcomes of one task apart from one outcome that was read twice."""
        is_right = output == text[::-1]
        self._ended(text, told_at or "output", is_as_promised=is_right)
        self.tally["ok"] += 1
        self._wrong += not is_right

    def failed(self, text: str, status: int) -> None:
        """An error came in place of an output."""
        self._ended(text, str(status), is_as_promised=self._is_promised(text, status))
        self.tally[str(status)] += 1

    def refused(self, text: str, status: int) -> None:
        """It was not accepted: no outcome is owed, but a refusal may break a promise as well."""
        PROMISES.requests += 1
        PROMISES.kept += self._is_promised(text, status)

    def broke_off(self, text: str) -> None:
        """The gateway ended the connection without an answer."""
        self._open.pop(text, None)
        self._lost += 1
        self.tally["broken off"] += 1

    def left(self, text: str) -> None:
        """The client went away: nothing is owed any more."""
        PROMISES.requests -= self._open.pop(text, None) is not None
        self.tally["left"] += 1

    def may_be_lost(self, texts: Collection[str]) -> None:
        """Nobody promised that Redis remembers these. The verdict counts them; no promise is broken."""
        PROMISES.requests -= sum(text in self._open for text in texts)

    def verdict(self, seen_upstream: Iterable[str] = ()) -> Verdict:
        """The counts; `seen_upstream` are all inputs that the upstream was sent, with repeats."""
        repeats = sum(number - 1 for number in Counter(seen_upstream).values())
        return Verdict(self._lost + len(self._open), self._wrong, self._duplicates, repeats, self._late)

    def _is_promised(self, text: str, status: int) -> bool:
        return any(mark in text and status in statuses for mark, statuses in self._errors.items())

    def _ended(self, text: str, outcome: str, *, is_as_promised: bool) -> None:
        due = self._open.pop(text, None)
        if due is not None:
            self._outcomes[text] = outcome
            is_late = time.monotonic() > due
            self._late += is_late
            PROMISES.kept += is_as_promised and not is_late
        elif self._outcomes.get(text) != outcome:
            self._duplicates += 1  # it had another one, or was never owed any
            PROMISES.kept -= not self._may_tell_again
