"""The Protocols between the stages. A stage knows its neighbours by these alone.

The halves of `composition/` plug them together.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from carpool.core.dead_letter import DeadLetterSummary, Replayed, ReplayReport, StoredDeadLetter
from carpool.core.errors import CarpoolError
from carpool.core.histograms import Histogram
from carpool.core.names import ModeName
from carpool.core.outcome import Outcome, Output
from carpool.core.request import Request
from carpool.core.task import StoredTask
from carpool.core.trace import CallTrace, Trace


class LaneQueue(Protocol):
    """What batching sees of one lane: requests that may share a batch."""

    model: str
    # What its requests have in common: their parameters, and what their protocol adds.
    key: bytes
    # Requests waiting now, and the bytes of their inputs.
    waiting: int
    waiting_bytes: int
    # How many have ever arrived; batching derives the arrival rate from it.
    arrivals: int
    # The lane of quarantined owners, who share no batch with others.
    is_quarantined: bool
    # Whether the last batch was taken in order while batches were chosen by size.
    is_in_order: bool
    # What batching keeps about the lane (its arrival rate); None at first, lost when the lane is dropped.
    batching_notes: Any

    def oldest(self) -> float:
        """When the longest-waiting request arrived. Only for a lane with `waiting` > 0."""

    def place(self) -> float:
        """Where the lane stands among others: the smallest goes first. Only for a lane with `waiting` > 0."""


class LaneCounts(Protocol):
    """How many wait of one model, by lane."""

    @property
    def batch_max(self) -> int:
        """Requests that a batch has at most."""

    def by_tier(self) -> list[int]:
        """By tier: in how many lanes synchronous requests of this tier, or of higher ones, wait."""

    def opened_by(self, owner: str) -> int:
        """How many of them this owner opened."""

    def waiting_in(self, lane_key: bytes) -> int:
        """How many wait in a lane."""


class QueueStats(Protocol):
    """The waiting requests of one model and tier: synchronous ones alone, or tasks alone."""

    @property
    def waiting(self) -> int:
        """Requests that wait."""

    @property
    def cost(self) -> float:
        """What they cost together: 1 each, and 1 for every 4,096 bytes of input."""

    @property
    def owners(self) -> int:
        """Owners of whom some wait."""

    def of(self, owner: str) -> int:
        """Requests of one owner that wait."""

    def late_of(self, owner: str) -> int:
        """Requests of one owner that wait and came in late, with a burst."""

    @property
    def late(self) -> int:
        """How many wait that came in late."""

    @property
    def late_owners(self) -> int:
        """Owners of these."""


class Outcomes(Protocol):
    """Where outcomes go. Both are total: they never raise, and a request that has an outcome keeps it."""

    def settle(self, request: Request, outcome: Outcome) -> bool:
        """Give a request its one outcome; false if it has one already."""

    def settle_batch(self, batch: Sequence[Request], outputs: Sequence[Output]) -> None:
        """Settle the members of a batch, each with its own output; as many outputs as members, or ValueError."""


class Cancels(Protocol):
    """Where a face reports clients that leave."""

    def cancel(self, request: Request) -> None:
        """The client left: never send it if it has not been sent yet, discard its result otherwise."""


class RequestQueue(Cancels, Protocol):
    """The broker as the face and admission see it."""

    def submit(self, request: Request) -> CarpoolError | None:
        """Queue the request, or say why not. Its outcome comes through `request.settle`."""

    def refusal_of_all(self, requests: Sequence[Request]) -> CarpoolError | None:
        """Why there is no room for all requests of one call; None if there is, as far as this process knows."""


class CountingQueue(RequestQueue, Protocol):
    """The queue as a gateway sees it: the way to the batchers, or to the batching of this process."""

    @property
    def outcomes(self) -> Counter[str]:
        """What became of requests, by code."""

    @property
    def waited(self) -> Histogram:
        """How long requests waited for a slot."""

    def queue_stats(self, model: str, tier: int) -> QueueStats:
        """The synchronous requests of a model and a tier that are in it, and their owners."""

    def expire(self, now: float) -> None:
        """Look at the deadlines."""


class Returns(Outcomes, Protocol):
    """Where outcomes go, and requests that are to be sent again in other company."""

    def rest(self, request: Request) -> None:
        """A request that was taken runs no more, and does not wait yet either; `put_back` lets it wait again."""

    def put_back(self, requests: Sequence[Request]) -> None:
        """Let requests that were taken wait again, before requests that came after them."""


class OtherBatchers(Protocol):
    """The batchers of other processes, which may serve requests of a model that this one cannot."""

    def are_well(self) -> bool:
        """Whether one of them has an endpoint that works."""

    def may_serve(self, request: Request, *, for_verdict: bool = False) -> bool:
        """Whether a request may go back to the queue, because another batcher has an endpoint that works.

        `for_verdict`: its input would be blamed, and a second endpoint is asked first, once.
        """

    def had(self, request: Request) -> bool:
        """Whether one of them has given a request back."""


class Broker(RequestQueue, Outcomes, Protocol):
    """Keeps what was admitted until it has an outcome."""

    def lanes(self, model: str) -> Iterable[LaneQueue]:
        """The lanes of one model in which requests wait."""

    def take(
        self,
        lane: LaneQueue,
        count: int,
        now: float,
        bytes_max: float = inf,
        room_bytes: float = inf,
        *,
        by_size: bool = False,
    ) -> list[Request]:
        """Remove up to `count` requests, best place first, none of them past its deadline; or, `by_size`, the best
        one, and while many wait others of similar size.

        Together they have at most `bytes_max` bytes, but for a first one that is larger: it comes alone. A request with
        more than `room_bytes` stays where it is, and so do those behind it.
        """

    def bytes_running(self, model: str) -> int:
        """Bytes of the inputs of one model that were taken and have no outcome yet."""

    def when_bytes_free(self, model: str, notify: Callable[[], None]) -> None:
        """Have `notify` called when `bytes_running` of `model` has become less."""

    def when_work_arrives(self, model: str, arrived: Callable[[LaneQueue], None]) -> None:
        """Have `arrived(lane)` called when a request of `model` has come into a lane."""


class Availability(Protocol):
    """What admission sees of the upstream pool of a model."""

    # True while no endpoint may be called.
    is_down: bool
    # True while some owner may call none; see `is_shut_to`.
    is_shut_to_some: bool
    # While it is down: requests that may come in all the same, to try an endpoint with.
    probes: int

    def takes_probe(self, request: Request) -> bool:
        """While it is down: whether this one request may come in all the same, to try an endpoint with."""

    def is_shut_to(self, owner: str) -> bool:
        """Whether no endpoint may be called for this owner."""

    def retry_after_s(self) -> int:
        """While it is down: whole seconds until it is tried again."""

    def has_never_worked(self) -> bool:
        """Whether no endpoint has answered a call well, though some were made."""


class Slots(Protocol):
    """What batching sees of the upstream pool: how many batches it takes at once, and one free slot at a time."""

    def total(self) -> float:
        """Slots of the endpoints in use; one that rests between two calls counts for its share of the time."""

    def free(self) -> int:
        """Slots that could take a batch now."""

    def free_for_quarantined(self) -> int:
        """Slots that could take a batch of quarantined owners now."""

    def is_quarantined_due(self) -> bool:
        """Whether quarantined owners have waited so long that a batch of them goes before others."""

    def when_slot_frees(self, notify: Callable[[], None]) -> None:
        """Have `notify` called when a slot becomes free."""


class FetchedQueue(Protocol):
    """Where a batcher fetches the requests of one model from, which wait elsewhere."""

    def unread(self) -> int:
        """Requests that wait there, as far as is known."""

    def unread_s(self) -> float:
        """How long ago that was known."""

    def is_asked(self) -> bool:
        """Whether an answer is awaited."""

    def batch_is_due(self) -> None:
        """The next batch is due: what it is made of may have to be fetched."""

    def call_time_is_known(self) -> None:
        """The first batch has ended: now it is known how long one takes."""


class Dispatcher(Protocol):
    """Sends one batch in a free slot and settles every member. Never raises."""

    def batch_max(self, lane: LaneQueue, max_batch: int) -> int:
        """The most requests of a lane that should be in a batch now, at most `max_batch`."""

    def dispatch(self, batch: list[Request], notify: Callable[[float], None]) -> None:
        """Take a free slot (there is one), make the call in the background; `notify(seconds)` when it has ended."""


class DeadLetters(Protocol):
    """Where requests go that were given up on and are worth a look."""

    def bury(self, request: Request, error: CarpoolError, sends: int) -> None:
        """Keep a synchronous request with its error, if such ones are kept and there is room.

        To be called before it is settled, whatever the error: which ones are kept is a setting. A task needs no call:
        it becomes a dead letter together with its outcome.
        """


class DeadLetterDesk(Protocol):
    """What a person may do with dead letters. An error of the tree is raised."""

    async def page(self, after: int, limit: int) -> list[DeadLetterSummary]:
        """Dead letters with an id above `after`, the oldest first."""

    def total(self) -> int:
        """How many are kept."""

    async def show(self, letter_id: int) -> StoredDeadLetter:
        """One dead letter, whole."""

    async def replay(self, letter_id: int) -> Replayed:
        """Make one a task again."""

    async def replay_all(self, cause: str | None) -> ReplayReport:
        """Make all there are now, or those of one cause, tasks again."""

    async def drop(self, letter_id: int) -> None:
        """Remove one."""

    async def drop_all(self) -> int:
        """Remove all; returns how many."""


class TaskBoard(Protocol):
    """Accepts tasks and reports what became of them."""

    def submit(self, request: Request, accepted: Callable[[CarpoolError | None], None]) -> None:
        """Accept a task: `accepted(None)` once it is safe, or `accepted(error)`."""

    def look(
        self,
        caller: "Caller",
        task_id: str,
        wait_s: float,
        forget: bool,
        answer: Callable[[StoredTask | CarpoolError], bool | None],
    ) -> object:
        """Answer with the task's state, now or when it has an outcome within `wait_s`; returns a ticket for `leave`.

        `answer` returns False if the client had left: with `forget`, a finished task is then kept. For a caller that
        may not see a task, it does not exist.
        """

    def leave(self, ticket: Any) -> None:
        """The caller of `look` does not wait any more."""

    def delete(self, caller: "Caller", task_id: str, done: Callable[[CarpoolError | None], None]) -> None:
        """Cancel, discard or forget a task; for a caller that may not see it, it does not exist."""


class RateLimit(msgspec.Struct, frozen=True):
    """How much an owner may ask for. 0: as much as it likes."""

    # Requests a minute at an even pace, and how many may come at once: in any 60 s at most the sum of both comes in.
    per_minute: int = 0
    burst: int = 1
    # Requests that may wait or run at once.
    concurrent: int = 0


class Caller(msgspec.Struct, frozen=True):
    """The owner that a request counts for. The tier comes from the credential, never from the client's word."""

    # At most 64 ASCII characters.
    owner: str
    tier: int
    # Without a credential: then any client that knows the id of a task may see it, as addresses change and are shared.
    is_anonymous: bool = True
    # None: no limit at all.
    limit: RateLimit | None = None
    # The models that it may ask for; None: all.
    models: frozenset[str] | None = None
    # What its key says that `POST /v1/inference` does where the client does not; "": nothing.
    default_mode: ModeName | Literal[""] = ""
    # Under which name its requests are counted where gateways share a budget: an owner has one for each of its limits.
    account: str = ""

    def __post_init__(self) -> None:
        if self.limit is not None and not self.account:
            account = f"{self.owner}:{self.limit.per_minute}/{self.limit.burst}"
            msgspec.structs.force_setattr(self, "account", account)

    def may_see(self, owner: str) -> bool:
        """Whether this caller may know of a task of that owner."""
        return self.is_anonymous or owner == self.owner


