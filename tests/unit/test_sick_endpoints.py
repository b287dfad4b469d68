"""Sick endpoints beside one that can carry the load: no request fails, in whatever way and however often they do."""

import pytest

from carpool.core.outcome import Output
from support.sick_endpoints import Run, Sickness

BROKEN = ("500", "502", "503", "reset")


def check(run: Run) -> None:
    """Everybody is answered, and nobody is taken for poison."""
    assert run.outcomes.keys() == {Output}
    assert run.stand.dispatcher.scheduler.poisoned == 0
    assert run.stand.pool.members[-1].breaker.state == "closed"


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_all_but_one_are_sick(fault: str, share: float) -> None:
    check(Run(*[Sickness(fault, share=share)] * 3, seconds=6.0))
