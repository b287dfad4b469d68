"""Who is sent where, and who is at fault: every decision towards the upstream. No I/O; the shell (dispatch.py) reports
events to `decide` and performs the actions that it returns.

What an answer without outputs means, its kind, is the codec's to say (codecs/refusals.py):
   elsewhere  no answer, 429, 502 to 504: nothing about the inputs       rule 2
   fault      2xx, but no valid answer                                   rule 2, at one other endpoint
   bisect     400, 422, 424, 500: an input may be bad                    rule 9
   split      413, or words about a limit: too many inputs               rule 4
   give-up    other statuses, like 401: repeating it would not help      told to the clients; or rule 9, where the
              endpoint answers other calls, and the status is not about the call whatever its inputs are

Calls
1. A batch that forms goes to a free slot. A call that its endpoint answers ends the matter.
2. A failure of the endpoint (no answer, 5xx that blames no input, a broken protocol) sends the batch to another
   endpoint, `attempts` times in all: the second attempt is made at once and free if one is known to be well; any
   other waits for a pause and takes from the retry budget. Before every call, requests that have left or are late are
   dropped.
3. A call on a kept connection that turned out to be closed is sent again at once, in the same slot. That is an attempt,
   and paid for: the call may have been received. The first one says nothing against the endpoint.
4. No endpoint gets more inputs than it is known to take (limits.py). A batch that is too large goes in parts.
5. A retry takes a slot before batches do: its requests are the oldest there are.
6. A batch that failed goes back to the queue where no endpoint here is known to be well, but another batcher has one.
   Its slot stays taken as long as a call takes, else an endpoint that fails at once would draw every request.

Endpoints
7. Failures in a row open an endpoint's breaker, and so does a share of calls that failed here and were answered
   elsewhere (breaker.py). An open one is tried with one call after a pause (pool.py).
8. Failures that one owner's inputs explain bar that owner alone from an endpoint; the owner is quarantined.

Inputs
9. A refusal that may blame an input ("bisect") begins a search (bisection.py): halves are sent until each bad input was
   refused alone. But where the endpoint is in doubt, another one that is known to be well is asked about the whole
   first. The steps of a search take nothing from the attempts of its requests, and what they are refused says nothing
   against an endpoint, but no answer does; they go to another endpoint than the one that refused, if there is one. An
   input that brings no answer at all is not searched for: its batch fails with it.
10. An input that was refused alone is at fault if its endpoint is known to be right: it has answered others of the
   lane, and a second endpoint, if there is one, has refused calls with this input too; or if two that are all there are
   have refused it alone with 400 or 422. Its client gets a 422, it is kept as a dead letter, and the same input is sent
   alone for a time. An endpoint that refuses what another answers is itself at fault, but not if the input that it
   refused may have left with its client. Where neither is known, the client gets the API's own word, and the endpoint
   is suspected by this owner's inputs only.
11. Where other batchers have endpoints that work, one of them is asked before an input is blamed. Where both halves of
   a batch were refused and nothing was answered meanwhile, it is hardly an input: what waits goes back to the queue.
12. For a call that began before an endpoint had answered one well, no input is blamed and no owner is quarantined.
13. While others wait for slots, searches and batches of quarantined owners have a share of the slots' time
   (slot_share.py). Where few wait, and while nothing has been answered since the refusal, searches and batches take
   turns. Slots that no batch needs are free for them.

Owners
14. Members are searched in the order of their owners: what one owner broke lies together. An owner whose inputs keep
   being refused is quarantined (quarantine.py): its requests share no batch with others.
15. A request that a search has cleared goes back to the head of its lane. One that cannot be resolved in time gets the
   503 that says so.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from math import inf
from typing import NamedTuple

from carpool.core.defaults import do_nothing
from carpool.core.errors import (
    CarpoolError,
    DeadlineExceeded,
    InputRefused,
    Unresolved,
    UpstreamFailed,
    UpstreamRefused,
)
from carpool.core.outcome import Output
from carpool.core.ports import OtherBatchers
from carpool.core.request import DONE, RUNNING, Request
from carpool.upstream.bisection import Bisection, Slice
from carpool.upstream.codecs.base import Refusal
from carpool.upstream.first_contact import never_worked
from carpool.upstream.poison import KnownPoison, key_of
from carpool.upstream.pool import DOUBT_MAX, IN_DOUBT_FROM, WELL_S, EndpointPreference, EndpointState, Pool
from carpool.upstream.quarantine import QUARANTINED_FROM, CommonOwner, Quarantine
from carpool.upstream.refusals import RefusedShares, is_singly, may_clear
from carpool.upstream.retry import RetryBudget, pause_before
from carpool.upstream.slot_share import SlotShare

# While something is not as it should be: how often slots, deadlines and the account are looked at.
LOOK_S = 0.01
# A timer of the event loop may fire so much before its time.
TIMER_EARLY_S = 0.01
# A call that its clients' deadlines cut off sooner than this many times what calls take says nothing of the endpoint,
# if that has answered within this time, or within CUT_SHORT times what calls take.
CUT_SHORT, ANSWERS_S = 2.0, 1.0
# Statuses that are about the call, whatever its inputs are: credentials, addresses, methods, sizes, time.
OF_THE_CALL = frozenset({401, 402, 404, 405, 407, 408, 411, 413, 426, 429, 431})
# Rule 6: no slot stays taken for longer than this after its call.
HELD_S_MAX = 1.0
# So many retries may be saved up with few slots.
RETRIES_KEPT_MIN = 20.0
# How long a call takes, until the first has been seen; and the weight of the newest.
SERVICE_S_PRIOR = 0.2
SERVICE_WEIGHT = 0.1
# Rule 13: share of the slots' time that searches and batches of quarantined owners may have while others wait. A client
# with bad inputs must not cost the others more.
BISECT_SLOT_SHARE = 0.2
# Rule 13: a step goes before other requests while fewer of these will wait when the next slot is free than so many
# batches plus WORTH times its members; and the most batches that are expected to come together until then.
OTHERS_BATCHES, MISSED_MAX = 1.45, 3.0
# The weight of a member of a search, where a request that waits in a lane has 1.
WORTH = 0.5
# However many wait, a slot is due after so long: to a search of half a batch or more, and to a smaller one.
STARVED_S, STARVED_SMALL_S = 1.5, 3.0
# Quarantined owners go while fewer wait than this share of a batch; or when they have waited so long.
OTHERS_SHARE_QUARANTINED = 0.1
STARVED_QUARANTINED_S = 1.0
# Where fewer wait than this share of a batch, slots take small batches: every second one may be a search's.
FEW_SHARE = 0.25
# Without others for so long, quarantined owners may have every slot.
OTHERS_GONE_S = 1.0
# From this share of refused batches on, one owner is looked for whom all refused calls have in common.
MOSTLY_REFUSED = 0.4
# A step is not begun that would end after the deadline; a call is not expected to take longer than this.
STEP_S_MAX = 1.0
# What a step shows of a group of at most this size counts only if the endpoint is well.
FEW = 3
# Where a refusal may be the endpoint's fault, it must have answered others so lately for a request that came alone.
SURE_S = 1.0
# How many endpoints are asked about one input alone, if none of those before is known to be right.
ASKED_ALONE_MAX = 4
# Rule 11: a batch and its halves.
WHOLES_REFUSED_MAX = 3
# The result of a batch of which all inputs were known to be at fault.
NOT_SENT = "not-sent"


class Failure(NamedTuple):
    """Why a call brought no outputs, and what it means."""

    refusal: Refusal
    error: CarpoolError
    # The endpoint that said so; None if no call was made.
    member: EndpointState | None = None
    # How many were in the call, and when it began.
    size: int = 0
    started: float = 0.0
    # What it answered; 0 if no answer came.
    status: int = 0
    # For operators: what it did, and where to look (first_contact.py).
    what: str = ""
    look_at: str = ""
    # A kept connection turned out to be closed.
    is_dead: bool = False
    # This process stood still: the answer may have come while it could not read it.
    was_away: bool = False
    # What follows is for the scheduler to say. The refusal blames the input, not the endpoint.
    is_certain: bool = False
    # As a rule such a refusal blames no input: only answers that came after it show that it does here.
    needs_proof: bool = False
    # It counts against the endpoint, which was not only busy, and had as long as calls take.
    counts: bool = True
    # Another endpoint, which refused the same whole.
    refused_too: EndpointState | None = None


class Job:
    """Requests that are sent together, and what became of their calls so far."""

    __slots__ = (
        "attempt", "dead_in_a_row", "ended", "failures", "group", "is_paid", "last", "members", "paid_s",
        "ready_at", "search", "sent", "started",
    )  # fmt: skip

    def __init__(self, members: list[Request], now: float, ended: Callable[[float], None]) -> None:
        self.members = members
        # Those of them that were answered: the clients of others had left.
        self.sent: list[Request] = []
        # For the shell: who hears how long its calls take.
        self.ended = ended
        self.attempt = 0
        self.dead_in_a_row = 0
        # The failures after which another endpoint was asked, and the last failure of all.
        self.failures: list[tuple[EndpointState, Failure]] = []
        self.last: Failure | None = None
        # When it may be sent again.
        self.ready_at = now
        # The search of which this is a step, and the group that is sent.
        self.search: Search | None = None
        self.group = Slice(0, 0)
        # Rule 13: it was paid for from the share of searches, with so much, then.
        self.is_paid = False
        self.paid_s = 0.0
        self.started = now

    @property
    def is_quiet(self) -> bool:
        """Steps of searches, and quarantined owners, bring no endpoint into doubt."""
        return self.search is not None or self.members[0].is_quarantined


class Call(NamedTuple):
    """One call: the members of a job that still wait, to one endpoint."""

    job: Job
    members: list[Request]
    member: EndpointState
    attempt: int
    timeout_s: float
    began: float
    # When the last of the members' deadlines ends it; infinity if the timeout of calls comes first.
    over_at: float


# Events.


class Formed(NamedTuple):
    """A batch has taken a slot (`Scheduler.take`)."""

    batch: list[Request]
    member: EndpointState
    ended: Callable[[float], None]


class Answered(NamedTuple):
    """A call was answered; its slot was given back when the answer had been read."""

    call: Call
    outputs: Sequence[Output]


class Failed(NamedTuple):
    """A call brought no outputs."""

    call: Call
    failure: Failure


class Broke(NamedTuple):
    """A defect, or the end of the process, ended a call: it says nothing. `error` is for its members."""

    call: Call
    error: CarpoolError


class NotMade(NamedTuple):
    """A call was not made: no member waits for it any more."""

    call: Call


class Tick(NamedTuple):
    """Time has passed."""


Event = Formed | Answered | Failed | Broke | NotMade | Tick


# Actions.


class Send(NamedTuple):
    """Make this call."""

    call: Call


class Deliver(NamedTuple):
    """Give the members of a call their outputs."""

    members: list[Request]
    outputs: Sequence[Output]


class Settle(NamedTuple):
    """Give a request this error, and keep it as a dead letter if that is wanted."""

    request: Request
    error: CarpoolError
    may_be_letter: bool = False


class Rest(NamedTuple):
    """Try a task again in a while: it failed before any endpoint worked."""

    request: Request
    error: CarpoolError


class PutBack(NamedTuple):
    """Let requests wait for a batch again, before those that came after them."""

    requests: list[Request]


class GiveBack(NamedTuple):
    """Let another batcher have a request. `is_alone`: to be sent alone, for its input would be blamed here."""

    request: Request
    is_alone: bool


class BatchOver(NamedTuple):
    """The calls of a batch are over; a search for what is at fault may follow. Its result is for operators."""

    batch: list[Request]
    result: str


class LimitLearned(NamedTuple):
    """An endpoint takes fewer inputs than it was sent."""

    member: EndpointState


class Warn(NamedTuple):
    """Operators should know. `members`: of the batch that it is about."""

    text: str
    fields: dict[str, object]
    members: Sequence[Request] = ()


class Tell(NamedTuple):
    """An endpoint that may never have worked failed a call: what it did, and where to look (first_contact.py)."""

    member: EndpointState
    what: str
    look_at: str


Action = Send | Deliver | Settle | Rest | PutBack | GiveBack | BatchOver | LimitLearned | Warn | Tell


class Search:
    """One batch that was refused, and what is known of its members."""

    __slots__ = (
        "answered_by", "asked", "batch", "bisection", "counted", "failure", "is_quarantined", "is_unproven", "known",
        "lane_key", "last",
        "parts_answered", "refused_alone_by", "refused_by", "started", "under_way", "waiting_since", "wholes_refused",
    )  # fmt: skip

    def __init__(self, batch: list[Request], bisection: Bisection, failure: Failure | None, now: float) -> None:
        self.batch = batch
        self.bisection = bisection
        # Of the batch: a member whose owner is quarantined meanwhile changes neither.
        self.is_quarantined, self.lane_key = batch[0].is_quarantined, batch[0].lane_key
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

    def waiting(self) -> list[Request]:
        """Members of whom nothing is known, and who are in no call now."""
        return [self.batch[index] for index in self.bisection.waiting()]

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


class Scheduler:
    """The decisions of one model."""

    def __init__(
        self,
        pool: Pool,
        *,
        model: str,
        timeout_s: float,
        attempts: int,
        backoff_s: float,
        max_batch: int,
        # How many requests wait that could share a batch, quarantined ones apart; and in all lanes together.
        others_waiting: Callable[[], int],
        all_waiting: Callable[[], int],
        quarantined: Quarantine,
        # None where this process has all endpoints there are.
        others: OtherBatchers | None,
        clock: Callable[[], float],
        random_share: Callable[[], float],
        budget: RetryBudget | None = None,
    ) -> None:
        self.pool = pool
        self._model = model
        self.timeout_s = timeout_s
        self._attempts = attempts
        self._backoff_s = backoff_s
        self._max_batch = max_batch
        self._others_waiting = others_waiting
        self._all_waiting = all_waiting
        self.quarantined = quarantined
        self._others = others
        self._clock = clock
        self._random_share = random_share
        # An endpoint that dies takes its calls with it: so much is saved up that all that run can be made again.
        self._budget = budget or RetryBudget(kept_max=max(RETRIES_KEPT_MIN, 2.0 * pool.total()), now=clock())
        self.slot_share = SlotShare(BISECT_SLOT_SHARE)
        self._shares = RefusedShares()
        self._known_poison = KnownPoison()
        self._common = CommonOwner()
        # Jobs that wait for a slot or for the end of their pause, and searches: in the order in which they came.
        self._retries: list[Job] = []
        self._searches: dict[Search, None] = {}
        self._serial = 0
        # When the calls under way began, the oldest first.
        self._began: dict[Job, float] = {}
        # Slots that stay taken after their call (rule 6), and until when.
        self._held: list[tuple[float, EndpointState]] = []
        self._now = -inf
        self._actions: list[Action] = []
        # What has been decided for a request is not done yet while `decide` runs.
        self._decided: set[Request] = set()
        # How long calls take, lately.
        self.service_s = SERVICE_S_PRIOR
        # Rule 13: whether others have had a slot since a search last took the only one that was free; when a slot was
        # last given to quarantined owners though others waited; and when others last waited for what those asked for.
        self._others_went = True
        self._quarantined_at = 0.0
        self._others_at = 0.0
        # Requests were cleared by a search: some that are sent now may have been in it.
        self.has_cleared = False
        # For metrics.
        self.poisoned = 0
        self.unresolved = 0
        self.steps = 0

    def __repr__(self) -> str:
        return f"<Scheduler retries={len(self._retries)} searches={len(self._searches)}>"

    # What batching asks (core.ports.Slots).

    def total(self) -> float:
        """Slots of the endpoints in use."""
        return self.pool.total()

    def free(self) -> int:
        """Slots that could take a batch now."""
        return self.pool.free()

    def free_for_quarantined(self) -> int:
        """Slots that could take a batch of quarantined owners now."""
        return self.pool.free_for_quarantined() if self.pool.free() and self._quarantined_may_go() else 0

    def is_quarantined_due(self) -> bool:
        """Whether quarantined owners have waited so long that a batch of them goes before others: ordered by age, they
        would starve under overload.
        """
        return self._clock() - self._quarantined_at > STARVED_QUARANTINED_S

    def when_slot_frees(self, notify: Callable[[], None]) -> None:
        """Have `notify` called when a slot becomes free."""
        self.pool.when_slot_frees(notify)

    def batch_max(self, lane_key: object, max_batch: int) -> int:
        """The most requests of a lane that should be in a batch now: fewer where bad inputs are common."""
        if self.pool.has_batch_limits:
            max_batch = self.pool.batch_max(max_batch)
        return self._shares.best_size(lane_key, max_batch) if self._shares else max_batch

    def is_crowded(self) -> bool:
        """Whether a whole batch waits for a slot."""
        return self._all_waiting() >= self.pool.batch_max(self._max_batch)

    def take(self, batch: list[Request]) -> EndpointState:
        """A slot for a batch; there is one. `Formed` follows."""
        return self.pool.take(batch[0].is_quarantined)

    # What the shell asks.

    @property
    def running(self) -> int:
        """Retries and searches that wait."""
        return len(self._retries) + len(self._searches)

    @property
    def searching(self) -> int:
        """Searches under way."""
        return len(self._searches)

    @property
    def is_restless(self) -> bool:
        """Whether a Tick is wanted every LOOK_S."""
        waits = self._retries or self._searches or self._held
        return bool(waits) or bool(self.quarantined) or self.pool.is_any_out or self.pool.is_any_resting

    def live(self, requests: Iterable[Request]) -> list[Request]:
        """The requests that still wait and whose deadline has not passed."""
        now, decided = self._now, self._decided
        live = [each for each in requests if each.phase != DONE and each.deadline > now]
        return [each for each in live if each not in decided] if decided else live

    def _is_any_live(self, requests: Iterable[Request]) -> bool:
        """Whether `live` would find any: most often the first is, and many jobs may be looked at with each event."""
        now, decided = self._now, self._decided
        return any(each.phase != DONE and each.deadline > now and each not in decided for each in requests)

    def give_up_all(self) -> list[Request]:
        """This process leaves: forget what waits, and say which requests that were."""
        left = [request for job in self._retries for request in job.members]
        for job in self._retries:
            self._help_ended(job)
        for search in self._searches:
            indices = (*search.bisection.members(), *search.bisection.refused_alone)
            left += [search.batch[index] for index in indices]
        self._retries, self._searches = [], {}
        return left

    def decide(self, event: Event, now: float) -> list[Action]:
        """What follows from an event. All of it must be done before the next event."""
        self._now, self._actions, self._decided = now, [], set()
        if isinstance(event, Answered | Failed | Broke | NotMade):
            self._began.pop(event.call.job, None)
        if isinstance(event, Answered):
            self._actions.append(Deliver(event.call.members, event.outputs))
            self._answered(event.call)
        elif isinstance(event, Formed):
            self._formed(event)
        elif isinstance(event, Failed):
            self._failed(event.call, event.failure)
        elif isinstance(event, Broke):
            self._broke(event.call, event.error)
        elif isinstance(event, NotMade):
            self._free(event.call.member)
            self._over(event.call.job, out_of_time())
        else:
            self._look()
        if self._retries or self._searches:
            self._use_free_slots()
        return self._actions

    def after_defect(self, event: Event, error: CarpoolError) -> list[Action]:
        """`decide` failed, which must leave no request without an outcome: what to do in place of that."""
        job = event.call.job if isinstance(event, Answered | Failed | Broke | NotMade) else None
        members = event.batch if isinstance(event, Formed) else list(job.members) if job is not None else []
        searches = [job.search] if job is not None and job.search is not None else []
        if isinstance(event, Tick):
            searches = list(self._searches)
        for search in searches:
            self._searches.pop(search, None)
            members += search.batch
        # Requests that were put back get theirs later.
        return [Settle(request, error) for request in dict.fromkeys(members) if request.phase == RUNNING]

    # Calls.

    def _formed(self, formed: Formed) -> None:
        batch, member, ended = formed
        self._budget.batch_sent()
        job = Job(batch, self._now, ended)
        if not batch[0].is_quarantined:
            self._others_went = True
        elif self._others_waiting() > 0:
            # What quarantined owners use while others wait is paid from the share of searches.
            self._pay(job)
            self._quarantined_at = self._now
        if len(batch) > 1 and self._known_poison:
            known = self._known_poison.among(batch, self._now)
            if known:
                singles = [Slice(index, index + 1) for index in range(len(known))]
                self._searches[Search(known, Bisection([], singles), None, self._now)] = None
                job.members = [request for request in batch if request not in known]
        if job.members:
            self._start(job, member)
        else:
            self._free(member)
            self._actions.append(BatchOver(batch, NOT_SENT))

    def _start(self, job: Job, member: EndpointState) -> None:
        """Call, in a slot of this endpoint that was taken."""
        now = self._now
        members = self.live(job.members)
        most = member.batch_limit.allows(now, len(members))
        if not 0 < len(members) <= most:
            self._free(member)
            self._over(job, too_many(len(members), most, now) if members else out_of_time())
            return
        member.batch_limit.largest(now, len(members))
        job.attempt += 1
        latest = max(request.deadline for request in members)
        over_at = latest if latest - now <= self.timeout_s else inf
        call = Call(job, members, member, job.attempt, min(self.timeout_s, latest - now), now, over_at)
        self._began[job] = now
        self._actions.append(Send(call))

    def _answered(self, call: Call) -> None:
        job, member = call.job, call.member
        now = self._now
        job.sent = call.members  # without those who left before it was written
        self.service_s += SERVICE_WEIGHT * (now - call.began - self.service_s)
        self.pool.record_success(member, call.members[0].common_key, call.began)
        if self._shares:
            self._shares.answered(call.members[0].lane_key, len(call.members))
        if self.quarantined.is_tracking:
            for request in call.members:
                self.quarantined.passed(self._model, request.owner, now)
        if len(job.members) > len(call.members):
            for request in job.members:  # those who were late before the call
                if request.phase != DONE and request not in call.members:
                    self._settle(request, DeadlineExceeded("no result in time"))
        self._over(job, member)

    def _failed(self, call: Call, failure: Failure) -> None:
        job, member = call.job, call.member
        for request in call.members:
            request.sends += 1
        if not failure.is_dead:
            failure = self._learned(call, failure)
        else:
            job.dead_in_a_row += 1
            if job.attempt < self._attempts and self._budget.take(self._now):
                self._start(job, member)
                return
            failure = failure._replace(counts=self._give_up_dead(job, member))
        job.dead_in_a_row, job.last = 0, failure
        kind = failure.refusal.kind
        is_over = self._now > call.over_at - TIMER_EARLY_S
        goes_on, held_s = not is_over and self._asks_another(job, failure, member), 0.0
        if goes_on:
            goes_on, held_s = self._give_back(call.members, failure, member)
        if goes_on:
            job.failures.append((member, failure))
            self.pool.is_helped(member)
        if kind == "fault":
            pass  # its slot was given back with the answer
        elif held_s:
            self._held.append((self._now + held_s, member))
        else:
            self.pool.give_back(member)
        if goes_on:
            fields: dict[str, object] = {"endpoint": member.name, "batch_size": len(call.members)}
            text = f"attempt {call.attempt} of {self._attempts} failed: {failure.error.detail}"
            self._actions.append(Warn(text, fields, call.members))
            self._retry(job)
        else:  # the deadline of the requests may have ended the call
            self._over(job, out_of_time() if is_over and kind == "elsewhere" else failure)

    def _learned(self, call: Call, failure: Failure) -> Failure:
        """Count a failure, and say what it means."""
        pool, member, status, refusal = self.pool, call.member, failure.status, failure.refusal
        kind = refusal.kind
        if kind != "split" and status not in (400, 422):
            member.controller.failed(status, self._now)
            pool.follow(member)  # before the batch is tried again, or an input blamed
        if kind == "fault":
            pool.record_failure(member)
            self._actions.append(Tell(member, failure.what, failure.look_at))
            return failure
        if not status:
            return failure._replace(counts=self._is_endpoint_s_fault(call, failure))
        if refusal.batch_max is not None and member.batch_limit.said(refusal.batch_max, failure.size, self._now):
            self.limit_is_learned(member)
        if kind != "split":
            self._actions.append(Tell(member, failure.what, failure.look_at))
        if kind == "give-up" and self._may_be_an_input(call, status):
            pool.refused(member)
            error = UpstreamRefused(failure.error.detail)
            return failure._replace(refusal=Refusal("bisect", refusal.message), error=error, needs_proof=True)
        if kind not in ("elsewhere", "give-up"):
            pool.refused(member)
            return failure._replace(is_certain=status in (400, 422))
        if status == 429:
            pool.refused(member)  # busy, not broken
        elif kind == "give-up" or not pool.has_others(member):
            # It answers: what it says may have to do with these inputs. (Where others can answer in its place, a word
            # that blames no input is its own fault.)
            self.blame([member], {request.owner for request in call.members})
        else:
            pool.record_failure(member)
        return failure._replace(counts=status != 429)

    def _is_endpoint_s_fault(self, call: Call, failure: Failure) -> bool:
        """No answer came: not its fault if clients gave it less time than calls take, or this process was away."""
        member, now = call.member, self._now
        if failure.was_away:
            self.pool.says_nothing(member)
            return False
        is_short = call.timeout_s < min(self.timeout_s, CUT_SHORT * self.service_s)
        if not is_short or now < call.began + call.timeout_s - TIMER_EARLY_S:
            self.pool.record_failure(member)
            self._actions.append(Tell(member, failure.what, failure.look_at))
            return True
        if now - member.well_at < min(self.timeout_s, max(ANSWERS_S, CUT_SHORT * self.service_s)):
            self.pool.says_nothing(member)
        else:
            self.blame([member], {request.owner for request in call.members})
        return False

    def _may_be_an_input(self, call: Call, status: int) -> bool:
        """Whether a status that usually blames no input may do so here, like that of a content filter."""
        is_of_the_call = status in OF_THE_CALL or not 400 <= status < 500
        lane = call.members[0].common_key
        return not is_of_the_call and self.pool.answered_lane(call.member, lane, self._now - WELL_S)

    def _broke(self, call: Call, error: CarpoolError) -> None:
        """The slot was given back."""
        self.pool.says_nothing(call.member)
        for request in call.members:
            self._settle(request, error)
        self._over(call.job, Failure(Refusal("give-up"), error))

    def _give_up_dead(self, job: Job, member: EndpointState) -> bool:
        """More than one dead connection in a row is the endpoint's fault: whether it is."""
        if job.dead_in_a_row > 1:
            self.pool.record_failure(member)
        else:
            self.pool.says_nothing(member)
        return job.dead_in_a_row > 1

    def _asks_another(self, job: Job, failure: Failure, failed: EndpointState) -> bool:
        """Whether the next attempt is made, after one that failed: rules 2 and 9."""
        kind = failure.refusal.kind
        if kind in ("split", "give-up"):
            return False
        doubt = self.pool.raise_doubt(failed) if not job.is_quiet else 0.0
        if kind == "elsewhere":
            return True
        if job.is_quiet or job.attempt > 1 or self._attempts == 1:
            return False
        if kind == "fault":
            return self.pool.has_others(failed)
        # An endpoint that has answered no batch so large may have a limit: a search finds it, short of DOUBT_MAX.
        is_limit = not failed.batch_limit.has_answered(failure.size, self._now)
        is_doubted = doubt >= (DOUBT_MAX if is_limit else IN_DOUBT_FROM)
        return is_doubted and (self._others is not None or self.pool.has_well(failed))

    def _give_back(self, members: list[Request], failure: Failure, failed: EndpointState) -> tuple[bool, float]:
        """Rule 6. Returns whether the next attempt is made here, and for how long the slot stays taken.

        The next attempt is for the requests that cannot go back to the queue. A refused batch with members that another
        batcher gave back stays: else one client's bad inputs would take a batch from batcher to batcher until no
        endpoint seemed to work.
        """
        if self._others is None or self.pool.has_well(failed):
            return True, 0.0
        is_refusal = failure.refusal.kind == "bisect"
        if is_refusal and any(self._others.had(request) for request in members):
            return False, 0.0  # looked into here
        went = [request for request in members if self._goes_back(request)]
        if went and is_refusal:
            # Nothing says whether the inputs are at fault or the endpoint: it is suspected, by these owners' inputs.
            self.blame([failed], {request.owner for request in went})
        if self.live(members):
            return not is_refusal, 0.0
        return False, min(HELD_S_MAX, max(0.0, failure.started + self.service_s - self._now)) if went else 0.0

    def _retry(self, job: Job) -> None:
        """Let a job wait for another slot, if there is time and budget for it."""
        attempt = job.attempt + 1
        is_free = attempt == 2 and bool(job.failures) and self.pool.has_well(job.failures[-1][0])
        pause_s = 0.0 if is_free else pause_before(attempt, self._backoff_s, self._random_share())
        may_go = attempt <= self._attempts and pause_s < self._time_left(job)
        if may_go and (is_free or self._budget.take(self._now)):
            job.ready_at = self._now + pause_s
            self._retries.append(job)
        else:
            self._over(job, job.last or out_of_time())

    def _time_left(self, job: Job) -> float:
        """Seconds until the last deadline of those that still wait."""
        return max((request.deadline for request in self.live(job.members)), default=-inf) - self._now

    def _over(self, job: Job, result: EndpointState | Failure) -> None:
        """A job has ended: this endpoint answered it, or it failed so."""
        if job.failures:
            result = self._compared(job, result)
            self._help_ended(job)
        if job.is_paid:
            self.slot_share.pay(self._now - job.started - job.paid_s)
        if job.search is not None:
            self._step_over(job.search, job, result)
            return
        batch, refused = job.members, None
        if isinstance(result, Failure) and result.refusal.kind == "bisect":
            refused = result
        if not batch[0].is_quarantined and (refused is not None or self.slot_share.refused_share):
            self.slot_share.batch_ended(refused is not None)
            if self.slot_share.refused_share >= MOSTLY_REFUSED:
                self._look_for_common(batch, refused, is_batch=True)
            elif self._common:
                self._common.forget()
        if isinstance(result, Failure):
            live = self.live(batch)
            if result.refusal.kind in ("split", "bisect"):
                self._search(live, result)
            else:
                for request in live:
                    self._give_up(request, result.error, result.started)
            for request in batch:
                if request.deadline <= self._now:
                    self._settle(request, DeadlineExceeded("no result in time"))
        self._actions.append(BatchOver(batch, "ok" if isinstance(result, EndpointState) else result.error.code))

    def _compared(self, job: Job, result: EndpointState | Failure) -> EndpointState | Failure:
        """Learn of the endpoints that failed a batch first from what the last endpoint made of it."""
        for failed, failure in job.failures:
            if isinstance(result, EndpointState) and failed is not result and failure.counts:
                if failure.refusal.kind != "bisect":
                    self._found_sick(failed)
                elif failure.size == len(job.sent):
                    self.blame([failed], ())  # else the input at fault may have left with its client
            elif isinstance(result, Failure) and failure.refusal.kind == "bisect":
                # The search begins where it would have begun, but for what is known now.
                return failure._replace(refused_too=result.member if result.refusal.kind == "bisect" else None)
        return result

    def _help_ended(self, job: Job) -> None:
        for failed, _ in job.failures:
            self.pool.help_ended(failed)
        job.failures = []

    # Slots.

    def _free(self, member: EndpointState) -> None:
        """Give a slot back in which no call was made."""
        self.pool.give_back(member)
        self.pool.says_nothing(member)

    def _look(self) -> None:
        for _, member in [each for each in self._held if each[0] <= self._now]:
            self.pool.give_back(member)
        self._held = [each for each in self._held if each[0] > self._now]
        self.pool.look()
        for search in list(self._searches):
            self._look_at(search)
        if self.quarantined and self.free_for_quarantined() > 0:
            self.pool.notify()  # batches of quarantined owners may have waited for this

    def _use_free_slots(self) -> None:
        """Retries first (rule 5), then steps of searches."""
        unmet: set[EndpointPreference] = set()
        for job in list(self._retries):
            if job.ready_at > self._now:
                continue
            if not self._is_any_live(job.members):
                self._retries.remove(job)
                self._over(job, job.last or out_of_time())
                continue
            wish = EndpointPreference(frozenset(failed for failed, _ in job.failures), known_well=True)
            member = self.pool.take_at_once(wish) if wish not in unmet else None
            if member is None:
                unmet.add(wish)
            else:
                self._retries.remove(job)
                self._start(job, member)
        while self.pool.free() and (chosen := self._next_step()):
            search, wish = chosen
            member = self.pool.take_at_once(wish)
            if member is None:
                return
            self._start_step(search, member)

    def _pay(self, job: Job) -> None:
        job.is_paid, job.paid_s = True, self.service_s
        self.slot_share.pay(job.paid_s)

    def _others_worth(self) -> float:
        """How many of the waiting requests the next batch would answer, if it had room for all."""
        return self._others_waiting() * (1.0 - self.slot_share.mostly_refused)

    def _few_wait(self) -> bool:
        return self._all_waiting() < FEW_SHARE * self._max_batch

    def _quarantined_may_go(self) -> bool:
        """Whether a batch of quarantined owners may take a slot."""
        pool, now = self.pool, self._clock()
        if not self._others_waiting():
            # The last free slot is kept for other owners, while some of these have waited lately.
            return pool.free() > 1 or pool.total() <= 1 or now - self._others_at > OTHERS_GONE_S
        self._others_at = now
        return self.slot_share.allows(now, pool.total()) and self._quarantined_go_before()

    def _quarantined_go_before(self) -> bool:
        # By the batches that endpoints really take: what quarantined owners get is taken from the others.
        most = OTHERS_SHARE_QUARANTINED * self.pool.batch_max(self._max_batch)
        return self._others_worth() < most or self.is_quarantined_due()

    def _next_step(self) -> tuple[Search, EndpointPreference] | None:
        """The search that may send something now (rule 13), that with the most unresolved; and where to."""
        others_wait, total = self._others_waiting() > 0, self.pool.total()
        takes_turns = self._others_went or self.pool.free() > 1
        is_turn = takes_turns and self._few_wait()
        under_way = sum(search.under_way for search in self._searches)
        # The last free slot is left to batches once enough steps are under way.
        is_enough = self.pool.free() <= 1 and under_way >= self.slot_share.at_once(total)
        has_share = not is_enough and self.slot_share.allows(self._now, total)
        best: tuple[int, Search, EndpointPreference] | None = None
        for search in self._searches:
            group = search.bisection.peek(is_alive=self._goes_on(search))
            if group is None:
                continue
            is_alive = self._is_alive(search)
            if others_wait:
                if search.is_quarantined:
                    goes = has_share and self._quarantined_go_before()
                else:
                    goes = (has_share or is_turn) and self._goes_before(search)
                    goes = goes or (takes_turns and not is_alive)
                if not goes:
                    continue
            # While nothing is answered, the oldest is brought to its end: that tells of the endpoints.
            unresolved = search.bisection.unresolved if is_alive else self._max_batch
            if best is not None and unresolved <= best[0]:
                continue
            wish = self._wish(search, group)
            if self.pool.has_free(wish):  # where no free slot fits the wish of one search, one may fit another's
                best = (unresolved, search, wish)
        return best[1:] if best else None

    def _goes_before(self, search: Search) -> bool:
        """Whether a step of this search is worth more than the batch that loses a slot by it.

        Simulated at 78 % load (four slots of 200 ms, one bad input in 1,000 and in 2,000): it resolves as many as a
        search that always goes first, and nine out of ten other requests are not delayed. With the share alone, 1.8 %
        of the innocents are not resolved in time, and p90 is twice as long (`tests/chaos/test_isolation.py`).
        """
        unresolved, max_batch = search.bisection.unresolved, self._max_batch
        batches = OTHERS_BATCHES - self._batches_missed()
        if self._others_worth() < batches * max_batch + unresolved * WORTH:
            return True
        waited_s = self._now - search.waiting_since
        return waited_s > (STARVED_S if 2 * unresolved >= max_batch else STARVED_SMALL_S)

    def _batches_missed(self) -> float:
        """How many batches of others come together until the next slot is free: 1 where slots become free evenly.

        They do not once calls have begun close together: then they end close together, and no slot frees in between.
        """
        if self.pool.free() > 1:
            return 0.0
        next_end_s = max(0.0, next(iter(self._began.values()), self._now) + self.service_s - self._now)
        return min(MISSED_MAX, next_end_s * self.pool.total() / max(self.service_s, 1e-6))

    def _wish(self, search: Search, group: Slice) -> EndpointPreference:
        """Rather not an endpoint that refused; and for a few members, whom it may decide on, one known to be well."""
        alone, failure = search.refused_alone_by.get(group.first), search.failure
        if alone:  # asked again
            return EndpointPreference(frozenset(alone), known_well=True)
        failed = [each for each in (failure.member, failure.refused_too) if each] if failure is not None else []
        if not self.pool.has_others(*failed):
            del failed[1:]  # the second, which was not in doubt
        return EndpointPreference(frozenset(failed), known_well=group.size <= FEW)

    def _start_step(self, search: Search, member: EndpointState) -> None:
        bisection = search.bisection
        share = self._shares.share(search.lane_key)
        singly = is_singly(share, len(bisection.refused_alone), bisection.answered_members)
        group = bisection.take_next(is_alive=self._goes_on(search), singly=singly)
        assert group is not None  # `_next_step` has asked
        job = Job(search.batch[group.first : group.end], self._now, do_nothing)
        job.search, job.group = search, group
        is_last = not self.pool.free()
        is_turn = not search.is_quarantined and self._few_wait() and (self._others_went or not is_last)
        if self._others_waiting() > 0 and not is_turn:
            self._pay(job)
            if search.is_quarantined:
                self._quarantined_at = self._now
        if is_last:
            self._others_went = False
        search.under_way += 1
        self.steps += 1
        self._start(job, member)

    # Searches.

    def _search(self, live: list[Request], failure: Failure) -> None:
        """A batch was refused: look for the inputs at fault, or send it in parts."""
        self._serial += 1
        if not live:
            return  # with no member left, a search cannot tell whether the endpoint was right
        if not live[0].is_quarantined and self._has_quarantined(live):
            # An owner was quarantined while the call was under way: reason enough for the refusal.
            self._put_back(live)
            return
        live, cut_at = self._in_order(live)
        whole = Slice(0, len(live))
        if failure.refusal.kind == "split":
            size = min(failure.refusal.batch_max or failure.size, (failure.size + 1) // 2)
            parts = [Slice(first, min(first + size, len(live)), 1) for first in range(0, len(live), size)]
            bisection = Bisection([], parts)
        else:
            bisection = Bisection([whole], cut_at=cut_at)
        search = Search(live, bisection, failure, self._now)
        search.is_unproven = failure.started <= self.pool.works_since
        if failure.refusal.kind == "bisect":
            search.note(whole, failure)
            if failure.refused_too is not None:
                search.note(whole, failure._replace(member=failure.refused_too))
            if failure.size == 1:
                bisection.take_next(is_alive=True, singly=False)
                bisection.refused(whole, clears=False)
        self._searches[search] = None
        self._look_at(search)

    def _look_at(self, search: Search) -> None:
        """Settle the requests for which it is too late, and end the search if it is over."""
        too_late = self._now + min(self.service_s, STEP_S_MAX)
        late = [request for request in search.waiting() if request.deadline <= too_late]
        if (self.pool.is_none_closed or self._is_in_vain(search)) and self._are_others_well():
            self._leave_to_others(search)
        for request in late:
            self.unresolved += self._settle(request, unresolved())
        if search.under_way or search not in self._searches:
            return
        is_left = any(self._is_open(request) for request in search.waiting())
        if is_left and search.bisection.peek(is_alive=self._goes_on(search)) is not None:
            return
        asked_again = [self._judge(search, index) for index in list(search.bisection.refused_alone)]
        if not any(asked_again):
            self._end(search)

    def _is_in_vain(self, search: Search) -> bool:
        """Rule 11. The whole counts as well as its halves."""
        if search.failure is None or len(search.wholes_refused) < WHOLES_REFUSED_MAX or self._goes_on(search):
            return False
        return self._others is not None and not any(self._others.had(request) for request in search.batch)

    def _leave_to_others(self, search: Search) -> None:
        """What waits of a search goes back to the queue, for another batcher."""
        went = {request.owner for request in search.waiting() if self._goes_back(request)}
        if not went:
            return
        self._take_back_offences(search)
        if search.failure is not None and not self.pool.is_none_closed:
            # Nothing says whether the inputs are at fault or the endpoint: it is suspected, by these owners' inputs.
            self.blame([search.failure.member], went)

    def _is_alive(self, search: Search) -> bool:
        """Whether an endpoint has shown that it answers; where the refusal blames the input, lately is enough."""
        failure = search.failure
        if failure is None:
            return True
        since = self._now - WELL_S if failure.is_certain else search.started
        return search.bisection.any_answered or self.pool.is_alive(since)

    def _goes_on(self, search: Search) -> bool:
        """Whether a search goes on though nothing was answered: a refusal that blames the input is an answer, too."""
        return self._is_alive(search) or (search.failure is not None and search.failure.is_certain)

    def _step_over(self, search: Search, job: Job, result: EndpointState | Failure) -> None:
        search.under_way -= 1
        search.waiting_since = self._now
        if search not in self._searches:
            return
        group, members = job.group, job.members
        if isinstance(result, EndpointState):
            self._step_answered(search, group, job.sent, result)
        elif result.refusal.kind == "bisect":
            # A batch that was refused before an endpoint worked counts when a part of it is refused after that.
            is_batch = search.is_unproven and result.started > self.pool.works_since
            self._look_for_common(members, result, is_batch=is_batch)
            search.is_unproven &= not is_batch
            self._step_refused(search, group, result)
        elif result.refusal.kind == "split" and group.size > 1:
            search.bisection.too_large(group)
        else:
            is_late = isinstance(result.error, DeadlineExceeded)
            for request in members:
                if is_late:
                    self._settle(request, unresolved())
                else:
                    self._give_up(request, result.error, result.started)
            search.bisection.left(group)
        self._look_at(search)

    def _step_answered(self, search: Search, group: Slice, sent: list[Request], member: EndpointState) -> None:
        search.bisection.answered(group)
        search.answered_by.add(member)
        self._look_for_common(sent)
        if len(sent) == group.size:  # else the input at fault may have left with its client
            search.parts_answered.append(group)
        for index in range(group.first, group.end):
            if len(sent) < group.size and search.batch[index] not in sent:
                continue
            if search.known:
                self._known_poison.forget(search.known[index])
            # An endpoint that refused alone what another one answers is at fault.
            self.blame(search.refused_alone_by.pop(index, ()))

    def _step_refused(self, search: Search, group: Slice, result: Failure) -> None:
        search.note(group, result)
        share = self._shares.share(search.lane_key)
        clears = self._is_alive(search) and may_clear(share, self._max_batch)
        cleared = search.bisection.refused(group, clears=clears)
        if cleared is not None:
            self._put_back(search.batch[cleared.first : cleared.end])
        members = search.batch[group.first : group.end]
        owner = members[0].owner
        if group.size > 1 and owner not in search.counted and all(each.owner == owner for each in members):
            search.counted.add(owner)
            self._offends(owner, result.started)
        if result.size == group.size == 1:
            self._judge(search, group.first)

    # Verdicts.

    def _judge(self, search: Search, index: int) -> bool:
        """A request was refused that was alone in its call: whether another endpoint is asked about it."""
        request, failure = search.batch[index], search.last[index]
        if not self._is_open(request):
            return False
        if self._is_at_fault(search, index):
            # An endpoint that fails some of its calls with 500 answers others of the batch, too.
            is_final = failure.is_certain and search.refused_alone_by.get(index, set()) & search.answered_by
            if not is_final and self._goes_back(request, for_verdict=True):
                return False
            for member in search.refused_by.get(index, ()):
                member.doubt = 0.0  # it was right
            self._convict(search, request, failure)
            return False
        by_alone, asked = search.refused_alone_by.get(index, set()), search.asked.get(index, 1)
        # Another endpoint is asked once each of those asked before has refused the request alone.
        is_asked = asked <= len(by_alone) < ASKED_ALONE_MAX and self.pool.has_others(*by_alone)
        # While nothing is answered, that would be in vain; but for a request that came alone it is done at any rate.
        if is_asked and (self._goes_on(search) or len(search.batch) == 1):
            search.bisection.ask_again(index)
            search.asked[index] = asked + 1
            return True
        return False

    def _is_at_fault(self, search: Search, index: int) -> bool:
        """Rule 10."""
        failure = search.last[index]
        if failure.started < self.pool.proven_at:
            return False
        by, by_alone = search.refused_by.get(index, set()), search.refused_alone_by.get(index, set())
        lane = search.batch[index].plain_key

        def is_right(members: set[EndpointState], since: float) -> bool:
            if members & search.answered_by:
                return True
            return any(self.pool.answered_lane(member, lane, since) for member in members)

        lately = self._now - WELL_S
        was_search = search.failure is not None and search.failure.size > 1
        if not failure.is_certain:
            lately = search.started if was_search or failure.needs_proof else self._now - SURE_S
        if len(by_alone) >= ASKED_ALONE_MAX or not self.pool.has_others(*by_alone):
            return (failure.is_certain and len(by_alone) > 1) or is_right(by_alone, lately)
        # An endpoint that fails now and then answers others, too.
        trusted = {member for member in by if not member.breaker.was_healed}
        return len(trusted) > 1 and is_right(trusted & by_alone, search.started)

    def _convict(self, search: Search, request: Request, failure: Failure) -> None:
        """The model refuses this input: tell its client, keep it for a person, and send it alone from now on."""
        self.poisoned += 1
        self._known_poison.add(request, self._now)
        if request.owner in search.counted:  # already, when its group was refused
            search.counted.discard(request.owner)
        else:
            self._offends(request.owner, failure.started)
        # In the lane where the next ones of this owner will be.
        request.is_quarantined = (self._model, request.owner) in self.quarantined
        self._shares.refused(request.lane_key)
        self._give_up(request, input_refused(failure), failure.started)

    def _end(self, search: Search) -> None:
        """Nothing can be sent any more."""
        del self._searches[search]
        failure, bisection = search.failure, search.bisection
        indices = [*bisection.give_up(), *bisection.refused_alone]
        left = {index: search.batch[index] for index in indices if self._is_open(search.batch[index])}
        if left:
            # It may be the inputs or the endpoints: the endpoints are suspected, by these owners' inputs only.
            known = search.refused_alone_by if bisection.any_answered else search.refused_by
            sick = {member for index in left for member in known.get(index, ())}
            owners = {request.owner for request in left.values()}
            self.blame(sick, owners)
            is_failure = failure is not None and not (failure.is_certain or failure.needs_proof)
            if is_failure and len(owners) == 1 and not self._is_alive(search):
                # Nothing at all was answered: each of these calls was a failure.
                for member in search.refused_again_by(sick):
                    self.pool.record_failure_again(member, *owners)
                    self._make_way(member)
        if failure is not None:
            self._look_at_good_wholes(search)
        went_back = False
        # Rule 11. An endpoint that refused all of a batch, or has answered nothing yet, says nothing of any input.
        is_word = self.pool.is_proven and (bisection.any_answered or len(search.batch) == 1)
        for index, request in left.items():
            last = search.last.get(index)
            if self._goes_back(request, for_verdict=is_word and last is not None and last.is_certain):
                went_back = True
            elif last is None:
                self._give_up(request, unresolved(), search.started)
            elif last.is_certain and index in bisection.refused_alone:
                if last.started >= self.pool.proven_at:
                    self._shares.refused(request.lane_key)
                self._give_up(request, input_refused(last), last.started)
            else:
                self._give_up(request, last.error, last.started)
        if went_back:
            self._take_back_offences(search)

    def _look_at_good_wholes(self, search: Search) -> None:
        """Endpoints refused groups all parts of which were answered: each may have a limit, or is at fault."""
        good = search.good_wholes()
        for member, (size, parts_max) in good.items():
            # No limit explains this for an endpoint that has answered nothing meanwhile, or has answered as many
            # lately, or answers no batch at all where other endpoints do.
            limit, now = member.batch_limit, self._now
            likes = [member] if limit.has_answered(2, now) else self.pool.members
            takes_more = any(other.batch_limit.has_answered(size, now) for other in likes)
            if member.well_at <= search.started or takes_more:
                self.blame({member})
            elif limit.split(size, parts_max, now):
                self.limit_is_learned(member)
        if good:
            self._take_back_offences(search)

    def limit_is_learned(self, member: EndpointState) -> None:
        """An endpoint was found to take fewer inputs than it was sent: that explains what it refused before."""
        self.pool.has_batch_limits = True
        self.quarantined.forgive_all(self._model)
        self._actions.append(LimitLearned(member))

    # Blame.

    def blame(self, sick: Iterable[EndpointState | None], owners: Collection[str] = ()) -> None:
        """Count one failure for each endpoint, however many of its refusals were wrong."""
        for member in sick:
            if member is not None:
                self.pool.record_failure(member, owners)
                self._make_way(member)
                if not owners:
                    self._found_sick(member)

    def _make_way(self, member: EndpointState) -> None:
        """Rule 8: the requests of the one owner to whom an endpoint is closed must not stand in the way of others."""
        blamed = member.breaker.blamed_owner if self.pool.is_proven else None
        if member.breaker.state != "closed" and blamed is not None and not self._are_others_well():
            self.quarantined.refused(self._model, blamed, self._now, count=QUARANTINED_FROM)

    def _found_sick(self, member: EndpointState) -> None:
        """A batch that failed at this endpoint was answered elsewhere: that explains its refusals, too."""
        if not self.pool.has_well(member):
            return
        self.pool.record_answered_elsewhere(member)
        for search in self._searches:
            failure = search.failure
            if failure is not None and failure.member is member and failure.refused_too is None:
                self._let_go(search)

    def _offends(self, owner: str, began: float, count: float = 1.0) -> None:
        if began < self.pool.proven_at:
            return  # it may be the endpoint that refuses everything
        rider = (self._model, owner)
        was_quarantined = rider in self.quarantined
        self.quarantined.refused(self._model, owner, self._now, count)
        if not was_quarantined and rider in self.quarantined:
            text = "inputs of one client keep being refused; its requests share no batch with others for a while"
            self._actions.append(Warn(text, {}))
            for search in self._searches:  # that explains the refusals of batches with its inputs
                is_other = search.failure is not None and not search.is_quarantined
                if is_other and self._has_quarantined(search.waiting()):
                    self._let_go(search)

    def _look_for_common(
        self, members: list[Request], refused: Failure | None = None, *, is_batch: bool = False
    ) -> None:
        """Where most batches are refused: whether one owner is the reason (quarantine.py, rule 4)."""
        if not (self._common or is_batch) or (refused is not None and refused.started <= self.pool.works_since):
            return  # of a call that began before any endpoint worked no owner is the reason (rule 12)
        owners = {request.owner for request in members}
        found = self._common.answered(owners) if refused is None else self._common.refused(owners, is_batch=is_batch)
        if found is not None:
            self._common.forget()
            self.slot_share.refused_share = 0.0  # the reason for it is gone
            self._offends(found, self._now, QUARANTINED_FROM)

    def _take_back_offences(self, search: Search) -> None:
        """The refusals of this search were none of its owners' fault, as far as is known."""
        for owner in search.counted:
            self.quarantined.take_back(self._model, owner, self._now)
        search.counted.clear()

    def _has_quarantined(self, requests: Iterable[Request]) -> bool:
        quarantined, model = self.quarantined, self._model
        return bool(quarantined) and any((model, request.owner) in quarantined for request in requests)

    # What becomes of requests.

    def _is_open(self, request: Request) -> bool:
        return request.phase != DONE and request not in self._decided

    def _settle(self, request: Request, error: CarpoolError, *, may_be_letter: bool = False) -> bool:
        """Give a request an error, unless it has an outcome: whether it gets it."""
        if not self._is_open(request):
            return False
        self._decided.add(request)
        self._actions.append(Settle(request, error, may_be_letter))
        return True

    def _give_up(self, request: Request, error: CarpoolError, began: float) -> None:
        """A request that another batcher may serve goes back to the queue: nothing has shown that its input is at
        fault. Nor has anything where its call began before any was answered (rule 12): then a task is tried again.
        """
        is_own = isinstance(error, InputRefused | DeadlineExceeded)
        if not self._is_open(request) or (not is_own and self._goes_back(request)):
            return
        if began >= self.pool.proven_at or isinstance(error, DeadlineExceeded):
            self._settle(request, error, may_be_letter=True)
        elif request.is_task:
            self._decided.add(request)
            self._actions.append(Rest(request, error))
        else:
            self._settle(request, never_worked(error))

    def _are_others_well(self) -> bool:
        return self._others is not None and self._others.are_well()

    def _goes_back(self, request: Request, *, for_verdict: bool = False) -> bool:
        """Give a request back to the queue if another batcher can serve it: whether it goes.

        `for_verdict`: its input would be blamed here, and a second endpoint is asked first.
        """
        if self._others is None or not self._is_open(request):
            return False
        if not self._others.may_serve(request, for_verdict=for_verdict):
            return False
        self._decided.add(request)
        self._actions.append(GiveBack(request, for_verdict))
        return True

    def _put_back(self, requests: list[Request]) -> None:
        waiting = [request for request in requests if self._is_open(request)]
        self.has_cleared = True
        self._decided.update(waiting)
        self._actions.append(PutBack(waiting))

    def _let_go(self, search: Search) -> None:
        """What waits of a search rides in ordinary batches again."""
        waiting = search.waiting()
        search.bisection.give_up()
        self._put_back(waiting)

    def _in_order(self, batch: list[Request]) -> tuple[list[Request], int]:
        """The members by their owners, and where to cut first; 0: in the middle.

        Owners of whom inputs were refused just now come last, so that the first call has all inputs of other owners.
        Otherwise the first cut goes by one digit of the owners' numbers, another digit for each search: so a few
        searches tell together which owner all refusals have in common.
        """
        now, model, quarantined = self._now, self._model, self.quarantined
        owners = sorted({request.owner for request in batch})
        digit = self._serial % max(1, (len(owners) - 1).bit_length())
        last = {
            owner: (quarantined.is_suspect(model, owner, now), bool(number >> digit & 1))
            for number, owner in enumerate(owners)
        }
        ordered = sorted(batch, key=lambda request: (last[request.owner], request.owner))
        suspects = sum(last[request.owner][0] for request in batch)
        if suspects:
            return ordered, len(batch) - suspects
        firsts = sum(not last[request.owner][1] for request in batch)
        is_balanced = len(batch) <= 4 * firsts <= 3 * len(batch)
        return ordered, firsts if is_balanced else 0


def input_refused(failure: Failure) -> InputRefused:
    """The error for a client whose input the model refused: the model's own words, since it was alone in its call."""
    said = f": {failure.refusal.message}" if failure.refusal.message else ""
    return InputRefused(f"the model refused this input{said}")


def unresolved() -> Unresolved:
    """The error for requests that the search had no time for."""
    return Unresolved(
        "another request of its batch failed, and there was no time to find out which; try again", retry_after_s=1
    )


def too_many(size: int, most: int, now: float) -> Failure:
    """The limit of the endpoint was learned after the batch was formed."""
    error = UpstreamFailed("the inference API does not take so many inputs")
    return Failure(Refusal("split", batch_max=most), error, size=size, started=now)


def out_of_time() -> Failure:
    """No slot was free in time, or no request of the batch still waited."""
    return Failure(Refusal("elsewhere"), DeadlineExceeded("no result in time"))