class RequestOptions(msgspec.Struct, frozen=True):
    """What a client says about how its request is to be treated."""

    # Seconds until its answer is of no use any more; None: it does not say.
    timeout_s: float | None = None
    # Its result must not be kept for others; a result that was kept must not be its answer.
    no_store: bool = False
    no_cache: bool = False
    # The trace that its request is part of, if that is kept.
    trace: Trace | None = None


NO_OPTIONS = RequestOptions()


class FarResults(Protocol):
    """Results that many processes keep together. Whatever is wrong there, the request goes on without."""

    def look(self, key: bytes, found: Callable[[Output | None, float], None]) -> None:
        """Have `found` called with the result and its age in seconds, or None: once, soon, not before this returns."""

    def keep(self, key: bytes, output: Output) -> bool:
        """Keep a result, so that `look` finds it; False if that is not possible now, or not for this one."""


class Sharing(Protocol):
    """Lets requests in whose model gives the same output for the same input."""

    def ask(self, request: Request, options: "RequestOptions") -> CarpoolError | None:
        """Let a synchronous request in, or say why not. It may have its outcome when this returns."""

    def needing(
        self, requests: Sequence[Request], options: "RequestOptions", told: Callable[[Sequence[Request]], None]
    ) -> None:
        """Call `told` with the requests of one call that neither a result nor another request serves: let these in.

        Once: at once, or soon, where Redis has to be asked for results. Then the caller lets each in with `ask`.
        """

    def submit(
        self, request: Request, options: "RequestOptions", accepted: Callable[[CarpoolError | None], None]
    ) -> None:
        """Let a task in: `accepted(None)` once it is safe, or `accepted(error)`."""

    def own(self, request: Request) -> Request:
        """The request that shows how this client is served, where several clients share one."""


