"""One batch through the fixed API: attempts, isolation of bad inputs, and an outcome for every member. Never raises.

1. A slot is given back the moment the answer has been read, before it is decoded, so that the GPU gets its next batch
   while this one is handed out.
2. What an error means is the codec's word (`Refusal`): try elsewhere, split, bisect, fault, give up.
3. Attempts are for the endpoint's faults, and are paid from the retry budget. Steps of a bisection and parts of a split
   are not attempts, and say nothing against an endpoint. A bisection goes on elsewhere if it can, so that an endpoint
   that refuses everything harms nobody.
4. Whoever has left, or whose deadline has passed, is dropped before every call.
   A call whose connection was dead is sent again at once, in the same slot. That says nothing against the endpoint the
   first time. It is an attempt, and paid for, unless the call surely was not received.
5. Poison gets a 422 and becomes a dead letter. The same input is sent alone from then on, for a while.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterable
from math import inf
from secrets import token_hex
from typing import Any, NamedTuple, TypeVar

from carpool.core.clock import Clock, monotonic
from carpool.core.errors import (
    CarpoolError,
    DeadlineExceeded,
    Draining,
    InputRefused,
    InternalError,
    UpstreamFailed,
    UpstreamProtocolFault,
    UpstreamRefused,
)
from carpool.core.outcome import CallFacts, Output
from carpool.core.ports import DeadLetters, Outcomes
from carpool.core.request import DONE, Request
from carpool.core.tally import SECONDS_BOUNDS, Histogram
from carpool.upstream.bisection import Bisection, Group
from carpool.upstream.call_ids import CallIds
from carpool.upstream.codecs import Codec, ProtocolFaultError
from carpool.upstream.codecs.base import Refusal
from carpool.upstream.endpoint import Answer, AttemptFailedError, ConnectionWasDeadError
from carpool.upstream.poison import KnownPoison
from carpool.upstream.pool import Member, Pool
from carpool.upstream.retry import RetryBudget, pause_before

logger = logging.getLogger("carpool.upstream")

# Dead connections that a batch may meet one after the other before they count as a failure of the endpoint.
DEAD_IN_A_ROW_MAX = 3
# A timer of the event loop may fire so much before its time.
TIMER_EARLY_S = 0.01

BatchEnded = Callable[[float], None]
Result = TypeVar("Result")


class Failure(NamedTuple):
    """Why a call brought no outputs, and what it means."""

    refusal: Refusal
    error: CarpoolError
    # Who said so; None if nobody was reached.
    member: Member | None = None
    # How many were in the call.
    size: int = 0
    # The refusal blames the input, not the endpoint.
    is_certain: bool = False
    # The connection was dead. The slot is still held.
    dead: ConnectionWasDeadError | None = None


class UpstreamDispatcher:
    """Sends the batches of one model."""

    def __init__(
        self,
        pool: Pool,
        codec: Codec,
        outcomes: Outcomes,
        *,
        timeout_s: float,
        attempts: int,
        backoff_s: float,
        budget: RetryBudget | None = None,
        dead_letters: DeadLetters | None = None,
        when_limit_is_learned: Callable[[int], None] = lambda limit: None,
        clock: Clock = monotonic,
        random_share: Callable[[], float] = random.random,
    ) -> None:
        self._pool = pool
        self._codec = codec
        self._outcomes = outcomes
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._backoff_s = backoff_s
        self._budget = budget or RetryBudget()
        self._dead_letters = dead_letters
        self._when_limit_is_learned = when_limit_is_learned
        self._clock = clock
        self._random_share = random_share
        self._known_poison = KnownPoison()
        self._call_ids = CallIds(token_hex(4))
        # The most inputs that the API says it takes at once.
        self._batch_max: float = inf
        # The event loop holds its tasks only weakly.
        self._running: set[asyncio.Task[None]] = set()
        # For metrics: seconds of the calls that were answered, calls by result.
        self.call_seconds = Histogram(SECONDS_BOUNDS)
        self.calls: dict[str, int] = {"ok": 0, "failed": 0, "refused": 0, "protocol-fault": 0}
        self.poisoned = 0

    def __repr__(self) -> str:
        return f"<UpstreamDispatcher running={len(self._running)}>"

    @property
    def running(self) -> int:
        """Batches under way."""
        return len(self._running)

    def dispatch(self, batch: list[Request], ended: BatchEnded) -> None:
        """Take a free slot (there is one) and make the call in the background."""
        task = asyncio.get_running_loop().create_task(self._deliver(batch, self._pool.take(), ended))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def change_timeout(self, timeout_s: float) -> None:
        """Let attempts from now on take at most this long."""
        self._timeout_s = timeout_s

    async def finish(self, timeout_s: float) -> None:
        """Wait for the batches under way, and those that start meanwhile; past the timeout they are given up."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + timeout_s
        while self._running:
            left_s = give_up_at - loop.time()
            _, late = await asyncio.wait(self._running, timeout=max(left_s, 0.0))
            if left_s <= 0.0:
                for task in late:
                    task.cancel()

    async def _deliver(self, batch: list[Request], member: Member, ended: BatchEnded) -> None:
        """Every member of the batch has an outcome when this returns, whatever happens inside."""
        failure: CarpoolError = InternalError("the gateway failed on this batch")
        try:
            self._budget.batch_sent()
            alone = self._known_poison.among(batch, self._clock()) if len(batch) > 1 and self._known_poison else []
            if alone:
                async with asyncio.TaskGroup() as group:
                    for request in alone:
                        group.create_task(self._resolve([request], None, ended))
                    # Here and not in a task: one that is cancelled before it begins could not give back the slot.
                    await self._resolve([request for request in batch if request not in alone], member, ended)
            else:
                await self._resolve(batch, member, ended)
            failure = DeadlineExceeded("no result in time")  # for those who were dropped because it had passed
        except asyncio.CancelledError:  # by `finish`: tasks are left to the next process
            failure = Draining("this gateway shut down before the result came; send the request again")
            raise
        except Exception:
            logger.exception("a batch failed inside Carpool")
        finally:
            for request in batch:
                if request.phase != DONE:
                    self._outcomes.settle(request, failure)

    async def _resolve(self, batch: list[Request], member: Member | None, ended: BatchEnded) -> None:
        """Send a batch, and do what its answer asks for."""
        failure = await self._send_with_retries(batch, member, ended)
        if failure is None:
            return
        live = self._live(batch)
        if failure.refusal.kind == "split" and failure.size > 1:
            await self._split(live, failure, ended)
        elif failure.refusal.kind == "bisect" and failure.size > 1:
            await self._isolate(live, failure, ended)
        elif failure.refusal.kind == "bisect":
            await self._ask_elsewhere(live, failure, ended)
        else:
            self._settle_all(live, failure.error)

    async def _split(self, batch: list[Request], failure: Failure, ended: BatchEnded) -> None:
        """Send a batch that was too large in parts."""
        size = failure.refusal.batch_max or failure.size
        if size >= failure.size:
            size = (failure.size + 1) // 2
        parts = [batch[start : start + size] for start in range(0, len(batch), size)]
        await do_all(self._resolve(part, None, ended) for part in parts)

    async def _ask_elsewhere(self, lone: list[Request], failure: Failure, ended: BatchEnded) -> None:
        """A request that was alone was refused: where that may be the endpoint's fault, ask another one."""
        is_final = self._is_sure(failure) or len(self._pool.members) == 1 or not lone
        if is_final or not self._budget.take(self._clock()):
            self._judge(lone, [failure] * len(lone), failure.error)
            return
        second = await self._send_with_retries(lone, None, ended, avoid=failure.member)
        if second is not None and second.refusal.kind == "bisect":
            if not self._is_sure(second):
                self._blame({failure.member})
            self._judge(lone, [second] * len(lone), failure.error)
        else:
            self._blame({failure.member})
            self._settle_all(self._live(lone), failure.error)

    async def _isolate(self, batch: list[Request], failure: Failure, ended: BatchEnded) -> None:
        """Find the inputs that the API refuses; everybody else gets an output.

        The endpoint that refused the batch is avoided if there is another: it may be the endpoint that is sick.
        """
        search = Bisection(len(batch))
        # Why each member was refused last.
        last: dict[int, Failure] = {}
        while level := search.take_level():
            results = await do_all(
                self._send_with_retries(batch[group.first : group.end], None, ended, avoid=failure.member)
                for group in level
            )
            for group, result in zip(level, results, strict=True):
                self._tell(search, batch, group, result, last)
        if search.any_answered:
            await self._ask_again(batch, search, last, ended)
        found = [index for index in search.refused_alone if search.any_answered or last[index].is_certain]
        self._judge([batch[index] for index in found], [last[index] for index in found], failure.error)
        left = self._live(batch)
        everybody_answered = len(batch) == failure.size and all(
            request.phase == DONE and request.result_code == "ok" for request in batch
        )
        if left or everybody_answered:
            # It failed everything, or a whole whose parts are good. If nothing at all was answered, so did the others.
            others = set() if search.any_answered else {each.member for each in last.values() if not each.is_certain}
            self._blame({failure.member} | others)
        self._settle_all(left, failure.error)

    async def _ask_again(
        self, batch: list[Request], search: Bisection, last: dict[int, Failure], ended: BatchEnded
    ) -> None:
        """Ask an endpoint that is well about those whose refusal says nothing, since theirs may be sick."""
        unsure = [index for index in search.refused_alone if not self._is_sure(last[index])]
        results = await do_all(
            self._send_with_retries([batch[index]], None, ended, avoid=last[index].member) for index in unsure
        )
        sick: set[Member | None] = set()
        for index, result in zip(unsure, results, strict=True):
            if result is None:
                sick.add(last[index].member)
            elif result.refusal.kind == "bisect":
                last[index] = result
            else:
                self._settle_all([batch[index]], result.error)
        self._blame(sick)

    def _is_sure(self, failure: Failure) -> bool:
        """Whether the refusal of a request that was alone in its call shows that it is poison."""
        return failure.is_certain or (failure.member is not None and self._pool.is_well(failure.member))

    def _tell(
        self, search: Bisection, batch: list[Request], group: Group, result: Failure | None, last: dict[int, Failure]
    ) -> None:
        """Tell the search what became of a group."""
        if result is None:
            search.answered(group)
        elif result.refusal.kind == "bisect" or (result.refusal.kind == "split" and result.size > 1):
            for index in range(group.first, group.end):
                last[index] = result
            search.refused(group)
        else:
            self._settle_all(batch[group.first : group.end], result.error)

    def _judge(self, refused: list[Request], failures: list[Failure], error: CarpoolError) -> None:
        """Requests were refused that were alone in their calls: are they poison, or their endpoints sick?"""
        sick: set[Member | None] = set()
        for request, failure in zip(refused, failures, strict=True):
            if self._is_sure(failure):
                self._settle_poison(request, failure)
            elif request.phase != DONE:
                sick.add(failure.member)
                self._settle_all([request], error)
        self._blame(sick)

    def _blame(self, sick: set[Member | None]) -> None:
        """Count one failure for each endpoint, however many of its refusals were wrong."""
        for member in sick:
            if member is not None:
                self._pool.went_badly(member)

    def _settle_poison(self, request: Request, failure: Failure) -> None:
        """The model refuses this input: tell its client, keep it for a person, and send it alone from now on."""
        if request.phase == DONE:
            return
        said = f": {failure.refusal.message}" if failure.refusal.message else ""
        error = InputRefused(f"the model refused this input{said}")
        self.poisoned += 1
        self._known_poison.add(request, self._clock())
        if self._dead_letters is not None and not request.is_task:  # a task becomes one by its outcome
            self._dead_letters.bury(request, error, request.sends)
        self._outcomes.settle(request, error)

    def _settle_all(self, batch: list[Request], error: CarpoolError) -> None:
        for request in batch:
            if request.phase != DONE:
                self._outcomes.settle(request, error)

    def _live(self, batch: list[Request]) -> list[Request]:
        now = self._clock()
        return [request for request in batch if request.phase != DONE and request.deadline > now]

    async def _send_with_retries(
        self, batch: list[Request], member: Member | None, ended: BatchEnded, avoid: Member | None = None
    ) -> Failure | None:
        """Call until an endpoint answers for the inputs; None if it answered, and the members were settled.

        `member`: the slot for the first attempt; None to take one when it is free, not of `avoid` if there is another.
        """
        failure, failed = out_of_time(), avoid
        attempt = dead_in_a_row = 0
        while attempt < self._attempts:
            attempt += 1
            if member is None:
                if attempt > 1:
                    pause_s = pause_before(attempt, self._backoff_s, self._random_share())
                    if pause_s >= self._time_left(batch) or not self._budget.take(self._clock()):
                        return failure
                    await asyncio.sleep(pause_s)
                # What a step of a bisection shows of one request is worth something only if the endpoint is well.
                known_well = avoid is not None and len(batch) == 1
                time_left_s = max(0.0, self._time_left(batch))
                member = await self._pool.take_for_retry(failed, time_left_s, known_well=known_well)
                if member is None:
                    return failure
            members = self._live(batch)
            if not 0 < len(members) <= self._batch_max:
                self._pool.give_back(member)
                self._pool.says_nothing(member)
                return self._too_many(len(members)) if members else out_of_time()
            latest = max(request.deadline for request in members)
            limit_s = latest - self._clock()
            outcome = await self._call(members, member, min(self._timeout_s, limit_s), ended)
            if outcome is None:
                return None
            was_received = outcome.dead is None or not outcome.dead.closed_before_sent
            for request in members:
                request.sends += was_received
            if outcome.dead is not None:
                dead_in_a_row += 1
                if self._may_send_again(outcome.dead, attempt, dead_in_a_row):
                    attempt -= not was_received
                    continue
                self._give_up_dead(member, dead_in_a_row)
            dead_in_a_row = 0
            failure, failed, member = outcome, member, None
            if failure.refusal.kind != "elsewhere":
                return failure
            if limit_s <= self._timeout_s and self._clock() > latest - TIMER_EARLY_S:
                return out_of_time()  # it was their own deadline that ended the call
            logger.warning(
                "attempt %d of %d failed: %s",
                attempt,
                self._attempts,
                failure.error.detail,
                extra={"fields": {"endpoint": failed.name, "batch_size": len(members)}},
            )
        return failure

    def _may_send_again(self, dead: ConnectionWasDeadError, attempt: int, dead_in_a_row: int) -> bool:
        """Whether a call whose connection was dead is sent again at once; pays for it."""
        if dead_in_a_row > DEAD_IN_A_ROW_MAX:
            return False
        return dead.closed_before_sent or (attempt < self._attempts and self._budget.take(self._clock()))

    def _give_up_dead(self, member: Member, dead_in_a_row: int) -> None:
        """Give back the slot that was held; more than one dead connection in a row is the endpoint's fault."""
        if dead_in_a_row > 1:
            self._pool.went_badly(member)
        else:
            self._pool.says_nothing(member)
        self._pool.give_back(member)

    async def _call(
        self, members: list[Request], member: Member, timeout_s: float, ended: BatchEnded
    ) -> Failure | None:
        """One call: settles the members and returns None, or returns what went wrong.

        Gives the slot back, unless the connection was dead (`Failure.dead`).
        """
        started = self._clock()
        call_id = self._call_ids.next()
        is_slot_held = False
        try:
            answer = await member.endpoint.post(self._codec.encode(members, call_id), timeout_s)
        except AttemptFailedError as failure:
            self.calls["failed"] += 1
            error = UpstreamFailed(f"the inference API could not be used: {failure}")
            dead = failure if isinstance(failure, ConnectionWasDeadError) else None
            is_slot_held = dead is not None
            if dead is None:
                self._pool.went_badly(member)
            return Failure(Refusal("elsewhere"), error, member, len(members), dead=dead)
        except BaseException:
            self._pool.says_nothing(member)
            raise
        finally:
            if not is_slot_held:
                self._pool.give_back(member)
        seconds = self._clock() - started
        if answer.load is not None:
            member.load.report(answer.load)
        try:
            if not 200 <= answer.status < 300:
                return self._refused(answer, len(members), member, call_id)
            parts = self._codec.decode(answer, members, call_id)
        except ProtocolFaultError as fault:
            self.calls["protocol-fault"] += 1
            self._pool.went_badly(member)
            logger.error("protocol fault: %s", fault, extra={"fields": {"endpoint": member.name}})
            broken = UpstreamProtocolFault(f"the inference API broke its protocol: {fault}")
            return Failure(Refusal("fault"), broken, member, len(members))
        except Exception:  # a defect of the codec, which must not leave a probe without a verdict
            self._pool.says_nothing(member)
            raise
        ended(seconds)
        self.call_seconds.observe(seconds)
        member.load.answered(len(members), seconds, started)
        self.calls["ok"] += 1
        self._pool.went_well(member)
        facts = CallFacts(len(members), seconds, parts[0].model_version)
        self._outcomes.settle_batch(members, [Output(part.value, facts, part.tokens_used) for part in parts])
        return None

    def _refused(self, answer: Answer, size: int, member: Member, call_id: str) -> Failure:
        """An answer with an error status. What the body says goes to a client that was alone in its call, at most."""
        self.calls["refused"] += 1
        refusal = self._codec.classify(answer, size, call_id)
        if refusal.batch_max is not None and refusal.batch_max < self._batch_max:
            self._batch_max = max(1, refusal.batch_max)
            self._when_limit_is_learned(self._batch_max)
        says = f"the inference API answered with status {answer.status}"
        if refusal.kind in ("elsewhere", "give-up"):
            if answer.status == 429:
                self._pool.says_nothing(member)  # busy, not broken
                member.load.refused()
            else:
                self._pool.went_badly(member)
            error = UpstreamFailed(says) if refusal.kind == "elsewhere" else UpstreamRefused(says)
            return Failure(refusal, error, member, size)
        self._pool.says_nothing(member)
        return Failure(refusal, UpstreamFailed(says), member, size, is_certain=answer.status in (400, 422))

    def _too_many(self, size: int) -> Failure:
        """The limit was learned after the batch was formed."""
        error = UpstreamFailed("the inference API does not take so many inputs")
        return Failure(Refusal("split", batch_max=int(self._batch_max)), error, size=size)

    def _time_left(self, members: list[Request]) -> float:
        """Seconds until nobody of them waits any more."""
        latest = max((request.deadline for request in members if request.phase != DONE), default=0.0)
        return latest - self._clock()


def out_of_time() -> Failure:
    """No slot was free in time, or nobody was left who waits."""
    return Failure(Refusal("elsewhere"), DeadlineExceeded("no result in time"))


async def do_all(steps: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Let all of them come to their end at the same time, also when one fails; then raise what it raised."""
    results = await asyncio.gather(*steps, return_exceptions=True)
    done: list[Result] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        done.append(result)
    return done
