"""Every setting: its type, limits, default and meaning. Times end in _s or _ms, limits in _max.

Precedence: flags over `CARPOOL_<SECTION>_<KEY>` environment over `carpool.toml` over these defaults.
Unknown keys are errors. `docs/configuration.md` is generated from this file by `make docs`.
"""

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from carpool.batching.policy import PolicyName
from carpool.core.api_key import Burst, Limit
from carpool.core.dead_letter import SynchronousKept
from carpool.core.names import BytesForm, ModeName, ProtocolName

KIB, MIB, GIB = 1024, 1024**2, 1024**3

Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]
Slots = Annotated[int, Meta(ge=1, le=65536)]
# Every number with a fraction has an upper bound, so that no infinity comes in by the file.
Seconds = Annotated[float, Meta(gt=0, le=365 * 86400)]
Days = Annotated[float, Meta(gt=0, le=3650)]
FieldName = Annotated[str, Meta(min_length=1)]
Share = Annotated[float, Meta(gt=0, le=1)]
BodyBytes = Annotated[int, Meta(ge=1, le=64 * MIB)]
BatchSize = Annotated[int, Meta(ge=1, le=4096)]
MetricMax = Annotated[float, Meta(gt=0, le=1e12)]
LatencyRatio = Annotated[float, Meta(ge=0, le=1000)]
DatatypeName = Literal[
    "", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "BF16", "FP32", "FP64", "BYTES",
]  # fmt: skip
# The batch dimension, 1, and the others.
TensorShape = Annotated[str, Meta(pattern=r"^(1(,[0-9]{1,9})*)?$")]


