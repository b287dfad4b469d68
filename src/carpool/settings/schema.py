"""Every setting: its type, limits, default and meaning. Times end in _s or _ms, limits in _max.

Precedence: flags over `CARPOOL_<SECTION>_<KEY>` environment over `carpool.toml` over these defaults.
Unknown keys are errors. `docs/configuration.md` is generated from this file by `make docs`.
"""

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from carpool.batching.policy import Fit, PolicyName
from carpool.core.api_key import Burst, Limit
from carpool.core.dead_letter import SynchronousKept
from carpool.core.names import BytesForm, ModeName, ProtocolName

MIB, GIB = 1024**2, 1024**3
# What can stand in keys, metrics and URLs.
NAME_PATTERN = r"^[A-Za-z0-9._:/-]{1,128}\Z"
NAME_WORDS = "1 to 128 letters, digits or . _ : / -"
HEADER_CHARS = r"[!#$%&'*+.^_`|~0-9A-Za-z-]"

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
# A name, a datatype and a shape, the last two or one of which may be left out; the shape has the batch dimension, 1.
# Texts of a form have it in words too, for the errors.
DATATYPES = "BOOL|UINT8|UINT16|UINT32|UINT64|INT8|INT16|INT32|INT64|FP16|BF16|FP32|FP64|BYTES"
Tensor = Annotated[
    str,
    Meta(
        pattern=rf"^([^\s]+( ({DATATYPES})( 1(,[0-9]{{1,9}})*)?)?)?\Z",
        title="a tensor's name, datatype and shape like `image FP32 1,3,224,224`",
    ),
]
Name = Annotated[str, Meta(pattern=NAME_PATTERN, title=NAME_WORDS)]
Token = Annotated[str, Meta(pattern=r"^[\x21-\x7e]+\Z", title="tokens of printable ASCII without spaces")]
Header = Annotated[
    str, Meta(pattern=rf"^{HEADER_CHARS}+=[\x20-\x7e]*[\x21-\x7e]\Z", title="NAME=VALUE, in printable ASCII")
]
Attribute = Annotated[str, Meta(pattern=r"^[^=]*[^=\s][^=]*=", title="NAME=VALUE")]
Origin = Annotated[
    str,
    Meta(
        pattern=r"^(\*|https?://([a-z0-9.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?)\Z",
        title="origins like https://app.example.com, without a path, or *",
    ),
]
Receiver = Annotated[
    str,
    Meta(
        pattern=r"^(https?://[^\s/?#@]+(/[^\s?#]*)?)?\Z",
        title="like http://collector:4318, without a user name or a query; keys go into OTEL_EXPORTER_OTLP_HEADERS",
    ),
]
InputRule = Annotated[
    str, Meta(pattern=r"^(control|invisible|repeats=[1-9][0-9]{1,6})\Z", title="control, invisible or repeats=100")
]
Digest = Annotated[
    str,
    Meta(pattern=r"^[0-9A-Fa-f]{64}\Z", title="a SHA-256 in hex; `carpool keys create --show-toml` writes one"),
]


# What they mean stands behind their type. A URL may hold a password or a key: `carpool config` leaves those out.
URL, SECRET = Meta(extra={"is_url": True}), Meta(extra={"is_secret": True})


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the configuration file; unknown keys are errors."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"  # what it holds may be secret


SectionT = TypeVar("SectionT", bound=Section)


class GatewaySettings(Section, frozen=True):
    """The faces: where they listen and what they take from a client."""

    host: Annotated[str, "address to listen on"] = "127.0.0.1"
    port: Annotated[Port, "port for clients; 0 picks a free one"] = 8000
    admin_host: Annotated[str, "address of the admin port; beyond loopback needs `service.token`"] = "127.0.0.1"
    admin_port: Annotated[Port | None, "port for health, metrics and the like; by default `port` + 1"] = None
    admin_hosts: Annotated[
        list[str],
        "names by which the admin port is reached, beside `localhost` and addresses: a `Host` with another name "
        "gets 403, so that no web page can reach it through a browser",
    ] = []
    grpc_port: Annotated[
        Port | None, "port for gRPC, which needs `carpool[grpc]`; processes share it; none by default; 0 picks one"
    ] = None
    request_ids: Annotated[
        Literal["counted", "uuid"],
        "what requests are called whose client gives no `X-Request-Id`: `req_6f2c9a81d04e-1`, or a UUID",
    ] = "counted"
    tls_cert: Annotated[str, "PEM file with the certificate chain; turns TLS on"] = ""
    tls_key: Annotated[str, "PEM file with the private key"] = ""
    trusted_proxies: Annotated[
        list[str],
        "proxies that are believed when they say for whom they ask (`X-Forwarded-For`): addresses, or "
        "networks like `10.0.0.0/8`; from anybody else that header is ignored",
    ] = []
    receive_timeout_s: Annotated[Seconds, "a request must have arrived whole within this (408)"] = 10.0
    idle_timeout_s: Annotated[Seconds, "a connection with no request is closed after this"] = 75.0
    cors_origins: Annotated[
        list[Origin],
        "origins whose pages may ask from a browser (CORS), like `https://app.example.com`, and may open streams; "
        "`*`: any; empty: none",
    ] = []
    drain_grace_s: Annotated[float, Meta(ge=0, le=3600), "after SIGTERM, how long connections are still accepted"] = 1.0
    processes: Annotated[
        int,
        Meta(ge=1, le=64),
        "gateway processes that share the port; more than one needs `broker.url`; "
        "each has an admin port of its own, one after the other",
    ] = 1


