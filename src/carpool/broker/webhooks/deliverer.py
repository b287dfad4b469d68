"""Sends the outcomes of tasks to the URLs that their submitters named, until they are delivered or given up.

1. At least once: a webhook leaves the outbox when its receiver has said 2xx, or when it is given up. A process that
   sends it again, after a crash or a lost answer, sends the same `webhook-id` and body: both come from what is kept
   with the outcome. Where a failover has lost an outcome, and the task ran again, that is another webhook.
2. What is sent at once is bounded in number, in bytes and for each host. The outbox passes over a host that has its
   share, and gives what waits behind it: a receiver that is slow or dead holds up its own webhooks only.
3. A process that leaves finishes what it is sending, for a moment; the rest is due again for the next deliverer.
4. No URL and no payload reaches a log: ids and hosts do.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from carpool.broker.webhooks.rules import Answered, Callbacks, Verdict, signed_headers, verdict
from carpool.core.errors import CallbackDenied, CarpoolError
from carpool.core.task import StoredTask
from carpool.core.timers import Every
from carpool.core.webhook import DueWebhook, Outbox, host_of

if TYPE_CHECKING:  # slow to import, and most send no webhooks
    from carpool.broker.webhooks.sender import Sender

logger = logging.getLogger("carpool")

# How often the deliverer looks for due webhooks; `notify` tells it of new ones, where the outbox is in this process.
LOOK_S = 1.0
# Beyond the time that an attempt may take.
LEASE_SPARE_S = 10.0
IN_FLIGHT_BYTES_MAX = 64 * 1024 * 1024
CLOSE_PATIENCE_S = 2.0
# To sign a longer body would hold up the loop: a thread does it.
SIGNED_HERE_BYTES_MAX = 1024 * 1024


class DeliveryTerms(msgspec.Struct, frozen=True):
    """How hard it is tried. A receiver that is down for a night gets all; one that is slow holds up its own only."""

    timeout_s: float
    backoff_s: float
    # At once, in all and to one host.
    in_flight_max: int = 64
    host_in_flight_max: int = 8
    # How long after the outcome of its task a webhook is sent again.
    retry_for_s: float = 86400.0


class Deliverer:
    """Takes what is due from an outbox and sends it."""

    def __init__(
        self,
        outbox: Outbox,
        sender: "Sender",
        callbacks: Callbacks,
        secrets: Sequence[bytes],
        form: Callable[[StoredTask], bytes],
        terms: DeliveryTerms,
    ) -> None:
        self.outbox = outbox
        self._sender = sender
        self._callbacks = callbacks
        # Signs with all of them; may be changed at any time.
        self.secrets = tuple(secrets)
        # The payload of an outcome.
        self._form = form
        self._terms = terms
        # By host, how many are being sent to it.
        self._busy: Counter[str] = Counter()
        self._in_flight: dict[asyncio.Task[None], DueWebhook] = {}
        self._in_flight_bytes = 0
        self._claiming: asyncio.Task[None] | None = None
        self._is_notified = False
        self._is_closing = False
        self._looks = Every(LOOK_S, self.notify)
        # What became of attempts.
        self.results = Counter(delivered=0, failed=0, given_up=0)

    def __repr__(self) -> str:
        return f"<Deliverer in_flight={len(self._in_flight)} {dict(self.results)}>"

    def start(self) -> None:
        """Look now, and from now on."""
        self._looks.start_now()

    def notify(self) -> None:
        """Something may be due."""
        self._is_notified = True
        if self._claiming is None and not self._is_closing and self.outbox.waiting()[0]:
            self._claiming = asyncio.get_running_loop().create_task(self._claim())
            self._claiming.add_done_callback(self._claimed)

    async def close(self) -> None:
        """Send no more; what is under way is given a moment, and else is due again."""
        self._is_closing = True
        self._looks.stop()
        if self._claiming is not None:
            await asyncio.wait([self._claiming])
        if self._in_flight:
            _, late = await asyncio.wait(list(self._in_flight), timeout=CLOSE_PATIENCE_S)
            for each in late:
                each.cancel()
            if late:
                await asyncio.wait(late)
        await self._sender.close()

    async def _claim(self) -> None:
        terms = self._terms
        while (room := terms.in_flight_max - len(self._in_flight)) > 0 and not self._is_closing:
            self._is_notified = False
            lease_s = terms.timeout_s + LEASE_SPARE_S
            due = await self.outbox.claim(room, lease_s, terms.host_in_flight_max, self._busy)
            for webhook in due:
                if self._in_flight and self._in_flight_bytes + webhook.size > IN_FLIGHT_BYTES_MAX:
                    await self.outbox.put_back(webhook, LOOK_S, None)
                else:
                    self._begin(webhook)
            if not due and not self._is_notified:
                return

    def _claimed(self, claiming: asyncio.Task[None]) -> None:
        self._claiming = None
        failure = None if claiming.cancelled() else claiming.exception()
        if isinstance(failure, CarpoolError):
            logger.debug("webhooks cannot be looked at: %s", failure.detail)  # the disk, or Redis, is away
        elif failure is not None:
            logger.error("webhooks could not be looked at", exc_info=failure)

    def _begin(self, webhook: DueWebhook) -> None:
        self._busy[host_of(webhook.url)] += 1
        self._in_flight_bytes += webhook.size
        task = asyncio.get_running_loop().create_task(self._deliver(webhook))
        self._in_flight[task] = webhook
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        webhook = self._in_flight.pop(task)
        self._in_flight_bytes -= webhook.size
        host = host_of(webhook.url)
        self._busy[host] -= 1
        if not self._busy[host]:
            del self._busy[host]
        if not task.cancelled() and (failure := task.exception()) is not None and not isinstance(failure, CarpoolError):
            logger.error("a webhook could not be sent", exc_info=failure)  # its lease ends, and it is due again
        self.notify()

    async def _deliver(self, webhook: DueWebhook) -> None:
        try:
            found = await self._judge(webhook)
        except asyncio.CancelledError:  # this process leaves
            await self.outbox.put_back(webhook, 0.0, None)
            raise
        if found is None:
            return
        if found.what == "failed":
            await self.outbox.put_back(webhook, found.pause_s, found.failure)
        else:
            await self.outbox.remove(webhook)
        self.results[found.what] += 1
        if found.what == "given_up":
            facts = {"task_id": webhook.id, "host": host_of(webhook.url), "attempts": webhook.attempts + 1}
            logger.warning("a webhook was given up: %s", found.failure, extra={"fields": facts})

    async def _judge(self, webhook: DueWebhook) -> Verdict | None:
        """Send it; None if there is nothing to send any more."""
        task = await self.outbox.read(webhook)
        if task is None:
            await self.outbox.remove(webhook)
            return None
        try:
            url = self._callbacks.check(webhook.url)
            body = self._form(task)
            headers = await self._sign(webhook_id_of(task), body)
            answered = await self._sender.send(url, headers | {"Content-Type": "application/json"}, body)
        except CallbackDenied:  # the list has changed since it was accepted
            answered = Answered(0, "the host is not on the list any more")
        except Exception:  # a defect: it must neither be lost nor be tried without pause
            logger.exception("a webhook could not be sent")
            answered = Answered(0, "the gateway failed on it")
        terms, luck = self._terms, random.random()
        return verdict(
            answered,
            webhook.attempts,
            webhook.age_s,
            luck,
            backoff_s=terms.backoff_s,
            retry_for_s=terms.retry_for_s,
        )

    async def _sign(self, webhook_id: str, body: bytes) -> dict[str, str]:
        what = (webhook_id, int(time.time()), body, self.secrets)
        if len(body) <= SIGNED_HERE_BYTES_MAX:
            return signed_headers(*what)
        return await asyncio.to_thread(signed_headers, *what)


def webhook_id_of(task: StoredTask) -> str:
    """The id of the message with this outcome: the task's, and when the outcome came."""
    return f"{task.id}-{round(task.timestamp_wall * 1000)}"
