"""Webhooks: outcomes of tasks that are sent to a URL which their submitter named."""

from collections.abc import Mapping
from typing import Annotated, Protocol

import msgspec

from carpool.core.task import StoredTask

URL_CHARS_MAX = 2048
# What each counts among the bytes that wait, beside its payload.
WEBHOOK_BYTES = 512
# Bytes of outcomes that wait to be sent; beyond, tasks with a `callback_url` are refused. Results are kept besides.
WEBHOOK_BYTES_MAX = 256 * 1024 * 1024


class DueWebhook(msgspec.Struct, frozen=True, gc=False):
    """A webhook that is to be sent now; no other process sends it for a while."""

    # The task's.
    id: str
    url: str
    # How often it was sent before.
    attempts: int
    # Since the task had its outcome.
    age_s: float
    # Bytes of the output or the error.
    size: int


class WebhookState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A webhook that waits, as operators see it."""

    task_id: str
    url: Annotated[str, msgspec.Meta(description="without what stands behind `?`")]
    attempts: int
    failure: Annotated[str, msgspec.Meta(description="of the last attempt; empty before that")]
    age_s: Annotated[float, msgspec.Meta(description="since the task had its outcome")]
    due_in_s: Annotated[float, msgspec.Meta(description="until it is sent again; less than 0: it waits for its turn")]
    size: Annotated[int, msgspec.Meta(description="bytes of the output or the error")]


class Outbox(Protocol):
    """Where outcomes wait that are to be sent. Whatever fails is raised as an error of the tree."""

    def waiting(self) -> tuple[int, int]:
        """How many wait, and what they count in bytes."""

    async def claim(self, limit: int, lease_s: float, host_max: int, busy: Mapping[str, int]) -> list[DueWebhook]:
        """Some that are due, the oldest of each host first: no other caller gets them before the lease is over.

        For each host at most `host_max`, minus those it is `busy` with; webhooks behind these are found too.
        """

    async def read(self, webhook: DueWebhook) -> StoredTask | None:
        """The outcome; None if it is gone."""

    async def remove(self, webhook: DueWebhook) -> None:
        """The webhook was delivered, or given up."""

    async def put_back(self, webhook: DueWebhook, in_s: float, failure: str | None) -> None:
        """Let it be due again; without a failure it was not sent, and that is no attempt."""

    async def page(self, limit: int) -> list[WebhookState]:
        """Some of the webhooks that wait, the next first."""

    async def retry(self, task_id: str | None) -> int:
        """Let one webhook, or all, be due now, but for those that are being sent; how many there were."""


def host_of(url: str) -> str:
    """The host that a URL that was checked leads to, with the port if it names one."""
    return url.split("/", 3)[2].partition("?")[0].lower()


def shown_url(url: str) -> str:
    """What may be shown of a URL: its query may have a secret in it."""
    return url.partition("?")[0]
