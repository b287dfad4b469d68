"""Coalesced requests under any order of arrivals, departures, takes, deadlines, outputs and failures: each has one
outcome, the right one, and none is forgotten.
"""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from carpool.broker import asked_twice
from carpool.broker.coalescer import SharedRequest
from carpool.core.errors import (
    CarpoolError,
    ClientLeft,
    DeadlineExceeded,
    Draining,
    InputRefused,
    QueueFull,
    UpstreamFailed,
)
from carpool.core.ports import NO_OPTIONS, RequestOptions
from carpool.core.request import DONE, QUEUED, RUNNING, Request
from carpool.testing import make_output
from support.shared_requests import CoalescerStand, FarAway

VALUES = st.sampled_from([b'"a"', b'"b"'])
WISHES = st.sampled_from([NO_OPTIONS] * 6 + [RequestOptions(no_store=True), RequestOptions(no_cache=True)])
ERRORS = st.sampled_from([UpstreamFailed, InputRefused, QueueFull, Draining])


class CoalescerMachine(RuleBasedStateMachine):
    asked = Bundle("asked")

    @initialize(
        is_far=st.booleans(),
        scope=st.sampled_from(["all", "owner"]),
        strict=st.booleans(),
        trial=st.sampled_from([asked_twice.TRIAL, 1]),
    )
    def begin(self, is_far: bool, scope: str, strict: bool, trial: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(asked_twice, "TRIAL", trial)  # with 1 there is a rest after each result that is kept
        self.far = FarAway() if is_far else None
        self.scope = scope
        self.door = CoalescerStand(far=self.far, scope=scope, strict_order=strict, waiting_max=12, ttl_s=6.0)
        # Request, its value, its deadline, its owner.
        self.all: list[tuple[Request, bytes, float, str]] = []
        self.refused = 0
        self.left: set[str] = set()
        self.running: list[Request] = []

    @rule(
        target=asked,
        value=VALUES,
        tier=st.integers(0, 2),
        owner=st.sampled_from("xy"),
        options=WISHES,
        timeout_s=st.sampled_from([0.05, 1.0, 4.0]),
        is_closed=st.sampled_from([False] * 5 + [True]),
    )
    def ask(
        self, value: bytes, tier: int, owner: str, options: RequestOptions, timeout_s: float, is_closed: bool
    ) -> Request:
        door = self.door
        door.refusal = QueueFull("closed") if is_closed else None
        text = b'"%b%b"' % (value[1:-1], owner.encode()) if self.scope == "owner" else value
        before = door.broker.outcomes.total()
        request = door.ask(
            value,
            tier=tier,
            owner=owner,
            options=options,
            total_timeout_s=timeout_s,
            queue_timeout_s=min(2.0, timeout_s),
        )
        door.refusal = None
        if request.phase == DONE and door.broker.outcomes.total() == before:
            self.refused += 1  # at the door: that is no outcome of an admitted request
        self.all.append((request, text, door.now + timeout_s, owner))
        return request

    @rule(
        target=asked,
        value=VALUES,
        each=st.lists(
            st.tuples(st.integers(1, 2), st.sampled_from("xy"), st.sampled_from([0.05, 1.0, 4.0])), min_size=2
        ),
        found_out=st.sampled_from(["", "x", "y"]),
    )
    def ask_together(self, value: bytes, each: list[tuple[int, str, float]], found_out: str) -> Any:
        """Identical requests at once: most of them join. Then one of their owners may be quarantined."""
        asked = [self.ask(value, tier, owner, NO_OPTIONS, timeout_s, False) for tier, owner, timeout_s in each]
        if found_out:
            self.door.quarantined.add(("m", found_out))
        return multiple(*asked)

    @rule(request=asked)
    def leave(self, request: Request) -> None:
        if self.door.witness.outcome(request) is None:
            self.left.add(request.id)
        self.door.coalescer.cancel(request)

    @rule(owner=st.sampled_from("xy"))
    def is_found_out_or_forgiven(self, owner: str) -> None:
        self.door.quarantined ^= {("m", owner)}

    @rule(seconds=st.sampled_from([0.01, 0.06, 0.5, 2.1]))
    def pass_time(self, seconds: float) -> None:
        self.door.pass_time(seconds)
        now = self.door.now
        for request, _, deadline, _ in self.all:
            is_looked_for = self.far is not None and bool(self.far.asked)
            assert deadline > now or is_looked_for or self.door.witness.outcome(request) is not None
        for leader in self.door.broker.waiting_requests():
            if isinstance(leader.waiter, SharedRequest) and ("m", leader.owner) in self.door.quarantined:
                owners = {("m", member.owner) for member in leader.waiter.members.values()}
                assert owners <= self.door.quarantined, "an owner waits for another that is quarantined"

    @rule(count=st.integers(1, 3))
    def take(self, count: int) -> None:
        self.running += self.door.take(count)

    @precondition(lambda self: self.running)
    @rule()
    def put_back(self) -> None:
        """A call failed, and its requests wait for another."""
        self.door.broker.put_back(self.running)
        self.running = []

    def value_of(self, request: Request) -> bytes:
        """What the model says: it knows the owner only where that is part of what is asked."""
        value: bytes = request.input
        return b'"%b%b"' % (value[1:-1], request.owner.encode()) if self.scope == "owner" else value

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        batch = [request for request in self.running if request.phase == RUNNING]
        self.running = []
        chosen = [request for request in batch if data.draw(st.booleans())]
        self.running = [request for request in batch if request not in chosen]
        self.door.broker.settle_batch(chosen, [make_output(self.value_of(request)) for request in chosen])

    @precondition(lambda self: self.running)
    @rule(error=ERRORS, is_closed=st.booleans())
    def fail(self, error: type[CarpoolError], is_closed: bool) -> None:
        self.door.refusal = QueueFull("closed") if is_closed else None
        self.door.broker.settle(self.running.pop(), error("no"))
        self.door.refusal = None

    @precondition(lambda self: self.far and self.far.asked)
    @rule(is_broken=st.booleans(), is_closed=st.sampled_from([False, False, True]))
    def tell(self, is_broken: bool, is_closed: bool) -> None:
        before = self.door.broker.outcomes.total()
        told = len(self.door.witness.told)
        self.door.refusal = QueueFull("closed") if is_closed else None
        assert self.far is not None
        self.far.answer(is_broken=is_broken)
        self.door.refusal = None
        # One that was alone and is refused, or is too late, never came in.
        self.refused += (len(self.door.witness.told) - told) - (self.door.broker.outcomes.total() - before)

    @invariant()
    def each_has_at_most_one_outcome_and_the_right_one(self) -> None:
        if not hasattr(self, "door"):
            return
        for request, text, _, _ in self.all:
            outcome: Any = self.door.outcome(request)  # asserts that there is one at most
            assert outcome is None or isinstance(outcome, CarpoolError) or outcome == text
            assert isinstance(outcome, ClientLeft) == (request.id in self.left)
        assert 0 <= self.door.coalescer.held <= 13 + len(self.far.asked if self.far else ())
        assert self.door.counts().total() == len(self.door.witness.told) - self.refused

    @invariant()
    def each_leader_that_waits_has_members(self) -> None:
        if hasattr(self, "door"):
            for leader in self.door.broker.waiting_requests():
                assert not leader.is_shared or (isinstance(leader.waiter, SharedRequest) and leader.waiter.members)

    @invariant()
    def each_that_waits_has_a_leader_or_is_looked_for(self) -> None:
        if not hasattr(self, "door"):
            return
        for request, _, _, _ in self.all:
            own = self.door.coalescer.own(request)
            if self.door.witness.outcome(request) is None and isinstance(own.held_by, SharedRequest):
                leader = own.held_by.leader
                assert leader.phase in (QUEUED, RUNNING)
                assert id(own) in own.held_by.members
                assert leader.deadline >= own.deadline or self.far is not None

    def teardown(self) -> None:
        if not hasattr(self, "door"):
            return
        self.patch.undo()
        door = self.door
        while self.far is not None and self.far.asked:
            self.tell(is_broken=True, is_closed=False)
        for _ in range(3):
            door.broker.settle_batch(batch := door.take(), [make_output(self.value_of(r)) for r in batch])
        door.pass_time(10.0)
        for request, _, _, _ in self.all:
            outcome = door.outcome(request)
            assert outcome is not None
            if isinstance(outcome, DeadlineExceeded):
                assert request.id not in self.left
        coalescer, broker = door.coalescer, door.broker
        assert (coalescer.held, coalescer.held_bytes, coalescer.queued, broker.held, broker.held_bytes) == (
            0,
            0,
            0,
            0,
            0,
        )
        self.each_has_at_most_one_outcome_and_the_right_one()


TestCoalescer = CoalescerMachine.TestCase
TestCoalescer.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
