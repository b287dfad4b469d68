"""The decisions towards the upstream, for any sequence of events: no request is answered twice, none is forgotten,
calls are bounded, and every slot comes back.
"""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.defaults import do_nothing
from carpool.core.errors import InternalError, UpstreamFailed
from carpool.core.outcome import CallFacts, Output
from carpool.core.request import DONE, QUEUED, RUNNING, Request
from carpool.testing import FakeClock, FakeUpstream, Witness, make_request
from carpool.upstream.codecs.refusals import Refusal, RefusalKind
from carpool.upstream.pool import EndpointState, Pool
from carpool.upstream.quarantine import Quarantine
from carpool.upstream.scheduler import (
    Action,
    Answered,
    Broke,
    Call,
    Deliver,
    Event,
    Failed,
    Failure,
    Formed,
    GiveBack,
    LimitLearned,
    NotMade,
    PutBack,
    Rest,
    Scheduler,
    Send,
    Settle,
    Tick,
)

ATTEMPTS, MAX_BATCH, TIMEOUT_S = 3, 8, 3.0
# What an endpoint may answer, and what codecs make of it.
STATUSES: dict[int, RefusalKind] = {
    400: "bisect", 422: "bisect", 500: "bisect", 413: "split", 429: "elsewhere", 503: "elsewhere", 401: "give-up",
    403: "give-up",
}  # fmt: skip
ENDS = ("answered", "answered", "no answer", "dead", "fault", "broke", "left", *STATUSES)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "send", "end", "end", "end", "end", "leave", "wait", "pass", "tick", "load"]),
        st.integers(0, 999),
        st.sampled_from(ENDS),
    ),
    max_size=80,
)


class Others:
    """Other batchers, that work now and then, and serve this share of what they might."""

    def __init__(self, random: Random, share: float) -> None:
        self._random = random
        self._share = share
        self._had: Counter[Request] = Counter()

    def are_well(self) -> bool:
        return self._random.random() < max(0.5, self._share)

    def may_serve(self, request: Request, *, for_verdict: bool = False) -> bool:
        return self._random.random() < self._share

    def had(self, request: Request) -> bool:
        return False


