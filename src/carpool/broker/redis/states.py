"""How far a request is whose whereabouts are in Redis, for operators: a task in any state, an entry on its way."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from carpool.broker.redis.keys import GROUP, Keys, Shard
from carpool.broker.redis.nodes import Nodes, RedisFailure
from carpool.broker.redis.scripts import STATE
from carpool.broker.redis.submissions import out_of_reach
from carpool.broker.redis.tasks import FAILED, PENDING, SUCCESS, names_a_shard
from carpool.core.errors import CarpoolError
from carpool.core.problem import code_of
from carpool.core.request import RequestState

Answer = Callable[[RequestState | CarpoolError | None], None]


class RequestStates:
    """Asks Redis; never calls back before it returned, but for ids that no task has."""

    def __init__(self, nodes: Nodes, keys: Keys, *, lease_ms: int) -> None:
        self._nodes = nodes
        self._keys = keys
        self._lease_ms = lease_ms

    def of_task(self, task_id: str, answer: Answer) -> None:
        """How far a task is; None if there is none."""
        if not names_a_shard(task_id):
            answer(None)
            return
        shard = self._keys.shard_of_task(task_id)
        arguments = (shard.stream(b""), self._lease_ms, b"")
        self._nodes.run(STATE, shard.slot, (shard.task(task_id),), arguments, partial(_told_of_task, answer))

    def of_entry(self, shard: Shard, field: bytes, entry_id: bytes, waiting: RequestState, answer: Answer) -> None:
        """Whether a batcher has an entry; `waiting` is what is known without asking."""

        def told(reply: Any) -> None:
            # The entry's id, who has it, and for how many ms nothing was heard of that.
            is_taken = isinstance(reply, list) and reply and reply[0][2] < self._lease_ms
            answer(msgspec.structs.replace(waiting, status="processing") if is_taken else waiting)

        self._nodes.send(shard.slot, told, b"XPENDING", shard.stream(field), GROUP, entry_id, entry_id, 1)


def _told_of_task(answer: Answer, reply: Any) -> None:
    if reply is None:
        answer(None)
    elif isinstance(reply, RedisFailure):
        answer(out_of_reach())
    else:
        status, latency_ms, problem = reply
        if status == FAILED:
            answer(RequestState("failed", latency_ms, code_of(problem)))
        else:
            answer(
                RequestState(
                    "completed" if status == SUCCESS else "queued" if status == PENDING else "processing", latency_ms
                )
            )
