"""A PostgreSQL server of one's own: a cluster in a directory, ended by its own process id. Never the system's."""

import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 60.0
# PostgreSQL does not run as root.
USER = "postgres"


def program(name: str) -> str:
    """Debian keeps these out of the way; without them tests fail, so that nobody takes tracking for proven."""
    found = shutil.which(name) or next(map(str, sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))), None)
    assert found is not None, "there is no PostgreSQL here: run `make postgresql`"
    return found


def free_port() -> int:
    """Below the ports that the kernel gives to clients: while the server is stopped nobody takes it."""
    while True:
        port = random.choice(range(22_000, 32_000))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class PostgresServer:
    """One server on a loopback port, with the role `carpool` and no password."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._user = USER if os.geteuid() == 0 else None
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir()
        if self._user:
            owner = pwd.getpwnam(self._user)
            os.chown(directory, owner.pw_uid, owner.pw_gid)
        self._run("initdb", "-D", str(directory / "data"), "-A", "trust", "-U", "carpool", "--no-sync")

    @property
    def url(self) -> str:
        """For `tracking.url`."""
        return f"postgresql://carpool@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        """Start it, or start it again; returns when it answers."""
        settings = f"-p {self.port} -c listen_addresses=127.0.0.1 -k {self._directory} -c fsync=off".split()
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [program("postgres"), "-D", str(self._directory / "data"), *settings],
                stdout=log,
                stderr=log,
                cwd=self._directory,
                user=self._user,
            )
        give_up_at = time.monotonic() + PATIENCE_S
        ask = [program("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while subprocess.run(ask, check=False, cwd="/").returncode != 0:
            is_coming = self._process.poll() is None and time.monotonic() < give_up_at
            assert is_coming, f"PostgreSQL did not start: {(self._directory / 'log').read_text()[-2000:]}"
            time.sleep(0.05)

    def stop(self) -> None:
        """Let it leave: connections are cut at once."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(PATIENCE_S)
            self._process = None

    def freeze(self) -> None:
        """It neither answers nor hangs up from now on."""
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: signal.Signals) -> None:
        assert self._process is not None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for each in (pid, *map(int, children)):
            os.kill(each, number)

    def _run(self, name: str, *arguments: str) -> None:
        subprocess.run(
            [program(name), *arguments], check=True, stdout=subprocess.DEVNULL, cwd=self._directory, user=self._user
        )


@contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """A server that is gone at the end. Its directory is not pytest's: that is closed to other users."""
    with tempfile.TemporaryDirectory(prefix="carpool-postgres-") as directory:
        Path(directory).chmod(0o711)
        server = PostgresServer(Path(directory) / "server")
        server.start()
        try:
            yield server
        finally:
            server.stop()