class Peer(msgspec.Struct, eq=False):
    """The other end of a connection: what is found out once for all requests that come over it."""

    # Its address; "" for a Unix socket, or if it is not known.
    address: str = ""
    # What admission keeps about it: the caller of all its requests, once it is known that they have the same (then
    # `identify` need not look again); or the peer's own caller, if it is a proxy that may name others.
    caller: Caller | None = None
    proxy: Caller | None = None


class EarlyRefusals(Protocol):
    """Which synchronous requests are refused before their body is read."""

    # For how many more of each tier there was room when that was last counted: with some left, none is refused.
    headroom: Sequence[float]

    def refusal(self, caller: Caller) -> CarpoolError | None:
        """Why a request of this caller is refused, whatever is in its body; None if it is not, as far as is known."""


# Header lines that show a caller what is left of its limit (b"": it has none), or the error why it does not come in.
LimitVerdict = bytes | CarpoolError


class RateLimits(Protocol):
    """How often owners may come in. Only for callers with a limit."""

    def enter(self, caller: Caller, cost: int = 1) -> LimitVerdict | None:
        """A call that counts as `cost` requests: all of it comes in, or nothing.

        None: that is not known yet; then `when_known` must be called at once.
        """

    def when_known(self, caller: Caller, known: Callable[[LimitVerdict], None], cost: int = 1) -> None:
        """Have `known` called, later and once, with the verdict that `enter` did not have."""


