"""Telling gateways that a task, for which somebody waits there, has its outcome or is gone.

Only a hint: a gateway that is not told looks by itself within a second. So nothing is tried again.
"""

import asyncio

from carpool.broker.redis.keys import Keys
from carpool.broker.redis.link import ignore
from carpool.broker.redis.nodes import Nodes
from carpool.broker.redis.records import REPLY_FORMAT, Reply, encode_reply

TASKS_A_TELLING_MAX = 1000


class Tellings:
    """Writes into the reply streams of gateways: what one turn of the event loop has for a gateway, in one entry."""

    def __init__(self, nodes: Nodes, keys: Keys) -> None:
        self._nodes = nodes
        self._keys = keys
        # By gateway.
        self._leaving: dict[bytes, list[str]] = {}

    def tell(self, gateways: bytes, task_id: str) -> None:
        """Tell the gateways, whose names are separated by spaces, that there is news of a task."""
        for gateway in gateways.split():
            if not self._leaving:
                asyncio.get_running_loop().call_soon(self._flush)
            self._leaving.setdefault(gateway, []).append(task_id)

    def _flush(self) -> None:
        leaving, self._leaving = self._leaving, {}
        for gateway, task_ids in leaving.items():
            stream = self._keys.replies(gateway)
            slot = self._keys.slot_of(stream)
            for start in range(0, len(task_ids), TASKS_A_TELLING_MAX):
                reply = encode_reply(Reply(REPLY_FORMAT, [], [], [], task_ids[start : start + TASKS_A_TELLING_MAX]))
                self._nodes.send(slot, ignore, b"XADD", stream, b"NOMKSTREAM", b"*", b"r", reply)
