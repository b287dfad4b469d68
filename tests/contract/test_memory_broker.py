"""The embedded broker keeps the contract, and a few things of its own."""

from typing import cast

import pytest
from broker_contract import MODELS, Adapter, BrokerContract, BrokerMachine
from hypothesis import settings
from hypothesis.stateful import invariant

from carpool.broker.memory import IDLE_LANES_KEPT, MemoryBroker
from carpool.core.errors import ClientLeft, UpstreamFailed
from carpool.core.ports import Broker
from carpool.core.request import DONE
from carpool.testing import FakeClock, Witness, make_output, make_request


class MemoryAdapter(Adapter):
    def make(
        self,
        clock: FakeClock,
        *,
        waiting_max: int = 1000,
        bytes_max: int = 1_000_000,
        lanes_max: int = 100,
        strict_order: bool = False,
        min_share: float = 0.0,
    ) -> MemoryBroker:
        return MemoryBroker(
            waiting_max=waiting_max,
            bytes_max=bytes_max,
            lanes_max=lanes_max,
            tiers=3,
            strict_order=strict_order,
            min_share=min_share,
            clock=clock,
        )

    def expire(self, broker: Broker, now: float) -> None:
        cast(MemoryBroker, broker).expire(now)

    def held(self, broker: Broker) -> tuple[int, int]:
        memory = cast(MemoryBroker, broker)
        return memory.held, memory.held_bytes


class TestMemoryBroker(BrokerContract):
    adapter = MemoryAdapter()


class MemoryBrokerMachine(BrokerMachine):
    adapter = MemoryAdapter()

    @invariant()
    def bytes_are_true(self) -> None:
        for model in MODELS:
            held = [(request, size) for request, size in self.unsettled() if request.model == model]
            running = sum(size for request, size in held if request in self.running)
            assert self.broker.bytes_running(model) == running
            waiting = sum(lane.waiting_bytes for lane in self.broker.lanes(model))
            assert waiting == sum(size for _, size in held) - running


TestAnyOrderOfEvents = MemoryBrokerMachine.TestCase
TestAnyOrderOfEvents.settings = settings(stateful_step_count=40)


@pytest.fixture
def broker() -> MemoryBroker:
    broker = MemoryAdapter().make(FakeClock())
    broker.when_work_arrives("m", lambda lane: None)
    return broker


def test_withdrawn_requests_are_neither_taken_nor_told(broker: MemoryBroker) -> None:
    witness = Witness()
    requests = [make_request(str(number), witness, now=1000.0, is_task=True) for number in range(3)]
    for request in requests:
        broker.submit(request)
    (lane,) = broker.lanes("m")
    broker.take(lane, 1, 1000.0)
    for request in requests[:2]:
        broker.withdraw(request)
    assert repr(broker) == "<MemoryBroker held=2 bytes=6 waiting=1>"
    assert broker.waiting_requests() == [requests[2]]
    assert broker.settle(requests[0], make_output(b"1"))  # a running one cannot be taken out: it ends by itself
    assert not broker.settle(requests[1], make_output(b"1"))
    broker.withdraw(requests[1])
    broker.expire(9e9)
    assert list(witness.told) == ["0", "2"]
    assert repr(broker) == "<MemoryBroker held=0 bytes=0 waiting=0>"


def test_a_batch_is_bounded_in_bytes_and_the_rest_comes_next(broker: MemoryBroker) -> None:
    requests = [make_request(str(number), Witness(), now=1000.0, value=b"x" * 10) for number in range(5)]
    for request in requests:
        broker.submit(request)
    (lane,) = broker.lanes("m")
    assert broker.take(lane, 64, 1000.0, bytes_max=25) == requests[:2]
    assert broker.take(lane, 64, 1000.0, bytes_max=5, room_bytes=9) == []
    assert (lane.waiting, broker.bytes_running("m")) == (3, 20)
    assert broker.take(lane, 64, 1000.0, bytes_max=5, room_bytes=10) == requests[2:3]
    assert broker.take(lane, 64, 1000.0, bytes_max=20) == requests[3:]
    assert (list(broker.lanes("m")), broker.bytes_running("m")) == ([], 50)


def test_the_expired_do_not_run(broker: MemoryBroker) -> None:
    for total_timeout_s in (1.0, 9.0):
        broker.submit(make_request("r", Witness(), now=1000.0, value=b"x" * 10, total_timeout_s=total_timeout_s))
    (lane,) = broker.lanes("m")
    assert len(broker.take(lane, 64, 1002.0)) == 1
    assert broker.bytes_running("m") == 10


def test_a_reserved_request_counts_until_it_is_settled(broker: MemoryBroker) -> None:
    """As a task does while it is on its way to the journal."""
    request = make_request("t", Witness(), now=1000.0, is_task=True)
    assert broker.reserve(request) is None
    assert (broker.held, broker.held_bytes, broker.depth) == (1, 3, 0)
    broker.settle(request, UpstreamFailed("x"))
    assert (broker.held, broker.held_bytes) == (0, 0)


def test_a_settled_request_lets_go_of_its_input(broker: MemoryBroker) -> None:
    request = make_request("r", Witness(), now=1000.0)
    broker.submit(request)
    broker.cancel(request)
    assert (request.input, request.ticket, request.phase) == (b"", None, DONE)


def test_idle_lanes_are_bounded(broker: MemoryBroker) -> None:
    def arrivals_after_one_more(number: int) -> int:
        request = make_request("r", Witness(), now=1000.0, parameters=b"%d" % number)
        broker.submit(request)
        (lane,) = broker.lanes("m")
        broker.cancel(request)
        return lane.arrivals

    numbers = range(IDLE_LANES_KEPT * 2)
    assert [arrivals_after_one_more(number) for number in numbers] == [1] * len(numbers)
    assert list(broker.lanes("m")) == []
    # Those that are remembered go on counting: the newer half.
    again = [arrivals_after_one_more(number) for number in reversed(numbers)]
    assert again == [2] * IDLE_LANES_KEPT + [1] * IDLE_LANES_KEPT
    assert broker.arrivals("m") == 2 * len(numbers)  # those in lanes that were dropped too


def test_outcomes_and_waits_are_counted(broker: MemoryBroker) -> None:
    witness = Witness()
    requests = [make_request(str(number), witness, now=999.9) for number in range(4)]
    for request in requests:
        broker.submit(request)
    (lane,) = broker.lanes("m")
    batch = broker.take(lane, 3, 1000.0)
    broker.settle_batch(batch[:2], [make_output(b"1"), make_output(b"2")])
    broker.settle(batch[2], UpstreamFailed("x"))
    broker.cancel(requests[3])
    assert broker.outcomes == {"ok": 2, "upstream-failed": 1, "client-left": 1}
    assert broker.arrivals("m") == 4
    assert broker.waited.buckets()[-1] == ("+Inf", 3)
    assert broker.waited.total == pytest.approx(0.3)
    assert isinstance(witness.outcome(requests[3]), ClientLeft)
