"""Settings as text: how they are read (flags over environment over `carpool.toml` over OpenTelemetry's variables over
defaults), and written as TOML.

1. Every fault is a `ConfigError` of one line: the key, where its value came from, and what is allowed.
2. What is not known is refused, with the nearest known name: a typing error must not pass for a default.
3. A secret's value is never shown, neither in an error nor in `dump_toml`; nor is a URL's password or query string.
"""

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin
from urllib.parse import unquote

import msgspec
from msgspec import NODEFAULT

from carpool.settings.checks import check_name, check_together
from carpool.settings.errors import ConfigError, shown, unknown
from carpool.settings.keys import (
    FLAGS,
    KEYS,
    MODEL_SUMMARY,
    OTEL_KEYS,
    ROOT_KEYS,
    SECTIONS,
    VARIABLES,
    Key,
    describe,
    model_keys,
    section_keys,
    summary,
)
from carpool.settings.resolution import admin_port, total_timeout_s
from carpool.settings.schema import KeySettings, Settings, TierSettings

DEFAULT_FILE = Path("carpool.toml")
FILE_VARIABLE = "CARPOOL_CONFIG"
# For those that call a gateway: `carpool bench`.
CLIENT_VARIABLES = frozenset({"CARPOOL_API_KEY"})
FILE_BYTES_MAX = 1024 * 1024