def doc(text: str, *, ge: int | None = None, le: int | None = None, url: bool = False, secret: bool = False) -> Meta:
    """What a setting means, and its limits. A URL may hold a password or a key: `carpool config` leaves those out."""
    return Meta(description=text, ge=ge, le=le, extra={"is_url": url, "is_secret": secret})


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the configuration file; unknown keys are errors."""


SectionT = TypeVar("SectionT", bound=Section)


class GatewaySettings(Section, frozen=True):
    """The faces: where they listen and what they take from a client."""

    host: Annotated[str, doc("address to listen on")] = "127.0.0.1"
    port: Annotated[Port, doc("port for clients; 0 picks a free one")] = 8000
    admin_host: Annotated[str, doc("address of the admin port; beyond loopback needs `service.token`")] = "127.0.0.1"
    admin_port: Annotated[Port | None, doc("port for health, metrics and the like; by default `port` + 1")] = None
    admin_hosts: Annotated[
        list[str],
        doc(
            "names by which the admin port is reached, beside `localhost` and addresses: a `Host` with another name "
            "gets 403, so that no web page can reach it through a browser"
        ),
    ] = []
    grpc: Annotated[bool, doc("serve gRPC too, at `grpc_port`; needs `carpool[grpc]`")] = False
    grpc_port: Annotated[
        Port | None,
        doc(
            "port for gRPC, which turns it on; by default `port` + 2, but several processes share one that must be "
            "given; 0 picks a free one"
        ),
    ] = None
    grpc_calls_max: Annotated[Count, doc("gRPC calls at once, streams included (RESOURCE_EXHAUSTED)")] = 10_000
    default_mode: Annotated[
        ModeName,
        doc("what `POST /v1/inference` does when the client does not say; a key, a model and a tier go before it"),
    ] = "sync"
    request_ids: Annotated[
        Literal["counted", "uuid"],
        doc("what requests are called whose client gives no `X-Request-Id`: `req_6f2c9a81d04e-1`, or a UUID"),
    ] = "counted"
    tls_cert: Annotated[str, doc("PEM file with the certificate chain; turns TLS on")] = ""
    tls_key: Annotated[str, doc("PEM file with the private key")] = ""
    trusted_proxies: Annotated[
        list[str],
        doc(
            "proxies that are believed when they say for whom they ask (`X-Forwarded-For`): addresses, or "
            "networks like `10.0.0.0/8`; from anybody else that header is ignored"
        ),
    ] = []
    header_bytes_max: Annotated[Count, doc("request line and headers together (431)")] = 16 * KIB
    header_count_max: Annotated[Count, doc("number of headers (431)")] = 100
    body_bytes_max: Annotated[BodyBytes, doc("body of one request (413); a model may set its own")] = MIB
    receiving_bytes_max: Annotated[Count, doc("bodies that are partly received, over all connections (503)")] = (
        256 * MIB
    )
    unread_bytes_max: Annotated[
        Count, doc("answers that clients leave unread, whole, together; those furthest behind are cut off")
    ] = 256 * MIB
    receive_timeout_s: Annotated[Seconds, doc("a request must have arrived whole within this (408)")] = 10.0
    idle_timeout_s: Annotated[Seconds, doc("a connection with no request is closed after this")] = 75.0
    write_timeout_s: Annotated[
        Seconds,
        doc(
            "a client that takes less than 4 KB of an answer in this time is cut off; what a slow one reads shows in "
            "steps of up to half of its system's receive buffer"
        ),
    ] = 10.0
    pipeline_max: Annotated[Count, doc("requests in flight on one connection before reading pauses")] = 32
    connections_max: Annotated[int, doc("open client connections; 0: what the file limit allows", ge=0)] = 0
    cors_origins: Annotated[
        list[str],
        doc(
            "origins whose pages may ask from a browser (CORS), like `https://app.example.com`, and may open streams; "
            "`*`: any; empty: none"
        ),
    ] = []
    drain_grace_s: Annotated[float, doc("after SIGTERM, how long connections are still accepted", ge=0, le=3600)] = 1.0
    processes: Annotated[
        int,
        doc(
            "gateway processes that share the port; more than one needs `broker.url`; "
            "each has an admin port of its own, one after the other",
            ge=1,
            le=64,
        ),
    ] = 1


class StreamSettings(Section, frozen=True):
    """What stays open: WebSockets (`/v1/stream`), and server-sent events of tasks."""

    streams_max: Annotated[Count, doc("WebSockets of one process, and as many streams of gRPC (503)")] = 1024
    listeners_max: Annotated[Count, doc("clients that listen to events of tasks, at one process (503)")] = 1024
    per_owner_max: Annotated[Count, doc("WebSockets, gRPC streams and listeners of one owner at one process (429)")] = (
        64
    )
    requests_max: Annotated[Count, doc("requests in flight on one WebSocket (a 429 each)")] = 256
    message_bytes_max: Annotated[
        BodyBytes, doc("one message of a WebSocket, with all requests in it (close code 1009)")
    ] = MIB
    idle_timeout_s: Annotated[Seconds, doc("a WebSocket on which nothing is asked for this long is closed")] = 300.0


class BatchingSettings(Section, frozen=True):
    """When a batch is sent."""

    max_batch: Annotated[BatchSize, doc("most requests in one batch")] = 64
    batch_bytes_max: Annotated[Count, doc("bytes of the inputs in one batch; a request with more is sent alone")] = (
        32 * MIB
    )
    in_flight_bytes_max: Annotated[
        Count, doc("bytes of all inputs of one model that are at its endpoints; one batch is always sent")
    ] = 512 * MIB
    max_wait_ms: Annotated[float, doc("longest wait for company while a slot is free", ge=0, le=100)] = 50.0
    policy: Annotated[PolicyName, doc("how to decide between sending and waiting")] = "adaptive"
    slots_busy_max_share: Annotated[
        Share, doc("`adaptive`: share of the slots it may keep busy for the sake of latency")
    ] = 0.75
    fill_target: Annotated[Share, doc("`pid`: the fill ratio of batches to hold")] = 0.8


class UpstreamSettings(Section, frozen=True):
    """The fixed API: where it is and how to speak to it."""

    endpoints: Annotated[
        list[str],
        doc(
            "URLs; a port range like `http://127.0.0.1:9000-9031/infer` stands for one endpoint "
            "each; `unix:/run/model.sock:/infer` is a path on a Unix socket; "
            "`sim:?latency_ms=50&slots=64` is a simulated GPU in this process",
            url=True,
        ),
    ] = []
    protocol: Annotated[ProtocolName, doc("wire format of the API")] = "json"
    slots: Annotated[Slots, doc("batches that one endpoint takes at once")] = 1
    timeout_s: Annotated[Seconds, doc("longest time for one attempt")] = 3.0
    attempts: Annotated[int, doc("attempts for one batch, the first included", ge=1, le=10)] = 4
    backoff_ms: Annotated[
        float, doc("upper bound of the first pause between attempts; doubles each time, full jitter", ge=0, le=60_000)
    ] = 50.0
    bisect_slot_share: Annotated[
        Share,
        doc(
            "share of the slots' time that the search for bad inputs, and batches of clients that keep "
            "sending such, may have while others wait; slots that nobody wants are free for them"
        ),
    ] = 0.2
    answer_bytes_max: Annotated[Count, doc("longest answer that is read")] = 64 * MIB
    breaker_failures: Annotated[
        Count,
        doc(
            "failed calls in a row after which an endpoint is left alone for a while; or so many that another one "
            "answered then, if that is more than four in ten"
        ),
    ] = 5
    breaker_pause_s: Annotated[
        Seconds, doc("how long, the first time; doubles with each probe that fails, up to 4 s")
    ] = 1.0
    eject_share_max: Annotated[
        Share,
        doc("share of the endpoints that may be left alone while none of the others is known to work; at least one"),
    ] = 0.5
    health_interval_s: Annotated[
        Seconds, doc("an endpoint without a good call for this long is probed, and again each time")
    ] = 2.0
    probe_input: Annotated[
        str,
        doc(
            "an input that the model answers, in JSON (`'\"hello\"'`): it is sent at the start, again and again until "
            "a call is answered, and `/internal/ready` waits for that"
        ),
    ] = ""
    load_header: Annotated[
        str, doc("header in which answers tell the load: `0.93`, or `93` for per cent; over 90 % it gets less")
    ] = ""
    load_metrics_url: Annotated[
        str,
        doc(
            "page of metrics to read the load from, once a second: a path on the endpoint, "
            "`:8002/metrics` on its host, or a URL",
            url=True,
        ),
    ] = ""
    load_metric: Annotated[
        str, doc("the metric there, such as `nv_gpu_utilization`; the largest of its series counts")
    ] = ""
    load_metric_max: Annotated[MetricMax, doc("the value of that metric that means full")] = 1.0
    load_latency_ratio: Annotated[
        LatencyRatio,
        doc(
            "without any report: calls that take this many times longer than lately mean overload, and "
            "it gets less, at least half; 0: they do not"
        ),
    ] = 2.0
    tls_ca: Annotated[str, doc("PEM file with the authorities to accept for `https://`, in place of the system's")] = ""
    tls_cert: Annotated[str, doc("PEM file with the certificate chain to show to the API (mTLS)")] = ""
    tls_key: Annotated[str, doc("PEM file with the private key of `tls_cert`")] = ""
    token_file: Annotated[str, doc("file with the token to send as `Authorization: Bearer …`")] = ""
    header_files: Annotated[
        list[str], doc("further secret headers, each as `NAME=FILE` with its value in the file")
    ] = []
    inputs_field: Annotated[FieldName, doc("`json`: field of the call that holds the inputs")] = "inputs"
    outputs_field: Annotated[FieldName, doc("`json`: field of the answer that holds the outputs")] = "outputs"
    parameters_field: Annotated[FieldName, doc("`json`: field of the call for the parameters")] = "parameters"
    tokens_field: Annotated[
        FieldName, doc("`json`: field of the answer with the tokens used: a number for all inputs, or an array of such")
    ] = "tokens_used"
    version_field: Annotated[
        FieldName, doc("`json`: field of the answer with the version of the model: one for all inputs, or an array")
    ] = "model_version"
    completion_output: Annotated[
        Literal["choice", "text"],
        doc("`openai_completions`: what the `output` is: the whole choice as an object, or its text"),
    ] = "choice"
    bytes_as: Annotated[
        BytesForm,
        doc(
            "clients send bytes: at `/v1/predict` `input_data` and `output` are base64, over gRPC `output` is bytes; "
            "the model has them as its protocol has bytes (`base64`), as texts (`text`) or as JSON (`json`)"
        ),
    ] = ""
    model_version: Annotated[str, doc("`kserve_…`: version of the model to ask for; by default the server decides")] = (
        ""
    )
    tensor_name: Annotated[str, doc("`kserve_v2…`: a tensor's name when its client gives none")] = ""
    tensor_datatype: Annotated[
        DatatypeName, doc("`kserve_v2…`: a tensor's datatype when its client gives none; binary bodies need it")
    ] = ""
    tensor_shape: Annotated[
        TensorShape, doc("`kserve_v2…`: a tensor's shape when its client gives none, like `1,3,224,224`")
    ] = ""
    tensor_binary: Annotated[
        bool, doc("`kserve_v2`: send tensors raw also where clients send JSON (binary tensor extension)")
    ] = False


class BrokerSettings(Section, frozen=True):
    """Where requests wait, and how long: in this process, or in Redis."""

    url: Annotated[
        str,
        doc(
            "Redis, where gateways and batchers meet: `redis://user:password@host:6379/0`, "
            "`redis+sentinel://host:26379,…/name-of-the-master`, `redis+cluster://host:7000,…`; `rediss…` for TLS; "
            "when it is empty, requests wait in this process",
            url=True,
        ),
    ] = ""
    password_file: Annotated[
        str, doc("file with the password for Redis, in place of one in `url`; read at the start")
    ] = ""
    tls_ca: Annotated[str, doc("PEM file with the authorities to accept for `rediss://`, in place of the system's")] = (
        ""
    )
    tls_cert: Annotated[str, doc("PEM file with the certificate chain to show to Redis (mTLS)")] = ""
    tls_key: Annotated[str, doc("PEM file with the private key of `tls_cert`")] = ""
    namespace: Annotated[
        str, doc("what every key in Redis begins with; the same for all gateways and batchers of a fleet")
    ] = "carpool"
    shards: Annotated[
        int, doc("parts of the queue in Redis, spread over a Cluster; the same for the whole fleet", ge=1, le=16)
    ] = 16
    lease_ms: Annotated[
        int,
        doc(
            "what a batcher took from Redis is free for others once it was silent for this long; "
            "it renews its leases every third of this",
            ge=100,
            le=600_000,
        ),
    ] = 1500
    redis_timeout_ms: Annotated[
        int, doc("Redis counts as gone when commands wait and it answers nothing for this long", ge=10, le=60_000)
    ] = 500
    replicas: Annotated[
        int, doc("replicas of Redis that must have a task before its 202 (`WAIT`); 503 if they do not", ge=0, le=16)
    ] = 0
    replicas_timeout_ms: Annotated[int, doc("how long to wait for these replicas", ge=1, le=60_000)] = 200
    deliveries_max: Annotated[
        int,
        doc(
            "a request that was with so many batchers that died is given up; before, it rides with fewer "
            "others each time, the last two times alone",
            ge=2,
            le=100,
        ),
    ] = 6
    persistence: Annotated[
        Literal["allowed", "forbidden"],
        doc(
            "`forbidden`: refuse to start where a server of Redis writes to a disk (AOF, snapshots, files "
            "for replicas), for payloads that must never be on one; a process that runs says so loudly"
        ),
    ] = "allowed"
    memory_max: Annotated[
        int,
        doc(
            "bytes that each node of Redis may use where it has no `maxmemory` of its own; above 80 % of "
            "either, new requests get 429; 0: no limit",
            ge=0,
        ),
    ] = 0
    waiting_max: Annotated[Count, doc("requests that may wait or run at once (503)")] = 100_000
    bytes_max: Annotated[Count, doc("bytes of their inputs, together (503)")] = 512 * MIB
    lanes_max: Annotated[
        Count, doc("distinct model and parameter sets that may wait at once, shared among owners (503)")
    ] = 1024
    queue_timeout_s: Annotated[Seconds, doc("a synchronous request waits this long for a slot (504)")] = 2.0
    total_timeout_s: Annotated[
        Seconds | None,
        doc(
            "a synchronous request has its answer within this (504); by default 4, or one second more than the "
            "longest `timeout_s` of an upstream, if that is more"
        ),
    ] = None
    order: Annotated[
        Literal["deadline", "strict"],
        doc("`deadline`: arrival + the tier's target; `strict`: higher tiers first, but for `lowest_tier_min_share`"),
    ] = "deadline"
    lowest_tier_min_share: Annotated[
        float, doc("`strict`: share of what is served that the lowest tier gets all the same", ge=0, le=0.5)
    ] = 0.05


class TaskSettings(Section, frozen=True):
    """Tasks: requests that are submitted and polled."""

    journal: Annotated[bool, doc("keep tasks in a file, so that they survive `kill -9`; false: in memory only")] = True
    data_dir: Annotated[str, doc("directory of the journal")] = "carpool-data"
    timeout_s: Annotated[Seconds, doc("a task has its outcome within this; downtime not counted")] = 600.0
    result_ttl_s: Annotated[Seconds, doc("how long a result is kept")] = 600.0
    forget_after_read: Annotated[bool, doc("forget a result once it has been read")] = False
    dead_letter_ttl_s: Annotated[Seconds, doc("how long a dead letter is kept")] = 7 * 86400.0
    stored_bytes_max: Annotated[
        Count,
        doc(
            "bytes of inputs and results kept, together (503 for new tasks); from 85 % on results that were read go "
            "before their time"
        ),
    ] = 4 * GIB
    waiting_max: Annotated[Count, doc("tasks without an outcome at once (503 for new ones)")] = 50_000
    delay_ms: Annotated[
        float, doc("a task's place in the order is this much later than a synchronous request's", ge=0, le=600_000)
    ] = 5000.0
    wait_ms_max: Annotated[Count, doc("longest long poll")] = 30_000


class DeadLetterSettings(Section, frozen=True):
    """Dead letters: requests that were given up on. Tasks always become one."""

    synchronous: Annotated[
        SynchronousKept,
        doc(
            "which synchronous requests are kept too: `poison`, whose input the model refuses; `all`, also "
            "those that the upstream failed; or `none`"
        ),
    ] = "poison"
    bytes_max: Annotated[
        Count,
        doc(
            "bytes of dead letters kept in Redis, the oldest go; in the journal they have a quarter of "
            "`tasks.stored_bytes_max`"
        ),
    ] = 256 * MIB


class AuthSettings(Section, frozen=True):
    """Who may come in. What a JWT must say; API keys are in `[keys]`, or made by `carpool keys create`."""

    mode: Annotated[
        Literal["off", "keys", "jwt", "both"],
        doc("which credentials are taken; `off`: none is asked for, and everybody is of the lowest tier"),
    ] = "off"
    jwt_file: Annotated[
        str,
        doc(
            "file with the keys that sign tokens: a JWKS, a PEM, or a secret of 32 bytes or more; "
            "read again when it changes"
        ),
    ] = ""
    jwt_algorithms: Annotated[
        list[str],
        doc(
            "algorithms that keys of the file may be for: `HS256`, `RS256`, `ES256`, `EdDSA`; empty: all of them. "
            "For a plain secret `HS256` must stand here alone"
        ),
    ] = []
    jwt_issuer: Annotated[str, doc("what `iss` must be; empty: anything")] = ""
    jwt_audience: Annotated[str, doc("what `aud` must be, or have in it; empty: anything")] = ""
    jwt_leeway_s: Annotated[float, doc("how far clocks may differ, for `exp` and `nbf`", ge=0, le=600)] = 30.0
    jwt_owner_claim: Annotated[FieldName, doc("the claim that says whom a request counts for")] = "sub"
    jwt_tier_claim: Annotated[
        str,
        doc("the claim with the tier's name; a token without it, or with an unknown one, has the lowest"),
    ] = "tier"


class ServiceSettings(Section, frozen=True):
    """Credentials of Carpool's own processes and of operators."""

    token: Annotated[
        list[str],
        doc(
            "tokens for the admin port (`Authorization: Bearer …`), each valid: two for the time of a change; "
            "needed where that port is not on loopback; secret",
            secret=True,
        ),
    ] = []

    def __repr__(self) -> str:
        return f"ServiceSettings({len(self.token)} tokens)"  # they are secret


