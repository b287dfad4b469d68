"""Writes the dashboard for Grafana: `python -m carpool.tools.dashboard [--check] [FILE]`.

A panel is a question; its title says which. Every query is tried on a real Prometheus that looks at a loaded Carpool,
in one process and over Redis (`make eyes`): no panel is empty, and no part of one is empty in both.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

FILE = Path("deploy/grafana/carpool.json")
# What every query looks at. Grafana fills in both.
SCOPE = '{job=~"$job"}'
WINDOW = "[$__rate_interval]"
COLUMNS, WIDTH, HEIGHT = 24, 8, 8
SOURCE = {"type": "prometheus", "uid": "${source}"}

Unit = Literal["reqps", "ops", "s", "percentunit", "short", "bytes", "none"]


class Line(NamedTuple):
    """One query of a panel, and the name of what it shows."""

    query: str
    legend: str


class Panel(NamedTuple):
    """One picture."""

    title: str
    meaning: str
    unit: Unit
    lines: tuple[Line, ...]
    is_stacked: bool = False


def total(metric: str, by: str = "") -> str:
    """How many a second."""
    return f"sum{_by(by)}(rate({metric}_total{SCOPE}{WINDOW}))"


def mean(metric: str, by: str) -> str:
    """The mean of a histogram."""
    parts = [f"sum{_by(by)}(rate({metric}_{part}{SCOPE}{WINDOW}))" for part in ("sum", "count")]
    return " / ".join(parts)


def quantile(share: float, metric: str, by: str) -> str:
    """A quantile of a histogram."""
    return f"histogram_quantile({share}, sum{_by(f'le, {by}')}(rate({metric}_bucket{SCOPE}{WINDOW})))"


def gauge(metric: str, by: str, how: str = "sum") -> str:
    """A number of this moment over all processes."""
    return f"{how}{_by(by)}({metric}{SCOPE})"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else " "


def both_quantiles(metric: str, by: str) -> tuple[Line, ...]:
    """Median and 99 %."""
    return tuple(
        Line(quantile(share, metric, by), f"{name} {{{{{by}}}}}") for share, name in ((0.5, "p50"), (0.99, "p99"))
    )


ROWS: dict[str, tuple[Panel, ...]] = {
    "Requests": (
        Panel(
            "Requests by outcome",
            "How much is done, and how it ends.",
            "reqps",
            (Line(total("carpool_requests", "outcome"), "{{outcome}}"),),
            is_stacked=True,
        ),
        Panel(
            "Errors by code",
            "What clients are told when it is not their output; docs/errors.md says what each means.",
            "reqps",
            (Line(total("carpool_problems", "code"), "{{code}}"),),
            is_stacked=True,
        ),
        Panel(
            "Seconds by tier",
            "Does each tier have the latency that it was promised?",
            "s",
            both_quantiles("carpool_request_seconds", "tier"),
        ),
        Panel(
            "Where the time goes",
            "The mean of each stage: together they are the time of a request.",
            "s",
            (Line(mean("carpool_stage_seconds", "stage"), "{{stage}}"),),
            is_stacked=True,
        ),
        Panel(
            "Slowest by stage",
            "Which stage makes the slowest slow?",
            "s",
            (Line(quantile(0.99, "carpool_stage_seconds", "stage"), "p99 {{stage}}"),),
        ),
        Panel(
            "Objectives",
            "The share of answers that were slow, and that failed, over five minutes: by the rules that are shipped.",
            "percentunit",
            (
                Line(f"carpool:slow:ratio_rate5m{SCOPE}", "slow"),
                Line(f"carpool:failed:ratio_rate5m{SCOPE}", "failed"),
            ),
        ),
    ),
    "Batches": (
        Panel(
            "Batches by reason",
            "Are they full, or sent because somebody waited long enough?",
            "ops",
            (Line(total("carpool_batches", "reason"), "{{reason}}"),),
            is_stacked=True,
        ),
        Panel(
            "How full batches are",
            "The mean by model, and by why they left; 100 % is full.",
            "percentunit",
            (
                Line(mean("carpool_batch_fill", "model"), "{{model}}"),
                Line(mean("carpool_batch_fill", "reason"), "{{reason}}"),
            ),
        ),
        Panel(
            "Requests in a batch",
            "batch_size_distribution",
            "short",
            (
                Line(mean("carpool_batch_size", "model"), "mean {{model}}"),
                *both_quantiles("carpool_batch_size", "model"),
            ),
        ),
        Panel(
            "Utilisation and its target",
            "Do the GPUs do what they should?",
            "percentunit",
            (
                Line(gauge("carpool_utilization", "model", "max"), "{{model}}"),
                Line(gauge("carpool_utilization_target", "", "max"), "target"),
            ),
        ),
        Panel(
            "Slots",
            "Busy and free; those of endpoints that do not work are neither.",
            "short",
            (Line(gauge("carpool_slots", "state"), "{{state}}"),),
            is_stacked=True,
        ),
        Panel(
            "Arrivals and capacity",
            "How far is it to the limit?",
            "reqps",
            (
                Line(gauge("carpool_arrival_rate", "model"), "arrivals {{model}}"),
                Line(gauge("carpool_capacity_rps", "model"), "capacity {{model}}"),
            ),
        ),
    ),
    "Queue": (
        Panel(
            "Waiting by tier",
            "queue_depth: who waits for a slot.",
            "short",
            (Line(gauge("carpool_waiting", "tier", "max"), "{{tier}}"),),
            is_stacked=True,
        ),
        Panel(
            "Shed by tier",
            "Requests refused on admission, because they would wait too long.",
            "reqps",
            (Line(total("carpool_shed", "tier"), "{{tier}}"),),
            is_stacked=True,
        ),
        Panel(
            "Pressure",
            "What comes by what should at most; 100 % is the target.",
            "percentunit",
            (Line(gauge("carpool_pressure", "model", "max"), "{{model}}"),),
        ),
        Panel(
            "Held",
            "Requests without an outcome, and connections.",
            "short",
            (
                Line(gauge("carpool_held_requests", ""), "requests"),
                Line(gauge("carpool_connections", ""), "connections"),
            ),
        ),
        Panel(
            "Is the arrival estimate right?",
            "How far it is off, as a share: nine of ten are better than this.",
            "percentunit",
            (Line(quantile(0.9, "carpool_arrival_error_ratio", "direction"), "{{direction}}"),),
        ),
        Panel(
            "Is the predicted wait right?",
            "How far the load shedder's prediction is off: nine of ten are better than this.",
            "s",
            (Line(quantile(0.9, "carpool_wait_error_seconds", "direction"), "{{direction}}"),),
        ),
    ),
    "Upstream": (
        Panel(
            "Seconds of a call",
            "gpu_worker_latency",
            "s",
            both_quantiles("carpool_upstream_latency_seconds", "model"),
        ),
        Panel(
            "Calls by result",
            "What became of them.",
            "ops",
            (Line(total("carpool_upstream_calls", "result"), "{{result}}"),),
            is_stacked=True,
        ),
        Panel(
            "Endpoints by state",
            "How many work.",
            "short",
            (Line(gauge("carpool_endpoint_state", "state"), "{{state}}"),),
            is_stacked=True,
        ),
        Panel(
            "Breakers",
            "By endpoint: 0 closed, 1 half-open, 2 open.",
            "none",
            (Line(gauge("carpool_endpoint_breaker", "endpoint", "max"), "{{endpoint}}"),),
        ),
        Panel(
            "Calls by endpoint",
            "Which GPU is slow, or fails?",
            "ops",
            (Line(total("carpool_endpoint_calls", "endpoint, result"), "{{endpoint}} {{result}}"),),
        ),
        Panel(
            "Refused batches",
            "Searches for bad inputs, and quarantined owners.",
            "ops",
            (
                Line(total("carpool_isolation", "what"), "{{what}}"),
                Line(gauge("carpool_quarantined", "", "max"), "quarantined owners"),
            ),
        ),
    ),
    "What is kept": (
        Panel(
            "Dead letters",
            "New ones by cause, in ten minutes, and those that wait for a person.",
            "short",
            (
                Line(f"sum by (cause) (increase(carpool_dead_letters_total{SCOPE}[10m]))", "{{cause}}"),
                Line(gauge("carpool_dead_letters_kept", "", "max"), "kept"),
            ),
        ),
        Panel(
            "Bytes",
            "What fills the journal, or Redis.",
            "bytes",
            (
                Line(gauge("carpool_journal_bytes", ""), "journal"),
                Line(gauge("carpool_task_bytes", "", "max"), "tasks in Redis"),
                Line(gauge("carpool_dead_letter_bytes", "", "max"), "dead letters"),
                Line(gauge("carpool_cache_bytes", ""), "kept results"),
            ),
        ),
        Panel(
            "How full",
            "The journal, its disk and Redis.",
            "percentunit",
            (
                Line(gauge("carpool_journal_fill", "", "max"), "journal"),
                Line(f"1 - {gauge('carpool_journal_disk_free_share', '', 'min')}", "its disk"),
                Line(gauge("carpool_broker_memory_share", "", "max"), "Redis"),
            ),
        ),
    ),
    "Processes": (
        Panel(
            "Who lives",
            "Processes that answer, and what Redis knows of.",
            "short",
            (
                Line(f"sum(up{SCOPE})", "processes"),
                Line(gauge("carpool_live_gateways", "", "max"), "gateways"),
                Line(gauge("carpool_live_batchers", "", "max"), "batchers"),
            ),
        ),
        Panel(
            "CPU",
            "1 is a whole core; a process uses one at most.",
            "short",
            (Line(f"sum by (instance) (rate(process_cpu_seconds_total{SCOPE}{WINDOW}))", "{{instance}}"),),
        ),
        Panel(
            "Memory",
            "Of each process.",
            "bytes",
            (Line(f"sum by (instance) (process_resident_memory_bytes{SCOPE})", "{{instance}}"),),
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """As Grafana imports it."""
    return {
        "uid": "carpool",
        "title": "Carpool",
        "tags": ["carpool"],
        "schemaVersion": 38,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": list(_variables())},
        "panels": list(_panels()),
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    query = "label_values(carpool_requests_total, job)"
    yield {
        "name": "job",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "job"},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "allValue": ".+",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 1, 0
    for title, panels in ROWS.items():
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        number, top = number + 1, top + 1
        for index, panel in enumerate(panels):
            row, column = divmod(index, COLUMNS // WIDTH)
            place = {"x": column * WIDTH, "y": top + row * HEIGHT, "w": WIDTH, "h": HEIGHT}
            yield {"id": number, "gridPos": place, **_picture(panel)}
            number += 1
        top += HEIGHT * -(-len(panels) // (COLUMNS // WIDTH))


def _picture(panel: Panel) -> dict[str, Any]:
    drawn: dict[str, Any] = {"showPoints": "never", "fillOpacity": 10}
    if panel.is_stacked:
        drawn |= {"fillOpacity": 30, "stacking": {"mode": "normal", "group": "A"}}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.meaning,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": drawn}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": line.query, "legendFormat": line.legend, "datasource": SOURCE}
            for index, line in enumerate(panel.lines)
        ],
    }


def main(arguments: list[str] | None = None) -> int:
    """Write the file, or with --check say that it is out of date and return 1."""
    parser = argparse.ArgumentParser(prog="python -m carpool.tools.dashboard", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=FILE, metavar="FILE")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file is out of date")
    options = parser.parse_args(arguments)
    path, text = options.file, json.dumps(dashboard(), indent=1) + "\n"
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return 0
    if options.check:
        sys.stderr.write(f"{path} is out of date: run `make docs`\n")
        return 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    sys.stdout.write(f"wrote {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
