"""The scripts in any order, beside a model of one shard: who has what, how often, what goes next, and true counts."""

from collections import Counter
from typing import Any, ClassVar

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from support.redis_servers import RedisServer
from support.redis_shard import START_MS, TASK_BYTES, Budget, Entry, ShardBench, task_value

LANES = {"a": "m", "b": "m", "c": "n"}
# No two lines ever have equal places: times are multiples of ten.
OFFSETS = {"s0": 1, "s1": 42, "t0": 303}
BATCHERS = ("b1", "b2", "b3")
HELD_MAX = 60
# A real Redis answers each step.
SOME_ORDERS = settings(max_examples=settings().max_examples // 2, stateful_step_count=30)

# As many as the sizes of a few.
INPUT_BYTES_MAX, STORED_BYTES_MAX = 4000, 8000
LETTERS_MAX, LETTER_BYTES_MAX = 6, 300

fields = st.tuples(st.sampled_from(sorted(LANES)), st.sampled_from(sorted(OFFSETS))).map(":".join)
headroom = st.dictionaries(st.sampled_from(["a", "b"]), st.integers(1, 3), max_size=2)
budgets = st.builds(Budget, st.integers(0, 3), st.integers(1, 5), headroom)
batchers = st.sampled_from(BATCHERS)
choices = st.lists(st.integers(0, 10_000), max_size=6)


def is_of_tasks(field: str) -> bool:
    return field.endswith(":t0")


class Lease:
    """What the model knows of an entry that was taken."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.deliveries = 1
        self.is_over = False
        # By its owner, which does not get it again at once.
        self.is_given_back = False


class ShardMachine(RuleBasedStateMachine):
    """Gateways and batchers at work in one shard."""

    port: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        self.shard = ShardBench(self.port)
        self.now = START_MS
        # By field: ids in order. Together: what is held.
        self.waiting: dict[str, list[str]] = {}
        self.taken: dict[tuple[str, str], Lease] = {}
        # By field and id of the entry: its task.
        self.tasks: dict[tuple[str, str], str] = {}
        # Of dead letters, the oldest first.
        self.letters: list[int] = []

    def teardown(self) -> None:
        self.shard.close()

    def held(self) -> int:
        return len(self.taken) + sum(map(len, self.waiting.values()))

    @rule(field=fields, number=st.integers(1, 12))
    def submit(self, field: str, number: int) -> None:
        self.now += 10
        self.shard.now = self.now
        room = HELD_MAX - self.held()
        options: dict[str, Any] = {"model": LANES[field[0]], "held_max": HELD_MAX}
        values: int | list[bytes] = number
        if is_of_tasks(field):
            tasks = [f"t{self.now}-{position}" for position in range(number)]
            values = [b"x" * 40 * position for position in range(number)]
            options |= {"input_bytes_max": INPUT_BYTES_MAX, "stored_bytes_max": STORED_BYTES_MAX, "tasks": tasks}
            room = min(room, self.tasks_that_fit(tasks, values))
        if room == 0:
            with pytest.raises(redis.ResponseError, match=r"^(QUEUEFULL|STOREFULL)"):
                self.shard.submit(field, values, **options)
            return
        ids = self.shard.submit(field, values, **options, offsets=OFFSETS)
        assert len(ids) == min(room, number)
        self.waiting.setdefault(field, []).extend(ids)
        if is_of_tasks(field):
            self.tasks |= zip(((field, entry_id) for entry_id in ids), tasks, strict=False)

    def tasks_that_fit(self, tasks: list[str], values: list[bytes]) -> int:
        kept = self.shard.true_bytes()
        inputs, results = kept["input_bytes"], kept["result_bytes"]
        for position, (task, value) in enumerate(zip(tasks, values, strict=True)):
            size = len(task_value(task, "", value)) + TASK_BYTES
            is_none = inputs == 0
            if not is_none and inputs + size > INPUT_BYTES_MAX:
                return position
            if not (is_none and results == 0) and inputs + results + size > STORED_BYTES_MAX:
                return position
            inputs += size
        return len(tasks)

    @rule(picks=choices, size=st.integers(0, 500), is_dead=st.booleans())
    def finish(self, picks: list[int], size: int, is_dead: bool) -> None:
        for entry in self.some_taken(picks, are_tasks=True):
            task = self.tasks[entry.field, entry.id]
            was_there = self.shard.client.exists(self.shard.shard.task(task)) == 1
            letter = b"\0" * 8 if is_dead else b""
            before = self.shard.true_bytes()["input_bytes"]
            first, dropped = self.shard.finish(
                entry, task, b"r" * size, letter=letter, letters_max=LETTERS_MAX, bytes_max=LETTER_BYTES_MAX
            )
            assert first == was_there
            if first and is_dead:
                value_bytes = before - self.shard.true_bytes()["input_bytes"] - TASK_BYTES
                body = len(letter) + value_bytes - len(task_value(task, "", b""))
                assert dropped == self.note_letter(body)
            assert self.shard.finish(entry, task, b"again") == (False, 0)
            del self.taken[entry.field, entry.id]
            del self.tasks[entry.field, entry.id]

    @rule(picks=choices)
    def forget(self, picks: list[int]) -> None:
        keys = sorted(self.tasks)
        for key in sorted({keys[pick % len(keys)] for pick in picks}) if keys else []:
            self.shard.forget(self.tasks[key])
            assert not self.shard.forget(self.tasks[key])
            field, entry_id = key
            if key in self.taken:
                del self.taken[key]
            else:
                self.waiting[field].remove(entry_id)
            del self.tasks[key]

    def note_letter(self, size: int, bytes_max: int = LETTER_BYTES_MAX) -> int:
        """What should become of the letters; how many go."""
        if size > bytes_max:
            return 1
        number = len(self.letters)
        self.letters.append(size)
        while len(self.letters) > LETTERS_MAX or sum(self.letters) > bytes_max:
            del self.letters[0]
        return number + 1 - len(self.letters)

    @rule(size=st.integers(2, 350), is_memory_short=st.booleans())
    def bury(self, size: int, is_memory_short: bool) -> None:
        bounds = {"letters_max": LETTERS_MAX, "bytes_max": LETTER_BYTES_MAX, "is_memory_short": int(is_memory_short)}
        most = min(LETTER_BYTES_MAX, sum(self.letters)) if is_memory_short else LETTER_BYTES_MAX
        expected = self.note_letter(size, most)
        assert self.shard.bury(size, **bounds) == expected

    @rule(pick=st.integers(0, 10), replay=st.booleans())
    def letter_goes(self, pick: int, replay: bool) -> None:
        position = pick % (len(self.letters) + 1)
        if position == len(self.letters):
            assert self.shard.drop() == len(self.letters)
            self.letters = []
        else:
            letter, _ = self.shard.letters()[position]
            if not replay:
                assert self.shard.drop(letter) == 1
            elif self.held() < HELD_MAX:
                self.now += 10
                self.shard.now = self.now
                (entry_id,) = self.shard.submit("a:t0", [b"x"], tasks=[f"t{self.now}"], letter=letter, offsets=OFFSETS)
                self.waiting.setdefault("a:t0", []).append(entry_id)
                self.tasks["a:t0", entry_id] = f"t{self.now}"
            else:
                return
            del self.letters[position]

    @rule(field=fields, number=st.integers(1, 12))
    def add(self, field: str, number: int) -> None:
        self.now += 10
        self.shard.now = self.now
        if number <= HELD_MAX - self.held() and not is_of_tasks(field):  # tasks come by a script alone
            ids = self.shard.add(field, number, model=LANES[field[0]], offsets=OFFSETS)
            self.waiting.setdefault(field, []).extend(ids)

    @rule(consumer=batchers, number=st.integers(1, 12), pick=st.integers(0, 99))
    def read(self, consumer: str, number: int, pick: int) -> None:
        known = sorted(field for field in self.shard.fields() if field in self.waiting)
        if known:
            field = known[pick % len(known)]
            got = self.shard.read(field, number, consumer=consumer)
            assert [entry.id for entry in got] == self.waiting[field][:number]
            del self.waiting[field][:number]
            self.taken |= {(field, entry.id): Lease(consumer) for entry in got}

    @rule(consumer=batchers, budget=budgets)
    def claim(self, consumer: str, budget: Budget) -> None:
        lapsed = [
            key
            for key, lease in self.taken.items()
            if lease.is_over and LANES[key[0][0]] == "m" and not (lease.is_given_back and lease.owner == consumer)
        ]
        got = self.shard.claim(budget, consumer=consumer)
        assert len({(entry.field, entry.id) for entry in got}) == len(got)
        # Those of a lane that were delivered equally often ride together.
        companies = Counter((entry.field[0], entry.deliveries) for entry in got)
        opened = {company: -(-number // budget.largest) for company, number in companies.items()}
        batches = budget.batches - sum(opened.values())
        assert batches >= 0
        for entry in got:
            key = entry.field, entry.id
            assert key in lapsed
            lapsed.remove(key)
            lease = self.taken[key]
            lease.owner, lease.is_over, lease.is_given_back = consumer, False, False
            lease.deliveries += 1
            assert entry.deliveries == lease.deliveries
        for key in lapsed:  # what stays found no room
            company = key[0][0], self.taken[key].deliveries + 1
            assert batches == 0
            assert companies[company] == opened.get(company, 0) * budget.largest

    def some_taken(self, picks: list[int], are_tasks: bool | None = None) -> list[Entry]:
        keys = sorted(key for key in self.taken if are_tasks is None or is_of_tasks(key[0]) == are_tasks)
        chosen = {keys[pick % len(keys)] for pick in picks} if keys else set()
        return [Entry(field, entry_id, b"") for field, entry_id in sorted(chosen)]

    @rule(consumer=batchers, picks=choices)
    def renew(self, consumer: str, picks: list[int]) -> None:
        entries = self.some_taken(picks)
        lost = self.shard.renew(*entries, consumer=consumer)
        expected = []
        for entry in entries:
            lease = self.taken[entry.field, entry.id]
            if lease.owner == consumer:
                lease.is_over = lease.is_given_back = False
            else:
                expected.append((entry.field, entry.id))
        assert lost == expected

    @rule(consumer=batchers, picks=choices)
    def release(self, consumer: str, picks: list[int]) -> None:
        entries = self.some_taken(picks)
        self.shard.release(*entries, consumer=consumer)
        for entry in entries:
            lease = self.taken[entry.field, entry.id]
            if lease.owner == consumer:
                lease.is_over = lease.is_given_back = True
                lease.deliveries = max(lease.deliveries - 1, 0)

    @rule(picks=choices)
    def owner_dies(self, picks: list[int]) -> None:
        entries = self.some_taken(picks)
        self.shard.let_lapse(*entries)
        for entry in entries:
            lease = self.taken[entry.field, entry.id]
            lease.is_over, lease.is_given_back = True, False

    @rule(picks=choices)
    def done(self, picks: list[int]) -> None:
        entries = self.some_taken(picks, are_tasks=False)
        assert self.shard.done(*entries) == len(entries)
        assert self.shard.done(*entries) == 0
        for entry in entries:
            del self.taken[entry.field, entry.id]

    @rule(picks=choices)
    def cancel(self, picks: list[int]) -> None:
        waiting = [(field, entry_id) for field, ids in sorted(self.waiting.items()) for entry_id in ids]
        everything = [key for key in waiting + sorted(self.taken) if not is_of_tasks(key[0])]
        chosen = sorted({everything[pick % len(everything)] for pick in picks}) if everything else []
        # What was given back no batcher has.
        without_owner = [*waiting, *(key for key, lease in self.taken.items() if lease.is_given_back)]
        assert self.shard.cancel(*chosen) == [int(key in without_owner) for key in chosen]
        for field, entry_id in chosen:
            if (field, entry_id) in waiting:
                self.waiting[field].remove(entry_id)
            else:  # nobody waits for what its batcher does
                del self.taken[field, entry_id]

    @rule(passes_ms=st.sampled_from([0, 500, 3000]))
    def sweep(self, passes_ms: int) -> None:
        self.now += passes_ms
        self.shard.now = self.now
        waiting = sum(map(len, self.waiting.values()))
        assert self.shard.sweep(consumer_gone_ms=0) == (self.held(), waiting)

    @invariant()
    def counts_are_true(self) -> None:
        counts: dict[str, Any] = {"held": 0, "unread": 0, **self.shard.counts()}
        assert counts == {"held": self.held(), "unread": sum(map(len, self.waiting.values()))}

    @rule(is_memory_short=st.booleans())
    def sweep_letters(self, is_memory_short: bool) -> None:
        bounds = {"letters_max": LETTERS_MAX, "bytes_max": LETTER_BYTES_MAX, "is_memory_short": int(is_memory_short)}
        self.shard.sweep(**bounds)
        number, most = len(self.letters), sum(self.letters) // 2
        while is_memory_short and sum(self.letters) > most:
            del self.letters[0]
        assert self.shard.letters_dropped == number - len(self.letters)

    @invariant()
    def bytes_are_counted(self) -> None:
        assert self.shard.counted_bytes() == self.shard.true_bytes()
        assert [size for _, size in self.shard.letters()] == self.letters

    @invariant()
    def heads_are_known(self) -> None:
        expected = [
            (field, LANES[field[0]], int(ids[0].split("-")[0]) + OFFSETS[field[2:]], len(ids))
            for field, ids in self.waiting.items()
            if ids
        ]
        assert self.shard.peek() == sorted(expected)

    @invariant()
    def everything_is_where_it_should_be(self) -> None:
        for field in self.waiting:
            taken = {entry_id: lease for (its_field, entry_id), lease in self.taken.items() if its_field == field}
            assert set(self.shard.ids(field)) == set(self.waiting[field]) | taken.keys()
            if field in self.shard.fields():
                found = {name: (owner, times) for name, (owner, _, times) in self.shard.leases(field).items()}
                assert found == {name: (lease.owner, lease.deliveries) for name, lease in taken.items()}
            else:
                assert not taken


def test_any_order_of_steps(redis_server: RedisServer) -> None:
    machine = type("Machine", (ShardMachine,), {"port": redis_server.port})
    run_state_machine_as_test(machine, settings=SOME_ORDERS)
