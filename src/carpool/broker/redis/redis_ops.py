"""Every step in Redis: arguments in, a struct out, or the RedisFailure that came in its place.

Which keys, node and clock a step of the queue needs, and what its reply looks like, is known here and nowhere else
(heartbeats, a gateway's own stream and the doctor see to themselves). Whatever Redis sends, `done` is called once: a
reply that cannot be understood is a failure like others (`Unreadable`).
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from carpool.broker.redis import scripts
from carpool.broker.redis.client.link import (
    NoRoom,
    RedisFailure,
    Refused,
    ignore,
    pack_beginning,
    pack_digests,
    pack_rest,
    pack_with,
)
from carpool.broker.redis.client.nodes import Nodes, Script
from carpool.broker.redis.formats import FAILED, SUCCESS
from carpool.broker.redis.keys import GROUP, Keys, Shard, tier_of
from carpool.broker.redis.types import Claim, Head, QueueStream, ShardSnapshot, StreamEntries, Taken
from carpool.core.clock import monotonic
from carpool.core.ports import RateAsk, RateTold
from carpool.core.task import StoredTask
from carpool.core.webhook import DueWebhook, WebhookState, shown_url

Found = TypeVar("Found")
Argument = bytes | int | str
# Called with the result of a step.
Done = Callable[[Found | RedisFailure], None]
# More than the script behind plain commands ever takes on the wire, and more than the read of a stream does.
SCRIPT_BYTES_MAX = 64 * 1024
READ_BYTES_MAX = 1024
# The time of rate limits in rates.lua: eighths of a microsecond.
TICKS_A_SECOND = 8_000_000
TICKS_A_MINUTE = 60 * TICKS_A_SECOND


class Unreadable(RedisFailure):
    """A reply that is not what the step promises."""


class Queued(NamedTuple):
    """What became of a submission."""

    # In order; the last ones may have found no room.
    entry_ids: list[bytes]
    held: int
    # Lanes that count against the bound.
    lanes: int


class EndedTask(NamedTuple):
    """A task that got its outcome in Redis: no process has it."""

    id: str
    owner: str
    model: str
    # From its submission to its end.
    age_ms: int
    tier: int


class Swept(NamedTuple):
    """What a part of a sweep left."""

    # Where the next part begins; empty after the last one.
    cursor: bytes
    # Before their time.
    letters_dropped: int
    # Because their time was over.
    tasks_ended: list[EndedTask]
    # More is due than this part did: the shard is to be swept again soon.
    is_more: int


class TaskResult(NamedTuple):
    """What a task gets."""

    task_id: str
    # SUCCESS or FAILED.
    status: bytes
    value: bytes
    # Is kept with it; empty for none.
    letter: bytes
    # A unique name of this result: a batcher that writes it again because a reply was lost is known by it.
    finisher: bytes
    # From its submission to this outcome.
    age_ms: int


class Finished(NamedTuple):
    """What became of a task's result."""

    # Redis keeps this finisher's result.
    was_first: bool
    # Names of the gateways where a client waits for it.
    gateways: bytes
    letters_dropped: int


class LookedAt(NamedTuple):
    """What a look at a task found."""

    # None: there is none.
    task: StoredTask | None
    # It got its result just now, because its time was over.
    was_over: EndedTask | None
    # While it waits, if that was asked for: its model, and how many of its shard go before it; -1 if it was taken.
    queue_stats: tuple[str, int] | None = None
    # From its submission to its result, or until now.
    age_ms: int = 0


class Removed(NamedTuple):
    """A task that was there."""

    # Names of the gateways where a client waits for it.
    gateways: bytes
    # If it had no result.
    ended: EndedTask | None


class LetterHeads(NamedTuple):
    """Some letters of a shard."""

    total: int
    # The highest id that it ever gave.
    last: int
    # Id, head, bytes of parameters and input.
    rows: list[tuple[int, bytes, int]]


