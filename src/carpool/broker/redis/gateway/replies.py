"""A gateway's own stream of outcomes, read for as long as the gateway lives.

It survives a lost connection, unlike pub/sub: what came meanwhile is read when it is back. What was read is trimmed
away. The stream expires a while after its gateway has gone; batchers never create it, so none is left.

If the stream is missing (an operator deleted it, or Redis has lost its memory), batchers take this gateway for gone and
throw its outcomes away. So the reader looks for it four times a second, makes it anew, and calls `emptied`.
"""

import logging
from collections.abc import Callable
from typing import Any

from carpool.broker.redis.client.link import Link, RedisFailure, Refused, ignore
from carpool.broker.redis.client.nodes import Nodes
from carpool.broker.redis.formats import Reply, UnknownFormatError, decode_reply
from carpool.broker.redis.keys import Keys
from carpool.core.defaults import do_nothing
from carpool.core.timers import Every

logger = logging.getLogger("carpool.broker")

BLOCK_MS = 1000
ENTRIES_AT_ONCE = 64
# An entry may hold a whole batch's outputs, so what was read must go soon.
TRIM_AFTER_ENTRIES = 16
EXPIRE_S = 60
RENEW_EVERY_S = 0.25


class ReplyReader:
    """Reads the replies for one gateway and hands them on, one at a time."""

    def __init__(
        self,
        nodes: Nodes,
        keys: Keys,
        gateway: bytes,
        *,
        came: Callable[[Reply], None],
        changed: Callable[[], None],
        # Outcomes may be lost, and entries too.
        emptied: Callable[[], None] = do_nothing,
    ) -> None:
        self._nodes = nodes
        self._stream = keys.replies(gateway)
        self.slot = keys.slot_of(self._stream)
        self._came = came
        self._changed = changed
        self._emptied = emptied
        # Of this connection: whether the stream was there; None until Redis has said so. It was made once.
        self._was_there: bool | None = None
        self._is_made = False
        # It was gone, and is being made anew.
        self._is_making = False
        # True while replies can come.
        self.is_up = False
        # The id of the last entry that was read.
        self.last_seen = b"0-0"
        self._read_since_trim = 0
        self._link: Link | None = None
        self._reader = nodes.reader(self.slot, connected=self._connected, received=self._received, lost=self._lost)
        self._every = Every(RENEW_EVERY_S, self._renew)
        self._every.start_now()

    def close(self) -> None:
        """Stop reading; the stream expires by itself, but need not wait for that."""
        self._every.stop()
        self._reader.close()
        self.is_up = False
        self._nodes.send(self.slot, ignore, b"DEL", self._stream)

    def _connected(self, link: Link) -> None:
        self._link = link
        # From the beginning: what was read is trimmed but for the last few, and an outcome that comes again is dropped.
        # To go on after the last entry would skip some where Redis lost data, or another clock writes the ids now.
        self.last_seen = b"0-0"
        self._was_there = None
        link.send(b"EXPIRE", self._stream, EXPIRE_S)
        # Makes the stream. At maxmemory that is refused; then it must be there.
        link.send(b"XADD", self._stream, b"*", b"hello", b"")
        link.send(b"EXPIRE", self._stream, EXPIRE_S)

    def _lost(self) -> None:
        self._link = None
        self.is_up = False
        self._changed()

    def _received(self, reply: Any) -> None:
        if isinstance(reply, list):
            try:
                self._read(reply[0][1])
            finally:
                self._ask()
        elif reply is None:
            self._ask()  # nothing came in time
        elif self._was_there is None and isinstance(reply, int):  # to the first EXPIRE
            self._was_there = reply == 1
        elif reply == 1:  # to the second one: the stream is there
            self.is_up = True
            self._ask()
            self._changed()
            if self._is_made and not self._was_there:
                self._emptied()
            self._is_made = True
        elif isinstance(reply, Refused) and reply.code == "OOM":
            pass  # the next reply tells whether the stream is there all the same
        elif reply == 0 or isinstance(reply, RedisFailure):
            logger.warning("replies cannot be read: %s", reply)
            if self._link is not None:
                self._link.close()

    def _ask(self) -> None:
        if self._link is not None:
            self._link.send(
                *(b"XREAD", b"COUNT", ENTRIES_AT_ONCE, b"BLOCK", BLOCK_MS, b"STREAMS", self._stream, self.last_seen)
            )

    def _read(self, entries: list[tuple[bytes, list[bytes]]]) -> None:
        for entry_id, fields in entries:
            self.last_seen = entry_id
            if fields[0] != b"r":
                continue
            try:
                reply = decode_reply(fields[1])
            except UnknownFormatError as fault:
                logger.error("a reply was dropped: %s", fault)
                continue
            self._came(reply)
        self._read_since_trim += len(entries)
        if self._read_since_trim >= TRIM_AFTER_ENTRIES:
            self._trim()

    def _trim(self) -> None:
        """Remove what was read; the last one may stay."""
        self._read_since_trim = 0
        self._nodes.send(self.slot, ignore, b"XTRIM", self._stream, b"MINID", self.last_seen)

    def _renew(self) -> None:
        self._nodes.send(self.slot, self._renewed, b"EXPIRE", self._stream, EXPIRE_S)
        if self._read_since_trim:
            self._trim()

    def _renewed(self, reply: Any) -> None:
        if reply != 0 or not self.is_up or self._is_making:
            return
        # An operator deleted it, or it expired while this process stood still.
        logger.warning("the stream of replies was gone: what waits here is queued again")
        self._is_making = True
        self.last_seen = b"0-0"  # from the next question on: the one that is out finds what has a higher id
        self._nodes.send(self.slot, self._made, b"XADD", self._stream, b"*", b"hello", b"")
        self._nodes.send(self.slot, ignore, b"EXPIRE", self._stream, EXPIRE_S)
        self._emptied()

    def _made(self, reply: Any) -> None:
        self._is_making = False
        if isinstance(reply, RedisFailure) and self._link is not None:
            self._link.close()  # begin again
