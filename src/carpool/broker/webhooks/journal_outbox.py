"""Webhooks that wait in the journal (core.webhook.Outbox)."""

from collections.abc import Callable, Mapping
from typing import Any

from carpool.broker.journal import Journal
from carpool.broker.journal_webhooks import WebhookRows
from carpool.broker.replays import answer_of
from carpool.core.task import StoredTask
from carpool.core.webhook import DueWebhook, WebhookState


class JournalOutbox:
    """The webhooks of one journal; its only deliverer is in the same process."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def waiting(self) -> tuple[int, int]:
        """How many wait, and what they count in bytes."""
        return self._journal.counts.webhooks, self._journal.counts.webhook_bytes

    async def claim(self, limit: int, lease_s: float, host_max: int, busy: Mapping[str, int]) -> list[DueWebhook]:
        """Some that are due, the oldest of each host first: no other claim gets them before the lease is over."""
        busy = dict(busy)  # another thread reads it
        found: list[DueWebhook] = await self._do(lambda rows, now: rows.claim(limit, lease_s, host_max, busy, now))
        return found

    async def read(self, webhook: DueWebhook) -> StoredTask | None:
        """The outcome; None if it is gone."""
        found: StoredTask | None = await self._do(lambda rows, _: rows.read(webhook.id))
        return found

    async def remove(self, webhook: DueWebhook) -> None:
        """It was delivered, or given up."""
        await self._do(lambda rows, _: rows.remove(webhook.id))

    async def put_back(self, webhook: DueWebhook, in_s: float, failure: str | None) -> None:
        """Let it be due again; without a failure it was not sent, and that is no attempt."""
        await self._do(lambda rows, now: rows.put_back(webhook.id, now + in_s, failure))

    async def page(self, limit: int) -> list[WebhookState]:
        """Some of the webhooks that wait, the next first."""
        found: list[WebhookState] = await self._do(lambda rows, now: rows.page(limit, now))
        return found

    async def retry(self, task_id: str | None) -> int:
        """Let one webhook, or all, be due now, but for those being sent; how many there were."""
        count: int = await self._do(lambda rows, _: rows.retry(task_id))
        return count

    async def _do(self, work: Callable[[WebhookRows, float], Any]) -> Any:
        return await answer_of(lambda done: self._journal.on_webhooks(work, done))