class BatchingSettings(Section, frozen=True):
    """When a batch is sent."""

    max_batch: Annotated[BatchSize, "most requests in one batch"] = 64
    batch_bytes_max: Annotated[BatchBytes, "bytes of inputs in one batch; a request with more goes alone"] = 32 * MIB
    max_wait_ms: Annotated[float, Meta(ge=0, le=100), "longest wait for company while a slot is free"] = 50.0
    policy: Annotated[PolicyName, "how to decide between sending and waiting"] = "adaptive"
    fit: Annotated[
        Fit, "put inputs of similar size together while many wait; `auto`: where calls take longer for what is padded"
    ] = "auto"
    batch_seconds_max: Annotated[
        float, Meta(ge=0, le=3600), "a batch that is expected to take longer has fewer requests; 0: no bound"
    ] = 0.0


class UpstreamSettings(Section, frozen=True):
    """The fixed API: where it is and how to speak to it."""

    endpoints: Annotated[
        list[str],
        "URLs; a port range like `http://127.0.0.1:9000-9031/infer` stands for one endpoint "
        "each; `unix:/run/model.sock:/infer` is a path on a Unix socket; "
        "`sim:?latency_ms=50&slots=64` is a simulated GPU in this process",
        URL,
    ] = []
    protocol: Annotated[ProtocolName, "wire format of the API"] = "json"
    slots: Annotated[
        Slots | Literal["auto"],
        "batches that one endpoint takes at once; `auto`: Carpool finds out, one step at a time, at most 8",
    ] = 1
    pad: Annotated[
        bool,
        "the API takes exactly `max_batch` inputs: the shortest one is repeated, and its further outputs are dropped; "
        "a body may have `batch_bytes_max / max_batch` bytes then",
    ] = False
    timeout_s: Annotated[Seconds, "longest time for one attempt"] = 3.0
    attempts: Annotated[int, Meta(ge=1, le=10), "attempts for one batch, the first included"] = 4
    probe_input: Annotated[
        str,
        "an input that the model answers, in JSON (`'\"hello\"'`): it is sent at the start, again and again until "
        "a call is answered, and `/internal/ready` waits for that",
    ] = ""
    load: Annotated[
        str,
        "where an endpoint tells its load; over 90 % it gets less. A header of its answers, `X-Load` (`0.93`, or "
        "`93` for per cent); or a metric, read once a second: a path on the endpoint, `:8002/metrics` on its host, or "
        "a URL, and the name behind a `#`: `:8002/metrics#nv_gpu_utilization`; where not 1 but 512 means full, "
        "`/metrics#te_queue_size/512`; the largest of its series counts",
        URL,
    ] = ""
    tls_ca: Annotated[str, "PEM file with the authorities to accept for `https://`, in place of the system's"] = ""
    tls_cert: Annotated[str, "PEM file with the certificate chain to show to the API (mTLS)"] = ""
    tls_key: Annotated[str, "PEM file with the private key of `tls_cert`"] = ""
    token_file: Annotated[str, "file with the token to send as `Authorization: Bearer …`"] = ""
    header_files: Annotated[list[str], "further secret headers, each as `NAME=FILE` with its value in the file"] = []
    cache: Annotated[bool, "answers do not vary: results are kept (`[cache]`), identical requests coalesced"] = False
    inputs_field: Annotated[FieldName, "`json`: field of the call that holds the inputs"] = "inputs"
    outputs_field: Annotated[FieldName, "`json`: field of the answer that holds the outputs"] = "outputs"
    parameters_field: Annotated[FieldName, "`json`: field of the call for the parameters"] = "parameters"
    tokens_field: Annotated[
        FieldName, "`json`: field of the answer with the tokens used: a number for all inputs, or an array of such"
    ] = "tokens_used"
    version_field: Annotated[
        FieldName, "`json`: field of the answer with the version of the model: one for all inputs, or an array"
    ] = "model_version"
    completion_output: Annotated[
        Literal["choice", "text"], "`openai_completions`: the `output` is the whole choice as an object, or its text"
    ] = "choice"
    bytes_as: Annotated[
        BytesForm,
        "clients send bytes: at `/v1/predict` `input_data` and `output` are base64, over gRPC `output` is bytes; "
        "the model has them as its protocol has bytes (`base64`), as texts (`text`) or as JSON (`json`)",
    ] = ""
    model_version: Annotated[str, "`kserve_…`: version of the model to ask for; by default the server decides"] = ""
    tensor: Annotated[
        Tensor,
        "`kserve_v2…`: a tensor's name, datatype and shape when its client gives none, like `image FP32 1,3,224,224`; "
        "the shape, or both, may be left out; binary bodies need the datatype",
    ] = ""
    tensor_binary: Annotated[bool, "`kserve_v2`: send tensors raw (binary extension) also for clients of JSON"] = False


