"""Every setting: its type, limits, default and meaning. Times end in _s or _ms, limits in _max.

Precedence: flags over `CARPOOL_<SECTION>_<KEY>` environment over `carpool.toml` over these defaults.
Unknown keys are errors. `docs/configuration.md` is generated from this file by `make docs`.
"""

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from carpool.batching.policy import PolicyName
from carpool.core.api_key import Burst, Limit
from carpool.core.dead_letter import SynchronousKept
from carpool.core.names import BytesForm, ModeName, ProtocolName

MIB, GIB = 1024**2, 1024**3

Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1)]
Slots = Annotated[int, Meta(ge=1, le=65536)]
# Every number with a fraction has an upper bound, so that no infinity comes in by the file.
Seconds = Annotated[float, Meta(gt=0, le=365 * 86400)]
Days = Annotated[float, Meta(gt=0, le=3650)]
FieldName = Annotated[str, Meta(min_length=1)]
BodyBytes = Annotated[int, Meta(ge=1, le=64 * MIB)]
# As many may be at the endpoints of a model at once (`service.py`).
BatchBytes = Annotated[int, Meta(ge=1, le=512 * MIB)]
BatchSize = Annotated[int, Meta(ge=1, le=4096)]
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
    grpc_port: Annotated[
        Port | None,
        doc(
            "port for gRPC, which needs `carpool[grpc]`; by default there is none; 0 picks a free one; several "
            "processes share it"
        ),
    ] = None
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
    receive_timeout_s: Annotated[Seconds, doc("a request must have arrived whole within this (408)")] = 10.0
    idle_timeout_s: Annotated[Seconds, doc("a connection with no request is closed after this")] = 75.0
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


class BatchingSettings(Section, frozen=True):
    """When a batch is sent."""

    max_batch: Annotated[BatchSize, doc("most requests in one batch")] = 64
    batch_bytes_max: Annotated[
        BatchBytes, doc("bytes of the inputs in one batch; a request with more is sent alone")
    ] = 32 * MIB
    max_wait_ms: Annotated[float, doc("longest wait for company while a slot is free", ge=0, le=100)] = 50.0
    policy: Annotated[PolicyName, doc("how to decide between sending and waiting")] = "adaptive"


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
            "metric to read the load from, once a second: a path on the endpoint, `:8002/metrics` on its host, or a "
            "URL, and the name behind a `#`: `:8002/metrics#nv_gpu_utilization`; where not 1 but 512 means full, "
            "`/metrics#te_queue_size/512`; the largest of its series counts",
            url=True,
        ),
    ] = ""
    tls_ca: Annotated[str, doc("PEM file with the authorities to accept for `https://`, in place of the system's")] = ""
    tls_cert: Annotated[str, doc("PEM file with the certificate chain to show to the API (mTLS)")] = ""
    tls_key: Annotated[str, doc("PEM file with the private key of `tls_cert`")] = ""
    token_file: Annotated[str, doc("file with the token to send as `Authorization: Bearer …`")] = ""
    header_files: Annotated[
        list[str], doc("further secret headers, each as `NAME=FILE` with its value in the file")
    ] = []
    cache: Annotated[
        bool, doc("its answers do not vary: results are kept (`[cache]`), and identical requests are coalesced")
    ] = False
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
    redis_timeout_ms: Annotated[
        int, doc("Redis counts as gone when commands wait and it answers nothing for this long", ge=10, le=60_000)
    ] = 500
    replicas: Annotated[
        int,
        doc("replicas of Redis that must have a task before its 202 (`WAIT`); 503 if they do not", ge=0, le=16),
    ] = 0
    persistence: Annotated[
        Literal["allowed", "forbidden"],
        doc(
            "`forbidden`: refuse to start where a server of Redis writes to a disk (AOF, snapshots, files "
            "for replicas), for payloads that must never be on one; a process that runs says so loudly"
        ),
    ] = "allowed"
    waiting_max: Annotated[Count, doc("requests that may wait or run at once (503)")] = 100_000
    bytes_max: Annotated[Count, doc("bytes of their inputs, together (503)")] = 512 * MIB
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
        doc("`deadline`: arrival + the tier's target; `strict`: higher tiers first, but the lowest gets a twentieth"),
    ] = "deadline"


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


class DeadLetterSettings(Section, frozen=True):
    """Dead letters: requests that were given up on. Tasks always become one."""

    synchronous: Annotated[
        SynchronousKept,
        doc(
            "which synchronous requests are kept too: `poison`, whose input the model refuses; `all`, also "
            "those that the upstream failed; or `none`"
        ),
    ] = "poison"


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
    """How much one owner may ask for. A tier, and a key, may have rates of their own."""

    per_minute: Annotated[Limit, doc("requests a minute of an owner with a credential (429); 0: no limit")] = 1000
    burst: Annotated[Burst, doc("requests that may come at once, on top of an even pace")] = 100
    concurrent: Annotated[
        Limit, doc("synchronous requests of an owner that may wait or run at once (429); 0: no limit")
    ] = 0
    anonymous: Annotated[
        Limit, doc("requests a minute of an address, for those without a credential (429); 0: no limit")
    ] = 0
    streams: Annotated[
        int, doc("WebSockets of an owner at one process, and as many gRPC streams and listeners (429)", ge=1, le=1024)
    ] = 64


