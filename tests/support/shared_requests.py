"""A coalescer over a real broker, with a test in place of the face, of admission, of the GPU, and of those far away."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from carpool.broker.coalescer import Coalescer
from carpool.broker.memory import MemoryBroker
from carpool.broker.result_cache import ResultCache, digest_key, digest_key_of_owner, exact_key, exact_key_of_owner
from carpool.core.errors import CarpoolError
from carpool.core.outcome import CallFacts, Output
from carpool.core.ports import NO_OPTIONS, RequestOptions
from carpool.core.request import RUNNING, Request
from carpool.core.trace import Trace
from carpool.testing import Witness, make_output, make_request

TARGETS_S = (0.05, 0.15, 0.5)


class FarAway:
    """Results that are kept elsewhere; a test says when an answer comes."""

    def __init__(self) -> None:
        self.kept: dict[bytes, Output] = {}
        self.asked: list[tuple[bytes, Callable[[Output | None, float], None]]] = []

    def look(self, key: bytes, found: Callable[[Output | None, float], None]) -> None:
        self.asked.append((key, found))

    def keep(self, key: bytes, output: Output) -> bool:
        self.kept[key] = Output(output.value, CallFacts(0, 0.0, cached=True))
        return True

    def answer(self, index: int = 0, *, is_broken: bool = False) -> None:
        key, found = self.asked.pop(index)
        found(None if is_broken else self.kept.get(key), 0.0)


class CoalescerStand:
    """Where requests come in. Time stands still until a test moves it."""

    def __init__(
        self,
        *,
        far: FarAway | None = None,
        scope: str = "all",
        waiting_max: int = 1000,
        bytes_max: int = 10**6,
        strict_order: bool = False,
        quarantined: set[tuple[str, str]] | None = None,
        ttl_s: float = 300.0,
    ) -> None:
        self.now = 100.0
        self.far = far
        # Over Redis it is the batchers that set them apart.
        self.quarantined = set() if quarantined is None else quarantined
        self.broker = MemoryBroker(
            waiting_max=10_000,
            bytes_max=10**7,
            lanes_max=9,
            tiers=3,
            strict_order=strict_order,
            quarantined=self.quarantined,
            clock=self.clock,
        )
        self.broker.when_work_arrives("m", lambda lane: None)
        self.results = ResultCache(bytes_max=10**8, ttl_s=ttl_s)
        self.refusal: CarpoolError | None = None
        self.admitted = 0
        keys = (exact_key, exact_key_of_owner) if far is None else (digest_key, digest_key_of_owner)
        self.coalescer = Coalescer(
            self._admit,
            lambda request, accepted: accepted(self._admit(request)),
            self.broker,
            self.results,
            keys[scope == "owner"],
            seconds=self.broker.seconds,
            waiting_max=waiting_max,
            bytes_max=bytes_max,
            far=far,
            strict_order=strict_order,
            quarantined=self.quarantined,
            clock=self.clock,
        )
        self.witness = Witness()
        self._serial = 0

    def clock(self) -> float:
        return self.now

    def _admit(self, request: Request) -> CarpoolError | None:
        self.admitted += self.refusal is None
        return self.refusal or self.broker.submit(request)

    def ask(
        self,
        value: bytes = b'"x"',
        *,
        tier: int = 0,
        owner: str = "",
        options: RequestOptions = NO_OPTIONS,
        total_timeout_s: float = 4.0,
        queue_timeout_s: float = 2.0,
        parameters: bytes = b"",
        own_timeout_s: float = 0.0,
        permit: Any = None,
        trace: Trace | None = None,
        client_id: str = "",
    ) -> Request:
        """As the face does it."""
        self._serial += 1
        request = make_request(
            str(self._serial),
            self.witness,
            now=self.now,
            value=bytes(bytearray(value)),  # another object with the same bytes
            parameters=parameters,
            tier=tier,
            target_s=TARGETS_S[tier],
            owner=owner,
            total_timeout_s=total_timeout_s,
            queue_timeout_s=queue_timeout_s,
            own_timeout_s=own_timeout_s,
        )
        request.permit, request.trace, request.client_id = permit, trace, client_id
        refusal = self.coalescer.ask(request, options)
        if refusal is not None:
            request.settle(refusal, self.now)
        return request

    def take(self, count: int = 64) -> list[Request]:
        """What a batch gets now."""
        return [request for lane in self.broker.lanes("m") for request in self.broker.take(lane, count, self.now)]

    def answer(self, batch: list[Request]) -> None:
        """The model answers each with its input."""
        running = [request for request in batch if request.phase == RUNNING]
        self.broker.settle_batch(running, [make_output(request.input) for request in running])

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.broker.expire(self.now)
        self.coalescer.expire(self.now)

    def outcome(self, request: Request) -> object:
        """The value of its output, or its error."""
        outcome = self.witness.outcome(request)
        return outcome.value if isinstance(outcome, Output) else outcome

    def counts(self) -> Counter[str]:
        return +self.broker.outcomes