class RateAsk(NamedTuple):
    """What a gateway asks for one owner of the budget that all gateways share."""

    owner: str
    # Requests a minute; how many the bucket holds; how many of them are the burst, which a lease leaves in it.
    per_minute: int
    capacity: int
    burst: int
    # Calls that wait for an answer; how many to lease for those that are expected.
    need: int
    want: int
    # Tokens that each of these calls takes. The burst is enough for it: the rest is a debt.
    cost: int = 1


class RateTold(NamedTuple):
    """The answer."""

    # How many of the calls that wait come in.
    granted: int
    leased: int
    # Seconds until the bucket is full, if no request comes.
    ahead_s: float


class RateBudget(Protocol):
    """The one budget of each owner, for all gateways."""

    def ask(self, asks: Sequence[RateAsk], told: Callable[[str, RateTold | None], None]) -> None:
        """Have `told` called once for each of these owners, later, and soon: with None if no answer comes."""


class RequestTraces(Protocol):
    """What a face asks of tracing, where it is on."""

    def begin(self, headers: dict[bytes, bytes]) -> Trace | None:
        """The trace of a new request with these headers (names in lower case); None: it is not kept."""

    def refused(
        self,
        method: bytes,
        target: bytes,
        headers: dict[bytes, bytes],
        error: CarpoolError,
        route: str | None = None,
    ) -> None:
        """A request was answered with an error and never came in.

        `route`, where it did not come over HTTP: `service/method` of gRPC, or "" for a message of a stream.
        """


class CallTraces(Protocol):
    """What the upstream stage asks of tracing, where it is on."""

    def call_begins(
        self, members: Sequence[Request], endpoint: str, attempt: int, now: float, *, is_search: bool
    ) -> CallTrace | None:
        """A call with these begins. Its headers are for the endpoint; None where batches have no ids."""

    def call_ended(self, members: Sequence[Request], call: CallTrace) -> None:
        """How it ended has been written down."""


class Admission(RateLimits, Protocol):
    """Decides which requests come in. Nothing past it is refused for load."""

    def identify(self, headers: dict[bytes, bytes], peer: Peer) -> Caller:
        """The caller behind a request with these headers, which came over the connection to `peer`; raises why not."""

    # None: which requests are refused depends on what is in the body.
    early: "EarlyRefusals | None"

    def hold(self, requests: Sequence[Request], concurrent: int) -> CarpoolError | None:
        """Count the requests of one call among those that their owner may have at once, all or none; or say why not."""

    def admit(self, request: Request) -> CarpoolError | None:
        """Let a synchronous request in, or say why not."""

    def judge_all(self, requests: Sequence[Request]) -> CarpoolError | None:
        """Why the requests of one call are not let in, all of them; if they are, `admit` must let each in at once."""

    def admit_task(self, request: Request, accepted: Callable[[CarpoolError | None], None]) -> None:
        """Let a task in: `accepted(None)` once it is safe, or `accepted(error)`."""
