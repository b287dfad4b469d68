"""What the journal acknowledged is there after `kill -9` of its process, at whatever moment that comes."""

import asyncio
import os
import random
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from carpool.broker.journal import Journal
from carpool.core.task import StoredTask
from support.processes import PATIENCE_S

ROUNDS = 5
OPEN: dict[str, Any] = {"result_ttl_s": 3600.0, "dead_letter_ttl_s": 3600.0, "stored_bytes_max": 1 << 30}

# Appends without pause, finishes each task some time after its append, and writes one line for each
# acknowledgement: the line is in the pipe before the kill, or the acknowledgement never was.
CHILD = """
import asyncio, os, sys
from pathlib import Path
from carpool.broker.journal import Journal
from carpool.broker.journal_records import TaskRecord, TaskResult

async def main(path, round_name):
    journal = Journal(Path(path), asyncio.get_running_loop(),
                           result_ttl_s=3600.0, dead_letter_ttl_s=3600.0, stored_bytes_max=1 << 30)
    def appended(error, task_id):
        assert error is None, error
        os.write(1, f"A {task_id}\\n".encode())
        result = TaskResult("SUCCESS", b"out " + task_id.encode() * 50, None, 1.0)
        journal.finish(task_id, result, lambda kept: finished(kept, task_id))
    def finished(kept, task_id):
        assert kept is True, kept
        os.write(1, f"F {task_id}\\n".encode())
    for n in range(20_000):
        task_id = f"{round_name}-{n}"
        task = TaskRecord(task_id, "owner", "model", b"", b"in " + task_id.encode() * 50, 0, 1.0, 600.0)
        journal.append(task, lambda error, task_id=task_id: appended(error, task_id))
        if n % 20 == 0:
            await asyncio.sleep(0.001)

asyncio.run(main(*sys.argv[1:]))
"""


def run_and_kill(path: Path, round_name: str, delay_s: float) -> list[str]:
    """The acknowledgements that a child wrote before it was killed, `delay_s` after the first one."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path), round_name], stdout=subprocess.PIPE)
    assert child.stdout is not None
    received = bytearray()
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            kill_at = time.monotonic() + PATIENCE_S
            while (left := kill_at - time.monotonic()) > 0:
                if not selector.select(left):
                    break
                chunk = os.read(child.stdout.fileno(), 1 << 16)
                assert chunk, "the child ended by itself"
                if not received:
                    kill_at = time.monotonic() + delay_s
                received += chunk
    finally:
        child.kill()
        received += child.stdout.read()
        child.stdout.close()
        assert child.wait(PATIENCE_S) == -signal.SIGKILL
    return received.decode().splitlines()


async def read_all(journal: Journal, ids: list[str]) -> dict[str, StoredTask]:
    found: dict[str, StoredTask] = {}
    left = len(ids)
    everything = asyncio.Event()

    def done(task: Any) -> None:
        nonlocal left
        if task is not None:
            assert isinstance(task, StoredTask), task
            found[task.id] = task
        left -= 1
        if left == 0:
            everything.set()

    for task_id in ids:
        journal.read(task_id, done)
    await asyncio.wait_for(everything.wait(), PATIENCE_S)
    return found


async def test_every_acknowledgement_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "data" / "journal.db"
    chance = random.Random()
    appended: set[str] = set()
    finished: set[str] = set()
    uptime = 0.0
    for round_number in range(ROUNDS):
        lines = await asyncio.to_thread(run_and_kill, path, f"r{round_number}", chance.uniform(0.0, 0.2))
        assert lines, "nothing was acknowledged"
        appended |= {line[2:] for line in lines if line.startswith("A ")}
        finished |= {line[2:] for line in lines if line.startswith("F ")}

        journal = Journal(path, asyncio.get_running_loop(), **OPEN)
        pending = {record.id: record for record in journal.pending()}
        found = await read_all(journal, sorted(appended))
        assert found.keys() == appended
        for task_id in finished:
            assert found[task_id].status == "SUCCESS"
        for task_id, task in found.items():
            is_pending = task_id in pending
            assert (task.status == "PENDING") == is_pending
            assert is_pending or task.output == b"out " + task_id.encode() * 50
        for task_id, record in pending.items():
            assert record.input == b"in " + task_id.encode() * 50
        assert journal.now() > uptime
        uptime = journal.now()
        await journal.close()
    assert len(finished) > ROUNDS
