"""How far a request is, for operators: a task in any state, an entry on its way, a request of another gateway.

The state of a task is in Redis. A synchronous request is known to its own gateway, which is asked by its stream of
replies.
"""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from carpool.broker.redis.keys import GROUP, Keys, Shard
from carpool.broker.redis.link import ignore
from carpool.broker.redis.nodes import Nodes, RedisFailure
from carpool.broker.redis.records import REPLY_FORMAT, Reply, encode_reply
from carpool.broker.redis.scripts import STATE
from carpool.broker.redis.submissions import out_of_reach
from carpool.broker.redis.tasks import FAILED, PENDING, SUCCESS, names_a_shard
from carpool.core.errors import CarpoolError
from carpool.core.problem import code_of
from carpool.core.request import RequestState

# So long other gateways are waited for.
ELSEWHERE_S = 0.5

Answer = Callable[[RequestState | CarpoolError | None], None]


class RequestStates:
    """Asks Redis, and the other gateways over it."""

    def __init__(
        self, nodes: Nodes, keys: Keys, gateway: bytes, *, lease_ms: int, others: Callable[[], Iterable[bytes]]
    ) -> None:
        self._nodes = nodes
        self._keys = keys
        self._gateway = gateway
        self._lease_ms = lease_ms
        # The other gateways that live.
        self._others = others
        # Who waits for word of a request from another gateway, by its id, and until when.
        self._asking: dict[str, tuple[asyncio.TimerHandle, list[Answer]]] = {}

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

    def elsewhere(self, request_id: str, answer: Answer) -> None:
        """Ask the other gateways for a request; None if none of them tells of it in time."""
        if request_id in self._asking:
            self._asking[request_id][1].append(answer)
            return
        timer = asyncio.get_running_loop().call_later(ELSEWHERE_S, self.told, request_id, None)
        self._asking[request_id] = (timer, [answer])
        for gateway in self._others():
            self._write(gateway, wanted=[(self._gateway, request_id)])

    def tell(self, gateway: bytes, request_id: str, state: RequestState) -> None:
        """Answer another gateway that looks for a request."""
        self._write(gateway, found=[(request_id, state)])

    def told(self, request_id: str, state: RequestState | None) -> None:
        """Another gateway has answered; or none did in time."""
        if request_id in self._asking:
            timer, answers = self._asking.pop(request_id)
            timer.cancel()
            for answer in answers:
                answer(state)

    def _write(self, gateway: bytes, **words: Any) -> None:
        stream = self._keys.replies(gateway)
        reply = encode_reply(Reply(REPLY_FORMAT, [], [], [], [], **words))
        self._nodes.send(self._keys.slot_of(stream), ignore, b"XADD", stream, b"NOMKSTREAM", b"*", b"r", reply)


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
