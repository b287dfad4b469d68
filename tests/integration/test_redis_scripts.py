"""What each script promises, on a real Redis: one test a promise."""

import time
from collections.abc import Iterator
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import pytest
import redis

from carpool.broker.redis.batcher.leases import History, history_of
from carpool.broker.redis.formats import encode_record
from carpool.broker.redis.types import NOT_HELD, NOT_TAKEN
from support.processes import PATIENCE_S
from support.redis_servers import RedisServer, running_redis
from support.redis_shard import (
    START_MS,
    TASK_BYTES,
    Budget,
    Entry,
    ShardBench,
    task_value,
)

PLENTY = Budget(batches=100, largest=64)


@pytest.fixture
def shard(redis_server: RedisServer) -> Iterator[ShardBench]:
    bench = ShardBench(redis_server.port)
    yield bench
    bench.close()


def ids_of(entries: list[Entry]) -> list[str]:
    return [entry.id for entry in entries]


def fields_of(entries: list[Entry]) -> list[str]:
    return [entry.field for entry in entries]


class TestSubmit:
    def test_ids_follow_the_first_without_a_gap_though_time_goes_on(self, shard: ShardBench) -> None:
        # 2 MB take several ms; a gateway knows the other ids only from the first.
        shard.now = None
        for _ in range(3):
            ids = shard.submit("a:s0", [b"x" * 2000] * 1000)
            assert shard.ids("a:s0")[-1000:] == ids

    def test_time_is_that_of_redis(self, shard: ShardBench) -> None:
        shard.now = None
        before_ms = time.time() * 1000
        (entry_id,) = shard.submit("a:s0")
        assert before_ms - 1000 < int(entry_id.split("-")[0]) < time.time() * 1000 + 1000

    def test_no_more_than_there_is_room_for_and_the_first_ones(self, shard: ShardBench) -> None:
        shard.submit("a:s0", 3, held_max=5)
        assert len(shard.submit("b:s0", [b"x", b"y", b"z"], held_max=5)) == 2
        taken = shard.take(PLENTY)
        assert [entry.value for entry in taken if entry.field == "b:s0"] == [b"x", b"y"]
        before = shard.all_keys()
        with pytest.raises(redis.ResponseError, match=r"^QUEUEFULL"):  # what was taken is still held
            shard.submit("c:s0", held_max=5)
        assert shard.all_keys() == before
        shard.done(*taken)
        assert len(shard.submit("c:s0", 9, held_max=5)) == 5

    def test_the_bell_rings_only_where_nothing_waited(self, shard: ShardBench) -> None:
        with shard.client.pubsub() as pubsub:  # type: ignore[no-untyped-call]
            pubsub.ssubscribe(shard.shard.wakeup)

            def heard() -> list[tuple[int, str]]:
                shard.client.spublish(shard.shard.wakeup, "end")  # behind the bells that rang so far
                messages = (pubsub.get_message(timeout=PATIENCE_S) for _ in count())
                rung = (message["data"] for message in messages if message["type"] == "smessage")
                parts = (data.decode().split(" ") for data in takewhile(lambda data: data != b"end", rung))
                return [(int(number), field) for number, _, field, _ in parts if number != "left"]

            assert heard() == []
            shard.submit("a:s0", 3)
            shard.submit("a:s0", 2)
            shard.submit("b:s0", 1)
            assert heard() == [(3, "a:s0"), (1, "b:s0")]  # once for each stream
            shard.take(Budget(1))
            shard.submit("a:s0")
            assert heard() == []
            shard.take(PLENTY)
            shard.submit("b:s0", 2)
            assert heard() == [(2, "b:s0")]
            shard.cancel(*(("b:s0", entry_id) for entry_id in shard.ids("b:s0")))
            shard.submit("b:s0", 1)
            assert heard() == [(1, "b:s0")]

    def test_who_opened_fewer_lanes_than_its_share_is_not_refused(self, shard: ShardBench) -> None:
        for number in range(4):
            shard.submit(f"{number}:s0", lanes_max=4, owner="ann")
        with pytest.raises(redis.ResponseError, match=r"^LANESFULL"):
            shard.submit("5:s0", lanes_max=4, owner="ann")
        shard.submit("0:s0", lanes_max=4, owner="ann")  # it waits already
        shard.submit("6:s0", lanes_max=0, owner="ann")  # one without parameters
        for number in (7, 8):
            shard.submit(f"{number}:s0", lanes_max=4, owner="bob")
        with pytest.raises(redis.ResponseError, match=r"^LANESFULL"):
            shard.submit("9:s0", lanes_max=4, owner="bob")


