"""The names of metrics as Prometheus has them."""

import re
from pathlib import Path

from carpool.telemetry.metrics import METRICS

SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
# Every series that a process of Carpool may show.
SHOWN = frozenset(metric.name + suffix for metric in METRICS for suffix in SUFFIXES[metric.kind])


def named_in(path: Path) -> set[str]:
    """Series of Carpool that a file speaks of; what is recorded by rules (`carpool:…`) is none."""
    return set(re.findall(r"\bcarpool_\w+", path.read_text(encoding="utf-8")))
