"""One batch through the fixed API: an outcome for every member, or its place in the lane again. Never raises.

What happens is decided by scheduler.py; here it is done.

1. A slot is given back the moment the answer has been read, before it is decoded, so that the GPU gets its next batch
   while this one is handed out.
2. What an error means is the codec's word (`Refusal`).
3. What is done may cause the next event (a client that is answered sends its next request): events wait until all
   actions of the one before are done.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from secrets import token_hex

from msgspec.structs import replace

from carpool.core.clock import STOOD_STILL_S, Clock, monotonic
from carpool.core.dead_letter import is_dead_letter
from carpool.core.defaults import do_nothing
from carpool.core.errors import (
    CarpoolError,
    Draining,
    GivenBack,
    InternalError,
    UpstreamFailed,
    UpstreamProtocolFault,
    UpstreamRefused,
    without_frames,
)
from carpool.core.events import Events
from carpool.core.histograms import SECONDS_BOUNDS, Histogram
from carpool.core.outcome import CallFacts, Output
from carpool.core.ports import CallTraces, DeadLetters, LaneQueue, OtherBatchers, Returns
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
    Trouble,
    field_names,
    look_at_after,
    look_at_answer,
    status_told,
)
from carpool.upstream.patient_tasks import PatientTasks
from carpool.upstream.pool import EndpointState, Pool
from carpool.upstream.quarantine import Quarantine
from carpool.upstream.retry import RetryBudget
from carpool.upstream.same import Merged, fill_up, still_there
from carpool.upstream.scheduler import (
    LOOK_S,
    Action,
    Answered,
    BatchOver,
    Broke,
    Call,
    Deliver,
    Event,
    Failed,
    Failure,
    Formed,
    GiveBack,
    LimitLearned,
    NotMade,
    PutBack,
    Rest,
    Scheduler,
    Send,
    Settle,
    Tell,
    Tick,
)

logger = logging.getLogger("carpool.upstream")

BatchEnded = Callable[[float], None]


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
        others_waiting: Callable[[], int],
        all_waiting: Callable[[], int],
        model: str = "",
        budget: RetryBudget | None = None,
        dead_letters: DeadLetters | None = None,
        quarantined: Quarantine | None = None,
        max_batch: int = 64,
        when_limit_is_learned: Callable[[EndpointState], None] = do_nothing,
        # Finds the inputs of a call that are the same; None where each is sent for itself.
        merge: Callable[[list[Request]], Merged] | None = None,
        # How many inputs each call has, where the API takes no fewer.
        fill_to: int = 0,
        others: OtherBatchers | None = None,
        events: Events | None = None,
        # None where calls are not traced.
        traces: CallTraces | None = None,
        clock: Clock = monotonic,
        random_share: Callable[[], float] = random.random,
    ) -> None:
        self._pool = pool
        self._codec = codec
        self._broker = broker
        self._dead_letters = dead_letters
        self._when_limit_is_learned = when_limit_is_learned
        self._merge = merge
        self._fill_to = fill_to
        self._events = events or Events()
        self._traces = traces
        self._clock = clock
        self.scheduler = Scheduler(
            pool,
            model=model,
            timeout_s=timeout_s,
            attempts=attempts,
            backoff_s=backoff_s,
            max_batch=max_batch,
            others_waiting=others_waiting,
            all_waiting=all_waiting,
            quarantined=quarantined if quarantined is not None else Quarantine(),
            others=others,
            clock=clock,
            budget=budget,
            random_share=random_share,
        )
        self._patient_tasks = PatientTasks(broker, clock)
        self._call_ids = CallIds(token_hex(4))
        # Rule 3.
        self._waiting: deque[Event] = deque()
        self._is_busy = False
        self._timer: asyncio.TimerHandle | None = None
        # The event loop holds its tasks only weakly.
        self._calls: set[asyncio.Task[None]] = set()
        # Set when nothing is under way any more, while `finish` waits for that.
        self._is_idle: asyncio.Event | None = None
        # For metrics: seconds of the calls that were answered, calls by result.
        self.call_seconds = Histogram(SECONDS_BOUNDS)
        self.calls: dict[str, int] = {"ok": 0, "failed": 0, "refused": 0, "protocol-fault": 0}

    def __repr__(self) -> str:
        return f"<UpstreamDispatcher running={self.running}>"

    @property
    def running(self) -> int:
        """Calls under way, and retries and searches that wait."""
        return len(self._calls) + self.scheduler.running

    def batch_max(self, lane: LaneQueue, max_batch: int) -> int:
        """The most requests of a lane that should be in a batch now: fewer where bad inputs are common."""
        return self.scheduler.batch_max(lane.key, max_batch)

    def dispatch(self, batch: list[Request], ended: BatchEnded) -> None:
        """Take a free slot (there is one) and make the call in the background."""
        self._handle(Formed(batch, self.scheduler.take(batch), ended))

    def change_timeout(self, timeout_s: float) -> None:
        """Let attempts from now on take at most this long."""
        self.scheduler.timeout_s = timeout_s

    async def finish(self, timeout_s: float) -> None:
        """Wait for the batches under way, and those that start meanwhile; past the timeout they are given up."""
        self._patient_tasks.leave()
        try:
            async with asyncio.timeout(timeout_s):
                while self.running:
                    self._is_idle = asyncio.Event()
                    await self._is_idle.wait()
        except TimeoutError:
            left = self.scheduler.give_up_all()
            calls = list(self._calls)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            for request in left:
                self._settle(request, leaving())
        self._patient_tasks.leave()  # those that failed meanwhile

    def close(self) -> None:
        """Let no more time pass."""
        if self._timer is not None:
            self._timer.cancel()

    # Events and actions.

    def _handle(self, event: Event) -> None:
        self._waiting.append(event)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._waiting:
                for action in self._decide(self._waiting.popleft()):
                    try:
                        self._perform(action)
                    except Exception:
                        logger.exception("a batch failed inside Carpool")
                        for request in requests_of(action):
                            self._settle(request, InternalError("the gateway failed on this batch"))
        finally:
            self._is_busy = False
        self._look_soon()

    def _decide(self, event: Event) -> list[Action]:
        try:
            return self.scheduler.decide(event, self._clock())
        except Exception:  # a defect, which must leave no request without an outcome
            logger.exception("a batch failed inside Carpool")
            return self.scheduler.after_defect(event, InternalError("the gateway failed on this batch"))

    def _look_soon(self) -> None:
        """Have time pass for the scheduler, while something waits for it; costs nothing while all is well."""
        if self._is_idle is not None and not self.running:
            self._is_idle.set()
        if self._timer is None and self.scheduler.is_restless:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._handle(Tick())

    def _perform(self, action: Action) -> None:
        if isinstance(action, Send):
            task = asyncio.get_running_loop().create_task(self._call(action.call))
            self._calls.add(task)
            task.add_done_callback(partial(self._call_ended, action.call))
        elif isinstance(action, Deliver):
            self._broker.settle_batch(action.members, action.outputs)
        elif isinstance(action, BatchOver):
            self._batch_over(action.batch, action.result)
        elif isinstance(action, Settle):
            request, error = action.request, action.error
            is_letter = action.may_be_letter and not request.is_task and is_dead_letter(error)  # a task: by its outcome
            if is_letter and self._dead_letters is not None and request.phase != DONE:
                self._dead_letters.bury(request, error, request.sends)
            self._settle(request, error)
        elif isinstance(action, PutBack):
            self._broker.put_back(action.requests)
        elif isinstance(action, GiveBack):
            self._settle(action.request, GivenBack("another batcher serves it", is_alone=action.is_alone))
        elif isinstance(action, Rest):
            self._patient_tasks.keep(action.request, action.error)
        elif isinstance(action, LimitLearned):
            self._when_limit_is_learned(action.member)
        elif isinstance(action, Tell):
            call_failed(action.member, action.what, action.look_at, self._clock())
        else:
            logger.warning(action.text, extra={"fields": action.fields | names_of(action.members)})

    def _settle(self, request: Request, error: CarpoolError) -> None:
        if request.phase != DONE:
            self._broker.settle(request, error)

    def _batch_over(self, batch: list[Request], result: str) -> None:
        named = batch[0].batch
        if named is not None:
            named.ended, named.result = self._clock(), result
            if self._events.subscribers:
                self._events.ended(named, batch)

    # Calls.

    def _call_ended(self, call: Call, task: "asyncio.Task[None]") -> None:
        self._calls.discard(task)
        if task.cancelled():  # before it began
            self._pool.give_back(call.member)
            self._handle(Broke(call, leaving()))
        if self._is_idle is not None and not self.running:
            self._is_idle.set()

    async def _call(self, call: Call) -> None:
        """Make a call and report what became of it."""
        waiting = [request for request in call.members if request.phase != DONE]
        if len(waiting) < len(call.members):  # some left since this was decided
            call = call._replace(members=waiting)
            if not waiting:
                self._handle(NotMade(call))
                return
        traces = self._traces
        traced = None
        if traces is not None:
            is_search = call.job.search is not None
            traced = traces.call_begins(call.members, call.member.name, call.attempt, call.began, is_search=is_search)
        try:
            event: Event = await self._post(call, traced)
        except asyncio.CancelledError:  # by `finish`: tasks are left to the next process
            event = Broke(call, leaving())
        except Exception:
            logger.exception("a batch failed inside Carpool", extra={"fields": names_of(call.members)})
            event = Broke(call, InternalError("the gateway failed on this batch"))
        if traces is not None and traced is not None:
            if isinstance(event, Failed):
                traced.error = event.failure.error.code
            elif isinstance(event, Broke):
                traced.error = "cancelled"
            traced.ended = traced.ended or self._clock()
            traces.call_ended(call.members, traced)
        if isinstance(event, Failed) and call.members[0].batch is not None:
            call.members[0].batch.failure = event.failure.error.detail
        self._handle(event)

    async def _post(self, call: Call, traced: CallTrace | None) -> Answered | Failed:
        """The call itself. The slot is given back after a 2xx answer, or when this raises (rule 1)."""
        members, member, started = call.members, call.member, call.began
        call_id = self._call_ids.next()
        is_search = call.job.search is not None
        batch = members[0].batch
        if batch is not None and not (is_search and batch.sent):  # a search comes after the batch is over
            batch.sent, batch.endpoint, batch.attempts = started, member.name, call.attempt
        if self._events.subscribers:
            self._events.sent(members, member.name, call.attempt, started)
        is_slot_held = False
        try:
            sent, places = (members, None) if self._merge is None else self._merge(members)
            if self._fill_to:
                most = min(self._fill_to, member.batch_limit.learned or self._fill_to)
                sent, places = fill_up(Merged(sent, places), most)
            message = self._codec.encode(sent, call_id)
            if traced is not None:
                message = replace(message, headers=message.headers + traced.headers)
            answer = await member.endpoint.post(message, call.timeout_s)
            is_slot_held = not 200 <= answer.status < 300
        except AttemptFailedError as failure:
            is_slot_held = True
            return self._no_answer(call, failure)
        finally:
            if not is_slot_held:
                self._pool.give_back(member)
        seconds = self._clock() - started
        if traced is not None:
            traced.status, traced.ended = answer.status, started + seconds
        if answer.load is not None:
            member.controller.report(answer.load)
        if is_slot_held:
            return self._refused(call, len(sent), answer, call_id, message.path)
        if places is not None:
            sent = still_there(Merged(sent, places), members)
        try:
            parts = self._codec.decode(answer, sent, call_id)
        except ProtocolFaultError as fault:
            return self._broken_protocol(call, fault)
        del answer, message  # what was made of it may be as large
        if member.trouble is not None:
            logger.info("%s answers now", member.name, extra={"fields": {"endpoint": member.name}})
        self.calls["ok"] += 1
        self.call_seconds.observe(seconds)
        member.latest_calls.add(seconds, started + seconds)
        call.job.ended(seconds)
        controller = member.controller
        is_crowded = controller.is_auto and self.scheduler.is_crowded()
        largest = max(request.size for request in sent)
        controller.answered(len(sent), seconds, started, largest=largest, is_crowded=is_crowded)
        member.batch_limit.answered(len(sent), started)
        facts = CallFacts(
            len(sent) if places is None else len(set(places)),
            seconds,
            parts[0].model_version,
            endpoint=member.name,
            attempts=call.attempt,
            started_s=started - members[0].taken,
            batch_id="" if batch is None else batch.id,
            # Requests that have ended meanwhile do not count: no request would be charged for their part.
            gpu_s=seconds / max(1, sum(request.phase != DONE for request in members)),
            reason="" if batch is None else batch.reason,
            search_s=searched_since(members[0], started) if is_search else 0.0,
            is_traced=batch is not None and batch.is_traced,
        )
        outputs = outputs_of(parts, facts)
        outputs = outputs if places is None else [outputs[place] for place in places]
        return Answered(call, told_of_searches(members, outputs) if self.scheduler.has_cleared else outputs)

    def _no_answer(self, call: Call, failure: AttemptFailedError) -> Failed:
        self.calls["failed"] += 1
        # Else the clients' own deadline ended the call.
        is_by_setting = isinstance(failure, NoAnswerError) and call.timeout_s == self.scheduler.timeout_s
        setting = " (`upstream.timeout_s`)" if is_by_setting else ""
        what = str(failure)
        without_frames(failure)  # which hold the call and its answer
        return Failed(
            call,
            Failure(
                Refusal("elsewhere"),
                UpstreamFailed(f"the inference API could not be used: {what}{setting}"),
                call.member,
                len(call.members),
                call.began,
                what=what,
                look_at=LOOK_AT_ADDRESS,
                is_dead=isinstance(failure, ConnectionWasDeadError),
                was_away=self._clock() > call.began + call.timeout_s + STOOD_STILL_S,
            ),
        )

    def _broken_protocol(self, call: Call, fault: ProtocolFaultError) -> Failed:
        self.calls["protocol-fault"] += 1
        fields = {"endpoint": call.member.name, **names_of(call.members)}
        logger.error("protocol fault: %s", fault, extra={"fields": fields})
        error = UpstreamProtocolFault(f"the inference API broke its protocol: {fault}")
        look_at = look_at_answer(self._codec.outputs_field)
        about = (call.member, len(call.members), call.began, 200, str(fault), look_at)
        return Failed(call, Failure(Refusal("fault"), error, *about))

    def _refused(self, call: Call, sent: int, answer: UpstreamResponse, call_id: str, path: str) -> Failed:
        """An answer with an error status. What the body says goes to a client that was alone in its call, at most."""
        self.calls["refused"] += 1
        member, members, status = call.member, call.members, answer.status
        try:
            refusal = self._codec.classify(answer, max(sent, len(members)), call_id)
        except Exception:  # a defect of the codec
            self._pool.give_back(member)
            raise
        size = len(members)
        if refusal.kind == "split" and sent > size:
            # It was filled up: no input is at fault, and parts would be as large. Maybe nothing helps.
            may_help = refusal.batch_max is not None or self._pool.has_others(member)
            refusal, size = Refusal("elsewhere" if may_help else "give-up", batch_max=refusal.batch_max), sent
        what = look_at = ""
        if not member.succeeded:
            names = field_names(answer.body, members[0].parameters) if status == 422 else ()
            what = status_told(status, member.name, path, names)
            look_at = look_at_after(status, self._codec.inputs_field)
        says = f"the inference API answered with status {status}"
        error = UpstreamRefused(says) if refusal.kind == "give-up" else UpstreamFailed(says)
        return Failed(call, Failure(refusal, error, member, size, call.began, status, what, look_at))


def call_failed(member: EndpointState, what: str, look_at: str, now: float) -> None:
    """A call to an endpoint failed: log that now and then, unless the endpoint has answered a call well before."""
    if member.succeeded:
        return
    trouble = member.trouble = member.trouble or Trouble()
    if trouble.failed(what, look_at, now):
        says = "%s %s; `carpool doctor` finds out more"
        logger.warning(says, member.name, trouble.text, extra={"fields": {"endpoint": member.name}})


def leaving() -> Draining:
    """The error for requests that this process cannot wait for any more."""
    return Draining("this gateway shut down before the result came; send the request again")


def requests_of(action: Action) -> Sequence[Request]:
    """The requests that an action would have given an outcome, or another place."""
    if isinstance(action, Deliver):
        return action.members
    if isinstance(action, PutBack):
        return action.requests
    return [action.request] if isinstance(action, Settle | GiveBack | Rest) else []


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
    batch = members[0].batch if members else None
    if batch is None:
        return {}
    traced = batch.trace
    return {"batch": batch.id} if traced is None else {"batch": batch.id, "trace_id": traced.trace.trace_id.hex()}
