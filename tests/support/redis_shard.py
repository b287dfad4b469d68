"""One shard of the queue in a real Redis, driven by the scripts alone: what a gateway or a batcher would call."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, count
from typing import Any
from uuid import uuid4

import msgspec
import redis

from carpool.broker.redis.client.nodes import Script
from carpool.broker.redis.formats import encode_record
from carpool.broker.redis.keys import Keys
from carpool.broker.redis.scripts import (
    ARRIVED,
    BURY,
    CANCEL,
    CLAIM,
    DONE,
    DROP,
    FINISH,
    FORGET,
    LAPSED,
    LEVEL,
    LOOK,
    RELEASE,
    RENEW,
    SUBMIT,
    SWEEP,
    TAKE,
    WAS_READ,
)
from carpool.broker.redis.types import LEFT
from support.processes import PATIENCE_S
from support.redis_servers import HOST

GROUP = "batchers"
# What a task counts beside its payload.
TASK_BYTES = 256
START_MS = 1_700_000_000_000
LEASE_MS = 5_000
OFFSETS = {"s0": 50, "s1": 150, "s2": 500}
LINES = ("s0", "s1", "s2", "t0", "t1")
# More than any clock counts, and still a whole number in Lua.
STRICT_OFFSETS = {"s0": 0, "s1": 10**14, "s2": 2 * 10**14}


class Entry(msgspec.Struct, frozen=True):
    """An entry that a batcher got."""

    field: str
    id: str
    value: bytes
    # Only known of a claimed one.
    deliveries: int = 1


class Budget(msgspec.Struct, frozen=True):
    """What a batcher may take for one model."""

    batches: int
    largest: int = 4
    # Room in batches of a lane that are begun.
    headroom: Mapping[str, int] = {}


def task_value(task: str, owner: str, content: bytes) -> bytes:
    """The value of a task's entry."""
    return encode_record(0, task, owner, 600_000) + content


