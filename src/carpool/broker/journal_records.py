"""The journal's words: tasks, results, dead letters, operations, counts, and why it cannot be opened."""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from carpool.core.errors import QueueFull, WebhooksFull
from carpool.core.request import Request

# Stored results leave as they are deleted or expire.
STORE_RETRY_AFTER_S = 10


class JournalUnusable(Exception):
    """The journal cannot be opened; the text is for the person who started this process."""


class TaskRecord(msgspec.Struct, frozen=True, gc=False):
    """A task as it was accepted."""

    id: str
    owner: str
    model: str
    parameters: bytes
    input: bytes
    tier: int
    # Unix time, to be shown.
    submitted_wall: float
    # On the journal's uptime clock, so that time in which no process ran does not count.
    deadline: float
    client_id: str = ""
    # Where its outcome is sent; "" if nowhere.
    callback_url: str = ""


class TaskResult(msgspec.Struct, frozen=True, gc=False):
    """What became of a task: the output, or the error as a JSON problem object."""

    status: Literal["SUCCESS", "FAILED"]
    output: bytes | None
    error: bytes | None
    finished_wall: float


class DeadLetter(msgspec.Struct, frozen=True, gc=False):
    """Why a task was given up on."""

    # The code of an error of the error tree.
    cause: str
    detail: str
    # How often it was sent to an upstream.
    sends: int


class Counts(msgspec.Struct):
    """How much is stored."""

    tasks_pending: int = 0
    results: int = 0
    dead_letters: int = 0
    # Inputs, parameters, outputs and errors of tasks; dead letters have a budget of their own.
    stored_bytes: int = 0
    # Of these, results that clients have read since the journal was opened.
    read_bytes: int = 0
    dead_letter_bytes: int = 0
    # Dead letters that had to make room since the journal was opened.
    dead_letters_evicted: int = 0
    # Outcomes that wait to be sent, and what they count in bytes.
    webhooks: int = 0
    webhook_bytes: int = 0


class Operation(msgspec.Struct, eq=False):
    """One queued call and the callback for its answer."""

    task_id: str
    done: Callable[[Any], None]
    # What it counts against the queue's bound.
    size: int


class Append(Operation, eq=False):
    """A task to be kept."""

    task: TaskRecord
    # The dead letter that it replays: removed with it, and without that letter the task is not accepted.
    letter_id: int | None


class Finish(Operation, eq=False):
    """A result to be kept."""

    result: TaskResult
    dead_letter: DeadLetter | None


class Read(Operation, eq=False):
    """A task to be looked up."""


class Delete(Operation, eq=False):
    """A task to be removed."""


class Bury(Operation, eq=False):
    """A dead letter of a request that is no task."""

    record: TaskRecord
    dead_letter: DeadLetter
    # Unix time.
    buried_wall: float


class Look(Operation, eq=False):
    """Something to be looked up, after the commit; with the Store, and the uptime clock's reading."""

    work: Callable[[Any, float], Any]


class Change(Operation, eq=False):
    """Something to be done in the transaction; with the same."""

    work: Callable[[Any, float], Any]


# An operation, and its answer.
JournalReply = tuple[Operation, Any]


def record_of(request: Request, submitted_wall: float, deadline: float) -> TaskRecord:
    """A request as it is kept."""
    identity = (request.id, request.owner, request.model)
    content = (request.parameters, request.input, request.tier)
    return TaskRecord(*identity, *content, submitted_wall, deadline, request.client_id, request.callback_url)


def size_of(task: TaskRecord) -> int:
    """What a pending task counts among the stored bytes."""
    return len(task.input) + len(task.parameters) + len(task.client_id.encode()) + len(task.callback_url)


def result_size_of(result: TaskResult) -> int:
    """What a result counts among the stored bytes."""
    return len(result.output or b"") + len(result.error or b"")


def store_full() -> QueueFull:
    """The refusal of a task while no more may be stored."""
    return QueueFull(
        "As many tasks and results are stored as may be. Retry later; delete results you have read.",
        retry_after_s=STORE_RETRY_AFTER_S,
    )


def webhooks_full() -> WebhooksFull:
    """The refusal of a task with a `callback_url` while no more webhooks may wait."""
    return WebhooksFull(
        "As many outcomes wait to be sent as may. Retry later, or poll the task instead.",
        retry_after_s=STORE_RETRY_AFTER_S,
    )