def by_redis() -> bytes:
    """Redis's own clock says what time it is."""
    return b""


class RedisOps:
    """The steps that gateways and batchers take in one deployment's Redis."""

    def __init__(self, nodes: Nodes, keys: Keys, now_ms: Callable[[], bytes] = by_redis) -> None:
        self.nodes = nodes
        self.keys = keys
        # Tests may say what time it is.
        self._now_ms = now_ms

    def time_ms(self, shard: Shard) -> int:
        """What the clock of a shard's server shows now, at least; 0 while that is not known."""
        return int(self._now_ms() or self.nodes.time_ms(shard.slot))

    # Into the queue.

    def add(
        self,
        shard: Shard,
        additions: Sequence[tuple[QueueStream, bytes, str, Sequence[tuple[bytes, bytes]]]],
        done: Callable[[list[list[Any]], tuple[int, int] | RedisFailure], None],
    ) -> None:
        """Queue where no bound is near: Redis adds entries by plain commands in half the time that a script takes, and
        one script behind them tells of all streams that they went to. `additions`: of each stream the header, the owner
        of its first entry, the values in two parts. Tells for each of them the ids, or what came in place of one; and
        how many entries and lanes there are now, or why batchers may not know of them.

        A few more than the bounds may come in this way, as many as other gateways add in one turn.
        """
        now = self._now_ms()
        entry_id = now + b"-*" if now else b"*"
        commands: list[tuple[list[bytes], int]] = []
        arguments: list[Argument] = [now]
        for stream, header, owner, values in additions:
            beginning = pack_beginning(b"XADD", shard.stream(stream.field), entry_id, header)
            packed = [pack_rest(beginning, *value) for value in values]
            commands.append((packed, sum(map(len, packed))))
            arguments += (stream.field, stream.about, len(values), owner)
        # All of it or nothing: entries that no script tells of are not found, and it must count none that never came.
        if not self.nodes.has_room(shard.slot, sum(size for _, size in commands) + SCRIPT_BYTES_MAX):
            no_room = NoRoom("too much waits for Redis")
            nothing = [[no_room] * len(packed) for packed, _ in commands]
            asyncio.get_running_loop().call_soon(done, nothing, no_room)
            return
        replies: list[list[Any]] = []
        for packed, size in commands:
            came: list[Any] = []
            replies.append(came)
            self.nodes.send_all(shard.slot, came.append, packed, size)
        told = reading(lambda reply: (int(reply[0]), int(reply[1])), partial(done, replies))
        self._run(scripts.ARRIVED, shard, arguments, told)

    def count_again(self, shard: Shard, fields: Iterable[bytes]) -> None:
        """Have Redis count these streams again: some of what was to be added was refused."""
        arguments = (self._now_ms(), b"", 0, *(part for field in fields for part in (field, 0)))
        self._run(scripts.LEVEL, shard, arguments, ignore)

    def submit(
        self,
        shard: Shard,
        stream: QueueStream,
        header: bytes,
        owner: str,
        values: Sequence[bytes],
        done: Done[Queued],
        *,
        held_max: int,
        lanes_max: int,
        tasks: Sequence[tuple[str, str, str, Argument, str]] = (),
        task_bounds: tuple[int, int, int, int] = (0, 0, 0, 0),
        letter: bytes = b"",
        eval_on: Nodes | None = None,
    ) -> None:
        """Queue as many as there is room for. `tasks`: id, owner, client id of each, ms until its own deadline or "",
        where its outcome is sent or ""; `task_bounds`: most bytes of inputs, of inputs and results, ms until they are
        over, and until they count as accepted by themselves (0: now); `letter`: the dead letter that becomes one.

        `eval_on`: other connections, on which nothing is sent again behind what follows.
        """
        about = (stream.field, stream.about, held_max, lanes_max, self._now_ms(), header, owner, letter, *task_bounds)
        arguments: list[Argument] = [*about, len(values), *values, *(part for task in tasks for part in task)]
        self._run(scripts.SUBMIT, shard, arguments, reading(read_queued, done), eval_on)

    def submit_answered(
        self,
        shard: Shard,
        task: tuple[str, str, str, str],
        result: bytes,
        done: Done[Queued],
        *,
        kept_ms: int,
        stored_bytes_max: int,
        unsure_ms: int,
        eval_on: Nodes | None = None,
    ) -> None:
        """Bring in a task (id, owner, client id, where its outcome is sent) with its result. It is accepted by
        `accept_tasks`, or after `unsure_ms`. `eval_on`: see `submit`.
        """
        *names, url = task
        arguments: list[Argument] = [*names, result, kept_ms, stored_bytes_max, self._now_ms(), url, unsure_ms]
        self._run(scripts.ANSWERED, shard, arguments, reading(read_queued, done), eval_on)

    def accept_tasks(self, shard: Shard, task_ids: Sequence[str], done: Done[int]) -> None:
        """Let these tasks have outcomes: their gateway has accepted them."""
        self.nodes.send(shard.slot, reading(int, done), b"ZREM", shard.unsure, *task_ids)

    def cancel(self, shard: Shard, entries: Iterable[tuple[bytes, bytes, int]], done: Done[list[bool]]) -> None:
        """Delete entries (field, id, and in which case: NOT_HELD, LEFT or NOT_TAKEN). Where no client waits for
        one any more, its batcher gets a message. Says of each whether it was deleted while no batcher had it.
        """
        told = reading(lambda reply: [bool(each) for each in reply], done)
        self._run(scripts.CANCEL, shard, [part for entry in entries for part in entry], told)

    def confirm(self, nodes: Nodes, shard: Shard, replicas: int, timeout_ms: int, done: Done[bool]) -> None:
        """Whether so many replicas have what was sent before on these connections."""
        told = reading(lambda reply: int(reply) >= replicas, done)
        nodes.send(shard.slot, told, b"WAIT", replicas, timeout_ms)

    # Out of the queue.

    def read(
        self,
        shard: Shard,
        consumer: bytes,
        models: Sequence[str],
        reads: Sequence[tuple[bytes, int]],
        done: Done[Taken],
        *,
        lease_ms: int | None = None,
    ) -> None:
        """Take so many from each of these streams, if any, and look what waits in the shard; with `lease_ms` also
        whether a lease is over. A plain read costs Redis a quarter of a script that has to carry the entries; the
        script behind it only counts.
        """
        # All of it or nothing: a batcher can only give back entries that come without the script's answer.
        if not self.nodes.has_room(shard.slot, READ_BYTES_MAX * len(reads) + SCRIPT_BYTES_MAX):
            asyncio.get_running_loop().call_soon(done, NoRoom("too much waits for Redis"))
            return
        streams: list[StreamEntries] = []
        for field, number in reads:

            def came(reply: Any, field: bytes = field) -> None:
                # None: nothing was there. An error: the stream was tidied away.
                found = read(reply, lambda reply: reply[0][1]) if reply is not None else None
                if isinstance(found, list):
                    streams.append(StreamEntries(field, found))

            group = (b"XREADGROUP", b"GROUP", GROUP, consumer)
            self.nodes.send(shard.slot, came, *group, b"COUNT", number, b"STREAMS", shard.stream(field), b">")

        asked_at = monotonic()

        def levelled(reply: Any) -> None:
            view = read(reply, lambda reply: self._view(reply, models, asked_at))
            if isinstance(view, RedisFailure) and not streams:
                done(view)
            else:
                done(Taken(streams, None if isinstance(view, RedisFailure) else view))

        of_reads = [part for pair in reads for part in pair]
        self._run(scripts.LEVEL, shard, (self._now_ms(), lease_ms or b"", len(models), *models, *of_reads), levelled)

    def claim(
        self,
        shard: Shard,
        consumer: bytes,
        lease_ms: int,
        terms: tuple[int, int],
        claims: Sequence[Claim],
        done: Done[Taken],
    ) -> None:
        """Take entries whose leases are over. `terms`: most deliveries, and the company in which none is a suspect."""
        arguments: list[Argument] = [consumer, self._now_ms(), lease_ms, *terms]
        for claim in claims:
            arguments += (claim.model, claim.batches, claim.largest, claim.suspects, claim.left, len(claim.again))
            arguments += [part for room in claim.again.items() for part in room]
        asked_at = monotonic()

        def understand(reply: Any) -> Taken:
            view, more, suspects, *parts = reply
            streams = [StreamEntries(*parts[at : at + 3]) for at in range(0, len(parts), 3)]
            names = [frozenset(model.decode() for model in left) for left in (more, suspects)]
            return Taken(streams, self._view(view, [claim.model for claim in claims], asked_at), *names)

        self._run(scripts.CLAIM, shard, arguments, reading(understand, done))

    def uncount(self, shard: Shard, field: bytes, consumer: bytes, entry_id: bytes, deliveries: int) -> None:
        """Set how often an entry that this batcher has was delivered; it keeps its lease."""
        claim = (b"XCLAIM", shard.stream(field), GROUP, consumer, 0, entry_id)
        self.nodes.send(shard.slot, ignore, *claim, b"IDLE", 0, b"RETRYCOUNT", deliveries, b"JUSTID")

    def renew(
        self, shard: Shard, consumer: bytes, ids: Mapping[bytes, Sequence[bytes]], done: Done[set[tuple[bytes, bytes]]]
    ) -> None:
        """Keep leases, by stream; tells of those (field, id) that are lost."""
        told = reading(lambda reply: set(zip(reply[::2], reply[1::2], strict=True)), done)
        self._run(scripts.RENEW, shard, (consumer, *ids_arguments(ids)), told)

    def release(self, shard: Shard, consumer: bytes, entries: Mapping[bytes, Sequence[tuple[bytes, int]]]) -> None:
        """Let other batchers have entries, by stream, each with what is carried along (batcher/leases.py).

        If this is lost, the leases end by themselves.
        """
        arguments: list[Argument] = [consumer]
        for field, carried in entries.items():
            arguments += (field, len(carried), *(part for entry in carried for part in entry))
        self._run(scripts.RELEASE, shard, arguments, ignore)

    def forget_entries(self, shard: Shard, ids: Mapping[bytes, Sequence[bytes]], done: Done[int]) -> None:
        """Delete entries that have their outcomes."""
        self._run(scripts.DONE, shard, (self._now_ms(), *ids_arguments(ids)), reading(int, done))

    def sweep(
        self,
        shard: Shard,
        cursor: bytes,
        consumer_gone_ms: int,
        letters: Sequence[int],
        late: tuple[bytes, int, bytes],
        done: Done[Swept],
    ) -> None:
        """Tidy up a part of a shard. `letters`: their bounds, ms until they go, and until all is counted; `late`: the
        result of tasks whose time is over, with @ for the id, ms that it is kept, and the receipt for them.
        """

        def swept(reply: Any) -> Swept:
            cursor, letters_dropped, facts, is_more = reply
            return Swept(bytes(cursor), int(letters_dropped), ended_tasks(facts), int(is_more))

        arguments: list[Argument] = [cursor, self._now_ms(), consumer_gone_ms, *letters, *late]
        self._run(scripts.SWEEP, shard, arguments, reading(swept, done))

    # Outcomes.

    def reply(self, gateway: bytes, reply: bytes, done: Callable[[Any], None], *, by_script: bool = False) -> None:
        """Write into the stream of a gateway, if that lives; by a script also where Redis has no memory left."""
        stream = self.keys.replies(gateway)
        slot = self.keys.slot_of(stream)
        if by_script:
            self.nodes.run(scripts.REPLY, slot, (stream,), (reply,), done)
        else:
            self.nodes.send(slot, done, b"XADD", stream, b"NOMKSTREAM", b"*", b"r", reply)

    def finish_task(
        self,
        shard: Shard,
        field: bytes,
        entry_id: bytes,
        result: TaskResult,
        done: Done[Finished | None],
        *,
        kept_ms: int,
        letter_bounds: Sequence[int],
    ) -> None:
        """Give a task its result, if it has none, keep its letter, and acknowledge its entry; tells None if the task is
        not accepted yet, and nothing was done.
        """
        about = (result.task_id, field, entry_id, result.status, result.value, kept_ms, self._now_ms(), result.letter)
        arguments: list[Argument] = [*about, shard.number, *letter_bounds, result.finisher, result.age_ms]

        def finished(reply: Any) -> Finished | None:
            return None if reply[0] < 0 else Finished(bool(reply[0]), *reply[1:])

        self._run(scripts.FINISH, shard, arguments, reading(finished, done))

    def look_at_task(
        self,
        task_id: str,
        gateway: bytes,
        late: tuple[bytes, int, bytes],
        done: Done[LookedAt],
        *,
        with_standing: bool,
    ) -> None:
        """A task; the gateway, if one is given, gets a notice when it has an outcome. `late`: what it gets if
        its time is over, ms that this is kept, and the receipt for its end.
        """
        problem, kept_ms, receipt = late
        arguments = (task_id, gateway, self._now_ms(), problem, kept_ms, int(with_standing), receipt)
        told = reading(partial(read_looked_at, task_id), done)
        self._run(scripts.LOOK, self.keys.shard_of_task(task_id), arguments, told)

    def remove_task(
        self, task_id: str, done: Done[Removed | None], *, was_refused: bool = False, receipt: bytes = b""
    ) -> None:
        """Remove a task; tells None if there was no such task. `was_refused`: it was never accepted, its webhook goes
        too; `receipt`: for its end, if it had no result.
        """

        def removed(reply: Any) -> Removed | None:
            return None if reply is None else Removed(reply[0], ended_task(task_id, *reply[1:]) if reply[1:] else None)

        arguments = (task_id, self._now_ms(), int(was_refused), receipt)
        self._run(scripts.FORGET, self.keys.shard_of_task(task_id), arguments, reading(removed, done))

    def were_read(self, shard: Shard, task_ids: Sequence[str], done: Done[int]) -> None:
        """Clients have the results of these tasks; tells how many such results the shard has."""
        self._run(scripts.WAS_READ, shard, (self._now_ms(), *task_ids), reading(int, done))

    def ends(self, shard: Shard, name: bytes, done: Done[dict[bytes, list[EndedTask]]]) -> None:
        """Tasks that steps of this process ended, by receipt."""

        def found(reply: Any) -> dict[bytes, list[EndedTask]]:
            receipts = zip(reply[::2], reply[1::2], strict=True)
            return {number: ended_tasks(unpack_facts(facts)) for number, facts in receipts}

        self.nodes.send(shard.slot, reading(found, done), b"HGETALL", shard.ends(name))

    def forget_ends(self, shard: Shard, name: bytes, numbers: Sequence[bytes], done: Done[int]) -> None:
        """Remove receipts that were counted."""
        self.nodes.send(shard.slot, reading(int, done), b"HDEL", shard.ends(name), *numbers)

    def is_leased(self, shard: Shard, field: bytes, entry_id: bytes, lease_ms: int, done: Done[bool]) -> None:
        """Whether a batcher has an entry."""

        def leased(reply: Any) -> bool:
            # The entry's id, the batcher that has it, and for how many ms that has not renewed its lease.
            return bool(reply) and reply[0][2] < lease_ms

        pending = (b"XPENDING", shard.stream(field), GROUP, entry_id, entry_id, 1)
        self.nodes.send(shard.slot, reading(leased, done), *pending)

    # Results that are kept for requests that are the same.

    def find_results(self, shard: Shard, keys: Sequence[bytes], done: Done[list[bytes | None]]) -> None:
        """The results with these keys; None for each that is not there, or that Redis did not answer for."""
        replies: list[list[bytes | None]] = []

        def came(reply: Any) -> None:
            replies.append(reply if isinstance(reply, list) else [None] * len(keys))
            if len(replies) == 2:
                later, earlier = replies
                done([one or other for one, other in zip(later, earlier, strict=True)] if any(later) else earlier)

        # Every request that is new asks: keys of one length are packed in one go.
        fields = pack_digests(keys)
        packed = [pack_with(fields, len(keys), b"HMGET", name) for name in (shard.kept, shard.kept_before)]
        self.nodes.send_all(shard.slot, came, packed, sum(map(len, packed)))

    def keep_results(
        self,
        shard: Shard,
        results: Sequence[bytes],
        sizes: tuple[int, int],
        bytes_max: int,
        kept_ms: int,
        done: Callable[[Refused | None], None],
    ) -> None:
        """Keep results (keys and values in turn; their bytes, and those of the smallest), and bound what is kept to
        twice `bytes_max`. Tells why they are there and not counted, or None.
        """
        written: list[Any] = []

        def counted(reply: Any) -> None:
            is_there = not (written and isinstance(written[0], RedisFailure))
            done(reply if is_there and isinstance(reply, Refused) else None)

        self.nodes.send(shard.slot, written.append, b"HSET", shard.kept, *results)
        self._run(scripts.KEEP, shard, (bytes_max, kept_ms, len(results) // 2, *sizes), counted)

    def drop_results(self, shard: Shard, done: Done[int]) -> None:
        """Drop all results that are kept."""
        self._run(scripts.KEEP, shard, (0,), reading(int, done))

    # Dead letters.

    def bury(self, shard: Shard, bounds: Sequence[int], letter: bytes, value: bytes, done: Done[int]) -> None:
        """Keep a letter; tells how many were dropped for it."""
        self._run(scripts.BURY, shard, (self._now_ms(), shard.number, *bounds, letter, value), reading(int, done))

    async def letters(self, shard: Shard, after: int, limit: int, bytes_max: int) -> LetterHeads:
        """Some letters of one shard, maybe fewer than asked for; none only if there are no more."""
        total, last, *rows = await self._ask(scripts.LETTERS, shard, (after, limit, bytes_max))
        heads = zip(rows[::3], rows[1::3], rows[2::3], strict=True)
        return LetterHeads(total, int(last), [(int(letter_id), head, size) for letter_id, head, size in heads])

    async def number_of_letters(self, shard: Shard) -> int:
        """How many letters a shard has."""
        return int(await self.nodes.ask(shard.slot, b"ZCARD", shard.letters))

    async def read_letter(self, shard: Shard, letter_id: int) -> bytes | None:
        """A whole letter."""
        body: bytes | None = await self.nodes.ask(shard.slot, b"HGET", shard.letter_bodies, letter_id)
        return body

    async def drop_letters(self, shard: Shard, letter: bytes = b"") -> int:
        """Remove one, or all; returns how many there were."""
        return int(await self._ask(scripts.DROP, shard, (letter,)))

    # Webhooks.

    async def claim_webhooks(
        self, shard: Shard, limit: int, lease_ms: int, host_max: int, busy: Mapping[str, int]
    ) -> list[DueWebhook]:
        """Some that are due, and that no other gateway gets for so long."""
        arguments: list[Argument] = [limit, host_max, lease_ms, self._now_ms()]
        arguments += [part for pair in busy.items() for part in pair]
        rows = await self._ask(scripts.HOOK_CLAIM, shard, arguments)
        return [
            DueWebhook(task_id.decode(), url.decode(), int(attempts), int(age_ms) / 1000, int(size))
            for task_id, url, attempts, age_ms, size in rows
        ]

    async def read_webhook(self, shard: Shard, task_id: str) -> StoredTask | None:
        """The outcome that is to be sent."""
        status, result, finished = await self.nodes.ask(shard.slot, b"HMGET", shard.hook(task_id), b"s", b"r", b"t")
        if status is None or result is None:
            return None
        ended = int(finished) / 1000
        if status == SUCCESS:
            return StoredTask(task_id, "", "SUCCESS", result, None, ended)
        return StoredTask(task_id, "", "FAILED", None, result, ended)

    async def end_webhook(self, shard: Shard, webhook: DueWebhook, in_ms: Argument = b"", failure: str = "") -> None:
        """Let it be due again after so long, and count an attempt if that failed; or forget it."""
        arguments = (webhook.id, webhook.url, in_ms, failure, self._now_ms())
        await self._ask(scripts.HOOK_END, shard, arguments)

    async def webhooks(self, shard: Shard, limit: int) -> list[WebhookState]:
        """Some of the webhooks that wait, the next first."""
        return [
            WebhookState(
                task_id.decode(),
                shown_url(url.decode()),
                int(attempts),
                failure.decode(),
                int(age_ms) / 1000,
                int(in_ms) / 1000,
                int(size),
            )
            for task_id, url, attempts, failure, age_ms, in_ms, size in await self._ask(
                scripts.HOOK_LIST, shard, (limit, self._now_ms())
            )
        ]

    async def webhook_hosts(self, shard: Shard) -> list[bytes]:
        """The hosts to which webhooks are to be sent."""
        hosts: list[bytes] = await self.nodes.ask(shard.slot, b"ZRANGE", shard.hooks, 0, -1)
        return hosts

    async def retry_webhook(self, shard: Shard, task_id: str) -> int:
        """Let one be due now, unless a gateway is sending it; how many."""
        retried, _ = await self._ask(scripts.HOOK_RETRY, shard, (task_id, b"", 0, 0, self._now_ms()))
        return int(retried)

    async def retry_webhooks(self, shard: Shard, host: bytes, skip: int, limit: int) -> tuple[int, int]:
        """Let the next `limit` behind `skip` of a host be due now; how many, and how many are being sent."""
        arguments = (b"", host, skip, limit, self._now_ms())
        retried, leased = await self._ask(scripts.HOOK_RETRY, shard, arguments)
        return int(retried), int(leased)

    # Rate limits.

    def ask_rates(self, shard: Shard, asks: Sequence[RateAsk], done: Done[list[RateTold]]) -> None:
        """Ask whether calls come in, and for leases, for owners whose rate limits are kept in this shard."""
        arguments: list[Argument] = [self._now_ms()]
        for ask in asks:
            interval = -(-TICKS_A_MINUTE // ask.per_minute)
            arguments += (interval, ask.capacity, ask.burst, ask.need, ask.want, ask.cost)
        keys = [shard.rate(ask.owner) for ask in asks]

        def rates(reply: Any) -> list[RateTold]:
            rows = zip(reply[::3], reply[1::3], reply[2::3], strict=True)
            return [RateTold(granted, leased, ticks / TICKS_A_SECOND) for granted, leased, ticks in rows]

        self.nodes.run(scripts.RATES, shard.slot, keys, arguments, reading(rates, done))

    # How.

    def _view(self, reply: Any, models: Sequence[str], asked_at: float) -> ShardSnapshot:
        """From `view_of` in common.lua. Its time is the latest that it can be by now: an answer may lie in a socket
        while its entries' time runs on.
        """
        now_ms, has_lapsed, *heads = reply
        on_the_way_ms = 0 if self._now_ms() else int((monotonic() - asked_at) * 1000)
        found = [
            Head(bytes(flat[at]), model, float(flat[at + 1]), int(flat[at + 2]))
            for model, flat in zip(models, heads, strict=True)
            for at in range(0, len(flat), 3)
        ]
        found.sort(key=lambda head: (head.place, head.field))
        return ShardSnapshot(int(now_ms) + on_the_way_ms, found, None if has_lapsed is None else bool(has_lapsed))

    def _run(
        self,
        script: Script,
        shard: Shard,
        arguments: Sequence[Argument],
        done: Callable[[Any], None],
        eval_on: Nodes | None = None,
    ) -> None:
        if eval_on is None:
            self.nodes.run(script, shard.slot, (shard.counts,), arguments, done)
        else:
            eval_on.send(shard.slot, done, b"EVAL", script.source, 1, shard.counts, *arguments)

    async def _ask(self, script: Script, shard: Shard, arguments: Sequence[Argument]) -> Any:
        return await self.nodes.ask_script(script, shard.slot, (shard.counts,), arguments)


def read(reply: Any, understand: Callable[[Any], Found]) -> Found | RedisFailure:
    """What a reply says, if it says what it should."""
    if isinstance(reply, RedisFailure):
        return reply
    try:
        return understand(reply)
    except (TypeError, ValueError, IndexError, AttributeError, msgspec.MsgspecError) as fault:
        return Unreadable(f"a reply of Redis cannot be understood ({type(fault).__name__})")


def reading(understand: Callable[[Any], Found], done: Done[Found]) -> Callable[[Any], None]:
    """Call `done` with what a reply says."""
    return lambda reply: done(read(reply, understand))


def read_queued(reply: Any) -> Queued:
    """The ids follow the first one without a gap."""
    first, number, held, lanes = reply
    milliseconds, _, sequence = first.partition(b"-")
    ids = [b"%b-%d" % (milliseconds, int(sequence) + position) for position in range(number)]
    return Queued(ids, int(held), int(lanes))


def read_looked_at(task_id: str, reply: Any) -> LookedAt:
    """From look.lua."""
    status, owner, milliseconds, result, was_over, model, ahead, field, age_ms, client = reply
    if status is None or owner is None or milliseconds is None:
        return LookedAt(None, None)
    task = StoredTask(
        task_id,
        owner.decode(),
        "SUCCESS" if status == SUCCESS else "FAILED" if status == FAILED else "PENDING",
        result if status == SUCCESS else None,
        result if status == FAILED else None,
        int(milliseconds) / 1000,
        client_id=client.decode(),
    )
    if was_over:
        return LookedAt(task, ended_task(task_id, owner, model, ahead, field or b""), None, age_ms)
    return LookedAt(task, None, None if model is None else (model.decode(), int(ahead)), age_ms)


def ended_task(task_id: bytes | str, owner: bytes, model: bytes, age_ms: int, field: bytes) -> EndedTask:
    """As the scripts tell of it."""
    name = task_id if isinstance(task_id, str) else task_id.decode()
    return EndedTask(name, owner.decode(), model.decode(), int(age_ms), max(0, tier_of(field.partition(b":")[2])))


def unpack_facts(packed: bytes) -> list[Any]:
    """What a script has packed, as if it had sent it."""
    facts = msgspec.msgpack.decode(packed, type=list[str | int])
    return [fact.encode() if isinstance(fact, str) else fact for fact in facts]


def ended_tasks(facts: Sequence[Any]) -> list[EndedTask]:
    """As the scripts tell of several."""
    return [ended_task(*facts[first : first + 5]) for first in range(0, len(facts), 5)]


def ids_arguments(ids: Mapping[bytes, Sequence[bytes]]) -> list[Argument]:
    """As the scripts want them: field, number of ids, ids; and again for the next stream."""
    arguments: list[Argument] = []
    for field, entry_ids in ids.items():
        arguments += (field, len(entry_ids), *entry_ids)
    return arguments
