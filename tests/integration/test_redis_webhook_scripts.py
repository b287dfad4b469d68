"""What the scripts of webhooks promise, on a real Redis."""

from collections.abc import Iterator
from typing import Any

import pytest

from carpool.broker.redis.scripts import ANSWERED, HOOK_CLAIM, HOOK_END, HOOK_LIST, HOOK_RETRY, LOOK
from carpool.core.webhook import WEBHOOK_BYTES
from support.redis_servers import RedisServer
from support.redis_shard import START_MS, Budget, ShardBench

PLENTY = Budget(batches=100, largest=64)
URL = "https://a.example/x?y=1"


class HookBench(ShardBench):
    """One shard, with webhooks."""

    def finish_all(self, *urls: str, result: bytes = b'"out"') -> list[str]:
        """Tasks with these callbacks, which have their outcomes; their ids."""
        ids = []
        for number, url in enumerate(urls):
            task = f"{START_MS:x}{number:04x}{len(self.hashes()):04x}"
            self.submit("a:t0", tasks=[task], url=url)
            (entry,) = self.take(PLENTY)
            assert self.finish(entry, task, result) == (True, 0)
            ids.append(task)
        return ids

    def claim_hooks(self, most: int = 99, host_max: int = 99, **busy: int) -> list[str]:
        """Take some that are due; their tasks."""
        pairs = [part for host, number in busy.items() for part in (host.replace("_", "."), number)]
        return [row[0].decode() for row in self.run(HOOK_CLAIM, most, host_max, 10_000, self.now or "", *pairs)]

    def end(self, task: str, in_ms: int | str = "", failure: str = "", url: str = URL) -> None:
        self.run(HOOK_END, task, url, in_ms, failure, self.now or "")

    def retry(self, task: str = "", host: str = "a.example") -> list[int]:
        found: list[int] = self.run(HOOK_RETRY, task, host, 0, 100, self.now or "")
        return found

    def hashes(self) -> list[bytes]:
        return list(self.client.scan_iter(match=self.shard.hook("*"), count=1000))

    def counted(self) -> tuple[int, int]:
        """As the shard counts them; and that it is so."""
        counts = self.all_counts()
        sizes: list[Any] = [self.client.hstrlen(name, "r") for name in self.hashes()]
        found = counts.get("hooks", 0), counts.get("hook_bytes", 0)
        assert found == (len(sizes), sum(sizes) + WEBHOOK_BYTES * len(sizes))
        return found


@pytest.fixture
def shard(redis_server: RedisServer) -> Iterator[HookBench]:
    bench = HookBench(redis_server.port)
    yield bench
    bench.close()


def test_whoever_gives_a_task_its_outcome_writes_its_webhook(shard: HookBench) -> None:
    finished, *_ = shard.finish_all(URL, "")
    shard.submit("a:t0", tasks=["late"], url=URL)
    shard.submit("a:t0", tasks=["swept"], url=URL)
    shard.run(ANSWERED, "answered", "owner", "", '"kept"', 600_000, 10**9, shard.now or "", URL, 0)
    assert shard.counted()[0] == 2
    assert shard.counted_bytes() == shard.true_bytes()
    shard.now = START_MS + 700_000
    shard.run(LOOK, "late", "", shard.now, "too late", 60_000, 0)
    assert shard.counted()[0] == 3
    shard.sweep()
    assert shard.counted()[0] == 4
    rows = shard.run(HOOK_CLAIM, 99, 99, 10_000, shard.now)
    assert {row[0].decode(): row[1].decode() for row in rows} == dict.fromkeys(
        (finished, "answered", "late", "swept"), URL
    )
    assert shard.forget("late")  # the result may go: the webhook stays
    assert shard.counted()[0] == 4
    shard.submit("a:t0", tasks=["deleted"], url=URL)
    assert shard.forget("deleted")  # without an outcome there is none
    assert shard.counted()[0] == 4


def test_one_that_is_claimed_is_due_again_when_the_lease_is_over(shard: HookBench) -> None:
    tasks = shard.finish_all(URL, URL, URL)
    now = shard.now or 0
    assert sorted(shard.claim_hooks(2) + shard.claim_hooks(2)) == sorted(tasks)
    assert shard.claim_hooks() == []
    shard.now = now + 10_001
    assert sorted(shard.claim_hooks()) == sorted(tasks)


def test_no_host_holds_up_another(shard: HookBench) -> None:
    of_a = shard.finish_all(*["https://a.example/"] * 5)
    of_b = shard.finish_all(*["http://B.example:80?x"] * 2)
    assert len(shard.claim_hooks(1)) == 1
    assert set(shard.claim_hooks(host_max=2, a_example=2)) == set(of_b)
    assert len(shard.claim_hooks(host_max=3, a_example=1)) == 2
    assert set(shard.claim_hooks(host_max=9)) < set(of_a)
    assert shard.claim_hooks() == []


def test_put_back_retried_and_removed(shard: HookBench) -> None:
    first, second = shard.finish_all(URL, URL)
    now = shard.now or 0
    assert shard.retry() == [0, 0]  # they are due
    shard.claim_hooks()
    assert shard.retry() == [0, 2] and shard.retry(first) == [0, 1]  # they are being sent
    shard.end(first, 60_000, "status 500")
    shard.end(second, 60_000)
    assert shard.claim_hooks() == []
    listed = {row[0].decode(): (int(row[2]), row[3], int(row[5])) for row in shard.run(HOOK_LIST, 99, now)}
    assert listed == {first: (1, b"status 500", 60_000), second: (0, b"", 60_000)}
    assert shard.retry("another") == [0, 0]
    assert shard.retry(first) == [1, 0]
    assert shard.claim_hooks() == [first]
    shard.end(first)
    shard.end(first)
    assert shard.counted() == (1, len(b'"out"') + WEBHOOK_BYTES)
    assert shard.retry() == [1, 0]
    assert shard.claim_hooks() == [second]
    shard.end(second)
    assert shard.counted() == (0, 0)
    assert not [name for name in shard.all_keys() if b"hook" in name]


def test_what_expired_or_was_damaged_is_forgotten(shard: HookBench) -> None:
    first, second = shard.finish_all(URL, URL)
    shard.client.delete(shard.shard.hook(first))
    assert shard.claim_hooks() == [second]
    shard.end(second)
    assert shard.claim_hooks() == []
    assert shard.counted() == (0, 0)  # a count that was wrong is right again
