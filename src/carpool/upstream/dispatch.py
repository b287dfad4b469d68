"""One batch through the fixed API: an outcome for every member, or its place in the lane again. Never raises.

Attempts at an endpoint are made by attempts.py; what was refused is looked into by isolation.py. Here they meet.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Iterable

from carpool.core.clock import Clock, monotonic
from carpool.core.dead_letter import is_dead_letter
from carpool.core.defaults import do_nothing
from carpool.core.errors import CarpoolError, DeadlineExceeded, Draining, InputRefused, InternalError
from carpool.core.events import Events
from carpool.core.histograms import Histogram
from carpool.core.ports import CallTraces, DeadLetters, LaneQueue, OtherBatchers, Returns
from carpool.core.request import DONE, Request
from carpool.upstream.attempts import Attempts, BatchEnded, Failure, names_of
from carpool.upstream.codecs import Codec
from carpool.upstream.first_contact import PatientTasks, never_worked
from carpool.upstream.isolation import Isolation
from carpool.upstream.poison import KnownPoison
from carpool.upstream.pool import EndpointState, Pool
from carpool.upstream.quarantine import Quarantine
from carpool.upstream.refusals import RefusedShares
from carpool.upstream.retry import RetryBudget
from carpool.upstream.same import Merged

logger = logging.getLogger("carpool.upstream")

# The result of a batch of which all inputs were known to be at fault.
NOT_SENT = "not-sent"
# So many retries may be saved up with few slots.
RETRIES_KEPT_MIN = 20.0


class UpstreamDispatcher:
    """Sends the batches of one model."""

    def __init__(
        self,
        pool: Pool,
        codec: Codec,
        broker: Returns,
        *,
        timeout_s: float,
        attempts: int,
        backoff_s: float,
        model: str = "",
        budget: RetryBudget | None = None,
        dead_letters: DeadLetters | None = None,
        quarantined: Quarantine | None = None,
        max_batch: int = 64,
        others_waiting: Callable[[], int],
        all_waiting: Callable[[], int],
        when_limit_is_learned: Callable[[EndpointState], None] = do_nothing,
        merge: Callable[[list[Request]], Merged] | None = None,
        others: OtherBatchers | None = None,
        events: Events | None = None,
        traces: CallTraces | None = None,
        clock: Clock = monotonic,
        random_share: Callable[[], float] = random.random,
    ) -> None:
        self._pool = pool
        self._broker = broker
        self._model = model
        # An endpoint that dies takes its calls with it: so much is saved up that all that run can be made again.
        self._budget = budget or RetryBudget(kept_max=max(RETRIES_KEPT_MIN, 2.0 * pool.total()), now=clock())
        self._dead_letters = dead_letters
        self._events = events or Events()
        self._when_limit_is_learned = when_limit_is_learned
        self._clock = clock
        self.quarantined = quarantined if quarantined is not None else Quarantine()
        self._shares = RefusedShares()
        self._known_poison = KnownPoison()
        self._patient_tasks = PatientTasks(broker, clock)
        self.attempts = Attempts(
            pool,
            codec,
            broker,
            timeout_s=timeout_s,
            attempts=attempts,
            backoff_s=backoff_s,
            budget=self._budget,
            when_limit_is_learned=self._limit_is_learned,
            when_answered=self._answered,
            blame=self._blame,
            found_sick=self._found_sick,
            merge=merge,
            others=others,
            events=events,
            traces=traces,
            clock=clock,
            random_share=random_share,
        )
        self.isolation = Isolation(
            pool,
            self.attempts,
            broker,
            model=model,
            shares=self._shares,
            quarantined=self.quarantined,
            known_poison=self._known_poison,
            give_up=self._give_up,
            max_batch=max_batch,
            when_limit_is_learned=self._limit_is_learned,
            others_waiting=others_waiting,
            all_waiting=all_waiting,
            clock=clock,
        )
        # The event loop holds its tasks only weakly.
        self._running: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<UpstreamDispatcher running={self.running}>"

    @property
    def running(self) -> int:
        """Batches and searches under way."""
        return len(self._running) + self.isolation.running

    @property
    def poisoned(self) -> int:
        """Inputs that were found to be at fault."""
        return self.isolation.poisoned

    @property
    def call_seconds(self) -> Histogram:
        """Seconds of the calls that were answered."""
        return self.attempts.call_seconds

    @property
    def calls(self) -> dict[str, int]:
        """Calls by result."""
        return self.attempts.calls

    def batch_max(self, lane: LaneQueue, max_batch: int) -> int:
        """The most requests of a lane that should be in a batch now: fewer where bad inputs are common."""
        if self._pool.has_batch_limits:
            max_batch = self._pool.batch_max(max_batch)
        return self._shares.best_size(lane.key, max_batch) if self._shares else max_batch

    def dispatch(self, batch: list[Request], ended: BatchEnded) -> None:
        """Take a free slot (there is one) and make the call in the background."""
        is_quarantined = batch[0].is_quarantined
        member = self._pool.take(is_quarantined)
        # What quarantined owners use while others wait is paid from the share of searches.
        if is_quarantined and self.isolation.others_wait():
            deliver = self._deliver_quarantined(batch, member, ended, self.attempts.service_s)
            self._pool.isolation.pay(self.attempts.service_s)
            self.isolation.apart_sent()
        else:
            deliver = self._deliver(batch, member, ended)
            self.isolation.batch_sent(is_quarantined)
        task = asyncio.get_running_loop().create_task(deliver)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def change_timeout(self, timeout_s: float) -> None:
        """Let attempts from now on take at most this long."""
        self.attempts.timeout_s = timeout_s

    async def finish(self, timeout_s: float) -> None:
        """Wait for the batches under way, and those that start meanwhile; past the timeout they are given up."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + timeout_s
        self._patient_tasks.leave()
        while self._running or self.isolation.running:
            left_s = give_up_at - loop.time()
            if self._running:
                _, late = await asyncio.wait(self._running, timeout=max(left_s, 0.0))
                if left_s <= 0.0:
                    for task in late:
                        task.cancel()
            else:
                await self.isolation.finish(max(left_s, 0.0))
        self._patient_tasks.leave()  # those that failed meanwhile

    async def _deliver_quarantined(
        self, batch: list[Request], member: EndpointState, ended: BatchEnded, paid_s: float
    ) -> None:
        started = self._clock()
        await self._deliver(batch, member, ended)
        self._pool.isolation.pay(self._clock() - started - paid_s)

    async def _deliver(self, batch: list[Request], member: EndpointState, ended: BatchEnded) -> None:
        """When this returns, each member of the batch has an outcome, or is with isolation.py or the patient tasks."""
        failure: CarpoolError = InternalError("the gateway failed on this batch")
        all_of_it, result_code = batch, failure.code
        try:
            self._budget.batch_sent()
            if len(batch) > 1 and self._known_poison:
                known = self._known_poison.among(batch, self._clock())
                if known:
                    self.isolation.add_known(known)
                    batch = [request for request in batch if request not in known]
            if not batch:
                result_code = NOT_SENT
                self._pool.give_back(member)
                self._pool.says_nothing(member)
                return
            result = await self.attempts.send(batch, member, ended)
            result_code = "ok" if isinstance(result, EndpointState) else result.error.code
            failure = DeadlineExceeded("no result in time")  # for members that were dropped because it had passed
            refused = result if isinstance(result, Failure) and result.refusal.kind == "bisect" else None
            if not batch[0].is_quarantined and (refused is not None or self._pool.isolation.refused_share):
                self.isolation.batch_ended(batch, refused)
            if isinstance(result, EndpointState):
                return
            if result.refusal.kind in ("split", "bisect"):
                self.isolation.add(batch, result)
                batch = [request for request in batch if request.deadline <= self._clock()]
            else:
                for request in self.attempts.live(batch):
                    self._give_up(request, result.error, result.started)
                batch = [request for request in batch if request not in self._patient_tasks]
        except asyncio.CancelledError:  # by `finish`: tasks are left to the next process
            failure = Draining("this gateway shut down before the result came; send the request again")
            raise
        except Exception:
            logger.exception("a batch failed inside Carpool", extra={"fields": names_of(all_of_it)})
        finally:
            for request in batch:
                if request.phase != DONE:
                    self._broker.settle(request, failure)
            self._batch_ended(all_of_it, result_code)

    def _batch_ended(self, batch: list[Request], result_code: str) -> None:
        named = batch[0].batch
        if named is not None:
            named.ended, named.result = self._clock(), result_code
            if self._events.subscribers:
                self._events.ended(named, batch)

    def _limit_is_learned(self, member: EndpointState) -> None:
        self._pool.has_batch_limits = True
        # That explains what it refused before.
        self.quarantined.forgive_all(self._model)
        self._when_limit_is_learned(member)

    def _blame(self, members: Iterable[EndpointState], owners: Collection[str]) -> None:
        self.isolation.blame(members, owners)

    def _found_sick(self, member: EndpointState) -> None:
        self.isolation.found_sick(member)

    def _answered(self, members: list[Request]) -> None:
        """Learn from a call that was answered; costs nothing while nothing was ever refused."""
        if self._shares:
            self._shares.answered(members[0].lane_key, len(members))
        if self.quarantined.is_tracking:
            now = self._clock()
            for request in members:
                self.quarantined.passed(self._model, request.owner, now)

    def _give_up(self, request: Request, error: CarpoolError, began: float) -> None:
        """Settle a request with an error, and keep it as a dead letter if that is wanted. One that another batcher may
        serve goes back to the queue: nothing has shown that its input is at fault. Nor has anything where its call
        began before any was answered: then a task is tried again, and any other request is settled, not kept.
        """
        if request.phase == DONE:
            return
        is_own = isinstance(error, InputRefused | DeadlineExceeded)
        if not is_own and self.attempts.goes_back(request):
            return
        if began < self._pool.proven_at and not isinstance(error, DeadlineExceeded):
            if request.is_task:
                self._patient_tasks.keep(request, error)
            else:
                self._broker.settle(request, never_worked(error))
            return
        if self._dead_letters is not None and not request.is_task and is_dead_letter(error):
            self._dead_letters.bury(request, error, request.sends)  # a task becomes one by its outcome
        self._broker.settle(request, error)
