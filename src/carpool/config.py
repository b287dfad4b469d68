"""Loading the settings: flags over environment over `carpool.toml` over defaults.

1. Every fault is a `ConfigError` of one line: the key, where its value came from, and what is allowed.
2. What is not known is refused, with the nearest known name: a typing error must not pass for a default.
3. A secret's value is never shown, neither in an error nor in `dump_toml`; nor is a URL's password or query string.
"""

import difflib
import ipaddress
import json
import re
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Meta

from carpool.admission.owners import parse_network
from carpool.settings import (
    BatchingSettings,
    BrokerSettings,
    ModelSettings,
    Section,
    Settings,
    TierSettings,
    UpstreamSettings,
)
from carpool.upstream.tls import UpstreamSecurity, read_file, read_header_value, read_token

if TYPE_CHECKING:
    from carpool.broker.redis.client.address import BrokerAddress

DEFAULT_FILE = Path("carpool.toml")
FILE_VARIABLE = "CARPOOL_CONFIG"
ENDPOINTS_MAX = 4096
FILE_BYTES_MAX = 1024 * 1024

# What a process does: everything, only the clients' side of Redis, or only the side of the endpoints.
Role = Literal["serve", "gateway", "batcher"]

# The settings that `carpool serve`, `gateway`, `batcher` and `config` take as flags too.
FLAGS = {
    "gateway.host": "--host",
    "gateway.port": "--port",
    "gateway.admin_host": "--admin-host",
    "gateway.admin_port": "--admin-port",
    "gateway.tls_cert": "--tls-cert",
    "gateway.tls_key": "--tls-key",
    "gateway.processes": "--processes",
    "broker.url": "--broker",
    "upstream.endpoints": "--upstream",
    "model": "--model",
    "upstream.protocol": "--protocol",
    "upstream.slots": "--slots",
    "batching.max_batch": "--max-batch",
    "batching.max_wait_ms": "--max-wait-ms",
    "batching.policy": "--policy",
    "tasks.data_dir": "--data-dir",
    "tasks.journal": "--journal/--no-journal",
    "log.level": "--log-level",
    "log.format": "--log-format",
}

