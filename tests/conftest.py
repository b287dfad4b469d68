"""Its place puts this directory on the import path: the tests share what is in `support`.

The Redis servers here live as long as the whole run and start when the first test asks for them. Tests that share one
use a namespace of their own; a test that kills, fills or stops a server starts its own. Workers that share a run have a
server each, and one of them has the Cluster.
"""

import os
from collections.abc import AsyncIterator
from datetime import date

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from support.checker import PROMISES
from support.redis_servers import RedisCluster, RedisServer, running_cluster, running_redis

# How long an example takes says how busy the machine is; how many of hostile inputs are thrown away is chance.
ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
# HYPOTHESIS_PROFILE=long looks further than there is time for in every run.
settings.register_profile("short", ANY_MACHINE, max_examples=25)
settings.register_profile("long", ANY_MACHINE, max_examples=400)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))

# Of all requests in `make chaos`: answered as promised.
SHARE_MIN = 0.999
is_chaos = pytest.StashKey[bool]()
# That share as docs/guarantees.md has it.
stated = pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Six processes that make a Cluster are started once."""
    for item in items:
        if "redis_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("cluster"))
    config.stash[is_chaos] = any(item.path.parent.name == "chaos" for item in items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What takes long to set up is set up once: each group must have one worker."""
    if session.config.getoption("loadgroup", False):
        lost = [item for item in session.items if item.get_closest_marker("xdist_group") and "@" not in item.nodeid]
        assert not lost, f"this pytest-xdist leaves {lost[0].nodeid} to any worker, though it has a group"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The rows of `make chaos` have their own bounds; this one is over all of them."""
    passed, tests = session.testscollected - session.testsfailed, session.testscollected
    session.config.stash[stated] = PROMISES.stated(f"{date.today()}", passed, tests)
    if session.config.stash.get(is_chaos, False) and PROMISES.share < SHARE_MIN:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config: pytest.Config) -> None:
    """The last lines of `make chaos`, behind everything that pytest has to say."""
    if config.stash.get(is_chaos, False):
        print(f"chaos: if this was all of it, docs/guarantees.md is to end with:\n{config.stash.get(stated, '')}")  # noqa: T201
        print(  # noqa: T201
            f"chaos: {PROMISES.kept:,} of {PROMISES.requests:,} requests were answered as promised "
            f"({100 * PROMISES.share:.3f} %, wanted {100 * SHARE_MIN:.1f} %)"
        )


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