class LimitSettings(Section, frozen=True):
    """How much one owner may ask for. A tier, and a key, may have their own."""

    per_minute: Annotated[Limit, doc("requests a minute of an owner with a credential (429); 0: no limit")] = 1000
    burst: Annotated[Burst, doc("requests that may come at once, on top of an even pace")] = 100
    concurrent: Annotated[
        Limit, doc("synchronous requests of an owner that may wait or run at once (429); 0: no limit")
    ] = 0
    anonymous: Annotated[
        Limit, doc("requests a minute of an address, for those without a credential (429); 0: no limit")
    ] = 0


class SheddingSettings(Section, frozen=True):
    """Whom the load shedder refuses when more comes than can be served in time (503)."""

    mode: Annotated[
        Literal["predicted", "thresholds", "off"],
        doc(
            "`predicted`: who would wait longer than its tier's `wait_max_ms`, or its deadline; "
            "`thresholds`: by depth and rate"
        ),
    ] = "predicted"
    utilization_target: Annotated[
        Share, doc("share of the capacity that should be used: `carpool_pressure` is 1 there")
    ] = 0.75
    depth_highest_only: Annotated[
        int, doc("`thresholds`: with more waiting only the highest tier comes in; 0: 0.35 s of capacity", ge=0)
    ] = 0
    depth_not_lowest: Annotated[
        int, doc("`thresholds`: with more waiting the lowest tier does not come in; 0: 0.07 s of capacity", ge=0)
    ] = 0
    rate_share: Annotated[
        Share, doc("`thresholds`: when more than this share of the capacity comes in, the lowest tier does not")
    ] = 0.7


