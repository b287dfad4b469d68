"""The broker over Redis keeps the contract: on one server, and on a Cluster of three primaries and three replicas.

Exact bounds, and exact order between requests, are promised inside one shard: requests are spread over the shards, each
with its part of the bounds, and a batcher takes from several at once. So the contract, which tells orders and bounds to
the last request, runs on one shard; any order of events, which asks for truth and not for exactness, on sixteen too.
"""

from collections.abc import Iterator
from typing import ClassVar

import pytest
from broker_contract import BrokerContract, BrokerMachine
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from redis_adapter import RedisAdapter

from carpool.core.errors import DeadlineExceeded
from carpool.testing import make_request
from support.redis_servers import RedisCluster, RedisServer

# A real Redis answers each step.
SOME_ORDERS = settings(max_examples=settings().max_examples // 2, stateful_step_count=30)


class RedisContract(BrokerContract):
    adapter: ClassVar[RedisAdapter]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _connect(cls, url: str) -> Iterator[None]:
        cls.adapter = RedisAdapter(url, shards=1)
        yield
        cls.adapter.close()

    @pytest.fixture(autouse=True)
    def _clear(self, _connect: None) -> Iterator[None]:
        yield
        self.adapter.clear()

    def test_the_time_of_one_request_is_not_that_of_its_neighbours(self) -> None:
        """Entries of a lane share what is said of them; but not where they differ."""
        timeouts = {"long": (25.0, 50.0), "short": (1.0, 2.0), "also long": (25.0, 50.0)}
        requests = {
            name: make_request(name, self.witness, now=self.clock(), queue_timeout_s=queue_s, total_timeout_s=total_s)
            for name, (queue_s, total_s) in timeouts.items()
        }
        for request in requests.values():
            assert self.broker.submit(request) is None
        self.clock.advance(2.0)
        assert self.take() == [requests["long"], requests["also long"]]
        assert isinstance(self.witness.outcome(requests["short"]), DeadlineExceeded)


class TestRedisBroker(RedisContract):
    @pytest.fixture(scope="class")
    @classmethod
    def url(cls, redis_server: RedisServer) -> str:
        return redis_server.url


class TestRedisClusterBroker(RedisContract):
    @pytest.fixture(scope="class")
    @classmethod
    def url(cls, redis_cluster: RedisCluster) -> str:
        return redis_cluster.url


# Near its bounds a gateway queues by a script, far from them by plain commands: both are production's own paths.
each_path = pytest.mark.parametrize("waiting_max", [BrokerMachine.WAITING_MAX, 1000], ids=["near bounds", "far"])


@each_path
@pytest.mark.parametrize("shards", [1, 16])
def test_any_order_of_events(redis_server: RedisServer, shards: int, waiting_max: int) -> None:
    run_machine(redis_server.url, shards, waiting_max)


@each_path
@pytest.mark.parametrize("shards", [1, 16])
def test_any_order_of_events_on_a_cluster(redis_cluster: RedisCluster, shards: int, waiting_max: int) -> None:
    run_machine(redis_cluster.url, shards, waiting_max)


def run_machine(url: str, shards: int, waiting_max: int) -> None:
    redis_adapter = RedisAdapter(url, shards)

    class RedisBrokerMachine(BrokerMachine):
        adapter = redis_adapter
        WAITING_MAX = waiting_max

        def teardown(self) -> None:
            redis_adapter.clear()

    try:
        run_state_machine_as_test(RedisBrokerMachine, settings=SOME_ORDERS)
    finally:
        redis_adapter.close()
