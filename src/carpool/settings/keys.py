"""The settings one by one, as the loader, the flags, the dump and the docs see them."""

import types
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Meta

from carpool.settings.schema import MODEL_SECTIONS, Attribute, Header, Section, Settings

# The settings that `carpool serve`, `gateway`, `batcher` and `config` take as flags too.
FLAGS = {
    "gateway.host": "--host",
    "gateway.port": "--port",
    "gateway.admin_host": "--admin-host",
    "gateway.admin_port": "--admin-port",
    "gateway.grpc_port": "--grpc-port",
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


class Key(NamedTuple):
    """One setting."""

    path: str
    hint: Any
    default: Any
    description: str
    is_secret: bool = False
    # It holds URLs, which may have secrets in them.
    is_url: bool = False

    @property
    def name(self) -> str:
        """The key inside its section."""
        return self.path.rpartition(".")[2]

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return "CARPOOL_" + self.path.replace(".", "_").upper()


def section_keys(section: type[Section], prefix: str) -> list[Key]:
    """The keys of one section in the order of schema.py; `prefix` is the section's path with its dot."""
    keys = []
    for field in msgspec.structs.fields(section):
        said = get_args(field.type)[1:]
        extra = {name: value for meta in said if isinstance(meta, Meta) for name, value in (meta.extra or {}).items()}
        for text in said:
            if isinstance(text, str):
                default = field.default_factory() if field.default_factory is not NODEFAULT else field.default
                keys.append(Key(prefix + field.name, field.type, default, text, **extra))
    return keys


MODEL_SUMMARY = "One model: every key of `[upstream]`, `[batching]` and `[input]`, for this model alone."


def model_keys(prefix: str) -> list[Key]:
    """The keys of a model's table."""
    return [key for section in MODEL_SECTIONS.values() for key in section_keys(section, prefix)]


# The tables of the file whose keys are fixed; `tiers` and `models` grow, and come from the file only.
SECTIONS: dict[str, type[Section]] = {
    field.name: field.type
    for field in msgspec.structs.fields(Settings)
    if isinstance(field.type, type) and issubclass(field.type, Section)
}
ROOT_KEYS = section_keys(Settings, "")
KEYS: dict[str, Key] = {
    key.path: key for key in [*ROOT_KEYS, *(k for name, cls in SECTIONS.items() for k in section_keys(cls, f"{name}."))]
}
# What OpenTelemetry's own variables say, and no key: docs/tracing.md.
OTEL_KEYS: dict[str, Key] = {
    "tracing.headers": Key("tracing.headers", list[Header], [], "", is_secret=True),
    "tracing.resource_attributes": Key("tracing.resource_attributes", list[Attribute], [], ""),
}
VARIABLES: dict[str, Key] = {key.variable: key for key in KEYS.values()}


def summary(section: type[Section]) -> str:
    """What a section is for, in one line."""
    return (section.__doc__ or "").strip().splitlines()[0]


def describe(hint: Any) -> str:
    """What a value of this type may be, in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        metas = [meta for meta in args[1:] if isinstance(meta, Meta)]
        words = next((meta.title for meta in metas if meta.title), None)
        return words or describe(args[0]) + "".join(map(_describe_limits, metas))
    if origin in (Union, types.UnionType):
        return " or ".join(describe(each) for each in args if each is not types.NoneType)
    if origin is Literal:
        *first, last = (f'"{choice}"' for choice in args)
        return f"{', '.join(first)} or {last}" if first else last
    if origin is list:
        return "a list of " + ("texts" if args[0] is str else describe(args[0]))
    return {str: "text", bool: "true or false", int: "a whole number", float: "a number"}[hint]


def _describe_limits(meta: Meta) -> str:
    if meta.min_length:
        return " that is not empty"
    if meta.ge is not None:
        return f" from {meta.ge} to {meta.le}" if meta.le is not None else f" of at least {meta.ge}"
    return "" if meta.gt is None else f" above {meta.gt} and at most {meta.le}"