# Kubernetes puts such variables into every container beside a Service called `carpool` or `carpool-…`.
_KUBERNETES_NAME = re.compile(
    r"CARPOOL(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_KUBERNETES_PORT = re.compile(r"(tcp|udp|sctp)://")
_BARE_TOML_KEY = re.compile(r"[A-Za-z0-9_-]+")


class _Given(NamedTuple):
    """A value as it was written, and where."""

    value: Any
    source: str
    is_text: bool  # from a flag or a variable: numbers come as text


def load_settings(
    flags: Mapping[str, Any], *, environ: Mapping[str, str], file: Path | None, flag: str = ""
) -> Settings:
    """The settings in effect; raises ConfigError. See `models_of` for what each model has.

    `flag` is the one that sets them all, where each does not have its own.
    """
    tables, file_name = _read_file(environ, file)
    tiers, models, api_keys = tables.pop("tiers", None), tables.pop("models", {}), tables.pop("keys", {})
    given: dict[str, _Given] = {}
    own = (_from_file(tables, file_name), _from_environment(environ), _from_flags(flags, flag))
    for layer in (_from_opentelemetry(environ), *own):
        given.update(layer)

    keys = KEYS | OTEL_KEYS
    values = {path: _convert(keys[path], value) for path, value in given.items()}
    root: dict[str, Any] = {path: value for path, value in values.items() if "." not in path}
    for name, cls in SECTIONS.items():
        root[name] = cls(**{key: values[f"{name}.{key}"] for key in cls.__struct_fields__ if f"{name}.{key}" in values})
    if tiers is not None:
        root["tiers"] = _build_tiers(tiers, file_name)
    root["models"] = dict(_read_named("models", models, file_name, model_keys))
    own_keys = partial(section_keys, KeySettings)
    root["keys"] = {name: KeySettings(**said) for name, said in _read_named("keys", api_keys, file_name, own_keys)}

    if root["models"] and "model" not in root:
        root["model"] = next(iter(root["models"]))  # the first one is meant when a client names none
    settings = Settings(**root)

    def where(path: str) -> str:
        source = (
            file_name if path.startswith(("models.", "keys.", "tiers")) else given[path].source if path in given else ""
        )
        return f"{path} ({source})" if source else path

    check_together(settings, where)
    return settings


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
            raise unknown("key", path, file_name, [*KEYS, "tiers", "models", "keys", *SECTIONS])
    return given


def _from_environment(environ: Mapping[str, str]) -> dict[str, _Given]:
    given = {}
    for variable, text in sorted(environ.items()):
        if not variable.startswith("CARPOOL_") or variable == FILE_VARIABLE or variable in CLIENT_VARIABLES:
            continue
        if _KUBERNETES_NAME.fullmatch(variable):
            continue
        if variable.endswith("_PORT") and _KUBERNETES_PORT.match(text):
            continue
        key = VARIABLES.get(variable)
        if key is None:
            if variable.startswith(("CARPOOL_TIERS", "CARPOOL_MODELS", "CARPOOL_KEYS")):
                raise ConfigError(f"{variable} (environment): `tiers`, `models` and `keys` are set in the file only")
            raise unknown("variable", variable, "environment", [*VARIABLES, FILE_VARIABLE])
        is_list = get_origin(get_args(key.hint)[0]) is list
        value = [item.strip() for item in text.split(",") if item.strip()] if is_list else text
        if key.is_secret and not value:
            continue  # an empty secret was forgotten: it must not turn credentials off
        given[key.path] = _Given(value, f"environment {variable}", True)
    return given


def _from_opentelemetry(environ: Mapping[str, str]) -> dict[str, _Given]:
    """What the variables say that all programs with OpenTelemetry have in common (docs/tracing.md)."""

    def read(name: str) -> str:
        return environ.get(f"OTEL_{name}", "").strip()

    def pairs(name: str) -> list[str]:
        return [unquote(each.strip()) for each in read(name).split(",") if each.strip()]

    # The last of a name counts.
    names = [f"service.name={name}"] if (name := read("SERVICE_NAME")) else []
    said: dict[str, tuple[str, str | list[str]]] = {
        "headers": ("EXPORTER_OTLP_HEADERS", pairs("EXPORTER_OTLP_HEADERS")),
        "resource_attributes": ("RESOURCE_ATTRIBUTES", pairs("RESOURCE_ATTRIBUTES") + names),
    }
    is_off = read("SDK_DISABLED").lower() == "true" or read("TRACES_EXPORTER").lower() == "none"
    if not is_off and read("EXPORTER_OTLP_PROTOCOL") in ("", "http/protobuf"):  # of gRPC the port is another one
        said["otlp_endpoint"] = ("EXPORTER_OTLP_ENDPOINT", read("EXPORTER_OTLP_ENDPOINT"))
    return {
        f"tracing.{key}": _Given(value, f"environment OTEL_{name}", True)
        for key, (name, value) in said.items()
        if value
    }


def _from_flags(flags: Mapping[str, Any], flag: str) -> dict[str, _Given]:
    given = {}
    for path, value in flags.items():
        if path not in KEYS:
            raise unknown("key", path, f"flag {flag}".rstrip(), KEYS)
        if value is not None:
            own = flag or FLAGS.get(path, "").rpartition("/")[2]
            given[path] = _Given(value, f"flag {own}".rstrip(), True)
    return given


def _read_listed(listed: list[Key], path: str, value: Any, file_name: str) -> dict[str, Any]:
    """An entry of `tiers`, `models` or `keys`, whose keys are checked here."""
    table = _table(value, path, file_name)
    keys = {key.name: key for key in listed}
    for name in table:
        if name not in keys:
            raise unknown("key", f"{path}.{name}", file_name, [key.path for key in keys.values()])
    for key in keys.values():
        if key.default is NODEFAULT and key.name not in table:
            raise ConfigError(f"{key.path} ({file_name}) is missing: it must be {describe(key.hint)}")
    return {name: _convert(keys[name], _Given(v, file_name, False)) for name, v in table.items()}


def _build_tiers(value: Any, file_name: str) -> tuple[TierSettings, ...]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"tiers ({file_name}) must be at least one [[tiers]] table")
    tiers = tuple(
        TierSettings(**_read_listed(section_keys(TierSettings, f"tiers[{i}]."), f"tiers[{i}]", item, file_name))
        for i, item in enumerate(value)
    )
    seen: set[str] = set()
    for i, tier in enumerate(tiers):
        check_name(tier.name, f"tiers[{i}].name ({file_name})")
        if tier.name in seen:
            raise ConfigError(f"tiers[{i}].name ({file_name}): there are two tiers called {tier.name}")
        seen.add(tier.name)
    return tiers


