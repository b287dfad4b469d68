"""Processes of `carpool` that begin with all modules: one that has imported them forks for each that a test starts.

A Python that starts and imports Carpool needs 0.7 s of a core, its fork a tenth of that, and tests start a thousand.
A fork is a process like any other, with a pid, an environment, a folder and signals of its own. That `carpool` starts
from nothing, the blocks of the docs show (`test_docs_run.py`).

A test may change a constant of Carpool, a pause that would make it long or a bound that it would never reach. It stands
among the test's settings, by its path: `{"carpool.upstream.health.INTERVAL_S": 0.1}`.
"""

import atexit
import gc
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

# In `tests/integration`. Where memory and times are measured (`make chaos`), each process starts from nothing.
IS_ON = False
_MESSAGE_BYTES_MAX = 1 << 20
NO_CONSTANTS: Mapping[str, object] = MappingProxyType({})
# What the C library and Python look at once, when a process starts: with others than ours, it starts from nothing.
_READ_AT_START = ("MALLOC_", "PYTHON", "LD_")


class Forked:
    """One process, as `subprocess.Popen` shows one."""

    def __init__(self, arguments: Sequence[str], pid: int, ends: int) -> None:
        self.args = arguments
        self.pid = pid
        self.returncode: int | None = None
        # Where its exit status will be read.
        self._ends = ends

    def poll(self) -> int | None:
        """Its exit code, if it has ended: negative after a signal."""
        self._look(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended."""
        self._look(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _look(self, timeout: float | None) -> None:
        if self.returncode is None and select.select([self._ends], [], [], timeout)[0]:
            self.returncode = int(os.read(self._ends, 16))
            os.close(self._ends)


Started = Forked | subprocess.Popen[bytes]


class _Forker:
    """The process that forks, as its user sees it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            # -P: the folder of this file is no place for modules.
            command = [sys.executable, "-P", __file__, str(other.fileno())]
            # Its own stdin, stdout and stderr are replaced in each fork; in a session of its own no Ctrl-C reaches it.
            self._process = subprocess.Popen(
                command, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        atexit.register(self._end)

    def start(
        self,
        arguments: Sequence[str],
        stdout: int,
        stderr: int,
        env: Mapping[str, str],
        cwd: Path | None,
        constants: Mapping[str, object],
    ) -> Forked:
        ends, told = os.pipe()
        message = json.dumps([list(arguments), dict(env), str(cwd or Path.cwd()), dict(constants)]).encode()
        with self._lock:
            socket.send_fds(self._socket, [message], [stdout, stderr, told])
            pid = int(self._socket.recv(16))
        os.close(told)
        return Forked(arguments, pid, ends)

    def _end(self) -> None:
        self._socket.close()
        self._process.wait()


def start_carpool(
    arguments: Sequence[str],
    stdout: int,
    stderr: int,
    env: Mapping[str, str],
    cwd: Path | None = None,
    constants: Mapping[str, object] = NO_CONSTANTS,
) -> Started:
    """`carpool ARGUMENTS` with exactly this environment and these constants; it writes to these open files."""
    if not IS_ON or any(env[name] != os.environ.get(name) for name in env if name.startswith(_READ_AT_START)):
        command = [sys.executable, "-m", "carpool", *arguments]
        if constants:
            command = [sys.executable, "-P", __file__, json.dumps(dict(constants)), *arguments]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=env, cwd=cwd)
    return _forker().start(arguments, stdout, stderr, env, cwd, constants)


def constants_in(given: Mapping[str, object]) -> dict[str, object]:
    """What is no setting: none begins so."""
    return {path: value for path, value in given.items() if path.startswith("carpool.")}


def settings_in(given: Mapping[str, object]) -> dict[str, object]:
    return {path: value for path, value in given.items() if not path.startswith("carpool.")}


def place_of(constant: str) -> tuple[dict[str, Any], str]:
    """The names of its module, and its own; KeyError if there is no such constant."""
    module, _, name = constant.rpartition(".")
    names = vars(import_module(module))
    names[name]
    return names, name


@cache
def _forker() -> _Forker:
    return _Forker()


class _Server:
    """What the forking process does: it starts processes until nobody can ask it to, and says how they ended."""

    def __init__(self, asked: socket.socket) -> None:
        self._asked = asked
        # Where the end of each process that runs is told, by its pid.
        self._told: dict[int, int] = {}
        self._wakes, self._woken = os.pipe()
        os.set_blocking(self._woken, False)

    def serve(self) -> tuple[list[str], dict[str, Any]]:
        """Returns in each fork, with its arguments and constants."""
        signal.set_wakeup_fd(self._woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            for ready in select.select([self._asked.fileno(), self._wakes], [], [])[0]:
                if ready == self._asked.fileno():
                    message, fds, _, _ = socket.recv_fds(self._asked, _MESSAGE_BYTES_MAX, 3)
                    if not message:
                        sys.exit(0)  # nobody can ask any more
                    arguments, environment, folder, constants = json.loads(message)
                    if self._fork(environment, folder, *fds):
                        return arguments, constants
                else:
                    os.read(self._wakes, 4096)
                    self._reap()

    def _fork(self, environment: dict[str, str], folder: str, stdout: int, stderr: int, told: int) -> bool:
        pid = os.fork()
        if pid:
            self._told[pid] = told
            os.close(stdout)
            os.close(stderr)
            self._asked.send(str(pid).encode())
            return False
        self._become_plain()
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        for fd in (stdout, stderr, told):
            os.close(fd)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.path.insert(0, folder)  # as `python -m` does
        return True

    def _become_plain(self) -> None:
        """Leave nothing of the process that forked."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._asked.close()
        for fd in (self._wakes, self._woken, *self._told.values()):
            os.close(fd)

    def _reap(self) -> None:
        while self._told:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            told = self._told.pop(pid)
            os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(told)


def _fork_when_asked(asked: int) -> tuple[list[str], dict[str, Any]]:
    """Import all of Carpool, and fork until nobody asks. Returns in each fork, with its arguments and constants."""
    import secrets

    import carpool.composition.grpc_face
    import carpool.distributed
    import carpool.embedded
    import carpool.face.intake
    import carpool.tools.bench.run
    import carpool.upstream.client
    from carpool.cli import main

    with redirect_stdout(io.StringIO()):
        main(["config"])  # the command line imports more when it is first used
    gc.collect()
    gc.freeze()  # a collection in a fork would copy these pages
    wanted = _Server(socket.socket(fileno=asked)).serve()
    # What a module draws for its process when it is imported: two that share it would use the same ids.
    vars(carpool.face.intake)["_prefix"] = f"req_{secrets.token_hex(6)}-"
    return wanted


def _main() -> NoReturn:
    """With the number of a socket, the process that forks; with constants and arguments, `carpool`."""
    arguments, constants = sys.argv[2:], json.loads(sys.argv[1])
    if isinstance(constants, int):
        arguments, constants = _fork_when_asked(constants)
    for constant, value in constants.items():
        names, name = place_of(constant)
        names[name] = value
    import carpool
    from carpool.cli import main

    sys.argv = [str(Path(carpool.__file__ or "").with_name("__main__.py")), *arguments]
    sys.exit(main())


if __name__ == "__main__":
    _main()
