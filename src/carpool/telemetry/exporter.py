"""Sends spans to a receiver by OTLP over HTTP. It never holds a request up, and what it holds is bounded.

1. Spans leave once a second, or as soon as there are many; one call at a time.
2. A receiver that is away, or asks for patience (429, 502, 503, 504), gets the same spans again, a few times, later and
   later. Then, or if it refuses them, the spans are dropped. So are spans for which there is no room meanwhile.
3. A receiver may take a call and reject some of its spans (`partial_success`): these are not sent again, as OTLP wants.
4. Drops are counted. One line is logged when the receiver begins to fail, and one when it works again.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Mapping

import aiohttp

from carpool.core.errors import without_frames
from carpool.core.timers import wait_for
from carpool.telemetry.spans import Envelope, rejected_spans

logger = logging.getLogger("carpool.traces")

SEND_S = 1.0
BODY_BYTES = 512 * 1024
TRIES_MAX = 4
PAUSE_S, PAUSE_S_MAX = 0.5, 8.0
RETRY_STATUS = frozenset({429, 502, 503, 504})
ANSWER_BYTES_MAX = 64 * 1024
# At the end of a process.
LAST_S = 2.0


class Exporter:
    """Holds spans until they are sent."""

    def __init__(
        self, url: str, headers: Mapping[str, str], envelope: Envelope, *, bytes_max: int, timeout_s: float
    ) -> None:
        self._url = url
        self._headers = {
            **headers,
            "Content-Type": "application/x-protobuf",
            "Accept-Encoding": "identity",
            "User-Agent": "carpool",
        }
        self._envelope = envelope
        self._bytes_max = bytes_max
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._waiting: deque[tuple[bytes, int]] = deque()
        # Of those that wait, and of those under way.
        self.held_bytes = 0
        self._due = asyncio.Event()
        self._closing = asyncio.Event()
        self._is_failing = False
        self._session: aiohttp.ClientSession | None = None
        self._task: asyncio.Task[None] | None = None
        # For metrics: spans, and calls that brought nothing.
        self.sent = 0
        self.dropped = 0
        self.rejected = 0
        self.failures = 0

    def start(self) -> None:
        """Send from now on."""
        self._session = aiohttp.ClientSession(timeout=self._timeout, trust_env=False, auto_decompress=False)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def add(self, packed: bytes, spans: int) -> None:
        """So many more spans; dropped if there is no room."""
        held_bytes = self.held_bytes + len(packed)
        if held_bytes > self._bytes_max:
            self.dropped += spans
            return
        self.held_bytes = held_bytes
        self._waiting.append((packed, spans))
        if held_bytes >= BODY_BYTES:
            self._due.set()

    async def close(self) -> None:
        """Send what is left, within LAST_S."""
        self._closing.set()
        self._due.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=LAST_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _run(self) -> None:
        while not self._closing.is_set():
            await wait_for(self._due, SEND_S)
            self._due.clear()
            while self._waiting:
                await self._send_some()
                if self.held_bytes < BODY_BYTES and not self._closing.is_set():
                    break  # the rest waits for company

    async def _send_some(self) -> None:
        parts: list[bytes] = []
        size = spans = 0
        while self._waiting and size < BODY_BYTES:
            packed, number = self._waiting.popleft()
            parts.append(packed)
            size += len(packed)
            spans += number
        try:
            rejected = await self._send(self._envelope.wrap(parts))
        except Exception:
            logger.exception("traces could not be sent")
            rejected = None
        self.held_bytes -= size
        if rejected is None:
            self.dropped += spans
        else:
            rejected = min(rejected, spans)
            self.rejected += rejected
            self.sent += spans - rejected

    async def _send(self, body: bytes) -> int | None:
        """How many spans the receiver rejected of what it took; None: it took nothing."""
        pause_s = PAUSE_S
        for tries_left in reversed(range(TRIES_MAX)):
            failure, may_try_again, rejected = await self._post(body)
            if bool(failure) != self._is_failing:
                self._is_failing = bool(failure)
                if failure:
                    logger.warning("the receiver of traces failed: %s; requests go on without", failure)
                else:
                    logger.info("the receiver of traces works again")
            if not failure:
                return rejected
            self.failures += 1
            if not may_try_again or self._closing.is_set() or not tries_left:
                break
            await wait_for(self._closing, pause_s * (0.5 + random.random() / 2))
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
        return None

    async def _post(self, body: bytes) -> tuple[str, bool, int]:
        """What went wrong, or ""; whether trying again may help; and how many spans were rejected."""
        assert self._session is not None
        try:
            async with self._session.post(
                self._url, data=body, headers=self._headers, allow_redirects=False
            ) as response:
                answer = bytearray()
                while len(answer) < ANSWER_BYTES_MAX and (part := await response.content.read(ANSWER_BYTES_MAX)):
                    answer += part
                if response.status < 300:
                    return "", False, rejected_spans(bytes(answer))
                return f"status {response.status}", response.status in RETRY_STATUS, 0
        except (aiohttp.ClientError, TimeoutError, OSError) as failure:
            without_frames(failure)  # which hold the body; aiohttp's own hold the failure too
            return type(failure).__name__, True, 0
