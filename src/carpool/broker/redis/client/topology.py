"""Which server has which slots: found with redis-py, as Sentinels and Clusters tell it.

Without a Cluster, one server has them all.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.exceptions import RedisError

from carpool.broker.redis.client.address import BrokerAddress

HostPort = tuple[str, int]
# More ranges than a Cluster has slots are nonsense, and so are more nodes than this.
NODES_MAX = 1000
# So many nodes are asked for the slots before the look counts as failed.
ASKED_MAX = 4


class SlotRange(msgspec.Struct, frozen=True):
    """Slots that lie on one primary."""

    first: int
    last: int
    at: HostPort


class UnknownTopologyError(Exception):
    """Nobody could say where the slots are; the text says why."""


class Topology(Protocol):
    """Somebody to ask where the slots are."""

    async def look(self, known: Sequence[HostPort]) -> list[SlotRange]:
        """Where the slots are now; `known` are servers in use. Raises UnknownTopologyError."""

    async def close(self) -> None:
        """Let connections go."""


def topology_of(address: BrokerAddress, timeout_s: float) -> Topology:
    """The one for this kind of address."""
    if address.kind == "single":
        return _Single(address)
    if address.kind == "sentinel":
        return _Sentinels(address, timeout_s)
    return _Cluster(address, timeout_s)


class _Single:
    def __init__(self, address: BrokerAddress) -> None:
        self._at = address.hosts[0]

    async def look(self, known: Sequence[HostPort]) -> list[SlotRange]:
        return [SlotRange(0, SLOTS - 1, self._at)]

    async def close(self) -> None:
        pass


class _Sentinels:
    """The master that the Sentinels name.

    The login of the URL is the master's. Sentinels mostly have none; those that have one are tried with the same.
    """

    def __init__(self, address: BrokerAddress, timeout_s: float) -> None:
        self._service = address.service
        logins = [{}, login_of(address)] if address.username or address.password else [{}]
        make: Callable[..., Sentinel] = Sentinel  # which has no types of its own
        self._ways = [
            make(list(address.hosts), sentinel_kwargs={**connection_options(address, timeout_s), **login})
            for login in logins
        ]

    async def look(self, known: Sequence[HostPort]) -> list[SlotRange]:
        for sentinel in list(self._ways):
            try:
                host, port = await sentinel.discover_master(self._service)
            except (RedisError, OSError):
                continue
            if sentinel is not self._ways[0]:  # the way that worked is tried first from now on
                self._ways.reverse()
            return [SlotRange(0, SLOTS - 1, (str(host), int(port)))]
        raise UnknownTopologyError("no Sentinel names a master that is up")

    async def close(self) -> None:
        for sentinel in self._ways:
            with suppress(RedisError, OSError):
                await sentinel.aclose()


class _Cluster:
    def __init__(self, address: BrokerAddress, timeout_s: float) -> None:
        self._seeds = address.hosts
        self._options = {**connection_options(address, timeout_s), **login_of(address)}

    async def look(self, known: Sequence[HostPort]) -> list[SlotRange]:
        # In random order: a node that was cut off from the others, with an old view, must not be asked for ever.
        candidates = random.sample(known, len(known)) + random.sample(self._seeds, len(self._seeds))
        why = "no node of the Cluster answers"
        # Half of the questions go to the known nodes, which may all be gone.
        for host, port in dict.fromkeys(candidates[: ASKED_MAX // 2] + candidates[-ASKED_MAX // 2 :]):
            client: Any = Redis(host=host, port=port, **self._options)
            try:
                if ranges := parse_slots(await client.execute_command("CLUSTER SLOTS"), host):
                    return ranges
                why = "the Cluster has no slots yet"
            except (RedisError, OSError) as failure:
                why = f"{host}:{port}: {failure}"
            except (ValueError, TypeError, IndexError):
                why = f"{host}:{port} gave an answer to CLUSTER SLOTS that cannot be read"
            finally:
                with suppress(RedisError, OSError):
                    await client.aclose()
        raise UnknownTopologyError(why)

    async def close(self) -> None:
        pass


def parse_slots(reply: Any, asked: str) -> list[SlotRange]:
    """The answer to CLUSTER SLOTS; a node that knows no name for itself is meant by the one that was `asked`."""
    ranges = []
    for first, last, primary, *_ in reply:
        host, port = primary[0], int(primary[1])
        host = host.decode() if isinstance(host, bytes) else host or ""
        if not 0 <= int(first) <= int(last) < SLOTS:
            raise ValueError("a slot that does not exist")
        if host != "?":  # a node whose name is not known yet
            ranges.append(SlotRange(int(first), int(last), (host or asked, port)))
    if len(_nodes_of(ranges)) > NODES_MAX:
        raise ValueError("too many nodes")
    return ranges


def _nodes_of(ranges: Iterable[SlotRange]) -> set[HostPort]:
    return {part.at for part in ranges}


def login_of(address: BrokerAddress) -> dict[str, Any]:
    """For redis-py."""
    return {"username": address.username or None, "password": address.password or None}


def connection_options(address: BrokerAddress, timeout_s: float) -> dict[str, Any]:
    """For redis-py: one quick attempt. Whoever asks comes again."""
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if address.tls:
        options |= {
            "ssl": True,
            "ssl_ca_certs": address.files.ca or None,
            "ssl_certfile": address.files.cert or None,
            "ssl_keyfile": address.files.key or None,
        }
    return options
