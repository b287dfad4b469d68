"""An owner whose inputs keep being refused: what one batcher finds out, the whole fleet knows."""

import asyncio
from pathlib import Path

from support.addressed_clients import AddressedClients, Due
from support.checker import Checker
from support.processes import until
from support.redis_fleet import fleet_over
from support.redis_servers import RedisServer

BAD, GOOD = "127.0.0.5", "127.0.0.6"
SIM = "sim:?latency_ms=10&slots=2&refuse=INVALID"


async def test_all_batchers_know_an_offender_and_others_are_answered(tmp_path: Path, redis_server: RedisServer) -> None:
    checker = Checker("U6")
    # The door is off: on a busy machine calls seem slow, and it would refuse some, whoever offends.
    settings = {"broker.namespace": tmp_path.name, "shedding.mode": "off"}
    async with fleet_over(tmp_path, redis_server.url, settings) as fleet:
        gateway = await fleet.add("gateway")
        batchers = [await fleet.add("batcher", "--upstream", SIM) for _ in range(2)]
        await fleet.wait_until_ready()
        assert gateway.process is not None
        load = [Due(number / 50, BAD if number % 2 else GOOD, "INVALID" if number % 2 else "") for number in range(150)]
        async with AddressedClients(gateway.process.port, checker) as clients:
            answers = await clients.run(load)
        good = {answer.status for answer in answers if answer.address == GOOD}
        bad = {answer.status for answer in answers if answer.address == BAD}
        assert good == {200}
        assert 422 in bad and 200 not in bad

        async def is_known_everywhere() -> bool:
            shown = [await place.process.fleet() for place in (gateway, *batchers)]
            return all(model["quarantined"] == [BAD] for model in shown)

        # Its score falls with time: keep it an offender while we look.
        async with AddressedClients(gateway.process.port, checker) as clients:
            more = asyncio.create_task(clients.run([Due(number / 20, BAD, "INVALID") for number in range(100)]))
            await until(is_known_everywhere)
            more.cancel()
            await asyncio.gather(more, return_exceptions=True)
    assert checker.verdict().wrong == 0