class TestStanding:
    """Where a task stands, without a look at those before it."""

    def test_nor_does_one_whose_time_is_over(self, shard: ShardBench) -> None:
        shard.submit("a:t0", 3, tasks=["t0", "t1", "t2"])
        shard.client.hset(shard.shard.task("t2"), "d", START_MS)
        shard.now = START_MS + 10
        assert shard.queue_stats("t2") is None
        assert [shard.queue_stats(name) for name in ("t0", "t1")] == [("m", 0), ("m", 1)]

    def test_where_many_were_removed_one_that_waits_is_not_taken(self, shard: ShardBench) -> None:
        names = [f"t{number}" for number in range(1202)]
        for start in range(0, 1202, 200):
            shard.submit("a:t0", len(names[start : start + 200]), tasks=names[start : start + 200])
        for name in reversed(names[2:]):
            shard.forget(name)
        assert [shard.queue_stats(name) for name in ("t0", "t1")] == [("m", 0), ("m", 0)]  # some are forgotten
        assert shard.client.zcard(shard.shard.prefix + b"gone:a:t0") == 1000
        shard.take(PLENTY)
        assert shard.queue_stats("t1") == ("m", -1)

    def test_others_go_before_it_by_their_places(self, shard: ShardBench) -> None:
        offsets = {"s0": 50, "s2": 500, "t0": 1050, "t2": 1500}
        shard.submit("a:t2", tasks=["first"], offsets=offsets)
        shard.submit("a:t0", 4, tasks=["p1", "p2", "p3", "p4"], offsets=offsets)
        assert shard.queue_stats("first") == ("m", 4)  # a higher tier, at the same time
        assert shard.queue_stats("p4") == ("m", 3)
        shard.submit("b:s0", 3, offsets=offsets)
        shard.submit("c:s0", 7, model="other", offsets=offsets)
        assert shard.queue_stats("first") == ("m", 7)
        shard.now = START_MS + 2000
        shard.submit("a:t0", tasks=["late"], offsets=offsets)
        # Of each stream as many as the time from its first to this place is of the time until now.
        assert shard.queue_stats("first") == ("m", round(3 * 1450 / 2000 + 5 * 450 / 2000))
        assert shard.queue_stats("late") == ("m", 4 + 3 + 1)

    def test_with_strict_order(self, shard: ShardBench) -> None:
        offsets = {"t0": 0, "t1": 10**14}
        shard.submit("a:t1", tasks=["low"], offsets=offsets)
        shard.now = START_MS + 5000
        shard.submit("a:t0", 2, tasks=["high", "higher"], offsets=offsets)
        assert (shard.queue_stats("low"), shard.queue_stats("high")) == (("m", 2), ("m", 0))

    def test_a_stream_that_was_dropped_begins_anew(self, shard: ShardBench) -> None:
        shard.submit("a:t0", tasks=["t1"])
        (entry,) = shard.take(PLENTY)
        shard.finish(entry, "t1", b"result")
        shard.now = START_MS + 5000
        shard.sweep()
        shard.submit("a:t0", 2, tasks=["t2", "t3"])
        assert [shard.queue_stats(name) for name in ("t2", "t3")] == [("m", 0), ("m", 1)]

    def test_a_task_of_the_version_before(self, shard: ShardBench) -> None:
        shard.submit("a:t0", tasks=["old"])
        shard.client.hdel(shard.shard.task("old"), "n")
        assert shard.queue_stats("old") is None


class TestTake:
    def test_streams_left_by_parameters_that_never_come_back_are_dropped(self, shard: ShardBench) -> None:
        for number in range(100):
            shard.submit(f"{number:x}:s0")
        shard.done(*shard.take(Budget(100, 1)))
        assert len(shard.fields()) == 100  # they are young
        shard.now = START_MS + 5000
        for _ in range(50):
            shard.submit("a:s1")
            shard.done(*shard.take(PLENTY))
        assert len(shard.fields()) == 1
        assert not shard.client.exists(shard.stream("b:s0"), shard.stream("c:s0"))