class CacheSettings(Section, frozen=True):
    """Results that are kept, and identical requests that are coalesced. For models whose answers do not vary."""

    enabled: Annotated[bool, doc("whether models use it that do not say so themselves (`models.….cache`)")] = False
    ttl_s: Annotated[Seconds, doc("how long a result is kept")] = 300.0
    bytes_max: Annotated[
        Count, doc("bytes of results kept in each gateway; and once more in Redis, where there is one")
    ] = 256 * MIB
    scope: Annotated[
        Literal["all", "owner"], doc("`owner`: what one owner asked for is never given to another, nor shared with it")
    ] = "all"


class InputSettings(Section, frozen=True):
    """What inputs may be (422). This does not stop every prompt injection."""

    input_bytes_max: Annotated[int, doc("longest input, in bytes of its JSON; 0: as the body allows", ge=0)] = 0
    deny_patterns: Annotated[
        list[str],
        doc("inputs in whose texts one of these patterns (RE2 syntax) is found are refused; needs `carpool[policy]`"),
    ] = []


class WebhookSettings(Section, frozen=True):
    """Outcomes of tasks that are sent to a URL (`callback_url`). Off while no host is allowed."""

    hosts: Annotated[
        list[str],
        doc(
            "hosts that webhooks may go to: `hooks.example.org`, `*.example.org`, `hooks.example.org:8443`; "
            "empty: `callback_url` is refused"
        ),
    ] = []
    secrets: Annotated[
        list[str],
        doc(
            "what webhooks are signed with, `whsec_` and base64, each of them: two for the time of a change; "
            "read again on SIGHUP; secret",
            secret=True,
        ),
    ] = []
    allow_http: Annotated[bool, doc("whether `http://` may be used too; what is sent can then be read on the way")] = (
        False
    )
    allow_private: Annotated[
        bool, doc("whether hosts may have private or loopback addresses; link-local ones never are used")
    ] = False
    retry_for_s: Annotated[
        float, doc("how long after its task's outcome a webhook is sent again", ge=1, le=7 * 86400)
    ] = 86400.0
    backoff_s: Annotated[Seconds, doc("longest first pause before it is sent again; doubles, up to an hour")] = 5.0
    timeout_s: Annotated[Seconds, doc("longest time for one attempt")] = 10.0
    in_flight_max: Annotated[int, doc("webhooks that one gateway sends at once", ge=1, le=10_000)] = 64
    host_in_flight_max: Annotated[int, doc("of these, to one host", ge=1, le=10_000)] = 8
    bytes_max: Annotated[
        Count,
        doc("bytes of outcomes that wait to be sent; beyond, tasks with a `callback_url` are refused (503)"),
    ] = 256 * MIB

    def __repr__(self) -> str:
        return f"WebhookSettings({self.hosts}, {len(self.secrets)} secrets)"  # they are secret


