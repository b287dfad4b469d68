"""How many GPUs, batchers and gateways are wanted: each rule of core/scaling.py, on a clock of its own."""

from collections.abc import Callable, Iterator

import msgspec
import pytest

from carpool.core.scaling import Decision, ModelLoad, ServerLoad, scale_gpus, scale_servers

TICK_S = 2.0
# One GPU serves 320/s: 64 in 200 ms.
EACH = 320.0


def load_of(rps: float, works: int = 4, **others: object) -> ModelLoad:
    return ModelLoad(**{"works": works, "gpu_rps": EACH, "sync_rps": rps} | others)  # type: ignore[arg-type]


class Fleet:
    """What is decided for a model, every two seconds."""

    def __init__(self, wanted: int | None = None) -> None:
        self.now = 1_000_000.0
        self.last: Decision | None = None
        if wanted is not None:
            sync_at = self.now if wanted else 0.0
            self.last = Decision(wanted=wanted, why="", needed_at=self.now, sync_at=sync_at, gpu_rps=EACH)

    def decide(self, load: ModelLoad | None, **options: int) -> int | None:
        self.last = scale_gpus(load, self.last, self.now, **options)
        self.now += TICK_S
        return None if self.last is None else self.last.wanted

    def after(self, seconds: float, load: Callable[[float], ModelLoad | None] | ModelLoad | None) -> int | None:
        """What is wanted when a load went on for so long."""
        return list(self.during(seconds, load))[-1]

    def during(
        self, seconds: float, load: Callable[[float], ModelLoad | None] | ModelLoad | None
    ) -> Iterator[int | None]:
        since = self.now
        while self.now - since < seconds:
            yield self.decide(load(self.now - since) if callable(load) else load)

    @property
    def why(self) -> str:
        assert self.last is not None
        return self.last.why


class TestUp:
    def test_what_comes_by_what_one_gpu_serves_at_three_quarters(self) -> None:
        fleet = Fleet()
        assert fleet.after(20, load_of(10_000)) == 42  # 31.25 / 0.75
        assert fleet.why == "10,000/s come, and a GPU serves 320/s"

    def test_small_batches_are_no_spare_capacity_while_requests_are_refused(self) -> None:
        """As with 200 lanes of one or two requests each: nobody else's would fit into a batch."""
        busy = load_of(300, works=20, busy_share=1.0, fill=0.14)
        assert Fleet(20).after(600, busy) in range(5, 20)
        fleet = Fleet(20)
        assert fleet.after(20, msgspec.structs.replace(busy, refused_rps={"free": 100.0})) == 27  # 20 / 0.75
        assert fleet.after(3600, msgspec.structs.replace(busy, refused_rps={"free": 5.0})) == 27

    def test_gpus_that_start_are_not_ordered_again(self) -> None:
        fleet = Fleet(4)
        fleet.after(20, load_of(10_000))
        for works in (4, 4, 12, 30, 42):
            assert fleet.after(60, load_of(10_000, works)) == 42

    @pytest.mark.parametrize(("rps", "wanted"), [(0.69, 9), (0.71, 10), (0.79, 10), (0.81, 11)])
    def test_between_70_and_80_percent_the_number_stays(self, rps: float, wanted: int) -> None:
        fleet = Fleet(10)
        assert fleet.after(700, load_of(rps * 10 * EACH, 10)) == (wanted if wanted != 9 else 10)
        if wanted == 9:  # 9.2 are needed: no whole number is nearer
            assert fleet.after(700, load_of(0.65 * 10 * EACH, 10)) == 9

    def test_gpus_busy_with_full_batches_count_where_the_estimate_is_too_good(self) -> None:
        fleet = Fleet(10)
        assert fleet.after(20, load_of(1000, 10, busy_share=0.97, fill=1.0)) == 13
        assert fleet.why == "10 GPUs are busy for 97% of their time"

    def test_gpus_busy_with_small_batches_do_not(self) -> None:
        fleet = Fleet(1)
        assert fleet.after(700, load_of(5, 1, busy_share=1.0, fill=0.02)) == 1

    def test_what_was_refused_for_load_counts(self) -> None:
        fleet = Fleet(2)
        assert fleet.after(20, load_of(2400, 2, refused_rps={"free": 1760.0, "paid": 0.0})) == 10
        assert fleet.why == "2,400/s come (1,760/s of them refused: free), and a GPU serves 320/s"

    def test_tasks_that_wait_are_served_in_time(self) -> None:
        fleet = Fleet(2)
        assert fleet.after(20, load_of(0, 2, task_rps=100.0, waiting=1_000_000, drain_s=300.0)) == 11
        assert fleet.why == "1,000,000 wait and 100/s come, and a GPU serves 320/s"

    def test_what_waits_while_gpus_start_is_served_by_their_headroom(self) -> None:
        fleet, waiting = Fleet(4), 0.0
        for _ in range(90):  # three minutes of twice what 4 GPUs serve
            waiting += TICK_S * 4 * EACH
            fleet.decide(load_of(0, 4, task_rps=8 * EACH, waiting=int(waiting)))
        assert fleet.last is not None
        assert fleet.last.wanted == 11  # 8 / 0.75

    def test_a_wait_that_is_too_long_by_more_than_half_of_the_deadline(self) -> None:
        fleet = Fleet(4)
        assert fleet.after(20, load_of(100, 4, wait_s=0.9, wait_max_s=2.0)) == 4
        assert fleet.after(20, load_of(100, 4, wait_s=1.3, wait_max_s=2.0)) == 6
        assert fleet.why == "a request would wait for 1.3 s, and may for 2 s"

    def test_a_wait_orders_at_most_twice_as_many_and_only_once(self) -> None:
        fleet = Fleet(4)
        assert fleet.after(20, load_of(100, 4, wait_s=30.0, wait_max_s=2.0)) == 8
        assert fleet.after(20, load_of(100, 6, wait_s=30.0, wait_max_s=2.0)) == 8  # two have started

    def test_at_once_and_all_of_it(self) -> None:
        fleet = Fleet(10)
        fleet.after(60, load_of(2400, 10))
        wanted = list(fleet.during(60, load_of(4800, 10)))
        assert set(wanted) == {10, 20}
        assert wanted.index(20) * TICK_S <= 16

    def test_a_burst_orders_nothing(self) -> None:
        fleet = Fleet(10)
        for _ in range(20):
            fleet.after(30, load_of(2400, 10))
            assert fleet.after(10, load_of(9600, 10, waiting=10_000, wait_s=2.0, wait_max_s=2.0)) == 10

    def test_never_more_than_the_most(self) -> None:
        fleet = Fleet(4)
        fleet.decide(load_of(1e9), most=50)
        for _ in range(20):
            fleet.decide(load_of(1e9), most=50)
        assert fleet.last is not None
        assert fleet.last.wanted == 50
        assert "50 is the most" in fleet.why


