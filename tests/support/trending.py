"""Clients of whom half ask for the same: what they get, and what reaches the GPUs."""

import asyncio
import random
from collections.abc import Callable

from support.client import Connection, ConnectionBrokenError, inference_body

TRENDING = "what everybody asks"


class TrendingClients:
    """Many at once; each input is a nonce or the trending one, and the right answer is the input, reversed."""

    def __init__(self, ports: Callable[[], list[int]], *, leave_share: float = 0.0, seed: int = 1) -> None:
        self._ports = ports
        self._leave_share = leave_share
        self._random = random.Random(seed)
        self._serial = 0
        self.right = self.wrong = self.left = self.broken = self.failed = 0
        # Inputs that were sent whole, distinct ones and trending ones.
        self.sent = self.trending = 0

    async def run(self, total: int, at_once: int) -> None:
        """So many requests, so many clients."""
        per_client = -(-total // at_once)
        await asyncio.gather(*(self._client(per_client) for _ in range(at_once)))

    async def _client(self, number: int) -> None:
        connection: Connection | None = None
        for _ in range(number):
            connection = await self._ask(connection)
        if connection is not None:
            await connection.close()

    async def _ask(self, connection: Connection | None) -> Connection | None:
        self._serial += 1
        text = f"nonce {self._serial}"
        if self._random.random() < 0.5:
            text = TRENDING
        try:
            if connection is None:
                connection = await Connection.open(self._random.choice(self._ports()))
            self.sent += 1
            self.trending += text == TRENDING
            connection.send("POST", "/v1/inference", inference_body(text))
            if self._random.random() < self._leave_share:
                await asyncio.sleep(self._random.random() * 0.05)
                self.left += 1
                await connection.abort()
                return None
            response = await connection.read()
        except (ConnectionBrokenError, OSError):
            self.broken += 1
            if connection is not None:
                await connection.close()
            await asyncio.sleep(0.05)  # nobody may be there for a while
            return None
        if response.status != 200:
            self.failed += 1
        elif response.json["output"] == text[::-1]:
            self.right += 1
        else:
            self.wrong += 1
        if response.is_last:
            await connection.close()
            return None
        return connection