class TrackingSettings(Section, frozen=True):
    """What is kept of every request and every batch, for questions afterwards; never what is in them."""

    store: Annotated[
        Literal["off", "sqlite", "postgres"],
        doc("`sqlite`: a file; `postgres`: a database, whose tables `carpool tracking init` makes"),
    ] = "off"
    path: Annotated[str, doc("`sqlite`: the file; by default `tracking.db` in `tasks.data_dir`")] = ""
    url: Annotated[str, doc("`postgres`: `postgresql://user@host:5432/database`", url=True)] = ""
    password_file: Annotated[
        str, doc("`postgres`: file with the password, in place of one in `url`; read at the start")
    ] = ""
    retention_days: Annotated[Days, doc("how long rows are kept; a database drops whole days (UTC)")] = 30.0
    bytes_max: Annotated[
        int, doc("`sqlite`: the size of the file, about; the oldest rows go first", ge=MIB, le=1024 * GIB)
    ] = GIB
    buffer_max: Annotated[
        int,
        doc(
            "rows that wait to be written, of each kind; while the store is slow or away, those beyond are dropped",
            ge=1000,
            le=10_000_000,
        ),
    ] = 100_000


class LogSettings(Section, frozen=True):
    """What is logged; never payloads or credentials."""

    level: Annotated[Literal["debug", "info", "warning", "error"], doc("least severe level that is written")] = "info"
    format: Annotated[
        Literal["auto", "console", "json"], doc("`auto`: console on a terminal, else one JSON object a line")
    ] = "auto"


