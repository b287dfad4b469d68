"""Rate limits of one process, and how many requests an owner may have at once."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import count

import pytest

from carpool.admission import shared_limits
from carpool.admission.limits import LEASE_S, TIDY_FROM, Lease, LocalLimits, Permits
from carpool.admission.shared_limits import SharedLimits
from carpool.core.errors import CarpoolError, ClientLeft
from carpool.core.ports import Caller, LimitVerdict, RateAsk, RateLimit, RateTold
from carpool.core.request import Request
from carpool.testing import FakeClock, Witness, make_request
from support.rates import limited


def left_of(entry: object) -> int:
    assert isinstance(entry, bytes)
    return int(entry.partition(b";r=")[2].partition(b";")[0])


def refused(entry: object) -> CarpoolError:
    assert isinstance(entry, CarpoolError)
    return entry


class TestOneProcess:
    def test_what_is_told(self) -> None:
        clock = FakeClock()
        limits, caller = LocalLimits(clock), limited(20, burst=2)
        assert limits.enter(caller) == b'RateLimit-Policy: "default";q=20;w=60\r\nRateLimit: "default";r=1;t=3\r\n'
        limits.enter(caller)
        clock.advance(0.5)
        refusal = refused(limits.enter(caller))
        assert (refusal.code, refusal.status, refusal.retry_after_s) == ("rate-limited", 429, 3)
        assert refusal.header_lines == b'RateLimit-Policy: "default";q=20;w=60\r\nRateLimit: "default";r=0;t=6\r\n'
        assert "20 requests a minute" in refusal.detail

    def test_whoever_gets_a_higher_limit_may_use_it(self) -> None:
        """A bucket of 1 a minute is full again in 100 minutes: no matter to one that has 1,000 a minute."""
        limits = LocalLimits(FakeClock())
        for _ in range(100):
            limits.enter(limited(1, burst=100))
        assert left_of(limits.enter(limited(1000, burst=100))) == 99
        assert refused(limits.enter(limited(1, burst=100))).retry_after_s == 60

    def test_a_call_of_several_takes_as_many_or_nothing(self) -> None:
        clock = FakeClock()
        limits, caller = LocalLimits(clock), limited(60, burst=5)
        assert left_of(limits.enter(caller, 3)) == 2
        refusal = refused(limits.enter(caller, 4))
        assert refusal.retry_after_s == 2
        assert "counts as 4" in refusal.detail
        assert b"r=0;t=3" in refusal.header_lines
        assert left_of(limits.enter(caller, 2)) == 0

    def test_one_of_more_than_the_burst_comes_in_on_a_full_bucket_and_leaves_a_debt(self) -> None:
        clock = FakeClock()
        limits, caller = LocalLimits(clock), limited(60, burst=5)
        limits.enter(caller)
        assert refused(limits.enter(caller, 20)).retry_after_s == 1
        clock.advance(1.0)
        assert limits.enter(caller, 20) == (
            b'RateLimit-Policy: "default";q=60;w=60\r\nRateLimit: "default";r=0;t=20\r\n'
        )
        assert refused(limits.enter(caller)).retry_after_s == 16
        assert refused(limits.enter(caller, 20)).retry_after_s == 20
        left_of(limits.enter(limited(60, burst=5, owner="another")))
        clock.advance(16.0)
        assert left_of(limits.enter(caller)) == 0
        refused(limits.enter(caller))

    def test_debts_are_remembered_and_bounded(self) -> None:
        clock = FakeClock()
        limits = LocalLimits(clock, buckets_max=4 * TIDY_FROM)
        for number in range(2 * TIDY_FROM):
            left_of(limits.enter(limited(60, owner=str(number)), 50))
        clock.advance(1.0)
        assert refused(limits.enter(limited(60, owner="0"))).retry_after_s == 49
        for number in range(20 * TIDY_FROM):
            limits.enter(limited(60, owner=f"other {number}"), 50)
        assert len(limits) <= 4 * TIDY_FROM

    @pytest.mark.parametrize("caller", [Caller("o", 0), limited(0)])
    def test_who_has_no_limit_comes_in(self, caller: Caller) -> None:
        limits = LocalLimits(FakeClock())
        assert {limits.enter(caller) for _ in range(100)} == {b""}

    def test_a_part_of_a_limit(self) -> None:
        clock, gateways = FakeClock(), 4
        limits, caller = LocalLimits(clock, lambda: gateways), limited(60, burst=8)
        assert [left_of(limits.enter(caller)) for _ in range(2)] == [1, 0]
        assert refused(limits.enter(caller)).retry_after_s == 4
        gateways = 2
        assert [left_of(limits.enter(caller)) for _ in range(4)] == [3, 2, 1, 0]
        assert refused(limits.enter(caller)).retry_after_s == 2

    def test_a_part_is_at_least_something(self) -> None:
        limits = LocalLimits(FakeClock(), lambda: 0)
        assert left_of(limits.enter(limited(1))) == 0


class TestMemory:
    def test_owners_whose_buckets_are_full_are_forgotten(self) -> None:
        clock = FakeClock()
        limits = LocalLimits(clock)
        for number in range(10 * TIDY_FROM):
            limits.enter(limited(6, owner=str(number)))
            clock.advance(1.0)
        assert len(limits) <= 2 * TIDY_FROM

    def test_there_is_a_bound_also_where_none_is_full(self) -> None:
        limits = LocalLimits(FakeClock(), buckets_max=100)
        for number in range(1000):
            limits.enter(limited(1, owner=str(number)))
        assert len(limits) <= 100
        refused(limits.enter(limited(1, owner="999")))  # the last ones are remembered


class TestAtOnce:
    def test_a_place_is_free_again_when_a_request_has_its_outcome(self) -> None:
        permits, witness = Permits(), Witness()
        first, second, third = (make_request(str(number), witness, now=0.0, owner="o") for number in range(3))
        assert permits.give([first], 2) is None
        assert permits.give([second], 2) is None
        assert refused(permits.give([third], 2)).status == 429
        first.settle(ClientLeft("left"), 1.0)
        assert permits.give([third], 2) is None
        first.settle(ClientLeft("left"), 1.0)  # not again
        assert permits.give([make_request("4", witness, now=0.0, owner="o")], 2) is not None
        second.settle(ClientLeft("left"), 1.0)
        third.settle(ClientLeft("left"), 1.0)
        assert len(permits) == 0

    def test_one_that_is_refused_later_gives_its_place_back(self) -> None:
        permits, witness = Permits(), Witness()
        for number in range(5):
            request = make_request(str(number), witness, now=0.0, owner="o")
            assert permits.give([request], 1) is None
            request.settle(ClientLeft("shed"), 0.0)
        assert len(permits) == 0

    def test_a_call_of_several_has_places_for_all_or_none(self) -> None:
        permits, witness = Permits(), Witness()

        def call(name: str, size: int) -> list[Request]:
            return [make_request(f"{name}.{number}", witness, now=0.0, owner="o") for number in range(size)]

        first, second, larger = call("a", 3), call("b", 2), call("c", 9)
        assert permits.give(first, 4) is None
        assert refused(permits.give(second, 4)).status == 429
        assert permits.give([make_request("one", witness, now=0.0, owner="o")], 4) is None
        assert permits.give([make_request("two", witness, now=0.0, owner="o")], 4) is not None
        for request in first:
            request.settle(ClientLeft("left"), 1.0)
        assert permits.give(second, 4) is None
        assert refused(permits.give(larger, 4)).retry_after_s == 1  # while it has others


LIMIT = RateLimit(6000, 100)


def ask_of(lease: Lease, need: int, now: float) -> RateAsk:
    return lease.ask("o", need, now)


class TestLease:
    def lease(self, leased: int = 5) -> Lease:
        """One that was asked for and given at 100.0."""
        lease = Lease(LIMIT)
        ask_of(lease, 1, 100.0)
        lease.told(RateTold(1, leased, 0.0), 100.0)
        return lease

    def test_it_lets_in_as_many_as_were_leased_for_its_time(self) -> None:
        lease = self.lease(5)
        assert lease.enter(100.5, 3)
        assert lease.enter(100.5, 3) is None
        assert lease.enter(100.5)
        assert lease.enter(100.0 + LEASE_S) is None

    def test_the_next_one_begins_when_it_is_used_or_over_and_adds_no_time_to_it(self) -> None:
        lease = self.lease(5)
        assert lease.enter(101.25)
        assert ask_of(lease, 0, 101.25).want == 0  # what is left is enough
        assert lease.enter(101.5, 3)
        assert ask_of(lease, 0, 101.5).want == 23
        assert lease.enter(101.6)  # while the question is out
        lease.told(RateTold(0, 4, 0.0), 101.7)
        assert lease.enter(102.5, 4)
        assert lease.enter(102.5) is None
        ask_of(lease, 0, 105.0)
        lease.told(RateTold(0, 9, 0.0), 105.0)
        ask_of(lease, 0, 106.0)
        lease.told(RateTold(0, 4, 0.0), 106.0)
        assert lease.enter(107.1, 4)  # the nine are lost
        assert lease.enter(107.1) is None

    def test_one_that_is_not_used_is_not_renewed(self) -> None:
        lease = self.lease(5)
        assert not lease.is_due(101.0)
        assert lease.is_due(101.5)
        assert not lease.is_used()
        assert not lease.is_forgettable(101.5)
        assert lease.is_forgettable(102.0)
        lease.enter(101.5)
        assert lease.is_used()

    def test_what_is_wanted_follows_the_rate_and_has_a_bound(self) -> None:
        lease = Lease(LIMIT)
        assert ask_of(lease, 1, 100.0).want == 0
        lease.told(RateTold(1, 0, 0.0), 100.0)
        assert ask_of(lease, 1, 100.25).want == 8
        lease.told(RateTold(1, 0, 0.0), 100.25)
        assert ask_of(lease, 50, 100.3).want == 200  # what comes back in its time

    def test_a_refusal_tells_how_long_there_is_nothing(self) -> None:
        lease = Lease(RateLimit(60, 1))
        ask = ask_of(lease, 2, 100.0)
        lease.told(RateTold(1, 0, ask.capacity + 0.5), 100.1)
        assert lease.is_over(101.4, 1)
        assert not lease.is_over(101.5, 1)
        assert lease.refusal(100.1).retry_after_s == 2
        assert b";r=0;" in lease.refusal(100.1).header_lines

    def test_a_debt_is_asked_for_now_and_then_and_told_as_it_is(self) -> None:
        lease = Lease(RateLimit(60, 5))
        ask = lease.ask("o", 1, 100.0, 100)
        lease.told(RateTold(1, 0, 100.0), 100.0)
        for cost, there in ((100, 5), (1, 1)):
            assert lease.is_over(101.9, cost)
            assert not lease.is_over(102.0, cost)  # the budget may have forgotten it
            assert lease.refusal(100.5, cost).retry_after_s == 100 - (ask.capacity - there)


class Answering:
    """A budget that grants everything, and leases nothing, in the next turn."""

    def ask(self, asks: Sequence[RateAsk], told: Callable[[str, RateTold | None], None]) -> None:
        for ask in asks:
            asyncio.get_running_loop().call_soon(told, ask.owner, RateTold(ask.need, 0, 0.0))


def test_calls_that_count_the_same_are_asked_for_together() -> None:
    clock = FakeClock()

    async def main() -> None:
        asked: list[tuple[int, int]] = []

        class Listening(Answering):
            def ask(self, asks: Sequence[RateAsk], told: Callable[[str, RateTold | None], None]) -> None:
                asked.extend((ask.need, ask.cost) for ask in asks)
                super().ask(asks, told)

        limits = SharedLimits(Listening(), is_reachable=lambda: True, sharers=lambda: 1, clock=clock)
        caller = limited(60, burst=9)
        entries: list[LimitVerdict] = []
        for cost in (1, 7, 1, 200, 7):
            assert limits.enter(caller, cost) is None
            limits.when_known(caller, entries.append, cost)
        await asyncio.sleep(0.01)
        assert [left_of(entry) for entry in entries] == [9] * 5
        assert asked == [(2, 1), (2, 7), (1, 200)]

    clock.run(main())


def test_leases_are_renewed_however_many_owners_were_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(shared_limits, "OWNERS_MAX", 16)
    monkeypatch.setattr(shared_limits, "TIDY_FROM", 16)

    async def main() -> None:
        asked: list[RateAsk] = []

        class Leasing:
            def ask(self, asks: Sequence[RateAsk], told: Callable[[str, RateTold | None], None]) -> None:
                asked.extend(asks)
                for ask in asks:
                    answer = RateTold(ask.need, ask.want, 0.0)
                    asyncio.get_running_loop().call_later(0.001, told, ask.owner, answer)

        limits = SharedLimits(Leasing(), is_reachable=lambda: True, sharers=lambda: 1, clock=clock)
        limits.start()
        for number in range(400):
            caller = limited(6000, burst=100, owner=str(number % 200))
            for cost in (1, 3, 200):
                if limits.enter(caller, cost) is None:
                    limits.when_known(caller, lambda entry: None, cost)
            await asyncio.sleep(0.01)
        asked.clear()
        steady = limited(6000, burst=100, owner="steady")
        for _ in range(300):
            if limits.enter(steady) is None:
                limits.when_known(steady, lambda entry: None)
            await asyncio.sleep(0.01)
        # Some three seconds: it asks again and again, and nearly all of them come in by a lease.
        assert sum(ask.want for ask in asked if ask.owner == steady.account) > 200
        assert sum(ask.need for ask in asked if ask.owner == steady.account) < 10
        limits.close()

    clock.run(main())


def test_owners_that_do_not_come_any_more_are_forgotten() -> None:
    clock = FakeClock()

    async def main() -> None:
        limits = SharedLimits(Answering(), is_reachable=lambda: True, sharers=lambda: 1, clock=clock)
        for number in range(5 * shared_limits.TIDY_FROM):
            caller = limited(60, owner=str(number))
            assert limits.enter(caller) is None
            entered: list[LimitVerdict] = []
            limits.when_known(caller, entered.append)
            await asyncio.sleep(0.01)
            assert len(entered) == 1
        owners = int(repr(limits).partition("owners=")[2].split()[0])
        assert owners <= 2 * shared_limits.TIDY_FROM

    clock.run(main())


def test_nobody_is_forgotten_who_waits_while_others_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is told goes on at once: what it sent behind may be of so many owners that some are forgotten."""
    clock = FakeClock()
    monkeypatch.setattr(shared_limits, "OWNERS_MAX", 16)
    monkeypatch.setattr(shared_limits, "TIDY_FROM", 16)

    class Empty:
        def ask(self, asks: Sequence[RateAsk], told: Callable[[str, RateTold | None], None]) -> None:
            for ask in asks:
                empty_s = (ask.capacity + 5.0) * 60 / ask.per_minute
                asyncio.get_running_loop().call_later(0.01, told, ask.owner, RateTold(0, 0, empty_s))

    async def main() -> None:
        limits = SharedLimits(Empty(), is_reachable=lambda: True, sharers=lambda: 1, clock=clock)
        entered: list[LimitVerdict] = []
        others = count()

        def come(caller: Caller, known: Callable[[LimitVerdict], None]) -> None:
            entry = limits.enter(caller)
            if entry is None:
                limits.when_known(caller, known)
            else:
                known(entry)

        def go_on(entry: LimitVerdict) -> None:
            entered.append(entry)
            for _ in range(20 * 2 ** len(entered)):
                come(limited(60, owner=f"other {next(others)}"), lambda _: None)

        for _ in range(2):
            for _ in range(4):
                come(limited(60, burst=4), go_on)
            await asyncio.sleep(0.001)
        await asyncio.sleep(10.0)
        assert len(entered) == 8

    clock.run(main())