class BrokerSettings(Section, frozen=True):
    """Where requests wait, and how long: in this process, or in Redis."""

    url: Annotated[
        str,
        "Redis, where gateways and batchers meet: `redis://user:password@host:6379/0`, "
        "`redis+sentinel://host:26379,…/name-of-the-master`, `redis+cluster://host:7000,…`; `rediss…` for TLS; "
        "when it is empty, requests wait in this process",
        URL,
    ] = ""
    password_file: Annotated[str, "file with the password for Redis, in place of one in `url`; read at the start"] = ""
    tls_ca: Annotated[str, "PEM file with the authorities to accept for `rediss://`, in place of the system's"] = ""
    tls_cert: Annotated[str, "PEM file with the certificate chain to show to Redis (mTLS)"] = ""
    tls_key: Annotated[str, "PEM file with the private key of `tls_cert`"] = ""
    namespace: Annotated[
        Name, "what every key in Redis begins with; the same for all gateways and batchers of a fleet"
    ] = "carpool"
    redis_timeout_ms: Annotated[
        int, Meta(ge=10, le=60_000), "Redis counts as gone when commands wait and it answers nothing for this long"
    ] = 500
    replicas: Annotated[
        int, Meta(ge=0, le=16), "replicas of Redis that must have a task before its 202 (`WAIT`); 503 if they do not"
    ] = 0
    persistence: Annotated[
        Literal["allowed", "forbidden"],
        "`forbidden`: refuse to start where a server of Redis writes to a disk (AOF, snapshots, files "
        "for replicas), for payloads that must never be on one; a process that runs says so loudly",
    ] = "allowed"
    waiting_max: Annotated[Count, "requests that may wait or run at once (503)"] = 100_000
    bytes_max: Annotated[Count, "bytes of their inputs, together (503)"] = 512 * MIB
    queue_timeout_s: Annotated[Seconds, "a synchronous request waits this long for a slot (504)"] = 2.0
    total_timeout_s: Annotated[
        Seconds | None,
        "a synchronous request has its answer within this (504); by default 4, or one second more than the "
        "longest `timeout_s` of an upstream, if that is more",
    ] = None
    order: Annotated[
        Literal["deadline", "strict"],
        "`deadline`: arrival + the tier's target; `strict`: higher tiers first, but the lowest gets a twentieth",
    ] = "deadline"


class TaskSettings(Section, frozen=True):
    """Tasks: requests that are submitted and polled."""

    journal: Annotated[bool, "keep tasks in a file, so that they survive `kill -9`; false: in memory only"] = True
    data_dir: Annotated[str, "directory of the journal"] = "carpool-data"
    timeout_s: Annotated[Seconds, "a task has its outcome within this; downtime not counted"] = 600.0
    result_ttl_s: Annotated[Seconds, "how long a result is kept"] = 600.0
    forget_after_read: Annotated[bool, "forget a result once it has been read"] = False
    dead_letter_ttl_s: Annotated[Seconds, "how long a dead letter is kept"] = 7 * 86400.0
    stored_bytes_max: Annotated[
        Count,
        "bytes of inputs and results kept, together (503 for new tasks); from 85 % on results that were read go "
        "before their time",
    ] = 4 * GIB


