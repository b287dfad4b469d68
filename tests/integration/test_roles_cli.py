"""`carpool gateway`, `carpool batcher` and `--processes`: what the command line makes of them."""

import os
import socket
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from carpool.cli import main
from carpool.core.names import Role
from carpool.settings import Settings
from support.processes import CLEAN_ENVIRONMENT, carpool

REDIS = "redis://127.0.0.1:1"


def test_no_password_is_printed(tmp_path: Path) -> None:
    done = carpool("config", cwd=tmp_path, CARPOOL_BROKER_URL="redis://me:hunter2@h")
    assert done.returncode == 0
    assert '# url = "redis://me:***@h"' in done.stdout
    assert "hunter2" not in done.stdout + done.stderr
    done = carpool("config", cwd=tmp_path, CARPOOL_BROKER_URL="redis://me:hunter2@h:port")
    assert done.returncode == 2
    assert "hunter2" not in done.stdout + done.stderr


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = carpool(
            "gateway", "--broker", REDIS, "--processes", "2", "--port", port, "--admin-port", "0", cwd=tmp_path
        )
    assert done.returncode == 2
    assert done.stderr.startswith(f"carpool: cannot serve on 127.0.0.1:{port}: Address already in use")
    assert done.stderr.count("\n") == 1


class Served:
    """Stands for what the commands start: notes how."""

    def __init__(self) -> None:
        self.settings: list[Settings] = []
        self.roles: list[Role] = []
        self.sockets: list[socket.socket | None] = []
        self.adopted: list[int] = []
        self.children: list[list[str]] = []

    def run(
        self,
        settings: Settings,
        reload: Callable[[], Settings],
        role: Role = "serve",
        listen: socket.socket | None = None,
    ) -> int:
        assert reload() == settings
        self.settings.append(settings)
        self.roles.append(role)
        self.sockets.append(listen)
        return 7

    def adopt(self, listen_fd: int) -> None:
        self.adopted.append(listen_fd)

    def listen_on(self, host: str, port: int) -> socket.socket:
        assert (host, port) == ("127.0.0.1", 8000)
        return socket.socket()

    def processes(
        self, command: Callable[[int], Sequence[str]], number: int, listener: socket.socket
    ) -> types.SimpleNamespace:
        self.children = [list(command(n)) for n in range(number)]
        assert all(line[-1] == f"--listen-fd={listener.fileno()}" for line in self.children)
        listener.close()
        return types.SimpleNamespace(run=lambda: 8)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.chdir(tmp_path)
    for name in set(os.environ) - set(CLEAN_ENVIRONMENT):
        monkeypatch.delenv(name)
    served = Served()
    app, processes = types.ModuleType("carpool.app"), types.ModuleType("carpool.processes")
    app.__dict__.update(run=served.run)
    processes.__dict__.update(adopt=served.adopt, listen_on=served.listen_on, Processes=served.processes)
    monkeypatch.setitem(sys.modules, "carpool.app", app)
    monkeypatch.setitem(sys.modules, "carpool.processes", processes)
    return served


@pytest.mark.parametrize(
    ("arguments", "role"),
    [
        (["serve", "--upstream", "sim:"], "serve"),
        (["serve", "--upstream", "sim:", "--broker", REDIS], "serve"),
        (["gateway", "--broker", REDIS], "gateway"),
        (["gateway", "--broker", REDIS, "--upstream", "sim:"], "gateway"),
        (["batcher", "--broker", REDIS, "--upstream", "sim:"], "batcher"),
    ],
)
def test_each_command_has_its_role(served: Served, arguments: list[str], role: Role) -> None:
    assert main(arguments) == 7
    assert (served.roles, served.sockets) == ([role], [None])


@pytest.mark.parametrize(("command", "roles"), [("serve", ["serve", "gateway"]), ("gateway", ["gateway", "gateway"])])
def test_children_have_the_settings_of_their_parent(served: Served, command: str, roles: list[Role]) -> None:
    Path("my.toml").write_text("[batching]\nmax_batch = 9\n[gateway]\nprocesses = 2\n")
    arguments = ["--broker", REDIS, "--upstream", "sim:", "--upstream", "http://a:1-2/x", "--no-journal"]
    arguments += ["--config", "my.toml", "--max-wait-ms", "7"]
    assert main([command, *arguments]) == 8
    assert len(served.children) == 2
    for line in served.children:
        assert line[:3] == [sys.executable, "-m", "carpool"]
        assert main(line[3:]) == 7
    assert served.roles == roles
    assert len(served.adopted) == 2
    first, second = served.settings
    assert (first.gateway.admin_port, second.gateway.admin_port) == (8001, 8002)
    for settings in served.settings:
        assert settings.upstream.endpoints == ["sim:", "http://a:1-2/x"]
        assert (settings.broker.url, settings.batching.max_batch, settings.batching.max_wait_ms) == (REDIS, 9, 7.0)
        assert settings.tasks.journal is False


def test_free_admin_ports_for_all(served: Served) -> None:
    assert main(["gateway", "--broker", REDIS, "--processes", "3", "--admin-port", "0"]) == 8
    assert [("--admin-port=0" in line) for line in served.children] == [True] * 3
    assert main(served.children[2][3:]) == 7
    assert served.settings[0].gateway.admin_port == 0
