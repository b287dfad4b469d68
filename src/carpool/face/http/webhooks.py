"""The operators' routes for webhooks: list those that wait, let them be sent now."""

from typing import Annotated

import msgspec
from msgspec import Meta

from carpool.core.errors import NotFound
from carpool.core.snapshot import Page
from carpool.core.webhook import Outbox, WebhookState
from carpool.face.http.dead_letters import StatusAndBody, awaited, whole_number
from carpool.face.http.exchange import Exchange
from carpool.face.http.gateway import possible_task_id
from carpool.face.http.router import Router, query_of

WEBHOOKS_LISTED = 100
WEBHOOKS_LISTED_MAX = 1000


class WebhooksListed(Page, frozen=True):
    """Some webhooks that wait, and how many there are."""

    webhooks: list[WebhookState]
    total: int
    bytes: Annotated[int, Meta(description="what all of them count; 256 MiB is the bound")]


class WebhooksRetried(Page, frozen=True):
    """How many are due now."""

    retried: int


class WebhookRoutes:
    """Serves webhooks on the admin port."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def add_to(self, router: Router) -> None:
        """Serve the paths of webhooks."""
        router.add(b"GET", b"/internal/webhooks", awaited(self.page))
        router.add(b"POST", b"/internal/webhooks/retry", awaited(self.retry_all))
        router.add(b"POST", b"/internal/webhooks/*/retry", awaited(self.retry))

    async def page(self, exchange: Exchange, _: str) -> StatusAndBody:
        """`GET /internal/webhooks`: those that are due next."""
        text = query_of(exchange).get("limit", str(WEBHOOKS_LISTED))
        found = await self._outbox.page(whole_number(text, "limit", 1, WEBHOOKS_LISTED_MAX))
        return 200, msgspec.json.encode(WebhooksListed(found, *self._outbox.waiting()))

    async def retry_all(self, exchange: Exchange, _: str) -> StatusAndBody:
        """`POST /internal/webhooks/retry`: all are due now."""
        return 202, msgspec.json.encode(WebhooksRetried(await self._outbox.retry(None)))

    async def retry(self, exchange: Exchange, task_id: str) -> StatusAndBody:
        """`POST /internal/webhooks/{task_id}/retry`: one is due now."""
        if not await self._outbox.retry(possible_task_id(task_id)):
            raise NotFound("there is no such webhook; it was delivered, given up, or is being sent now")
        return 202, msgspec.json.encode(WebhooksRetried(1))