class TestClaim:
    def test_suspects_stay_while_they_may_not_come(self, shard: ShardBench) -> None:
        shard.submit("a:s0", 3)
        old, *others = shard.take(PLENTY)
        shard.let_lapse(*others)
        shard.let_lapse(old, deliveries=2)
        claimed = shard.claim(PLENTY, deliveries_max=6, suspects=0)
        assert [entry.deliveries for entry in claimed] == [2, 2]
        shard.let_lapse(old, deliveries=4)
        assert shard.claim(PLENTY, deliveries_max=6, suspects=1) == []  # it has to be alone
        assert [entry.deliveries for entry in shard.claim(PLENTY, deliveries_max=6)] == [5]

    def test_what_is_left_is_told(self, shard: ShardBench) -> None:
        def left(budget: Budget, suspects: int) -> tuple[int, bool, bool]:
            claimed = shard.claim(budget, deliveries_max=6, suspects=suspects)
            return len(claimed), shard.has_more, shard.has_suspects

        shard.submit("a:s0", 6)
        suspect, *others = shard.take(PLENTY)
        shard.let_lapse(*others)
        assert left(Budget(1, 2), 0) == (2, True, False)
        shard.let_lapse(suspect, deliveries=2)
        assert left(Budget(0), 2) == (0, True, True)
        assert left(Budget(0, 4, {"a 2": 1}), 2) == (1, True, True)  # a batch of their like has room
        assert left(Budget(0, 4, {"a 1": 4, "b 2": 4}), 2) == (0, True, True)
        assert left(PLENTY, 0) == (2, False, True)
        assert left(PLENTY, 2) == (1, False, False)

    def test_dead_ones_are_found_behind_many_that_live(self, shard: ShardBench) -> None:
        shard.submit("a:s0", 500)
        taken = shard.take(PLENTY)
        shard.let_lapse(taken[-1])
        assert ids_of(shard.claim(Budget(batches=1, largest=1))) == [taken[-1].id]

    def test_the_best_go_first(self, shard: ShardBench) -> None:
        for field, at in (("c:s2", 0), ("b:s1", 300), ("a:s0", 460)):
            shard.now = START_MS + at
            shard.submit(field)
        shard.let_lapse(*shard.take(PLENTY))
        order = [fields_of(shard.claim(Budget(batches=1)))[0] for _ in range(3)]
        assert order == ["b:s1", "c:s2", "a:s0"]

    def test_dead_ones_are_found_behind_many_lanes_that_live(self, shard: ShardBench) -> None:
        for number in range(300):
            shard.submit(f"{number:x}:s0")
        *_, last = shard.take(Budget(300, 1))
        shard.let_lapse(last)
        assert any(shard.has_lapsed() for _ in range(3))
        assert ids_of(shard.claim(PLENTY)) == [last.id]
        assert not any(shard.has_lapsed() for _ in range(3))


class TestLeases:
    def test_what_is_given_back_carries_its_history_along(self, shard: ShardBench) -> None:
        shard.submit("a:s0", 2)
        first, second = shard.take(PLENTY)
        shard.release(first, carried=History(failures=1, returns=1, was_probe=True).carried)
        shard.release(second, carried=History(returns=2, was_blamed=True).carried)
        claimed = shard.claim(PLENTY)
        assert [history_of(entry.deliveries) for entry in claimed] == [
            History(1, failures=1, returns=1, was_probe=True),
            History(1, returns=2, was_blamed=True),
        ]
        shard.let_lapse(*claimed)  # its batcher died: that counts beside what is carried
        again = shard.claim(PLENTY, consumer="b3")
        assert [history_of(entry.deliveries).deliveries for entry in again] == [2, 2]
        assert [history_of(entry.deliveries).returns for entry in again] == [1, 2]

    def test_who_gave_it_back_does_not_get_it_again_at_once(self, shard: ShardBench) -> None:
        shard.submit("a:s0", 1)
        taken = shard.take(PLENTY)
        shard.release(*taken)
        assert shard.claim(PLENTY, consumer="b1") == []
        assert not shard.has_more
        # Where no other batcher is well, its own may have it.
        assert shard.claim(PLENTY, consumer="b1", left=0) == taken

    def test_who_blamed_its_input_does_not_judge_it_again(self, shard: ShardBench) -> None:
        shard.submit("a:s0", 2)
        blamed, other = shard.take(PLENTY)
        shard.release(blamed, carried=History(failures=2, returns=1, was_blamed=True).carried)
        shard.release(other, carried=History(failures=1, returns=1).carried)
        # As if the others, which are well, had had no slot for longer than a lease.
        assert [entry.id for entry in shard.claim(PLENTY, consumer="b1", lease_ms=0)] == [other.id]
        assert [entry.id for entry in shard.claim(PLENTY)] == [blamed.id]

    def test_a_probe_is_no_probe_again(self, shard: ShardBench) -> None:
        shard.submit("a:s0", 2)
        probe, other = shard.take(PLENTY)
        shard.release(probe, carried=History(failures=1, returns=1, was_probe=True).carried)
        shard.release(other, carried=History(returns=1).carried)
        assert [entry.id for entry in shard.claim(PLENTY, left=2)] == [other.id]
        assert [entry.id for entry in shard.claim(PLENTY, consumer="b3")] == [probe.id]

    def test_what_cannot_go_back_any_more_is_for_those_that_are_well(self, shard: ShardBench) -> None:
        shard.submit("a:s0")
        taken = shard.take(PLENTY)
        shard.release(*taken, carried=History(failures=2, returns=2).carried)
        assert shard.claim(PLENTY, left=2) == []
        assert len(shard.claim(PLENTY, left=0)) == 1  # no other batcher is well

    def test_what_failed_twice_has_a_batch_to_itself(self, shard: ShardBench) -> None:
        shard.submit("a:s0", 5)
        taken = shard.take(Budget(2))
        shard.release(*taken, carried=History(failures=2, returns=2).carried)
        assert len(shard.claim(Budget(2))) == 2
        assert shard.has_more
        assert len(shard.claim(Budget(9), consumer="b3")) == 3

    def test_batchers_are_woken_up_for_what_was_given_back(self, shard: ShardBench) -> None:
        shard.submit("a:s0", 1)
        taken = shard.take(PLENTY)
        with shard.client.pubsub() as heard:  # type: ignore[no-untyped-call]  # redis-py's own
            heard.ssubscribe(shard.shard.wakeup)
            heard.get_sharded_message(timeout=5)
            shard.release(*taken)
            message = heard.get_sharded_message(timeout=5)
        assert message is not None
        assert message["data"] == b"back"


