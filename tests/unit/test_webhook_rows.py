"""Webhooks in the journal's file: who is claimed, and when again."""

import random
from pathlib import Path

import pytest

from carpool.broker.journal_records import TaskRecord, TaskResult
from carpool.broker.journal_store import Store
from carpool.core.webhook import WEBHOOK_BYTES, DueWebhook


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "journal.db")


def finish(store: Store, *urls: str, now: float = 0.0) -> list[str]:
    """Tasks with these callbacks, and their outcomes; the ids."""
    ids = [f"{random.getrandbits(64):x}" for _ in urls]
    with store.transaction(now):
        records = zip(ids, urls, strict=True)
        store.append([TaskRecord(each, "o", "m", b"", b"in", 0, 1.0, 600.0, "me", url) for each, url in records])
    with store.transaction(now):
        results = [(each, TaskResult("SUCCESS", b'"out"', None, 5.0), None) for each in ids]
        assert all(store.finish(results, 600.0, 600.0, now))
    return ids


def claim(
    store: Store, limit: int, now: float, host_max: int = 9, busy: dict[str, int] | None = None
) -> list[DueWebhook]:
    with store.transaction(now):
        return store.webhooks.claim(limit, 10.0, host_max, busy or {}, now)


def test_each_host_has_its_turn(store: Store) -> None:
    finish(store, *["https://a/"] * 5, *["https://b/x?y"] * 5, *["https://c:8443"] * 5)
    for limit in (1, 2, 3, 4, 5):
        claimed = claim(store, limit, 1.0, host_max=1, busy={"b": 1})
        assert len(claimed) == min(limit, 2)
        assert len({webhook.url for webhook in claimed}) == len(claimed)
    assert {webhook.url for webhook in claim(store, 99, 1.0, busy={"a": 9})} == {"https://b/x?y", "https://c:8443"}


def test_all_are_claimed_once_until_the_lease_is_over(store: Store) -> None:
    ids = finish(store, *(f"https://host{number % 7}/" for number in range(50)))
    claimed: list[str] = []
    while found := claim(store, 3, 1.0, host_max=2):
        claimed += [webhook.id for webhook in found]
    assert sorted(claimed) == sorted(ids)
    assert len(claim(store, 99, 11.0, host_max=99)) == 50
    assert claim(store, 99, 12.0) == []


def test_put_back_removed_and_counted(store: Store) -> None:
    finish(store, "https://a/", "https://a/", "", now=1.0)
    size = len(b'"out"') + WEBHOOK_BYTES
    assert (store.counts.webhooks, store.counts.webhook_bytes) == (2, 2 * size)
    first, second = claim(store, 9, 2.0)
    with store.transaction(2.0):
        store.webhooks.put_back(first.id, 5.0, "status 500")
        store.webhooks.remove(second.id)
        store.webhooks.remove(second.id)
    assert (store.counts.webhooks, store.counts.webhook_bytes) == (1, size)
    assert claim(store, 9, 4.0) == []
    (again,) = claim(store, 9, 6.0)
    assert (again.id, again.attempts, again.age_s) == (first.id, 1, 5.0)
    with store.transaction(6.0):
        assert store.webhooks.retry(None) == 0  # it is being sent
        store.webhooks.put_back(first.id, 500.0, None)
        (shown,) = store.webhooks.page(9, 10.0)
        assert (shown.attempts, shown.failure, shown.due_in_s) == (1, "status 500", 490.0)
        assert store.webhooks.retry("another") == 0
        assert store.webhooks.retry(first.id) == 1
    assert len(claim(store, 9, 10.0)) == 1
    outcome = store.webhooks.read(first.id)
    assert outcome is not None and (outcome.status, outcome.output) == ("SUCCESS", b'"out"')


def test_a_new_process_has_all_of_them_at_once(store: Store, tmp_path: Path) -> None:
    finish(store, "https://a/", "https://b/")
    assert len(claim(store, 9, 1.0)) == 2
    counts = store.counts
    store.close(2.0)
    again = Store(tmp_path / "journal.db")
    assert (again.counts.webhooks, again.counts.webhook_bytes) == (counts.webhooks, counts.webhook_bytes)
    assert len(claim(again, 9, 2.0)) == 2
    again.close(3.0)