def _read_named(
    path: str, value: Any, file_name: str, keys_at: Callable[[str], list[Key]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, table in _table(value, path, file_name).items():
        check_name(name, f"{path}.{shown(name)} ({file_name})")
        yield name, _read_listed(keys_at(f"{path}.{name}."), f"{path}.{name}", table, file_name)


def _table(value: Any, path: str, file_name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{path} ({file_name}) must be a table")  # what stands there may be a key, or a token
    return value


def _convert(key: Key, given: _Given) -> Any:
    try:
        value = msgspec.convert(given.value, key.hint, strict=not given.is_text)
    except msgspec.ValidationError:
        has_secrets = key.path in ("broker.url", "tracking.url", "tracing.otlp_endpoint", "auth.jwt_file")
        is_hidden = key.is_secret or has_secrets or key.path.startswith("keys.")
        but = "" if is_hidden else f", not {shown(given.value)}"
        raise ConfigError(f"{key.path} ({given.source}) must be {describe(key.hint)}{but}") from None
    for text in value if isinstance(value, list) else [value]:
        # Besides being of no use, such text could neither be printed on one line nor dumped as TOML.
        if isinstance(text, str) and not text.isprintable():
            raise ConfigError(f"{key.path} ({given.source}) must be text without control characters")
    return value


# And back: the configuration in effect as TOML that loads back. What may be secret is left out.


def dump_toml(settings: Settings) -> str:
    """The whole configuration as commented TOML that loads back to the same settings, secrets left out."""
    lines: list[str] = []
    # What is in effect of that which is not set.
    derived: dict[str, Any] = {
        "gateway.admin_port": admin_port(settings.gateway),
        "broker.total_timeout_s": total_timeout_s(settings),
    }
    for key in ROOT_KEYS:
        lines += _dump_key(key, getattr(settings, key.name))
    for name, cls in SECTIONS.items():
        lines += ["", f"# {summary(cls)}", f"[{name}]"]
        for key in section_keys(cls, f"{name}."):
            lines += _dump_key(key, getattr(getattr(settings, name), key.name), derived.get(key.path))
    lines += ["", f"# {summary(TierSettings)}"]
    for tier in settings.tiers:
        said = msgspec.structs.asdict(tier).items()
        lines += ["[[tiers]]", *(f"{k} = {_toml(v)}" for k, v in said if v is not None)]
    lines += ["", f"# {MODEL_SUMMARY}"]
    for name, model in settings.models.items():
        lines += _dump_named("models", name, model_keys(""), model)
    lines += ["", f"# {summary(KeySettings)}"]
    for name, api_key in settings.keys.items():
        lines += _dump_named("keys", name, section_keys(KeySettings, ""), msgspec.structs.asdict(api_key))
    return "\n".join(lines) + "\n"


def changes_toml(changes: Mapping[str, Any]) -> str:
    """Settings by their paths, each under its table."""
    tables: dict[str, list[str]] = {}
    for path, value in changes.items():
        table, _, key = path.rpartition(".")
        tables.setdefault(table, []).append(f"{key} = {_toml(value)}")
    parts = ["\n".join(tables.pop("", []))]
    for table, lines in tables.items():
        section, _, name = table.partition(".")
        parts.append("\n".join([f"[{section}.{_toml_key(name)}]" if name else f"[{section}]", *lines]))
    return "\n\n".join(filter(None, parts))


def _dump_named(table: str, name: str, keys: list[Key], said: Mapping[str, Any]) -> list[str]:
    """A table that has a name; what it leaves open is left out."""
    lines = [f"[{table}.{_toml_key(name)}]"]
    for key in keys:
        if (value := said.get(key.name)) is not None:
            lines += _dump_url(key, value) if key.is_url else [f"{key.name} = {_toml(value)}"]
    return lines


def _dump_key(key: Key, value: Any, derived: Any = None) -> list[str]:
    if key.is_secret:
        line = f'# {key.name} = "***"' if value else f'# {key.name} = ""'
        return [f"# {key.description}; set it with {key.variable}", line]
    if key.is_url:
        return [f"# {key.description}", *_dump_url(key, value)]
    if value is None:
        return [f"# {key.description}", f"# {key.name} =" + ("" if derived is None else f" {_toml(derived)}")]
    return [f"# {key.description}", f"{key.name} = {_toml(value)}"]


def _dump_url(key: Key, value: Any) -> list[str]:
    """One URL or several; a comment if something had to be left out, for then it would not load back."""
    hidden = [without_secrets(url) for url in value] if isinstance(value, list) else without_secrets(value)
    if hidden == value:
        return [f"{key.name} = {_toml(value)}"]
    return ["# (*** stands for what may be secret)", f"# {key.name} = {_toml(hidden)}"]


def without_secrets(url: str) -> str:
    """A valid URL without its password and its query string."""
    if url.startswith("sim:"):
        return url
    start = ""
    if url.startswith(("redis", "postgres")):
        scheme, _, rest = url.partition("://")
        user_info, at, url = rest.rpartition("@")
        user, colon, _ = user_info.partition(":")
        start = f"{scheme}://" + (f"{user}:***@" if colon else "***@" if at else "")
    address, _, query = url.partition("?")
    return start + address + ("?***" if query else "")


def _toml_key(name: str) -> str:
    return name if _BARE_TOML_KEY.fullmatch(name) else _toml(name)


def _toml(value: Any) -> str:
    # JSON writes text, numbers, booleans and lists of these as TOML does; control characters never get here.
    return json.dumps(value, ensure_ascii=False)