class TestEnds:
    def test_only_what_nobody_took_is_cancelled_while_somebody_waits(self, shard: ShardBench) -> None:
        ids = shard.submit("a:s0", 4)
        taken = shard.take(Budget(1, 2))
        shard.done(taken[0])
        wanted = [("a:s0", entry_id) for entry_id in ids]
        assert shard.cancel(*wanted, ("ff:s0", "1-1"), which=NOT_HELD) == [0, 0, 1, 1, 0]
        assert shard.cancel(*wanted, which=NOT_HELD) == [0, 0, 0, 0]
        assert shard.ids("a:s0") == [taken[1].id]
        assert shard.counts() == shard.true_counts() == {"held": 1, "unread": 0}

    def test_what_was_given_back_was_taken_in_time(self, shard: ShardBench) -> None:
        (entry_id,) = shard.submit("a:s0", 1)
        shard.release(*shard.take(PLENTY), carried=History(failures=1, returns=1).carried)
        assert shard.cancel(("a:s0", entry_id), which=NOT_TAKEN) == [0]
        assert shard.ids("a:s0") == [entry_id]
        assert shard.cancel(("a:s0", entry_id), which=NOT_HELD) == [1]
        assert shard.counts() == shard.true_counts() == {"held": 0, "unread": 0}

    def test_what_was_taken_goes_too_when_its_client_left(self, shard: ShardBench) -> None:
        ids = shard.submit("a:s0", 3)
        taken = shard.take(Budget(1, 2))
        assert shard.cancel(*(("a:s0", entry_id) for entry_id in ids)) == [0, 0, 1]
        assert shard.ids("a:s0") == []
        assert shard.counts() == shard.true_counts() == {"held": 0, "unread": 0}
        assert shard.renew(*taken) == [("a:s0", entry.id) for entry in taken]
        assert shard.done(*taken) == 0
        assert shard.counts() == shard.true_counts() == {"held": 0, "unread": 0}

    def test_a_sweep_ends_what_no_batcher_ends(self, shard: ShardBench) -> None:
        """It counted against the bounds for ever, and its tasks had no outcome."""
        shard.submit("a:t0", 2, tasks=["t1", "t2"])
        shard.submit("b:s0", [task_value("r1", "", b"x")])
        shard.take(Budget(1, 1))
        shard.now = START_MS + 605_000
        assert shard.sweep() == (3, 2)
        shard.now = START_MS + 611_000
        assert (shard.sweep(), shard.tasks_ended) == ((0, 0), 2)
        assert shard.client.hmget(shard.shard.task("t2"), "s", "r") == [b"F", b"late: t2"]
        assert 0 < shard.client.pttl(shard.shard.task("t2")) <= 60_000
        assert shard.counts() == shard.true_counts()
        assert shard.true_bytes()["input_bytes"] == 0
        assert (shard.sweep(), shard.tasks_ended) == ((0, 0), 0)

    def test_late_ones_are_ended_behind_others(self, shard: ShardBench) -> None:
        """A sweep looked at the first entry of a stream: one that lived longer, or was strange, hid the others."""

        def short(task: str, owner: str, content: bytes) -> bytes:
            return encode_record(0, task, owner, 1000) + content

        shard.submit("a:t0", tasks=["long"])
        shard.submit("b:t0", [b"garbage"])
        shard.submit("c:t0", tasks=["old"], value_of=lambda task, owner, _: b"\0" * 40)
        for field in ("a:t0", "b:t0", "c:t0"):
            shard.submit(field, 3, tasks=[f"{field}{number}" for number in range(3)], value_of=short)
        shard.now = START_MS + 5000
        shard.submit("a:t0", tasks=["later"], value_of=short)
        shard.now = START_MS + 11_000
        assert (shard.sweep(), shard.tasks_ended) == ((4, 4), 9)
        assert shard.counts() == shard.true_counts()
        shard.now = START_MS + 16_000  # it was not looked at before: it was young
        assert (shard.sweep(), shard.tasks_ended) == ((3, 3), 1)
        shard.now = START_MS + 611_000  # and one that was
        assert (shard.sweep(), shard.tasks_ended) == ((2, 2), 1)

    def test_a_late_one_that_its_gateway_may_still_refuse_has_no_outcome(self, shard: ShardBench) -> None:
        def short(task: str, owner: str, content: bytes) -> bytes:
            return encode_record(0, task, owner, 1000) + content

        shard.submit("a:t0", tasks=["unsure"], value_of=short, unsure_ms=30_000)
        shard.submit("b:t0", tasks=["accepted"], value_of=short)
        shard.now = START_MS + 12_000
        shard.sweep()
        assert shard.tasks_ended == 1
        assert len(shard.ids("a:t0")) == 1 and not shard.ids("b:t0")
        shard.now = START_MS + 45_000  # its gateway died: it counts as accepted
        shard.sweep()
        assert shard.tasks_ended == 1 and not shard.ids("a:t0")

    def test_one_that_is_late_again_after_it_was_looked_at(self, shard: ShardBench) -> None:
        lives = iter([60_000, 1000, 30_000, 90_000])
        shard.submit(
            "a:t0",
            4,
            tasks=["a", "b", "c", "d"],
            value_of=lambda task, owner, _: encode_record(0, task, owner, next(lives)),
        )
        left = []
        for seconds in (11, 39, 40, 70, 100):
            shard.now = START_MS + seconds * 1000
            shard.sweep()
            left.append(len(shard.ids("a:t0")))
        assert left == [3, 3, 2, 1, 0]

    @pytest.mark.parametrize(("lanes", "each", "size"), [(1, 400, 1), (8, 50, 1), (1, 12, 500_000)])
    def test_no_part_of_a_sweep_ends_many(self, shard: ShardBench, lanes: int, each: int, size: int) -> None:
        """All that was late was ended in one call, and everybody else waited for seconds."""
        for lane in range(lanes):
            values, names = [b"x" * size] * each, [f"t{lane}-{number}" for number in range(each)]
            shard.submit(f"{lane:02x}:t0", values, tasks=names)
        shard.now = START_MS + 611_000
        ended, rounds = 0, 0
        while ended < lanes * each:
            shard.sweep()
            rounds += 1
            ended += shard.tasks_ended
            assert max(number for number, _ in shard.sweeps) <= (50 if size == 1 else 2)
            assert any(is_more for _, is_more in shard.sweeps) or ended == lanes * each
        assert rounds <= 12
        assert shard.counts() == shard.true_counts() == {"held": 0, "unread": 0}
        shard.sweep()
        assert not any(is_more for _, is_more in shard.sweeps)

    def test_a_sweep_looks_at_some_streams_at_a_time(self, shard: ShardBench) -> None:
        """A small hash of streams comes whole, however few are asked for."""
        for lane in range(200):
            shard.submit(f"{lane:04x}:s0", lanes_max=1000)
        shard.client.hset(shard.shard.counts, mapping={"held": 3, "unread": 999})
        shard.client.hset(shard.shard.prefix + b"openers", "ff", "bob")
        assert shard.sweep() == (200, 200)
        assert 5 <= len(shard.sweeps) <= 40
        assert shard.counts() == shard.true_counts()
        assert shard.client.hlen(shard.shard.prefix + b"openers") == 200  # also where it takes many parts

    @pytest.mark.parametrize("damage", ["bytes", "type", "id", "counts"])
    def test_a_damaged_task_does_not_stop_the_sweep(self, shard: ShardBench, damage: str) -> None:
        """The script failed each time that it came to it."""
        shard.submit("a:t0", 2, tasks=["%1", "t2"] if damage == "id" else ["t1", "t2"])
        task = shard.shard.task("t1")
        if damage == "bytes":
            shard.client.hset(task, "b", "many")
        elif damage == "type":
            shard.client.delete(task)
            shard.client.set(task, "something else")
        elif damage == "counts":
            shard.client.hset(shard.shard.counts, mapping={"input_bytes:99999999999999": "many", "held": "1.5"})
        shard.now = START_MS + 611_000
        assert (shard.sweep(), shard.tasks_ended) == ((0, 0), 1 if damage == "type" else 2)
        assert shard.counts() == {"held": 0, "unread": 0}

    def test_a_sweep_forgets_lanes_that_do_not_wait(self, shard: ShardBench) -> None:
        openers = shard.shard.prefix + b"openers"
        shard.submit("a:s0", lanes_max=4, owner="ann")
        shard.client.hset(openers, "ff:s0", "bob")
        shard.sweep()
        assert shard.client.hgetall(openers) == {b"a:s0": b"ann"}
        shard.done(*shard.take(PLENTY))
        assert not shard.client.exists(openers)

    def test_a_task_that_is_deleted_is_not_claimed(self, shard: ShardBench) -> None:
        shard.submit("a:t0", tasks=["t1"])
        (entry,) = shard.take(PLENTY)
        assert shard.forget("t1")
        assert shard.renew(entry) == [("a:t0", entry.id)]
        assert shard.claim(PLENTY, lease_ms=0) == []
        assert shard.finish(entry, "t1", b"late") == (False, 0)
        assert shard.counts() == shard.true_counts() == {"held": 0, "unread": 0}

    def test_done_forgets_and_may_be_said_twice(self, shard: ShardBench) -> None:
        shard.submit("a:s0", 3)
        shard.submit("b:s1", 2)
        taken = shard.take(PLENTY)
        assert shard.done(*taken[:4]) == 4
        assert shard.done(*taken, Entry("ff:s0", "1-1", b"")) == 1
        assert shard.counts() == shard.true_counts() == {"held": 0, "unread": 0}
        assert shard.leases("a:s0") == shard.leases("b:s1") == {}

    def test_done_by_whoever_had_it_before(self, shard: ShardBench) -> None:
        shard.submit("a:s0")
        taken = shard.take(PLENTY)
        shard.let_lapse(*taken)
        shard.claim(PLENTY)
        assert shard.done(*taken) == 1
        assert shard.renew(*taken, consumer="b2") == [("a:s0", taken[0].id)]

    def test_done_of_what_redis_forgot_was_taken(self, shard: ShardBench) -> None:
        """A promoted replica may have missed that."""
        (entry_id, _) = shard.submit("a:s0", 2)
        assert shard.done(Entry("a:s0", entry_id, b"")) == 1
        assert shard.counts() == shard.true_counts() == {"held": 1, "unread": 1}


