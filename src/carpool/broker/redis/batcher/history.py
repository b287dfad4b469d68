"""What batchers know of an entry that other batchers had before them. Pure.

1. Redis counts how often an entry was delivered. A batcher that gives one back sets that count, and carries along in
   it, above the deliveries: with how many batchers it failed, how often it was given back, whether it was a probe,
   and whether its input was blamed. So nothing is written for entries that are served at once, and replicas know it.
2. An entry goes back to the queue twice at most. So two batchers that are both sick cannot hand it to each other for
   ever.
3. An entry is a probe once: batchers whose endpoints failed must not try them with the same request one after another.
4. An entry that failed with two batchers was not alone in its calls, as a rule: one of its company may have killed both
   endpoints. From then on it is sent alone.
"""

from typing import NamedTuple

# As in scripts/common.lua.
CARRIED_FROM = 1024
_FAILURES_MAX, _RETURNS_MAX = 7, 3
_RETURN, _PROBE, _BLAMED = 8, 32, 64
# Rules 2 and 4.
RETURNS_MAX = 2
ALONE_FROM = 2


class History(NamedTuple):
    """One entry, before this batcher sends it."""

    # How often it was delivered; each but the last time its batcher died.
    deliveries: int = 1
    # Batchers that sent it and got no answer for it.
    failures: int = 0
    returns: int = 0
    was_probe: bool = False
    # A batcher would have blamed its input, and asks for another batcher's verdict.
    was_blamed: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether it has a batch of its own: rule 4."""
        return self.failures >= ALONE_FROM

    @property
    def may_go_back(self) -> bool:
        """Rule 2."""
        return self.returns < RETURNS_MAX

    @property
    def carried(self) -> int:
        """As scripts/release.lua wants it."""
        failures, returns = min(self.failures, _FAILURES_MAX), min(self.returns, _RETURNS_MAX)
        return failures + _RETURN * returns + _PROBE * self.was_probe + _BLAMED * self.was_blamed

    def given_back(self, *, failed: bool, was_probe: bool, is_alone: bool = False) -> "History":
        """The history of an entry that goes back. `failed`: it was sent, and not answered; `is_alone`: it was sent
        alone, too, and is to be so again.
        """
        failures = self.failures + failed
        if is_alone:
            failures = max(failures, ALONE_FROM)
        was_probe, was_blamed = self.was_probe or was_probe, self.was_blamed or is_alone
        return History(self.deliveries, failures, self.returns + 1, was_probe, was_blamed)


def history_of(count: int) -> History:
    """What Redis's count of deliveries says of an entry."""
    carried, deliveries = divmod(count, CARRIED_FROM)
    was_probe, was_blamed = carried % _BLAMED >= _PROBE, carried >= _BLAMED
    return History(deliveries, carried % _RETURN, carried % _PROBE // _RETURN, was_probe, was_blamed)
