"""What a batcher keeps in mind of a shard."""

from carpool.broker.redis.batcher.shards import HEADS_KNOWN_MAX, ShardView
from carpool.broker.redis.keys import Keys
from carpool.broker.redis.types import Head, ShardSnapshot

SHARD = Keys().shards[0]


def head(number: int, model: str = "m", unread: int = 1) -> Head:
    return Head(b"%d:s0" % number, model, float(number), unread)


def test_bells_that_nobody_acts_on_are_not_kept() -> None:
    """A batcher without a free slot asks nothing; clients with ever new parameters made it remember every lane."""
    view = ShardView(SHARD, heads=[])
    view.heard(head(10_000, "n"))
    for number in reversed(range(1000)):
        view.heard(head(number))
    assert view.woken is None
    assert view.heads == [*map(head, range(HEADS_KNOWN_MAX)), head(10_000, "n")]  # the best, and those of others


def test_bells_that_cross_an_answer_are_kept_until_it_comes() -> None:
    view = ShardView(SHARD)
    view.asked()
    view.heard(head(1))
    assert view.unread("m") == 0
    view.told(ShardSnapshot(0, [head(2)]))
    assert (view.heads, view.woken) == ([head(1), head(2)], None)


def test_a_model_has_what_waits_for_it() -> None:
    """What waited for all models was taken for what waits for one: it was to wait for company that could not come."""
    view = ShardView(SHARD)
    assert view.unread("m") == 0
    view.told(ShardSnapshot(0, [head(1, "m", 3), head(2, "n", 40), head(3, "m", 4)]))
    assert [view.unread(model) for model in ("m", "n", "other")] == [7, 40, 0]
