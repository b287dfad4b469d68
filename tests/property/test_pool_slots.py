"""The pool under any sequence of calls, ends of calls and limits, in virtual time."""

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.testing import FakeClock, FakeUpstream
from carpool.upstream.breaker import Breaker
from carpool.upstream.pool import EndpointPreference, EndpointState, Pool

FAILURES_MAX, LONGEST_PAUSE_S = 2, 4.0
ENDS = ("well", "badly", "nothing")
STEPS = st.tuples(
    st.sampled_from(["take", "take", "end", "end", "retry", "limit", "look", "wait"]),
    st.integers(0, 999),
    st.sampled_from(ENDS),
)


class Play:
    """A pool, and the calls under way."""

    def __init__(self, clock: FakeClock, slots: list[int], eject_share_max: float) -> None:
        self.clock = clock
        self.pool = Pool(
            [FakeUpstream(f"e{number}", count) for number, count in enumerate(slots)],
            clock,
            eject_share_max=eject_share_max,
            make_breaker=lambda: Breaker(FAILURES_MAX, 1.0, LONGEST_PAUSE_S),
            random_share=lambda: 0.5,
        )
        self.ejected_max = max(1, int(len(slots) * eject_share_max))
        self.out: list[EndpointState] = []

    def end(self, member: EndpointState, how: str, gives_back_first: bool) -> None:
        """As the dispatcher does: the slot before the verdict, or after it if there was no answer."""
        pool = self.pool
        verdicts: dict[str, Callable[[EndpointState], None]] = {
            "well": pool.record_success,
            "badly": pool.record_failure,
            "nothing": pool.says_nothing,
        }
        verdict = verdicts[how]
        was_closed = {other for other in pool.members if other.breaker.state == "closed"}
        if gives_back_first:
            pool.give_back(member)
        verdict(member)
        if not gives_back_first:
            pool.give_back(member)
        if how == "well":
            assert member.breaker.state == "closed"
            assert not pool.is_down
        opened = {other for other in was_closed if other.breaker.state == "open"}
        if opened and any(other.breaker.state == "closed" for other in pool.members):
            out = sum(other.breaker.state != "closed" for other in pool.members)
            assert opened == {member}
            assert out <= self.ejected_max or any(pool.is_well(other) for other in was_closed - opened)
        elif opened:
            assert all(other.breaker.is_failing for other in pool.members)  # all of them, and only when all fail

    async def step(self, kind: str, number: int, how: str) -> None:
        pool = self.pool
        if kind == "take" and pool.free():
            self.out.append(pool.take())
        elif kind == "end" and self.out:
            self.end(self.out.pop(number % len(self.out)), how, gives_back_first=number % 2 == 0)
        elif kind == "retry":
            failed = pool.members[number % len(pool.members) :][: number % 3]
            member = pool.take_at_once(EndpointPreference(frozenset(failed), known_well=number % 5 == 0))
            self.out += [] if member is None else [member]
        elif kind == "limit":
            self.adjust(pool.members[number % len(pool.members)], load=0.1 if number % 5 else 1.0)
        elif kind == "look":
            pool.look()
            for member in pool.members:
                if member.breaker.state == "closed" and member.rests_until <= self.clock():
                    assert member.offered + member.in_flight >= max(1, member.limit)  # nothing rests for too long
        elif kind == "wait":
            await asyncio.sleep(number / 500)

    def adjust(self, member: EndpointState, load: float) -> None:
        """As the watch over the endpoints does it once a second."""
        member.controller.answered(1, 0.1, self.clock())
        member.controller.report(load)
        member.controller.step(self.clock())
        self.pool.follow(member)

    def check(self) -> None:
        pool = self.pool
        for member in pool.members:
            assert 0 < member.limit <= member.controller.slots
            assert member.offered >= 0
            assert self.out.count(member) == member.in_flight
            if member.breaker.state == "closed":
                offered = max(0, max(1, member.limit) - member.in_flight)
                is_resting = member.limit < 1 and not member.offered and pool.is_any_resting
                assert member.offered == offered or is_resting
            else:
                assert member.offered <= 1
                assert not member.offered or (member.in_flight == 0 and member.breaker.allows(self.clock()))
            assert member.probing == (member.breaker.state == "half-open")
        assert pool.busy() == len(self.out)
        assert pool.free() == sum(member.offered for member in pool.members)
        assert pool.is_down == (not pool.free() and all(m.breaker.state != "closed" for m in pool.members))
        in_use = [member for member in pool.members if member.breaker.state == "closed"]
        assert pool.total() == (sum(member.limit for member in in_use) or 1)
        for since in (0.0, self.clock() - 1.0, self.clock()):
            assert pool.is_alive(since) == any(member.well_at > since for member in in_use)
        self.check_options(in_use)

    def check_options(self, in_use: list[EndpointState]) -> None:
        """What the pool works out in few steps is what one finds who compares each endpoint with every other."""

        def fit(member: EndpointState, wish: EndpointPreference) -> int:
            return 0 if member in wish.failed else 2 if wish.known_well and self.pool.is_well(member) else 1

        members = self.pool.members
        options = [frozenset(failed) for failed in ((), members[:2], *([member] for member in members))]
        for wish in (EndpointPreference(failed, well) for failed in options for well in (False, True)):
            best = max((fit(member, wish) for member in in_use), default=0)
            assert self.pool.has_free(wish) == any(
                fit(member, wish) >= best for member in self.pool.members if member.offered
            )

    async def get_well(self) -> None:
        """Everything that is under way ends well, and so do the probes."""
        for member in self.pool.members:
            for _ in range(20):
                self.adjust(member, load=0.1)
        for _ in range(1 + len(self.pool.members)):
            while self.out:
                self.end(self.out.pop(), "well", gives_back_first=True)
            await asyncio.sleep(LONGEST_PAUSE_S + 0.1)
            self.pool.look()
            while self.pool.free() and any(member.breaker.state != "closed" for member in self.pool.members):
                self.out.append(self.pool.take())


