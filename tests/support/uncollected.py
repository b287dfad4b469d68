"""A process of Carpool whose garbage collector is off, and which says at SIGUSR1 what only the collector would free.

Run as a program it is that process: `python -m support.uncollected ROLE CONFIGURATION REPORT`. It writes its reports to
a file, as a whole.
"""

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CoroutineType, FrameType, FunctionType, GeneratorType, MethodType
from typing import Any

import msgspec

from support.processes import CLEAN_ENVIRONMENT, GatewayProcess, until

TESTS = Path(__file__).parents[1]


class Report(msgspec.Struct):
    """What one process holds."""

    # Exchanges in memory, and requests that still have an input or somebody who waits.
    exchanges: int
    requests: int
    # What only the collector would free: Carpool's objects by their name, and the bytes in all of it.
    garbage: dict[str, int]
    garbage_bytes: int


class UncollectedProcess(GatewayProcess):
    """One such process, as a test sees it."""

    def report(self) -> Report:
        """What it holds now. What the report calls garbage is freed by it."""
        path = self.log.with_suffix(".report")
        path.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        asyncio.run(until(path.exists))
        return msgspec.json.decode(path.read_bytes(), type=Report)


@contextmanager
def uncollected(directory: Path, role: str, configuration: str) -> Iterator[UncollectedProcess]:
    """A process of this role until the block ends."""
    directory.mkdir()
    log, file = directory / "log", directory / "carpool.toml"
    file.write_text(configuration)
    command = [sys.executable, "-m", "support.uncollected", role, str(file), str(log.with_suffix(".report"))]
    environment = CLEAN_ENVIRONMENT | {"PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"}
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=directory)
    process = UncollectedProcess(child, log)
    try:
        asyncio.run(process.wait_until_serving())
        yield process
    finally:
        process.kill()


def _main(role: Any, file: Path, report: Path) -> int:
    from carpool import app
    from carpool.settings import load_settings

    def ready(port: int, admin_port: int) -> None:
        gc.disable()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _write, report)

    return app.run(load_settings({}, environ={}, file=file), ready, role=role)


def _write(path: Path) -> None:
    half = path.with_suffix(".half")
    half.write_bytes(msgspec.json.encode(_look()))
    os.replace(half, path)


def _look() -> Report:
    from carpool.core.request import Request
    from carpool.face.http.exchange import Exchange

    held = gc.get_objects()
    exchanges = sum(type(each) is Exchange for each in held)
    requests = sum(type(each) is Request and bool(each.input or each.ticket) for each in held)
    del held
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    names: Counter[str] = Counter()
    sizes: dict[int, int] = {}
    for each in gc.garbage:
        if (name := _name_of(each)).startswith("carpool."):
            names[name] += 1
        for part in gc.get_referents(each):
            if isinstance(part, bytes | bytearray | str):
                sizes[id(part)] = len(part)
    gc.garbage.clear()
    each = part = None
    gc.collect()
    return Report(exchanges, requests, dict(names), sum(sizes.values()))


def _name_of(each: Any) -> str:
    """Whose it is, by the module that made it."""
    if isinstance(each, MethodType):
        each = each.__func__
    if isinstance(each, FunctionType):
        return f"{each.__module__}.{each.__qualname__}()"
    if isinstance(each, GeneratorType | CoroutineType):
        each = each.gi_frame if isinstance(each, GeneratorType) else each.cr_frame
    if isinstance(each, FrameType):
        return f"{each.f_globals.get('__name__')}.{each.f_code.co_qualname}() line {each.f_lineno}"
    return f"{type(each).__module__}.{type(each).__qualname__}"


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
