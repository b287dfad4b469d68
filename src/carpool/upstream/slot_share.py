"""How much of the slots' time goes to searches and quarantined owners while others wait. Pure: `now` is an argument.

1. They earn `share` of every slot-second, and pay what they use while others wait. What they don't use is carried over,
   up to CARRIED_S seconds of it; so a share of 0.05 of four slots is one slot for a fifth of the time.
2. A call may start while nothing is owed. It is paid in advance, by what calls take lately, and set right when it ends.
3. What they use while no other request waits is free.
4. The share protects the batches of others. Where most of those are refused themselves, only a search can help: then
   searches earn the share of the batches that are refused.
"""

from math import inf

CARRIED_S = 2.0
# Rule 4: weight of the newest batch.
REFUSED_WEIGHT = 0.25
MOSTLY = 0.5


class SlotShare:
    """An account in slot-seconds."""

    __slots__ = ("_balance_s", "_share", "_updated", "refused_share")

    def __init__(self, share: float) -> None:
        self._share = share
        self._balance_s = 0.0
        self._updated = -inf
        # The share of the batches of others that are refused, lately.
        self.refused_share = 0.0

    def __repr__(self) -> str:
        return f"<SlotShare {self._balance_s:.3f} s>"

    def allows(self, now: float, slots: float) -> bool:
        """Whether a call may start though others wait; `slots`: those in use now."""
        most_s = self._share * slots * CARRIED_S
        if self._updated == -inf:
            self._balance_s = most_s
        elif now > self._updated:
            earned_s = max(self._share, self.mostly_refused) * slots * (now - self._updated)
            self._balance_s = min(most_s, self._balance_s + earned_s)
        self._updated = max(now, self._updated)
        return self._balance_s >= 0.0

    def at_once(self, slots: float) -> int:
        """How many calls may be under way before others notice."""
        return max(1, int(slots if self.mostly_refused else self._share * slots))

    @property
    def mostly_refused(self) -> float:
        """Rule 4: the share of the batches that are refused, if that is most of them; else 0."""
        return self.refused_share if self.refused_share >= MOSTLY else 0.0

    def batch_ended(self, is_refused: bool) -> None:
        """A batch of others was answered, or refused."""
        self.refused_share += REFUSED_WEIGHT * (is_refused - self.refused_share)
        if self.refused_share < 0.001:
            self.refused_share = 0.0  # so that the dispatcher need not report batches any more

    def pay(self, seconds: float) -> None:
        """A call takes so long; negative to give back what it did not take."""
        self._balance_s -= seconds
