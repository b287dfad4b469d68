"""The embedded broker by itself, in virtual time: counts, times and orders to the last request.

What every queue promises is in test_queue_contract.py.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from carpool.broker.memory import IDLE_LANES_KEPT, MemoryBroker
from carpool.core.errors import CarpoolError, ClientLeft, QueueFull, UpstreamFailed
from carpool.core.outcome import Outcome, Output
from carpool.core.ports import LaneQueue
from carpool.core.request import DONE, Request
from carpool.testing import FakeClock, Witness, make_output, make_request

MODELS = ("m", "n")
TARGETS_S = (0.05, 0.15, 0.5)


def make_broker(
    clock: FakeClock, waiting_max: int = 1000, bytes_max: int = 1_000_000, lanes_max: int = 100
) -> MemoryBroker:
    return MemoryBroker(waiting_max=waiting_max, bytes_max=bytes_max, lanes_max=lanes_max, tiers=3, clock=clock)


class TestMemoryBroker:
    @pytest.fixture(autouse=True)
    def _set_up(self) -> None:
        self.clock = FakeClock()
        self.witness = Witness()
        self.broker = self.ready()
        self.arrived_in: list[tuple[str, bytes]] = []

    def ready(self, **bounds: int) -> MemoryBroker:
        broker = make_broker(self.clock, **bounds)
        for model in MODELS:
            broker.when_work_arrives(model, self.note_arrival)
        return broker

    def note_arrival(self, lane: LaneQueue) -> None:
        self.arrived_in.append((lane.model, lane.key))

    def request(
        self,
        name: str,
        *,
        model: str = "m",
        parameters: bytes = b"",
        tier: int = 2,
        value: bytes = b'"x"',
        is_task: bool = False,
        total_timeout_s: float = 4.0,
        owner: str = "",
        own_timeout_s: float = 0.0,
    ) -> Request:
        return make_request(
            name,
            self.witness,
            now=self.clock(),
            model=model,
            parameters=parameters,
            tier=tier,
            target_s=TARGETS_S[tier],
            value=value,
            is_task=is_task,
            total_timeout_s=total_timeout_s,
            owner=owner,
            own_timeout_s=own_timeout_s,
        )

    def queued(
        self,
        name: str,
        *,
        model: str = "m",
        parameters: bytes = b"",
        tier: int = 2,
        owner: str = "",
        own_timeout_s: float = 0.0,
    ) -> Request:
        request = self.request(
            name, model=model, parameters=parameters, tier=tier, owner=owner, own_timeout_s=own_timeout_s
        )
        assert self.broker.submit(request) is None
        return request

    def lane(self, model: str = "m") -> LaneQueue:
        (lane,) = self.broker.lanes(model)
        return lane

    def take(self, count: int = 64, model: str = "m") -> list[Request]:
        return self.broker.take(self.lane(model), count, self.clock())

    def held(self) -> tuple[int, int]:
        return self.broker.held, self.broker.held_bytes

    def test_bytes_run_from_the_take_to_the_outcome(self) -> None:
        notifies: list[int] = []
        self.broker.when_bytes_free("m", lambda: notifies.append(self.broker.bytes_running("m")))
        for name in "abcde":
            self.queued(name)  # of three bytes each
        assert self.broker.bytes_running("m") == 0
        first, second, third = self.take(3)
        assert (self.broker.bytes_running("m"), self.broker.bytes_running("n"), notifies) == (9, 0, [])
        self.broker.settle(first, UpstreamFailed("down"))
        self.broker.settle_batch([second], [make_output(b"1")])
        assert (self.broker.bytes_running("m"), notifies) == (3, [6, 3])
        self.broker.settle(third, UpstreamFailed("late"))
        assert (self.broker.bytes_running("m"), notifies) == (0, [6, 3, 0])
        assert self.broker.settle(first, UpstreamFailed("again")) is False
        assert (self.broker.bytes_running("m"), notifies) == (0, [6, 3, 0])
        assert [request.id for request in self.take()] == ["d", "e"]

    # Waiting and leaving the queue.

    def test_a_flood_of_one_owner_does_not_delay_others(self) -> None:
        """What an owner has waiting beyond its share stands behind others; its own order stays."""
        self.queued("first", owner="b")  # so that it is known that there are others
        assert len(self.take()) == 1
        flood = [self.queued(f"flood {number}", owner="a") for number in range(260)]
        self.clock.advance(1.0)
        single = self.queued("single", owner="b")
        self.clock.advance(0.01)
        taken = self.take(130) + self.take(10)
        assert single in taken[:130]
        assert [request for request in taken if request.owner == "a"] == flood[:139]

    def test_sharing_inside_a_tier_takes_nothing_from_it(self) -> None:
        """The tier's place is that of its longest-waiting request, whoever's turn it is."""
        self.queued("first", owner="b", tier=1)
        assert len(self.take()) == 1
        flood = [self.queued(f"flood {number}", owner="a", tier=1) for number in range(150)]
        self.clock.advance(0.3)
        self.queued("later", tier=0)
        self.clock.advance(0.01)
        assert self.take(150) == flood

    def test_a_lane_that_empties_and_fills_again_goes_on_counting(self) -> None:
        """The arrival rate is derived from the count, and kept in the notes."""
        self.queued("a")
        self.lane().batching_notes = notes = object()
        self.take()
        self.queued("b")
        assert self.lane().arrivals == 2
        assert self.lane().batching_notes is notes

    # Bounds.

    def test_a_call_of_several_has_room_for_all_or_none(self) -> None:
        self.broker = self.ready(waiting_max=4, bytes_max=100)
        calls = [[self.request(f"{size}.{number}", value=b"1" * 10) for number in range(size)] for size in (3, 2, 1)]
        three, two, one = calls
        assert self.broker.refusal_of_all(three) is None
        for request in three:
            assert self.broker.submit(request) is None
        assert isinstance(self.broker.refusal_of_all(two), QueueFull)
        assert self.broker.refusal_of_all(one) is None
        assert isinstance(self.broker.refusal_of_all([self.request("large", value=b"1" * 71)]), QueueFull)

    # One outcome.

    def test_outputs_that_are_not_one_each_are_given_to_nobody(self) -> None:
        batch = [self.queued(str(number)) for number in range(3)]
        self.take()
        with pytest.raises(ValueError, match="2 outputs"):
            self.broker.settle_batch(batch, [make_output(b"1"), make_output(b"2")])
        assert self.witness.told == {}
        for request in batch:
            self.broker.settle(request, UpstreamFailed("x"))
        assert self.held() == (0, 0)

    def test_a_waiter_that_raises_does_not_disturb_the_others(self, caplog: pytest.LogCaptureFixture) -> None:
        class Broken:
            def settled(self, request: Request, outcome: Outcome) -> None:
                raise RuntimeError("a defect")

        batch = [self.queued(str(number)) for number in range(3)]
        batch[0].waiter = Broken()
        self.take()
        self.broker.settle_batch(batch, [make_output(b"%d" % number) for number in range(3)])
        assert [isinstance(self.witness.outcome(request), Output) for request in batch] == [False, True, True]
        assert self.held() == (0, 0)
        assert "a waiter failed" in caplog.text

    def test_a_waiter_may_use_the_broker_while_it_is_told(self) -> None:
        """As a connection does: the answer to one pipelined request lets the next one in, or ends the others."""
        test = self

        class Busy:
            def settled(self, request: Request, outcome: Outcome) -> None:
                test.broker.cancel(batch[1])
                test.queued("next")

        batch = [self.queued(str(number)) for number in range(2)]
        batch[0].waiter = Busy()
        self.take()
        self.broker.settle_batch(batch, [make_output(b"0"), make_output(b"1")])
        assert isinstance(self.witness.outcome(batch[1]), ClientLeft)
        assert self.held() == (1, 3)
        assert [request.id for request in self.take()] == ["next"]

    # Time.


class MemoryBrokerMachine(RuleBasedStateMachine):
    """Any order of events: counts stay true, each is told once, lanes never mix, nothing is sent too late."""

    WAITING_MAX, BYTES_MAX, LANES_MAX = 6, 40, 3

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.witness = Witness()
        self.broker = make_broker(
            self.clock, waiting_max=self.WAITING_MAX, bytes_max=self.BYTES_MAX, lanes_max=self.LANES_MAX
        )
        for model in MODELS:
            self.broker.when_work_arrives(model, lambda lane: None)
        # Admitted: by id, with its size, which the request may forget. `running` were taken.
        self.admitted: dict[str, tuple[Request, int]] = {}
        self.running: list[Request] = []
        self.serial = 0

    def unsettled(self) -> list[tuple[Request, int]]:
        return [entry for name, entry in self.admitted.items() if name not in self.witness.told]

    @rule(
        model=st.sampled_from(MODELS),
        parameters=st.sampled_from([b"", b"1", b"2", b"3", b"4"]),
        tier=st.integers(0, 2),
        size=st.integers(1, 15),
        total_s=st.sampled_from([2.0, 3.0, 50.0]),
        own_s=st.sampled_from([0.0, 0.0, 0.25, 1.4]),
        is_task=st.booleans(),
    )
    def submit(
        self, model: str, parameters: bytes, tier: int, size: int, total_s: float, own_s: float, is_task: bool
    ) -> None:
        self.serial += 1
        request = make_request(
            str(self.serial),
            self.witness,
            now=self.clock(),
            model=model,
            parameters=parameters,
            value=b"x" * size,
            tier=tier,
            target_s=TARGETS_S[tier],
            # One total for each queue timeout, as configured: deadlines come in order of arrival.
            queue_timeout_s=total_s / 2,
            total_timeout_s=total_s,
            own_timeout_s=own_s,
            is_task=is_task,
        )
        held = self.unsettled()
        refusal = self.broker.submit(request)
        if refusal is None:
            assert len(held) < self.WAITING_MAX
            assert sum(size for _, size in held) + size <= self.BYTES_MAX
            self.admitted[request.id] = (request, size)
        else:
            assert isinstance(refusal, QueueFull)

    @rule(lane_number=st.integers(0, 9), count=st.integers(1, 4), model=st.sampled_from(MODELS))
    def take(self, lane_number: int, count: int, model: str) -> None:
        lanes = list(self.broker.lanes(model))
        if not lanes:
            return
        lane = lanes[lane_number % len(lanes)]
        assert lane.waiting > 0
        key = lane.model, lane.key
        batch = self.broker.take(lane, count, self.clock())
        assert len(batch) <= count
        for request in batch:
            assert (request.model, request.parameters) == key
            assert request.deadline > self.clock()
            assert request.id not in self.witness.told
            assert request not in self.running
        self.running += batch

    @precondition(lambda self: self.running)
    @rule(count=st.integers(1, 4))
    def answer(self, count: int) -> None:
        batch = [request for request in self.running if request.model == self.running[0].model][:count]
        self.running = [request for request in self.running if request not in batch]
        before = set(self.witness.told)
        self.broker.settle_batch(batch, [make_output(request.id) for request in batch])
        for request in batch:
            if request.id not in before:
                outcome = self.witness.outcome(request)
                assert isinstance(outcome, Output) and outcome.value == request.id

    @precondition(lambda self: self.admitted)
    @rule(which=st.integers(0, 1000), failed=st.booleans())
    def end(self, which: int, failed: bool) -> None:
        request = list(self.admitted.values())[which % len(self.admitted)][0]
        error: CarpoolError = UpstreamFailed("x")
        if failed:
            assert self.broker.settle(request, error) == (self.witness.outcome(request) is error)
        else:
            self.broker.cancel(request)
        assert self.witness.outcome(request) is not None

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0, 2.0, 60.0]), looked_at=st.booleans())
    def pass_time(self, seconds: float, looked_at: bool) -> None:
        self.clock.advance(seconds)
        if looked_at:
            self.broker.expire(self.clock())
            for request, _ in self.unsettled():
                assert request.deadline > self.clock()

    @invariant()
    def counts_are_true(self) -> None:
        held = self.unsettled()
        assert (self.broker.held, self.broker.held_bytes) == (len(held), sum(size for _, size in held))
        lanes = [lane for model in MODELS for lane in self.broker.lanes(model)]
        running = [request for request in self.running if request.id not in self.witness.told]
        assert sum(lane.waiting for lane in lanes) == len(held) - len(running)
        assert len({(lane.model, lane.key) for lane in lanes}) == len(lanes)
        waiting = [request for request, _ in held if request not in running]
        for lane in lanes:
            own = [r for r in waiting if (r.model, r.parameters) == (lane.model, lane.key)]
            assert lane.oldest() == min(request.arrived for request in own)

    @invariant()
    def each_is_told_once(self) -> None:
        assert all(len(told) == 1 for told in self.witness.told.values())
        assert set(self.witness.told) <= set(self.admitted)

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
    broker = make_broker(FakeClock())
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
