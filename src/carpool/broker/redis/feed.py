"""The batcher's side of the queue: take from Redis what free slots can use, and stage it in the local broker.

1. Late binding across machines: a batcher asks for no more than its free slots can send now, in whole batches of one
   lane, and what is staged counts against that. Company for a staged batch is asked for in its lane alone.
2. One question at a time: the next one is asked when the last is answered, so that the limit holds over all shards.
   Under load one shard fills a batch; when it is quiet a bell says which shard has something. In between, what is
   taken for the last free slot waits a moment for company from the shards that are known to have more.
3. Where more waits than can be taken, the shard whose best entry has the smallest virtual deadline goes first.
4. An entry is leased. Leases are renewed while their requests are staged or running, and until their outcome is
   acknowledged; those that are not renewed (their batcher died, or never got to see them) are claimed by any batcher.
5. An entry that has been delivered often enough to be suspected of killing batchers is sent alone, then given up.
   Alone means that its batcher has nothing else: what died beside it would be suspected, and given up, for nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

from carpool.broker.memory import MemoryBroker
from carpool.broker.redis.answers import UNCONFIRMED_MAX, Answers
from carpool.broker.redis.keys import GROUP, Keys, Shard, lane_name
from carpool.broker.redis.leases import NO_HEADER, Haul, Lease, Leases
from carpool.broker.redis.letter_bounds import LetterBounds
from carpool.broker.redis.link import Link, ignore
from carpool.broker.redis.nodes import Nodes, Reader, RedisFailure
from carpool.broker.redis.scripts import LEVEL, PEEK, SWEEP, TAKE
from carpool.broker.redis.shard_view import Budget, ShardView, is_scarce, plan_reads
from carpool.broker.redis.staging import ALONE_AT_DELIVERY, FedModel, SuspectLetters, Unpacker
from carpool.core.clock import Clock, monotonic
from carpool.core.request import QUEUED, Request

logger = logging.getLogger("carpool.broker")

# In a lease's time: how often leases are renewed, and how often all shards are looked at: for leases that are over, and
# for entries whose bell was lost.
RENEWALS_A_LEASE = 3
LOOKS_A_LEASE = 6
# So often a batcher looks whether it is quiet enough for a suspect.
QUIET_LOOK_S = 0.01
SWEEP_EVERY_S = 5.0
# A shard that had nothing for us is asked again after this, or after a bell.
ASK_AGAIN_S = 0.25
# What was taken waits no longer than this for company from other shards.
COMPANY_S_MAX = 0.005
# For so long a request that was sent once waits for a slot here before others may have it.
STUCK_AGAIN_S = 10.0
LANE_NAMES_KEPT_MAX = 4096
CONSUMER_GONE_MS = 600_000
COUNT_LETTERS_EVERY_MS = 600_000


class Feed:
    """Fills the local broker from Redis."""

    def __init__(
        self,
        nodes: Nodes,
        keys: Keys,
        consumer: bytes,
        broker: MemoryBroker,
        answers: Answers,
        dead_letters: SuspectLetters,
        models: Sequence[FedModel],
        *,
        # What each line (`line_name`) adds to an entry's time for its place in the order, in ms.
        line_offsets_ms: Mapping[bytes, int],
        # What each tier adds, in seconds: the same for the local order.
        tier_target_s: Sequence[float],
        lease_ms: int = 1500,
        letter_bounds: LetterBounds,
        clock: Clock = monotonic,
        now_ms: Callable[[], bytes] = lambda: b"",
    ) -> None:
        self._nodes = nodes
        self._keys = keys
        self._consumer = consumer
        self._broker = broker
        self._answers = answers
        self._models = {model.name: model for model in models}
        self._offsets: list[bytes | int] = [part for pair in line_offsets_ms.items() for part in pair]
        self._offset_of = dict(line_offsets_ms)
        self._lease_ms = lease_ms
        self._renew_every_s = lease_ms / 1000 / RENEWALS_A_LEASE
        self._look_every_s = lease_ms / 1000 / LOOKS_A_LEASE
        self._letter_bounds = letter_bounds
        self._clock = clock
        self._now_ms = now_ms
        self._loop = asyncio.get_running_loop()
        self._views = [ShardView(shard) for shard in keys.shards]
        self._view_of_bell = {view.shard.bell: view for view in self._views}
        self._unpacker = Unpacker(models, answers, dead_letters, tier_target_s)
        self._lane_names: dict[tuple[str, bytes], bytes] = {}
        self._leases = Leases(nodes, keys, consumer, self._renew_every_s, self._lost_lease, clock)
        # Taken, and not to be sent yet: other shards are known to have more for the same batch.
        self._landed: list[Request] = []
        self._landed_since = 0.0
        # True while a question is out; its answer asks the next one.
        self._is_asking = False
        self._rung = False
        # All shards are to be looked at.
        self._is_look_due = True
        # When Redis last told how many wait there; and its clock minus ours, in ms, as last seen.
        self._told_at = clock()
        self._ahead_ms = 0.0
        # Shards whose claims are due, the next one last.
        self._claims_due: list[ShardView] = []
        self._is_claims_turn = False
        # Models without a free slot that had requests staged when leases were last looked at.
        self._stuck: set[str] = set()
        # Where a suspect was found that runs here, or waits until this batcher has nothing else: nothing is taken then.
        self._suspects_at: ShardView | None = None
        self._next_shard = 0
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._bells: list[Reader] = []
        # While true, nothing more is taken.
        self.draining = False
        # For metrics.
        self.taken = 0
        self.claimed = 0
        self.leases_lost = 0

    def __repr__(self) -> str:
        return f"<Feed taken={self.taken} claimed={self.claimed} leases={len(self._leases)}>"

    def start(self) -> None:
        """Listen to the bells and begin to take."""
        # Where all shards are on one node, one connection hears all bells.
        heard_together = [[view] for view in self._views] if self._nodes.is_cluster else [self._views]
        for views in heard_together:
            listen = partial(self._listen, views)
            slot = views[0].shard.slot
            self._bells.append(self._nodes.reader(slot, connected=listen, received=self._bell, lost=_nothing))
        self._every("look", self._look_every_s, self._look_at_all)
        self._every("renew", self._renew_every_s, self._leases.renew)
        self._every("sweep", SWEEP_EVERY_S, self._sweep_all)
        self.ring()

    def ring(self) -> None:
        """Something changed (a slot is free, a bell rang): see at the end of this turn what can be taken."""
        if not self._rung:
            self._rung = True
            self._loop.call_soon(self._run)

    def drain(self) -> None:
        """Take nothing more. What is staged is sent, what runs finishes."""
        self.draining = True
        self._land()

    async def finish_asking(self, timeout_s: float) -> None:
        """Wait for the answer to the last question: what it brings is given back."""
        give_up_at = self._loop.time() + timeout_s
        while self._is_asking and self._loop.time() < give_up_at:  # noqa: ASYNC110 - once, at the end
            await asyncio.sleep(0.002)

    def close(self) -> None:
        """Stop all timers and bells."""
        self.draining = True
        for timer in self._timers.values():
            timer.cancel()
        for bell in self._bells:
            bell.close()

    def unread(self) -> int:
        """Entries that wait in Redis, as far as is known here."""
        return sum(view.unread or 0 for view in self._views)

    def unread_s(self) -> float:
        """How many seconds ago Redis last told how many wait there. While all slots are busy, nobody asks."""
        return self._clock() - self._told_at

    # Bells and timers.

    def _listen(self, views: Sequence[ShardView], link: Link) -> None:
        for view in views:
            link.send(b"SSUBSCRIBE", view.shard.bell)

    def _bell(self, message: Any) -> None:
        if isinstance(message, list) and message[0] in (b"ssubscribe", b"smessage"):
            view = self._view_of_bell[message[1]]
            # Nobody heard the bells before the subscription: it counts as one, of no stream in particular.
            number, _, stream = (b"1 " if message[0] == b"ssubscribe" else message[2]).partition(b" ")
            if view.only is not None and view.shard.stream(view.only[0]) != stream:
                view.only = None
            view.rung = int(number)
            if stream and (view.unread == 0 or view.place is not None):
                # It has come just now; an earlier one may still be there.
                place = self._clock() * 1000 + self._ahead_ms + self._offset_of.get(stream.rpartition(b":")[2], 0)
                view.place = place if view.place is None or view.unread == 0 else min(view.place, place)
            else:
                view.place = None
            self._heed_bell(view)
            self.ring()

    def _heed_bell(self, view: ShardView) -> None:
        """A bell may be here before the answer to a question that Redis answered earlier: it holds until then."""
        if view.rung:
            view.unread = max(view.unread or 0, view.rung)
            view.barren_until = 0.0

    def _every(self, name: str, seconds: float, act: Callable[[], None]) -> None:
        def again() -> None:
            self._timers[name] = self._loop.call_later(seconds, again)
            act()

        self._timers[name] = self._loop.call_later(seconds, again)

    def _look_at_all(self) -> None:
        self._is_look_due = True
        self._release_what_is_stuck()
        self.ring()

    def _release_what_is_stuck(self) -> None:
        """Slots that were free when requests were taken may be gone (an endpoint failed): others may have some."""
        stuck = {name for name, model in self._models.items() if model.free_slots() <= 0}
        long_ago = self._clock() - self._look_every_s
        for request in self._broker.waiting_requests() if stuck & self._stuck else ():
            haul = request.held_by
            # One that was sent, and is to be sent again in other company, or of an offender, waits for a slot here.
            patience_s = STUCK_AGAIN_S if request.taken or request.is_apart else 0.0
            since = long_ago - patience_s
            if request.model in stuck & self._stuck and isinstance(haul, Haul) and haul.taken < since:
                lease: Lease = request.ticket
                self._broker.withdraw(request)
                self._answers.release(lease)
        self._stuck = {name for name in stuck if any(True for _ in self._broker.lanes(name))}

    # Taking.

    def _run(self) -> None:
        self._rung = False
        self._ask_next()
        if not self._is_asking:
            self._land()

    def _ask_next(self) -> None:
        if self._is_asking or self.draining or not self._is_quiet_for_suspects():
            return
        budgets = self._budgets()
        if not budgets:
            return
        now = self._clock()
        if self._is_look_due:
            self._is_look_due = False
            if reachable := [view for view in self._views if self._nodes.is_up(view.shard.slot)]:
                self._peek(reachable)
                return
        views = [view for view in self._views if view.unread != 0 and self._may_give(view, budgets, now)]
        # Claims and takes in turn: neither may hold up the other.
        self._is_claims_turn = not self._is_claims_turn
        if self._claims_due and (self._is_claims_turn or not views):
            view = self._claims_due.pop()
            if self._nodes.is_up(view.shard.slot):
                self._take(view, budgets, self._lease_ms)
            else:
                self.ring()
            return
        if not views:
            return
        if len(views) > 1 and is_scarce(views, budgets):
            unseen = [view for view in views if view.place is None]
            if unseen:
                self._peek(unseen)
                return
            views.sort(key=lambda view: (view.place or 0.0, view.shard.number))
        else:
            self._next_shard += 1
            first = self._next_shard % len(views)
            views = views[first:] + views[:first]
        self._take_or_read(views, budgets)

    def _may_give(self, view: ShardView, budgets: Sequence[Budget], now: float) -> bool:
        is_barren = view.barren_until > now and all(
            budget.model in view.asked_for or budget.wants() <= view.asked_for for budget in budgets
        )
        return not is_barren and self._nodes.is_up(view.shard.slot)

    def _budgets(self) -> list[Budget]:
        """What free slots can use beyond what is staged already."""
        budgets: list[Budget] = []
        if self._answers.unconfirmed > UNCONFIRMED_MAX:
            return budgets
        for name, model in self._models.items():
            free = model.free_slots()
            if free <= 0:
                continue
            largest = model.largest_batch()
            rooms: dict[bytes, int] = {}
            for key, waiting in self._staged(name).items():
                free -= -(-waiting // largest)
                room = -waiting % largest
                if room:
                    rooms[self._lane_name(name, key)] = room
            if free > 0 or (free == 0 and rooms):
                budgets.append(Budget(name, free, largest, rooms))
        return budgets

    def _staged(self, model: str) -> dict[bytes, int]:
        """How many are here and not sent yet, by lane."""
        # Offenders wait until there is time for them, and must not keep slots from others meanwhile.
        staged = {lane.key: lane.waiting for lane in self._broker.lanes(model) if not lane.is_apart}
        for request in self._landed:
            if request.model == model:
                staged[request.lane_key] = staged.get(request.lane_key, 0) + 1
        return staged

    def _lane_name(self, model: str, key: bytes) -> bytes:
        name = self._lane_names.get((model, key))
        if name is None:
            if len(self._lane_names) >= LANE_NAMES_KEPT_MAX:
                self._lane_names.clear()
            name = self._lane_names[model, key] = lane_name(model, key)
        return name

    def _take_or_read(self, views: Sequence[ShardView], budgets: Sequence[Budget]) -> None:
        """Ask the first of the shards; and others with it, if that is cheap."""
        wanted = frozenset().union(*(budget.wants() for budget in budgets))
        reads = plan_reads(views, budgets)
        for view, _ in reads or [(views[0], 0)]:
            view.asked_for = wanted
        if reads:
            self._read(reads)
        else:
            self._take(views[0], budgets)

    def _read(self, reads: Sequence[tuple[ShardView, int]]) -> None:
        self._is_asking = True
        unanswered = len(reads)

        def digested() -> None:
            nonlocal unanswered
            unanswered -= 1
            if not unanswered:
                self._answered()

        for view, number in reads:
            self._read_one(view, number, digested)

    def _read_one(self, view: ShardView, number: int, digested: Callable[[], None]) -> None:
        assert view.only is not None
        field, shard = view.only[0], view.shard
        view.rung = 0
        entries: Any = None

        def read(reply: Any) -> None:
            nonlocal entries
            entries = reply

        def levelled(reply: Any) -> None:
            place: float | None = None
            if isinstance(reply, RedisFailure):
                view.only = None
                if isinstance(entries, list):  # the time is not known: to others, or to us at the next claim
                    self._release(shard, field, entries[0][1])
            else:
                if len(reply) != 5 or reply[2] != field:  # there are others too
                    view.only = None
                elif reply[4]:
                    place = self._place_of(field, reply[4])
                del reply[2:]
                if isinstance(entries, list):  # None: nothing was there; an error: the stream was tidied away
                    reply += (field, entries[0][1])
            self._digest(view, reply, is_read=True)
            if view.place is None:
                view.place = place
            digested()

        stream = shard.stream(field)
        group = (b"XREADGROUP", b"GROUP", GROUP, self._consumer)
        self._nodes.send(shard.slot, read, *group, b"COUNT", number, b"STREAMS", stream, b">")
        arguments = (shard.stream(b""), self._now_ms(), number, shard.bell)
        self._nodes.run(LEVEL, shard.slot, (shard.lanes, shard.counts), arguments, levelled)

    def _take(self, view: ShardView, budgets: Sequence[Budget], lease_ms: int = 0) -> None:
        self._is_asking = True
        view.rung = 0
        shard = view.shard
        arguments: list[bytes | int | str] = [shard.stream(b""), self._consumer, self._now_ms(), lease_ms]
        arguments += self._offsets
        arguments.append(b"")
        for budget in budgets:
            arguments += (budget.model, budget.batches, budget.largest, len(budget.rooms))
            for lane, room in budget.rooms.items():
                arguments += (lane, room)

        def took(reply: Any) -> None:
            self._digest(view, reply, is_claim=lease_ms > 0)
            self._answered()

        self._nodes.run(TAKE, shard.slot, (shard.lanes, shard.counts), arguments, took)

    def _answered(self) -> None:
        """All that a question could bring is here."""
        self._is_asking = False
        if not self._awaits_company():
            self._land()
        self.ring()

    def _digest(self, view: ShardView, reply: Any, *, is_claim: bool = False, is_read: bool = False) -> None:
        """Learn from an answer, and stage what it brought."""
        if isinstance(reply, RedisFailure):
            view.barren_until = self._clock() + ASK_AGAIN_S
            return
        now_ms, view.unread = reply[0], max(reply[1], 0)
        self._told_at = self._clock()
        self._ahead_ms = now_ms - self._told_at * 1000
        if not view.rung:
            view.place = None
        step = 3 if is_claim else 2
        if is_read and len(reply) == 2 and view.unread:
            view.only = None  # it is in another stream
        elif len(reply) == 2 and not is_claim:
            view.barren_until = self._clock() + ASK_AGAIN_S  # for other models, or others were quicker
        is_emptied = not view.unread and not view.rung
        self._heed_bell(view)
        if is_claim:
            self._forget_own(view.shard, reply)
        if self.draining:
            for at in range(2, len(reply), step):
                self._release(view.shard, reply[at], reply[at + 1])
            return
        if is_claim:
            self._leave_suspects(view, reply)
        for at in range(2, len(reply), step):
            deliveries = reply[at + 2] if is_claim else None
            self._stage(view.shard, reply[at], reply[at + 1], deliveries, now_ms)
        is_one_stream = len(reply) == 4 and not is_read and is_emptied
        if is_one_stream and (header := self._unpacker.known(reply[3][0][1][0])) is not None:
            view.only = (reply[2], header.model)

    def _awaits_company(self) -> bool:
        """Whether the last free slots would get batches that are not full while other shards have more for them."""
        now = self._clock()
        models = {request.model for request in self._landed}
        if not models or self.draining or now - self._landed_since > COMPANY_S_MAX:
            return False
        budgets = [budget for budget in self._budgets() if budget.model in models]
        if len(budgets) < len(models) or any(budget.batches > 0 for budget in budgets):
            return False
        return any(view.unread and self._may_give(view, budgets, now) for view in self._views)

    def _land(self) -> None:
        """Let what was taken be sent."""
        if timer := self._timers.pop("land", None):
            timer.cancel()
        landed, self._landed = self._landed, []
        for request in landed:
            self._broker.enqueue(request)

    def _release(self, shard: Shard, field: bytes, entries: Iterable[Any]) -> None:
        """Let others have what came at the wrong time."""
        haul = Haul(shard, field, 0.0, 0.0, {})
        for entry_id, _ in entries:
            self._answers.release(Lease(haul, entry_id, NO_HEADER))

    def _forget_own(self, shard: Shard, reply: list[Any]) -> None:
        """A batcher that stood still, or had no Redis, for longer than its leases claims its own entries: those are
        here already, and nobody died over them.
        """
        for at in range(2, len(reply), 3):
            own = self._leases.open_ids(shard, reply[at])
            kept = []
            for entry, delivery in zip(reply[at + 1], reply[at + 2], strict=True):
                if entry[0] in own:
                    uncounted = (entry[0], b"RETRYCOUNT", delivery - 1, b"JUSTID")
                    claim = (b"XCLAIM", shard.stream(reply[at]), GROUP, self._consumer, 0)
                    self._nodes.send(shard.slot, ignore, *claim, *uncounted)
                else:
                    kept.append((entry, delivery))
            reply[at + 1], reply[at + 2] = [entry for entry, _ in kept], [delivery for _, delivery in kept]
        empty = [at for at in range(2, len(reply), 3) if not reply[at + 1]]
        for at in reversed(empty):
            del reply[at : at + 3]

    def _leave_suspects(self, view: ShardView, reply: list[Any]) -> None:
        """Keep one suspect if there is nothing else; give the others back, these deliveries uncounted."""
        parts = range(2, len(reply), 3)
        has_others = bool(self._leases) or any(min(reply[at + 2]) < ALONE_AT_DELIVERY for at in parts)
        for at in parts:
            field, entries, deliveries = reply[at : at + 3]
            haul = Haul(view.shard, field, 0.0, 0.0, {})
            kept = []
            for entry, delivery in zip(entries, deliveries, strict=True):
                if delivery == ALONE_AT_DELIVERY:
                    self._suspects_at = view
                    if has_others:
                        self._answers.release(Lease(haul, entry[0], NO_HEADER))
                        continue
                    has_others = True
                kept.append((entry, delivery))
            reply[at + 1], reply[at + 2] = [entry for entry, _ in kept], [delivery for _, delivery in kept]

    def _is_quiet_for_suspects(self) -> bool:
        """False while a suspect runs here, or waits until all else has ended. Then it, or the next one, is claimed."""
        if self._suspects_at is None:
            return True
        if timer := self._timers.pop("quiet", None):
            timer.cancel()
        if self._leases:
            self._timers["quiet"] = self._loop.call_later(QUIET_LOOK_S, self.ring)
            return False
        # The next question is this claim, before anything else is taken.
        self._claims_due.append(self._suspects_at)
        self._is_claims_turn = False
        self._suspects_at = None
        return True

    def _peek(self, views: Sequence[ShardView]) -> None:
        """Learn where the best entries are."""
        self._is_asking = True
        left = len(views)
        for view in views:
            view.rung = 0

        def peeked(view: ShardView, reply: Any) -> None:
            nonlocal left
            left -= 1
            if isinstance(reply, RedisFailure):
                view.barren_until = self._clock() + ASK_AGAIN_S
            else:
                self._ahead_ms = reply[0] - self._clock() * 1000
                place = self._best_place(reply)
                if not view.rung:
                    view.place = place
                view.barren_until = 0.0
                # The count may be behind: there is one at least.
                view.unread = max(1, reply[1]) if place < inf else 0
                # Streams without unread entries are not told of: the next read sees whether there are others.
                if len(reply) > 3:
                    view.only = (reply[3], reply[4].decode()) if len(reply) == 7 and not view.rung else None
                if reply[2] and view not in self._claims_due:
                    self._claims_due.append(view)
            if not left:
                self._is_asking = False
                for each in views:
                    self._heed_bell(each)
                self.ring()

        for view in views:
            shard = view.shard
            arguments = (shard.stream(b""), self._now_ms(), self._lease_ms)
            self._nodes.run(PEEK, shard.slot, (shard.lanes, shard.counts), arguments, partial(peeked, view))

    def _best_place(self, reply: Sequence[Any]) -> float:
        places = [
            self._place_of(reply[at], reply[at + 2])
            for at in range(3, len(reply), 4)
            if reply[at + 1].decode() in self._models
        ]
        return min(places, default=inf)

    def _place_of(self, field: bytes, entry_id: bytes) -> float:
        return int(entry_id.partition(b"-")[0]) + self._offset_of.get(field.partition(b":")[2], 0)

    # Staging.

    def _stage(
        self, shard: Shard, field: bytes, entries: Iterable[Any], deliveries: Sequence[int] | None, now_ms: int
    ) -> None:
        """Put entries into the local broker."""
        now = self._clock()
        haul = Haul(shard, field, now, now, {})
        self._leases.add(haul)
        for index, (entry_id, (head, value)) in enumerate(entries):
            delivery = 1 if deliveries is None else deliveries[index]
            unpacked = self._unpacker.unpack(haul, entry_id, head, value, delivery, now, now_ms)
            if unpacked is None:
                self._answers.release(Lease(haul, entry_id, NO_HEADER))
                continue
            request, fault = unpacked
            if fault is None:
                fault = self._models[request.model].refusal_of(request)
                if fault is not None and request.is_task:  # nobody waits on the line: it is for later, or for others
                    self._set_aside(shard, field, entry_id, delivery)
                    continue
            haul.open[entry_id] = request
            self._broker.hold(request)
            if fault is None:
                if not self._landed:
                    self._landed_since = now
                    self._timers["land"] = self._loop.call_later(COMPANY_S_MAX, self._land)
                self._landed.append(request)
            else:
                self._broker.settle(request, fault)
        if deliveries is None:
            self.taken += len(haul.open)
        else:
            self.claimed += len(haul.open)

    def _set_aside(self, shard: Shard, field: bytes, entry_id: bytes, delivery: int) -> None:
        """Leave an entry until its lease is over, this delivery uncounted.

        Released, it would be claimed again at once, before those of dead batchers.
        """
        claim = (b"XCLAIM", shard.stream(field), GROUP, self._consumer, 0, entry_id)
        self._nodes.send(shard.slot, ignore, *claim, b"IDLE", 0, b"RETRYCOUNT", delivery - 1, b"JUSTID")

    def _lost_lease(self, request: Request) -> None:
        """Another batcher has it: no need to send it from here."""
        self.leases_lost += 1
        if request in self._landed:
            self._landed.remove(request)
        if request.phase <= QUEUED:
            self._broker.withdraw(request)

    def _sweep_all(self) -> None:
        for view in self._views:
            shard = view.shard
            bounds = self._letter_bounds
            letters = (*bounds.arguments(), bounds.ttl_ms, COUNT_LETTERS_EVERY_MS)
            arguments = (shard.stream(b""), self._now_ms(), CONSUMER_GONE_MS, *letters)
            names = (shard.lanes, shard.counts, shard.letters, shard.letter_bodies)
            self._nodes.run(SWEEP, shard.slot, names, arguments, self._swept)

    def _swept(self, reply: Any) -> None:
        if not isinstance(reply, RedisFailure):
            self._letter_bounds.note_dropped(reply[2])


def _nothing() -> None:
    """A lost bell is connected again; until then shards are asked at intervals."""