class TestDown:
    def test_slowly_by_a_fifth_after_five_minutes(self) -> None:
        fleet = Fleet(50)
        wanted = list(fleet.during(1500, load_of(30 * 0.75 * EACH, 50)))
        seen = list(dict.fromkeys(wanted))
        assert seen == [50, 40, 32]  # of which 70 % are busy
        assert wanted.index(40) * TICK_S >= 300
        assert wanted.index(32) - wanted.index(40) >= 150

    def test_one_at_least(self) -> None:
        fleet = Fleet(3)
        assert list(dict.fromkeys(fleet.during(700, load_of(EACH * 0.5, 3)))) == [3, 2, 1]

    def test_why_says_that_it_falls(self) -> None:
        fleet = Fleet(50)
        fleet.after(30, load_of(30 * 0.75 * EACH, 50))
        assert fleet.why == "7,200/s come, and a GPU serves 320/s; 30 would do, and the number falls slowly"

    def test_what_was_needed_in_the_last_minutes_counts(self) -> None:
        fleet = Fleet(50)
        # Every four minutes as many are needed again, for 20 s.
        wanted = fleet.during(3600, lambda at: load_of((50 if at % 240 < 20 else 30) * 0.75 * EACH, 50))
        assert set(wanted) == {50}

    def test_never_below_half_of_what_the_peak_of_the_hour_needed(self) -> None:
        fleet = Fleet(40)
        fleet.after(300, load_of(40 * 0.75 * EACH, 40))
        wanted = list(fleet.during(2 * 3600, load_of(EACH, 40)))
        assert min(each for each in wanted[:1700] if each is not None) == 20
        assert wanted[-1] is not None
        assert wanted[-1] <= 8

    def test_one_stays_for_synchronous_requests(self) -> None:
        fleet = Fleet(3)
        assert fleet.after(3600, load_of(EACH, 3)) == 2
        assert fleet.after(3500, load_of(0, 2)) == 1

    def test_none_for_tasks_alone_once_nothing_waits(self) -> None:
        fleet = Fleet(3)
        fleet.after(3700, load_of(0, 3, task_rps=EACH))
        assert set(fleet.during(3600, load_of(0, 2, waiting=1))) == {2, 1}
        assert fleet.after(700, load_of(0, 1)) == 0

    def test_from_none_it_goes_up_at_once_by_what_a_gpu_served(self) -> None:
        fleet = Fleet(0)
        assert fleet.after(60, load_of(0, 0, gpu_rps=0.0)) == 0
        assert fleet.after(20, load_of(0, 0, gpu_rps=0.0, waiting=960_000)) == 10
        never_known = Fleet()
        assert never_known.decide(load_of(0, 0, gpu_rps=0.0)) is None
        assert never_known.after(20, load_of(0, 0, gpu_rps=0.0, waiting=1)) == 1


