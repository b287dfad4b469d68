"""What is wrong with a configuration, in one line that shows no secret."""

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_USER_INFO = re.compile(r"//\S*@")
# Keys that are gone, and what to do in their place.
_OTEL = "OTEL_{}, the variable that all programs with OpenTelemetry have in common, says it (docs/tracing.md)"
_TENSOR = 'write tensor = "NAME DATATYPE SHAPE", like "image FP32 1,3,224,224" (docs/kserve.md)'
_LOAD = 'write load = "NAME-OF-A-HEADER", or load = "/metrics#NAME" (docs/upstreams.md)'
_GONE = {
    "tracing.headers": _OTEL.format("EXPORTER_OTLP_HEADERS"),
    "tracing.resource_attributes": _OTEL.format("RESOURCE_ATTRIBUTES"),
    **dict.fromkeys(("upstream.tensor_name", "upstream.tensor_datatype", "upstream.tensor_shape"), _TENSOR),
    **dict.fromkeys(("upstream.load_header", "upstream.load_metrics_url"), _LOAD),
}
_QUERY = re.compile(r"\?[^\s'\",\]]+")


class ConfigError(Exception):
    """The configuration cannot be used; the text is one line for the person who wrote it."""


@contextmanager
def faults_at(place: str) -> Iterator[None]:
    """Make a ConfigError of whatever is wrong with a value or a file; its text begins with the place of the setting."""
    try:
        yield
    except (ConfigError, OSError, ValueError) as fault:
        # The path in the text of an OSError is not shown: what stands in its place may be the secret itself.
        raise ConfigError(f"{place} {fault.strerror if isinstance(fault, OSError) else fault}") from None


def unknown(kind: str, name: str, source: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that does not exist, with the name that was probably meant."""
    for gone, instead in _GONE.items():
        is_models = name.startswith("models.") and name.rpartition(".")[2] == gone.removeprefix("upstream.")
        if is_models or name in (gone, "CARPOOL_" + gone.replace(".", "_").upper()):
            return ConfigError(f"{shown(name)[1:-1]} ({source}) is gone: {instead}")
    known = list(known)
    # First what is spelled alike in the same section, then the same key in another one (`gateway.port` for `port`),
    # then what is spelled alike anywhere.
    section, dot, key = name.removeprefix("CARPOOL_").rpartition(".")
    own_keys = [other[len(section) + 1 :] for other in known if dot and other.startswith(f"{section}.")]
    near = [f"{section}.{other}" for other in difflib.get_close_matches(key, own_keys, n=1, cutoff=0.85)]
    near = near or [other for other in known if other == key or other.endswith((f".{key}", f"_{key}"))]
    near = near or difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "docs/configuration.md lists them"
    written = name if name.isprintable() else ascii(name)
    return ConfigError(f"{written[:100]} ({source}) is not a known {kind}; {hint}")


def shown(value: Any) -> str:
    """A value for an error text: on one line, not long, without a password or a query string in a URL."""
    text = _USER_INFO.sub("//***@", ascii(value))
    if not (isinstance(value, str) and value.startswith("sim:")):
        text = _QUERY.sub("?***", text)
    return text if len(text) <= 100 else text[:97] + "..."
