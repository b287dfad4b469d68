"""Telling gateways that a task, for which a client waits there, has its outcome or is gone.

Only a hint: a gateway that misses a notice looks by itself within a second. So no notice is sent again.
"""

from carpool.broker.redis.client.link import ignore
from carpool.broker.redis.formats import Reply, encode_reply
from carpool.broker.redis.redis_ops import RedisOps
from carpool.core.timers import OncePerTurn

TASKS_A_NOTICE_MAX = 1000


class Notices:
    """Writes into the reply streams of gateways: what one turn of the event loop has for a gateway, in one entry."""

    def __init__(self, steps: RedisOps) -> None:
        self._steps = steps
        # By gateway.
        self._leaving: dict[bytes, list[str]] = {}
        self._flush = OncePerTurn(self._send)

    def tell(self, gateways: bytes, task_id: str) -> None:
        """Tell the gateways, whose names are separated by spaces, that there is news of a task."""
        for gateway in gateways.split():
            self._leaving.setdefault(gateway, []).append(task_id)
            self._flush.notify()

    def _send(self) -> None:
        leaving, self._leaving = self._leaving, {}
        for gateway, task_ids in leaving.items():
            for start in range(0, len(task_ids), TASKS_A_NOTICE_MAX):
                reply = encode_reply(Reply(finished=task_ids[start : start + TASKS_A_NOTICE_MAX]))
                self._steps.reply(gateway, reply, ignore)
