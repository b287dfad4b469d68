"""The way in (`face/intake.py`): one request, several that belong together, tasks."""

import asyncio
import gc
import weakref
from collections.abc import Callable, Sequence

import pytest

from carpool.admission.gate import Gate
from carpool.admission.shedding import LoadShedder, TierRule
from carpool.broker.coalescer import Coalescer
from carpool.broker.journal import Journal
from carpool.broker.memory import MemoryBroker
from carpool.broker.result_cache import ResultCache, digest_key, exact_key
from carpool.broker.tasks import Tasks
from carpool.core.errors import (
    CarpoolError,
    InputRefused,
    InternalError,
    Malformed,
    QueueFull,
    QueueTimeout,
    Shed,
    UnknownModel,
    UpstreamDown,
)
from carpool.core.outcome import Outcome, Output
from carpool.core.ports import NO_OPTIONS, Caller, RequestOptions
from carpool.core.request import DONE, Request
from carpool.face.intake import PREPARED_A_TURN, RECENT_KEPT, Intake, IntakeSettings, ServedModel
from carpool.testing import ANYBODY, FakeClock, FakeUpstream, Witness, make_output, make_request
from carpool.upstream.pool import Pool
from support.processes import until
from support.rates import limited
from support.shared_requests import FarAway
from support.tasks import open_journal


def prepare(request: Request) -> None:
    if request.input == b'"odd"':
        raise Malformed("odd")


class House:
    """An intake over an embedded broker with room for four requests; the upstream is whoever calls `answer`."""

    def __init__(self, journal: Journal, *, is_cached: bool = False, far: FarAway | None = None) -> None:
        self.clock = FakeClock()
        self.broker = MemoryBroker(waiting_max=4, bytes_max=1000, lanes_max=9, tiers=1, clock=self.clock)
        self.broker.when_work_arrives("m", lambda lane: None)
        tasks = Tasks(self.broker, journal, clock=self.clock)
        self.door = LoadShedder([TierRule(0.25, 0.5)], [self.broker.queue_stats("m", 0)])
        self.pool = Pool([FakeUpstream()], self.clock)
        gate = self.gate = Gate(self.broker, tasks, {"m": self.pool}, lowest_tier=0, shedders={"m": self.door})
        self.coalescer = Coalescer(
            gate.admit,
            gate.admit_task,
            self.broker,
            ResultCache(bytes_max=1000, ttl_s=300.0),
            exact_key if far is None else digest_key,
            seconds=self.broker.seconds,
            waiting_max=4,
            bytes_max=1000,
            far=far,
            clock=self.clock,
        )
        self.model = ServedModel("m", 1000, lambda data: data, prepare, self.coalescer if is_cached else None)
        settings = IntakeSettings("m", (0.5,), 2.0, 4.0, 600.0)
        queue = self.coalescer if is_cached else self.broker
        self.intake = Intake(gate, queue, tasks, {"m": self.model}, settings, self.clock)
        self.witness = Witness()
        self.came: Callable[[int, Output], object] | None = None
        self.fails_to_answer = False
        self.told: list[Sequence[Outcome]] = []
        # The numbers that were told with them.
        self.numbers: list[int | None] = []

    def ask(self, value: bytes = b'"x"', name: str = "r1") -> Request:
        return self.intake.ask(
            caller=ANYBODY,
            model=self.model,
            parameters=b"",
            value=value,
            request_id=name,
            waiter=self.witness,
            client_id="c1",
        )

    def ask_all(self, *values: bytes, caller: Caller = ANYBODY, options: RequestOptions = NO_OPTIONS) -> None:
        self.group = self.intake.ask_all(
            caller=caller,
            model=self.model,
            parameters=b"",
            values=values,
            request_id="r",
            answer=self.answer,
            came=self.came,
            options=options,
        )

    def answer(self, outcomes: Sequence[Outcome], number: int | None) -> None:
        if self.fails_to_answer and len(outcomes) > 1:
            raise ZeroDivisionError
        self.told.append(outcomes)
        self.numbers.append(number)

    def take(self) -> list[Request]:
        return [request for lane in self.broker.lanes("m") for request in self.broker.take(lane, 64, self.clock())]


