"""How the results of tasks are written, with their dead letters: one step, which also acknowledges the entry."""

from collections.abc import Callable

from carpool.broker.redis.client.link import RedisFailure
from carpool.broker.redis.dead_letters.bounds import LetterBounds
from carpool.broker.redis.dead_letters.letters import cause_of
from carpool.broker.redis.keys import Shard
from carpool.broker.redis.notices import Notices
from carpool.broker.redis.steps import Finished, Steps, TaskResult


class TaskResults:
    """Writes the results of tasks."""

    def __init__(
        self,
        steps: Steps,
        *,
        result_ttl_ms: int,
        letter_bounds: LetterBounds,
        buried: Callable[[str], None] = lambda cause: None,
    ) -> None:
        self._steps = steps
        self.result_ttl_ms = result_ttl_ms
        self._letter_bounds = letter_bounds
        # Is told the cause of each task that became a dead letter.
        self._buried = buried
        self._notices = Notices(steps)

    def finish(
        self,
        shard: Shard,
        field: bytes,
        entry_id: bytes,
        result: TaskResult,
        done: Callable[[bool], None],
        counts: Callable[[], None] = lambda: None,
    ) -> None:
        """Give a task its result, if it has none, and acknowledge its entry. `done(False)` if Redis did not say that
        this was done: then try again. `counts` is called if this result is the first.
        """

        def finished(found: Finished | RedisFailure) -> None:
            if isinstance(found, RedisFailure):
                done(False)
                return
            self._letter_bounds.note_dropped(found.letters_dropped)
            if found.was_first:
                counts()
                if result.letter:
                    self._buried(cause_of(result.letter))
            if found.gateways:
                self._notices.tell(found.gateways, result.task_id)
            done(True)

        self._steps.finish_task(
            shard,
            field,
            entry_id,
            result,
            finished,
            kept_ms=self.result_ttl_ms,
            letter_bounds=self._letter_bounds.arguments(),
        )
