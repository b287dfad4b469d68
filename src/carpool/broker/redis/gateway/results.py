"""Results that all gateways keep together in Redis, for requests that are the same (core.ports.FarResults).

1. What is asked for in one turn of the event loop is asked for in one command for each server.
2. Whatever Redis does, or fails to do, nobody waits longer than `look_s_max`: then there is no result. When that
   happened, nobody is asked for a while.
3. Results are written for nobody in particular: those of a moment together, and whether that succeeds is not waited
   for. While the memory of Redis is short, what is kept makes room, and nothing is added.
4. How old a result is, is told by Redis's clock, which is asked for once in a while.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial

from carpool.broker.redis.client.link import RedisFailure
from carpool.broker.redis.formats import KeptResult, UnknownFormatError, decode_result, encode_result
from carpool.broker.redis.keys import Shard
from carpool.broker.redis.steps import Steps
from carpool.core.clock import Clock, monotonic
from carpool.core.outcome import CallFacts, Output
from carpool.core.timers import Every, OncePerTurn

LOOK_S_MAX = 0.015
REST_S = 1.0
LATE_LOOK_S = 0.005
WRITE_EVERY_S = 0.05
ASK_TIME_S = 5.0
# A script holds up everybody else in Redis: no call carries more than this. A larger result is not kept.
RESULTS_A_CALL_MAX = 64
CALL_BYTES_MAX = 1024 * 1024
# What may wait to be written in this turn; more is not kept.
LEAVING_BYTES_MAX = 16 * 1024 * 1024

Found = Callable[[Output | None, float], None]


class Question:
    """What was asked for in one command."""

    __slots__ = ("asked", "wanted")

    def __init__(self, wanted: list[tuple[bytes, Found]], asked: float) -> None:
        # Key, and who is told; empty when they were.
        self.wanted = wanted
        self.asked = asked


class RedisResults:
    """The way of one gateway to them."""

    def __init__(
        self,
        steps: Steps,
        *,
        bytes_max: int,
        ttl_s: float,
        is_memory_short: Callable[[], bool] = lambda: False,
        look_s_max: float = LOOK_S_MAX,
        clock: Clock = monotonic,
    ) -> None:
        self._steps = steps
        self._nodes = steps.nodes
        self._shards = steps.keys.shards
        self._shard_bytes_max = bytes_max // len(self._shards)
        self._ttl_ms = round(ttl_s * 1000)
        self._is_memory_short = is_memory_short
        self._look_s_max = look_s_max
        self._clock = clock
        self._wanted: list[tuple[bytes, Found]] = []
        self._ask_soon = OncePerTurn(self._ask)
        # Those that are out, in their order; answered ones are dropped when they come first.
        self._questions: deque[Question] = deque()
        self._looks = Every(LATE_LOOK_S, self._give_up_late)
        self._rests_until = 0.0
        self._leaving: defaultdict[int, list[tuple[bytes, bytes]]] = defaultdict(list)
        self._leaving_bytes = 0
        self._writes = Every(WRITE_EVERY_S, self.write)
        # What Redis's clock is ahead of ours, in ms, and when that was asked for.
        self._ahead_ms: float | None = None
        self._time_asked = -ASK_TIME_S
        self._facts = CallFacts(0, 0.0, None, cached=True)

    def look(self, key: bytes, found: Found) -> None:
        """Have `found` told the result and its age in seconds, or None: once, soon, not before this returns."""
        self._wanted.append((key, found))
        self._ask_soon.ring()

    def keep(self, key: bytes, output: Output) -> None:
        """Keep a result, if that is possible."""
        value, call = bytes(output.value), output.call
        if len(value) > CALL_BYTES_MAX or self._leaving_bytes > LEAVING_BYTES_MAX:
            return
        kept = KeptResult(value, output.tokens_used, call.model_version)
        self._leaving[self._shard_of(key).number].append((key, encode_result(kept)))
        self._leaving_bytes += len(value)
        self._writes.start()

    def close(self) -> None:
        """Ask no more."""
        self._looks.stop()
        self._writes.stop()

    # Asking.

    def _shard_of(self, key: bytes) -> Shard:
        return self._shards[key[0] % len(self._shards)]

    def _ask(self) -> None:
        wanted, self._wanted = self._wanted, []
        now = self._clock()
        if now < self._rests_until:
            tell_nothing(wanted)
            return
        # Without a Cluster all keys are on one server, and one command asks for all of them.
        groups: defaultdict[int, list[tuple[bytes, Found]]] = defaultdict(list)
        for each in wanted:
            groups[self._shard_of(each[0]).number if self._nodes.is_cluster else 0].append(each)
        if now >= self._time_asked + ASK_TIME_S:
            self._time_asked = now
            self._steps.clock(self._shards[min(groups)], self._told_time)
        for number, group in groups.items():
            shard = self._shards[number]
            if not self._nodes.is_up(shard.slot):
                tell_nothing(group)
                continue
            question = Question(group, now)
            self._questions.append(question)
            names = [self._shard_of(key).result(key) for key, _ in group]
            self._steps.find_results(shard, names, partial(self._came, question))
        if self._questions:
            self._looks.start()

    def _told_time(self, now_ms: int | RedisFailure) -> None:
        if not isinstance(now_ms, RedisFailure):
            self._ahead_ms = now_ms - self._clock() * 1000

    def _came(self, question: Question, values: list[bytes | None] | RedisFailure) -> None:
        wanted, question.wanted = question.wanted, []
        if isinstance(values, RedisFailure) or len(values) != len(wanted):
            tell_nothing(wanted)
            return
        for (_, found), value in zip(wanted, values, strict=True):
            if value is None or self._ahead_ms is None:
                found(None, 0.0)
            else:
                self._tell(found, value, self._clock() * 1000 + self._ahead_ms)

    def _tell(self, found: Found, value: bytes, now_ms: float) -> None:
        try:
            kept_ms, kept = decode_result(value)
        except UnknownFormatError:
            found(None, 0.0)
            return
        if self._facts.model_version != kept.model_version:
            self._facts = CallFacts(0, 0.0, kept.model_version, cached=True)
        # The clock may have been set back.
        found(Output(kept.value, self._facts, kept.tokens_used), max(0.0, (now_ms - kept_ms) / 1000))

    def _give_up_late(self) -> None:
        """Nobody waits for longer."""
        now, questions = self._clock(), self._questions
        while questions and (not questions[0].wanted or questions[0].asked + self._look_s_max <= now):
            question = questions.popleft()
            if question.wanted:
                self._rests_until = now + REST_S
                wanted, question.wanted = question.wanted, []
                tell_nothing(wanted)
        if not questions:
            self._looks.stop()

    # Writing.

    def write(self) -> None:
        """Write what came since the last time. A timer does it."""
        leaving, self._leaving = self._leaving, defaultdict(list)
        self._leaving_bytes = 0
        if not leaving:
            self._writes.stop()
        bytes_max = 0 if self._is_memory_short() else self._shard_bytes_max
        for number, results in leaving.items():
            shard = self._shards[number]
            if not self._nodes.is_up(shard.slot):
                continue
            part: list[tuple[bytes, bytes]] = []
            size = 0
            for result in results:
                if part and (len(part) >= RESULTS_A_CALL_MAX or size + len(result[1]) > CALL_BYTES_MAX):
                    self._steps.keep_results(shard, part, bytes_max, self._ttl_ms)
                    part, size = [], 0
                part.append(result)
                size += len(result[1])
            self._steps.keep_results(shard, part, bytes_max, self._ttl_ms)


def tell_nothing(wanted: list[tuple[bytes, Found]]) -> None:
    """There is no result for these."""
    for _, found in wanted:
        found(None, 0.0)