class TestPeek:
    def test_what_waits(self, shard: ShardBench) -> None:
        assert shard.peek() == []
        first = shard.submit("a:s0", 5)
        shard.now = START_MS + 7
        shard.submit("b:s1", 2, model="n")
        later = [("b:s1", "n", START_MS + 7 + 150, 2)]
        assert shard.peek() == [("a:s0", "m", START_MS + 50, 5), *later]
        shard.take(Budget(1, 3))
        shard.cancel(("a:s0", first[3]))
        assert shard.peek() == [("a:s0", "m", START_MS + 50, 1), *later]
        shard.take({"m": PLENTY, "n": PLENTY})
        assert shard.peek() == []


class TestStrangers:
    def test_another_group_hides_nothing(self, shard: ShardBench) -> None:
        ids = shard.submit("a:s0", 3)
        shard.client.xgroup_create(shard.stream("a:s0"), "another", id="$")
        shard.sweep()
        assert shard.counts()["unread"] == 3
        assert ids_of(shard.take(PLENTY)) == ids

    def test_what_is_not_known_any_more_does_not_wait(self, shard: ShardBench) -> None:
        shard.submit("a:s0", 3)
        shard.client.delete(shard.shard.lanes)
        shard.take(PLENTY)
        assert shard.peek("m") == []


