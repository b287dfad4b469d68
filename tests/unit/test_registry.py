"""A process's heartbeat: what fails in one part of it keeps nobody from the others."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from carpool.broker.redis.client.nodes import Nodes
from carpool.broker.redis.fleet.registry import Registry, read_part
from carpool.broker.redis.fleet.view import FleetView, Heartbeat
from carpool.broker.redis.keys import Keys
from carpool.testing import FakeClock

INTERVAL_S = 0.5
NOW_MS = 1_700_000_000_000


class DefectError(Exception):
    """Something that nobody expects."""


class SlowRedis:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.owed: list[Callable[[Any], None]] = []

    def run(self, script: Any, slot: int, keys: Any, args: Any, on_reply: Callable[[Any], None]) -> None:
        self.owed.append(on_reply)

    def answer(self, gateways: Sequence[bytes]) -> None:
        flat = [part for name in gateways for part in (name, b'%d {"status":"ok"}' % NOW_MS)]
        self.owed.pop(0)([NOW_MS, flat, []])


class Stand:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.redis = SlowRedis()
        self.seen: list[set[str]] = []
        self.describe_fails = self.heard_fails = False

    def start(self) -> Registry:
        registry = Registry(
            cast(Nodes, self.redis),
            Keys("test", 1),
            name=b"here",
            role="gateway",
            describe=self._describe,
            heard=self._heard,
            interval_s=INTERVAL_S,
            clock=self.clock,
        )
        registry.start()
        return registry

    def _describe(self) -> Heartbeat:
        if self.describe_fails:
            raise DefectError
        return Heartbeat(status="ok")

    def _heard(self, view: FleetView) -> None:
        if self.heard_fails:
            raise DefectError
        self.seen.append(view.live_names())


def test_whoever_fails_on_a_view_the_others_hear_at_once_what_has_changed_here() -> None:
    stand = Stand()

    async def main() -> None:
        registry = stand.start()
        registry.heartbeat()  # something has changed, while the answer to the first one is out
        stand.heard_fails = True
        with pytest.raises(DefectError):
            stand.redis.answer([b"a"])
        assert len(stand.redis.owed) == 1
        assert registry.view.live_names() == {"a"}
        stand.heard_fails = False
        stand.redis.answer([b"b"])
        assert stand.seen == [{"b"}]
        await asyncio.sleep(INTERVAL_S)
        assert len(stand.redis.owed) == 1
        registry.close()

    stand.clock.run(main())


def test_a_process_that_cannot_describe_itself_hears_of_the_others_and_tries_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stand = Stand()

    async def main() -> None:
        registry = stand.start()
        registry.heartbeat()
        stand.describe_fails = True
        stand.redis.answer([b"a"])
        assert (stand.seen, stand.redis.owed) == ([{"a"}], [])
        await asyncio.sleep(INTERVAL_S)
        assert stand.redis.owed == []
        stand.describe_fails = False
        await asyncio.sleep(INTERVAL_S)
        stand.redis.answer([b"a", b"b"])
        assert stand.seen == [{"a"}, {"a", "b"}]
        registry.close()

    stand.clock.run(main())
    assert caplog.text.count("it goes on") == 2


@pytest.mark.parametrize("value", [None, b"", b"{", b"\xff", b"[]", pytest.param(b'{"x":' + b"[" * 100_000, id="deep")])
def test_a_part_of_the_live_page_that_cannot_be_read_is_left_out(value: bytes | None) -> None:
    assert read_part(value) is None