class DeadLetterSettings(Section, frozen=True):
    """Dead letters: requests that were given up on. Tasks always become one."""

    synchronous: Annotated[
        SynchronousKept,
        "which synchronous requests are kept too: `poison`, whose input the model refuses; `all`, also "
        "those that the upstream failed; or `none`",
    ] = "poison"


class AuthSettings(Section, frozen=True):
    """Who may come in. What a JWT must say; API keys are in `[keys]`, or made by `carpool keys create`."""

    mode: Annotated[
        Literal["off", "keys", "jwt", "both"],
        "which credentials are taken; `off`: none is asked for, and everybody is of the lowest tier",
    ] = "off"
    jwt_file: Annotated[
        str,
        "file with the keys that sign tokens: a JWKS, a PEM, or a secret of 32 bytes or more; read again on a change",
    ] = ""
    jwt_algorithms: Annotated[
        list[Literal["HS256", "RS256", "ES256", "EdDSA"]],
        "algorithms that keys of the file may be for; empty: all. For a plain secret `HS256` must stand here alone",
    ] = []
    jwt_issuer: Annotated[str, "what `iss` must be; empty: anything"] = ""
    jwt_audience: Annotated[str, "what `aud` must be, or have in it; empty: anything"] = ""
    jwt_owner_claim: Annotated[FieldName, "the claim that says whom a request counts for"] = "sub"
    jwt_tier_claim: Annotated[
        str, "the claim with the tier's name; a token without it, or with an unknown one, has the lowest"
    ] = "tier"


class ServiceSettings(Section, frozen=True):
    """Credentials of Carpool's own processes and of operators."""

    token: Annotated[
        list[Token],
        "tokens for the admin port (`Authorization: Bearer …`), each valid: two for the time of a change; "
        "needed where that port is not on loopback; secret",
        SECRET,
    ] = []


class LimitSettings(Section, frozen=True):
    """How much one owner may ask for. A tier, and a key, may have rates of their own."""

    per_minute: Annotated[Limit, "requests a minute of an owner with a credential (429); 0: no limit"] = 1000
    burst: Annotated[Burst, "requests that may come at once, on top of an even pace"] = 100
    concurrent: Annotated[Limit, "synchronous requests of an owner that may wait or run at once (429); 0: no limit"] = 0
    anonymous: Annotated[Limit, "requests a minute of an address without a credential (429); 0: no limit"] = 0
    streams: Annotated[
        int, Meta(ge=1, le=1024), "WebSockets of an owner at one process, and as many gRPC streams and listeners (429)"
    ] = 64


class SheddingSettings(Section, frozen=True):
    """Whom the load shedder refuses when more comes than can be served in time (503)."""

    mode: Annotated[
        Literal["predicted", "thresholds", "off"],
        "`predicted`: who would wait longer than its tier's `wait_max_ms`, or its deadline; "
        "`thresholds`: the lower tiers, by depth and rate",
    ] = "predicted"


class CacheSettings(Section, frozen=True):
    """Results that are kept, and identical requests that are coalesced. For models whose answers do not vary."""

    ttl_s: Annotated[Seconds, "how long a result is kept"] = 300.0
    bytes_max: Annotated[Count, "bytes of results kept in each gateway, and once more in Redis, if any"] = 256 * MIB
    scope: Annotated[
        Literal["all", "owner"], "`owner`: what one owner asked for is never given to another, nor shared with it"
    ] = "all"


class InputSettings(Section, frozen=True):
    """What clients send, and what is taken of it. This does not stop every prompt injection."""

    default_mode: Annotated[
        ModeName,
        "what `POST /v1/inference` does when the client does not say; a key, a model and a tier go before it",
    ] = "sync"
    body_bytes_max: Annotated[BodyBytes, "body of one request (413)"] = MIB
    input_bytes_max: Annotated[int, Meta(ge=0), "longest input, in bytes of its JSON (422); 0: as the body allows"] = 0
    deny_patterns: Annotated[
        list[str],
        "inputs in whose texts one of these patterns (RE2 syntax) is found are refused; needs `carpool[policy]`",
    ] = []

    deny: Annotated[
        list[InputRule],
        "what an input may not have in its texts (422): `control` characters; `invisible` ones, such as zero-width "
        "spaces and marks that turn the direction of writing; `repeats=100`: a character, a word or a short pattern "
        "more often than that in a row",
    ] = []


