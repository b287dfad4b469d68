"""Which server has which slots: found with redis-py, as Sentinels and Clusters tell it.

Without a Cluster, one server has them all.
"""

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.exceptions import RedisError

from carpool.broker.redis.client.address import BrokerAddress, HostPort

# More ranges than a Cluster has slots are nonsense, and so are more nodes than this.
NODES_MAX = 1000
# So many nodes are asked for the slots before the look counts as failed.
ASKED_MAX = 4


class SlotRange(msgspec.Struct, frozen=True):
    """Slots that lie on one primary."""

    first: int
    last: int
    at: HostPort
    # How many follow that primary.
    replicas: int = 0


class UnknownTopologyError(Exception):
    """No server could say where the slots are; the text says why."""


# Asks where the slots are now, given the servers in use; raises UnknownTopologyError.
Look = Callable[[Sequence[HostPort]], Awaitable[list[SlotRange]]]


@asynccontextmanager
async def topology_of(address: BrokerAddress, timeout_s: float) -> AsyncIterator[Look]:
    """A way to ask Sentinels, or the nodes of a Cluster, where the slots are."""
    options = connection_options(address, timeout_s)
    if address.kind == "cluster":
        yield partial(_ask_cluster, address.hosts, options | login_of(address))
        return
    # The login of the URL is the master's. Sentinels mostly have none; those that have one are tried with the same.
    logins = [{}, login_of(address)] if address.username or address.password else [{}]
    make: Callable[..., Sentinel] = Sentinel  # which has no types of its own
    ways = [make(list(address.hosts), sentinel_kwargs=options | login) for login in logins]
    try:
        yield partial(_ask_sentinels, ways, address.service)
    finally:
        for sentinel in ways:
            with suppress(RedisError, OSError):
                await sentinel.aclose()


async def _ask_sentinels(ways: list[Sentinel], service: str, known: Sequence[HostPort]) -> list[SlotRange]:
    for sentinel in list(ways):
        try:
            host, port = await sentinel.discover_master(service)
        except (RedisError, OSError):
            continue
        if sentinel is not ways[0]:  # the way that worked is tried first from now on
            ways.reverse()
        return [SlotRange(0, SLOTS - 1, (str(host), int(port)))]
    raise UnknownTopologyError("no Sentinel names a master that is up")


async def _ask_cluster(
    seeds: Sequence[HostPort], options: dict[str, Any], known: Sequence[HostPort]
) -> list[SlotRange]:
    # In random order: a node that was cut off from the others, with an old view, must not be asked for ever.
    candidates = random.sample(known, len(known)) + random.sample(seeds, len(seeds))
    why = "no node of the Cluster answers"
    # Half of the questions go to the known nodes, which may all be gone.
    for host, port in dict.fromkeys(candidates[: ASKED_MAX // 2] + candidates[-ASKED_MAX // 2 :]):
        client: Any = Redis(host=host, port=port, **options)
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


def parse_slots(reply: Any, asked: str) -> list[SlotRange]:
    """The answer to CLUSTER SLOTS; a node that knows no name for itself is meant by the one that was `asked`."""
    ranges = []
    for first, last, primary, *replicas in reply:
        host, port = primary[0], int(primary[1])
        host = host.decode() if isinstance(host, bytes) else host or ""
        if not 0 <= int(first) <= int(last) < SLOTS:
            raise ValueError("a slot that does not exist")
        if host != "?":  # a node whose name is not known yet
            ranges.append(SlotRange(int(first), int(last), (host or asked, port), len(replicas)))
    if len({part.at for part in ranges}) > NODES_MAX:
        raise ValueError("too many nodes")
    return ranges


def login_of(address: BrokerAddress) -> dict[str, Any]:
    """For redis-py."""
    return {"username": address.username or None, "password": address.password or None}


def connection_options(address: BrokerAddress, timeout_s: float) -> dict[str, Any]:
    """For redis-py: one quick attempt. The caller tries again."""
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