class TestSweep:
    def test_empty_streams_go_when_they_are_quiet(self, shard: ShardBench) -> None:
        for field in ("a:s0", "b:s0", "c:s0"):
            shard.submit(field)
        taken = shard.take(PLENTY)
        shard.done(taken[0], taken[1])
        assert shard.sweep() == (1, 0)
        assert shard.fields() == {"a:s0", "b:s0", "c:s0"}
        shard.now = START_MS + 2000
        assert shard.sweep() == (1, 0)
        assert shard.fields() == {"c:s0"}
        assert not shard.client.exists(shard.stream("a:s0"), shard.stream("b:s0"))
        assert shard.renew(taken[2]) == []
        shard.submit("a:s0", 2)
        assert len(shard.take(PLENTY)) == 2

    def test_counts_are_put_right(self, shard: ShardBench) -> None:
        shard.submit("a:s0", 5)
        shard.submit("b:s1", 2)
        shard.take(Budget(1, 3))
        shard.client.hset(shard.shard.counts, mapping={"held": 99, "unread": -7, "letter": 160})
        held, unread = shard.sweep()
        truth = shard.true_counts()
        assert (held, unread) == (truth["held"], truth["unread"]) == (7, 4)
        assert shard.counts() == truth
        assert shard.all_counts()["letter"] == 160

    def test_consumers_that_left_go_but_not_their_leases(self, shard: ShardBench) -> None:
        shard.submit("a:s0", 3)
        (first,) = shard.take(Budget(1, 1), consumer="idle")
        shard.done(first)
        shard.take(Budget(1, 1), consumer="dead")
        time.sleep(0.02)
        assert shard.sweep(consumer_gone_ms=60_000) == (2, 1)
        assert shard.consumers("a:s0") == {"idle", "dead"}
        assert shard.sweep(consumer_gone_ms=10) == (2, 1)
        assert shard.consumers("a:s0") == {"dead"}
        assert len(shard.leases("a:s0")) == 1


