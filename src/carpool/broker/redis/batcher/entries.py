"""From an entry of the queue to a request that can be sent, or to why it cannot."""

import logging
from collections.abc import Iterable, Sequence
from math import inf
from typing import Protocol

from carpool.broker.redis.batcher.leases import NEW, EntryLease, History, LeasedEntries, history_of
from carpool.broker.redis.batcher.replies import ReplyWriter
from carpool.broker.redis.batcher.suspects import DELIVERIES_MAX, company_of
from carpool.broker.redis.dead_letters import RedisDeadLetterBox
from carpool.broker.redis.formats import Header, NewerFormatError, began_ms, decode_header, decode_value
from carpool.core.errors import CarpoolError, DeadlineExceeded, UpstreamFailed, queue_time_passed
from carpool.core.kept import Kept
from carpool.core.request import AGAIN, Request
from carpool.core.trace import read_text

logger = logging.getLogger("carpool.broker")

HEADERS_KEPT_MAX = 4096


class FedModel(Protocol):
    """What a batcher's side must know of a model."""

    name: str

    def free_slots(self) -> int:
        """Slots that could take a batch now."""

    def stuck_after_s(self) -> float:
        """How long a request may wait here while no slot is free; inf while one is."""

    def may_go_elsewhere(self, request: Request) -> bool:
        """Whether another batcher can serve a request that this one cannot."""

    def is_probing(self) -> bool:
        """Whether every endpoint has failed, and one request at a time is wanted to try one with."""

    def is_in_doubt(self) -> bool:
        """Whether no endpoint is known to work: each has failed and not answered since."""

    def is_served_elsewhere(self) -> bool:
        """Whether another batcher has an endpoint that works."""

    def largest_batch(self) -> int:
        """The most requests in a batch."""

    def largest_batch_bytes(self) -> float:
        """The most bytes in a batch of several."""

    def refusal_of(self, request: Request) -> CarpoolError | None:
        """Why a request is not taken up now; None if it is."""

    def prepare(self, request: Request) -> None:
        """Do for a request from elsewhere what the face does for a new one; raises an error of the tree."""


class Unpacker:
    """Makes requests of entries. What entries have in common is understood once."""

    def __init__(
        self,
        models: Iterable[FedModel],
        replies: ReplyWriter,
        dead_letters: RedisDeadLetterBox,
        tier_target_s: Sequence[float],
    ) -> None:
        self._models = {model.name: model for model in models}
        self._replies = replies
        self._dead_letters = dead_letters
        self._tier_target_s = tier_target_s
        self._headers: Kept[bytes, Header] = Kept(HEADERS_KEPT_MAX)
        self._has_seen_foreign = False

    def unpack(
        self, leased: LeasedEntries, entry_id: bytes, head: bytes, value: bytes, count: int, now: float, now_ms: int
    ) -> tuple[Request, CarpoolError | None] | None:
        """The request, and why it is not to be sent, if so; None for an entry that is for other batchers. `count` is
        Redis's count of its deliveries.

        Raises UnknownFormatError for an entry that cannot be read.
        """
        header = self._headers.get(head) or self._understand(head)
        if header is None:
            return None
        history = NEW if count == 1 else history_of(count)
        delivery = history.deliveries
        record, content = decode_value(value)
        # Where Redis's clock was set back, an entry may be from the future: that gives it no more time.
        waited_ms = max(0, now_ms - began_ms(entry_id, record.sent_ms))
        arrived = now - waited_ms / 1000
        request = Request(
            record.request_id,
            header.model,
            header.parameters,
            content,
            len(content),
            header.tier,
            arrived,
            arrived + self._tier_target_s[min(header.tier, len(self._tier_target_s) - 1)],
            inf,  # a staged request does not wait here for a slot
            arrived + record.remaining_ms / 1000,
            self._replies,
            EntryLease(leased, entry_id, header, history, self._models[header.model].is_probing()),
            record.owner,
            record.more.client_id,
            None,
            header.lane,
            leased,
            record.number,
            header.is_task,
        )
        if record.more.result_key:
            request.result_key = record.more.result_key
        if record.more.trace:
            request.trace = read_text(record.more.trace)
        request.sends = history.failures
        fault = self._fault_of(request, header, now, history)
        if delivery > 1 or history.is_alone:  # it is sent with others like it, and at the end alone
            is_alone = history.is_alone or company_of(delivery) == 1
            request.lane += AGAIN + (entry_id if is_alone else b"%d" % delivery)
        return request, fault

    def _understand(self, head: bytes) -> Header | None:
        try:
            header = decode_header(head)
        except NewerFormatError as fault:
            if not self._has_seen_foreign:
                self._has_seen_foreign = True
                logger.error("entries are left to other batchers: %s", fault)
            return None
        if header.model not in self._models:
            return None
        self._headers.keep(head, header, 2 * len(head))
        return header

    def _fault_of(self, request: Request, header: Header, now: float, history: History) -> CarpoolError | None:
        """Why a request is not to be sent, if so."""
        delivery = history.deliveries
        if request.deadline <= now:
            return DeadlineExceeded("the deadline passed before a slot was free")
        # What another batcher gave back, or had when it died, was taken in time.
        was_taken = delivery > 1 or history.returns > 0
        if header.queue_ms and not was_taken and now - request.arrived >= header.queue_ms / 1000:
            return queue_time_passed(header.queue_ms / 1000)
        if delivery > DELIVERIES_MAX:
            error = UpstreamFailed(f"given up: {delivery - 1} batchers did not come back with an outcome")
            request.sends = delivery - 1
            self._dead_letters.bury_suspect(request, error, delivery - 1)
            return error
        try:
            self._models[header.model].prepare(request)
        except CarpoolError as error:
            return error
        return None