class ShardBench:
    """The scripts of one shard, on time that the test makes."""

    def __init__(self, port: int, *, shard: int = 0) -> None:
        self.shard = Keys(f"test-{uuid4().hex}").shards[shard]
        self.client = redis.Redis(host=HOST, port=port, protocol=2, socket_timeout=PATIENCE_S)
        # What scripts are told; None: Redis's own clock.
        self.now: int | None = START_MS
        # By the last sweep.
        self.letters_dropped = 0
        self.tasks_ended = 0
        # Of each part: how many tasks it ended, and whether more is due.
        self.sweeps: list[tuple[int, bool]] = []
        # After the last claim, whether more could be had with more room, and whether suspects were left.
        self.has_more = False
        self.has_suspects = False
        self._numbers = count()

    def close(self) -> None:
        """Leave nothing behind."""
        names = list(self.client.scan_iter(match=b"*" + self.shard.prefix.split(b":")[0] + b"*", count=1000))
        if names:
            self.client.delete(*names)
        self.client.close()

    def run(self, script: Script, *args: str | bytes | int) -> Any:
        """One atomic step."""
        return self.client.eval(script.source, 1, self.shard.counts, *args)  # type: ignore[arg-type]  # bytes are fine

    def stream(self, field: str) -> bytes:
        """The name of a stream."""
        return self.shard.stream(field.encode())

    # What a gateway does.

    def submit(
        self,
        field: str,
        values: int | Sequence[bytes] = 1,
        *,
        model: str = "m",
        held_max: int = 100_000,
        input_bytes_max: int = 10**9,
        stored_bytes_max: int = 10**9,
        task_ms: int = 600_000,
        unsure_ms: int = 0,
        lanes_max: int = 0,
        header: bytes = b"header",
        tasks: Sequence[str] = (),
        value_of: Callable[[str, str, bytes], bytes] = task_value,
        owner: str = "",
        client: str = "",
        own_ms: int | str = "",
        url: str = "",
        letter: str = "",
        offsets: Mapping[str, int] = OFFSETS,
    ) -> list[str]:
        """Queue entries; their ids, which the first one's tells."""
        if isinstance(values, int):
            values = [b"%d" % next(self._numbers) for _ in range(values)]
        if tasks:  # of these the script reads the owner
            values = [value_of(task, owner, value) for task, value in zip(tasks, values, strict=True)]
        about = self.about(field, model, lanes_max, offsets)
        of_tasks = (input_bytes_max, stored_bytes_max, task_ms, unsure_ms) if tasks else (0, 0, 0, 0)
        facts = (field, about, held_max, lanes_max, self._now(), header, owner, letter, *of_tasks)
        named = chain.from_iterable((task, owner, client, own_ms, url) for task in tasks)
        first, number, _, _ = self.run(SUBMIT, *facts, len(values), *values, *named)
        milliseconds, sequence = first.decode().split("-")
        return [f"{milliseconds}-{int(sequence) + position}" for position in range(number)]

    def add(self, field: str, number: int, *, model: str = "m", offsets: Mapping[str, int] = OFFSETS) -> list[str]:
        """Queue entries by plain commands, as most are."""
        where, entry_id = self.stream(field), "*" if self.now is None else f"{self.now}-*"
        ids: Any = [self.client.xadd(where, {"header": next(self._numbers)}, id=entry_id) for _ in range(number)]
        self.run(ARRIVED, self._now(), field, self.about(field, model, 0, offsets), number, "")
        return [entry_id.decode() for entry_id in ids]

    def about(self, field: str, model: str, lanes_max: int, offsets: Mapping[str, int]) -> str:
        """What is said of a stream."""
        return f"{offsets.get(field.split(':')[1], 0)} {'b' if lanes_max else '-'} {model}"

    def queue_stats(self, task: str) -> tuple[str, int] | None:
        """The model of a task that waits, and how many go before it; -1 if it was taken."""
        *_, was_over, model, ahead, _ = self.run(LOOK, task, "", self._now(), "late", 60_000, 1)
        return None if model is None or was_over else (model.decode(), ahead)

    def forget(self, task: str) -> bool:
        """Remove a task in any state; whether there was one."""
        return self.run(FORGET, task) is not None

    def was_read(self, *tasks: str) -> int:
        """Somebody has their results; how many such results there are."""
        number: int = self.run(WAS_READ, self._now(), *tasks)
        return number

    def cancel(self, *entries: tuple[str, str], which: int = LEFT) -> list[int]:
        """Delete (field, id) that nobody took; which of them were."""
        return list(self.run(CANCEL, *(part for pair in entries for part in (*pair, which))))

    # What a batcher does.

    def take(
        self,
        budgets: Budget | Mapping[str, Budget],
        *,
        consumer: str = "b1",
        lines: Sequence[str] = LINES,
    ) -> list[Entry]:
        """New entries."""
        if isinstance(budgets, Budget):
            budgets = {"m": budgets}
        args: list[str | bytes | int] = [consumer, self._now(), *lines, ""]
        for model, budget in budgets.items():
            args += [model, budget.batches, budget.largest, len(budget.headroom)]
            args += [part for pair in budget.headroom.items() for part in pair]
        _, *streams = self.run(TAKE, *args)
        return [
            Entry(field.decode(), entry_id.decode(), value)
            for field, entries in zip(streams[::2], streams[1::2], strict=True)
            for entry_id, (_, value) in entries
        ]

    def claim(
        self,
        budget: Budget,
        *,
        model: str = "m",
        consumer: str = "b2",
        lease_ms: int = LEASE_MS,
        deliveries_max: int = 1000,
        suspects: int = 2,
        left: int = 1,
    ) -> list[Entry]:
        """Entries whose lease is over. Where nothing else is said, none of them is a suspect for long."""
        of_model: list[str | bytes | int] = [model, budget.batches, budget.largest, suspects, left]
        of_model += [len(budget.headroom)]
        of_model += [part for pair in budget.headroom.items() for part in pair]
        _, more, left, *streams = self.run(CLAIM, consumer, self._now(), lease_ms, deliveries_max, 64, *of_model)
        self.has_more, self.has_suspects = bool(more), bool(left)
        return [
            Entry(field.decode(), entry_id.decode(), value, delivery)
            for field, entries, deliveries in zip(streams[::3], streams[1::3], streams[2::3], strict=True)
            for (entry_id, (_, value)), delivery in zip(entries, deliveries, strict=True)
        ]

    def read(self, field: str, number: int, *, consumer: str = "b1") -> list[Entry]:
        """New entries by a plain command, as most are taken."""
        found: Any = self.client.xreadgroup(GROUP, consumer, {self.stream(field): ">"}, count=number)
        self.run(LEVEL, self._now(), 0, field, number)
        entries = found[0][1] if found else []
        return [Entry(field, entry_id.decode(), next(iter(fields.values()))) for entry_id, fields in entries]

    def peek(self, *models: str) -> list[tuple[str, str, int, int]]:
        """Field, model, place of the first and number of what waits."""
        models = models or ("m", "n")
        _, *heads = self.run(LEVEL, self._now(), len(models), *models)
        rows = [
            (model, flat[at : at + 3])
            for model, flat in zip(models, heads, strict=True)
            for at in range(0, len(flat), 3)
        ]
        return sorted((field.decode(), model, int(place), number) for model, (field, place, number) in rows)

    def has_lapsed(self) -> bool:
        """Whether a lease is over."""
        return bool(self.run(LAPSED, LEASE_MS))

    def renew(self, *entries: Entry, consumer: str = "b1") -> list[tuple[str, str]]:
        """Keep leases; those that are lost."""
        lost = self.run(RENEW, consumer, *_by_stream(entries))
        texts = [part.decode() for part in lost]
        return list(zip(texts[::2], texts[1::2], strict=True))

    def release(self, *entries: Entry, consumer: str = "b1", carried: int = 0) -> None:
        """Let others have them, with what is carried along."""
        for entry in entries:
            self.run(RELEASE, consumer, entry.field, 1, entry.id, carried)

    def done(self, *entries: Entry) -> int:
        """They have their outcome; how many were still there."""
        return int(self.run(DONE, self._now(), *_by_stream(entries)))

    def finish(
        self,
        entry: Entry,
        task: str,
        result: bytes,
        *,
        kept_ms: int = 600_000,
        letter: bytes = b"",
        finisher: str = "",
        **bounds: int,
    ) -> tuple[bool, int]:
        """Give a task its result: whether it was the first, and how many letters were dropped."""
        kept = ("F" if letter else "S", result, kept_ms, self._now(), letter, self.shard.number)
        age_ms = 0 if self.now is None else self.now - int(entry.id.partition("-")[0])
        who = (finisher or f"finisher {next(self._numbers)}", age_ms)
        is_first, _, dropped = self.run(FINISH, task, entry.field, entry.id, *kept, *_letter_bounds(**bounds), *who)
        assert is_first >= 0, "it is not accepted yet"
        return bool(is_first), dropped

    def bury(self, size: int, **bounds: int) -> int:
        """Keep a letter of so many bytes; how many were dropped."""
        about = (self._now(), self.shard.number, *_letter_bounds(**bounds))
        return int(self.run(BURY, *about, b"", b"x" * size))

    def drop(self, letter: str = "") -> int:
        """Remove a letter, or all; how many there were."""
        return int(self.run(DROP, letter))

    def sweep(
        self,
        *,
        consumer_gone_ms: int = 600_000,
        letters_kept_ms: int = 10**9,
        counted_ms: int = 60_000,
        **bounds: int,
    ) -> tuple[int, int]:
        """Held and unread entries after a sweep."""
        letters = (*_letter_bounds(**bounds), letters_kept_ms, counted_ms)
        about: list[str | bytes | int] = [consumer_gone_ms, *letters, "late: @", 60_000]
        cursor, self.letters_dropped, self.tasks_ended, self.sweeps = b"0", 0, 0, []
        while cursor:
            cursor, dropped, tasks, is_more = self.run(SWEEP, cursor, self._now(), *about)
            ended = len(tasks) // 5
            self.letters_dropped += dropped
            self.tasks_ended += ended
            self.sweeps.append((ended, bool(is_more)))
        counts = self.counts()
        return counts["held"], counts["unread"]

    # What is true.

    def counts(self) -> dict[str, int]:
        """How many entries the shard believes to have; those of its lines are as many as of all of them together."""
        counts = self.all_counts()
        by_line = [number for name, number in counts.items() if name.startswith("unread:")]
        assert sum(by_line) == counts.get("unread", 0), counts
        assert min(by_line, default=0) >= 0, counts
        return {name: number for name, number in counts.items() if name in ("held", "unread")}

    def all_counts(self) -> dict[str, int]:
        """All that the shard counts."""
        found: Any = self.client.hgetall(self.shard.counts)
        return {name.decode(): int(value) for name, value in found.items()}

    def fields(self) -> set[str]:
        """The streams that the shard knows."""
        found: Any = self.client.hkeys(self.shard.lanes)
        return {field.decode() for field in found}

    def ids(self, field: str) -> list[str]:
        """All entries of a stream."""
        found: Any = self.client.xrange(self.stream(field))
        return [entry_id.decode() for entry_id, _ in found]

    def leases(self, field: str) -> dict[str, tuple[str, int, int]]:
        """By id: who has it, for how many ms, and how often it was delivered."""
        rows: Any = self.client.xpending_range(self.stream(field), GROUP, "-", "+", 100_000)
        return {
            row["message_id"].decode(): (
                row["consumer"].decode(),
                row["time_since_delivered"],
                row["times_delivered"],
            )
            for row in rows
        }

    def consumers(self, field: str) -> set[str]:
        """Whom the group of a stream knows."""
        found: Any = self.client.xinfo_consumers(self.stream(field), GROUP)
        return {consumer["name"].decode() for consumer in found}

    def true_counts(self) -> dict[str, int]:
        """Held and unread entries, counted one by one."""
        held = unread = 0
        for field in self.fields():
            ids = set(self.ids(field))
            held += len(ids)
            unread += len(ids - self.leases(field).keys()) if ids else 0
        return {"held": held, "unread": unread}

    def letters(self) -> list[tuple[str, int]]:
        """Ids and sizes of the dead letters, the oldest first."""
        found: Any = self.client.zrange(self.shard.letters, 0, -1)
        sizes: Any = self.client.hgetall(self.shard.letter_bodies)
        assert set(found) == set(sizes)
        return [(letter.decode(), len(sizes[letter])) for letter in found]

    def true_bytes(self) -> dict[str, int]:
        """Bytes of tasks, results and dead letters, counted one by one."""
        found = {"input_bytes": 0, "result_bytes": 0, "letter_bytes": 0}
        for name in self.client.scan_iter(match=self.shard.task("*"), count=1000):
            facts: Any = self.client.hmget(name, "s", "f", "e", "r", "c", "h")
            status, field, entry_id, result, client, url = facts
            beside = len(client or b"") + len(url or b"") + TASK_BYTES
            if status == b"P":
                entries: Any = self.client.xrange(self.stream(field.decode()), entry_id, entry_id)
                ((_, entry),) = entries
                found["input_bytes"] += len(*entry.values()) + beside
            elif status is not None:  # else it is gone, but for whoever finished it
                found["result_bytes"] += len(result) + beside
        found["letter_bytes"] = sum(size for _, size in self.letters())
        return found

    def counted_bytes(self) -> dict[str, int]:
        """The same as the shard believes; and that the parts are these totals."""
        counts = self.all_counts()
        for total in ("input_bytes", "result_bytes", "read_bytes"):
            parts = sum(number for name, number in counts.items() if name.startswith(f"{total}:"))
            assert parts == counts.get(total, 0)
        counts["result_bytes"] = counts.get("result_bytes", 0) + counts.get("read_bytes", 0)
        return {name: counts.get(name, 0) for name in ("input_bytes", "result_bytes", "letter_bytes")}

    def let_lapse(self, *entries: Entry, ms: int = 2 * LEASE_MS, deliveries: int | None = None) -> None:
        """Make leases old, as if their owner had died; as if so many had died, if that is given."""
        for entry in entries:
            owner, _, _ = self.leases(entry.field)[entry.id]
            stream, ids = self.stream(entry.field), (entry.id,)
            self.client.xclaim(stream, GROUP, owner, 0, ids, idle=ms, retrycount=deliveries, justid=True)

    def all_keys(self) -> dict[bytes, Any]:
        """Everything of this shard, to compare."""
        names = self.client.scan_iter(match=b"*" + self.shard.prefix.split(b":")[0] + b"*", count=1000)
        return {name: self.client.dump(name) for name in names}

    def _now(self) -> str | int:
        return "" if self.now is None else self.now


def _letter_bounds(letters_max: int = 10**6, bytes_max: int = 10**9, is_memory_short: int = 0) -> tuple[int, ...]:
    return letters_max, bytes_max, is_memory_short


def _by_stream(entries: Iterable[Entry]) -> list[str | int]:
    ids: dict[str, list[str]] = {}
    for entry in entries:
        ids.setdefault(entry.field, []).append(entry.id)
    arguments: list[str | int] = []
    for field, members in ids.items():
        arguments += [field, len(members), *members]
    return arguments
