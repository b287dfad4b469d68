"""What answers say: `/openapi.json` is made from these types, and tests hold real answers against them.

Answers to clients are written by hand, for speed (`wire.py`, `gateway.py`), and may get more fields later.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from carpool.core.problem import Problem

Moment = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]


# To clients


class Metadata(Struct):
    """What is known of the way of a request."""

    latency_ms: Annotated[float, Meta(description="from its arrival to its outcome")]
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


class TaskState(Struct):
    """A task that waits for its outcome, or has one."""

    task_id: str
    status: Literal["PENDING", "SUCCESS", "FAILED"]
    timestamp: Annotated[Moment, Meta(description="of the result; of the submission while there is none")]
    output: Annotated[Raw, Meta(description="the model's own JSON; with SUCCESS")] | UnsetType = UNSET
    error: Annotated[Problem, Meta(description="with FAILED")] | UnsetType = UNSET


# To operators


class OperatorsAnswer(Struct, forbid_unknown_fields=True):
    """An answer with all of its fields."""


class Health(OperatorsAnswer):
    """Numbers of the moment; over Redis those of the whole fleet."""

    status: Literal["healthy", "degraded", "draining"]
    gpu_utilization: float
    queue_depth: int
    requests_per_second: float
    problem: Annotated[str, Meta(description="what is wrong, and what to change, where it is degraded")] | UnsetType = (
        UNSET
    )
    broker: Annotated[Literal["redis", "direct", "down"], Meta(description="how work is reached")] | UnsetType = UNSET
    healthy_slots: int | UnsetType = UNSET
    gateways: Annotated[int, Meta(description="who live")] | UnsetType = UNSET
    batchers: Annotated[int, Meta(description="who live")] | UnsetType = UNSET


class Ready(OperatorsAnswer):
    """Whether to send requests here."""

    ready: bool
    reason: Annotated[str, Meta(description="why not")] | UnsetType = UNSET


class EndpointShown(OperatorsAnswer):
    """One endpoint of a model."""

    endpoint: str
    state: Literal["healthy", "degraded", "offline"]
    utilization: Annotated[float, Meta(description="as it reports it, else the busy share of its slots")]
    in_flight: Annotated[int, Meta(description="calls under way")]
    limit: Annotated[int, Meta(description="calls it may have at once: its slots, or fewer under load")]
    slots: int
    breaker: Literal["closed", "open", "half-open"]
    last_heartbeat: Annotated[Moment | None, Meta(description="when a call or a probe was last answered well")]
    batcher: Annotated[str, Meta(description="over Redis: who calls it")] | UnsetType = UNSET


class ModelShown(OperatorsAnswer):
    """One model and its endpoints."""

    slots: int
    healthy_slots: Annotated[int, Meta(description="calls that the endpoints that work may have at once")]
    capacity_rps: Annotated[float, Meta(description="healthy slots x largest batch / seconds a batch takes")]
    endpoints: list[EndpointShown]
    offenders: Annotated[list[str], Meta(description="owners whose inputs keep being refused, and who ride apart")]


class MemberShown(OperatorsAnswer):
    """One process of the fleet."""

    name: str
    status: Literal["ok", "draining", "offline"]
    current_utilization: float
    in_flight: int
    last_heartbeat: Annotated[Moment, Meta(description="on the clock of Redis")]


class GatewayShown(MemberShown):
    """A gateway."""

    mode: Annotated[str, Meta(description="how it reaches the endpoints: over the broker, or by itself")]


class BatcherModel(OperatorsAnswer):
    """One model at one batcher."""

    slots: int
    healthy_slots: int
    in_flight: int
    current_utilization: float
    rate: float
    mean_batch_size: float
    capacity_rps: float
    offenders: list[str]


class BatcherShown(MemberShown):
    """A batcher."""

    models: dict[str, BatcherModel]


class FleetShown(OperatorsAnswer):
    """Every endpoint of every model."""

    models: dict[str, ModelShown]
    gateways: (
        Annotated[list[GatewayShown], Meta(description="over Redis: who lives, or did a minute ago")] | UnsetType
    ) = UNSET
    batchers: list[BatcherShown] | UnsetType = UNSET
