"""Owners whose inputs keep being refused: they share batches with one another only, until their inputs pass. Pure.

1. Every refused input adds one to its owner's score, up to SCORE_MAX; every input that passes takes a small part away,
   and so does time. From QUARANTINED_FROM on the owner is quarantined, below RETURNS_BELOW it is not any more. So at
   high rates one bad input in some forty quarantines an owner, at low rates three within a few seconds.
2. Owners that other batchers of a fleet have quarantined are quarantined here for as long as these repeat it.
3. Memory is bounded: the owners with the oldest refusals are forgotten first.
4. Where most batches are refused, searches take too long to find single inputs. If one owner is the reason, it is in
   every call that was refused and in none that was answered; if one owner is left, it is quarantined (`CommonOwner`).
"""

from collections.abc import Iterable, Set
from typing import NamedTuple

SCORE_MAX = 8.0
QUARANTINED_FROM = 3.0
SUSPECT_FROM = 1.5
RETURNS_BELOW = 1.0
PASSED_LEAVES = 1 - 1 / 128
HALF_LIFE_S = 10.0
TRACKED_MAX = 10_000
# Rule 2. Heartbeats come twice a second.
TOLD_S = 3.0
# Rule 4: so many batches must have been refused.
BATCHES_MIN = 3


class Rider(NamedTuple):
    """An owner, at one model: what one model refuses another may take."""

    model: str
    owner: str


class Quarantine:
    """Which owners are quarantined. `in` asks; an empty one is false, which spares callers that question."""

    __slots__ = ("_scores", "_set", "_told", "riders", "were_quarantined")

    def __init__(self) -> None:
        # The score, and when it had that value; the owner whose last refusal is oldest first.
        self._scores: dict[Rider, tuple[float, float]] = {}
        # Quarantined by what was seen here; and by what other batchers say, until when.
        self._set: set[tuple[str, str]] = set()
        self._told: dict[tuple[str, str], float] = {}
        # All of these, in one plain set: asking it whether it is empty, for each request, takes no call into Python.
        self.riders: set[tuple[str, str]] = set()
        # For metrics: how often an owner was quarantined.
        self.were_quarantined = 0

    def __repr__(self) -> str:
        return f"<Quarantine now={len(self._set)} told={len(self._told)} tracked={len(self._scores)}>"

    def __bool__(self) -> bool:
        return bool(self.riders)

    def __contains__(self, rider: object) -> bool:
        return rider in self.riders

    def is_suspect(self, model: str, owner: str, now: float) -> bool:
        """Whether more than one input of this owner was refused just now."""
        return bool(self._scores) and self._score(Rider(model, owner), now) >= SUSPECT_FROM

    @property
    def is_tracking(self) -> bool:
        """Whether `passed` needs to be called at all."""
        return bool(self._scores)

    def refused(self, model: str, owner: str, now: float, count: float = 1.0) -> None:
        """An input of this owner was refused."""
        rider = Rider(model, owner)
        score = min(SCORE_MAX, self._score(rider, now) + count)
        self._scores.pop(rider, None)
        if len(self._scores) >= TRACKED_MAX:
            self._forget(next(iter(self._scores)))
        self._scores[rider] = (score, now)
        if score >= QUARANTINED_FROM and rider not in self._set:
            self._set.add(rider)
            self.riders.add(rider)
            self.were_quarantined += 1

    def take_back(self, model: str, owner: str, now: float) -> None:
        """A refusal was none of this owner's fault."""
        rider = Rider(model, owner)
        if rider in self._scores:
            score = max(0.0, self._score(rider, now) - 1.0)
            self._scores[rider] = (score, now)
            self._look(rider, score)

    def forgive_all(self, model: str) -> None:
        """What was refused at a model until now was no owner's fault, as far as is known."""
        for rider in [rider for rider in self._scores if rider.model == model]:
            self._forget(rider)

    def passed(self, model: str, owner: str, now: float) -> None:
        """An input of this owner was answered."""
        rider = Rider(model, owner)
        if rider in self._scores:
            score = self._score(rider, now) * PASSED_LEAVES
            self._scores[rider] = (score, now)
            self._look(rider, score)

    def look(self, now: float, waiting: Set[tuple[str, str]] = frozenset()) -> None:
        """Let scores decay; to be called once a second or so. Those of quarantined owners whose requests wait do not:
        no input of theirs was tested meanwhile.
        """
        for rider in list(self._scores):
            if rider in waiting and rider in self._set:
                self._scores[rider] = (self._scores[rider][0], now)
            else:
                self._look(rider, self._score(rider, now))
        self._told = {rider: until for rider, until in self._told.items() if until > now}
        self.riders.intersection_update(self._set | self._told.keys())

    def told(self, riders: Iterable[tuple[str, str]], now: float) -> None:
        """Other batchers have quarantined these."""
        for model, owner in riders:
            if len(self._told) < TRACKED_MAX or (model, owner) in self._told:
                self._told[Rider(model, owner)] = now + TOLD_S
                self.riders.add(Rider(model, owner))

    def seen_at(self, model: str) -> list[str]:
        """The owners quarantined at a model by what was seen here, the newest last: what other batchers should know.

        What other batchers said is not passed on: two that repeat each other's word would never forget.
        """
        return [rider.owner for rider in self._scores if rider.model == model and rider in self._set]

    def of_model(self, model: str) -> list[str]:
        """The owners that are quarantined at a model, by what was seen here or by the word of other batchers."""
        return sorted(owner for name, owner in self.riders if name == model)

    def _score(self, rider: Rider, now: float) -> float:
        score, then = self._scores.get(rider, (0.0, now))
        return score * float(0.5 ** (max(0.0, now - then) / HALF_LIFE_S))

    def _look(self, rider: Rider, score: float) -> None:
        if score < RETURNS_BELOW:
            self._release(rider)
        if score < RETURNS_BELOW / 8:
            self._forget(rider)

    def _forget(self, rider: Rider) -> None:
        del self._scores[rider]
        self._release(rider)

    def _release(self, rider: Rider) -> None:
        self._set.discard(rider)
        if rider not in self._told:
            self.riders.discard(rider)


class CommonOwner:
    """Rule 4: the owner whom all refusals have in common."""

    __slots__ = ("_batches", "_candidates", "_is_any_answered")

    def __init__(self) -> None:
        # Empty: nothing was refused lately.
        self._candidates: Set[str] = frozenset()
        self._batches = 0
        # While nothing was answered, it may be the endpoint that refuses everything.
        self._is_any_answered = False

    def __bool__(self) -> bool:
        return bool(self._candidates)

    def __repr__(self) -> str:
        return f"<CommonOwner of {len(self._candidates)}, {self._batches} batches>"

    def refused(self, owners: Set[str], *, is_batch: bool) -> str | None:
        """A call with inputs of these owners was refused; the one owner that explains all of it, if there is one."""
        common = self._candidates & owners
        if not common:  # no owner explains all refusals: begin again with this one
            common, self._batches, self._is_any_answered = owners, 0, False
        self._candidates = common
        self._batches += is_batch
        return self._found()

    def answered(self, owners: Set[str]) -> str | None:
        """A call with inputs of these owners was answered; the one owner that is left, if there is one."""
        if self._candidates:
            self._candidates = self._candidates - owners
            self._is_any_answered = True
        return self._found()

    def forget(self) -> None:
        """Batches are answered again."""
        self._candidates, self._batches, self._is_any_answered = frozenset(), 0, False

    def _found(self) -> str | None:
        if len(self._candidates) != 1 or self._batches < BATCHES_MIN or not self._is_any_answered:
            return None
        (owner,) = self._candidates
        return owner
