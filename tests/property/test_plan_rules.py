"""Any load: what is planned carries it, one GPU fewer does not, and nothing that is asked for makes it cheaper."""

from fractions import Fraction

from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from carpool.tools.plan import LEAST, MOST, Workload, make_plan, shown

amounts = st.floats(LEAST, MOST)
works = st.builds(
    Workload,
    rate=amounts,
    batch=st.integers(1, int(MOST)),
    batch_ms=amounts,
    target=st.floats(LEAST, 1),
    peak=st.floats(1, MOST),
    payload_kb=amounts,
    retention_s=amounts,
    gpu_price=amounts,
    storage_price=amounts,
)
# Of a size that people have, so that counts are small and their edges are met.
usual_works = st.builds(
    Workload,
    rate=st.integers(1, 20_000).map(float) | st.floats(1, 20_000),
    batch=st.integers(1, 64),
    batch_ms=st.integers(1, 400).map(float),
    target=st.sampled_from([0.1, 0.3, 0.6, 0.7, 0.75, 0.8, 0.9, 1.0]),
    peak=st.sampled_from([1.0, 1.1, 3.0]),
    payload_kb=st.just(2.0),
    retention_s=st.just(3600.0),
    gpu_price=st.just(30_000.0),
    storage_price=st.just(0.02),
)
any_works = works | usual_works


def exact(number: float) -> Fraction:
    return Fraction(repr(number))


@given(any_works)
def test_what_is_planned_carries_the_rate_and_one_fewer_does_not(work: Workload) -> None:
    made = make_plan(work)
    per_gpu = work.batch * 1000 / exact(work.batch_ms)
    for sizing, rate in ((made.usual, exact(work.rate)), (made.peak, exact(work.rate) * exact(work.peak))):
        bare, gpus = sizing.servers.gpus_bare, sizing.servers.gpus
        assert (bare - 1) * per_gpu < rate <= bare * per_gpu
        assert (gpus - 1) * per_gpu * exact(work.target) < rate <= gpus * per_gpu * exact(work.target)


@given(any_works, st.floats(LEAST, MOST))
def test_more_rate_never_needs_less(work: Workload, rate: float) -> None:
    less, more = (make_plan(replace(work, rate=each)).usual for each in sorted((work.rate, rate)))
    for name in less.servers.__struct_fields__:
        assert getattr(less.servers, name) <= getattr(more.servers, name)
    for name in less.redis.__struct_fields__:
        assert getattr(less.redis, name) <= getattr(more.redis, name)
    assert less.storage_gb <= more.storage_gb
    assert less.money_per_year <= more.money_per_year


@given(any_works, st.floats(LEAST, 1))
def test_more_headroom_never_needs_less(work: Workload, target: float) -> None:
    wide, tight = (make_plan(replace(work, target=each)).usual for each in sorted((work.target, target)))
    assert wide.servers.gpus >= tight.servers.gpus >= tight.servers.gpus_bare == wide.servers.gpus_bare
    assert wide.servers.gateways >= tight.servers.gateways >= 1
    assert wide.servers.batchers >= tight.servers.batchers >= 1
    assert wide.money_per_year >= tight.money_per_year


@given(any_works)
def test_the_peak_never_needs_less_than_the_usual_rate(work: Workload) -> None:
    made = make_plan(work)
    assert made.peak.servers.gpus >= made.usual.servers.gpus
    assert made.peak.money_per_million >= made.usual.money_per_million
    assert [line.name for line in made.peak.lines] == [line.name for line in made.usual.lines]


@example(0.9999999)
@example(1 - 2**-53)
@given(st.floats(1e-40, 1e15) | st.integers(1, 10**40).map(float))
def test_a_number_is_shown_within_a_thousandth_and_whole_only_if_it_is(number: float) -> None:
    text = shown(number).replace(",", "")
    assert abs(Fraction(text) - exact(number)) <= exact(number) / 100
    if number > 1e-20:
        assert abs(Fraction(text) - exact(number)) <= exact(number) / 1000
        assert text.isdigit() == number.is_integer()