class Play:
    """A scheduler, what waits for it, its calls under way, and what became of requests."""

    def __init__(self, slots: list[int], seed: int, others: float | None) -> None:
        self.clock = FakeClock()
        self.random = Random(seed)
        self.witness = Witness()
        upstreams = [FakeUpstream(f"e{number}", count) for number, count in enumerate(slots)]
        self.pool = Pool(upstreams, self.clock, random_share=self.random.random)
        self.waiting: list[Request] = []
        self.quarantined = Quarantine()
        self.scheduler = Scheduler(
            self.pool,
            model="m",
            timeout_s=TIMEOUT_S,
            attempts=ATTEMPTS,
            backoff_s=0.05,
            max_batch=MAX_BATCH,
            others_waiting=self.count_waiting,
            all_waiting=self.count_waiting,
            quarantined=self.quarantined,
            others=None if others is None else Others(self.random, others),
            clock=self.clock,
            random_share=self.random.random,
        )
        self.calls: list[Call] = []
        self.requests: list[Request] = []
        # How often each was sent since it last waited, and how often it was put back.
        self.sends: Counter[Request] = Counter()
        self.put_back: Counter[Request] = Counter()
        self.limits_learned = 0

    def count_waiting(self) -> int:
        return len(self.waiting)

    def tell(self, event: Event) -> None:
        for action in self.scheduler.decide(event, self.clock()):
            self.perform(action)

    def perform(self, action: Action) -> None:
        if isinstance(action, Send):
            assert action.call.members
            for request in action.call.members:
                assert request.phase == RUNNING
                self.sends[request] += 1
                # A batch, its attempts, a search of eight, some endpoints that are asked alone.
                assert self.sends[request] <= 40
            self.calls.append(action.call)
        elif isinstance(action, Deliver):
            for request in action.members:
                self.end(request, may_be_done=True)
        elif isinstance(action, Settle | GiveBack | Rest):
            self.end(action.request)
        elif isinstance(action, PutBack):
            for request in action.requests:
                assert request.phase == RUNNING and request not in self.waiting
                request.phase = QUEUED
                self.put_back[request] += 1
                assert self.put_back[request] <= 60
                self.sends[request] = 0
                self.waiting.append(request)
        elif isinstance(action, LimitLearned):
            self.limits_learned += 1

    def end(self, request: Request, *, may_be_done: bool = False) -> None:
        """A request has its outcome: it had none, unless its client has left meanwhile."""
        assert request.phase == RUNNING or may_be_done, request
        assert not any(request in call.members for call in self.calls)
        request.phase = DONE

    def send(self, number: int) -> None:
        """New requests come, and a batch forms if there is a slot."""
        for each in range(1 + number % MAX_BATCH):
            request = make_request(
                f"{len(self.requests)}",
                self.witness,
                now=self.clock(),
                value=b"%d" % (number % 50 + each),
                owner=f"owner {(number + each) % 4}",
                is_task=number % 7 == 0,
                total_timeout_s=1.0 + number % 5,
            )
            request.phase = QUEUED
            self.requests.append(request)
            self.waiting.append(request)
        self.form()

    def form(self) -> None:
        """As batching does: quarantined owners apart."""
        for is_quarantined in (False, True):
            free = self.scheduler.free_for_quarantined() if is_quarantined else self.scheduler.free()
            batch = [
                request
                for request in self.waiting
                if (("m", request.owner) in self.quarantined) == is_quarantined and request.deadline > self.clock()
            ][:MAX_BATCH]
            if not free or not batch:
                continue
            for request in batch:
                self.waiting.remove(request)
                request.phase, request.is_quarantined = RUNNING, is_quarantined
            self.tell(Formed(batch, self.scheduler.take(batch), do_nothing))

    def end_call(self, number: int, how: str | int) -> None:
        """As the shell reports it."""
        call = self.calls.pop(number % len(self.calls))
        live = [request for request in call.members if request.phase != DONE]
        error = UpstreamFailed("it failed")
        about = (call.member, len(call.members), call.began)
        if how == "left" or not live:
            if not live:
                self.tell(NotMade(call))
                return
            how = "answered"
        if how == "answered":
            self.pool.give_back(call.member)
            facts = CallFacts(len(call.members), 0.1)
            self.tell(Answered(call, [Output(b"1", facts) for _ in call.members]))
        elif how == "broke":
            self.pool.give_back(call.member)
            self.tell(Broke(call, InternalError("a defect")))
        elif how == "fault":
            self.pool.give_back(call.member)
            self.tell(Failed(call, Failure(Refusal("fault"), error, *about, status=200)))
        elif isinstance(how, int):
            refusal = Refusal(STATUSES[how], batch_max=2 if how == 413 else None)
            self.tell(Failed(call, Failure(refusal, error, *about, status=how)))
        else:
            self.tell(Failed(call, Failure(Refusal("elsewhere"), error, *about, is_dead=how == "dead")))

    def step(self, kind: str, number: int, how: str | int) -> None:
        if kind == "send":
            self.send(number)
        elif kind == "end" and self.calls:
            self.end_call(number, how)
        elif kind == "leave" and self.requests:
            request = self.requests[number % len(self.requests)]
            request.phase = DONE  # the broker settles it
            self.waiting = [each for each in self.waiting if each is not request]
        elif kind in ("wait", "pass"):  # deadlines may pass before anything else happens
            self.clock.advance(number / 1000)
            if kind == "wait":
                self.tell(Tick())
        elif kind == "tick":
            self.tell(Tick())
        elif kind == "load":  # an endpoint of one slot rests between two calls then
            self.adjust(self.pool.members[number % len(self.pool.members)], load=0.95 if number % 3 else 0.1)
        self.form()
        self.check()

    def adjust(self, member: EndpointState, load: float) -> None:
        """As the watch over the endpoints does it once a second."""
        member.controller.answered(1, 0.1, self.clock())
        member.controller.report(load)
        member.controller.step(self.clock())
        self.pool.follow(member)

    def check(self) -> None:
        for member in self.pool.members:
            held = sum(call.member is member for call in self.calls)
            assert member.in_flight >= held
            assert member.offered + member.in_flight <= member.controller.slots or member.breaker.state != "closed"
        assert self.pool.free() == sum(member.offered for member in self.pool.members)

    def finish(self) -> None:
        """From now on each call is answered, and time passes."""
        for _ in range(2000):
            while self.calls:
                self.end_call(0, "answered")
            for request in [each for each in self.waiting if each.deadline <= self.clock()]:
                self.waiting.remove(request)
                request.phase = DONE  # the broker settles it
            if all(request.phase == DONE for request in self.requests) and not self.scheduler.running:
                break
            self.clock.advance(0.01)
            self.tell(Tick())
            self.form()
        assert not [request for request in self.requests if request.phase != DONE], "somebody is forgotten"
        assert not self.scheduler.running
        self.clock.advance(60.0)
        for _ in range(2 + len(self.pool.members)):
            self.tell(Tick())  # slots that were held, and probes
        for member in self.pool.members:
            assert member.in_flight == 0 and member.helped == 0
            assert member.offered == (max(1, member.limit) if member.breaker.state == "closed" else 1)


