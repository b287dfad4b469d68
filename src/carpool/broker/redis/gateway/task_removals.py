"""Accepting and removing tasks that Redis has: those that a client deletes, and those that the gateway refused.

Until a task is accepted it has no outcome. The gateway removes a task that it refused, with its webhook: Redis may not
have it, or not have it yet, so it tries for a while. What it could not tell Redis it tells again. It also tells a
server that comes back, or took another's place, the last acceptances again: that server may have lost them.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial

from carpool.broker.redis.client.link import RedisFailure
from carpool.broker.redis.keys import Shard
from carpool.broker.redis.notices import Notices
from carpool.broker.redis.redis_ops import EndedTask, RedisOps, Removed
from carpool.core.defaults import do_nothing
from carpool.core.timers import Every

# Redis may still have the submission of a lost connection to read when it is first asked to remove the task.
ATTEMPTS = 3
RETRY_S = 1.0
DOUBTFUL_MAX = 10_000
# So many of the last acceptances of a shard are sent again.
LATELY_MAX = 256


class TaskRemovals:
    """Removes tasks in any state, with their entries if no batcher took them yet; says which ones are accepted."""

    def __init__(self, steps: RedisOps) -> None:
        self._steps = steps
        self._notices = Notices(steps)
        # How many more times to ask for a task that Redis did not know.
        self._doubtful: dict[str, int] = {}
        # Accepted tasks of which Redis may not know that.
        self._accepted: set[str] = set()
        # The last ones that were accepted, by shard; and the shards that were in reach when that was looked at.
        self._lately: defaultdict[Shard, deque[str]] = defaultdict(lambda: deque(maxlen=LATELY_MAX))
        self._up: set[Shard] = set()
        # Runs while there are some.
        self._tries = Every(RETRY_S, self._try)

    def accept(self, task_ids: Sequence[str]) -> None:
        """Tell Redis that these tasks, of one shard, are accepted: they may have outcomes."""
        shard = self._steps.keys.shard_of_task(task_ids[0])
        self._lately[shard].extend(task_ids)
        self._tell(shard, task_ids)

    def nodes_changed(self) -> None:
        """A server was lost, or one is there again, which may not know what was accepted last."""
        up = {shard for shard in self._steps.keys.shards if self._steps.nodes.is_up(shard.slot)}
        for shard in up - self._up:
            if shard in self._lately:
                self._tell(shard, list(self._lately[shard]))
        self._up = up

    def _tell(self, shard: Shard, task_ids: Sequence[str]) -> None:
        self._steps.accept_tasks(shard, task_ids, partial(self._said, task_ids))

    def _said(self, task_ids: Sequence[str], found: int | RedisFailure) -> None:
        if isinstance(found, RedisFailure) and len(self._accepted) < DOUBTFUL_MAX:  # beyond, UNSURE_S does it
            self._accepted.update(task_ids)
            self._tries.start()

    def remove(
        self,
        task_id: str,
        done: Callable[[bool | RedisFailure], None],
        cancelled: Callable[[EndedTask], None] = do_nothing,
        *,
        was_refused: bool = False,
        receipt: bytes = b"",
    ) -> None:
        """Remove a task; `done` says whether there was one, `cancelled` is called before if that had no result yet.

        Gateways where a client waits for it get a notice. `was_refused`: it was never accepted; `receipt`: see
        ended_tasks.py.
        """

        def told(removed: Removed | RedisFailure | None) -> None:
            if isinstance(removed, RedisFailure):
                done(removed)
                return
            if removed is not None:
                self._notices.tell(removed.gateways, task_id)
                if removed.ended is not None:
                    cancelled(removed.ended)
            done(removed is not None)

        self._steps.remove_task(task_id, told, was_refused=was_refused, receipt=receipt)

    def remove_if_there(self, task_id: str) -> None:
        """The gateway has refused the task, but Redis may have it: keep trying to remove it."""
        if len(self._doubtful) < DOUBTFUL_MAX:  # beyond, they count as accepted when their time for that is over
            self._doubtful[task_id] = ATTEMPTS
            self._tries.start()

    @property
    def doubtful(self) -> int:
        """Refused tasks that Redis may have."""
        return len(self._doubtful)

    def close(self) -> None:
        """Give up."""
        self._doubtful.clear()
        self._accepted.clear()
        self._tries.stop()

    def _try(self) -> None:
        for task_id in self._doubtful:
            if self._steps.nodes.is_up(self._steps.keys.shard_of_task(task_id).slot):
                self.remove(task_id, partial(self._tried, task_id), was_refused=True)
        accepted: defaultdict[Shard, list[str]] = defaultdict(list)
        for task_id in self._accepted:
            accepted[self._steps.keys.shard_of_task(task_id)].append(task_id)
        for shard, task_ids in accepted.items():
            if self._steps.nodes.is_up(shard.slot):
                self._accepted.difference_update(task_ids)
                self._tell(shard, task_ids)
        if not self._doubtful and not self._accepted:
            self._tries.stop()

    def _tried(self, task_id: str, found: bool | RedisFailure) -> None:
        if isinstance(found, RedisFailure) or task_id not in self._doubtful:
            return
        self._doubtful[task_id] -= 1
        if found or self._doubtful[task_id] == 0:
            del self._doubtful[task_id]
