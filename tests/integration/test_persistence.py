"""`broker.persistence = "forbidden"`: no process starts on a Redis that writes to a disk, or is silent about one."""

import subprocess
from pathlib import Path

import pytest

from carpool.broker.redis.client.address import parse_broker_url
from carpool.broker.redis.fleet.servers import Inspection, find_disks
from carpool.broker.redis.keys import Keys
from carpool.core.finding import Finding
from carpool.settings.schema import BrokerSettings
from carpool.tools.doctor import Doctor
from support.processes import carpool, running_role, until
from support.redis_servers import RedisServer, running_cluster, running_redis

SIM = "sim:?latency_ms=5&slots=4"
FORBIDDEN = {"broker.persistence": "forbidden"}
DISKLESS = ("--repl-diskless-sync", "yes", "--repl-diskless-load", "swapdb")


def start(url: str, cwd: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    """A process that should not start; with a leading word, another command."""
    line = (*(command or ("batcher", "--upstream", SIM)), "--broker", url)
    return carpool(*line, cwd=cwd, CARPOOL_BROKER_PERSISTENCE="forbidden")


async def disks(url: str) -> list[Finding]:
    return await find_disks(Inspection(parse_broker_url(url), Keys("disks")))


@pytest.mark.parametrize(
    ("args", "what", "do"),
    [
        (("--appendonly", "yes"), "the AOF", "CONFIG SET appendonly no"),
        (("--save", "3600 1"), "snapshots (save 3600 1)", 'CONFIG SET save ""'),
    ],
)
async def test_no_process_starts_where_redis_writes(tmp_path: Path, args: tuple[str, ...], what: str, do: str) -> None:
    async with running_redis(tmp_path / "redis", *args) as server:
        refused = start(server.url, tmp_path)
        assert refused.returncode == 2
        assert refused.stderr.startswith(f"carpool: 127.0.0.1:{server.port}: broker.persistence is ")
        assert what in refused.stderr and do in refused.stderr
        assert refused.stderr.count("\n") == 1
        examined = start(server.url, tmp_path, "doctor")
        [line] = [line for line in examined.stdout.splitlines() if ": persistence: " in line]
        assert examined.returncode == 1
        assert line.startswith("problem: ") and what in line and do in line


async def test_a_redis_that_does_not_tell_is_refused(tmp_path: Path) -> None:
    async with running_redis(tmp_path / "redis") as server, server.client() as client:
        await client.execute_command("ACL", "SETUSER", "few", "on", ">pw", "~*", "&*", "+@all", "-config")  # type: ignore[no-untyped-call]
        refused = start(f"redis://few:pw@127.0.0.1:{server.port}", tmp_path)
        assert refused.returncode == 2
        assert "CONFIG GET is refused" in refused.stderr and "+config|get" in refused.stderr
        server.kill()
        gone = start(server.url, tmp_path)
        assert (gone.returncode, gone.stderr.count("\n")) == (2, 1)
        assert "see that it runs" in gone.stderr


async def test_a_process_that_runs_says_when_it_is_turned_on(tmp_path: Path) -> None:
    async with running_redis(tmp_path / "redis") as server:
        assert await disks(server.url) == []
        flags = ("--broker", server.url, "--upstream", SIM)
        async with running_role(tmp_path, "serve", *flags, settings=FORBIDDEN) as process:

            async def is_so(status: str, metric: float) -> bool:
                health = await process.health()
                return health["status"] == status and await process.metric("carpool_broker_disks") == metric

            assert await is_so("healthy", 0)
            await server.ask("CONFIG", "SET", "appendonly", "yes")
            await until(lambda: is_so("degraded", 1))
            assert "CONFIG SET appendonly no" in (await process.health())["problem"]
            [said] = process.log_messages("error")
            assert said.startswith("payloads may reach a disk: ")
            await server.ask("CONFIG", "SET", "appendonly", "no")
            await until(lambda: is_so("healthy", 0))
            assert process.log_messages("error") == [said]


async def test_every_primary_and_every_replica_of_a_cluster_counts(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, *DISKLESS, primaries=3, replicas=1, node_timeout_ms=5000) as cluster:
        assert await disks(cluster.url) == []
        assert (await persistence_of(cluster.url)).level == "ok"
        primary = await cluster.primary_of(0)
        [replica] = await cluster.replicas_of(16_000)
        for server, name, wrong, right in (
            (primary, "appendonly", "yes", "no"),
            (replica, "save", "60 1", ""),
            (primary, "repl-diskless-sync", "no", "yes"),
            # Where it has data already, such a replica writes what it is sent to a file.
            (replica, "repl-diskless-load", "on-empty-db", "swapdb"),
        ):
            await server.ask("CONFIG", "SET", name, wrong)
            [found] = await disks(cluster.url)
            assert (found.where, found.level) == ((f"127.0.0.1:{server.port}",), "problem")
            assert f"CONFIG SET {name} " in found.do
            shown = await persistence_of(cluster.url, "problem")
            assert shown.where == found.where
            await server.ask("CONFIG", "SET", name, right)
        assert await disks(cluster.url) == []
        replica.kill()
        # It is not known for good: a restart of a process must not depend on every replica.
        assert await disks(cluster.url) == []


async def persistence_of(url: str, level: str = "ok") -> Finding:
    """What the doctor says of it at this level."""
    findings = await Doctor(parse_broker_url(url), Keys("disks"), BrokerSettings(persistence="forbidden")).examine()
    [found] = [each for each in findings if (each.check, each.level) == ("persistence", level)]
    return found


async def test_it_is_about_redis(tmp_path: Path, redis_server: RedisServer) -> None:
    refused = start("", tmp_path, "serve", "--upstream", SIM)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "tasks.journal = false" in refused.stderr
    assert await disks(redis_server.url) == []