_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_BARE_TOML_KEY = re.compile(r"[A-Za-z0-9_-]+")
_TOKEN = re.compile(r"[\x21-\x7e]+")
_USER_INFO = re.compile(r"//\S*@")
_QUERY = re.compile(r"\?[^\s'\",\]]+")
_ENDPOINT = re.compile(
    r"(?P<head>(?:https?|grpcs?)://(?:\[[0-9A-Fa-f:.]+\]|[^\s/?#@:\[\]]+))"
    r"(?::(?P<first>[0-9]{1,5})(?:-(?P<last>[0-9]{1,5}))?)?"
    r"(?P<rest>[/?][^\s#]*)?"
)
_UNIX_ENDPOINT = re.compile(r"unix:(?P<socket>/[^\s:?#]+)(?::/[^\s#]*)?")
_METRICS_PAGE = re.compile(r"(?:https?://[^\s/?#@]+|:[0-9]{1,5})?/[^\s#]*")
# What the kernel has room for in a socket's address.
UNIX_SOCKET_BYTES_MAX = 107
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
# Carpool writes these itself, or they would change where the call begins and ends.
_OWN_HEADERS = {
    "accept-encoding",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "expect",
    "host",
    "keep-alive",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
_GRPC_ENDPOINTS = ("grpc://", "grpcs://")
_PLAIN_ENDPOINTS = ("http://", "grpc://", "unix:", "sim:")
_SECURITY_KEYS = ("tls_ca", "tls_cert", "tls_key", "token_file", "header_files")

# Kubernetes puts such variables into every container beside a Service called `carpool` or `carpool-…`.
_KUBERNETES_NAME = re.compile(
    r"CARPOOL(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_KUBERNETES_PORT = re.compile(r"(tcp|udp|sctp)://")

SectionT = TypeVar("SectionT", bound=Section)


class ConfigError(Exception):
    """The configuration cannot be used; the text is one line for the person who wrote it."""


class Key(NamedTuple):
    """One setting as the loader, the flags and the docs see it."""

    path: str
    hint: Any
    default: Any
    description: str
    secret: bool
    # It holds URLs, which may have secrets in them.
    is_url: bool

    @property
    def name(self) -> str:
        """The key inside its section."""
        return self.path.rpartition(".")[2]

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return "CARPOOL_" + self.path.replace(".", "_").upper()


class _Given(NamedTuple):
    """A value as it was written, and where."""

    value: Any
    source: str
    is_text: bool  # from a flag or a variable: numbers come as text


def section_keys(section: type[Section], prefix: str) -> list[Key]:
    """The keys of one section in the order of settings.py; `prefix` is the section's path with its dot."""
    keys = []
    for field in msgspec.structs.fields(section):
        metas = [meta for meta in get_args(field.type)[1:] if isinstance(meta, Meta)]
        default = field.default_factory() if field.default_factory is not NODEFAULT else field.default
        keys.append(
            Key(
                path=prefix + field.name,
                hint=field.type,
                default=default,
                description=next((meta.description for meta in metas if meta.description), ""),
                secret=any((meta.extra or {}).get("secret", False) for meta in metas),
                is_url=any((meta.extra or {}).get("url", False) for meta in metas),
            )
        )
    return keys


# The tables of the file whose keys are fixed; `tiers` and `models` grow, and come from the file only.
SECTIONS: dict[str, type[Section]] = {
    field.name: field.type
    for field in msgspec.structs.fields(Settings)
    if isinstance(field.type, type) and issubclass(field.type, Section)
}
ROOT_KEYS = [key for key in section_keys(Settings, "") if key.name == "model"]
KEYS: dict[str, Key] = {
    key.path: key for key in [*ROOT_KEYS, *(k for name, cls in SECTIONS.items() for k in section_keys(cls, f"{name}."))]
}
VARIABLES: dict[str, Key] = {key.variable: key for key in KEYS.values()}


def load_settings(flags: Mapping[str, Any], *, environ: Mapping[str, str], file: Path | None) -> Settings:
    """The settings in effect; raises ConfigError. Endpoints stay as written: see `expand_endpoints`."""
    tables, file_name = _read_file(environ, file)
    tiers, models = tables.pop("tiers", None), tables.pop("models", {})
    given: dict[str, _Given] = {}
    for layer in (_from_file(tables, file_name), _from_environment(environ), _from_flags(flags)):
        given.update(layer)

    sections: dict[str, dict[str, _Given]] = {name: {} for name in SECTIONS}
    root: dict[str, Any] = {}
    for path, value in given.items():
        section, _, name = path.rpartition(".")
        if section:
            sections[section][name] = value
        else:
            root[name] = _convert(KEYS[path], value)
    for name, cls in SECTIONS.items():
        root[name] = _build(cls, f"{name}.", sections[name])
    if tiers is not None:
        root["tiers"] = _build_tiers(tiers, file_name)
    root["models"] = _build_models(models, file_name)

    if root["models"] and "model" not in root:
        root["model"] = next(iter(root["models"]))  # the first one is meant when a client names none
    settings = Settings(**root)
    sources = {path: value.source for path, value in given.items()}
    _check_together(settings, sources)
    for name, model in settings.models.items():
        _check_endpoints(model.endpoints or [], f"models.{name}.endpoints ({file_name})")
        _check_load(model, settings.upstream, f"models.{name}.", lambda path: f"{path} ({file_name})")
        _check_batch_bytes(
            model.batch_bytes_max or 0, settings.batching, f"models.{name}.batch_bytes_max ({file_name})"
        )
    _check_schemes(settings)
    _check_all_security(settings, sources, file_name)
    return settings


def require_upstream(settings: Settings) -> None:
    """Raise ConfigError unless every model has an endpoint to call."""
    for name, model in settings.models.items():
        if model.endpoints is not None and not model.endpoints:
            raise ConfigError(f"models.{name}.endpoints is empty: name at least one endpoint, or leave it out")
    needs_shared = not settings.models or any(m.endpoints is None for m in settings.models.values())
    if needs_shared and not settings.upstream.endpoints:
        raise ConfigError("no upstream: give --upstream URL (or upstream.endpoints), or try `carpool demo`")


def require_broker(settings: Settings) -> None:
    """Raise ConfigError unless there is a Redis to meet at."""
    if not settings.broker.url:
        raise ConfigError(
            "no broker: give --broker redis://HOST:6379 (or broker.url); "
            "without Redis, `carpool serve` does everything in one process"
        )


def require_for(role: Role, settings: Settings) -> None:
    """Raise ConfigError unless there is what the role needs. A gateway needs upstreams for direct mode alone."""
    if role != "serve":
        require_broker(settings)
    if role != "gateway":
        require_upstream(settings)


def broker_address(broker: BrokerSettings) -> "BrokerAddress":
    """Where Redis is and how to get in; raises ConfigError. Reads the password's file."""
    # Here, so that commands without a broker start without it.
    from carpool.broker.redis.client.address import BadBrokerUrlError, parse_broker_url

    password = _read_password(broker.password_file) if broker.password_file else None
    try:
        return parse_broker_url(
            broker.url, password=password, tls_ca=broker.tls_ca, tls_cert=broker.tls_cert, tls_key=broker.tls_key
        )
    except BadBrokerUrlError as error:
        raise ConfigError(str(error).removeprefix("the broker's URL ")) from None


def admin_port(settings: Settings) -> int:
    """The port for operators; 0 picks a free one."""
    gateway = settings.gateway
    if gateway.admin_port is not None:
        return gateway.admin_port
    return gateway.port + 1 if gateway.port else 0


def expand_endpoints(endpoints: Iterable[str]) -> list[str]:
    """One address for each endpoint, port ranges written out; raises ConfigError where one is not valid."""
    found: dict[str, None] = {}
    for text in endpoints:
        for address in _expand(text):
            if address in found:
                raise ConfigError(f"names {_shown(address)} twice; `slots` says how much it takes at once")
            if len(found) == ENDPOINTS_MAX:
                raise ConfigError(f"names more than {ENDPOINTS_MAX} endpoints")
            found[address] = None
    return list(found)


def upstream_security(upstream: UpstreamSettings, own: ModelSettings) -> UpstreamSecurity:
    """What protects the calls of one model; raises ConfigError. A certificate and its key stay together."""
    pair = upstream if own.tls_cert is None and own.tls_key is None else own
    header_files = upstream.header_files if own.header_files is None else own.header_files
    return UpstreamSecurity(
        ca=upstream.tls_ca if own.tls_ca is None else own.tls_ca,
        cert=pair.tls_cert or "",
        key=pair.tls_key or "",
        token_file=upstream.token_file if own.token_file is None else own.token_file,
        header_files=_parse_header_files(header_files),
    )


def describe(hint: Any) -> str:
    """What a value of this type may be, in words."""
    if get_origin(hint) is Annotated:
        base, *metas = get_args(hint)
        limits = {
            name: value
            for meta in metas
            if isinstance(meta, Meta)
            for name in ("ge", "gt", "le", "min_length")
            if (value := getattr(meta, name)) is not None
        }
        return describe(base) + _describe_limits(limits)
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return describe(next(arg for arg in get_args(hint) if arg is not type(None)))
    if origin is Literal:
        *first, last = (f'"{choice}"' for choice in get_args(hint))
        return f"{', '.join(first)} or {last}"
    words = {
        str: "text",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        list: "a list of texts",
    }
    return words[origin or hint]


def dump_toml(settings: Settings) -> str:
    """The whole configuration as commented TOML that loads back to the same settings, secrets left out."""
    lines: list[str] = []
    for key in ROOT_KEYS:
        lines += _dump_key(key, getattr(settings, key.name))
    for name, cls in SECTIONS.items():
        lines += ["", f"# {summary(cls)}", f"[{name}]"]
        for key in section_keys(cls, f"{name}."):
            lines += _dump_key(key, getattr(getattr(settings, name), key.name))
    lines += ["", f"# {summary(TierSettings)}"]
    for tier in settings.tiers:
        lines += ["[[tiers]]", *(f"{k} = {_toml(v)}" for k, v in msgspec.structs.asdict(tier).items())]
    lines += ["", f"# {summary(ModelSettings)}"]
    for name, model in settings.models.items():
        lines.append(f"[models.{name if _BARE_TOML_KEY.fullmatch(name) else _toml(name)}]")
        for key in section_keys(ModelSettings, f"models.{name}."):
            value = getattr(model, key.name)
            if value is not None:
                lines += _dump_url(key, value) if key.is_url else [f"{key.name} = {_toml(value)}"]
    return "\n".join(lines) + "\n"


def summary(section: type[Section]) -> str:
    """What a section is for, in one line."""
    return (section.__doc__ or "").strip().splitlines()[0]


def _read_file(environ: Mapping[str, str], file: Path | None) -> tuple[dict[str, Any], str]:
    named = file or (Path(environ[FILE_VARIABLE]) if environ.get(FILE_VARIABLE) else None)
    path = named or DEFAULT_FILE
    try:
        with path.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        if named is None:
            return {}, str(path)
        raise ConfigError(f"{path}: there is no such configuration file") from None
    except OSError as error:
        raise ConfigError(f"{path}: the configuration file cannot be read: {error.strerror}") from None
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: the configuration file is over {FILE_BYTES_MAX} bytes")
    try:
        return tomllib.loads(content.decode()), str(path)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _from_file(tables: Mapping[str, Any], file_name: str) -> dict[str, _Given]:
    given = {}
    for name, value in tables.items():
        if name in SECTIONS:
            table = _table(value, name, file_name)
            given.update({f"{name}.{key}": _Given(v, file_name, False) for key, v in table.items()})
        else:
            given[name] = _Given(value, file_name, False)
    for path in given:
        if path not in KEYS:
            raise _unknown("key", path, file_name, [*KEYS, "tiers", "models", *SECTIONS])
    return given


def _from_environment(environ: Mapping[str, str]) -> dict[str, _Given]:
    given = {}
    for variable, text in sorted(environ.items()):
        if not variable.startswith("CARPOOL_") or variable == FILE_VARIABLE:
            continue
        if _KUBERNETES_NAME.fullmatch(variable):
            continue
        if variable.endswith("_PORT") and _KUBERNETES_PORT.match(text):
            continue
        key = VARIABLES.get(variable)
        if key is None:
            if variable.startswith(("CARPOOL_TIERS", "CARPOOL_MODELS")):
                raise ConfigError(f"{variable} (environment): `tiers` and `models` are set in the file only")
            raise _unknown("variable", variable, "environment", [*VARIABLES, FILE_VARIABLE])
        is_list = get_origin(get_args(key.hint)[0]) is list
        value = [item.strip() for item in text.split(",") if item.strip()] if is_list else text
        given[key.path] = _Given(value, f"environment {variable}", True)
    return given


def _from_flags(flags: Mapping[str, Any]) -> dict[str, _Given]:
    given = {}
    for path, value in flags.items():
        if path not in KEYS:
            raise _unknown("key", path, "flag", KEYS)
        if value is not None:
            flag = FLAGS.get(path, "").rpartition("/")[2]
            given[path] = _Given(value, f"flag {flag}".rstrip(), True)
    return given


def _build(cls: type[SectionT], prefix: str, given: Mapping[str, _Given]) -> SectionT:
    keys = {key.name: key for key in section_keys(cls, prefix)}
    return cls(**{name: _convert(keys[name], value) for name, value in given.items()})


def _build_listed(cls: type[SectionT], path: str, value: Any, file_name: str) -> SectionT:
    """An entry of `tiers` or `models`, whose keys nobody has checked yet."""
    table = _table(value, path, file_name)
    keys = section_keys(cls, f"{path}.")
    for name in table:
        if name not in {key.name for key in keys}:
            raise _unknown("key", f"{path}.{name}", file_name, [key.path for key in keys])
    for key in keys:
        if key.default is NODEFAULT and key.name not in table:
            raise ConfigError(f"{key.path} ({file_name}) is missing: it must be {describe(key.hint)}")
    return _build(cls, f"{path}.", {name: _Given(v, file_name, False) for name, v in table.items()})


def _build_tiers(value: Any, file_name: str) -> tuple[TierSettings, ...]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"tiers ({file_name}) must be at least one [[tiers]] table")
    tiers = tuple(_build_listed(TierSettings, f"tiers[{i}]", item, file_name) for i, item in enumerate(value))
    seen: set[str] = set()
    for i, tier in enumerate(tiers):
        _check_name(tier.name, f"tiers[{i}].name ({file_name})")
        if tier.name in seen:
            raise ConfigError(f"tiers[{i}].name ({file_name}): there are two tiers called {tier.name}")
        seen.add(tier.name)
    return tiers


def _build_models(value: Any, file_name: str) -> dict[str, ModelSettings]:
    models = {}
    for name, table in _table(value, "models", file_name).items():
        _check_name(name, f"models.{_shown(name)} ({file_name})")
        models[name] = _build_listed(ModelSettings, f"models.{name}", table, file_name)
    return models


def _table(value: Any, path: str, file_name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{path} ({file_name}) must be a table, not {_shown(value)}")
    return value


def _convert(key: Key, given: _Given) -> Any:
    try:
        value = msgspec.convert(given.value, key.hint, strict=not given.is_text)
    except msgspec.ValidationError:
        shown = "" if key.secret or key.path == "broker.url" else f", not {_shown(given.value)}"
        raise ConfigError(f"{key.path} ({given.source}) must be {describe(key.hint)}{shown}") from None
    for text in value if isinstance(value, list) else [value]:
        # Besides being of no use, such text could neither be printed on one line nor dumped as TOML.
        if isinstance(text, str) and not text.isprintable():
            raise ConfigError(f"{key.path} ({given.source}) must be text without control characters")
    return value


def _check_together(settings: Settings, sources: Mapping[str, str]) -> None:
    """What no single key can tell."""

    def where(path: str) -> str:
        return f"{path} ({sources[path]})" if path in sources else path

    gateway, upstream = settings.gateway, settings.upstream
    _check_name(settings.model, where("model"))
    if settings.models and settings.model not in settings.models:
        raise ConfigError(f"{where('model')} must be one of the configured: {', '.join(settings.models)}")
    _check_endpoints(upstream.endpoints, where("upstream.endpoints"))
    _check_load(upstream, upstream, "upstream.", where)
    if upstream.inputs_field == upstream.parameters_field:
        raise ConfigError(f"{where('upstream.parameters_field')} must differ from upstream.inputs_field")
    if settings.tasks.journal and not settings.tasks.data_dir:
        raise ConfigError(f"{where('tasks.data_dir')} must name a directory while tasks.journal is true")
    if gateway.admin_token and not _TOKEN.fullmatch(gateway.admin_token):
        raise ConfigError(f"{where('gateway.admin_token')} must be printable ASCII without spaces")
    if not gateway.admin_token and not _is_loopback(gateway.admin_host):
        raise ConfigError(
            f"{where('gateway.admin_host')} is not loopback: that needs gateway.admin_token "
            "(CARPOOL_GATEWAY_ADMIN_TOKEN), which callers of the admin port must then send"
        )
    if gateway.port and gateway.admin_port == gateway.port:
        raise ConfigError(f"{where('gateway.admin_port')} must differ from gateway.port")
    if gateway.port == 65535 and gateway.admin_port is None:
        raise ConfigError(f"{where('gateway.port')} leaves no port after it: give gateway.admin_port too")
    _check_batch_bytes(settings.batching.batch_bytes_max, settings.batching, where("batching.batch_bytes_max"))
    _check_proxies(gateway.trusted_proxies, where("gateway.trusted_proxies"))
    _check_tls(gateway.tls_cert, gateway.tls_key, where)
    _check_broker(settings.broker, where)
    _check_processes(settings, where)


def _check_broker(broker: BrokerSettings, where: Callable[[str], str]) -> None:
    """The way to Redis, as far as it can be told without going there."""
    _check_name(broker.namespace, where("broker.namespace"))
    if not broker.url:
        for name in ("password_file", "tls_ca", "tls_cert", "tls_key"):
            if getattr(broker, name):
                raise ConfigError(f"{where(f'broker.{name}')} is of no use without broker.url")
        if broker.persistence == "forbidden":
            says = "is about Redis, and there is no broker.url; tasks.journal = false keeps payloads off the disk"
            raise ConfigError(f"{where('broker.persistence')} {says}")
        return
    if broker.password_file:
        try:
            _read_password(broker.password_file)
        except ConfigError as error:
            raise ConfigError(f"{where('broker.password_file')} {error}") from None
    security = UpstreamSecurity(ca=broker.tls_ca, cert=broker.tls_cert, key=broker.tls_key)
    _check_pair(security.cert, security.key, lambda name: where(f"broker.{name}"))
    _check_readable(security.ca, where("broker.tls_ca"))
    try:
        broker_address(broker)
    except ConfigError as error:
        raise ConfigError(f"{where('broker.url')} {error}") from None
    if security.ca or security.cert:
        _check_context(security, lambda name: where(f"broker.{name}"))


def _read_password(path: str) -> str:
    """The one line of the password's file; what stands in place of a path may be the password: it is not shown."""
    try:
        text = read_file(path).decode().strip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"must be the path of a file with a password: {reason}") from None
    if not text or not text.isprintable():
        raise ConfigError("must be the path of a file with a password: the file must have one line")
    return text


def _check_processes(settings: Settings, where: Callable[[str], str]) -> None:
    """Several processes need a place where they meet, and a range of admin ports."""
    gateway = settings.gateway
    if gateway.processes == 1:
        return
    if not settings.broker.url:
        raise ConfigError(f"{where('gateway.processes')} above 1 needs a broker: give --broker URL (or broker.url)")
    first = admin_port(settings)
    if first and first + gateway.processes - 1 > 65535:
        raise ConfigError(f"{where('gateway.processes')} needs as many admin ports from {first} on as there are")
    if first and first <= gateway.port < first + gateway.processes:
        last = first + gateway.processes - 1
        raise ConfigError(f"{where('gateway.port')} is one of the admin ports of the processes, {first} to {last}")


def _check_batch_bytes(size: int, batching: BatchingSettings, where: str) -> None:
    if size > batching.in_flight_bytes_max:
        raise ConfigError(f"{where} must not be above batching.in_flight_bytes_max ({batching.in_flight_bytes_max})")


def _check_proxies(proxies: list[str], where: str) -> None:
    for text in proxies:
        try:
            network = parse_network(text)
        except ValueError as fault:
            hint = ": the address goes on behind the network's bits" if "host bits" in str(fault) else ""
            raise ConfigError(
                f"{where} must have addresses or networks like 10.1.2.3 or 10.0.0.0/8, not {_shown(text)}{hint}"
            ) from None
        if network.prefixlen == 0:
            raise ConfigError(f"{where} has {_shown(text)}: if everybody is a proxy, nobody is a client")


def _check_name(name: str, where: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where} must be 1 to 128 letters, digits or . _ : / -, not {_shown(name)}")


def _check_endpoints(endpoints: list[str], where: str) -> None:
    try:
        expand_endpoints(endpoints)
    except ConfigError as error:
        raise ConfigError(f"{where} {error}") from None


def _check_load(
    own: UpstreamSettings | ModelSettings, upstream: UpstreamSettings, prefix: str, where: Callable[[str], str]
) -> None:
    """How the load of endpoints is learned; what a model does not set itself was checked with `upstream`."""
    if own.load_header and not _HEADER_NAME.fullmatch(own.load_header):
        raise ConfigError(f"{where(prefix + 'load_header')} must name a header, not {_shown(own.load_header)}")
    if own.load_metrics_url and not _METRICS_PAGE.fullmatch(own.load_metrics_url):
        raise ConfigError(
            f"{where(prefix + 'load_metrics_url')} must look like /metrics, :8002/metrics or http://host:8002/metrics, "
            f"not {_shown(own.load_metrics_url)}"
        )
    if own.load_latency_ratio is not None and 0 < own.load_latency_ratio <= 1:
        raise ConfigError(f"{where(prefix + 'load_latency_ratio')} must be 0 or over 1")
    url = upstream.load_metrics_url if own.load_metrics_url is None else own.load_metrics_url
    metric = upstream.load_metric if own.load_metric is None else own.load_metric
    if bool(url) != bool(metric):
        present, absent = ("load_metrics_url", "load_metric") if url else ("load_metric", "load_metrics_url")
        raise ConfigError(f"{where(prefix + present)} needs {absent} beside it")


def _check_schemes(settings: Settings) -> None:
    """A `grpc://` endpoint is for the protocol that speaks it."""
    upstream = settings.upstream
    for name, model in settings.models.items() or [("", ModelSettings())]:
        protocol, shared = model.protocol or upstream.protocol, model.endpoints is None
        for text in upstream.endpoints if model.endpoints is None else model.endpoints:
            if text.startswith(_GRPC_ENDPOINTS) and protocol != "kserve_v2_grpc":
                where = "upstream.endpoints" if shared else f"models.{name}.endpoints"
                raise ConfigError(f"{where} has {_shown(text)}: that needs protocol kserve_v2_grpc, not {protocol}")


def _check_tls(cert: str, key: str, where: Callable[[str], str]) -> None:
    _check_pair(cert, key, lambda name: where(f"gateway.{name}"))
    if not cert:
        return
    import ssl  # here, because it is slow to import and few configurations need it

    try:
        # An encrypted key would otherwise be asked for on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: b"")
    except (ssl.SSLError, ValueError):
        raise ConfigError(
            f"{where('gateway.tls_cert')} and gateway.tls_key must be a PEM certificate and its plain key"
        ) from None


def _check_pair(cert: str, key: str, where: Callable[[str], str]) -> None:
    """A certificate and its key: both or none, and files that can be read."""
    if bool(cert) != bool(key):
        present, absent = ("tls_cert", "tls_key") if cert else ("tls_key", "tls_cert")
        raise ConfigError(f"{where(present)} needs {where(absent).partition(' ')[0]} beside it")
    for path, name in ((cert, "tls_cert"), (key, "tls_key")):
        _check_readable(path, where(name))


def _check_readable(path: str, where: str) -> None:
    try:
        if path:
            read_file(path)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {_shown(path)}: {error.strerror}") from None


def _check_all_security(settings: Settings, sources: Mapping[str, str], file_name: str) -> None:
    """The security of the calls: what all models share, and each model that has a word of its own."""
    upstream = settings.upstream

    def shared(name: str) -> str:
        path = f"upstream.{name}"
        return f"{path} ({sources[path]})" if path in sources else path

    _check_security(upstream, ModelSettings(), shared)
    endpoints = list(upstream.endpoints)
    for name, own in settings.models.items():
        _check_model_security(upstream, name, own, file_name)
        endpoints += own.endpoints or []
    _check_tls_is_used(upstream, endpoints, shared)


def _check_model_security(upstream: UpstreamSettings, name: str, own: ModelSettings, file_name: str) -> None:
    if all(getattr(own, key) is None for key in _SECURITY_KEYS):
        return

    def where(key: str) -> str:
        # What comes from [upstream] has been checked before: it is named only where the two do not go together.
        is_shared = getattr(own, key) is None and key not in ("tls_cert", "tls_key")
        return f"upstream.{key}" if is_shared else f"models.{name}.{key} ({file_name})"

    _check_security(upstream, own, where)
    _check_tls_is_used(own, upstream.endpoints if own.endpoints is None else own.endpoints, where)


def _check_security(upstream: UpstreamSettings, own: ModelSettings, where: Callable[[str], str]) -> None:
    """Read every file once, so that a fault shows now and not with the first batch."""
    try:
        security = upstream_security(upstream, own)
    except ConfigError as error:
        raise ConfigError(f"{where('header_files')} {error}") from None
    _check_pair(security.cert, security.key, where)
    _check_readable(security.ca, where("tls_ca"))
    if security.ca or security.cert:
        _check_context(security, where)
    # What stands in place of a path may be the secret itself: it is not shown.
    try:
        if security.token_file:
            read_token(security.token_file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{where('token_file')} must be the path of a file with a token: {reason}") from None
    for name, path in security.header_files:
        try:
            read_header_value(path)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"{where('header_files')}: no value for {name}: {reason}") from None
        if security.token_file and name.lower() == "authorization":
            raise ConfigError(f"{where('header_files')} sets Authorization, and so does {where('token_file')}")


def _check_context(security: UpstreamSecurity, where: Callable[[str], str]) -> None:
    try:
        UpstreamSecurity(ca=security.ca).ssl_context()
    except (OSError, ValueError):
        raise ConfigError(f"{where('tls_ca')} must be a PEM file with certificates") from None
    try:
        security.ssl_context()
    except (OSError, ValueError):
        raise ConfigError(
            f"{where('tls_cert')} and {where('tls_key')} must be a PEM certificate and its plain key"
        ) from None


def _check_tls_is_used(
    section: UpstreamSettings | ModelSettings, endpoints: list[str], where: Callable[[str], str]
) -> None:
    """Whoever sets certificates wants TLS: a plain `http://` must not pass unnoticed."""
    key = "tls_ca" if section.tls_ca else "tls_cert" if section.tls_cert else None
    if key and endpoints and all(text.startswith(_PLAIN_ENDPOINTS) for text in endpoints):
        raise ConfigError(f"{where(key)} is of no use: no endpoint starts with https:// or grpcs://")


def _parse_header_files(items: list[str]) -> tuple[tuple[str, str], ...]:
    """Names and paths. An entry that cannot be read is not shown: it may be the secret itself."""
    found: dict[str, tuple[str, str]] = {}
    for item in items:
        name, _, path = item.partition("=")
        if not path or not _HEADER_NAME.fullmatch(name):
            raise ConfigError("must have entries like X-Api-Key=/run/secrets/api-key")
        if name.lower() in _OWN_HEADERS:
            raise ConfigError(f"must not set {name}: Carpool writes it itself")
        if name.lower() in found:
            raise ConfigError(f"sets {name} twice")
        found[name.lower()] = (name, path)
    return tuple(found.values())


def _check_sim(text: str) -> list[str]:
    from carpool.upstream.simulated import parse_sim_url  # here, so that other commands start without asyncio

    try:
        parse_sim_url(text)
    except ValueError as fault:
        raise ConfigError(f"has {_shown(text)}: {fault}") from None
    return [text]


def _expand(text: str) -> list[str]:
    if text.startswith("sim:"):
        return _check_sim(text)
    return _check_unix(text) if text.startswith("unix:") else _expand_ports(text)


def _check_unix(text: str) -> list[str]:
    match = _UNIX_ENDPOINT.fullmatch(text)
    if match is None:
        raise ConfigError(f"has {_shown(text)}: a Unix socket looks like unix:/run/model.sock:/path")
    if len(match["socket"].encode()) > UNIX_SOCKET_BYTES_MAX:
        raise ConfigError(f"has {_shown(text)}: the path of a socket has at most {UNIX_SOCKET_BYTES_MAX} bytes")
    return [text]


def _expand_ports(text: str) -> list[str]:
    match = _ENDPOINT.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"has {_shown(text)}: an endpoint looks like http://host:9000/path, or with a range of ports "
            "http://host:9000-9031/path, or unix:/run/model.sock:/path, or sim:?latency_ms=50&slots=64; "
            "user names are not taken"
        )
    if match["first"] is None:
        return [text]
    first, last = int(match["first"]), int(match["last"] or match["first"])
    if not 1 <= first <= last <= 65535:
        raise ConfigError(f"has {_shown(text)}: ports go from 1 to 65535, the lower one first")
    if last - first >= ENDPOINTS_MAX:
        raise ConfigError(f"names more than {ENDPOINTS_MAX} endpoints")
    return [f"{match['head']}:{port}{match['rest'] or ''}" for port in range(first, last + 1)]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _unknown(kind: str, name: str, source: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that does not exist, with the one that was probably meant."""
    known = list(known)
    # First the same key in another section (`gateway.port` for `port`), then what is spelled alike.
    key = name.removeprefix("CARPOOL_").rpartition(".")[2]
    same_key = [other for other in known if other == key or other.endswith((f".{key}", f"_{key}"))]
    near = same_key or difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "docs/configuration.md lists them"
    written = name if name.isprintable() else ascii(name)
    return ConfigError(f"{written[:100]} ({source}) is not a known {kind}; {hint}")


def _shown(value: Any) -> str:
    """A value for an error text: on one line, not long, without a password or a query string in a URL."""
    text = _USER_INFO.sub("//***@", ascii(value))
    if not (isinstance(value, str) and value.startswith("sim:")):
        text = _QUERY.sub("?***", text)
    return text if len(text) <= 100 else text[:97] + "..."


def _describe_limits(limits: Mapping[str, Any]) -> str:
    if "min_length" in limits:
        return " that is not empty"
    low, high = limits.get("ge"), limits.get("le")
    if low is not None:
        return f" from {low} to {high}" if high is not None else f" of at least {low}"
    if "gt" in limits:
        return f" above {limits['gt']}" + (f" and at most {high}" if high is not None else "")
    return ""


def _dump_key(key: Key, value: Any) -> list[str]:
    if key.secret:
        line = f'# {key.name} = "***"' if value else f'# {key.name} = ""'
        return [f"# {key.description}; set it with {key.variable}", line]
    if key.is_url:
        return [f"# {key.description}", *_dump_url(key, value)]
    return [f"# {key.description}", f"# {key.name} =" if value is None else f"{key.name} = {_toml(value)}"]


def _dump_url(key: Key, value: Any) -> list[str]:
    """One URL or several; a comment if something had to be left out, for then it would not load back."""
    hidden = [_without_secrets(url) for url in value] if isinstance(value, list) else _without_secrets(value)
    if hidden == value:
        return [f"{key.name} = {_toml(value)}"]
    return ["# (*** stands for what may be secret)", f"# {key.name} = {_toml(hidden)}"]


def _without_secrets(url: str) -> str:
    """A valid URL without its password and its query string."""
    if url.startswith("sim:"):
        return url
    start = ""
    if url.startswith("redis"):
        scheme, _, rest = url.partition("://")
        user_info, at, url = rest.rpartition("@")
        user, colon, _ = user_info.partition(":")
        start = f"{scheme}://" + (f"{user}:***@" if colon else "***@" if at else "")
    address, _, query = url.partition("?")
    return start + address + ("?***" if query else "")


def _toml(value: Any) -> str:
    # JSON writes text, numbers, booleans and lists of these as TOML does; control characters never get here.
    return json.dumps(value, ensure_ascii=False)
