"""Several processes behind one socket: real ones, with a small child in place of the gateway."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from support.gateway import eventually
from support.processes import PATIENCE_S

PARENT = """
import socket, sys
import carpool.processes
from carpool.processes import Processes, listen_on
from carpool.telemetry.logs import configure_logging

configure_logging("info", "json")
# Children that take long to start are not taken for others.
carpool.processes.LONG_LIFE_S = carpool.processes.START_S = 600.0
listener = listen_on("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
command = lambda number: [sys.executable, sys.argv[1], str(listener.fileno()), str(number), sys.argv[2]]
status = Processes(command, 2, listener).run()
assert "asyncio" not in sys.modules and "uvloop" not in sys.modules
sys.exit(status)
"""
# Tells its number and pid to whoever connects, and the signals it got to a file. Told to leave, it takes 0.2 s.
CHILD = """
import os, signal, sys, time
from pathlib import Path
from carpool.processes import adopt

number, way = int(sys.argv[2]), sys.argv[3]
if way == "cannot-start" and number == 1:
    sys.exit(2)
log = Path(f"child-{number}.log")

def note(signum, _frame):
    with log.open("a") as file:
        file.write(signal.Signals(signum).name + "\\n")
    if signum != signal.SIGHUP:
        time.sleep(0.2)
        os._exit(5 if way == "bad-end" and number == 1 else 0)

for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(name, note)
listener = adopt(int(sys.argv[1]))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
while True:
    connection, _ = listener.accept()
    connection.sendall(f"{number} {os.getpid()}".encode())
    connection.close()
"""


class Parent(NamedTuple):
    """The process under test, the port, and where its children write."""

    process: "subprocess.Popen[str]"
    port: int
    directory: Path

    def connect(self) -> tuple[int, int] | None:
        """Number and pid of the child that answered; None if it died before it did."""
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE_S) as connection:
            try:
                answer = connection.recv(100).split()
            except ConnectionResetError:
                return None
        return (int(answer[0]), int(answer[1])) if answer else None

    def children(self) -> dict[int, int]:
        found: dict[int, int] = {}

        def both_answered() -> bool:
            found.update(filter(None, [self.connect()]))
            return len(found) == 2

        assert eventually(both_answered)
        return found

    def signals(self, number: int) -> list[str]:
        """What a child was told so far."""
        path = self.directory / f"child-{number}.log"
        return path.read_text().split() if path.exists() else []

    def leave(self) -> int:
        return self.process.wait(PATIENCE_S)

    def errors(self) -> list[str]:
        """What it logged as errors; call it at the end."""
        assert self.process.stderr is not None
        lines = [json.loads(line) for line in self.process.stderr.read().splitlines()]
        return [line["message"] for line in lines if line["level"] == "error"]


@contextmanager
def parent_of_two(directory: Path, way: str = "well") -> Iterator[Parent]:
    (directory / "parent.py").write_text(PARENT)
    (directory / "child.py").write_text(CHILD)
    with subprocess.Popen(
        [sys.executable, "parent.py", "child.py", way],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=directory,
    ) as process:
        assert process.stdout is not None
        try:
            yield Parent(process, int(process.stdout.readline()), directory)
        finally:
            process.kill()  # its children leave by themselves


def is_alive(pid: int) -> bool:
    """One that ended and waits for somebody to ask for its status is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
def test_all_accept_from_one_socket_and_leave_when_the_parent_is_told(tmp_path: Path, name: signal.Signals) -> None:
    with parent_of_two(tmp_path) as parent:
        children = parent.children()
        assert set(children) == {0, 1}
        parent.process.send_signal(name)
        assert parent.leave() == 0
        assert not any(map(is_alive, children.values()))
        assert [parent.signals(number) for number in (0, 1)] == [[name.name], [name.name]]
        assert parent.errors() == []
        with pytest.raises(ConnectionRefusedError):
            parent.connect()


def test_hang_up_is_for_all_and_ends_nobody(tmp_path: Path) -> None:
    with parent_of_two(tmp_path) as parent:
        before = parent.children()
        parent.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: parent.signals(0) == parent.signals(1) == ["SIGHUP"])
        assert parent.children() == before


def test_a_child_that_died_is_started_again(tmp_path: Path) -> None:
    with parent_of_two(tmp_path) as parent:
        before = parent.children()
        os.kill(before[1], signal.SIGKILL)
        assert eventually(lambda: before[1] not in parent.children().values())
        after = parent.children()
        assert after[0] == before[0]
        assert after[1] != before[1]
        os.kill(after[1], signal.SIGTERM)  # nobody told the parent: this is a death too
        assert eventually(lambda: after[1] not in parent.children().values())
        parent.process.terminate()
        assert parent.leave() == 0
        assert parent.errors() == [
            "process 2 was ended by SIGKILL; it is started again in 0.1 s",
            "process 2 left with status 0; it is started again in 0.2 s",
        ]


def test_children_leave_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    with parent_of_two(tmp_path) as parent:
        children = parent.children()
        parent.process.kill()
        parent.leave()
        assert eventually(lambda: not any(map(is_alive, children.values())))
        assert parent.signals(0) == parent.signals(1) == ["SIGTERM"]


def test_a_bad_end_of_one_shows_in_the_status(tmp_path: Path) -> None:
    with parent_of_two(tmp_path, "bad-end") as parent:
        parent.children()
        parent.process.terminate()
        assert parent.leave() == 1
        assert parent.errors() == ["process 2 left with status 5"]


def test_one_that_cannot_start_ends_all(tmp_path: Path) -> None:
    with parent_of_two(tmp_path, "cannot-start") as parent:
        assert parent.leave() == 2
        assert parent.errors() == []
