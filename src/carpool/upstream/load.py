"""What endpoints say of their load, as they write it: in a header, or as a metric on a page. Pure."""

import re
from math import isfinite
from typing import NamedTuple

_SOURCE = re.compile(
    r"((?:https?://[^\s/?#@]+|:[0-9]{1,5})?/[^\s#]*)#([A-Za-z_:][A-Za-z0-9_:]*)(?:/([0-9]{1,15}(?:\.[0-9]{1,9})?))?"
)
_HEADER = re.compile(r"[A-Za-z0-9_.-]+")


class LoadSource(NamedTuple):
    """Where the load of an endpoint is read."""

    # A path, `:PORT/PATH` on the endpoint's host, or a URL.
    where: str
    metric: str
    # The value that means full.
    full: float


def parse_load_source(text: str) -> LoadSource | None:
    """A page of metrics, and a metric on it, as `upstream.load` has them; None for a header; raises ValueError."""
    if not text or _HEADER.fullmatch(text):
        return None
    match = _SOURCE.fullmatch(text)
    if match is None or not (full := float(match[3] or 1)):
        raise ValueError(
            "must look like X-Load (a header), :8002/metrics#nv_gpu_utilization, /metrics#NAME/512 or "
            "http://host/metrics#NAME"
        )
    return LoadSource(match[1], match[2], full)


def parse_load(text: str) -> float | None:
    """A load as an endpoint writes it, `0.93`, `93` or `93%`; what is over 1 is per cent. None if it is no load."""
    number = _finite(text.strip().removesuffix("%"))
    if number is None or number < 0:
        return None
    return number / 100 if number > 1 or "%" in text else number


def metric_value(text: str, name: str) -> float | None:
    """The largest value of a metric in Prometheus's text format, over its labels; None if it is not there."""
    found = None
    for line in text.splitlines():
        rest = line.removeprefix(name)
        if len(rest) == len(line) or not rest.startswith(("{", " ", "\t")):
            continue
        # A label may contain anything, but after its last brace there are only the value and a timestamp.
        words = rest.rpartition("}")[2].split()
        value = _finite(words[0]) if words else None
        if value is not None and (found is None or value > found):
            found = value
    return found


def _finite(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None