@pytest.fixture
async def house() -> House:
    return House(open_journal())


@pytest.fixture
async def cached_house() -> House:
    return House(open_journal(), is_cached=True)


async def test_a_refusal_is_the_outcome(house: House) -> None:
    for number in range(4):
        house.ask(name=f"r{number}")
    refused = house.ask(name="too much")
    assert refused.phase == DONE and refused.input == b""
    assert isinstance(house.witness.outcome(refused), QueueFull)


async def test_nobody_waits_for_what_the_protocol_cannot_carry(house: House) -> None:
    with pytest.raises(Malformed):
        house.ask(b'"odd"')
    assert house.broker.held == 0


async def test_models_of_others_are_as_unknown_as_those_that_are_not_there(house: House) -> None:
    other = Caller("alice", 0, is_anonymous=False, models=frozenset({"n"}))
    texts = set[str]()
    for name in ("m", "nothing"):
        with pytest.raises(UnknownModel) as refused:
            house.intake.model(name, other)
        texts.add(refused.value.detail)
    assert texts == {"this gateway serves no model that this credential is for"}
    assert list(house.intake.models_of(other)) == []
    allowed = Caller("alice", 0, is_anonymous=False, models=frozenset({"m"}))
    assert house.intake.model("m", allowed) is house.model and list(house.intake.models_of(allowed)) == [house.model]


async def test_the_last_requests_are_kept_and_no_more(house: House) -> None:
    for number in range(RECENT_KEPT + 1):
        house.intake.cancel(house.ask(name=f"r{number}"))
    assert house.intake.find_recent("r0") is None
    assert house.intake.find_recent("r1") is not None


def found(house: House, name: str) -> Request:
    request = house.intake.find_recent(name)
    assert request is not None
    return request


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("end", ["closed", "full", "fails", "deleted"])
async def test_of_a_task_that_is_over_its_input_is_not_kept(is_cached: bool, end: str) -> None:
    house = House(open_journal(), is_cached=is_cached)
    house.gate.closed = end == "closed"
    told: asyncio.Queue[Request] = asyncio.Queue()
    for number in range(5 if end == "full" else 1):
        house.intake.submit(
            caller=ANYBODY,
            model=house.model,
            parameters=b"",
            value=b'"a long text %d"' % number,
            accepted=lambda request, error: told.put_nowait(request),
        )
    request = await told.get()  # where there is no room for the last, that is told first
    if end == "fails":
        house.broker.settle(house.take()[0], InputRefused("no"))
    elif end == "deleted":
        gone: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        house.intake.delete(caller=ANYBODY, task_id=request.id, done=gone.set_result)
        assert await gone is None
    assert house.intake.find_recent(request.id) is request
    assert request.phase == DONE
    assert "a long text" not in repr(request)


async def test_a_task_whose_result_is_kept_is_not_refused_for_load(cached_house: House) -> None:
    house = cached_house
    house.ask(b'"known"')
    house.broker.settle(house.take()[0], make_output(b"1"))
    house.door.learn([0.0], [1.0], [house.broker.queue_stats("m", 0)])  # nothing is served any more
    house.broker.submit(make_request("waits", house.witness, now=house.clock(), owner=ANYBODY.owner))
    told: asyncio.Queue[CarpoolError | None] = asyncio.Queue()
    for value in (b'"known"', b'"new"'):
        house.intake.submit(
            caller=ANYBODY,
            model=house.model,
            parameters=b"",
            value=value,
            options=RequestOptions(timeout_s=1.0),
            accepted=lambda request, error: told.put_nowait(error),
        )
    assert isinstance(await told.get(), Shed)  # at once: nothing is written for it
    assert await told.get() is None


# Several requests of one call


