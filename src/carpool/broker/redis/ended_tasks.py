"""Tasks that get their outcome inside Redis, because they are deleted or their time is over: each is counted once.

1. The process whose step ended a task counts it. It gives each such step a receipt, and the step leaves what it ended
   under that receipt, in a hash of this process in the shard.
2. What a reply tells is counted, and the receipt is removed. Where a reply was lost, the process reads the hash, some
   times: Redis may still have the step of a lost connection to read.
3. A receipt that was counted is remembered until Redis has removed it. If the process dies, the rest is not counted.
"""

import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count

from carpool.broker.redis.client.link import Lost, RedisFailure
from carpool.broker.redis.keys import Shard
from carpool.broker.redis.redis_ops import EndedTask, RedisOps, Unreadable
from carpool.core.errors import CarpoolError
from carpool.core.timers import Every

ATTEMPTS = 3
RETRY_S = 1.0


class EndedTasks:
    """The receipts of steps that may end tasks, all with the same outcome."""

    def __init__(self, steps: RedisOps, error: CarpoolError, counts: Callable[[EndedTask, CarpoolError], None]) -> None:
        self._steps = steps
        self._error = error
        self._counts = counts
        self._name = secrets.token_hex(6).encode()
        self._numbers = count(1)
        # Receipts that were counted, and that Redis may still have.
        self._counted: defaultdict[Shard, set[bytes]] = defaultdict(set)
        # How many more times a shard is asked for receipts.
        self._doubtful: dict[Shard, int] = {}
        # Runs while there are some.
        self._tries = Every(RETRY_S, self._try)

    def receipt(self) -> bytes:
        """For one step: the name of the hash, and of the field in it."""
        return b"%b %d" % (self._name, next(self._numbers))

    def came(self, shard: Shard, receipt: bytes, ended: Sequence[EndedTask]) -> None:
        """The reply of a step is here."""
        if ended:
            self._count(shard, {receipt.partition(b" ")[2]: ended})

    def failed(self, shard: Shard, failure: RedisFailure) -> None:
        """The reply of a step did not come, and it may have been done."""
        if isinstance(failure, Lost | Unreadable):
            self._doubtful[shard] = ATTEMPTS
            self._tries.start()

    def close(self) -> None:
        """Ask no more."""
        self._tries.stop()

    def _count(self, shard: Shard, found: Mapping[bytes, Sequence[EndedTask]]) -> None:
        for number, ended in found.items():
            if number not in self._counted[shard]:
                self._counted[shard].add(number)
                for task in ended:
                    self._counts(task, self._error)
        self._steps.forget_ends(shard, self._name, list(found), partial(self._forgotten, shard, list(found)))

    def _forgotten(self, shard: Shard, numbers: Sequence[bytes], answer: int | RedisFailure) -> None:
        if isinstance(answer, RedisFailure):
            self.failed(shard, answer)  # they are found again, and are not counted again
        else:
            self._counted[shard].difference_update(numbers)

    def _try(self) -> None:
        for shard in self._doubtful:
            if self._steps.nodes.is_up(shard.slot):
                self._steps.ends(shard, self._name, partial(self._found, shard))
        if not self._doubtful:
            self._tries.stop()

    def _found(self, shard: Shard, found: Mapping[bytes, Sequence[EndedTask]] | RedisFailure) -> None:
        if isinstance(found, RedisFailure) or shard not in self._doubtful:
            return
        self._doubtful[shard] -= 1
        if self._doubtful[shard] <= 0:
            del self._doubtful[shard]
        self._counted[shard] &= found.keys()
        if found:
            self._count(shard, found)
