"""How far a request is, for operators: a task in any state, an entry on its way, a request of another gateway.

The state of a task is in Redis. A synchronous request is known to its own gateway, which others ask over its stream of
replies.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from carpool.broker.redis.client.link import RedisFailure, ignore
from carpool.broker.redis.formats import Reply, encode_reply
from carpool.broker.redis.gateway.refusals import out_of_reach
from carpool.broker.redis.gateway.tasks import names_a_shard
from carpool.broker.redis.keys import Shard
from carpool.broker.redis.redis_ops import RedisOps
from carpool.core.errors import CarpoolError
from carpool.core.timeline import RequestState

# How long to wait for other gateways.
ELSEWHERE_S = 0.5

WhenFound = Callable[[RequestState | CarpoolError | None], None]


class RequestStates:
    """Asks Redis, and the other gateways over it."""

    def __init__(
        self, steps: RedisOps, gateway: bytes, *, lease_ms: int, others: Callable[[], Iterable[bytes]]
    ) -> None:
        self._steps = steps
        self._gateway = gateway
        self._lease_ms = lease_ms
        # The other gateways that live.
        self._others = others
        # By id of a request: the timer of the wait for other gateways, and the callbacks that wait.
        self._asking: dict[str, tuple[asyncio.TimerHandle, list[WhenFound]]] = {}

    def of_task(self, task_id: str, answer: WhenFound) -> None:
        """How far a task is; None if there is none."""
        if not names_a_shard(task_id):
            answer(None)
            return
        self._steps.state_of_task(
            task_id, self._lease_ms, lambda found: answer(out_of_reach() if isinstance(found, RedisFailure) else found)
        )

    def of_entry(self, shard: Shard, field: bytes, entry_id: bytes, waiting: RequestState, answer: WhenFound) -> None:
        """Whether a batcher has an entry; `waiting` is what is known without asking."""

        def told(is_taken: bool | RedisFailure) -> None:
            taken = msgspec.structs.replace(waiting, status="processing", queue=msgspec.UNSET)
            answer(taken if is_taken is True else waiting)

        self._steps.is_leased(shard, field, entry_id, self._lease_ms, told)

    def elsewhere(self, request_id: str, answer: WhenFound) -> None:
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
        self._steps.reply(gateway, encode_reply(Reply(**words)), ignore)
