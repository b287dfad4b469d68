"""One batch through the fixed API: attempts, and an outcome for every member. Never raises.

A slot is given back the moment the answer has been read, before it is decoded, so that the GPU gets its next batch
while this one is handed out.
"""

import asyncio
import logging
import random
from collections.abc import Callable

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
from carpool.core.ports import Outcomes
from carpool.core.request import DONE, Request
from carpool.core.tally import SECONDS_BOUNDS, Histogram
from carpool.upstream.codecs import Codec, ProtocolFaultError
from carpool.upstream.endpoint import Answer, AttemptFailedError, Endpoint
from carpool.upstream.pool import Pool
from carpool.upstream.retry import TRY_ELSEWHERE, pause_before

logger = logging.getLogger("carpool.upstream")

BatchEnded = Callable[[float], None]


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
        clock: Clock = monotonic,
        random_share: Callable[[], float] = random.random,
    ) -> None:
        self._pool = pool
        self._codec = codec
        self._outcomes = outcomes
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._backoff_s = backoff_s
        self._clock = clock
        self._random_share = random_share
        # The event loop holds its tasks only weakly.
        self._running: set[asyncio.Task[None]] = set()
        # For metrics: seconds of the calls that were answered, attempts by result.
        self.call_seconds = Histogram(SECONDS_BOUNDS)
        self.calls: dict[str, int] = {"ok": 0, "failed": 0, "refused": 0, "protocol-fault": 0}

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

    async def _deliver(self, batch: list[Request], endpoint: Endpoint, ended: BatchEnded) -> None:
        """Every member has an outcome when this returns, whatever happens inside."""
        failure: CarpoolError = InternalError("the gateway failed on this batch")
        try:
            failure = await self._try_attempts(batch, endpoint, ended)
        except asyncio.CancelledError:  # by `finish`: tasks are left to the next process
            failure = Draining("this gateway shut down before the result came; send the request again")
            raise
        except Exception:
            logger.exception("a batch failed inside Carpool")
        finally:
            for request in batch:
                if request.phase != DONE:
                    self._outcomes.settle(request, failure)

    async def _try_attempts(self, batch: list[Request], endpoint: Endpoint, ended: BatchEnded) -> CarpoolError:
        """Call until it works; returns the error for the members that still have no outcome."""
        late = DeadlineExceeded("no result in time")
        failure: CarpoolError = late
        for attempt in range(1, self._attempts + 1):
            if attempt > 1:
                # The slot of the failed attempt has been given back; pause, then take another.
                pause_s = pause_before(attempt, self._backoff_s, self._random_share())
                if pause_s >= self._time_left(batch):
                    return failure
                await asyncio.sleep(pause_s)
                replacement = await self._pool.take_for_retry(endpoint, self._time_left(batch))
                if replacement is None:
                    return failure
                endpoint = replacement
            now = self._clock()
            members = [request for request in batch if request.phase != DONE and request.deadline > now]
            if not members:
                self._pool.give_back(endpoint)
                return failure
            timeout_s = min(self._timeout_s, max(request.deadline for request in members) - now)
            outcome = await self._attempt(members, endpoint, timeout_s, ended)
            if outcome is None:
                return late  # for those whose deadline passed before this attempt
            failure = outcome
            for request in members:
                request.sends = attempt
            if not failure.retryable:
                return failure
            logger.warning(
                "attempt %d of %d failed: %s",
                attempt,
                self._attempts,
                failure.detail,
                extra={"fields": {"endpoint": endpoint.name, "batch_size": len(members)}},
            )
        return failure

    async def _attempt(
        self, members: list[Request], endpoint: Endpoint, timeout_s: float, ended: BatchEnded
    ) -> CarpoolError | None:
        """One call: settles the members and returns None, or returns what went wrong."""
        started = self._clock()
        try:
            first = members[0]
            call = self._codec.encode(first.model, first.parameters, [request.input for request in members])
            answer = await endpoint.post(call, timeout_s)
        except AttemptFailedError as failure:
            self.calls["failed"] += 1
            return UpstreamFailed(f"the inference API could not be used: {failure}")
        finally:
            self._pool.give_back(endpoint)
        seconds = self._clock() - started
        ended(seconds)
        self.call_seconds.observe(seconds)
        if not 200 <= answer.status < 300:
            return self._refused(answer, len(members))
        try:
            outputs = self._codec.decode(answer.body, len(members))
        except ProtocolFaultError as fault:
            self.calls["protocol-fault"] += 1
            logger.error("protocol fault: %s", fault, extra={"fields": {"endpoint": endpoint.name}})
            return UpstreamProtocolFault(f"the inference API broke its protocol: {fault}")
        self.calls["ok"] += 1
        facts = CallFacts(len(members), seconds)
        self._outcomes.settle_batch(members, [Output(output, facts) for output in outputs])
        return None

    def _refused(self, answer: Answer, size: int) -> CarpoolError:
        """An answer with an error status. What the body says is not passed on: it may quote another's input."""
        self.calls["refused"] += 1
        if size == 1 and answer.status in (400, 422):
            return InputRefused("the inference API refused this input; change it before sending it again")
        kind = UpstreamFailed if answer.status in TRY_ELSEWHERE else UpstreamRefused
        return kind(f"the inference API answered with status {answer.status}")

    def _time_left(self, members: list[Request]) -> float:
        """Seconds until nobody of them waits any more."""
        latest = max((request.deadline for request in members if request.phase != DONE), default=0.0)
        return latest - self._clock()
