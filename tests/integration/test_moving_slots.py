"""A slot of a Cluster moves to another node, key by key: its shard stands still meanwhile, and loses nothing."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from carpool.broker.redis.keys import Shard
from carpool.core.task import StoredTask
from carpool.testing import ANYBODY
from support.processes import until
from support.redis_servers import RedisCluster, running_cluster
from support.redis_tasks import Office, open_office
from support.tasks import told

TASKS = 4


pytestmark = pytest.mark.xdist_group("moving slots")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RedisCluster]:
    """One whose slots the tests may move."""
    directory = tmp_path_factory.mktemp("moving-slots")
    async with running_cluster(directory, replicas=0, node_timeout_ms=5000) as cluster:
        yield cluster


@pytest.fixture
async def office(cluster: RedisCluster) -> AsyncIterator[Office]:
    async with open_office(cluster.url) as office:
        yield office


async def submit_into(office: Office, shard: Shard) -> object:
    """A task whose id names this shard; its id, or why it was refused."""
    request = office.request()
    request.id = f"{request.id[:-1]}{shard.number:x}"
    refusal = await told(lambda done: office.gateway().submit(request, done))
    return request.id if refusal is None else refusal


@pytest.mark.parametrize("first", ["counts", "sizes", "tasks"])
async def test_nothing_is_made_on_both_sides(cluster: RedisCluster, office: Office, first: str) -> None:
    """Whichever key goes first: that by which scripts are redirected, one that all use, or those of one kind."""
    shard = office.keys.shards[5]
    names = [str(await submit_into(office, shard)) for _ in range(TASKS)]
    move = await cluster.begin_to_move(shard.slot)
    before = await move.keys(move.source)
    gone = {key for key in before if (b":task:" in key if first == "tasks" else key.endswith(first.encode()))}
    await move.bring(*gone)

    await submit_into(office, shard)  # refused, if nobody knew that the slot moves
    assert not office.nodes.is_up(shard.slot)
    assert "being moved" in office.nodes.trouble
    # From now on the others are used.
    for _ in range(TASKS):
        name = await submit_into(office, shard)
        assert isinstance(name, str)
        assert name[-1] != "5"
    assert await move.keys(move.target) == gone
    assert await move.keys(move.source) <= before - gone

    await move.end()
    await until(lambda: office.nodes.is_up(shard.slot))
    taken = {each.task_id for each in await office.take()}
    assert taken.issuperset(names)
    for name in names:
        task = await told(lambda done, name=name: office.gateway().look(ANYBODY, name, 0.0, False, done))  # type: ignore[misc]
        assert isinstance(task, StoredTask)
    assert str(await submit_into(office, shard))[-1] == "5"


async def test_a_slot_that_stays_after_all_is_used_again(cluster: RedisCluster, office: Office) -> None:
    shard = office.keys.shards[5]
    await submit_into(office, shard)
    move = await cluster.begin_to_move(shard.slot)
    await submit_into(office, shard)  # the key of a new task could be on the other node
    assert not office.nodes.is_up(shard.slot)
    for node in (move.source, move.target):
        await node.ask("CLUSTER", "SETSLOT", shard.slot, "STABLE")
    await until(lambda: office.nodes.is_up(shard.slot))
    assert str(await submit_into(office, shard))[-1] == "5"
