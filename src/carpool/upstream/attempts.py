"""Attempts: one batch to an endpoint, and again if the endpoint failed. What a refusal means is for the codec to say.

1. A slot is given back the moment the answer has been read, before it is decoded, so that the GPU gets its next batch
   while this one is handed out.
2. What an error means is the codec's word (`Refusal`): try elsewhere, split, bisect, fault, give up.
3. Attempts are for the endpoint's faults, and are paid from the retry budget. The first one at another endpoint that is
   known to be well is free, and made at once: what it heals is the fault of the endpoint that failed.
4. Before every call, requests whose client has left or whose deadline has passed are dropped.
5. A call whose connection was dead is sent again at once, in the same slot. That says nothing against the endpoint the
   first time. It is an attempt, and paid for: the call may have been received.
6. No endpoint gets more inputs than it is known to take (limits.py), but for the one batch that tests that.
7. A refusal that may blame an input is for isolation.py. But where the endpoint is in doubt (pool.py), another endpoint
   that is known to be well is asked first, with the whole batch: one call in place of many.
8. Where no endpoint here is known to be well, but another batcher has one, a batch that failed goes back to the queue.
   Its slot stays taken as long as a call takes: else an endpoint that fails at once would be free first each time, and
   all requests would come here before they are served elsewhere. A refused batch with members that another batcher gave
   back stays: else one client's bad inputs would take a batch from batcher to batcher until no endpoint seemed to work.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from secrets import token_hex
from typing import NamedTuple

from msgspec.structs import replace

from carpool.core.batch import Batch
from carpool.core.clock import STOOD_STILL_S, Clock, monotonic
from carpool.core.errors import (
    CarpoolError,
    DeadlineExceeded,
    GivenBack,
    UpstreamFailed,
    UpstreamProtocolFault,
    UpstreamRefused,
    without_frames,
)
from carpool.core.events import Events
from carpool.core.histograms import SECONDS_BOUNDS, Histogram
from carpool.core.outcome import CallFacts, Output
from carpool.core.ports import CallTraces, OtherBatchers, Outcomes
from carpool.core.request import DONE, Request, searched_since
from carpool.core.trace import CallTrace
from carpool.upstream.call_ids import CallIds
from carpool.upstream.codecs import Codec, ProtocolFaultError
from carpool.upstream.codecs.base import Decoded, Refusal
from carpool.upstream.endpoint import (
    AttemptFailedError,
    ConnectionWasDeadError,
    NoAnswerError,
    UpstreamResponse,
)
from carpool.upstream.first_contact import (
    LOOK_AT_ADDRESS,
    call_failed,
    field_names,
    look_at_after,
    look_at_answer,
    status_told,
)
from carpool.upstream.pool import DOUBT_MAX, IN_DOUBT_FROM, WELL_S, EndpointState, Pool
from carpool.upstream.retry import RetryBudget, pause_before
from carpool.upstream.same import Merged, still_there

logger = logging.getLogger("carpool.upstream")

# A timer of the event loop may fire so much before its time.
TIMER_EARLY_S = 0.01
# A call that its clients' deadlines cut off sooner than this many times what calls take says nothing of the endpoint.
CUT_SHORT = 2.0
# Rule 8: no slot stays taken for longer than this after its call.
HELD_S_MAX = 1.0
# CUT_SHORT is for an endpoint that has answered within this time, or within CUT_SHORT times what calls take.
ANSWERS_S = 1.0
# Statuses that are about the call, whatever its inputs are: credentials, addresses, methods, sizes, time.
OF_THE_CALL = frozenset({401, 402, 404, 405, 407, 408, 411, 413, 426, 429, 431})
# How long a call takes, until the first has been seen; and the weight of the newest.
SERVICE_S_PRIOR = 0.2
SERVICE_WEIGHT = 0.1

BatchEnded = Callable[[float], None]


class Failure(NamedTuple):
    """Why a call brought no outputs, and what it means."""

    refusal: Refusal
    error: CarpoolError
    # The endpoint that said so; None if no call was made.
    member: EndpointState | None = None
    # How many were in the call, and when it began.
    size: int = 0
    started: float = 0.0
    # The refusal blames the input, not the endpoint.
    is_certain: bool = False
    # As a rule such a refusal blames no input: only answers that came after it show that it does here.
    needs_proof: bool = False
    # The connection was dead.
    is_dead: bool = False
    # The failure says something of the endpoint: it was not only busy, and had as long as calls take.
    tells: bool = True
    # Another endpoint, which refused the same whole.
    refused_too: EndpointState | None = None


class Attempts:
    """Sends batches of one model."""

    def __init__(
        self,
        pool: Pool,
        codec: Codec,
        outcomes: Outcomes,
        *,
        timeout_s: float,
        attempts: int,
        backoff_s: float,
        budget: RetryBudget,
        when_limit_is_learned: Callable[[EndpointState], None],
        when_answered: Callable[[list[Request]], None],
        # Counts a failure on inputs of these owners.
        blame: Callable[[Iterable[EndpointState], Collection[str]], None],
        # Hears of an endpoint that failed what another one answered.
        found_sick: Callable[[EndpointState], None],
        merge: Callable[[list[Request]], Merged] | None = None,
        others: OtherBatchers | None = None,
        events: Events | None = None,
        traces: CallTraces | None = None,
        clock: Clock = monotonic,
        random_share: Callable[[], float] = random.random,
    ) -> None:
        self._pool = pool
        self._codec = codec
        self._outcomes = outcomes
        self.timeout_s = timeout_s
        self._attempts = attempts
        self._backoff_s = backoff_s
        self._budget = budget
        self._when_limit_is_learned = when_limit_is_learned
        # Called with the members of each call that was answered, before they are settled.
        self._when_answered = when_answered
        # Finds the inputs of a call that are the same; None where each is sent for itself.
        self._merge = merge
        # None where this process has all endpoints there are.
        self._others = others
        self._events = events or Events()
        # None where calls are not traced.
        self._traces = traces
        self._clock = clock
        self._random_share = random_share
        self._call_ids = CallIds(token_hex(4))
        self._blame = blame
        self._found_sick = found_sick
        # How long calls take, lately.
        self.service_s = SERVICE_S_PRIOR
        # When the calls under way began, the oldest first.
        self._began: dict[int, float] = {}
        self._call_number = 0
        # Requests were cleared by a search: some that are sent now may have been in it.
        self.has_cleared = False
        # For metrics: seconds of the calls that were answered, calls by result.
        self.call_seconds = Histogram(SECONDS_BOUNDS)
        self.calls: dict[str, int] = {"ok": 0, "failed": 0, "refused": 0, "protocol-fault": 0}

    def next_end_s(self) -> float:
        """In how many seconds the next of the calls under way, or a call that begins now, should end."""
        now = self._clock()
        return max(0.0, next(iter(self._began.values()), now) + self.service_s - now)

    def live(self, batch: list[Request]) -> list[Request]:
        """The requests that still wait and whose deadline has not passed."""
        now = self._clock()
        return [request for request in batch if request.phase != DONE and request.deadline > now]

    def are_others_well(self) -> bool:
        """Whether another batcher has an endpoint that works."""
        return self._others is not None and self._others.are_well()

    def others_had(self, request: Request) -> bool:
        """Whether another batcher has given a request back."""
        return self._others is not None and self._others.had(request)

    def goes_back(self, request: Request, *, for_verdict: bool = False) -> bool:
        """Give a request that cannot be served here back to the queue if another batcher can serve it: whether it went.

        `for_verdict`: its input would be blamed here, and a second endpoint is asked first.
        """
        if self._others is None or request.phase == DONE:
            return False
        if not self._others.may_serve(request, for_verdict=for_verdict):
            return False
        return self._outcomes.settle(request, GivenBack("another batcher serves it", is_alone=for_verdict))

    async def send(
        self, batch: list[Request], member: EndpointState | None, ended: BatchEnded, *, is_search: bool = False
    ) -> Failure | EndpointState:
        """Call until an endpoint answers for the inputs: that one is returned, and the members are settled.

        `member`: the slot for the first attempt; None to take one when it is free. `is_search`: it is a step of a
        search, and called so in traces.
        """
        # The failures after which another endpoint was asked.
        failures: list[tuple[EndpointState, Failure]] = []
        try:
            result = await self._send(batch, member, ended, failures, is_search)
            if not failures:
                return result
            return self._compared(failures, result)
        finally:
            for failed, _ in failures:
                self._pool.help_ended(failed)

    def _compared(
        self, failures: list[tuple[EndpointState, Failure]], result: Failure | EndpointState
    ) -> Failure | EndpointState:
        """Learn of the endpoints that failed a batch first from what the last endpoint made of it."""
        for failed, failure in failures:
            if isinstance(result, EndpointState) and failed is not result and failure.tells:
                if failure.refusal.kind == "bisect":
                    self._blame([failed], ())
                else:
                    self._found_sick(failed)
            elif isinstance(result, Failure) and failure.refusal.kind == "bisect":
                # The search begins where it would have begun, but for what is known now.
                return failure._replace(refused_too=result.member if result.refusal.kind == "bisect" else None)
        return result

    async def _send(
        self,
        batch: list[Request],
        member: EndpointState | None,
        ended: BatchEnded,
        failures: list[tuple[EndpointState, Failure]],
        is_search: bool,
    ) -> Failure | EndpointState:
        failure = out_of_time()
        attempt = dead_in_a_row = 0
        while attempt < self._attempts:
            attempt += 1
            if member is None:
                member = await self._another(batch, attempt, [failed for failed, _ in failures])
                if member is None:
                    return failure
            members = self.live(batch)
            now = self._clock()
            most = member.batch_limit.allows(now, len(members))
            if 0 < len(members) <= most:
                member.batch_limit.largest(now, len(members))
            else:
                self._pool.give_back(member)
                self._pool.says_nothing(member)
                return too_many(len(members), most, now) if members else out_of_time()
            latest = max(request.deadline for request in members)
            limit_s = latest - self._clock()
            within_s = min(self.timeout_s, limit_s)
            if self._traces is None:
                outcome = await self._call(members, member, attempt, within_s, ended, is_search)
            else:
                outcome = await self._traced_call(self._traces, members, member, attempt, within_s, ended, is_search)
            if outcome is None:
                return member
            if members[0].batch is not None:
                members[0].batch.failure = outcome.error.detail
            for request in members:
                request.sends += 1
            if outcome.is_dead:
                dead_in_a_row += 1
                if attempt < self._attempts and self._budget.take(self._clock()):
                    continue
                outcome = outcome._replace(tells=self._give_up_dead(member, dead_in_a_row))
            dead_in_a_row = 0
            failure, failed, member = outcome, member, None
            is_over = limit_s <= self.timeout_s and self._clock() > latest - TIMER_EARLY_S
            is_quiet = is_search or batch[0].is_quarantined
            goes_on = not is_over and self._asks_another(failure, failed, attempt, is_quiet=is_quiet)
            goes_on, held_s = self._give_back(members, failure, failed) if goes_on else (False, 0.0)
            if goes_on:
                failures.append((failed, failure))
                self._pool.is_helped(failed)
            if failure.refusal.kind != "fault":  # else it was given back with the answer
                self._free(failed, held_s)
            if not goes_on:
                # The deadline of the requests may have ended the call.
                return out_of_time() if is_over and failure.refusal.kind == "elsewhere" else failure
            logger.warning(
                "attempt %d of %d failed: %s",
                attempt,
                self._attempts,
                failure.error.detail,
                extra={"fields": {"endpoint": failed.name, "batch_size": len(members), **names_of(members)}},
            )
        return failure

    def _give_back(self, members: list[Request], failure: Failure, failed: EndpointState) -> tuple[bool, float]:
        """Rule 8. Returns whether the next attempt is made here, and for how long the slot stays taken.

        The next attempt is for the requests that cannot go back to the queue.
        """
        if self._others is None or self._pool.has_well(failed):
            return True, 0.0
        is_refusal = failure.refusal.kind == "bisect"
        if is_refusal and any(self.others_had(request) for request in members):
            return False, 0.0  # looked into here
        went = [request for request in members if self.goes_back(request)]
        if went and is_refusal:
            # Nothing says whether the inputs are at fault or the endpoint: it is suspected, by these owners' inputs.
            self._blame([failed], {request.owner for request in went})
        if self.live(members):
            return not is_refusal, 0.0
        return False, min(HELD_S_MAX, max(0.0, failure.started + self.service_s - self._clock())) if went else 0.0

    def _free(self, member: EndpointState, after_s: float) -> None:
        """Give a slot back, now or a little later."""
        if after_s:
            asyncio.get_running_loop().call_later(after_s, self._pool.give_back, member)
        else:
            self._pool.give_back(member)

    async def _another(self, batch: list[Request], attempt: int, sick: Sequence[EndpointState]) -> EndpointState | None:
        """A slot for the next attempt, rather of another endpoint; None if there is no time or no budget for it."""
        is_free = attempt == 2 and bool(sick) and self._pool.has_well(sick[-1])
        if attempt > 1 and not is_free:
            pause_s = pause_before(attempt, self._backoff_s, self._random_share())
            if pause_s >= self._time_left(batch) or not self._budget.take(self._clock()):
                return None
            await asyncio.sleep(pause_s)
        return await self._pool.take_for_retry(sick, max(0.0, self._time_left(batch)), known_well=attempt > 1)

    def _asks_another(self, failure: Failure, failed: EndpointState, attempt: int, *, is_quiet: bool) -> bool:
        """Whether the next attempt is made, after one that failed: rules 2 and 7.

        `is_quiet`: steps of searches, and quarantined owners, bring no endpoint into doubt.
        """
        kind = failure.refusal.kind
        if kind in ("split", "give-up"):
            return False
        doubt = self._pool.doubt(failed) if not is_quiet else 0.0
        if kind == "elsewhere":
            return True
        if is_quiet or attempt > 1 or self._attempts == 1:
            return False
        if kind == "fault":
            return self._pool.has_others(failed)
        # An endpoint that has answered no batch so large may have a limit: a search finds it, short of DOUBT_MAX.
        is_limit = not failed.batch_limit.has_answered(failure.size, self._clock())
        is_doubted = doubt >= (DOUBT_MAX if is_limit else IN_DOUBT_FROM)
        return is_doubted and (self._others is not None or self._pool.has_well(failed))

    def _give_up_dead(self, member: EndpointState, dead_in_a_row: int) -> bool:
        """More than one dead connection in a row is the endpoint's fault: whether it is."""
        if dead_in_a_row > 1:
            self._pool.record_failure(member)
        else:
            self._pool.says_nothing(member)
        return dead_in_a_row > 1

    async def _traced_call(
        self,
        traces: CallTraces,
        members: list[Request],
        member: EndpointState,
        attempt: int,
        timeout_s: float,
        ended: BatchEnded,
        is_search: bool,
    ) -> Failure | None:
        """`_call`, and how it ended is written down."""
        traced = traces.call_begins(members, member.name, attempt, self._clock(), is_search=is_search)
        if traced is None:
            return await self._call(members, member, attempt, timeout_s, ended, is_search)
        traced.error = "cancelled"
        try:
            failure = await self._call(members, member, attempt, timeout_s, ended, is_search, traced)
            traced.error = "" if failure is None else failure.error.code
            return failure
        finally:
            traced.ended = traced.ended or self._clock()
            traces.call_ended(members, traced)

    async def _call(
        self,
        members: list[Request],
        member: EndpointState,
        attempt: int,
        timeout_s: float,
        ended: BatchEnded,
        is_search: bool,
        traced: CallTrace | None = None,
    ) -> Failure | None:
        """One call: settles the members and returns None, or returns what went wrong.

        Gives the slot back after a 2xx answer, or when it raises; after any other failure the caller still holds it.
        """
        started = self._clock()
        call_id = self._call_ids.next()
        number = self._call_number = self._call_number + 1
        self._began[number] = started
        batch = members[0].batch
        if batch is not None and not (is_search and batch.sent):  # a search comes after the batch is over
            batch.sent, batch.endpoint, batch.attempts = started, member.name, attempt
        if self._events.subscribers:
            self._events.sent(members, member.name, attempt, started)
        is_slot_held = True
        sent, places = (members, None) if self._merge is None else self._merge(members)
        try:
            call = self._codec.encode(sent, call_id)
            if traced is not None:
                call = replace(call, headers=call.headers + traced.headers)
            answer = await member.endpoint.post(call, timeout_s)
            is_slot_held = not 200 <= answer.status < 300
        except AttemptFailedError as failure:
            self.calls["failed"] += 1
            # Else the clients' own deadline ended the call.
            is_by_setting = isinstance(failure, NoAnswerError) and timeout_s == self.timeout_s
            setting = " (`upstream.timeout_s`)" if is_by_setting else ""
            error = UpstreamFailed(f"the inference API could not be used: {failure}{setting}")
            without_frames(failure)  # which hold the call and its answer
            is_dead = isinstance(failure, ConnectionWasDeadError)
            tells = is_dead or self._call_failed(members, member, timeout_s, started, str(failure))
            return Failure(Refusal("elsewhere"), error, member, len(members), started, is_dead=is_dead, tells=tells)
        except BaseException:
            is_slot_held = False
            self._pool.says_nothing(member)
            raise
        finally:
            del self._began[number]
            if not is_slot_held:
                self._pool.give_back(member)
        seconds = self._clock() - started
        if traced is not None:
            traced.status, traced.ended = answer.status, started + seconds
        if answer.load is not None:
            member.load.report(answer.load)
        try:
            if not 200 <= answer.status < 300:
                return self._refused(answer, members, member, started, call_id, call.path)
            if places is not None:
                sent = still_there(Merged(sent, places), members)
            parts = self._codec.decode(answer, sent, call_id)
            del answer, call  # what was made of it may be as large
        except ProtocolFaultError as fault:
            self.calls["protocol-fault"] += 1
            self._pool.record_failure(member)
            call_failed(member, str(fault), look_at_answer(self._codec.outputs_field), self._clock())
            fields = {"endpoint": member.name, **names_of(members)}
            logger.error("protocol fault: %s", fault, extra={"fields": fields})
            broken = UpstreamProtocolFault(f"the inference API broke its protocol: {fault}")
            return Failure(Refusal("fault"), broken, member, len(members), started)
        except Exception:  # a defect of the codec, which must not leave a probe without a verdict
            self._pool.says_nothing(member)
            if is_slot_held:
                self._pool.give_back(member)
            raise
        ended(seconds)
        self.service_s += SERVICE_WEIGHT * (seconds - self.service_s)
        self.call_seconds.observe(seconds)
        member.load.answered(len(sent), seconds, started)
        member.batch_limit.answered(len(sent), started)
        self.calls["ok"] += 1
        self._pool.record_success(member, members[0].common_key, started)
        self._when_answered(members)
        facts = CallFacts(
            len(sent),
            seconds,
            parts[0].model_version,
            endpoint=member.name,
            attempts=attempt,
            started_s=started - members[0].taken,
            batch_id="" if batch is None else batch.id,
            # Requests that have ended meanwhile do not count: no request would be charged for their part.
            gpu_s=seconds / max(1, sum(request.phase != DONE for request in members)),
            reason="" if batch is None else batch.reason,
            search_s=searched_since(members[0], started) if is_search else 0.0,
            is_traced=traced is not None and is_kept(batch),
        )
        outputs = outputs_of(parts, facts)
        outputs = outputs if places is None else [outputs[place] for place in places]
        self._outcomes.settle_batch(members, told_of_searches(members, outputs) if self.has_cleared else outputs)
        return None

    def _call_failed(
        self, members: list[Request], member: EndpointState, timeout_s: float, started: float, why: str
    ) -> bool:
        """No answer came: returns whether that is the endpoint's fault.

        It is not if the clients gave the call less time than calls take, or if this process stood still.
        """
        now = self._clock()
        if now > started + timeout_s + STOOD_STILL_S:
            self._pool.says_nothing(member)  # its answer may have come while this process could not read it
            return False
        is_short = timeout_s < min(self.timeout_s, CUT_SHORT * self.service_s)
        if not is_short or now < started + timeout_s - TIMER_EARLY_S:
            self._pool.record_failure(member)
            call_failed(member, why, LOOK_AT_ADDRESS, now)
            return True
        if now - member.well_at < min(self.timeout_s, max(ANSWERS_S, CUT_SHORT * self.service_s)):
            self._pool.says_nothing(member)
        else:
            self._blame([member], {request.owner for request in members})
        return False

    def _refused(
        self,
        answer: UpstreamResponse,
        members: list[Request],
        member: EndpointState,
        started: float,
        call_id: str,
        path: str,
    ) -> Failure:
        """An answer with an error status. What the body says goes to a client that was alone in its call, at most."""
        self.calls["refused"] += 1
        size = len(members)
        refusal = self._codec.classify(answer, size, call_id)
        if refusal.batch_max is not None and member.batch_limit.said(refusal.batch_max, size, self._clock()):
            self._when_limit_is_learned(member)
        if not member.succeeded and refusal.kind != "split":
            names = field_names(answer.body, members[0].parameters) if answer.status == 422 else ()
            what = status_told(answer.status, member.name, path, names)
            call_failed(member, what, look_at_after(answer.status, self._codec.inputs_field), self._clock())
        says = f"the inference API answered with status {answer.status}"
        if refusal.kind == "give-up" and self._may_be_an_input(answer.status, members, member):
            self._pool.refused(member)
            bisect = Refusal("bisect", refusal.message)
            return Failure(bisect, UpstreamRefused(says), member, size, started, needs_proof=True)
        if refusal.kind in ("elsewhere", "give-up"):
            if answer.status == 429:
                self._pool.refused(member)  # busy, not broken
                member.load.refused()
            elif refusal.kind == "give-up" or not self._pool.has_others(member):
                # It answers: what it says may have to do with these inputs. (Where others can answer in its place, a
                # word that blames no input is its own fault.)
                self._blame([member], {request.owner for request in members})
            else:
                self._pool.record_failure(member)
            error = UpstreamFailed(says) if refusal.kind == "elsewhere" else UpstreamRefused(says)
            return Failure(refusal, error, member, size, started, tells=answer.status != 429)
        self._pool.refused(member)
        return Failure(refusal, UpstreamFailed(says), member, size, started, answer.status in (400, 422))

    def _may_be_an_input(self, status: int, members: list[Request], member: EndpointState) -> bool:
        """Whether a status that usually blames no input may do so here, like that of a content filter."""
        lately = self._clock() - WELL_S
        is_of_the_call = status in OF_THE_CALL or not 400 <= status < 500
        return not is_of_the_call and self._pool.answered_lane(member, members[0].common_key, lately)

    def _time_left(self, members: list[Request]) -> float:
        """Seconds until the last deadline of those that still wait."""
        latest = max((request.deadline for request in members if request.phase != DONE), default=0.0)
        return latest - self._clock()


