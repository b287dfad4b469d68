"""The composition root: which process a command starts, its signals, and its exit code."""

import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable

import uvloop

from carpool.broker.journal_records import JournalUnusable
from carpool.composition.process import Panel, Process
from carpool.core.names import Role
from carpool.settings import Settings, warnings_of
from carpool.telemetry.logs import configure_logging

logger = logging.getLogger("carpool")

OnReady = Callable[[int, int], None]
# A second signal within this is the first one once more: a service manager signals parent and children alike.
SAME_WORD_S = 0.1


def run(
    settings: Settings,
    on_ready: OnReady | None = None,
    reload: Callable[[], Settings] | None = None,
    *,
    role: Role = "serve",
    listen: socket.socket | None = None,
    panel: Panel | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, then drain; returns the exit code. SIGHUP calls `reload` for new settings.

    `panel` is what the demo adds to the process.
    """
    # Until the process can reload: one that comes during the start waits for its end.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    configure_logging(settings.log.level, settings.log.format)
    for warning in warnings_of(settings):
        logger.warning(warning)
    try:
        return uvloop.run(_serve(settings, on_ready, reload, role, listen, panel))
    except (JournalUnusable, ssl.SSLError) as failure:
        print(f"carpool: {failure}", file=sys.stderr)  # noqa: T201 - for the person at the terminal
    except OSError as failure:
        where = f"{settings.gateway.host}:{settings.gateway.port}"
        print(f"carpool: cannot serve on {where} (or its admin port): {failure.strerror or failure}", file=sys.stderr)  # noqa: T201
    return 2


def make_process(
    settings: Settings, role: Role, listen: socket.socket | None = None, panel: Panel | None = None
) -> Process:
    """Everything in one process, or a part of a fleet that meets in Redis."""
    if not settings.broker.url:
        from carpool.embedded import EmbeddedProcess

        return EmbeddedProcess(settings, listen, panel=panel)
    from carpool.distributed import PROCESSES  # here: without a broker the start does not wait for its libraries

    return PROCESSES[role](settings, listen, panel=panel)


def spare_the_collector() -> None:
    """Let the garbage collector run rarely.

    Requests make no reference cycles (`tests/integration/test_uncollected.py` holds that), so it finds next to nothing;
    with tens of thousands of them waiting its passes would cost milliseconds each. What was built at start never dies:
    it need not be looked at again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


async def _serve(
    settings: Settings,
    on_ready: OnReady | None,
    reload: Callable[[], Settings] | None,
    role: Role,
    listen: socket.socket | None,
    panel: Panel | None,
) -> int:
    told_to_leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    told_at = 0.0

    def leave() -> None:
        nonlocal told_at
        if not told_to_leave.is_set():
            told_at = loop.time()
            told_to_leave.set()
        elif loop.time() - told_at > SAME_WORD_S:
            os._exit(1)  # a second signal: at once; what was accepted survives that

    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, leave)
    process = make_process(settings, role, listen, panel)
    try:
        await process.start()
    except BaseException:
        await process.close()
        raise
    if reload is not None:
        loop.add_signal_handler(signal.SIGHUP, process.reload, reload)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    if panel is not None:
        panel.plug(process)
    spare_the_collector()
    if on_ready is not None:
        on_ready(process.port, process.admin_port)
    await told_to_leave.wait()
    await process.drain()
    return 0
