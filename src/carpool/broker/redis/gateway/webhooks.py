"""Webhooks that wait in Redis, with the keys of their tasks (core.webhook.Outbox): any gateway sends any of them.

1. A webhook comes into Redis in the step that gives its task its outcome, whichever process takes it.
2. A gateway claims what is due for a while. When it dies, the claim ends, and another gateway sends it.
3. Which shards have some is what was last counted, at most a second ago.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping

from carpool.broker.redis.client.link import RedisFailure
from carpool.broker.redis.gateway.dead_letters import answered
from carpool.broker.redis.gateway.tasks import names_a_shard
from carpool.broker.redis.keys import Shard
from carpool.broker.redis.redis_ops import RedisOps
from carpool.core.task import StoredTask
from carpool.core.webhook import DueWebhook, WebhookState, host_of

# A script holds up Redis's other clients.
CLAIMED_A_CALL_MAX = 64
RETRIED_A_CALL_MAX = 500


class RedisOutbox:
    """The webhooks of one deployment."""

    def __init__(
        self, steps: RedisOps, waiting: Callable[[], tuple[int, int]], shards_with_some: Callable[[], list[Shard]]
    ) -> None:
        self._steps = steps
        self._keys = steps.keys
        # How many wait, and what they count in bytes; and where. As it was last counted.
        self.waiting = waiting
        self._shards_with_some = shards_with_some

    async def claim(self, limit: int, lease_s: float, host_max: int, busy: Mapping[str, int]) -> list[DueWebhook]:
        """Some that are due, the oldest of each host and shard first."""
        busy = Counter(busy)
        found: list[DueWebhook] = []
        shards = self._shards_with_some()
        random.shuffle(shards)  # so that the first ones do not take all the room
        for shard in shards:
            wanted = min(limit - len(found), CLAIMED_A_CALL_MAX)
            if wanted > 0 and self._steps.nodes.is_up(shard.slot):
                try:
                    claimed = await self._steps.claim_webhooks(shard, wanted, round(lease_s * 1000), host_max, busy)
                except RedisFailure:
                    continue  # what it claimed, if it did, is due again soon; the others have theirs
                busy.update(host_of(webhook.url) for webhook in claimed)
                found += claimed
        return found

    async def read(self, webhook: DueWebhook) -> StoredTask | None:
        """The outcome; None if it is gone."""
        return await answered(self._steps.read_webhook(self._shard(webhook.id), webhook.id))

    async def remove(self, webhook: DueWebhook) -> None:
        """It was delivered, or given up."""
        await answered(self._steps.end_webhook(self._shard(webhook.id), webhook))

    async def put_back(self, webhook: DueWebhook, in_s: float, failure: str | None) -> None:
        """Let it be due again; without a failure it was not sent, and that is no attempt."""
        ended = self._steps.end_webhook(self._shard(webhook.id), webhook, round(in_s * 1000), failure or "")
        await answered(ended)

    async def page(self, limit: int) -> list[WebhookState]:
        """Some of the webhooks that wait, the next first."""
        found: list[WebhookState] = []
        for shard in self._keys.shards:
            found += await answered(self._steps.webhooks(shard, limit))
        return sorted(found, key=lambda webhook: webhook.due_in_s)[:limit]

    async def retry(self, task_id: str | None) -> int:
        """Let one webhook, or all, be due now, but for those being sent; how many there were."""
        if task_id is not None:
            if not names_a_shard(task_id):
                return 0
            return await answered(self._steps.retry_webhook(self._shard(task_id), task_id))
        total = 0
        for shard in self._keys.shards:
            for host in await answered(self._steps.webhook_hosts(shard)):
                total += await self._retry_host(shard, host)
        return total

    async def _retry_host(self, shard: Shard, host: bytes) -> int:
        total = passed = 0
        while True:
            retried, being_sent = await answered(self._steps.retry_webhooks(shard, host, passed, RETRIED_A_CALL_MAX))
            total += retried
            passed += being_sent
            if retried + being_sent < RETRIED_A_CALL_MAX:
                return total

    def _shard(self, task_id: str) -> Shard:
        return self._keys.shard_of_task(task_id)
