"""F13: `kill -9` of a gateway with 1,000 webhooks due."""

from pathlib import Path

import pytest

from support.redis_servers import RedisServer
from support.scenarios.webhooks import kill_one_of_two, kill_with_webhooks_due

WEBHOOKS = 1000


@pytest.mark.timeout(240)
async def test_each_is_delivered_after_a_restart(tmp_path: Path) -> None:
    delivered, lost, wrong = await kill_with_webhooks_due(tmp_path, WEBHOOKS)
    assert (lost, wrong) == (0, 0)
    assert WEBHOOKS <= delivered <= WEBHOOKS + 100  # twice: those that were under way


@pytest.mark.timeout(240)
async def test_each_is_delivered_by_the_other_gateway(tmp_path: Path, redis_server: RedisServer) -> None:
    delivered, lost, wrong = await kill_one_of_two(tmp_path, redis_server.url, tmp_path.name, WEBHOOKS)
    assert (lost, wrong) == (0, 0)
    assert delivered >= WEBHOOKS