class TestWhenNotTo:
    def test_unknown_is_not_zero(self) -> None:
        fleet = Fleet()
        assert fleet.decide(None) is None
        fleet = Fleet(12)
        assert set(fleet.during(7200, None)) == {12}
        assert fleet.why == "it is not known what comes, so the number stays"

    def test_endpoints_that_fail_buy_nothing_and_sell_nothing(self) -> None:
        fleet = Fleet(10)
        failing = load_of(9600, 4, failing=6, waiting=10**6, wait_s=9.0, wait_max_s=2.0)
        assert set(fleet.during(600, failing)) == {10}
        assert "6 of its GPUs answer with errors" in fleet.why
        assert set(fleet.during(600, load_of(0, 4, failing=6))) == {10}

    def test_while_some_fail_the_load_counts(self) -> None:
        fleet = Fleet(10)
        assert fleet.after(20, load_of(4800, 8, failing=2)) == 20

    def test_the_number_of_those_that_died_stays(self) -> None:
        """Their machines are replaced by whoever runs them; the load is as it was."""
        fleet = Fleet(20)
        assert set(fleet.during(900, load_of(4800, 10, busy_share=1.0, wait_s=2.0, wait_max_s=2.0))) == {20}

    def test_while_none_works_nothing_is_known(self) -> None:
        fleet = Fleet(20)
        assert set(fleet.during(900, load_of(4800, 0, gpu_rps=0.0, waiting=10**6))) == {20}

    def test_before_the_first_call_has_ended(self) -> None:
        fleet = Fleet()
        assert set(fleet.during(60, load_of(4800, 3, gpu_rps=0.0, waiting=10**6))) == {3}
        assert fleet.why == "no call has ended yet, so the number stays"

    def test_after_that_a_fall_waits_as_long_as_ever(self) -> None:
        fleet = Fleet(20)
        fleet.after(900, None)
        assert fleet.after(290, load_of(EACH, 20)) == 20
        assert fleet.after(40, load_of(EACH, 20)) == 16

    def test_a_clock_that_was_set_back_stops_nothing(self) -> None:
        fleet = Fleet(20)
        fleet.after(60, load_of(4800, 20))
        fleet.now -= 500_000
        assert fleet.after(700, load_of(EACH, 20)) == 13
        assert fleet.after(60, load_of(9600, 20)) == 40


class TestServers:
    def decided(self, load: ServerLoad | None, wanted: int, seconds: float = 30.0) -> Decision:
        now = 1_000_000.0
        last: Decision | None = Decision(wanted=wanted, why="", needed_at=now, sync_at=now)
        until = now + seconds
        while now < until:
            last = scale_servers(load, last, now)
            now += TICK_S
        assert last is not None
        return last

    def test_by_the_cores_that_they_use(self) -> None:
        found = self.decided(ServerLoad(live=2, cores=3.4, rps=10.0, rps_each=1.0), 2)
        assert (found.wanted, found.why) == (5, "they use 3.40 cores")

    def test_by_requests_where_they_do_not_say(self) -> None:
        found = self.decided(ServerLoad(live=2, rps=84_000.0, rps_each=28_000.0), 2)
        assert (found.wanted, found.why) == (5, "84,000/s come, and one takes 28,000/s")

    def test_slowly_down_and_never_none(self) -> None:
        load = ServerLoad(live=8, cores=0.01)
        assert self.decided(load, 8, 290.0).wanted == 8
        assert self.decided(load, 8, 320.0).wanted == 7
        assert self.decided(load, 8, 7200.0).wanted == 1

    def test_as_many_as_the_gpus_need(self) -> None:
        found = self.decided(ServerLoad(live=4, cores=0.5, least=9), 4)
        assert (found.wanted, found.why) == (9, "each has GPUs of its own, and so many GPUs need them")

    def test_unknown_is_not_zero(self) -> None:
        assert scale_servers(None, None, 0.0) is None
        assert scale_servers(ServerLoad(live=0), None, 0.0) is None
        assert self.decided(None, 8, 7200.0).wanted == 8
        assert self.decided(ServerLoad(live=0), 8, 7200.0).wanted == 8


def test_what_is_remembered_survives_being_written() -> None:
    fleet = Fleet(50)
    fleet.after(900, load_of(30 * 0.75 * EACH, 50))
    assert fleet.last is not None
    again = msgspec.json.decode(msgspec.json.encode(fleet.last), type=Decision)
    assert again == fleet.last
    # An hour and more, in a few hundred bytes.
    fleet.after(7200, load_of(30 * 0.75 * EACH, 50))
    assert len(fleet.last.recent) <= 10
    assert len(fleet.last.peaks) <= 13