class TracingSettings(Section, frozen=True):
    """Traces, sent by OTLP over HTTP; never payloads or credentials."""

    otlp_endpoint: Annotated[
        str,
        doc("who receives traces, like `http://collector:4318`; `/v1/traces` is added; empty: no tracing", url=True),
    ] = ""
    headers: Annotated[
        list[str], doc("headers for the receiver, each as `NAME=VALUE`, such as its API key; secret", secret=True)
    ] = []
    service_name: Annotated[FieldName, doc("`service.name` of this process")] = "carpool"
    resource_attributes: Annotated[
        list[str],
        doc("what else is told of this process, each as `NAME=VALUE`, like `deployment.environment.name=prod`"),
    ] = []
    sample_ratio: Annotated[
        float, doc("share of the requests that are kept in any case, by trace id; 1: all of them", ge=0, le=1)
    ] = 0.01
    slow_share: Annotated[
        float, doc("share of the requests that is kept because they were the slowest", ge=0, le=1)
    ] = 0.01
    errors_per_second: Annotated[
        int,
        doc("requests that failed are kept up to this rate; those refused on admission by ratio", ge=0, le=1_000_000),
    ] = 100
    follow_callers: Annotated[
        bool,
        doc(
            "a caller's `traceparent` counts: its trace goes on, and is kept if it says so; false where strangers call"
        ),
    ] = True
    buffer_bytes_max: Annotated[Count, doc("bytes of spans that wait for the receiver; more are dropped")] = 32 * MIB
    timeout_s: Annotated[Seconds, doc("longest time for one call to the receiver")] = 10.0

    def __repr__(self) -> str:
        return f"TracingSettings({len(self.headers)} headers)"  # they are secret


