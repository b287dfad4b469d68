"""What answers say: `/openapi.json` is made from these types, and tests hold real answers against them.

Other pages for operators are in `core/snapshot.py`.
Answers to clients are written by hand, for speed (`wire.py`, `gateway.py`), and may get more fields later.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from carpool.core.dead_letter import dead_letter_causes
from carpool.core.problem import Problem
from carpool.core.snapshot import Moment, Page
from carpool.core.webhook import WebhookState

# To clients


class Metadata(Struct):
    """What is known of the way of a request."""

    latency_ms: Annotated[int, Meta(description="from its arrival to its outcome")]
    queue_ms: Annotated[float, Meta(description="of these, until it was taken into a batch")]
    upstream_ms: Annotated[float, Meta(description="how long the call took that brought the output")]
    batch_size: Annotated[int, Meta(description="inputs in that call")]
    model: str
    cached: bool
    model_version: str | UnsetType = UNSET
    tokens_used: int | UnsetType = UNSET


class InferenceAnswer(Struct):
    """The answer to a synchronous request."""

    request_id: str
    output: Annotated[Raw, Meta(description="the model's own JSON")]
    metadata: Metadata


class PredictAnswer(Struct):
    """The answer to `POST /v1/predict`."""

    request_id: str
    output: Annotated[Raw, Meta(description="the model's own JSON")]
    latency_ms: int


class TaskAccepted(Struct):
    """The task is stored; ask for its result by its id."""

    task_id: str
    status: Literal["PENDING"]


class QueueState(Struct):
    """Where a task stands, at most a few seconds ago; those who come later and go before it are not in it."""

    place: Annotated[int, Meta(description="1 is the next one; 0: it is being worked on")]
    estimated_wait_ms: Annotated[int | None, Meta(description="until it is taken; null while nobody knows")]


class TaskState(Struct):
    """A task that waits for its outcome, or has one."""

    task_id: str
    status: Literal["PENDING", "SUCCESS", "FAILED"]
    timestamp: Annotated[Moment, Meta(description="of the result; of the submission while there is none")]
    output: Annotated[Raw, Meta(description="the model's own JSON; with SUCCESS")] | UnsetType = UNSET
    error: Annotated[Problem, Meta(description="with FAILED")] | UnsetType = UNSET
    queue: Annotated[QueueState, Meta(description="with PENDING, where it is known")] | UnsetType = UNSET


class StreamTicket(Struct):
    """What opens a stream in place of a credential."""

    ticket: Annotated[str, Meta(description="for `/v1/stream?ticket=…`")]
    expires_in_s: int


# To operators


class Ready(Page, frozen=True):
    """Whether to send requests here."""

    ready: bool
    reason: Annotated[str, Meta(description="why not")] | UnsetType = UNSET


class LetterListed(Page, frozen=True):
    """A dead letter without its input."""

    id: int
    request_id: str
    model: str
    cause: Annotated[
        str,
        Meta(
            description="the code of an error; unknown: another version of Carpool wrote this letter",
            extra_json_schema={"enum": [*dead_letter_causes(), "unknown"]},
        ),
    ]
    detail: Annotated[str, Meta(description="what its client was told")]
    sends: Annotated[int, Meta(description="how often it was sent to an endpoint")]
    buried_at: Moment
    size: Annotated[int, Meta(description="bytes of input and parameters")]


class LetterShown(LetterListed, frozen=True):
    """A dead letter with its input."""

    owner: Annotated[str, Meta(description="whom it counts for: the client's address; empty if that is not known")]
    input: Raw
    parameters: Annotated[Raw, Meta(extra_json_schema={"type": ["object", "null"]})]


class LettersListed(Page, frozen=True):
    """Some dead letters, and how many there are."""

    dead_letters: list[LetterListed]
    total: int


class LettersDropped(Page, frozen=True):
    """How many there were."""

    dropped: int


class WebhooksListed(Page, frozen=True):
    """Some webhooks that wait, and how many there are."""

    webhooks: list[WebhookState]
    total: int
    bytes: Annotated[int, Meta(description="what all of them count; 256 MiB is the bound")]


class WebhooksRetried(Page, frozen=True):
    """How many are due now."""

    retried: int
