"""Webhooks, where hosts are named that they may go to."""

import logging
from collections.abc import Callable

from carpool.broker.webhooks.deliverer import Deliverer, DeliveryTerms
from carpool.broker.webhooks.rules import Callbacks, allowed_host, secret_of
from carpool.composition.runtime import Runtime
from carpool.core.snapshot import WebhookNumbers
from carpool.core.webhook import Outbox
from carpool.face.http.gateway import no_callbacks, task_json
from carpool.settings import Settings
from carpool.settings.schema import WebhookSettings

logger = logging.getLogger("carpool")

# The longest time for one attempt; and the longest first pause before the next, which doubles, up to an hour.
TIMEOUT_S, BACKOFF_S = 10.0, 5.0


def make_callbacks(webhooks: WebhookSettings) -> Callbacks:
    """Where webhooks may go."""
    hosts = [allowed_host(host) for host in webhooks.hosts]
    return Callbacks(hosts, allow_http=webhooks.allow_http, allow_private=webhooks.allow_private)


def callback_check(webhooks: WebhookSettings) -> Callable[[str], str]:
    """What a face does with the `callback_url` of a task."""
    if not webhooks.hosts:
        return no_callbacks
    callbacks = make_callbacks(webhooks)
    return lambda text: str(callbacks.check(text))


def start_webhooks(runtime: Runtime, outbox: Outbox) -> Deliverer | None:
    """Send what is due, from now until this process leaves; None where no host is allowed."""
    webhooks = runtime.settings.webhooks
    if not webhooks.hosts:
        if waiting := outbox.waiting()[0]:
            logger.warning("%d webhooks wait and are not sent: webhooks.hosts is empty", waiting)
        return None
    # Here, so that a process without webhooks does not pay for it.
    from carpool.broker.webhooks.sender import Sender

    callbacks = make_callbacks(webhooks)
    deliverer = Deliverer(
        outbox,
        Sender(callbacks.is_allowed, TIMEOUT_S),
        callbacks,
        [secret_of(secret) for secret in webhooks.secrets],
        task_json,
        DeliveryTerms(timeout_s=TIMEOUT_S, backoff_s=BACKOFF_S),
    )

    def prepare_reload(settings: Settings) -> Callable[[], None]:
        secrets = tuple(secret_of(secret) for secret in settings.webhooks.secrets)

        def change() -> None:
            deliverer.secrets = secrets or deliverer.secrets

        return change

    runtime.reloads.append(prepare_reload)
    runtime.opened.push_async_callback(deliverer.close)
    deliverer.start()
    return deliverer


def describe_webhooks(deliverer: Deliverer | None) -> tuple[WebhookNumbers, ...]:
    """What `/metrics` shows of them."""
    if deliverer is None:
        return ()
    count, size = deliverer.outbox.waiting()
    return (WebhookNumbers(webhooks_waiting=count, webhook_bytes=size, webhook_attempts=deliverer.results),)
