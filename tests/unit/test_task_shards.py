"""Over how many shards tasks are spread."""

import pytest

from carpool.composition.redis_context import task_shards
from carpool.settings.schema import BrokerSettings, InputSettings, Settings, TaskSettings

MIB = 2**20


@pytest.mark.parametrize(
    ("bytes_max", "stored_bytes_max", "body_bytes_max", "shards"),
    [
        (512 * MIB, 4096 * MIB, MIB, 16),
        (10 * MIB, 4096 * MIB, MIB, 2),
        (512 * MIB, 12 * MIB, MIB, 3),
        (10 * MIB, 4096 * MIB, 64 * MIB, 1),
    ],
)
def test_each_has_room_for_some_of_the_largest(
    bytes_max: int, stored_bytes_max: int, body_bytes_max: int, shards: int
) -> None:
    broker, tasks = BrokerSettings(bytes_max=bytes_max), TaskSettings(stored_bytes_max=stored_bytes_max)
    sent = InputSettings(body_bytes_max=body_bytes_max)
    assert task_shards(Settings(broker=broker, tasks=tasks, input=sent)) == shards
    models = {"m": {"body_bytes_max": body_bytes_max}}
    assert task_shards(Settings(broker=broker, tasks=tasks, models=models)) == shards
