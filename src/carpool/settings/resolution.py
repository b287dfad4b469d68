"""What a process works with: each model with all of its settings, its own and those that it shares.

A model's own word goes before that of the sections (`MODEL_SECTIONS`). Only this module knows that a model may leave a
setting out.
"""

import re
from collections.abc import Callable
from ipaddress import ip_address
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import asdict

from carpool.core.api_key import ApiKey
from carpool.core.names import TlsFiles
from carpool.settings.endpoints import expand_endpoints
from carpool.settings.errors import ConfigError, faults_at
from carpool.settings.schema import (
    BatchingSettings,
    BrokerSettings,
    GatewaySettings,
    InputSettings,
    ModelSettings,
    SectionT,
    Settings,
    UpstreamSettings,
)
from carpool.upstream.tls import UpstreamSecurity, read_file

if TYPE_CHECKING:
    from carpool.broker.redis.client.address import BrokerAddress

# How an error text names the place of a setting: by its path, and by where its value came from.
Where = Callable[[str], str]

HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
# Carpool writes these itself, or they would change where the call begins and ends.
_OWN_HEADERS = {
    "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect", "host",
    "keep-alive", "te", "trailer", "transfer-encoding", "upgrade",
}  # fmt: skip


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """One model, with nothing left open."""

    name: str
    # The sections as they are for this model; of `endpoints`, the port ranges are written out.
    upstream: UpstreamSettings
    batching: BatchingSettings
    input: InputSettings
    # Numbers of the tiers whose requests are tasks where neither the client nor its key says.
    task_tiers: frozenset[int]
    # What one owner asked for is never given to another.
    is_cached_by_owner: bool
    # What protects its calls.
    security: UpstreamSecurity


def models_of(settings: Settings) -> dict[str, Model]:
    """Every model by name; where none is configured, the single model `settings.model`. Raises ConfigError."""
    named = settings.models or {settings.model: {}}
    return {name: resolve(settings, name, own) for name, own in named.items()}


def resolve(settings: Settings, name: str, own: ModelSettings, where: Where = str) -> Model:
    """One model; raises ConfigError, in which `where` names the place."""
    upstream = _overlaid(settings.upstream, own)
    if {"tls_cert", "tls_key"} & own.keys():  # a certificate and its key stay together
        both = {key: own.get(key, "") for key in ("tls_cert", "tls_key")}
        upstream = msgspec.structs.replace(upstream, **both)
    with faults_at(where(path_of(name, own, "endpoints"))):
        upstream = msgspec.structs.replace(upstream, endpoints=expand_endpoints(upstream.endpoints))
    with faults_at(where(path_of(name, own, "header_files"))):
        header_files = _parse_header_files(upstream.header_files)
    return Model(
        name=name,
        upstream=upstream,
        batching=_overlaid(settings.batching, own),
        input=_overlaid(settings.input, own),
        is_cached_by_owner=settings.cache.scope == "owner",
        task_tiers=frozenset(
            number
            for number, tier in enumerate(settings.tiers)
            if (own.get("default_mode") or tier.default_mode or settings.input.default_mode) == "async"
        ),
        security=UpstreamSecurity(
            upstream.tls_ca, upstream.tls_cert, upstream.tls_key, upstream.token_file, header_files
        ),
    )


def path_of(name: str, own: ModelSettings, key: str, section: str = "upstream") -> str:
    """The path of a setting that a model has: its own, or the one in the section."""
    return f"models.{name}.{key}" if key in own else f"{section}.{key}"


def tls_files(broker: BrokerSettings) -> TlsFiles:
    """The files that protect the way to Redis."""
    return TlsFiles(broker.tls_ca, broker.tls_cert, broker.tls_key)


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach what listens there."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def admin_port(gateway: GatewaySettings) -> int:
    """The port for operators; 0 picks a free one."""
    if gateway.admin_port is not None:
        return gateway.admin_port
    return gateway.port + 1 if gateway.port else 0


def call_timeouts_s(settings: Settings) -> dict[str, float]:
    """How long one attempt may take, by the path of the setting that says so."""
    models = settings.models or {settings.model: {}}
    return {
        path_of(name, own, "timeout_s"): own.get("timeout_s", settings.upstream.timeout_s)
        for name, own in models.items()
    }


def total_timeout_s(settings: Settings) -> float:
    """How long a synchronous request may take: unless it is set, long enough for one attempt of any model."""
    own = settings.broker.total_timeout_s
    return max(4.0, max(call_timeouts_s(settings).values()) + 1.0) if own is None else own


def broker_address(broker: BrokerSettings) -> "BrokerAddress":
    """Where Redis is and how to get in; raises ConfigError. Reads the password's file."""
    # Here, so that commands without a broker start without it.
    from carpool.broker.redis.client.address import BadBrokerUrlError, parse_broker_url

    password = read_password(broker.password_file) if broker.password_file else None
    try:
        return parse_broker_url(broker.url, password=password, files=tls_files(broker))
    except BadBrokerUrlError as error:
        raise ConfigError(str(error).removeprefix("the broker's URL ")) from None


def read_password(path: str) -> str:
    """The one line of the password's file; what stands in place of a path may be the password: it is not shown."""
    try:
        text = read_file(path).decode().strip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"must be the path of a file with a password: {reason}") from None
    if not text or not text.isprintable():
        raise ConfigError("must be the path of a file with a password: the file must have one line")
    return text


def _overlaid(section: SectionT, own: ModelSettings) -> SectionT:
    """A section with what the model says of it."""
    said = {key: own[key] for key in section.__struct_fields__ if key in own}
    return msgspec.structs.replace(section, **said)


def _parse_header_files(items: list[str]) -> tuple[tuple[str, str], ...]:
    """Names and paths. An entry that cannot be read is not shown: it may be the secret itself."""
    found: dict[str, tuple[str, str]] = {}
    for item in items:
        name, _, path = item.partition("=")
        if not path or not HEADER_NAME.fullmatch(name):
            raise ConfigError("must have entries like X-Api-Key=/run/secrets/api-key")
        if name.lower() in _OWN_HEADERS:
            raise ConfigError(f"must not set {name}: Carpool writes it itself")
        if name.lower() in found:
            raise ConfigError(f"sets {name} twice")
        found[name.lower()] = (name, path)
    return tuple(found.values())


def configured_keys(settings: Settings) -> list[ApiKey]:
    """The API keys of the configuration."""
    return [
        ApiKey(name=name, **asdict(key) | {"sha256": key.sha256.lower(), "models": tuple(key.models)})
        for name, key in settings.keys.items()
    ]
