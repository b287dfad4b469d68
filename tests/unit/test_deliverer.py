"""Who is sent what, and what becomes of it, with an outbox and a way out that do as they are told."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
from yarl import URL

from carpool.broker.webhooks.deliverer import IN_FLIGHT_BYTES_MAX, Deliverer, DeliveryTerms
from carpool.broker.webhooks.rules import Answered, Callbacks, allowed_host
from carpool.core.errors import BrokerDown
from carpool.core.task import StoredTask
from carpool.core.webhook import DueWebhook, WebhookState
from support.processes import until

TERMS = DeliveryTerms(timeout_s=1.0, in_flight_max=4, host_in_flight_max=2, backoff_s=1.0, retry_for_s=100.0)


class Box:
    """An outbox that gives what it is told to; it notes what it is told."""

    def __init__(self, *due: DueWebhook) -> None:
        self.due = list(due)
        self.removed: list[str] = []
        self.back: list[tuple[str, str | None]] = []
        self.is_away = False

    def waiting(self) -> tuple[int, int]:
        return 1, 1

    async def claim(self, limit: int, lease_s: float, host_max: int, busy: Mapping[str, int]) -> list[DueWebhook]:
        if self.is_away:
            raise BrokerDown("away")
        given, self.due = self.due[:limit], self.due[limit:]
        return given

    async def read(self, webhook: DueWebhook) -> StoredTask | None:
        return None if webhook.id == "gone" else StoredTask(webhook.id, "", "SUCCESS", b"1", None, 0.0)

    async def remove(self, webhook: DueWebhook) -> None:
        self.removed.append(webhook.id)

    async def put_back(self, webhook: DueWebhook, in_s: float, failure: str | None) -> None:
        self.back.append((webhook.id, failure))

    async def page(self, limit: int) -> list[WebhookState]:
        return []

    async def retry(self, task_id: str | None) -> int:
        return 0


class Way:
    """A way out that answers as it is told."""

    def __init__(self, status: int = 200) -> None:
        self._answer = Answered(status)
        self.sent: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def send(self, url: URL, headers: dict[str, str], body: bytes) -> Answered:
        self.sent.append(headers["webhook-id"])
        await self.gate.wait()
        return self._answer

    async def close(self) -> None:
        pass


def deliverer(box: Box, way: Way, form: Callable[[StoredTask], bytes] = lambda task: b"{}") -> Deliverer:
    callbacks = Callbacks([allowed_host("a.example")])
    return Deliverer(box, way, callbacks, [b"s" * 24], form, TERMS)  # type: ignore[arg-type]  # a way for tests


def due(name: str, url: str = "https://a.example/", age_s: float = 0.0, size: int = 1) -> DueWebhook:
    return DueWebhook(name, url, 0, age_s, size)


async def test_what_is_delivered_given_up_or_gone_is_removed() -> None:
    box = Box(due("new"), due("gone"))
    made = deliverer(box, Way())
    made.start()
    await until(lambda: sorted(box.removed) == ["gone", "new"])
    assert made.results == {"delivered": 1, "failed": 0, "given_up": 0}
    await made.close()
    box, way = Box(due("old", age_s=99.9), due("young")), Way(500)
    made = deliverer(box, way)
    made.start()
    await until(lambda: box.removed == ["old"] and box.back == [("young", "status 500")])
    assert made.results == {"delivered": 0, "failed": 1, "given_up": 1}
    await made.close()


async def test_a_host_that_is_not_allowed_any_more_gets_nothing() -> None:
    box, way = Box(due("t", "https://b.example/")), Way()
    made = deliverer(box, way)
    made.start()
    await until(lambda: box.back == [("t", "the host is not on the list any more")])
    assert way.sent == []
    await made.close()


async def test_a_defect_is_a_failed_attempt(caplog: pytest.LogCaptureFixture) -> None:
    def form(task: StoredTask) -> bytes:
        raise ZeroDivisionError

    box = Box(due("t"))
    made = deliverer(box, Way(), form)
    made.start()
    await until(lambda: box.back == [("t", "the gateway failed on it")])
    assert "a webhook could not be sent" in caplog.text
    await made.close()


async def test_no_more_than_may_be_under_way() -> None:
    box, way = Box(*(due(f"t{number}") for number in range(9))), Way()
    way.gate.clear()
    made = deliverer(box, way)
    made.start()
    await until(lambda: len(way.sent) == 4)
    assert len(box.due) == 5 and "in_flight=4" in repr(made)
    way.gate.set()
    await until(lambda: len(box.removed) == 9)
    await made.close()
    box, way = Box(due("large", size=IN_FLIGHT_BYTES_MAX), due("small")), Way()
    way.gate.clear()
    made = deliverer(box, way)
    made.start()
    await until(lambda: box.back == [("small", None)])  # it was not sent: no attempt
    way.gate.set()
    await made.close()


async def test_who_leaves_lets_what_is_under_way_be_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.broker.webhooks.deliverer.CLOSE_PATIENCE_S", 0.01)
    box, way = Box(due("t")), Way()
    way.gate.clear()
    made = deliverer(box, way)
    made.start()
    await until(lambda: way.sent == ["t-0"])
    await made.close()
    assert box.back == [("t", None)] and box.removed == []


async def test_an_outbox_that_is_away_is_looked_at_again() -> None:
    box = Box(due("t"))
    box.is_away = True
    made = deliverer(box, Way())
    made.start()
    await asyncio.sleep(0)
    box.is_away = False
    await until(lambda: box.removed == ["t"])
    await made.close()
