"""Removing tasks: those that somebody deletes, and those of which nobody knows whether Redis has them."""

from collections.abc import Callable
from functools import partial

from carpool.broker.redis.client.link import RedisFailure
from carpool.broker.redis.notices import Notices
from carpool.broker.redis.steps import EndedTask, Removed, Steps
from carpool.core.timers import Every

# Redis may still have the submission of a lost connection to read when it is first asked to remove the task.
ATTEMPTS = 3
RETRY_S = 1.0
DOUBTFUL_MAX = 10_000


class TaskRemovals:
    """Removes tasks in any state, with their entries if nobody took them yet."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._notices = Notices(steps)
        # How often more a task that Redis did not know is asked for.
        self._doubtful: dict[str, int] = {}
        # Runs while there are some.
        self._tries = Every(RETRY_S, self._try)

    def remove(
        self,
        task_id: str,
        done: Callable[[bool | RedisFailure], None],
        cancelled: Callable[[EndedTask], None] = lambda task: None,
    ) -> None:
        """Remove a task; `done` says whether there was one, `cancelled` is called before if that had no result yet.

        Gateways where somebody waits for it are told.
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

        self._steps.remove_task(task_id, told)

    def remove_if_there(self, task_id: str) -> None:
        """Its submitter was told that it is not accepted, but Redis may have it: keep trying to remove it."""
        if len(self._doubtful) < DOUBTFUL_MAX:  # beyond, work is done that nobody asks for
            self._doubtful[task_id] = ATTEMPTS
            self._tries.start()

    @property
    def doubtful(self) -> int:
        """Tasks that nobody was promised, and that Redis may have."""
        return len(self._doubtful)

    def close(self) -> None:
        """Give up."""
        self._doubtful.clear()
        self._tries.stop()

    def _try(self) -> None:
        for task_id in self._doubtful:
            if self._steps.nodes.is_up(self._steps.keys.shard_of_task(task_id).slot):
                self.remove(task_id, partial(self._tried, task_id))
        if not self._doubtful:
            self._tries.stop()

    def _tried(self, task_id: str, found: bool | RedisFailure) -> None:
        if isinstance(found, RedisFailure) or task_id not in self._doubtful:
            return
        self._doubtful[task_id] -= 1
        if found or self._doubtful[task_id] == 0:
            del self._doubtful[task_id]