class TestBytes:
    def test_what_a_client_calls_itself_counts_as_long_as_it_is_kept(self, shard: ShardBench) -> None:
        """Tiny tasks with long names took many times the memory that was counted."""
        bound: dict[str, Any] = {"stored_bytes_max": 5000, "client": "\N{GRINNING FACE}" * 256}
        assert len(shard.submit("a:t0", 9, tasks=[f"t{number}" for number in range(9)], **bound)) == 3
        assert shard.counted_bytes() == shard.true_bytes()
        for number, entry in enumerate(shard.take(PLENTY)):
            shard.finish(entry, f"t{number}", b"r")
        assert shard.counted_bytes() == shard.true_bytes()
        with pytest.raises(redis.ResponseError, match=r"^STOREFULL"):
            shard.submit("a:t0", tasks=["next"], **bound)
        for number in range(3):
            assert shard.forget(f"t{number}")
        assert shard.counted_bytes() == {"input_bytes": 0, "result_bytes": 0, "letter_bytes": 0}

    def finished(self, shard: ShardBench, *tasks: str, size: int = 1000) -> None:
        """Tasks of which each counts so much with its result."""
        for task in tasks:
            shard.submit("a:t0", tasks=[task])
            (entry,) = shard.take(PLENTY)
            assert shard.finish(entry, task, b"r" * (size - TASK_BYTES)) == (True, 0)

    def kept(self, shard: ShardBench, tasks: str) -> str:
        return "".join(task for task in tasks if shard.client.hexists(shard.shard.task(task), "s"))

    def test_nearly_full_the_oldest_results_that_were_read_go(self, shard: ShardBench) -> None:
        for task in "fabcdegh":
            self.finished(shard, task)
            shard.now = (shard.now or 0) + 60_000
        assert shard.was_read("f", "d") == 2
        assert shard.was_read("d", "b", "unknown") == 3
        assert shard.counted_bytes() == shard.true_bytes()
        bound: dict[str, Any] = {"stored_bytes_max": 10_000}  # nearly full from 8,500 on
        shard.submit("a:t0", tasks=["i"], **bound)
        assert self.kept(shard, "abcdefgh") == "abcdefgh"  # there is room
        shard.submit("a:t0", [b"x" * 900], tasks=["j"], **bound)
        assert self.kept(shard, "abcdefgh") == "abcdegh"
        shard.submit("a:t0", [b"x" * 2000], tasks=["k"], **bound)
        assert self.kept(shard, "abcdefgh") == "acegh"
        assert shard.counted_bytes() == shard.true_bytes()
        shard.submit("a:t0", [b"x" * 900], tasks=["l"], **bound)
        with pytest.raises(redis.ResponseError, match=r"^STOREFULL"):
            shard.submit("a:t0", [b"x" * 3000], tasks=["m"], **bound)
        assert self.kept(shard, "abcdefgh") == "acegh"  # whose results nobody has read
        assert shard.client.zcard(shard.shard.prefix + b"was-read") == 0

    def test_what_is_forgotten_or_over_is_not_looked_at_again(self, shard: ShardBench) -> None:
        self.finished(shard, *"abc")
        assert shard.was_read(*"abc") == 3
        assert shard.forget("a")
        assert {b"b", b"c"} == set(shard.client.zrange(shard.shard.prefix + b"was-read", 0, -1))
        assert 0 < shard.client.pttl(shard.shard.prefix + b"was-read") <= 2 * 600_000
        shard.now = START_MS + 10**7
        assert shard.was_read("a") == 0
        shard.sweep()
        assert shard.counted_bytes() == {"input_bytes": 0, "result_bytes": 0, "letter_bytes": 0}

    def test_a_task_without_a_result_is_not_read(self, shard: ShardBench) -> None:
        shard.submit("a:t0", tasks=["t1"])
        assert shard.was_read("t1") == 0
        assert shard.counted_bytes() == shard.true_bytes()

    def test_a_batcher_that_asks_again_hears_of_a_result_that_has_gone(self, shard: ShardBench) -> None:
        shard.submit("a:t0", tasks=["t1"])
        (entry,) = shard.take(PLENTY)
        shard.finish(entry, "t1", b"r" * 1000, finisher="b1")
        shard.was_read("t1")
        shard.submit("a:t0", tasks=["t2"], stored_bytes_max=1000)
        assert self.kept(shard, "t1") == ""
        assert shard.finish(entry, "t1", b"r" * 1000, finisher="b1") == (True, 0)
        assert shard.finish(entry, "t1", b"r" * 1000, finisher="b2") == (False, 0)

    def test_a_shard_without_tasks_takes_one_of_any_size(self, shard: ShardBench) -> None:
        bound: dict[str, Any] = {"input_bytes_max": 100, "stored_bytes_max": 10**6}
        shard.submit("a:t0", [b"x" * 900], tasks=["t1"], **bound)
        with pytest.raises(redis.ResponseError, match=r"^QUEUEFULL"):
            shard.submit("a:t0", [b"x" * 900], tasks=["t2"], **bound)
        (entry,) = shard.take(PLENTY)
        shard.finish(entry, "t1", b"result")
        shard.submit("a:t0", [b"x" * 900], tasks=["t2"], **bound)

    def test_what_is_over_counts_no_more_after_a_sweep(self, shard: ShardBench) -> None:
        shard.submit("a:t0", 2, tasks=["t1", "t2"], task_ms=5000)
        entry, _ = shard.take(PLENTY)
        shard.finish(entry, "t1", b"result", kept_ms=2000)
        shard.sweep()
        assert shard.counted_bytes() == shard.true_bytes()
        shard.now = START_MS + 4000
        shard.sweep()
        assert {**shard.true_bytes(), "result_bytes": 0} == shard.counted_bytes()
        shard.now = START_MS + 7000
        shard.sweep()
        assert shard.counted_bytes() == {"input_bytes": 0, "result_bytes": 0, "letter_bytes": 0}
        assert not [name for name in shard.all_counts() if ":" in name]
        # It had its time, and nobody took it: nothing is taken away twice.
        shard.forget("t2")
        shard.sweep()
        assert shard.counted_bytes() == {"input_bytes": 0, "result_bytes": 0, "letter_bytes": 0}

    def test_tasks_of_an_older_carpool_count_from_their_results_on(self, shard: ShardBench) -> None:
        shard.submit("a:t0", 2, tasks=["t1", "t2"])
        for task in ("t1", "t2"):
            shard.client.hdel(shard.shard.task(task), "b")
        shard.client.hdel(shard.shard.counts, *(name for name in shard.all_counts() if "bytes" in name))
        entry, _ = shard.take(PLENTY)
        assert shard.finish(entry, "t1", b"result") == (True, 0)
        assert shard.forget("t2")
        assert (
            shard.counted_bytes()
            == shard.true_bytes()
            == {
                "input_bytes": 0,
                "result_bytes": TASK_BYTES + 6,
                "letter_bytes": 0,
            }
        )

    def test_letters_do_not_grow_while_memory_is_short(self, shard: ShardBench) -> None:
        assert shard.bury(10, is_memory_short=1) == 1
        for size in (400, 300):
            shard.bury(size)
        assert shard.bury(500, is_memory_short=1) == 2
        assert [size for _, size in shard.letters()] == [500]

    def test_while_memory_is_short_half_of_the_letters_go_at_each_sweep(self, shard: ShardBench) -> None:
        for _ in range(8):
            shard.bury(100)
        left = []
        for _ in range(5):
            shard.sweep(is_memory_short=1)
            left.append(len(shard.letters()))
        assert left == [4, 2, 1, 0, 0]
        assert shard.letters_dropped == 0

    def test_letters_that_are_dropped_or_replayed_count_no_more(self, shard: ShardBench) -> None:
        for size in (100, 200, 300, 400):
            shard.bury(size)
        (first, _), (second, _), *_ = shard.letters()
        assert shard.drop(first) == 1
        shard.submit("a:t0", tasks=["t1"], letter=second)
        assert shard.counted_bytes()["letter_bytes"] == shard.true_bytes()["letter_bytes"] == 700
        assert shard.drop() == 2
        assert shard.counted_bytes()["letter_bytes"] == 0

    def test_letters_of_an_older_carpool_are_counted_and_bounded(self, shard: ShardBench) -> None:
        for letter in range(1, 11):
            shard.client.zadd(shard.shard.letters, {str(START_MS * 16 + letter): START_MS * 16 + letter})
            shard.client.hset(shard.shard.letter_bodies, str(START_MS * 16 + letter), "x" * 100)
        shard.sweep(bytes_max=450)
        assert (len(shard.letters()), shard.letters_dropped) == (4, 6)
        assert shard.counted_bytes() == shard.true_bytes()

    def test_a_wrong_count_of_letters_heals(self, shard: ShardBench) -> None:
        shard.bury(100)
        shard.sweep()
        shard.client.hset(shard.shard.counts, "letter_bytes", 10**6)
        shard.now = START_MS + 59_000
        shard.sweep()
        assert shard.counted_bytes()["letter_bytes"] == 10**6
        shard.now = START_MS + 60_000
        shard.sweep()
        assert shard.counted_bytes()["letter_bytes"] == 100


