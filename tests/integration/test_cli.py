"""The command line as a user meets it: real processes, their output and exit status."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from carpool.settings.keys import FLAGS
from carpool.version import __version__
from support.processes import carpool

REDIS = "redis://127.0.0.1:1"


def test_version() -> None:
    done = carpool("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"carpool {__version__}\n", "")


def test_help_lists_the_commands_with_examples() -> None:
    done = carpool("--help")
    assert done.returncode == 0
    for command in ("demo", "serve", "config", "sim-gpu", "bench", "plan", "simulate"):
        assert f" {command} " in done.stdout
    assert "Examples" in done.stdout


def test_no_command_shows_the_help() -> None:
    done = carpool()
    assert "Usage: carpool" in done.stdout
    assert (done.returncode, done.stderr) == (2, "")


@pytest.mark.parametrize("command", ["serve", "config", "gateway", "batcher"])
def test_help_of_a_command_lists_its_flags(command: str) -> None:
    done = carpool(command, "--help")
    assert done.returncode == 0
    for flags in [*FLAGS.values(), "--config"]:
        for flag in flags.split("/"):
            assert f" {flag} " in done.stdout
    assert f" carpool {command} --" in done.stdout.partition("Examples")[2]
    assert "--listen-fd" not in done.stdout


def test_help_does_not_load_the_network_libraries() -> None:
    code = (
        "import sys; from carpool.cli import main; main(['--help'])\n"
        "sys.exit(' '.join({'aiohttp', 'uvloop', 'httptools', 'prometheus_client'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_off_is_not_loaded() -> None:
    heavy = {"aiohttp", "grpc", "google.protobuf", "asyncpg", "redis", "joserfc"}
    code = f"import sys, carpool.app, carpool.upstream.client; sys.exit(' '.join({heavy} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_config_prints_what_is_in_effect(tmp_path: Path) -> None:
    (tmp_path / "carpool.toml").write_text("[gateway]\nhost = '::1'\nport = 1\n[batching]\npolicy = 'pid'")
    done = carpool(
        *("config", "--port", "3", "--upstream", "http://a:1-2/x", "--upstream", "sim:", "--no-journal"),
        cwd=tmp_path,
        CARPOOL_GATEWAY_PORT="2",
        CARPOOL_BATCHING_POLICY="fixed",
        CARPOOL_SERVICE_TOKEN="hunter2",
    )
    assert (done.returncode, done.stderr) == (0, "")
    shown = tomllib.loads(done.stdout)
    assert shown["gateway"]["host"] == "::1"
    assert shown["gateway"]["port"] == 3
    assert shown["batching"]["policy"] == "fixed"
    assert shown["upstream"]["endpoints"] == ["http://a:1-2/x", "sim:"]
    assert shown["tasks"]["journal"] is False
    assert "hunter2" not in done.stdout

    (tmp_path / "again.toml").write_text(done.stdout)
    again = carpool("config", "--config", "again.toml", cwd=tmp_path, CARPOOL_SERVICE_TOKEN="hunter2")
    assert again.stdout == done.stdout


def test_config_warns_of_timeouts_that_cannot_be_reached(tmp_path: Path) -> None:
    (tmp_path / "carpool.toml").write_text("[broker]\ntotal_timeout_s = 4\n[upstream]\ntimeout_s = 30")
    done = carpool("config", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr.startswith(
        "carpool: warning: upstream.timeout_s (30 s) is not below broker.total_timeout_s (4 s)"
    )
    assert tomllib.loads(done.stdout)["broker"]["total_timeout_s"] == 4


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["serve"], ["no upstream", "--upstream", "carpool demo"]),
        (["serve", "--port", "abc"], ["gateway.port (flag --port)", "from 0 to 65535", "'abc'"]),
        (["config", "--port", "65536"], ["gateway.port (flag --port)", "65536"]),
        (["serve", "--policy", "eager"], ["batching.policy (flag --policy)", '"adaptive"']),
        (
            ["serve", "--upstream", "gpu:9000"],
            ["upstream.endpoints (flag --upstream)", "http://host:9000/path"],
        ),
        (["serve", "--upstream", "sim:", "--admin-host", "0.0.0.0"], ["service.token"]),
        (["serve", "--upstream", "sim:", "--tls-cert", "x"], ["gateway.tls_cert (flag --tls-cert)"]),
        (["serve", "--config", "absent.toml"], ["absent.toml"]),
        (["serve", "--prot", "1"], ["--prot", "--port", "carpool serve --help"]),
        (["serve", "--port"], ["--port", "requires an argument"]),
        (["serve", "extra"], ["extra", "carpool serve --help"]),
        (["srve"], ["srve", "Did you mean 'serve'?"]),
        (["plan", "--target", "75"], ["--target is 75", "from 0.000001 to 1"]),
        (["gateway"], ["no broker", "--broker redis://HOST:6379", "carpool serve"]),
        (["gateway", "--upstream", "sim:"], ["no broker"]),
        (["batcher", "--upstream", "sim:"], ["no broker"]),
        (["batcher", "--broker", REDIS], ["no upstream", "--upstream URL"]),
        (["serve", "--broker", REDIS], ["no upstream"]),
        (["gateway", "--broker", "redis:/h"], ["broker.url (flag --broker) cannot be used", "redis://"]),
        (["serve", "--upstream", "sim:", "--processes", "2"], ["gateway.processes (flag --processes)", "--broker"]),
        (["batcher", "--broker", REDIS, "--upstream", "sim:", "--processes", "2"], ["another `carpool batcher`"]),
        (["gateway", "--broker", REDIS, "--listen-fd", "99"], ["--listen-fd is for the processes that --processes"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(arguments: list[str], parts: list[str], tmp_path: Path) -> None:
    done = carpool(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("carpool")
    for part in parts:
        assert part in line


def test_an_unknown_variable_is_a_mistake_too(tmp_path: Path) -> None:
    done = carpool("config", cwd=tmp_path, CARPOOL_GATEWAY_PROT="1")
    assert done.returncode == 2
    assert done.stderr == (
        "carpool: CARPOOL_GATEWAY_PROT (environment) is not a known variable; did you mean CARPOOL_GATEWAY_PORT?\n"
    )
