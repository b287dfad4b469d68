"""Requests that are timed until they are queued (`Sampler` in `face/http/state.py`)."""

import asyncio
from collections.abc import Callable

import pytest

from carpool.core.histograms import Histogram, RequestSeconds
from carpool.face.http.connection import Connection
from carpool.face.http.exchange import Exchange
from carpool.face.http.state import FOLLOWED_S_MAX, HttpLimits, HttpState, Sampler
from carpool.testing import FakeClock, Witness, make_request

POST = b"POST /v1/inference HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"


class Nowhere(asyncio.Transport):
    """A client that reads everything."""

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass


class Scene:
    """A connection to routes that take 0.002 s for each request, and do as the test says."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.seconds = RequestSeconds()
        self.handled: list[Exchange] = []
        self.do: Callable[[Exchange], None] = self.queue
        self.state = HttpState(self.routes, HttpLimits(), self.clock)
        self.plain = self.state.handler
        self.sampler = Sampler(self.state, self.seconds)
        self.connection = Connection(self.state)
        self.connection.connection_made(Nowhere())

    def routes(self, exchange: Exchange) -> None:
        self.handled.append(exchange)
        self.clock.now += 0.002
        self.do(exchange)

    def queue(self, exchange: Exchange) -> None:
        exchange.context = make_request("x", Witness(), now=self.clock())

    def send(self, data: bytes = POST + b"{..}") -> None:
        self.connection.data_received(data)

    @property
    def found(self) -> dict[str, list[float]]:
        """How many, and seconds together."""

        def of(each: Histogram) -> list[float]:
            return [sum(each.counts), round(each.total, 6)]

        return {"receive": of(self.seconds.receive), "admit": of(self.seconds.admit)}


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_one_that_comes_in_parts_takes_as_long_as_its_parts(scene: Scene) -> None:
    scene.sampler.take()
    for part in (POST[:9], POST[9:], b"{.", b".}"):
        scene.send(part)
        scene.clock.now += 0.1
    scene.sampler.take()
    scene.send()
    assert scene.found == {"receive": [2, 0.3], "admit": [2, 0.004]}


def test_one_that_waits_at_the_door_is_timed_until_it_is_let_in(scene: Scene) -> None:
    scene.do = lambda exchange: None
    scene.sampler.take()
    scene.send()
    (waits,) = scene.handled
    scene.do = scene.queue
    scene.send()
    scene.clock.now += 0.5
    scene.sampler.take()
    scene.connection.handle(waits)
    assert scene.found == {"receive": [1, 0], "admit": [1, 0.506]}, "three times 0.002, and what it waited"
    assert scene.state.handler == scene.plain


def test_one_that_is_never_let_in_is_given_up(scene: Scene) -> None:
    scene.do = lambda exchange: None
    scene.sampler.take()
    scene.send()
    scene.do = scene.queue
    scene.clock.now += FOLLOWED_S_MAX
    scene.sampler.take()
    scene.send()
    assert scene.found == {"receive": [2, 0], "admit": [1, 0.002]}


def test_a_refusal_is_timed_and_a_poll_is_not(scene: Scene) -> None:
    scene.do = lambda exchange: exchange.respond(503, b"{}")
    scene.sampler.take()
    scene.send(b"GET /v1/result/x HTTP/1.1\r\nHost: x\r\n\r\n")
    assert scene.found == {"receive": [0, 0], "admit": [0, 0]}
    scene.send()
    assert scene.found == {"receive": [1, 0], "admit": [1, 0.002]}


def test_routes_that_fail_are_not_left_behind_it(scene: Scene) -> None:
    def fail(exchange: Exchange) -> None:
        raise ZeroDivisionError

    scene.do = fail
    scene.sampler.take()
    scene.send()
    scene.do = scene.queue
    scene.sampler.take()
    scene.send()
    assert scene.found["admit"] == [1, 0.002]
    assert scene.state.handler == scene.plain
