"""Sick endpoints beside one that can carry the load: no request fails, in whatever way and however often they do."""

import pytest

from carpool.core.outcome import Output
from support.sick_endpoints import SERVICE_S, Run, Sickness

FAULTS = ("400", "429", "500", "502", "503", "garbage", "reset")
BROKEN = ("500", "502", "503", "reset")


def check(run: Run) -> None:
    """Everybody is answered, and nobody is taken for poison."""
    assert run.outcomes.keys() == {Output}
    assert run.stand.dispatcher.poisoned == 0
    assert run.stand.pool.members[-1].breaker.state == "closed"


@pytest.mark.parametrize("fault", FAULTS)
def test_one_of_two_that_fails_at_once_is_no_black_hole(fault: str) -> None:
    check(Run(Sickness(fault), seconds=8.0))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("clients", [1, 3])
def test_so_it_is_with_one_client_and_with_three(fault: str, clients: int) -> None:
    check(Run(Sickness(fault, until_s=8.0), clients=clients, load=0.3, seconds=12.0))


@pytest.mark.parametrize("fault", BROKEN)
def test_one_of_two_that_fails_for_minutes_gets_a_few_probes(fault: str) -> None:
    run = Run(Sickness(fault, fails_s=SERVICE_S), load=0.05, seconds=150.0)
    check(run)
    # To open the breaker; and then after pauses of 1, 2, 4, 4, … s.
    assert run.sick[0].failed <= 10 + 150 / 3


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("service_s", [SERVICE_S, SERVICE_S / 40])
def test_one_of_two_that_fails_half_of_its_calls_is_left_alone(fault: str, service_s: float) -> None:
    """Also if it is 40 times faster than the other, and so has answered many whenever one fails."""
    run = Run(Sickness(fault, fails_s=service_s, service_s=service_s, share=0.5), seconds=12.0)
    check(run)
    # What fails is sent once more: a few calls until the breaker opens, and whenever it tries to close.
    assert run.sick[0].failed <= 25
    assert run.stand.pool.members[0].breaker.state != "closed"


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_all_but_one_are_sick(fault: str, share: float) -> None:
    check(Run(*[Sickness(fault, share=share)] * 3, seconds=6.0))


@pytest.mark.parametrize("fault", BROKEN)
def test_one_of_two_is_sick_from_the_start(fault: str) -> None:
    check(Run(Sickness(fault, from_s=0.0), seconds=4.0))


@pytest.mark.parametrize("fault", BROKEN)
def test_endpoints_with_many_slots_lose_nobody_when_one_goes(fault: str) -> None:
    check(Run(Sickness(fault, from_s=1.0), slots=8, seconds=2.5))


@pytest.mark.parametrize("fault", BROKEN)
def test_one_that_is_well_again_is_used_again(fault: str) -> None:
    run = Run(Sickness(fault, from_s=1.0, until_s=3.0), seconds=12.0)
    check(run)
    assert {member.breaker.state for member in run.stand.pool.members} == {"closed"}
    assert len(run.sick[0].calls) > 50
