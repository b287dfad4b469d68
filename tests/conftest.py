"""Its place puts this directory on the import path: the tests share what is in `support`.

The Redis servers here live as long as the whole run and start when the first test asks for them. Tests that share one
use a namespace of their own; a test that kills, fills or stops a server starts its own.
"""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from support.redis_servers import RedisCluster, RedisServer, running_cluster, running_redis

# How long an example takes says how busy the machine is; how many of hostile inputs are thrown away is chance.
settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
settings.load_profile("any-machine")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def redis_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RedisServer]:
    """One server for the whole run."""
    async with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RedisCluster]:
    """One Cluster of three primaries and three replicas for the whole run."""
    # Nobody dies in it: a node that is late is not to be taken for dead.
    async with running_cluster(tmp_path_factory.mktemp("redis-cluster"), node_timeout_ms=5000) as cluster:
        yield cluster