@settings(max_examples=2 * settings().max_examples)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.sampled_from([0.2, 0.5, 1.0]),
    st.lists(STEPS, max_size=60),
)
def test_slots_are_conserved_and_all_are_offered_again_once_all_are_well(
    slots: list[int], eject_share_max: float, steps: list[tuple[str, int, Any]]
) -> None:
    clock = FakeClock()

    async def main() -> None:
        play = Play(clock, slots, eject_share_max)
        for kind, number, how in steps:
            await play.step(kind, number, how)
            play.check()
        await play.get_well()
        play.check()
        assert [member.offered for member in play.pool.members] == slots
        assert (play.pool.busy(), play.pool.is_down) == (0, False)
        assert repr(play.pool) == f"<Pool slots={sum(slots)} free={sum(slots)} down=False>"

    clock.run(main())


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.lists(st.booleans(), min_size=1, max_size=40))
def test_a_pool_that_went_down_comes_back_by_a_probe_alone(slots: list[int], probes: list[bool]) -> None:
    """Down for as long as probes fail, one at a time for each endpoint; the first that is answered ends it."""
    clock = FakeClock()

    async def main() -> None:
        play = Play(clock, slots, 0.5)
        pool = play.pool
        while not pool.is_down:
            play.end(pool.take(), "badly", gives_back_first=False)
            play.check()
        for is_well in probes:
            assert (pool.is_down, pool.free()) == (True, 0)
            down_since = clock()
            while not pool.free():
                await asyncio.sleep(0.05)
                pool.look()
                play.check()
            assert clock() - down_since <= LONGEST_PAUSE_S + 0.1
            while pool.free() > 1:  # others may be due too
                play.end(pool.take(), "badly", gives_back_first=True)
            probe = pool.take()
            assert (pool.is_down, probe.probing, probe.in_flight) == (True, True, 1)
            play.end(probe, "well" if is_well else "badly", gives_back_first=True)
            play.check()
            assert (pool.is_down, probe.breaker.state) == ((False, "closed") if is_well else (True, "open"))
            if is_well:
                assert pool.free() == probe.limit
                return

    clock.run(main())