class WebhookSettings(Section, frozen=True):
    """Outcomes of tasks that are sent to a URL (`callback_url`). Off while no host is allowed."""

    hosts: Annotated[
        list[str],
        "hosts that webhooks may go to: `hooks.example.org`, `*.example.org`, `hooks.example.org:8443`; "
        "empty: `callback_url` is refused",
    ] = []
    secrets: Annotated[
        list[str],
        "what webhooks are signed with, `whsec_` and base64, each of them: two for the time of a change; "
        "read again on SIGHUP; secret",
        SECRET,
    ] = []
    allow_http: Annotated[bool, "whether `http://` may be used too; what is sent can then be read on the way"] = False
    allow_private: Annotated[bool, "whether hosts may have private or loopback addresses; never link-local"] = False


class TrackingSettings(Section, frozen=True):
    """What is kept of every request and every batch, for questions afterwards; never what is in them."""

    store: Annotated[
        Literal["off", "sqlite", "postgres"],
        "`sqlite`: `tracking.db` in `tasks.data_dir`; `postgres`: a database (`carpool tracking init`)",
    ] = "off"
    url: Annotated[
        str, "`postgres`: `postgresql://user@host:5432/database`; the password may be in PGPASSWORD", URL
    ] = ""
    in_flight: Annotated[
        bool, "also rows of requests that wait or run; what a process leaves behind when it is killed becomes failed"
    ] = False
    retention_days: Annotated[Days, "how long rows are kept; a database drops whole days (UTC)"] = 30.0
    bytes_max: Annotated[
        int, Meta(ge=MIB, le=1024 * GIB), "`sqlite`: the size of the file, about; the oldest rows go first"
    ] = GIB


class LogSettings(Section, frozen=True):
    """What is logged; never payloads or credentials."""

    level: Annotated[Literal["debug", "info", "warning", "error"], "least severe level that is written"] = "info"
    format: Annotated[
        Literal["auto", "console", "json"], "`auto`: console on a terminal, else one JSON object a line"
    ] = "auto"


class TracingSettings(Section, frozen=True):
    """Traces, sent by OTLP over HTTP; never payloads or credentials."""

    otlp_endpoint: Annotated[
        Receiver, "who receives traces, like `http://collector:4318`; `/v1/traces` is added; empty: no tracing", URL
    ] = ""
    # These two are no keys: they come from OTEL_EXPORTER_OTLP_HEADERS and OTEL_RESOURCE_ATTRIBUTES alone.
    headers: list[Header] = []
    resource_attributes: list[Attribute] = []
    sample_ratio: Annotated[
        float, Meta(ge=0, le=1), "share of the requests whose trace is kept, by trace id; 1: all of them"
    ] = 0.01
    follow_callers: Annotated[
        bool,
        "a caller's `traceparent` counts: its trace goes on, and is kept if it says so; false where strangers call",
    ] = True


class TierSettings(Section, frozen=True):
    """One tier. The list is in order of rank; its last entry serves requests without a credential."""

    name: Annotated[Name, "what the tier is called"]
    target_ms: Annotated[float, Meta(ge=0, le=86_400_000), "a request's place in the order is arrival + this"]
    wait_max_ms: Annotated[
        float,
        Meta(ge=1, le=86_400_000),
        "who would wait longer for a slot is refused on admission (`shedding.mode`); where no tiers are configured "
        "it is 1000 for enterprise, 500 for paid, 250 for free",
    ] = 500.0
    default_mode: Annotated[ModeName | None, "as `input.default_mode`, before that"] = None
    per_minute: Annotated[Limit | None, "as `limits.per_minute`"] = None
    burst: Annotated[Burst | None, "as `limits.burst`"] = None
    concurrent: Annotated[Limit | None, "as `limits.concurrent`"] = None


class KeySettings(Section, frozen=True):
    """One API key. `carpool keys create --show-toml` writes such a table; for a key that exists, `keys import` does."""

    sha256: Annotated[Digest, "SHA-256 of the key (20 to 256 characters), in hex: the key itself is nowhere"]
    owner: Annotated[str, "whom its requests count for; by default the name of this table"] = ""
    tier: Annotated[str, "the tier's name; by default the lowest"] = ""
    models: Annotated[list[str], "models that it may ask for; empty: all"] = []
    default_mode: Annotated[ModeName | None, "as `input.default_mode`, before what a model or a tier says"] = None
    per_minute: Annotated[Limit | None, "as `limits.per_minute`"] = None
    burst: Annotated[Burst | None, "as `limits.burst`"] = None
    concurrent: Annotated[Limit | None, "as `limits.concurrent`"] = None


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
        Name, "the model's name; with `models`, the one meant when a client names none (by default the first)"
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
