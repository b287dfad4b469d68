"""Batches that were refused: finding the inputs at fault while other batches go on. bisection.py, refusals.py and
slot_share.py decide what to send; which input or endpoint is at fault is decided here.

1. Steps of a search are no attempts, and say nothing against an endpoint. They go to another endpoint than the one that
   refused, if there is one: it may be the endpoint that is sick.
2. While other requests wait for slots, searches have a share of the slots' time, and rather slots that would take
   batches that are not full; slots that no batch needs are free for them. The search with the most unresolved members
   goes first. Where few wait, and while nothing has been answered since the refusal, searches and batches take turns.
3. Members are searched in the order of their owners: what one owner broke lies together, and is found as if it were
   one bad input.
4. A request that is cleared goes back to the head of its lane. Only a request that cannot be resolved in time gets the
   503 that says so.
5. An input that was refused alone is at fault if its endpoint is known to be right: it has answered others of the lane,
   and no other endpoint answers this input. An endpoint that refuses what another one answers is itself at fault. Where
   neither is known, the client gets the API's own word, and the endpoint is suspected by this owner's inputs only.
6. A request at fault gets a 422 and becomes a dead letter; the same input is sent alone from then on, for a while.
7. Where other batchers have endpoints that work, one of them is asked before an input is blamed, with this input alone.
   Only a refusal that blames the input (400, 422), by an endpoint that answered others of the same batch, is final.
   No owner is quarantined for what goes back to the queue.
8. For a call that began before an endpoint had answered one well, no input is blamed and no owner is quarantined
   (first_contact.py).
9. Where both halves of a batch were refused, too, and nothing was answered meanwhile, it is hardly an input. If another
   batcher has an endpoint that works, the requests that wait for the search go back to the queue, unless a batcher had
   given one of the batch back: a sick endpoint that is slow to say so would keep them until they have no time left.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable

from carpool.core.clock import Clock
from carpool.core.errors import CarpoolError, DeadlineExceeded, Draining, InputRefused, InternalError, Unresolved
from carpool.core.ports import Returns
from carpool.core.request import DONE, RUNNING, Request
from carpool.core.timers import Every
from carpool.upstream.attempts import Attempts, Failure, names_of
from carpool.upstream.bisection import Bisection, Slice
from carpool.upstream.bisection_run import BisectionRun
from carpool.upstream.poison import KnownPoison
from carpool.upstream.pool import WELL_S, EndpointPreference, EndpointState, Pool
from carpool.upstream.quarantine import QUARANTINED_FROM, CommonOwner, Quarantine
from carpool.upstream.refusals import RefusedShares, is_singly, may_clear

logger = logging.getLogger("carpool.upstream")

# While searches are under way: how often slots, deadlines and the account are looked at.
LOOK_S = 0.01
# Rule 2: a search goes before other requests while fewer of these will wait when the next slot is free than so many
# batches plus WORTH times its members.
OTHERS_BATCHES = 1.45
# The weight of a member of a search, where a request that waits in a lane has 1.
WORTH = 0.5
# The most batches that are expected to come together until the next slot is free, however late that is.
MISSED_MAX = 3.0
# Quarantined owners, and searches among them, go while fewer wait than this share of a batch.
OTHERS_SHARE_QUARANTINED = 0.1
# However many wait, a slot is due after so long: to a search of half a batch or more, a smaller one, the quarantined.
STARVED_S, STARVED_SMALL_S, STARVED_QUARANTINED_S = 1.5, 3.0, 1.0
# Where fewer wait than this share of a batch, slots take small batches: every second one may be a search's.
FEW_SHARE = 0.25
# Without others for so long, quarantined owners may have every slot.
OTHERS_GONE_S = 1.0
# From this share of refused batches on, Carpool looks for one owner whom all refused calls have in common.
MOSTLY_REFUSED = 0.4
# A step is not begun that would end after the deadline; a call is not expected to take longer than this.
STEP_S_MAX = 1.0
# What a step shows of a group of at most this size counts only if the endpoint is well.
FEW = 3
# Where a refusal may be the endpoint's fault, it must have answered others so lately for a request that came alone.
SURE_S = 1.0
# How many endpoints are asked about one input alone, if none of those before is known to be right.
ASKED_ALONE_MAX = 4
# Rule 9: a batch and its halves.
WHOLES_REFUSED_MAX = 3

# With when the call began that failed.
GiveUp = Callable[[Request, CarpoolError, float], None]


class Isolation:
    """The searches of one model."""

    def __init__(
        self,
        pool: Pool,
        attempts: Attempts,
        broker: Returns,
        *,
        model: str,
        shares: RefusedShares,
        quarantined: Quarantine,
        known_poison: KnownPoison,
        give_up: GiveUp,
        max_batch: int,
        when_limit_is_learned: Callable[[EndpointState], None],
        others_waiting: Callable[[], int],
        all_waiting: Callable[[], int],
        clock: Clock,
    ) -> None:
        self._pool = pool
        self._attempts = attempts
        self._broker = broker
        self._model = model
        self._shares = shares
        self._quarantined = quarantined
        self._known_poison = known_poison
        # Settles a request with an error, and keeps it as a dead letter if that is wanted.
        self._give_up = give_up
        self._max_batch = max_batch
        self._when_limit_is_learned = when_limit_is_learned
        # How many requests wait that could share a batch, quarantined ones apart; and in all lanes together.
        self._others_waiting = others_waiting
        self._all_waiting = all_waiting
        # Whether others have had a slot since a search last took the only one that was free.
        self._others_went = True
        self._clock = clock
        self._common = CommonOwner()
        # In the order in which they came.
        self._cases: dict[BisectionRun, None] = {}
        # The event loop holds its tasks only weakly.
        self._steps: set[asyncio.Task[None]] = set()
        # Runs while a search is under way, or owners are quarantined.
        self._looks = Every(LOOK_S, self._look)
        # Set while no search is under way.
        self._serial = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        # When a slot was last given to quarantined owners though others waited.
        self._quarantined_at = 0.0
        # When others last waited while quarantined owners asked for a slot.
        self._others_at = 0.0
        pool.attach(self)
        # For metrics.
        self.poisoned = 0
        self.unresolved = 0
        self.steps = 0

    def __repr__(self) -> str:
        return f"<Isolation cases={len(self._cases)} steps={len(self._steps)}>"

    @property
    def running(self) -> int:
        """Searches under way."""
        return len(self._cases)

    def others_wait(self) -> bool:
        """Whether a request waits for a slot that is neither in a search nor quarantined."""
        return self._others_waiting() > 0

    def batch_ended(self, batch: list[Request], refused: Failure | None) -> None:
        """A batch of owners who are not quarantined was answered, or refused."""
        isolation = self._pool.isolation
        isolation.batch_ended(refused is not None)
        if isolation.refused_share >= MOSTLY_REFUSED:
            self._look_for_common(batch, refused, is_batch=True)
        elif self._common:
            self._common.forget()

    def add(self, batch: list[Request], failure: Failure) -> None:
        """A batch was refused."""
        self._serial += 1
        live = self._attempts.live(batch)
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
            search = Bisection([], parts)
        else:
            search = Bisection([whole], cut_at=cut_at)
        case = BisectionRun(live, search, failure, self._clock())
        case.is_unproven = failure.started <= self._pool.works_since
        if failure.refusal.kind == "bisect":
            case.note(whole, failure)
            if failure.refused_too is not None:
                case.note(whole, failure._replace(member=failure.refused_too))
            if failure.size == 1:
                search.take_next(is_alive=True, singly=False)
                search.refused(whole, clears=False)
        self._begin(case)
        self._look_at(case)

    def add_known(self, requests: list[Request]) -> None:
        """These inputs are known to make batches fail: each is sent alone."""
        singles = [Slice(index, index + 1) for index in range(len(requests))]
        self._begin(BisectionRun(requests, Bisection([], singles), None, self._clock()))

    async def finish(self, timeout_s: float) -> None:
        """Wait for the searches under way; past the timeout they are given up."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            leaving = Draining("this gateway shut down before the result came; send the request again")
            for step in self._steps:
                step.cancel()
            await asyncio.gather(*self._steps, return_exceptions=True)
            for case in self._cases:
                indices = (*case.search.members(), *case.search.refused_alone)
                self._settle([case.batch[index] for index in indices], leaving)
            self._cases.clear()
            self._look()

    # What goes next.

    def look_soon(self) -> None:
        """Look at slots, deadlines and the account a little later, and again while that may change something."""
        self._looks.start()

    def _begin(self, case: BisectionRun) -> None:
        self._cases[case] = None
        self._is_idle.clear()
        self._start_steps()
        self.look_soon()

    def _look(self) -> None:
        for case in list(self._cases):
            self._look_at(case)
        self._start_steps()
        if self._quarantined and self._pool.free_for_quarantined() > 0:
            self._pool.notify()  # batches of quarantined owners may have waited for this
        if not self._cases:
            self._is_idle.set()
        if self._cases or self._quarantined:
            self._looks.start()
        else:
            self._looks.stop()

    def _look_at(self, case: BisectionRun) -> None:
        """Settle the requests for which it is too late, and end the search if it is over."""
        too_late = self._clock() + min(self._attempts.service_s, STEP_S_MAX)
        late = [case.batch[index] for index in case.search.waiting() if case.batch[index].deadline <= too_late]
        if (self._pool.is_none_closed or self._is_in_vain(case)) and self._attempts.are_others_well():
            self._leave_to_others(case)
        late = [request for request in late if request.phase != DONE]
        self.unresolved += len(late)
        self._settle(late, unresolved())
        if case.under_way or case not in self._cases:
            return
        is_left = any(case.batch[index].phase != DONE for index in case.search.waiting())
        if not is_left or case.search.peek(is_alive=self._goes_on(case)) is None:
            indices = (*case.search.members(), *case.search.refused_alone)
            try:
                if not self._judge_all(case):
                    self._end(case)
            except Exception:
                self._broke([case.batch[index] for index in indices])
                self._cases.pop(case, None)

    def _is_in_vain(self, case: BisectionRun) -> bool:
        """Rule 9. The whole counts as well as its halves."""
        if case.failure is None or len(case.wholes_refused) < WHOLES_REFUSED_MAX or self._goes_on(case):
            return False
        return not any(self._attempts.others_had(request) for request in case.batch)

    def _leave_to_others(self, case: BisectionRun) -> None:
        """What waits of a search goes back to the queue, for another batcher."""
        waiting = [case.batch[index] for index in case.search.waiting()]
        went = {request.owner for request in waiting if self._attempts.goes_back(request)}
        if not went:
            return
        self._take_back_offences(case)
        if case.failure is not None and not self._pool.is_none_closed:
            # Nothing says whether the inputs are at fault or the endpoint: it is suspected, by these owners' inputs.
            self.blame([case.failure.member], went)

    def _start_steps(self) -> None:
        """Use slots that are free now."""
        while self._pool.free() and (chosen := self._choose(None)):
            case, wish = chosen
            member = self._pool.take_at_once(wish)
            if member is None:
                return
            self._start(case, member)

    def step_before_others(self, member: EndpointState) -> Callable[[], None] | None:
        """A slot has become free: the step that takes it before any batch may, if there is one."""
        chosen = self._choose(member) if self._cases else None
        return (lambda: self._start(chosen[0], member)) if chosen else None

    def _choose(self, member: EndpointState | None) -> tuple[BisectionRun, EndpointPreference] | None:
        """The case that may send something now, to this endpoint if one is named: that with the most unresolved."""
        others_wait = self.others_wait()
        if others_wait and not self._few_wait() and self._is_enough(member):
            return None
        allows = not others_wait or self._pool.isolation_allows()
        takes_turns = others_wait and (self._others_went or not self._is_last(member))
        is_free = takes_turns and self._few_wait()
        best: tuple[int, BisectionRun, EndpointPreference] | None = None
        for case in self._cases:
            is_alive = self._is_alive(case)
            group = case.search.peek(is_alive=self._goes_on(case))
            if group is None:
                continue
            if others_wait:
                is_quarantined = case.batch[0].is_quarantined
                goes = (allows or (is_free and not is_quarantined)) and self._goes_before(case, member)
                if not goes and (is_alive or is_quarantined or not takes_turns):
                    continue
            wish = self._wish(case, group)
            # While nothing is answered, the oldest is brought to its end: that tells of the endpoints.
            unresolved = case.search.unresolved if is_alive else self._max_batch
            if best is not None and unresolved <= best[0]:
                continue
            # Where no free slot fits the wish of one search, one may fit that of another.
            if self._pool.has_free(wish) if member is None else self._pool.fits(member, wish):
                best = (unresolved, case, wish)
        return best[1:] if best else None

    def _is_enough(self, member: EndpointState | None) -> bool:
        """Whether the next step would take the last free slot, which batches need soon, and enough are under way."""
        pool = self._pool
        under_way = sum(case.under_way for case in self._cases)
        return under_way >= pool.isolation.at_once(pool.total()) and self._is_last(member)

    def _is_last(self, member: EndpointState | None) -> bool:
        """Whether no slot is free but this one, which has become free just now, or the one that would be taken."""
        return self._pool.free() <= (member is None)

    def _goes_before(self, case: BisectionRun, member: EndpointState | None) -> bool:
        """Whether a step of this search is worth more than the batch that loses a slot by it.

        Simulated at 78 % load (four slots of 200 ms, one bad input in 1,000 and in 2,000): it resolves as many as a
        search that always goes first, and nine out of ten other requests are not delayed.
        """
        if case.batch[0].is_quarantined:
            return self._apart_goes_before()
        unresolved, max_batch = case.search.unresolved, self._max_batch
        batches = OTHERS_BATCHES - self._batches_missed(member)
        if self._others_worth() < batches * max_batch + unresolved * WORTH:
            return True
        waited_s = self._clock() - case.waiting_since
        return waited_s > (STARVED_S if 2 * unresolved >= max_batch else STARVED_SMALL_S)

    def _batches_missed(self, member: EndpointState | None) -> float:
        """How many batches of others come together until the next slot is free: 1 where slots become free evenly.

        They do not once calls have begun close together: then they end close together, and no slot frees in between.
        """
        if not self._is_last(member):
            return 0.0
        return min(MISSED_MAX, self._attempts.next_end_s() * self._pool.total() / max(self._attempts.service_s, 1e-6))

    def quarantined_may_go(self) -> bool:
        """Whether a batch of quarantined owners may take a slot."""
        pool = self._pool
        if not self.others_wait():
            # The last free slot is kept for other owners, while some of these have waited lately.
            return pool.free() > 1 or pool.total() == 1 or self._clock() - self._others_at > OTHERS_GONE_S
        self._others_at = self._clock()
        return pool.isolation_allows() and self._apart_goes_before()

    def apart_sent(self) -> None:
        """A batch of quarantined owners has taken a slot though others wait."""
        self._quarantined_at = self._clock()

    def batch_sent(self, is_quarantined: bool) -> None:
        """A batch has taken a slot."""
        self._others_went = self._others_went or not is_quarantined

    def _apart_goes_before(self) -> bool:
        # By the batches that endpoints really take: what quarantined owners get is taken from the others.
        few_wait = self._others_worth() < OTHERS_SHARE_QUARANTINED * self._pool.batch_max(self._max_batch)
        return few_wait or self.quarantined_is_due()

    def quarantined_is_due(self) -> bool:
        """Whether a slot is due to quarantined requests: ordered by age, they would starve under overload."""
        return self._clock() - self._quarantined_at > STARVED_QUARANTINED_S

    def _few_wait(self) -> bool:
        return self._all_waiting() < FEW_SHARE * self._max_batch

    def _others_worth(self) -> float:
        """How many of the waiting requests the next batch would answer, if it had room for all."""
        return self._others_waiting() * (1.0 - self._pool.isolation.mostly_refused)

    def _is_alive(self, case: BisectionRun) -> bool:
        """Whether an endpoint has shown that it answers; where the refusal blames the input, lately is enough."""
        failure = case.failure
        if failure is None:
            return True
        since = self._clock() - WELL_S if failure.is_certain else case.started
        return case.search.any_answered or self._pool.is_alive(since)

    def _goes_on(self, case: BisectionRun) -> bool:
        """Whether a search goes on though nothing was answered: a refusal that blames the input is an answer, too."""
        return self._is_alive(case) or (case.failure is not None and case.failure.is_certain)

    def _wish(self, case: BisectionRun, group: Slice) -> EndpointPreference:
        """Rather not an endpoint that refused; and for a few members, whom it may decide on, one known to be well."""
        alone, failure = case.refused_alone_by.get(group.first), case.failure
        if alone:  # asked again
            return EndpointPreference(frozenset(alone), known_well=True)
        failed = [each for each in (failure.member, failure.refused_too) if each] if failure is not None else []
        if not self._pool.has_others(*failed):
            del failed[1:]  # the second, which was not in doubt
        return EndpointPreference(frozenset(failed), known_well=group.size <= FEW)

    # Steps.

    def _start(self, case: BisectionRun, member: EndpointState) -> None:
        share = self._shares.share(case.batch[0].lane_key)
        search = case.search
        singly = is_singly(share, len(search.refused_alone), search.answered_members)
        group = search.take_next(is_alive=self._goes_on(case), singly=singly)
        assert group is not None  # `_choose` has asked
        is_quarantined = case.batch[0].is_quarantined
        is_last = not self._pool.free()
        is_free = not is_quarantined and self._few_wait() and (self._others_went or not is_last)
        is_paid = self.others_wait() and not is_free
        if is_paid:
            self._pool.isolation.pay(self._attempts.service_s)
            if is_quarantined:
                self._quarantined_at = self._clock()
        if is_last:
            self._others_went = False
        case.under_way += 1
        self.steps += 1
        step = asyncio.get_running_loop().create_task(self._step(case, group, member, is_paid))
        self._steps.add(step)
        step.add_done_callback(self._steps.discard)

    async def _step(self, case: BisectionRun, group: Slice, member: EndpointState, is_paid: bool) -> None:
        members = case.batch[group.first : group.end]
        started, paid_s = self._clock(), self._attempts.service_s
        result: Failure | EndpointState | None = None
        try:
            result = await self._attempts.send(members, member, ignore, is_search=True)
        except Exception:
            self._broke(members)
        finally:
            case.under_way -= 1
            case.waiting_since = self._clock()
            if is_paid:
                self._pool.isolation.pay(self._clock() - started - paid_s)
        if case not in self._cases:
            return
        try:
            if result is None:
                case.search.left(group)
            elif isinstance(result, EndpointState):
                self._answered(case, group, result)
            else:
                self._failed(case, group, result)
        except Exception:
            self._broke(members)
            case.search.left(group)
        self._look_at(case)
        self._start_steps()

    def _answered(self, case: BisectionRun, group: Slice, member: EndpointState) -> None:
        case.search.answered(group)
        case.answered_by.add(member)
        case.parts_answered.append(group)
        self._look_for_common(case.batch[group.first : group.end])
        for index in range(group.first, group.end):
            if case.known:
                self._known_poison.forget(case.known[index])
            # An endpoint that refused alone what another one answers is at fault.
            self.blame(case.refused_alone_by.pop(index, ()))

    def _failed(self, case: BisectionRun, group: Slice, result: Failure) -> None:
        members = case.batch[group.first : group.end]
        if result.refusal.kind == "bisect":
            # A batch that was refused before an endpoint worked counts when a part of it is refused after that.
            is_batch = case.is_unproven and result.started > self._pool.works_since
            self._look_for_common(members, result, is_batch=is_batch)
            case.is_unproven &= not is_batch
            self._refused(case, group, result)
        elif result.refusal.kind == "split" and group.size > 1:
            case.search.too_large(group)
        else:
            is_late = isinstance(result.error, DeadlineExceeded)
            for request in members:
                if is_late:
                    self._settle([request], unresolved())
                else:
                    self._give_up(request, result.error, result.started)
            case.search.left(group)

    def _refused(self, case: BisectionRun, group: Slice, result: Failure) -> None:
        case.note(group, result)
        share = self._shares.share(case.batch[0].lane_key)
        clears = self._is_alive(case) and may_clear(share, self._max_batch)
        cleared = case.search.refused(group, clears=clears)
        if cleared is not None:
            self._put_back(case.batch[cleared.first : cleared.end])
        members = case.batch[group.first : group.end]
        owner = members[0].owner
        if group.size > 1 and owner not in case.counted and all(each.owner == owner for each in members):
            case.counted.add(owner)
            self._offends(owner, result.started)
        if result.size == group.size == 1:
            self._judge(case, group.first)

    # Verdicts.

    def _judge_all(self, case: BisectionRun) -> bool:
        """Judge the requests that were refused alone once more: whether an endpoint is asked about one again."""
        asked_again = [self._judge(case, index) for index in list(case.search.refused_alone)]
        return any(asked_again)

    def _judge(self, case: BisectionRun, index: int) -> bool:
        """A request was refused that was alone in its call: whether another endpoint is asked about it."""
        request, failure = case.batch[index], case.last[index]
        if request.phase == DONE:
            return False
        if self._is_at_fault(case, index):
            # An endpoint that fails some of its calls with 500 answers others of the batch, too.
            is_final = failure.is_certain and case.refused_alone_by.get(index, set()) & case.answered_by
            if not is_final and self._attempts.goes_back(request, for_verdict=True):
                return False
            for member in case.refused_by.get(index, ()):
                member.doubt = 0.0  # it was right
            self._convict(case, request, failure)
            return False
        by_alone, asked = case.refused_alone_by.get(index, set()), case.asked.get(index, 1)
        # Another endpoint is asked once each of those asked before has refused the request alone.
        is_asked = asked <= len(by_alone) < ASKED_ALONE_MAX and self._pool.has_others(*by_alone)
        # While nothing is answered, that would be in vain; but for a request that came alone it is done at any rate.
        if is_asked and (self._goes_on(case) or len(case.batch) == 1):
            case.search.ask_again(index)
            case.asked[index] = asked + 1
            return True
        return False

    def _is_at_fault(self, case: BisectionRun, index: int) -> bool:
        """Rule 5."""
        failure = case.last[index]
        if failure.started < self._pool.proven_at:
            return False
        by, by_alone = case.refused_by.get(index, set()), case.refused_alone_by.get(index, set())
        lane = case.batch[index].plain_key

        def is_right(members: set[EndpointState], since: float) -> bool:
            if members & case.answered_by:
                return True
            return any(self._pool.answered_lane(member, lane, since) for member in members)

        lately = self._clock() - WELL_S
        was_search = case.failure is not None and case.failure.size > 1
        if not failure.is_certain:
            lately = case.started if was_search or failure.needs_proof else self._clock() - SURE_S
        if len(by_alone) >= ASKED_ALONE_MAX or not self._pool.has_others(*by_alone):
            return (failure.is_certain and len(by_alone) > 1) or is_right(by_alone, lately)
        # An endpoint that fails now and then answers others, too.
        trusted = {member for member in by if not member.breaker.was_healed}
        return len(trusted) > 1 and is_right(trusted & by_alone, case.started)

    def _convict(self, case: BisectionRun, request: Request, failure: Failure) -> None:
        """The model refuses this input: tell its client, keep it for a person, and send it alone from now on."""
        self.poisoned += 1
        self._known_poison.add(request, self._clock())
        if request.owner in case.counted:  # for the group that it was in
            case.counted.discard(request.owner)
        else:
            self._offends(request.owner, failure.started)
        # In the lane where the next ones of this owner will be.
        request.is_quarantined = (self._model, request.owner) in self._quarantined
        self._shares.refused(request.lane_key)
        self._give_up(request, input_refused(failure), failure.started)

    def _look_for_common(
        self, members: list[Request], refused: Failure | None = None, *, is_batch: bool = False
    ) -> None:
        if not (self._common or is_batch) or (refused is not None and refused.started <= self._pool.works_since):
            return  # of a call that began before any endpoint worked no owner is the reason (rule 8)
        owners = {request.owner for request in members}
        found = self._common.answered(owners) if refused is None else self._common.refused(owners, is_batch=is_batch)
        if found is not None:
            self._common.forget()
            self._pool.isolation.refused_share = 0.0  # the reason for it is gone
            self._offends(found, self._clock(), QUARANTINED_FROM)

    def _offends(self, owner: str, began: float, count: float = 1.0) -> None:
        if began < self._pool.proven_at:
            return  # it may be the endpoint that refuses everything
        was_quarantined = (self._model, owner) in self._quarantined
        self._quarantined.refused(self._model, owner, self._clock(), count)
        if not was_quarantined and (self._model, owner) in self._quarantined:
            logger.warning(
                "inputs of one client keep being refused; its requests share no batch with others for a while"
            )
            self._let_others_go()
            self.look_soon()

    def _let_others_go(self) -> None:
        """An owner was quarantined: that explains the refusals of batches with its inputs."""
        for case in self._cases:
            waiting = [case.batch[index] for index in case.search.waiting()]
            if case.failure is not None and not case.batch[0].is_quarantined and self._has_quarantined(waiting):
                case.search.give_up()
                self._put_back(waiting)

    def _put_back(self, requests: list[Request]) -> None:
        self._attempts.has_cleared = True
        self._broker.put_back(requests)

    def found_sick(self, member: EndpointState) -> None:
        """A batch that failed at this endpoint was answered elsewhere: that explains its refusals, too."""
        if not self._pool.has_well(member):
            return
        self._pool.record_recovery(member)
        for case in self._cases:
            if case.failure is not None and case.failure.member is member and case.failure.refused_too is None:
                waiting = [case.batch[index] for index in case.search.waiting()]
                case.search.give_up()
                self._put_back(waiting)

    def _has_quarantined(self, requests: Iterable[Request]) -> bool:
        quarantined, model = self._quarantined, self._model
        return bool(quarantined) and any((model, request.owner) in quarantined for request in requests)

    def blame(self, sick: Iterable[EndpointState | None], owners: Collection[str] = ()) -> None:
        """Count one failure for each endpoint, however many of its refusals were wrong."""
        for member in sick:
            if member is not None:
                self._pool.record_failure(member, owners)
                self._make_way(member)
                if not owners:
                    self.found_sick(member)

    def _make_way(self, member: EndpointState) -> None:
        """Quarantine the one owner to whom an endpoint is closed: its requests must not stand in the way of others."""
        blamed = member.breaker.blamed_owner if self._pool.is_proven else None
        if member.breaker.state != "closed" and blamed is not None and not self._attempts.are_others_well():
            self._quarantined.refused(self._model, blamed, self._clock(), count=3.0)
            self.look_soon()

    def _end(self, case: BisectionRun) -> None:
        """Nothing can be sent any more."""
        del self._cases[case]
        failure = case.failure
        indices = [*case.search.give_up(), *case.search.refused_alone]
        left = {index: case.batch[index] for index in indices if case.batch[index].phase != DONE}
        if left:
            # It may be the inputs or the endpoints: the endpoints are suspected, by these owners' inputs only.
            known = case.refused_alone_by if case.search.any_answered else case.refused_by
            sick = {member for index in left for member in known.get(index, ())}
            owners = {request.owner for request in left.values()}
            self.blame(sick, owners)
            is_failure = failure is not None and not (failure.is_certain or failure.needs_proof)
            if is_failure and len(owners) == 1 and not self._is_alive(case):
                # Nothing at all was answered: each of these calls was a failure.
                for member in case.refused_again_by(sick):
                    self._pool.record_failure_again(member, *owners)
                    self._make_way(member)
        if failure is not None:
            self._look_at_good_wholes(case)
        went_back = False
        # Rule 7. An endpoint that refused all of a batch, or has answered nothing yet, says nothing of any input.
        is_word = self._pool.is_proven and (case.search.any_answered or len(case.batch) == 1)
        for index, request in left.items():
            last = case.last.get(index)
            if self._attempts.goes_back(request, for_verdict=is_word and last is not None and last.is_certain):
                went_back = True
            elif last is None:
                self._give_up(request, unresolved(), case.started)
            elif last.is_certain and index in case.search.refused_alone:
                if last.started >= self._pool.proven_at:
                    self._shares.refused(request.lane_key)
                self._give_up(request, input_refused(last), last.started)
            else:
                self._give_up(request, last.error, last.started)
        if went_back:
            self._take_back_offences(case)
        if not self._cases:
            self._is_idle.set()

    def _look_at_good_wholes(self, case: BisectionRun) -> None:
        """Endpoints refused groups all parts of which were answered: each may have a limit, or is at fault."""
        good = case.good_wholes()
        for member, (size, parts_max) in good.items():
            # No limit explains this for an endpoint that has answered nothing meanwhile, or has answered as many
            # lately, or answers no batch at all where other endpoints do.
            limit, now = member.batch_limit, self._clock()
            likes = [member] if limit.has_answered(2, now) else self._pool.members
            takes_more = any(other.batch_limit.has_answered(size, now) for other in likes)
            if member.well_at <= case.started or takes_more:
                self.blame({member})
            elif limit.split(size, parts_max, now):
                self._when_limit_is_learned(member)
        if good:
            self._take_back_offences(case)

    def _take_back_offences(self, case: BisectionRun) -> None:
        """The refusals of this search were none of its owners' fault, as far as is known."""
        for owner in case.counted:
            self._quarantined.take_back(self._model, owner, self._clock())

    def _broke(self, members: list[Request]) -> None:
        """A defect, which must leave no request without an outcome. Requests that were put back get theirs later."""
        logger.exception("a step of a search failed inside Carpool", extra={"fields": names_of(members)})
        self._settle(
            [each for each in members if each.phase == RUNNING], InternalError("the gateway failed on this batch")
        )

    def _settle(self, requests: Iterable[Request], error: CarpoolError) -> None:
        for request in requests:
            if request.phase != DONE:
                self._broker.settle(request, error)

    # Order.

    def _in_order(self, batch: list[Request]) -> tuple[list[Request], int]:
        """The members by their owners, and where to cut first; 0: in the middle.

        Owners of whom inputs were refused just now come last, so that the first call has all inputs of other owners.
        Otherwise the first cut goes by one digit of the owners' numbers, another digit for each search: so a few
        searches tell together which owner all refusals have in common.
        """
        now, model, quarantined = self._clock(), self._model, self._quarantined
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


def ignore(_: float) -> None:
    """How long a step takes says nothing of a batch."""
