"""Several gateway processes behind one port (`--processes N`): the parent that starts them and watches over them.

1. The parent binds the listening socket and hands it down; the kernel gives each connection to one of the children.
2. A child is a fresh process with the same command line: it reads flags, environment and file by itself.
3. SIGTERM, SIGINT and SIGHUP are for all of them. Children have process groups of their own, so that Ctrl-C at a
   terminal reaches each of them once, through the parent.
4. A child that leaves without a signal to do so is started again, later and later while that goes on.
5. Children leave with their parent, however it ended: their stdin is a pipe that ends when it does.

The parent waits for signals and does nothing else: it needs neither an event loop nor the libraries of the gateway.
"""

import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence

from carpool.core.clock import Clock, monotonic

logger = logging.getLogger("carpool")

# As `face/http/server.py` has it.
BACKLOG = 4096
# Pauses before a child is started again: they double while it does not live for long.
PAUSE_S, PAUSE_S_MAX = 0.1, 5.0
LONG_LIFE_S = 10.0
# A child that cannot start says so with this status. If that happens at the very start, it will not get better.
EXIT_CANNOT_START = 2
START_S = 10.0
# How often children are looked at although no signal came.
LOOK_S = 1.0

_FORWARDED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_AWAITED = _FORWARDED | {signal.SIGCHLD}

Command = Callable[[int], Sequence[str]]


def listen_on(host: str, port: int) -> socket.socket:
    """The one socket that all children accept from; raises OSError."""
    if not host:  # every address, as asyncio has it
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # A name like `localhost` may stand for two addresses, and there is one socket: IPv4 then.
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return socket.create_server(address[:2], family=family, backlog=BACKLOG)


def adopt(listen_fd: int) -> socket.socket:
    """In a child: the parent's socket. From now on this process gets SIGTERM when its parent is gone."""
    listener = socket.socket(fileno=listen_fd)
    # Started while the signals are still blocked, as they came from the parent: they are for the main thread.
    threading.Thread(target=_leave_with_parent, name="parent-watch", daemon=True).start()
    # SIGHUP stays so until this process can reload (app.py).
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED - {signal.SIGHUP})
    return listener


def _leave_with_parent() -> None:
    try:
        while os.read(0, 4096):
            pass
    except OSError:
        pass
    os.kill(os.getpid(), signal.SIGTERM)


class Child:
    """One place in the row of processes, and the process that has it now."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0
        # When to start it again; 0 while it runs or when it shall not.
        self.due_at = 0.0
        self.pause_s = PAUSE_S


class Processes:
    """The children of this process; `command` gives the command line of the n-th, from 0."""

    def __init__(self, command: Command, number: int, listener: socket.socket, clock: Clock = monotonic) -> None:
        self._command = command
        self._listener = listener
        self._clock = clock
        self._children = [Child(n) for n in range(number)]
        self._leaving = False
        self._status = 0
        self._began_at = clock()

    def run(self) -> int:
        """Start them, and return the exit status when all have left."""
        # Blocked signals wait until `sigtimedwait` takes them: none is missed, and none interrupts anything.
        signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        for child in self._children:
            self._start(child)
        while not (self._leaving and all(child.process is None for child in self._children)):
            came = signal.sigtimedwait(_AWAITED, self._time_to_next_look())
            if came is not None and came.si_signo in _FORWARDED:
                self._forward(signal.Signals(came.si_signo))
            self._look()
        return self._status

    def _time_to_next_look(self) -> float:
        now = self._clock()
        return max(0.0, min([LOOK_S, *(child.due_at - now for child in self._children if child.due_at)]))

    def _start(self, child: Child) -> None:
        child.due_at, child.started_at = 0.0, self._clock()
        try:
            child.process = subprocess.Popen(
                self._command(child.number),
                stdin=subprocess.PIPE,
                pass_fds=[self._listener.fileno()],
                process_group=0,
            )
        except OSError as failure:
            self._start_later(child, f"cannot be started: {failure.strerror}")
            return
        logger.info("process %d of %d started", child.number + 1, len(self._children), extra=_fields(child.process))

    def _start_later(self, child: Child, why: str) -> None:
        now = self._clock()
        if now - child.started_at >= LONG_LIFE_S:
            child.pause_s = PAUSE_S
        child.due_at = now + child.pause_s
        logger.error("process %d %s; it is started again in %.1f s", child.number + 1, why, child.pause_s)
        child.pause_s = min(child.pause_s * 2, PAUSE_S_MAX)

    def _forward(self, name: signal.Signals) -> None:
        if name != signal.SIGHUP:
            self._leave()
        for child in self._children:
            if child.process is not None:
                child.process.send_signal(name)

    def _leave(self) -> None:
        """Start no child any more. Children close the socket as they drain: the parent's must not outlive theirs."""
        self._leaving = True
        self._listener.close()
        for child in self._children:
            child.due_at = 0.0

    def _look(self) -> None:
        for child in self._children:
            if child.process is not None and (status := child.process.poll()) is not None:
                self._left(child, child.process, status)
            elif child.due_at and self._clock() >= child.due_at:
                self._start(child)

    def _left(self, child: Child, process: subprocess.Popen[bytes], status: int) -> None:
        child.process = None
        if process.stdin is not None:
            process.stdin.close()
        if self._leaving:
            if status:
                self._status = self._status or 1
                logger.error("process %d %s", child.number + 1, _ending(status), extra=_fields(process))
        elif status == EXIT_CANNOT_START and self._clock() - self._began_at < START_S:
            self._status = EXIT_CANNOT_START
            self._forward(signal.SIGTERM)
        else:
            self._start_later(child, _ending(status))


def _fields(process: "subprocess.Popen[bytes]") -> dict[str, object]:
    return {"fields": {"pid": process.pid}}


def _ending(status: int) -> str:
    if status >= 0:
        return f"left with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:  # a signal without a name
        return f"was ended by signal {-status}"
