"""Results that all gateways keep together in Redis, for requests that are the same (core.ports.FarResults).

1. What is asked for in one turn of the event loop is asked for together.
2. Whatever Redis does, or fails to do, no request waits longer than `look_s_max`: then there is no result. After that
   the gateway does not ask Redis for a while, and keeps the results that come meanwhile in its own memory as well.
3. No request waits for a result to be written: the gateway writes those of a moment together, and does not wait for
   success. While the memory of Redis is short, kept results make room, and none is added.
4. They are kept in two parts, the later and the earlier ones. When the later part is full it takes the place of the
   earlier, which goes as a whole (scripts/keep.lua): so between half of the bytes that are allowed and all of them are
   in use, and a result costs Redis less than a microsecond.
5. Redis's clock says how old a result is. Parts live for longer than their results: one that is too old, or from a
   time that has not come (the clock was set back), is none.
6. Where Redis takes results and does not count them (it refuses the script), nothing would bound them: the gateway
   drops them, and keeps none there any more.
"""

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from carpool.broker.redis.client.link import RedisFailure, Refused, ignore
from carpool.broker.redis.formats import KeptResult, UnknownFormatError, decode_result, encode_result
from carpool.broker.redis.keys import Shard
from carpool.broker.redis.redis_ops import RedisOps
from carpool.core.clock import Clock, monotonic
from carpool.core.defaults import no
from carpool.core.outcome import CallFacts, Output
from carpool.core.timers import Every, OncePerTurn

logger = logging.getLogger("carpool.broker")

LOOK_S_MAX = 0.015
REST_S = 1.0
LATE_LOOK_S = 0.005
WRITE_EVERY_S = 0.05
# A command holds up Redis's other clients: none carries more than this, nor more than so much of what may be kept. A
# larger result is not kept.
RESULTS_A_CALL_MAX = 256
CALL_BYTES_MAX = 1024 * 1024
CALL_SHARE_MAX = 1 / 8
# What Redis needs for a result beside its value.
ENTRY_BYTES = 200
# One command asks for so many: together they are far less than one reply may have (client/link.py).
KEYS_A_CALL_MAX = 128
# What may wait to be written, with what is needed for each; more is not kept.
LEAVING_BYTES_MAX = 16 * 1024 * 1024
# Two gateways need not know quite the same time.
CLOCKS_APART_S_MAX = 1.0

Found = Callable[[Output | None, float], None]
# A result and its age in seconds, and what stands for none.
Told = tuple[Output | None, float]
NOTHING: Told = (None, 0.0)
# By key the callbacks: many requests may ask for the same.
Wanted = Sequence[tuple[bytes, list[Found]]]


class Question(msgspec.Struct, eq=False):
    """What was asked for in one command."""

    shard: Shard
    # Empty when the callbacks were called.
    wanted: Wanted
    asked: float