def is_kept(batch: Batch | None) -> bool:
    """Whether it is known already that the span of a batch is kept."""
    return batch is not None and batch.trace is not None and bool(batch.trace.links)


def outputs_of(parts: Sequence[Decoded], facts: CallFacts) -> list[Output]:
    """The outputs of one call. Where several versions of a model answered it, each has the facts of its own."""
    version = facts.model_version
    if version is None or all(part.model_version == version for part in parts):
        return [Output(part.value, facts, part.tokens_used) for part in parts]
    every = {version: replace(facts, model_version=version) for version in {part.model_version for part in parts}}
    return [Output(part.value, every[part.model_version], part.tokens_used) for part in parts]


def told_of_searches(members: Sequence[Request], outputs: Sequence[Output]) -> list[Output]:
    """The outputs of these requests; that of a request which a search had cleared says how long that took."""
    return [
        replace(output, call=replace(output.call, searched_s=request.searched_s)) if request.searched_s else output
        for request, output in zip(members, outputs, strict=True)
    ]


def names_of(members: Sequence[Request]) -> dict[str, str]:
    """For log lines: the batch of these requests, and its trace where it has one."""
    batch = members[0].batch
    if batch is None:
        return {}
    traced = batch.trace
    return {"batch": batch.id} if traced is None else {"batch": batch.id, "trace_id": traced.trace.trace_id.hex()}


def too_many(size: int, most: int, now: float) -> Failure:
    """The limit of the endpoint was learned after the batch was formed."""
    error = UpstreamFailed("the inference API does not take so many inputs")
    return Failure(Refusal("split", batch_max=most), error, size=size, started=now)


def out_of_time() -> Failure:
    """No slot was free in time, or no request of the batch still waited."""
    return Failure(Refusal("elsewhere"), DeadlineExceeded("no result in time"))