@settings(max_examples=2 * settings().max_examples)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3), STEPS, st.integers(0, 2**32), st.sampled_from([None, 0.3, 1.0])
)
def test_everybody_gets_one_outcome_and_every_slot_comes_back(
    slots: list[int], steps: list[tuple[str, int, str | int]], seed: int, others: float | None
) -> None:
    play = Play(slots, seed, others)
    for step in steps:
        play.step(*step)
    play.finish()


def test_a_broken_answer_gives_its_slot_back_once() -> None:
    """Over Redis its requests go to another batcher, and the slot stays taken for a while after other failures."""
    play = Play([1, 1], 1, others=1.0)
    for _ in range(4):
        play.send(1)
        play.end_call(0, "fault")
        play.clock.advance(1.1)
        play.tell(Tick())
        play.check()
    play.finish()


def test_one_that_is_late_for_a_step_of_a_search_is_told() -> None:
    play = Play([2], 1, others=None)
    play.scheduler.service_s = 0.002

    def form(name: str, *timeouts_s: float) -> None:
        batch = [
            make_request(f"{name} {number}", play.witness, now=play.clock(), total_timeout_s=timeout_s)
            for number, timeout_s in enumerate(timeouts_s)
        ]
        for request in batch:
            request.phase = RUNNING
        play.requests += batch
        play.tell(Formed(batch, play.scheduler.take(batch), do_nothing))

    form("other", 9.0)
    form("search", 5.0, 5.0, 5.0, 0.02)
    play.clock.advance(0.01)
    play.end_call(1, 413)  # two of them are sent, two wait for a slot
    play.clock.advance(0.0101)
    play.end_call(0, "answered")
    play.finish()


def test_a_retry_for_clients_that_have_left_is_given_up() -> None:
    """It waited for another endpoint's slot, and kept the slot of the one that had failed, until its last deadline."""
    play = Play([1, 1], 1, others=None)
    for _ in range(2):
        play.send(8)
    play.end_call(0, 503)
    assert play.scheduler.running == 1
    for request in play.requests:
        if not any(request in call.members for call in play.calls):
            request.phase = DONE
    play.waiting.clear()
    play.clock.advance(0.2)
    play.tell(Tick())
    assert play.scheduler.running == 0
    play.finish()


@pytest.mark.parametrize("slots", [[1], [1, 1]])
@pytest.mark.parametrize("is_last_moment", [False, True])
def test_an_input_at_fault_that_leaves_blames_no_endpoint(slots: list[int], is_last_moment: bool) -> None:
    """All others of its batch were answered later on: that taught a wrong limit, and opened the breaker. It may leave
    when the next call with it was decided on, and is not written yet.
    """
    play = Play(slots, 1, others=None)
    for _ in range(20):
        play.send(MAX_BATCH - 1)
        bad = play.calls[0].members[3]
        play.end_call(0, 500)  # or the second endpoint is asked, which refuses it as well
        if not is_last_moment:
            bad.phase = DONE
        for _ in range(50):
            if not play.calls:
                break
            call = play.calls[0]
            if bad in call.members and is_last_moment and len(call.members) <= MAX_BATCH // 2:
                bad.phase = DONE
                play.calls[0] = call._replace(members=[each for each in call.members if each is not bad])
            if not play.calls[0].members:
                play.tell(NotMade(play.calls.pop(0)))
            else:
                play.end_call(0, 500 if bad in play.calls[0].members else "answered")
            play.clock.advance(0.01)
            play.tell(Tick())
        play.form()
    assert not play.limits_learned
    assert all(member.breaker.failures == 0 for member in play.pool.members)
    play.finish()