async def test_a_refusal_is_that_of_the_whole_group(house: House) -> None:
    house.ask_all(*[b'"x"'] * 5)
    assert house.numbers == [None]
    assert found(house, "r.4").phase == DONE


@pytest.mark.parametrize("size", [PREPARED_A_TURN - 1, PREPARED_A_TURN, 4 * PREPARED_A_TURN + 1])
async def test_a_long_group_comes_in_over_some_turns(house: House, size: int) -> None:
    house.broker.waiting_max, house.broker.bytes_max = 5000, 10**6
    house.ask_all(*[b"%d" % number for number in range(size)])
    assert (house.broker.held == 0) == (size > PREPARED_A_TURN)  # all at once, in the end
    await until(lambda: house.broker.held == size)
    taken: list[Request] = []
    while some := house.take():
        taken += some
    for request in taken:
        house.broker.settle(request, make_output(request.input))
    (outcomes,) = house.told
    assert [int(each.value) for each in outcomes if isinstance(each, Output)] == list(range(size))


@pytest.mark.parametrize("end", ["left", "odd", "full"])
async def test_a_long_group_that_does_not_come_in_keeps_nothing(house: House, end: str) -> None:
    house.broker.bytes_max = 10**6
    house.broker.waiting_max = 100 if end == "full" else 5000
    values = [b'"a long text %d"' % number for number in range(1000)]
    if end == "odd":
        values[700] = b'"odd"'
    house.ask_all(*values, caller=limited(0, concurrent=5000))
    if end == "left":
        house.group.leave()
        await asyncio.sleep(0.01)
        assert house.told == []
    else:
        await until(lambda: bool(house.told))
        assert house.numbers == [700 if end == "odd" else None]
    assert house.broker.held == 0 and house.take() == []
    house.ask_all(b'"x"', b'"y"', caller=limited(0, concurrent=2))  # no permit is left behind
    assert house.broker.held == 2
    gc.collect()  # what other tests left
    assert all("a long text" not in repr(request) for request in gc.get_objects() if type(request) is Request)


async def test_permits_are_for_all_or_none(house: House) -> None:
    caller = limited(0, concurrent=3)
    house.ask_all(b'"a"', b'"b"', caller=caller)
    house.ask_all(b'"c"', b'"d"', caller=caller)
    ((refusal,),) = house.told
    assert refusal.code == "rate-limited" and house.broker.held == 2  # type: ignore[union-attr]
    for request in house.take():
        house.broker.settle(request, make_output(b"1"))
    house.ask_all(*[b'"x"'] * 4, caller=caller)
    assert house.broker.held == 4


async def test_a_group_is_judged_as_a_whole_at_the_door(house: House) -> None:
    """One a second is served, and two seconds is how long a request may wait: three may come, and no more."""
    house.door.learn([1.0], [1.0], [house.broker.queue_stats("m", 0)])
    house.ask_all(*[b'"x"'] * 4)
    ((refusal,),) = house.told
    assert isinstance(refusal, Shed) and "send 2 inputs at most" in refusal.detail
    assert house.broker.held == 0 and house.take() == []
    house.ask_all(*[b'"x"'] * 3)
    assert house.broker.held == 3
    house.ask_all(b'"y"', options=RequestOptions(timeout_s=1.0))
    assert isinstance(house.told[1][0], Shed)


async def test_whether_the_upstream_is_down_is_decided_once_for_a_group(house: House) -> None:
    """The first of it may be the probe of an endpoint that was down: until that is answered, nobody else comes in."""
    house.broker.when_work_arrives("m", lambda lane: setattr(house.pool, "is_down", True))
    house.ask_all(*[b'"x"'] * 3)
    assert house.pool.is_down
    assert (house.broker.held, house.told) == (3, [])
    house.ask_all(*[b'"y"'] * 1)
    house.ask_all(*[b'"y"'] * 2)
    assert [type(error) for (error,) in house.told] == [UpstreamDown, UpstreamDown]
    assert house.numbers == [0, None]
    assert house.broker.held == 3


