"""The batcher's side of the queue: take from Redis what free slots can use, and stage it in the local broker.

1. Late binding across machines: a batcher asks for no more than its free slots can send now, in whole batches of one
   lane, and what is staged counts against that. Company for a staged batch is asked for in its lane alone.
2. One question at a time: the next one is asked when the last is answered, so that the limit holds over all shards.
   It goes to several shards at once if it takes several to fill the free slots; when it is quiet a wakeup says which
   one has something. What is taken for the last free slot waits a moment for company from shards that have more.
3. Where more waits than can be taken, the smallest virtual deadlines go first. What exceeds its owner's share stands
   later inside its tier. With strict order, the lowest tier gets its minimum share.
4. An entry is leased. Leases are renewed while their requests are staged or running, and until their outcome is
   acknowledged; those that are not renewed (their batcher died, or never got to see them) are claimed by any batcher.
5. An entry that was delivered before may be the one that kills batchers (suspects.py).
6. Nothing is taken before this process has heard of the fleet: until then it does not know who else could serve it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

from carpool.broker.lanes import SYNCHRONOUS_SHARE, MinShare
from carpool.broker.memory import MemoryBroker
from carpool.broker.redis.batcher.entries import FedModel, Unpacker
from carpool.broker.redis.batcher.leases import NEW, NO_HEADER, EntryLease, LeasedEntries, Leases, history_of
from carpool.broker.redis.batcher.replies import UNCONFIRMED_MAX, ReplyWriter
from carpool.broker.redis.batcher.shards import (
    Offers,
    Reads,
    ShardView,
    is_due_again,
    is_task_line,
    offers_of,
    plan_all,
    plan_by_place,
    plan_claims,
    plan_min_share,
    shards_for_claims,
    synchronous_of_the_best,
)
from carpool.broker.redis.batcher.suspects import (
    COMPANY_MAX,
    DELIVERIES_MAX,
    Suspects,
    again_of,
    company_of,
    pairs_of,
    some_stream,
)
from carpool.broker.redis.batcher.sweeper import Sweeper
from carpool.broker.redis.client.link import Link, RedisFailure
from carpool.broker.redis.client.node import Reader
from carpool.broker.redis.dead_letters import LetterBounds, RedisDeadLetterBox
from carpool.broker.redis.keys import Shard, lane_name, tier_of
from carpool.broker.redis.redis_ops import Done, RedisOps
from carpool.broker.redis.types import (
    FINAL,
    LEASE_MS,
    NONE,
    OWN,
    Budget,
    Claim,
    Head,
    StreamEntries,
    StreamEntry,
    Taken,
)
from carpool.core.clock import Clock, monotonic
from carpool.core.defaults import yes
from carpool.core.errors import GivenBack, UpstreamDown
from carpool.core.kept import Kept
from carpool.core.request import AGAIN, QUEUED, Request
from carpool.core.timers import Every, OncePerTurn

logger = logging.getLogger("carpool.broker")

# In a lease's time: how often leases are renewed, and how often all shards are looked at: for leases that are over, and
# for entries whose wakeup was lost.
RENEWALS_A_LEASE = 3
LOOKS_A_LEASE = 6
# A shard whose answer failed is asked again after this, or after a wakeup.
ASK_AGAIN_S = 0.25
# What was taken waits no longer than this for company from other shards.
COMPANY_S_MAX = 0.005
# For so long a request that was sent once waits for a slot here before other batchers may have it.
STUCK_AGAIN_S = 10.0
LANE_NAMES_KEPT_MAX = 4096
# Weight of the last size in the mean.
SIZE_WEIGHT = 0.3
# How a message begins that tells of clients who left; and one that tells of entries that were given back.
LEFT = b"left "
GIVEN_BACK = b"back"
# After an entry that this batcher could only give back, it takes no other for so long: where all requests are of one
# owner, to whom its endpoint is closed, each of them would come here first.
REST_S = 0.05
LEFT_EARLY_S, LEFT_EARLY_MAX = 5.0, 10_000
COMPLAIN_EVERY_S = 10.0
# What is kept of an entry that cannot be read.
UNREADABLE_BYTES_MAX = 1024 * 1024
# With free slots the queue is looked at several times a second: so long without an answer is a fault.
SILENT_S_MAX = 5.0


class Consumer:
    """Fills the local broker from Redis."""

    def __init__(
        self,
        steps: RedisOps,
        consumer: bytes,
        broker: MemoryBroker,
        replies: ReplyWriter,
        dead_letters: RedisDeadLetterBox,
        models: Sequence[FedModel],
        *,
        # The names of all lines (`line_name`), in their order, and what each adds to an entry's time for its place.
        line_offsets_ms: Mapping[bytes, int],
        # Of these, which stand so many ms later inside their tier: what exceeds an owner's share.
        late_ms: Mapping[bytes, int] | None = None,
        strict_order: bool = False,
        # With strict order: the share of what is taken that the lowest tier gets all the same.
        min_share: float = 0.0,
        # What each tier adds to the time of a request for its place in the local order, in seconds.
        tier_target_s: Sequence[float],
        lease_ms: int = LEASE_MS,
        letter_bounds: LetterBounds,
        # Whether this process has heard of the fleet. Before that nothing is known of the others.
        is_fleet_known: Callable[[], bool] = yes,
        clock: Clock = monotonic,
    ) -> None:
        self._steps = steps
        self._nodes = steps.nodes
        self._consumer = consumer
        self._broker = broker
        self._replies = replies
        self._models = {model.name: model for model in models}
        self._model_names = list(self._models)
        self._late_ms = late_ms or {}
        self._line_offsets_ms = line_offsets_ms
        self._min_share = MinShare(min_share) if min_share else None
        self._is_strict = strict_order
        # One for each model: other models do not count, for they have slots of their own.
        self._synchronous = {name: MinShare(SYNCHRONOUS_SHARE, debt_max=0.0) for name in self._models}
        self._lowest_tier = max(map(tier_of, line_offsets_ms), default=0)
        self._lease_ms = lease_ms
        self._renew_every_s = lease_ms / 1000 / RENEWALS_A_LEASE
        self._look_every_s = lease_ms / 1000 / LOOKS_A_LEASE
        self._sweeper = Sweeper(steps, letter_bounds, replies.result_ttl_ms, replies.ended)
        self._is_fleet_known = is_fleet_known
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._views = [ShardView(shard) for shard in steps.keys.shards]
        self._view_of_wakeup = {view.shard.wakeup: view for view in self._views}
        self._dead_letters = dead_letters
        self._complained_at = -COMPLAIN_EVERY_S
        self._unpacker = Unpacker(models, replies, dead_letters, tier_target_s)
        # By model: the mean size of an entry, lately.
        self._mean_bytes = dict.fromkeys(self._models, 1.0)
        self._lane_names: Kept[tuple[str, bytes], bytes] = Kept(LANE_NAMES_KEPT_MAX)
        self._leases = Leases(steps, consumer, self._renew_every_s, self._lost_lease, clock)
        # Taken, and not to be sent yet: other shards are known to have more for the same batch.
        self._staged: list[Request] = []
        self._staged_since = 0.0
        # Answers that the question which is out still lacks; the last one asks the next question.
        self.unanswered = 0
        self.turn = OncePerTurn(self._run)
        # All shards are to be looked at.
        self._is_look_due = True
        # When Redis last told how many wait there, and when there was last no slot to ask for.
        self._told_at = self._busy_at = clock()
        # Shards whose claims are due, in turn.
        self._claims_due: list[ShardView] = []
        self._is_claims_turn = False
        # Entries whose clients left before they came here, and when that was heard.
        self._left_early: dict[tuple[int, bytes, bytes], float] = {}
        # Models without a free slot that had requests staged when leases were last looked at.
        self._stuck: set[str] = set()
        self._rests_until = 0.0
        self._suspects = Suspects()
        self._next_shard = 0
        self._repeated = [Every(self._look_every_s, self.look_at_all), Every(self._renew_every_s, self._leases.renew)]
        self._handing_over: asyncio.TimerHandle | None = None
        self._wakeups: list[Reader] = []
        # While true, nothing more is taken.
        self.draining = False
        # For metrics.
        self.taken = 0
        self.claimed = 0
        self.leases_lost = 0
        self.unreadable = 0

    def __repr__(self) -> str:
        return f"<Consumer taken={self.taken} claimed={self.claimed} leases={len(self._leases)}>"

    def start(self) -> None:
        """Listen to the wakeups and begin to take."""
        # Where all shards are on one node, one reader hears all wakeups; while it is lost, they are asked at intervals.
        heard_together = [[view] for view in self._views] if self._nodes.is_cluster else [self._views]
        for views in heard_together:
            listen = partial(self._listen, views)
            slot = views[0].shard.slot
            self._wakeups.append(self._nodes.reader(slot, connected=listen, received=self._wakeup))
        for every in self._repeated:
            every.start()
        self._sweeper.start()
        self.notify()

    def notify(self) -> None:
        """Something changed (a slot is free, a wakeup came): see at the end of this turn what can be taken."""
        self.turn.notify()

    def look_at_all(self) -> None:
        """Look at all shards: for leases that are over, and for entries whose wakeup was lost. A timer does it."""
        self._is_look_due = True
        now = self._clock()
        if not self._budgets():
            self._busy_at = now
        if self._left_early:
            self._left_early = {key: at for key, at in self._left_early.items() if now - at < LEFT_EARLY_S}
        self._release_what_is_stuck()
        self.notify()

    def drain(self) -> None:
        """Take nothing more. What is staged is sent, what runs finishes."""
        self.draining = True
        self._hand_over()

    async def finish_asking(self, timeout_s: float) -> None:
        """Wait for the answer to the last question; the batcher gives back what it brings."""
        give_up_at = self._loop.time() + timeout_s
        while self.unanswered and self._loop.time() < give_up_at:  # noqa: ASYNC110 - once, at the end
            await asyncio.sleep(0.002)

    def close(self) -> None:
        """Stop all timers and wakeups."""
        self.draining = True
        for every in self._repeated:
            every.stop()
        if self._handing_over is not None:
            self._handing_over.cancel()
        for wakeup in self._wakeups:
            wakeup.close()
        self._sweeper.close()

    def unread(self, model: str) -> int:
        """Entries of a model that wait in Redis, as far as is known here."""
        return sum(view.unread(model) for view in self._views)

    def unread_s(self) -> float:
        """How many seconds ago Redis last told how many wait there. While all slots are busy, it is not asked."""
        return self._clock() - self._told_at

    def is_asking(self) -> bool:
        """Whether a question to Redis is out, or goes out at the end of this turn."""
        return self.unanswered > 0 or (self.turn.is_due and bool(self._budgets()))

    def why_no_work(self) -> str | None:
        """Why nothing is taken although slots are free, for readiness; None if all is well."""
        if self._replies.unconfirmed > UNCONFIRMED_MAX:
            return f"Redis does not take outcomes: {self._replies.unconfirmed} wait"
        silent_s = self._clock() - max(self._told_at, self._busy_at)
        if self._budgets() and silent_s > SILENT_S_MAX:
            return f"the queue has not been looked at for {silent_s:.0f} s although slots are free"
        return None

    # Wakeups and timers.

    def _listen(self, views: Sequence[ShardView], link: Link) -> None:
        for view in views:
            link.send(b"SSUBSCRIBE", view.shard.wakeup)

    def _wakeup(self, message: Any) -> None:
        if not isinstance(message, list) or message[0] not in (b"ssubscribe", b"smessage"):
            return
        view = self._view_of_wakeup[message[1]]
        if message[0] == b"ssubscribe":
            view.heads = None  # no wakeup was heard before the subscription
            view.barren_until = 0.0
        elif message[2].startswith(LEFT):
            self._clients_left(view, message[2])
            return
        elif message[2] == GIVEN_BACK:
            self._claim_later(view)
        elif (head := head_of(message[2])) is not None and head.model in self._models:
            view.heard(head)
        self.notify()

    def _clients_left(self, view: ShardView, message: bytes) -> None:
        """The clients of entries that were taken have left: the entries need not be sent, or not again."""
        _, consumer, *parts = message.split(b" ")
        if consumer != self._consumer:
            return
        for field, entry_id in zip(parts[::2], parts[1::2], strict=False):
            requests = self._leases.find(view.shard, field, entry_id)
            for request in requests:
                if request in self._staged:
                    self._staged.remove(request)
                self._broker.cancel(request)
            # Wakeups are on another connection, and may be quicker.
            if not requests and len(self._left_early) < LEFT_EARLY_MAX:
                self._left_early[view.shard.number, field, entry_id] = self._clock()

    def _release_what_is_stuck(self) -> None:
        """Slots that were free when requests were taken may be gone (an endpoint failed): give some back."""
        stuck = {name: after_s for name, model in self._models.items() if (after_s := model.stuck_after_s()) < inf}
        long_ago = self._clock() - self._look_every_s
        for request in self._broker.waiting_requests() if stuck.keys() & self._stuck else ():
            leased = request.held_by
            if request.model not in stuck or request.model not in self._stuck or not isinstance(leased, LeasedEntries):
                continue
            # A request that was sent and is to be sent again in other company, or of a quarantined owner, waits for a
            # slot here.
            is_patient = request.taken or request.is_quarantined
            if leased.taken < long_ago - (STUCK_AGAIN_S if is_patient else stuck[request.model]):
                self._give_back(request)
        self._stuck = {name for name in stuck if any(True for _ in self._broker.lanes(name))}

    def give_back_staged(self, model: str) -> None:
        """No endpoint of a model works any more: what is staged goes to other batchers, if one of them can serve it."""
        for request in (*self._staged, *self._broker.waiting_requests()):
            if request.model == model and isinstance(request.held_by, LeasedEntries):
                self._give_back(request)

    def _give_back(self, request: Request) -> None:
        if self._models[request.model].may_go_elsewhere(request):
            if request in self._staged:
                self._staged.remove(request)
            self._broker.settle(request, GivenBack("another batcher serves it"))

    # Taking.

    def _run(self) -> None:
        self._ask_next()
        if not self.unanswered:
            self._hand_over()

    def _ask_next(self) -> None:
        if self.unanswered or self.draining or not self._is_fleet_known():
            return
        budgets = self._budgets()
        if not budgets:
            return
        now = self._clock()
        if self._is_look_due:
            self._is_look_due = False
            if reachable := [view for view in self._views if self._nodes.is_up(view.shard.slot)]:
                self._look_at(reachable, for_leases=True)
                return
        asked = [view for view in self._views if view.barren_until <= now and self._nodes.is_up(view.shard.slot)]
        unknown = [view for view in asked if view.heads is None]
        offers = [(view, heads) for view in asked if (heads := view.usable(budgets))]
        # What other batchers had is older than what waits, so it goes first; but claims that bring nothing may not hold
        # up the others, and take turns with them.
        self._is_claims_turn = not self._is_claims_turn
        if (self._is_claims_turn or not (unknown or offers)) and (views := self._next_to_claim(budgets)):
            self._claim(views, budgets)
            return
        if unknown:
            self._look_at(unknown)
        elif offers:
            self._next_shard += 1
            first = self._next_shard % len(offers)
            offers = offers[first:] + offers[:first]
            self._read(plan_all(offers, budgets) or self._plan_order(offers, budgets))

    def _plan_order(self, offers: Offers, budgets: Sequence[Budget]) -> Reads:
        """What to read where more waits than can be taken: what is due to the lowest tier, or to synchronous requests
        before old tasks, and else the best places.
        """
        if self._min_share is not None and (due := self._min_share.due()):
            lowest = plan_min_share(offers, budgets, lambda line: tier_of(line) == self._lowest_tier, due)
            if lowest:
                return lowest
        for budget in budgets:
            if due := self._synchronous[budget.model].due():
                own = offers_of(offers, budget.model)
                is_due = synchronous_of_the_best(own, is_strict=self._is_strict)
                if is_due is not None and (reads := plan_min_share(own, budgets, is_due, due)):
                    return reads
        now_ms = self._steps.time_ms(offers[0][0].shard)
        return plan_by_place(offers, budgets, self._line_offsets_ms, self._late_ms, now_ms)

    def _budgets(self) -> list[Budget]:
        """What free slots can use beyond what is staged already."""
        budgets: list[Budget] = []
        if self._replies.unconfirmed > UNCONFIRMED_MAX:
            return budgets
        for name, model in self._models.items():
            free, is_probing = model.free_slots(), model.is_probing()
            if free <= 0 or (is_probing and self._clock() < self._rests_until):
                continue
            # No more than fit into a batch, as far as their sizes are known: the others would come for nothing.
            fitting = model.largest_batch_bytes() / self._mean_bytes[name]
            largest = 1 if is_probing else max(int(min(model.largest_batch(), fitting)), 1)
            headroom: dict[bytes, int] = {}
            again: dict[bytes, int] = {}
            for key, waiting in self._staged_by_lane(name).items():
                free -= -(-waiting // largest)
                room = -waiting % largest
                if not room:
                    continue
                if AGAIN not in key:
                    lane = self._lane_name(name, key)
                    headroom[lane] = room
                    again[b"%b 1" % lane] = room  # for what others gave back
                elif (found := again_of(key)) and company_of(found[1]) == COMPANY_MAX:
                    again[b"%b %d" % (self._lane_name(name, found[0]), found[1])] = room
            if free > 0 or (free == 0 and (headroom or again)):
                budgets.append(Budget(name, free, largest, headroom, again))
        return budgets

    def _staged_by_lane(self, model: str) -> dict[bytes, int]:
        """How many are here and not sent yet, by lane."""
        # Quarantined owners wait until there is time for them, and must not keep slots from others meanwhile.
        staged = Counter({lane.key: lane.waiting for lane in self._broker.lanes(model) if not lane.is_quarantined})
        for request in self._staged:
            if request.model == model:
                staged[request.lane_key] += 1
        return staged

    def _lane_name(self, model: str, key: bytes) -> bytes:
        name = self._lane_names.get((model, key))
        if name is None:
            name = lane_name(model, key)
            self._lane_names.keep((model, key), name, len(key))
        return name

    def _read(self, reads: Reads) -> None:
        """Take by plain commands, from several shards at once."""
        for number, streams in reads.items():
            view = self._views[number]
            self._steps.read(view.shard, self._consumer, self._model_names, streams, self._asks(view))

    def _claim(self, views: Sequence[ShardView], budgets: Sequence[Budget]) -> None:
        """Take over from batchers that died. What one of them had is spread over the shards and rides together here: so
        several are asked at once, each for a part of the room; and one of them for suspects.
        """
        for_all, terms = self._for_all(budgets), (DELIVERIES_MAX, COMPANY_MAX)
        welcome = {each.model: self._suspects.welcome(each.model) for each in for_all}
        welcomed = {model for model, which in welcome.items() if which != NONE}
        views = sorted(views, key=lambda view: not view.suspects & welcomed)

        def claimed(view: ShardView, claims: Sequence[Claim], came: Done[Taken], taken: Taken | RedisFailure) -> None:
            if isinstance(taken, Taken):
                view.suspects = taken.suspects
                if is_due_again(claims, for_all, welcome, taken):
                    self._claim_later(view)
            came(taken)

        left = {
            name: FINAL if model.is_in_doubt() else OWN
            for name, model in self._models.items()
            if model.is_served_elsewhere()
        }
        for view, claims in zip(views, plan_claims(for_all, len(views), welcome, left), strict=True):
            done = partial(claimed, view, claims, self._asks(view))
            self._steps.claim(view.shard, self._consumer, self._lease_ms, terms, claims, done)

    def _next_to_claim(self, budgets: Sequence[Budget]) -> list[ShardView]:
        """The shards whose turn it is; the others stay."""
        number = shards_for_claims(budgets)
        if not number or not self._claims_due:
            return []
        due = [view for view in self._claims_due if self._nodes.is_up(view.shard.slot)]
        self._claims_due = due[number:]
        return due[:number]

    def _claim_later(self, view: ShardView) -> None:
        if view not in self._claims_due:
            self._claims_due.append(view)

    def _for_all(self, budgets: Sequence[Budget]) -> list[Budget]:
        """Add the models for which nothing may be taken: what waits of them is to be known, too."""
        by_model = {budget.model: budget for budget in budgets}
        return [by_model.get(name) or Budget(name, 0, 1, {}) for name in self._model_names]

    def _asks(self, view: ShardView) -> Done[Taken]:
        """A question, or a part of one, goes out to a shard; returns the callback for its answer."""
        self.unanswered += 1
        view.asked()
        return partial(self._answered, view)

    def _answered(self, view: ShardView, taken: Taken | RedisFailure) -> None:
        """After the last answer all that the question could bring is here."""
        self._digest(view, taken)
        self.unanswered -= 1
        if not self.unanswered:
            if not self._awaits_company():
                self._hand_over()
            self.notify()

    def _digest(self, view: ShardView, taken: Taken | RedisFailure) -> None:
        """Learn from an answer, and stage what it brought. Whatever that is, the next question is asked."""
        try:
            if isinstance(taken, RedisFailure):
                view.failed(self._clock() + ASK_AGAIN_S)
                return
            if taken.view is None:
                view.failed(self._clock() + ASK_AGAIN_S)
            else:
                view.told(taken.view)
                self._told_at = self._clock()
                if taken.view.has_lapsed:
                    self._claim_later(view)
            read: list[tuple[str, bytes, int]] = []
            for stream in self._without_own(view.shard, taken.streams):
                if taken.view is None or self.draining:  # their time is not known: to others, or at the next claim
                    self._release(view.shard, stream)
                    continue
                model = self._stage(view.shard, stream, taken.view.now_ms)
                if stream.deliveries is None:  # what was claimed is not taken for the first time
                    read.append((model, stream.field.partition(b":")[2], len(stream.entries)))
            self._keep_shares(read)
        except Exception:
            logger.exception("an answer of Redis could not be dealt with")

    def _keep_shares(self, read: Sequence[tuple[str, bytes, int]]) -> None:
        """Count what was taken, by model and line, and who waits, as far as is known."""
        waiting = {(head.model, head.line) for view in self._views for head in view.heads or () if head.unread > 0}
        for model in {model for model, _, _ in read if model}:
            keep_share(
                self._synchronous[model],
                lambda line: not is_task_line(line),
                [(line, number) for its, line, number in read if its == model],
                [line for its, line in waiting if its == model],
            )
        if self._min_share is not None:
            keep_share(
                self._min_share,
                lambda line: tier_of(line) == self._lowest_tier,
                [(line, number) for _, line, number in read],
                [line for _, line in waiting],
            )

    def _awaits_company(self) -> bool:
        """Whether the last free slots would get batches that are not full while other shards have more for them."""
        now = self._clock()
        models = {request.model for request in self._staged}
        if not models or self.draining or now - self._staged_since > COMPANY_S_MAX:
            return False
        budgets = [budget for budget in self._budgets() if budget.model in models]
        if len(budgets) < len(models) or any(budget.batches > 0 for budget in budgets):
            return False
        if self._claims_due and any(budget.again for budget in budgets):
            return True
        return any(view.usable(budgets) and self._nodes.is_up(view.shard.slot) for view in self._views)

    def _hand_over(self) -> None:
        """Let what was taken be sent."""
        if self._handing_over is not None:
            self._handing_over.cancel()
            self._handing_over = None
        staged, self._staged = self._staged, []
        for request in staged:
            self._broker.enqueue(request)

    def _release(self, shard: Shard, stream: StreamEntries) -> None:
        """Let other batchers have what came at the wrong time."""
        leased = LeasedEntries(shard, stream.field, 0.0, 0.0, {}, self._are_done_with)
        for index, entry in enumerate(stream.entries):
            history = NEW if stream.deliveries is None else history_of(stream.deliveries[index])
            self._replies.release(EntryLease(leased, entry[0], NO_HEADER, history))

    def _without_own(self, shard: Shard, streams: list[StreamEntries]) -> list[StreamEntries]:
        """A batcher that stood still, or had no Redis, for longer than its leases claims its own entries: those are
        here already, and no batcher died over them.
        """
        kept: list[StreamEntries] = []
        for stream in streams:
            if stream.deliveries is None:  # read for the first time
                kept.append(stream)
                continue
            own, pairs = self._leases.open_ids(shard, stream.field), pairs_of(stream)
            for entry, delivery in pairs:
                if entry[0] in own:
                    self._steps.uncount(shard, stream.field, self._consumer, entry[0], delivery - 1)
            kept += some_stream(stream.field, [pair for pair in pairs if pair[0][0] not in own])
        return kept

    def _are_done_with(self, leased: LeasedEntries) -> None:
        """All entries that were taken together are done with: if they were suspects, the next ones may come."""
        if self._suspects.have_left(leased):
            for view in self._views:
                if view.has_lapsed:
                    self._claim_later(view)
            self.notify()

    def _look_at(self, views: Sequence[ShardView], *, for_leases: bool = False) -> None:
        """Ask shards what is there, and whether leases are over."""
        lease_ms = self._lease_ms if for_leases else None
        for view in views:
            self._steps.read(view.shard, self._consumer, self._model_names, (), self._asks(view), lease_ms=lease_ms)

    # Staging.

    def _stage(self, shard: Shard, stream: StreamEntries, now_ms: int) -> str:
        """Put entries into the local broker; returns their model, "" if none of them came in."""
        now, field = self._clock(), stream.field
        leased = LeasedEntries(shard, field, now, now, {}, self._are_done_with)
        self._leases.add(leased)
        for index, entry in enumerate(stream.entries):
            count = 1 if stream.deliveries is None else stream.deliveries[index]
            try:
                self._stage_one(leased, entry, count, now, now_ms)
            except Exception as fault:  # whatever it is, the others go on
                self._set_aside(leased, entry, fault)
        model = ""
        if leased.open:
            model = next(iter(leased.open.values())).model  # all of a stream have the same
            mean = sum(request.size for request in leased.open.values()) / len(leased.open)
            self._mean_bytes[model] += SIZE_WEIGHT * (max(mean, 1.0) - self._mean_bytes[model])
        if stream.deliveries is None:
            self.taken += len(leased.open)
        else:
            self.claimed += len(leased.open)
            if leased.open:
                self._is_claims_turn = False  # what brought something to send goes on
        return model

    def _stage_one(self, leased: LeasedEntries, entry: StreamEntry, count: int, now: float, now_ms: int) -> None:
        entry_id, (head, value) = entry
        if self._left_early.pop((leased.shard.number, leased.field, entry_id), None) is not None:
            return  # it is deleted already
        unpacked = self._unpacker.unpack(leased, entry_id, head, value, count, now, now_ms)
        if unpacked is None:  # for other batchers: released, it would come back at once
            self._steps.uncount(leased.shard, leased.field, self._consumer, entry_id, count - 1)
            return
        request, fault = unpacked
        if fault is None:
            model = self._models[request.model]
            fault = model.refusal_of(request)
            if isinstance(fault, UpstreamDown) and model.may_go_elsewhere(request):
                self._rests_until = now + REST_S
                fault = GivenBack("another batcher serves it")
            elif fault is not None and request.is_task:  # no client holds a connection: for later, or for others
                # Released, it would be claimed again at once, before those of dead batchers.
                self._steps.uncount(leased.shard, leased.field, self._consumer, entry_id, count - 1)
                return
        leased.open[entry_id] = request
        lease: EntryLease = request.ticket
        if lease.history.deliveries > 1:
            self._suspects.add(request.model, leased, lease.history.deliveries)
        self._broker.hold(request)
        if fault is None:
            if not self._staged:
                self._staged_since = now
                self._handing_over = self._loop.call_later(COMPANY_S_MAX, self._hand_over)
            self._staged.append(request)
        else:
            self._broker.settle(request, fault)

    def _set_aside(self, leased: LeasedEntries, entry: StreamEntry, fault: Exception) -> None:
        """An entry that cannot be read becomes a dead letter: no other batcher could read it either."""
        self.unreadable += 1
        if self._clock() - self._complained_at >= COMPLAIN_EVERY_S:
            self._complained_at = self._clock()
            logger.error("an entry of the queue cannot be read, and is set aside (%s)", type(fault).__name__)
        entry_id, fields = (entry[0], entry[1]) if len(entry) == 2 else (b"", entry)
        content = b" ".join(field for field in fields or () if isinstance(field, bytes))[:UNREADABLE_BYTES_MAX]
        if isinstance(entry_id, bytes) and entry_id:
            self._dead_letters.bury_unreadable(entry_id, "", content, "an entry of the queue that cannot be read")
            leased.open.pop(entry_id, None)
            self._replies.forget(EntryLease(leased, entry_id, NO_HEADER))

    def _lost_lease(self, request: Request) -> None:
        """Another batcher has it: no need to send it from here."""
        self.leases_lost += 1
        if request in self._staged:
            self._staged.remove(request)
        if request.phase <= QUEUED:
            self._broker.withdraw(request)


def head_of(message: bytes) -> Head | None:
    """What a wakeup says: how many entries wait, the place of the first, the stream and its model."""
    parts = message.split(b" ", 3)
    if len(parts) != 4 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    return Head(parts[2], parts[3].decode(errors="replace"), float(parts[1]), int(parts[0]))


def keep_share(
    share: MinShare, is_theirs: Callable[[bytes], bool], taken: Iterable[tuple[bytes, int]], waiting: Iterable[bytes]
) -> None:
    """Tell a share what was taken, by line, and who waits."""
    numbers = Counter[bool]()
    for line, number in taken:
        numbers[is_theirs(line)] += number
    who = {is_theirs(line) for line in waiting}
    share.served(numbers[False], numbers[True], others_wait=False in who, lowest_waits=True in who)
