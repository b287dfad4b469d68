"""API keys in Redis: `carpool keys` writes them, every gateway looks at them once a second.

A gateway looks at a version, a text that each change replaces, and reads the keys when it is not the one that was read
last. While Redis is away, what was read last stays.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any

from carpool.broker.redis.client.address import BrokerAddress
from carpool.broker.redis.client.link import RedisFailure
from carpool.broker.redis.client.nodes import Nodes
from carpool.broker.redis.keys import Keys
from carpool.broker.redis.scripts import API_KEYS
from carpool.core.api_key import ApiKey, KeyStoreError, decode_keys, encode_key
from carpool.core.timers import Every

logger = logging.getLogger("carpool")

INTERVAL_S = 1.0
CONNECT_S_MAX = 5.0


class ApiKeyWatch:
    """Calls `changed` with the keys when they have changed."""

    def __init__(self, nodes: Nodes, keys: Keys, changed: Callable[[list[ApiKey]], None]) -> None:
        self._nodes = nodes
        self._keys = keys
        self._changed = changed
        # None: never read. b"": there was none.
        self._version: bytes | None = None
        self._every = Every(INTERVAL_S, self._look)

    def start(self) -> None:
        """Look now, and from now on."""
        self._every.start_now()

    def nodes_changed(self) -> None:
        """A server came or went: what was not read yet may be there."""
        if self._version is None:
            self._look()

    def close(self) -> None:
        """Look no more."""
        self._every.stop()

    def _look(self) -> None:
        # In a hash, so that the user of Redis needs no right more.
        self._nodes.send(self._keys.fleet_slot, self._told_version, b"HGET", self._keys.api_keys_version, b"now")

    def _told_version(self, reply: Any) -> None:
        version = reply or b""
        if isinstance(reply, RedisFailure) or version == self._version:
            return

        def told_keys(reply: Any) -> None:
            if isinstance(reply, RedisFailure):
                return
            found = decode_keys(bodies_of(reply))
            self._changed(found)
            # The version from before: what came in between is seen at the next look.
            self._version = version
            logger.info("API keys were read", extra={"fields": {"keys": len(found)}})

        self._nodes.send(self._keys.fleet_slot, told_keys, b"HGETALL", self._keys.api_keys)


class RedisKeyStore:
    """The keys, for a command: it connects, does one thing, and goes. Errors leave this class as KeyStoreError."""

    def __init__(self, address: BrokerAddress, keys: Keys, timeout_s: float) -> None:
        self._address = address
        self._keys = keys
        self._timeout_s = timeout_s

    def create(self, key: ApiKey) -> bool:
        """Keep a key; false if there is one of that name."""
        return self._change(key.name, encode_key(key))

    def revoke(self, name: str) -> bool:
        """Forget a key; false if there is none of that name."""
        return self._change(name, b"")

    def all(self) -> list[ApiKey]:
        """Every key, by name."""
        reply = self._ask(b"HGETALL", self._keys.api_keys)
        return sorted(decode_keys(bodies_of(reply)), key=lambda key: key.name)

    def _change(self, name: str, body: bytes) -> bool:
        keys = (self._keys.api_keys, self._keys.api_keys_version)
        return bool(self._ask(b"EVAL", API_KEYS.source, len(keys), *keys, name, secrets.token_hex(8), body))

    def _ask(self, *command: bytes | int | str) -> Any:
        return asyncio.run(self._ask_once(*command))

    async def _ask_once(self, *command: bytes | int | str) -> Any:
        slot, is_up = self._keys.fleet_slot, asyncio.Event()

        def changed() -> None:
            if nodes.is_up(slot):
                is_up.set()

        nodes = Nodes(self._address, timeout_s=self._timeout_s, changed=changed)
        nodes.start()
        try:
            await asyncio.wait_for(is_up.wait(), CONNECT_S_MAX)
            return await nodes.ask(slot, *command)
        except TimeoutError:
            raise KeyStoreError(f"Redis cannot be reached: {nodes.trouble}") from None
        except RedisFailure as failure:
            raise KeyStoreError(f"Redis did not do it: {failure}") from None
        finally:
            await nodes.close()


def bodies_of(reply: Any) -> list[bytes]:
    """The values in the reply to HGETALL, whichever protocol it came by."""
    return list(reply.values()) if isinstance(reply, dict) else list(reply[1::2])