async def test_what_comes_is_made_something_of_at_once(house: House) -> None:
    house.came = lambda number, output: (number, output.value)
    house.ask_all(b'"a"', b'"b"')
    for request in reversed(house.take()):
        house.broker.settle(request, make_output(b"1"))
    (made,) = house.told
    assert list(map(str, made)) == ["(0, b'1')", "(1, b'1')"]


@pytest.mark.parametrize("failing", ["came", "answer", "prepare"])
async def test_a_defect_is_told(house: House, failing: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever waits must not wait for ever."""

    def raises(*_: object) -> None:
        raise ZeroDivisionError

    house.fails_to_answer = failing == "answer"
    if failing == "came":
        house.came = raises
    elif failing == "prepare":
        house.model = ServedModel("m", 1000, lambda data: data, raises)
    house.ask_all(b'"a"', b'"b"')
    for request in house.take():
        house.broker.settle(request, make_output(b"1"))
    ((error,),) = house.told
    assert isinstance(error, InternalError)
    assert house.broker.held == 0
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("outcome", [make_output(b"1"), InputRefused("no")])
async def test_of_a_group_that_is_over_nothing_is_kept_with_its_requests(house: House, outcome: Outcome) -> None:
    class Told(list[Sequence[Outcome]]):
        """What a face keeps for a call."""

    told = Told()

    def answer(outcomes: Sequence[Outcome], number: int | None, told: Told = told) -> None:
        told.append(outcomes)

    house.intake.ask_all(
        caller=ANYBODY,
        model=house.model,
        parameters=b"",
        values=[b'"a"'] * 2,
        request_id="r",
        answer=answer,
    )
    for request in house.take():
        house.broker.settle(request, outcome)
    assert len(told) == 1
    kept = weakref.ref(told)
    del told, request, answer
    gc.collect()
    assert house.intake.find_recent("r.0") is not None
    assert kept() is None


async def test_a_group_that_shares_a_seat_with_itself_is_told_its_error(cached_house: House) -> None:
    house = cached_house
    house.ask_all(b'"a"', b'"a"', b'"a"')
    (seat,) = house.take()
    error = InputRefused("no")
    house.broker.settle(seat, error)
    assert house.told == [[error]]
    assert (house.coalescer.held, house.coalescer.queued, house.broker.held) == (0, 0, 0)


async def test_a_group_that_expires_takes_nobody_elses_deadline_along(cached_house: House) -> None:
    house = cached_house
    house.ask_all(b'"a"', b'"b"', b'"a"')
    other = house.ask(b'"b"')
    house.clock.advance(2.1)
    house.broker.expire(house.clock())
    house.coalescer.expire(house.clock())
    ((error,),) = house.told
    assert isinstance(error, QueueTimeout)
    assert isinstance(house.witness.outcome(other), QueueTimeout)
    assert (house.coalescer.held, house.coalescer.queued, house.broker.held) == (0, 0, 0)


async def test_a_group_with_inputs_twice_takes_a_seat_for_each_once(cached_house: House) -> None:
    house = cached_house
    house.ask_all(b'"known"')
    house.broker.settle(house.take()[0], make_output(b"0"))
    house.ask_all(b'"known"', *[b'"a"', b'"b"'] * 2)
    coalescer = house.take()
    assert [seat.input for seat in coalescer] == [b'"a"', b'"b"']
    for seat in coalescer:
        house.broker.settle(seat, make_output(seat.input))
    outcomes = house.told[1]
    values = [each.value for each in outcomes if isinstance(each, Output)]
    assert values == [b"0", b'"a"', b'"b"', b'"a"', b'"b"']
    assert (house.coalescer.held, house.coalescer.queued, house.broker.held) == (0, 0, 0)
    house.door.learn([0.0], [1.0], [house.broker.queue_stats("m", 0)])  # nothing is served any more
    house.ask_all(*[b'"b"'] * 4)
    assert len(house.told[2]) == 4  # what is kept is never refused for load


class TestAGroupWhoseResultsMayBeFarAway:
    """Over Redis: what others keep is asked for before the call is judged."""

    @pytest.fixture
    async def far(self) -> FarAway:
        far = FarAway()
        for value in (b'"a"', b'"b"'):
            key = digest_key(make_request("r", Witness(), now=0.0, value=value))
            assert isinstance(key, bytes)
            far.keep(key, make_output(value))
        return far

    @pytest.fixture
    async def house(self, far: FarAway) -> House:
        return House(open_journal(), is_cached=True, far=far)

    async def test_what_is_kept_is_never_refused_for_load(self, house: House, far: FarAway) -> None:
        house.door.learn([0.0], [1.0], [house.broker.queue_stats("m", 0)])  # nothing is served any more
        house.pool.is_down = True
        house.ask_all(b'"a"', b'"b"', b'"a"')
        assert house.coalescer.held == 2
        for _ in range(2):
            far.answer()
        assert [[each.value for each in outcomes if isinstance(each, Output)] for outcomes in house.told] == [
            [b'"a"', b'"b"', b'"a"']
        ]
        house.ask_all(b'"a"', b'"c"')
        while far.asked:
            far.answer()
        ((error,),) = house.told[1:]
        assert isinstance(error, UpstreamDown)
        assert (house.coalescer.held, house.coalescer.held_bytes, house.broker.held) == (0, 0, 0)

    async def test_it_is_judged_with_those_whose_seat_is_gone_meanwhile(self, house: House, far: FarAway) -> None:
        def ask(value: bytes) -> Request:
            request = house.ask(value)
            far.answer(-1)
            return request

        other = ask(b'"c"')
        house.ask_all(b'"c"', b'"d"')  # the first would share that one's seat
        house.intake.cancel(other)
        for number in range(3):
            ask(b'"%d"' % number)
        far.answer()
        assert len(house.take()) == 3  # of the call nothing was queued, for there is room for one of it only
        ((error,),) = house.told
        assert isinstance(error, QueueFull)

    async def test_who_leaves_meanwhile_does_not_come_in(self, house: House, far: FarAway) -> None:
        house.ask_all(b'"c"', b'"d"', caller=limited(60, concurrent=2))
        house.group.leave()
        for _ in range(2):
            far.answer()
        assert house.take() == [] and house.told == []
        assert (house.coalescer.held, house.coalescer.held_bytes, house.broker.held) == (0, 0, 0)
        house.ask_all(b'"a"', b'"b"', caller=limited(60, concurrent=2))  # its places are free
        for _ in range(2):
            far.answer()
        assert [len(outcomes) for outcomes in house.told] == [2]

    async def test_a_defect_is_told(self, house: House, far: FarAway, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(house.gate, "judge_all", lambda requests: 1 / 0)
        house.ask_all(b'"c"', b'"d"')
        for _ in range(2):
            far.answer()
        ((error,),) = house.told
        assert isinstance(error, InternalError)
        assert (house.coalescer.held, house.coalescer.held_bytes, house.broker.held) == (0, 0, 0)


async def test_a_group_of_none_is_answered(house: House) -> None:
    house.ask_all()
    assert house.told == [[]]


# Models that a credential is for


async def test_a_credential_for_another_model_does_not_come_in(house: House) -> None:
    house_model, told = house.model, []
    other = Caller("alice", 0, is_anonymous=False, models=frozenset({"n", "l"}))
    with pytest.raises(UnknownModel, match="no model that this credential is for"):
        house.intake.ask(other, house_model, b"", b'"x"', "r1", house.witness)
    with pytest.raises(UnknownModel):
        house.intake.submit(
            caller=other, model=house_model, parameters=b"", value=b"1", accepted=lambda *each: told.append(each)
        )
    assert house.broker.held == 0 and told == [] and house.intake.find_recent("r1") is None
    allowed = Caller("alice", 0, is_anonymous=False, models=frozenset({"m"}))
    house.intake.ask(allowed, house_model, b"", b'"x"', "r2", house.witness)
    assert house.broker.held == 1