async def test_without_memory_nothing_comes_in_and_everything_gets_out(tmp_path: Path) -> None:
    async with running_redis(tmp_path, "--maxmemory-policy", "noeviction") as server:
        shard = ShardBench(server.port)
        shard.submit("a:s0", 12)
        shard.client.zadd(shard.shard.letters, {"16": 16})
        shard.client.hset(shard.shard.letter_bodies, "16", "body")
        old = shard.take(Budget(1, 4))
        shard.client.config_set("maxmemory", 1)
        before = shard.all_keys()
        for field in ("a:s0", "a:s1", "b:s0"):
            with pytest.raises(redis.OutOfMemoryError):
                shard.submit(field, 3)
        with pytest.raises(redis.OutOfMemoryError):
            shard.submit("a:t0", tasks=["t1"], lanes_max=5)
        assert shard.all_keys() == before

        new = shard.take(Budget(1, 4), consumer="new")
        assert len(new) == 4
        assert shard.renew(*old) == []
        shard.release(*old)
        assert shard.claim(PLENTY) == old
        assert shard.cancel(("a:s0", shard.ids("a:s0")[-1])) == [1]
        assert shard.done(*old, *new) == 8
        assert shard.counts() == shard.true_counts() == {"held": 3, "unread": 3}
        assert shard.sweep() == (3, 3)
        assert shard.client.zcard(shard.shard.letters) == 0
        shard.client.config_set("maxmemory", 0)
        shard.submit("b:s0", 1)
        shard.close()
