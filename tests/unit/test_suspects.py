"""Who rides with whom after batchers have died."""

from carpool.broker.redis.batcher.leases import LeasedEntries
from carpool.broker.redis.batcher.suspects import Suspects, again_of, company_of
from carpool.broker.redis.keys import Keys
from carpool.broker.redis.types import ANY, NONE, WITH_COMPANY
from carpool.testing import Witness, make_request


def leased() -> LeasedEntries:
    """One with an entry that has no outcome yet."""
    return LeasedEntries(Keys().shards[0], b"lane:s0", 0.0, 0.0, {b"1-1": make_request("r", Witness(), now=0.0)})


def test_the_company_becomes_smaller_and_they_are_alone_twice() -> None:
    assert [company_of(delivery) for delivery in range(1, 8)] == [64, 64, 16, 4, 1, 1, 1]


def test_suspects_of_a_model_wait_for_each_other_and_not_for_those_of_others() -> None:
    suspects, here = Suspects(), leased()
    suspects.add("slow", here, 3)
    assert (suspects.welcome("slow"), suspects.welcome("fast")) == (NONE, WITH_COMPANY)
    assert suspects.have_left(here)
    here.open.clear()
    assert (suspects.welcome("slow"), suspects.welcome("fast")) == (ANY, ANY)
    assert not suspects.have_left(here)


def test_with_one_that_is_alone_no_other_suspect_is_here() -> None:
    suspects = Suspects()
    suspects.add("m", leased(), 5)
    assert (suspects.welcome("m"), suspects.welcome("other")) == (NONE, NONE)


def test_after_one_death_nobody_is_a_suspect() -> None:
    suspects = Suspects()
    suspects.add("m", leased(), 2)
    suspects.add("m", leased(), 7)  # that one only needs an answer
    assert suspects.welcome("m") == ANY


def test_the_lane_of_those_that_came_again_tells_what_it_was() -> None:
    assert again_of(b'{"p":1}\0\0again2') == (b'{"p":1}', 2)
    assert again_of(b"\0shape\0again3") == (b"\0shape", 3)
    assert again_of(b'{"p":1}') is None
    assert again_of(b'{"p":1}\0\0again1700000000000-0') is None  # alone
