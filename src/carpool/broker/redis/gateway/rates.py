"""The budgets of owners that all gateways share, in Redis (core.ports.RateBudget): one step for each shard."""

from collections.abc import Callable, Sequence
from functools import partial

from carpool.broker.redis.client.link import RedisFailure
from carpool.broker.redis.keys import Shard
from carpool.broker.redis.redis_ops import RedisOps
from carpool.core.ports import RateAsk, RateTold

# A script holds up Redis's other clients: none sees to more owners than this.
OWNERS_A_CALL_MAX = 200

Told = Callable[[str, RateTold | None], None]


class RedisRateBudget:
    """Asks Redis, whose clock counts."""

    def __init__(self, steps: RedisOps) -> None:
        self._steps = steps

    def ask(self, asks: Sequence[RateAsk], told: Told) -> None:
        """Have `told` called once for each of these owners: with None if Redis did not answer."""
        by_shard: dict[Shard, list[RateAsk]] = {}
        for each in asks:
            by_shard.setdefault(self._steps.keys.shard_of_owner(each.owner), []).append(each)
        for shard, some in by_shard.items():
            for first in range(0, len(some), OWNERS_A_CALL_MAX):
                part = some[first : first + OWNERS_A_CALL_MAX]
                self._steps.ask_rates(shard, part, partial(tell, part, told))


def tell(asks: Sequence[RateAsk], told: Told, answers: list[RateTold] | RedisFailure) -> None:
    """Hand on what Redis said of each, or that it said nothing that can be used."""
    if isinstance(answers, RedisFailure) or len(answers) != len(asks):
        answers = []
    for number, ask in enumerate(asks):
        told(ask.owner, answers[number] if answers else None)