class SheddingSettings(Section, frozen=True):
    """Whom the load shedder refuses when more comes than can be served in time (503)."""

    mode: Annotated[
        Literal["predicted", "thresholds", "off"],
        doc(
            "`predicted`: who would wait longer than its tier's `wait_max_ms`, or its deadline; "
            "`thresholds`: the lower tiers, by depth and rate"
        ),
    ] = "predicted"


class CacheSettings(Section, frozen=True):
    """Results that are kept, and identical requests that are coalesced. For models whose answers do not vary."""

    ttl_s: Annotated[Seconds, doc("how long a result is kept")] = 300.0
    bytes_max: Annotated[
        Count, doc("bytes of results kept in each gateway; and once more in Redis, where there is one")
    ] = 256 * MIB
    scope: Annotated[
        Literal["all", "owner"], doc("`owner`: what one owner asked for is never given to another, nor shared with it")
    ] = "all"


class InputSettings(Section, frozen=True):
    """What clients send, and what is taken of it. This does not stop every prompt injection."""

    default_mode: Annotated[
        ModeName,
        doc("what `POST /v1/inference` does when the client does not say; a key, a model and a tier go before it"),
    ] = "sync"
    body_bytes_max: Annotated[BodyBytes, doc("body of one request (413)")] = MIB
    input_bytes_max: Annotated[int, doc("longest input, in bytes of its JSON (422); 0: as the body allows", ge=0)] = 0
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

    def __repr__(self) -> str:
        return f"WebhookSettings({self.hosts}, {len(self.secrets)} secrets)"  # they are secret


class TrackingSettings(Section, frozen=True):
    """What is kept of every request and every batch, for questions afterwards; never what is in them."""

    store: Annotated[
        Literal["off", "sqlite", "postgres"],
        doc("`sqlite`: `tracking.db` in `tasks.data_dir`; `postgres`: a database (`carpool tracking init`)"),
    ] = "off"
    url: Annotated[
        str, doc("`postgres`: `postgresql://user@host:5432/database`; the password may be in PGPASSWORD", url=True)
    ] = ""
    retention_days: Annotated[Days, doc("how long rows are kept; a database drops whole days (UTC)")] = 30.0
    bytes_max: Annotated[
        int, doc("`sqlite`: the size of the file, about; the oldest rows go first", ge=MIB, le=1024 * GIB)
    ] = GIB


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
    resource_attributes: Annotated[
        list[str],
        doc(
            "what is told of this process, each as `NAME=VALUE`, like `deployment.environment.name=prod`; "
            "`service.name` is `carpool` unless it is here"
        ),
    ] = []
    sample_ratio: Annotated[
        float, doc("share of the requests whose trace is kept, by trace id; 1: all of them", ge=0, le=1)
    ] = 0.01
    follow_callers: Annotated[
        bool,
        doc(
            "a caller's `traceparent` counts: its trace goes on, and is kept if it says so; false where strangers call"
        ),
    ] = True

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
    default_mode: Annotated[ModeName | None, doc("as `input.default_mode`, before that")] = None
    per_minute: Annotated[Limit | None, doc("as `limits.per_minute`")] = None
    burst: Annotated[Burst | None, doc("as `limits.burst`")] = None
    concurrent: Annotated[Limit | None, doc("as `limits.concurrent`")] = None


class KeySettings(Section, frozen=True):
    """One API key. `carpool keys create --show-toml` writes such a table; for a key that exists, `keys import` does."""

    sha256: Annotated[str, doc("SHA-256 of the key (20 to 256 characters), in hex: the key itself is nowhere")]
    owner: Annotated[str, doc("whom its requests count for; by default the name of this table")] = ""
    tier: Annotated[str, doc("the tier's name; by default the lowest")] = ""
    models: Annotated[list[str], doc("models that it may ask for; empty: all")] = []
    default_mode: Annotated[ModeName | None, doc("as `input.default_mode`, before what a model or a tier says")] = None
    per_minute: Annotated[Limit | None, doc("as `limits.per_minute`")] = None
    burst: Annotated[Burst | None, doc("as `limits.burst`")] = None
    concurrent: Annotated[Limit | None, doc("as `limits.concurrent`")] = None


# What a model says of these sections for itself, by key; no two of them have a key of the same name.
ModelSettings = dict[str, Any]
MODEL_SECTIONS: dict[str, type[Section]] = {
    "upstream": UpstreamSettings,
    "batching": BatchingSettings,
    "input": InputSettings,
}
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
