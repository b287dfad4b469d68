"""What the rules of scaling never do, whatever comes."""

from itertools import pairwise
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from carpool.core.scaling import (
    COOLDOWN_S,
    DOWN_SHARE,
    MOST,
    PEAK_S,
    SOME_RPS,
    STANDS_S,
    Decision,
    ModelLoad,
    ServerLoad,
    scale_gpus,
    scale_servers,
)

rates = st.floats(0.0, 1e7)
counts = st.integers(0, 200)
loads = st.builds(
    ModelLoad,
    works=counts,
    failing=counts,
    gpu_rps=st.one_of(st.just(0.0), st.floats(0.01, 1e5)),
    sync_rps=st.one_of(st.just(0.0), rates),
    task_rps=st.one_of(st.just(0.0), rates),
    busy_share=st.floats(0.0, 1.0),
    fill=st.floats(0.0, 1.0),
    waiting=st.one_of(st.just(0), st.integers(0, 10**9)),
    wait_s=st.floats(0.0, 1e6),
    wait_max_s=st.floats(0.01, 60.0),
)
# Of a load, and for how long it stays so.
steps = st.lists(st.tuples(st.one_of(st.none(), loads), st.floats(1.0, 4000.0)), min_size=1, max_size=20)
EVERY_S = 3.0


def run(steps: list[tuple[ModelLoad | None, float]], most: int) -> list[tuple[float, int]]:
    """Each decision, with its time; those of a step come every few seconds at first, and then rarely."""
    now, last, found = 1e6, None, list[tuple[float, int]]()
    for load, seconds in steps:
        ends = now + seconds
        gap = EVERY_S
        while now < ends:
            last = scale_gpus(load, last, now, most)
            if last is not None:
                found.append((now, last.wanted))
            now += gap
            gap = min(gap * 1.1, 60.0)
    return found


@given(steps, st.integers(1, 100))
def test_never_more_than_the_most_nor_less_than_none(steps: list[tuple[ModelLoad | None, float]], most: int) -> None:
    assert all(0 <= wanted <= most for _, wanted in run(steps, most))


@given(steps)
def test_never_down_by_more_than_a_fifth_or_one_nor_sooner_than_after_five_minutes(
    steps: list[tuple[ModelLoad | None, float]],
) -> None:
    found = run(steps, MOST)
    changed = 1e6
    for (_, before), (at, after) in pairwise(found):
        if after < before:
            assert before - after <= max(1, before * DOWN_SHARE)
            assert at - changed >= COOLDOWN_S - 1e-6
        if after != before:
            changed = at


@given(
    loads.filter(lambda load: load.works >= load.failing and load.works > 0 and load.gpu_rps > 0.0),
    st.integers(0, MOST),
)
def test_a_constant_load_moves_the_number_one_way_and_then_no_more(load: ModelLoad, wanted: int) -> None:
    now = 1e6
    # As if it had always been so: an hour after the last synchronous request the need changes, not the number alone.
    sync_at = now if load.sync_rps >= SOME_RPS else now - PEAK_S
    last: Decision | None = Decision(wanted=wanted, why="", needed_at=now, sync_at=sync_at)
    found = [wanted]
    for _ in range(1500):  # an order of those that are there changes nothing but rule 5, whose GPUs never come here
        last = scale_gpus(load, last, now)
        assert last is not None
        found.append(last.wanted)
        now += 15.0
    ups = [after - before for before, after in pairwise(found) if after != before]
    assert all(up > 0 for up in ups) or all(up < 0 for up in ups)
    assert len(set(found[-100:])) == 1


@given(st.floats(0.1, 300.0), st.integers(1, 400), st.floats(0.5, 2.0), st.sampled_from([10.0, 180.0, 500.0]))
def test_a_fleet_that_follows_settles(busy: float, works: int, truth: float, start_s: float) -> None:
    """A load that keeps `busy` GPUs busy; one serves `truth` times what is thought; new ones take a while to start."""
    now, ordered = 1e6, [(0.0, works)]
    last: Decision | None = None
    found: list[tuple[int, int]] = []
    for _ in range(6 * 3600 // 15):
        there = [wanted for at, wanted in ordered if at <= now - start_s]
        works = min(max(there[-1], 1), ordered[-1][1] or 1)
        share = min(1.0, busy / works)
        wait_s = 2.0 if busy > works else 0.0  # where they are too few, requests are refused
        load = ModelLoad(
            works=works, gpu_rps=10 / truth, sync_rps=busy * 10, busy_share=share, wait_s=wait_s, wait_max_s=2.0
        )
        last = scale_gpus(load, last, now)
        assert last is not None
        if last.wanted != ordered[-1][1]:
            ordered.append((now, last.wanted))
        found.append((works, last.wanted))
        now += 15.0
    assert len(set(found[-100:])) == 1
    works, wanted = found[-1]
    assert works == wanted
    if truth <= 1.0:  # else it is thought to serve less than it does, and more are there
        assert busy / works <= 0.8 + 1e-6
        assert works <= max(2, ceil(busy / 0.7 * 1.01))


@given(st.floats(1.0, 1e4), st.floats(0.05, 0.95), st.floats(0.0, 1.0), st.integers(1, 50))
def test_up_whenever_the_backlog_goes_on_growing(gpu_rps: float, share: float, busy: float, works: int) -> None:
    """Also while the rate that is seen would be served easily: it was measured wrongly, or the GPUs are slow."""
    now, waiting, last = 1e6, 0.0, Decision(wanted=works, why="", needed_at=1e6, sync_at=1e6)
    for _ in range(400):
        waiting += 10 * gpu_rps * works
        load = ModelLoad(
            works=works,
            gpu_rps=gpu_rps,
            sync_rps=share * gpu_rps * works,
            busy_share=busy,
            waiting=int(waiting),
        )
        before = last.wanted
        found = scale_gpus(load, last, now)
        assert found is not None
        last = found
        assert last.wanted >= before or waiting < 300 * gpu_rps * works
        now += 10.0
    assert last.wanted > works
    assert last.wanted >= min(MOST, ceil((waiting - STANDS_S * gpu_rps * works * 2) / 300 / gpu_rps))


@given(
    st.lists(
        st.one_of(
            st.none(),
            st.builds(
                ServerLoad,
                live=st.integers(0, 100),
                least=st.integers(0, 500),
                cores=st.one_of(st.just(0.0), st.floats(0.0, 500.0)),
                rps=rates,
                rps_each=st.floats(1.0, 1e6),
            ),
        ),
        max_size=60,
    ),
    st.floats(1.0, 400.0),
)
def test_gateways_and_batchers_alike(loads: list[ServerLoad | None], gap: float) -> None:
    now = 1e6
    last: Decision | None = None
    for load in loads:
        before, last = last, scale_servers(load, last, now)
        if last is not None:
            assert 1 <= last.wanted <= MOST
            assert last.why
        if before is not None:
            assert last is not None
            assert before.wanted - last.wanted <= max(1, before.wanted * DOWN_SHARE)
        now += gap
