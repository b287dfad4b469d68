"""Whatever asks for `site` or `open_site` runs on every kind of site."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from sites import Open, Site, opened

from support.redis_servers import RedisServer


@pytest.fixture(scope="module", params=["embedded", "redis"])
def site_server(request: pytest.FixtureRequest) -> RedisServer | None:
    """Where the processes of a site meet; None: it has but one."""
    return request.getfixturevalue("redis_server") if request.param == "redis" else None


@pytest.fixture(scope="module")
def site_settings() -> dict[str, object]:
    """What the shared site of a module is set to; a module may say otherwise."""
    return {}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_site(
    site_server: RedisServer | None, site_settings: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Site]:
    """One for all tests of a module that leave it as they found it."""
    async with opened(tmp_path_factory.mktemp("site"), site_server) as open_one:
        yield await open_one(**site_settings)


@pytest_asyncio.fixture(loop_scope="module")
async def site(shared_site: Site) -> AsyncIterator[Site]:
    """The shared one, with a GPU that has seen nothing yet."""
    shared_site.gpu.begin_anew()
    yield shared_site
    shared_site.gpu.begin_anew()


@pytest_asyncio.fixture(loop_scope="module")
async def open_site(site_server: RedisServer | None, tmp_path: Path) -> AsyncIterator[Open]:
    """Opens sites of a test's own."""
    async with opened(tmp_path, site_server) as open_one:
        yield open_one
