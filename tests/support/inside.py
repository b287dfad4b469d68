"""A process of Carpool inside of the test's own: for tests that look at what it holds, or change what it is made of."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from carpool.app import make_process
from carpool.composition.process import Process
from carpool.core.names import Role
from carpool.settings import load_settings
from support.forks import constants_in, place_of, settings_in


@asynccontextmanager
async def process_of(role: Role, **settings: Any) -> AsyncIterator[Process]:
    """As a command starts it; its settings by their names with `__` for the dot, or OpenTelemetry's variables."""
    flags = {"gateway.port": 0, "gateway.admin_port": 0, "gateway.drain_grace_s": 0, "tasks.journal": False}
    flags |= {name.replace("__", "."): value for name, value in settings.items()}
    environ = {name: str(flags.pop(name)) for name in list(flags) if name.startswith("OTEL_")}
    loaded = load_settings(settings_in(flags), environ=environ, file=None)
    constants = pytest.MonkeyPatch()
    for constant, value in constants_in(flags).items():
        constants.setitem(*place_of(constant), value)
    process = make_process(loaded, role)
    try:
        await process.start()
        constants.undo()  # another process of the same test may have others
        yield process
        await process.drain()
    finally:
        constants.undo()
        await process.close()
