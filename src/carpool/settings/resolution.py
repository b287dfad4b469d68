"""What a process works with: each model with all of its settings, its own and those that it shares.

A model's own word goes before that of the sections (`MODEL_SECTIONS`). Only this module knows that a model may leave a
setting out.
"""

import re
from collections.abc import Callable, Iterable
from ipaddress import ip_address
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import asdict

from carpool.core.api_key import ApiKey
from carpool.core.names import TlsFiles
from carpool.settings.errors import ConfigError, faults_at, shown
from carpool.settings.schema import (
    HEADER_CHARS,
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

ENDPOINTS_MAX = 4096
# What the kernel has room for in a socket's address.
UNIX_SOCKET_BYTES_MAX = 107

_URL = re.compile(
    r"(?P<head>(?:https?|grpcs?)://(?:\[[0-9A-Fa-f:.]+\]|[^\s/?#@:\[\]]+))"
    r"(?::(?P<first>[0-9]{1,5})(?:-(?P<last>[0-9]{1,5}))?)?"
    r"(?P<rest>[/?][^\s#]*)?"
)
_UNIX = re.compile(r"unix:(?P<socket>/[^\s:?#]+)(?::/[^\s#]*)?")
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


def expand_endpoints(endpoints: Iterable[str]) -> list[str]:
    """One address for each endpoint, port ranges written out; raises ConfigError where one is not valid."""
    found: dict[str, None] = {}
    for text in endpoints:
        for address in _expand(text):
            if address in found:
                raise ConfigError(f"names {shown(address)} twice; `slots` says how much it takes at once")
            if len(found) == ENDPOINTS_MAX:
                raise ConfigError(f"names more than {ENDPOINTS_MAX} endpoints")
            found[address] = None
    return list(found)


def _expand(text: str) -> list[str]:
    fault = ""
    if text.startswith("sim:"):
        from carpool.upstream.simulated import parse_sim_url  # here, so that other commands start without asyncio

        try:
            parse_sim_url(text)
        except ValueError as wrong:
            fault = str(wrong)
    elif text.startswith("unix:"):
        match = _UNIX.fullmatch(text)
        if match is None:
            fault = "a Unix socket looks like unix:/run/model.sock:/path"
        elif len(match["socket"].encode()) > UNIX_SOCKET_BYTES_MAX:
            fault = f"the path of a socket has at most {UNIX_SOCKET_BYTES_MAX} bytes"
    else:
        match = _URL.fullmatch(text)
        if match is None:
            fault = (
                "an endpoint looks like http://host:9000/path, or with a range of ports http://host:9000-9031/path, "
                "or unix:/run/model.sock:/path, or sim:?latency_ms=50&slots=64; user names are not taken"
            )
        elif match["first"] is not None:
            first, last = int(match["first"]), int(match["last"] or match["first"])
            if 1 <= first <= last <= 65535:
                ports = range(first, last + 1)[: ENDPOINTS_MAX + 1]
                return [f"{match['head']}:{port}{match['rest'] or ''}" for port in ports]
            fault = "ports go from 1 to 65535, the lower one first"
    if fault:
        raise ConfigError(f"has {shown(text)}: {fault}")
    return [text]


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
    return msgspec.structs.replace(section, **{key: own[key] for key in section.__struct_fields__ if key in own})


def _parse_header_files(items: list[str]) -> tuple[tuple[str, str], ...]:
    """Names and paths. An entry that cannot be read is not shown: it may be the secret itself."""
    found: dict[str, tuple[str, str]] = {}
    for item in items:
        name, _, path = item.partition("=")
        if not path or not re.fullmatch(f"{HEADER_CHARS}+", name):
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
