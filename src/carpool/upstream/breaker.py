"""When to leave a sick endpoint alone. Pure: `now` and randomness are arguments.

1. Closed: calls go through. `failures_max` failures in a row open it; any success starts the count again.
2. Open: no call until a pause has passed. The pause doubles with each failed probe, up to a limit, with jitter
   so that many gateways do not probe together.
3. Half-open, when the pause has passed: one probe at a time. It succeeds: closed. It fails: open again, for longer.
4. Answers to calls that began before the breaker opened are old news: during the pause they change nothing, except
   that a success closes it. An endpoint that answers is well. What is known to have failed after the pause opens it
   again: a probe whose batch was refused as bad input tells nothing until the search for the bad input has ended.
5. What is refused for its input is no failure: the endpoint answered.
6. Where all that is known against the endpoint are inputs of one owner that failed, it is closed to that owner only: a
   request of any other owner may probe at once. If that fails too, or more is known against it, it is closed to all.
7. One search makes many calls with one owner's inputs. All but the first count as `again`: they help to close the
   endpoint to that owner, never to all.
8. A call that failed here and was answered elsewhere was healed: the endpoint is at fault for certain, whatever became
   of its other calls. So these are not counted in a row: each success takes an eighth off their count, and the breaker
   opens at `failures_max`, which is when more than 40 % of recent calls were healed. Where it is closed to one owner
   (rule 6), one healed call closes it to all. While some were healed lately, pauses go on doubling.
"""

from collections.abc import Collection
from typing import Literal

State = Literal["closed", "open", "half-open"]

# Rule 8: what a success leaves of the count of healed failures.
HEALED_LEFT = 1 - 1 / 8
# Below the first the count no longer keeps pauses long; below the second it is set to 0.
HEALED_FEW, HEALED_NONE = 0.25, 0.01


class Breaker:
    """The circuit breaker of one endpoint."""

    __slots__ = (
        "_again",
        "_failures",
        "_failures_max",
        "_healed",
        "_is_for_all",
        "_only_owner",
        "_pause_s",
        "_pause_s_first",
        "_pause_s_max",
        "_probe_until",
        "_unowned",
        "state",
    )

    def __init__(self, failures_max: int = 5, pause_s: float = 1.0, pause_s_max: float = 30.0) -> None:
        self.state: State = "closed"
        self._failures_max = failures_max
        self._pause_s_first = pause_s
        self._pause_s_max = pause_s_max
        # Failures in a row while closed.
        self._failures = 0
        # The pause to take when it opens next.
        self._pause_s = pause_s
        # While open: when a probe may go.
        self._probe_until = 0.0
        # Rule 6, of the failures in a row: the one owner whose inputs failed, and whether more is known than that.
        self._only_owner: str | None = None
        self._is_for_all = False
        # Failures in a row that no owner's inputs explain.
        self._unowned = 0
        # Rule 7.
        self._again = 0
        # Rule 8.
        self._healed = 0.0

    def __repr__(self) -> str:
        return f"<Breaker {self.state} failures={self._failures}>"

    @property
    def failures(self) -> int:
        """Failures in a row."""
        return self._failures

    @property
    def is_failing(self) -> bool:
        """Whether it would be open, had the pool been able to do without the endpoint."""
        return self._failures + (0 if self._is_for_all else self._again) >= self._failures_max

    @property
    def was_healed(self) -> bool:
        """Whether lately something failed here that was answered elsewhere (rule 8)."""
        return self._healed >= HEALED_FEW

    @property
    def blamed_owner(self) -> str | None:
        """The owner whose inputs are all that is known against the endpoint; None if there is more, or nothing."""
        return None if self._is_for_all else self._only_owner

    @property
    def is_closed_to_one(self) -> bool:
        """Whether calls are kept from `blamed_owner` alone. The others have a probe at a time: one may be under way."""
        return self.state != "closed" and self.blamed_owner is not None

    def allows(self, now: float) -> bool:
        """Whether a call may start now."""
        return self.state == "closed" or (self.state == "open" and now >= self._probe_until)

    def allows_others(self) -> bool:
        """Whether a call for any other owner than `blamed_owner` may start now, as a probe."""
        return self.state == "open" and self.blamed_owner is not None

    def probe_at(self) -> float:
        """While open: when the next probe may go."""
        return self._probe_until

    def started(self, now: float) -> bool:
        """A call starts, which `allows` permitted; says whether it is a probe."""
        if self.state != "open":
            return False
        self.state = "half-open"
        return True

    def succeeded(self) -> None:
        """A call was answered."""
        self.state = "closed"
        self._failures = 0
        if self._healed:
            self._healed = self._healed * HEALED_LEFT if self._healed > HEALED_NONE else 0.0
        if not self.was_healed:
            self._pause_s = self._pause_s_first
        self._only_owner, self._is_for_all, self._unowned, self._again = None, False, 0, 0

    def failed(
        self,
        now: float,
        random_share: float,
        *,
        probe: bool = False,
        may_open: bool = True,
        owners: Collection[str] = (),
    ) -> bool:
        """A call failed; says whether that opened the breaker. `may_open`: the pool can do without this endpoint.

        `owners`: whose inputs failed, if nothing else is known against the endpoint.
        """
        if self.state == "half-open" and not probe:
            return False
        if self.state == "open" and now < self._probe_until:
            return False
        self._failures += 1
        if not owners:
            # A single one of these among failures of one owner changes nothing; a probe that fails so does.
            self._unowned += 1
            if probe or self._unowned >= self._failures_max:
                self.close_to_all()
        elif len(owners) > 1 or self._only_owner not in (None, *owners):
            self.close_to_all()
        else:
            (self._only_owner,) = owners
        return self._open_if_failing(now, random_share, may_open)

    def failed_again(self, now: float, random_share: float, owner: str, *, may_open: bool) -> bool:
        """One more call of the same search failed, all with inputs of this owner (rule 7); as `failed`."""
        if self.state != "closed" or self._only_owner not in (None, owner):
            return False
        self._only_owner = owner
        self._again += 1
        return self._open_if_failing(now, random_share, may_open)

    def record_answered_elsewhere(self, now: float, random_share: float, *, may_open: bool) -> bool:
        """A call that failed here was answered elsewhere (rule 8); called besides `failed`, and returns the same."""
        self._healed = min(self._healed + 1.0, float(self._failures_max))
        is_due = self._healed >= self._failures_max if self.state == "closed" else self.allows_others()
        if not (is_due and may_open):
            return False
        self.close_to_all()
        self.open(now, random_share)
        return True

    def _open_if_failing(self, now: float, random_share: float, may_open: bool) -> bool:
        if self.state == "closed" and not (self.is_failing and may_open):
            return False
        self.open(now, random_share)
        return True

    def open(self, now: float, random_share: float) -> None:
        """Leave the endpoint alone for a pause."""
        self.state = "open"
        # Half of the pause is certain, half is jitter.
        self._probe_until = now + self._pause_s * (0.5 + random_share / 2)
        self._pause_s = min(self._pause_s_max, self._pause_s * 2)

    def close_to_all(self) -> None:
        """More is known against the endpoint than inputs of one owner."""
        self._is_for_all = True

    def probe_left(self) -> None:
        """A probe ended without an answer that says anything (cancelled): the next call may probe at once."""
        if self.state == "half-open":
            self.state = "open"
