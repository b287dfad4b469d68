"""One batch that was refused: what has been seen of it so far. What follows from that is decided by isolation.py."""

from collections.abc import Collection

from carpool.core.request import Request
from carpool.upstream.attempts import Failure
from carpool.upstream.bisection import Bisection, Slice
from carpool.upstream.poison import key_of
from carpool.upstream.pool import EndpointState


class BisectionRun:
    """One batch that was refused, and what is known of its members."""

    __slots__ = (
        "answered_by",
        "asked",
        "batch",
        "counted",
        "failure",
        "is_unproven",
        "known",
        "last",
        "parts_answered",
        "refused_alone_by",
        "refused_by",
        "search",
        "started",
        "under_way",
        "waiting_since",
        "wholes_refused",
    )

    def __init__(self, batch: list[Request], search: Bisection, failure: Failure | None, now: float) -> None:
        self.batch = batch
        self.search = search
        # The refusal it began with; None for inputs that are sent alone because they are known, and their hashes.
        self.failure = failure
        self.known = [key_of(request) for request in batch] if failure is None else []
        self.started = failure.started if failure is not None else now
        # By member: the endpoints that refused a call with it, those that refused it alone, and the last refusal.
        self.refused_by: dict[int, set[EndpointState]] = {}
        self.refused_alone_by: dict[int, set[EndpointState]] = {}
        self.last: dict[int, Failure] = {}
        # The endpoints that answered a part of it.
        self.answered_by: set[EndpointState] = set()
        # The groups that were answered, and those that were refused, with the endpoints that did so.
        self.parts_answered: list[Slice] = []
        self.wholes_refused: list[tuple[Slice, EndpointState]] = []
        # Owners whose score this search has raised already (quarantine.py).
        self.counted: set[str] = set()
        # How many endpoints were asked about a member alone, where it was more than one.
        self.asked: dict[int, int] = {}
        # Whether it was refused before an endpoint worked, and no part of it since.
        self.is_unproven = False
        self.under_way = 0
        # Since when it waits for a slot.
        self.waiting_since = now

    def refused_again_by(self, members: Collection[EndpointState]) -> list[EndpointState]:
        """Of these endpoints: one entry for each call that was refused, but the first."""
        again = []
        for member in members:
            groups = sum(by is member for _, by in self.wholes_refused)
            alone = sum(member in by for by in self.refused_alone_by.values())
            again += [member] * (groups + alone - 1)
        return again

    def note(self, group: Slice, failure: Failure) -> None:
        """A call with these members was refused. Requests that have left meanwhile may have been in it, too."""
        member = failure.member
        for index in range(group.first, group.end):
            self.last[index] = failure
            if member is not None:
                self.refused_by.setdefault(index, set()).add(member)
                if failure.size == group.size == 1:
                    self.refused_alone_by.setdefault(index, set()).add(member)
        if member is not None and failure.size == group.size > 1:
            self.wholes_refused.append((group, member))

    def good_wholes(self) -> dict[EndpointState, tuple[int, int]]:
        """By endpoint: the size of the smallest group that it refused though every member was answered later on, and
        the size of the largest part of that which was answered.
        """
        found: dict[EndpointState, tuple[int, int]] = {}
        for whole, member in self.wholes_refused:
            parts = [part.size for part in self.parts_answered if whole.first <= part.first and part.end <= whole.end]
            if sum(parts) == whole.size and (member not in found or whole.size < found[member][0]):
                found[member] = whole.size, max(parts)
        return found