class TierSettings(Section, frozen=True):
    """One tier. The list is in order of rank; its last entry serves requests without a credential."""

    name: Annotated[str, doc("what the tier is called")]
    target_ms: Annotated[float, doc("a request's place in the order is arrival + this", ge=0, le=86_400_000)]
    wait_max_ms: Annotated[
        float,
        doc(
            "who would wait longer for a slot is refused on admission (`shedding.mode`); where no tiers are configured "
            "it is 1000 for enterprise, 500 for paid, 250 for free",
            ge=1,
            le=86_400_000,
        ),
    ] = 500.0
    default_mode: Annotated[ModeName | None, doc("as `gateway.default_mode`, before that")] = None
    per_minute: Annotated[Limit | None, doc("as `limits.per_minute`")] = None
    burst: Annotated[Burst | None, doc("as `limits.burst`")] = None
    concurrent: Annotated[Limit | None, doc("as `limits.concurrent`")] = None


class KeySettings(Section, frozen=True):
    """One API key. `carpool keys create --show-toml` writes such a table; for a key that exists, `keys import` does."""

    sha256: Annotated[str, doc("SHA-256 of the key (20 to 256 characters), in hex: the key itself is nowhere")]
    owner: Annotated[str, doc("whom its requests count for; by default the name of this table")] = ""
    tier: Annotated[str, doc("the tier's name; by default the lowest")] = ""
    models: Annotated[list[str], doc("models that it may ask for; empty: all")] = []
    default_mode: Annotated[ModeName | None, doc("as `gateway.default_mode`, before what a model or a tier says")] = (
        None
    )
    per_minute: Annotated[Limit | None, doc("as `limits.per_minute`")] = None
    burst: Annotated[Burst | None, doc("as `limits.burst`")] = None
    concurrent: Annotated[Limit | None, doc("as `limits.concurrent`")] = None