class RedisResults:
    """One gateway's way to these results."""

    def __init__(
        self,
        steps: RedisOps,
        *,
        bytes_max: int,
        ttl_s: float,
        is_memory_short: Callable[[], bool] = no,
        look_s_max: float = LOOK_S_MAX,
        clock: Clock = monotonic,
    ) -> None:
        self._steps = steps
        self._nodes = steps.nodes
        # Without a Cluster all shards are on one server, and one of them has all results: one question asks for all.
        self._shards = steps.keys.shards if self._nodes.is_cluster else steps.keys.shards[:1]
        self._shard_bytes_max = bytes_max // len(self._shards)
        self._call_bytes_max = min(CALL_BYTES_MAX, int(self._shard_bytes_max * CALL_SHARE_MAX))
        self._ttl_s = ttl_s
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._is_memory_short = is_memory_short
        self._look_s_max = look_s_max
        self._clock = clock
        self._wanted: list[tuple[bytes, Found]] = []
        self._ask_soon = OncePerTurn(self._ask)
        # Questions to Redis, in their order; answered ones are dropped when they come first.
        self._questions: deque[Question] = deque()
        self._looks = Every(LATE_LOOK_S, self._give_up_late)
        self._rests_until = 0.0
        # By key; `look` finds them.
        self._leaving: dict[bytes, KeptResult] = {}
        self._leaving_bytes = 0
        self._writes = Every(WRITE_EVERY_S, self.write)
        # Rule 6.
        self._is_refused = False
        self._facts = CallFacts(0, 0.0, None, cached=True)

    def look(self, key: bytes, found: Found) -> None:
        """Call `found` with the result and its age in seconds, or None: once, soon, not before this returns."""
        self._wanted.append((key, found))
        self._ask_soon.notify()

    def keep(self, key: bytes, output: Output) -> bool:
        """Keep a result, so that `look` finds it; False if that is not possible now, or not for this one."""
        size = len(output.value) + ENTRY_BYTES
        if size > self._call_bytes_max or self._leaving_bytes > LEAVING_BYTES_MAX:
            return False
        if self._is_memory_short():
            self._writes.start()  # it makes room
            return False
        shard = self._shard_of(key)
        came_ms = self._steps.time_ms(shard)
        if self._is_refused or not came_ms or not self._nodes.is_up(shard.slot):
            return False
        value = bytes(output.value)  # a slice would keep the answer to its whole batch
        self._leaving[key] = KeptResult(came_ms, value, output.tokens_used, output.call.model_version)
        self._leaving_bytes += size
        self._writes.start()
        return self._clock() >= self._rests_until

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
            tell((found for _, found in wanted), NOTHING)
            return
        groups: defaultdict[Shard, defaultdict[bytes, list[Found]]] = defaultdict(lambda: defaultdict(list))
        for key, found in wanted:
            shard = self._shard_of(key)
            if (kept := self._leaving.get(key)) is not None:
                tell((found,), self._told(kept, self._steps.time_ms(shard)))
            else:
                groups[shard][key].append(found)
        for shard, by_key in groups.items():
            group = list(by_key.items())
            if not self._nodes.is_up(shard.slot):
                tell_nothing(group)
                continue
            for at in range(0, len(group), KEYS_A_CALL_MAX):
                question = Question(shard, group[at : at + KEYS_A_CALL_MAX], now)
                self._questions.append(question)
                self._steps.find_results(shard, [key for key, _ in question.wanted], partial(self._came, question))
        if self._questions:
            self._looks.start()

    def _came(self, question: Question, values: list[bytes | None] | RedisFailure) -> None:
        wanted, question.wanted = question.wanted, ()
        if isinstance(values, RedisFailure) or len(values) != len(wanted):
            tell_nothing(wanted)
            return
        now_ms = self._steps.time_ms(question.shard)
        for (_, those), value in zip(wanted, values, strict=True):
            tell(those, NOTHING if value is None else self._read(value, now_ms))

    def _read(self, value: bytes, now_ms: int) -> Told:
        try:
            return self._told(decode_result(value), now_ms)
        except UnknownFormatError:
            return NOTHING

    def _told(self, kept: KeptResult, now_ms: int) -> Told:
        age_s = (now_ms - kept.came_ms) / 1000
        if not -CLOCKS_APART_S_MAX < age_s < self._ttl_s:
            return NOTHING
        if self._facts.model_version != kept.model_version:
            self._facts = CallFacts(0, 0.0, kept.model_version, cached=True)
        return Output(kept.value, self._facts, kept.tokens_used), max(0.0, age_s)

    def _give_up_late(self) -> None:
        """End questions that Redis is too late to answer: there is no result."""
        now, questions = self._clock(), self._questions
        while questions and (not questions[0].wanted or questions[0].asked + self._look_s_max <= now):
            question = questions.popleft()
            if question.wanted:
                self._rests_until = now + REST_S
                wanted, question.wanted = question.wanted, ()
                tell_nothing(wanted)
        if not questions:
            self._looks.stop()

    # Writing.

    def write(self) -> None:
        """Write what came since the last time. A timer does it."""
        leaving, self._leaving, self._leaving_bytes = self._leaving, {}, 0
        if self._is_memory_short():
            leaving.clear()
            for shard in self._shards:
                self._steps.drop_results(shard, ignore)
        if not leaving:
            self._writes.stop()
        groups: defaultdict[Shard, list[tuple[bytes, bytes]]] = defaultdict(list)
        for key, kept in leaving.items():
            groups[self._shard_of(key)].append((key, encode_result(kept)))
        for shard, results in groups.items():
            if self._nodes.is_up(shard.slot):
                self._write_to(shard, results)

    def _write_to(self, shard: Shard, results: Sequence[tuple[bytes, bytes]]) -> None:
        """Write to one shard, in parts."""
        part: list[bytes] = []
        size = 0
        least = self._call_bytes_max
        for key, value in results:
            result_size = len(value) + ENTRY_BYTES
            if part and (len(part) >= 2 * RESULTS_A_CALL_MAX or size + result_size > self._call_bytes_max):
                self._keep(shard, part, size, least)
                part, size = [], 0
            part += (key, value)
            size += result_size
            least = min(least, result_size)
        self._keep(shard, part, size, least)

    def _keep(self, shard: Shard, part: Sequence[bytes], size: int, least: int) -> None:
        # What one call adds is never too much: half of what is allowed, with it.
        later_max = max(1, self._shard_bytes_max // 2 - self._call_bytes_max)
        counted = partial(self._counted, shard)
        self._steps.keep_results(shard, part, (size, least), later_max, self._ttl_ms, counted)

    def _counted(self, shard: Shard, refusal: Refused | None) -> None:
        if refusal is not None:
            self._steps.drop_results(shard, ignore)
            if not self._is_refused:
                self._is_refused = True
                logger.warning("Redis does not count the results that are kept: none is kept there now: %s", refusal)


def tell_nothing(wanted: Wanted) -> None:
    """There is no result for these."""
    for _, those in wanted:
        tell(those, NOTHING)


def tell(those: Iterable[Found], told: Told) -> None:
    """Call all of them: a callback that fails must not keep the others waiting, which only this loop calls."""
    for found in those:
        try:
            found(*told)
        except Exception:
            logger.exception("one who looked for a result failed")