class ModelSettings(Section, frozen=True):
    """One model. What is not set here comes from the sections above."""

    endpoints: Annotated[list[str] | None, doc("as `upstream.endpoints`", url=True)] = None
    protocol: Annotated[ProtocolName | None, doc("as `upstream.protocol`")] = None
    slots: Annotated[Slots | None, doc("as `upstream.slots`")] = None
    model_version: Annotated[str | None, doc("as `upstream.model_version`")] = None
    tensor_name: Annotated[str | None, doc("as `upstream.tensor_name`")] = None
    tensor_datatype: Annotated[DatatypeName | None, doc("as `upstream.tensor_datatype`")] = None
    tensor_shape: Annotated[TensorShape | None, doc("as `upstream.tensor_shape`")] = None
    tensor_binary: Annotated[bool | None, doc("as `upstream.tensor_binary`")] = None
    completion_output: Annotated[Literal["choice", "text"] | None, doc("as `upstream.completion_output`")] = None
    bytes_as: Annotated[BytesForm | None, doc("as `upstream.bytes_as`")] = None
    default_mode: Annotated[ModeName | None, doc("as `gateway.default_mode`, before what a tier says")] = None
    timeout_s: Annotated[Seconds | None, doc("as `upstream.timeout_s`")] = None
    max_batch: Annotated[BatchSize | None, doc("as `batching.max_batch`")] = None
    batch_bytes_max: Annotated[Count | None, doc("as `batching.batch_bytes_max`")] = None
    body_bytes_max: Annotated[BodyBytes | None, doc("as `gateway.body_bytes_max`")] = None
    cache: Annotated[bool | None, doc("as `cache.enabled`")] = None
    input_bytes_max: Annotated[Whole | None, doc("as `input.input_bytes_max`")] = None
    deny_patterns: Annotated[list[str] | None, doc("as `input.deny_patterns`; `[]`: none")] = None
    probe_input: Annotated[str | None, doc('as `upstream.probe_input`; `""`: none')] = None
    load_header: Annotated[str | None, doc('as `upstream.load_header`; `""`: none')] = None
    load_metrics_url: Annotated[str | None, doc('as `upstream.load_metrics_url`; `""`: none', url=True)] = None
    load_metric: Annotated[str | None, doc("as `upstream.load_metric`")] = None
    load_metric_max: Annotated[MetricMax | None, doc("as `upstream.load_metric_max`")] = None
    load_latency_ratio: Annotated[LatencyRatio | None, doc("as `upstream.load_latency_ratio`")] = None
    tls_ca: Annotated[str | None, doc('as `upstream.tls_ca`; `""`: the system\'s authorities')] = None
    tls_cert: Annotated[str | None, doc('as `upstream.tls_cert`, together with `tls_key`; `""`: none')] = None
    tls_key: Annotated[str | None, doc("as `upstream.tls_key`")] = None
    token_file: Annotated[str | None, doc('as `upstream.token_file`; `""`: none')] = None
    header_files: Annotated[list[str] | None, doc("as `upstream.header_files`; `[]`: none")] = None


DEFAULT_TIERS = (
    TierSettings(name="enterprise", target_ms=50.0, wait_max_ms=1000.0),
    TierSettings(name="paid", target_ms=150.0, wait_max_ms=500.0),
    TierSettings(name="free", target_ms=500.0, wait_max_ms=250.0),
)


class Settings(Section, frozen=True):
    """The whole configuration."""

    model: Annotated[
        str,
        doc(
            "the model's name when `models` is empty, and the one meant when a client names none "
            "(by default the first of `models`)"
        ),
    ] = "default"
    gateway: GatewaySettings = GatewaySettings()
    stream: StreamSettings = StreamSettings()
    auth: AuthSettings = AuthSettings()
    service: ServiceSettings = ServiceSettings()
    limits: LimitSettings = LimitSettings()
    shedding: SheddingSettings = SheddingSettings()
    cache: CacheSettings = CacheSettings()
    input: InputSettings = InputSettings()
    batching: BatchingSettings = BatchingSettings()
    upstream: UpstreamSettings = UpstreamSettings()
    broker: BrokerSettings = BrokerSettings()
    tasks: TaskSettings = TaskSettings()
    dead_letters: DeadLetterSettings = DeadLetterSettings()
    webhooks: WebhookSettings = WebhookSettings()
    tracking: TrackingSettings = TrackingSettings()
    log: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()
    tiers: tuple[TierSettings, ...] = DEFAULT_TIERS
    models: dict[str, ModelSettings] = {}
    keys: dict[str, KeySettings] = {}
