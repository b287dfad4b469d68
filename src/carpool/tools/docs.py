"""Writes the pages of docs/ that say what the code says: `python -m carpool.tools.docs [--check] [DIR]`."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from msgspec import NODEFAULT

from carpool.core.errors import (
    CarpoolError,
    ClientError,
    GatewayError,
    OverloadError,
    UpstreamError,
    all_errors,
)
from carpool.settings.keys import FLAGS, KEYS, ROOT_KEYS, SECTIONS, Key, describe, section_keys, summary
from carpool.settings.schema import KeySettings, ModelSettings, TierSettings
from carpool.telemetry.metrics import METRICS

_GENERATED = "<!-- Written by `make docs` from {source}; changes made here are lost. -->\n"

_FAULTS: tuple[tuple[type[CarpoolError], str], ...] = (
    (ClientError, "The client"),
    (OverloadError, "Overload"),
    (UpstreamError, "The upstream"),
    (GatewayError, "Carpool itself"),
)

_ERRORS_INTRO = """
# Errors

Every error is an `application/problem+json` object (RFC 9457). `type` is `urn:carpool:error:<code>`, with a
code of the tables below, `title` is the same for each code, and `detail` says what was wrong and what to do:

```json
{
  "type": "urn:carpool:error:unknown-model",
  "title": "No such model",
  "status": 404,
  "detail": "there is no model `lama`",
  "request_id": "0192f3c4"
}
```

The column "retry" says whether the same request may succeed later; where Carpool knows how long to wait, the
answer has `Retry-After`. The tables are sorted by who is at fault.
"""

_CONFIGURATION_INTRO = """
# Configuration

A setting comes from the first of these that has it:

1. a flag of `carpool serve`, `gateway` or `batcher` (those with one are marked below);
2. the environment variable `CARPOOL_<SECTION>_<KEY>`; lists are separated by commas;
3. the file: `--config FILE`, else the one `CARPOOL_CONFIG` names, else `carpool.toml` if there is one here;
4. the default.

What Carpool does not know is an error: one line names the key, where it came from and what is allowed, and
the exit status is 2. That holds for `CARPOOL_*` variables too; only those that Kubernetes makes for a Service
whose name starts with `carpool` are passed over. `carpool config` takes the flags of `carpool serve` and
prints the configuration in effect as TOML. Secrets are left out, and so are the passwords and query strings of URLs.
Relative paths start at the working directory. How the timeouts go together: [timeouts.md](timeouts.md).

## Example

```toml
{example}```

## Start here

Most need none but these ten; below they are marked so. [In front of your own FastAPI](quickstart-fastapi.md) uses some
of them.

"""

_METRICS_INTRO = """
# Metrics

`GET /metrics` on the admin port shows these in the text format of Prometheus, and `process_*` and `python_*` of
the process itself; in that of OpenMetrics to who accepts it, with examples that lead to traces where there are any
(`--enable-feature=exemplar-storage` lets Prometheus keep them). A histogram has the series `_bucket`, `_sum` and
`_count`. The values of labels come from the configuration and the code, never from a client.

"Shown by" says which processes have a metric: `alone` is `carpool serve` without Redis; over Redis there are
`gateways` and `batchers`, and `carpool serve --broker` is both. Those with the label `model` are there where a
process has endpoints: not at a gateway without upstreams. Counters may be summed over a fleet: each event is counted
by one process.

Alerts for Prometheus are in `deploy/prometheus`, with a page that says [what to do](runbooks.md); a dashboard for
Grafana, which `make docs` builds, in `deploy/grafana`.

"""

# Every metric is in one of these. Names are without `carpool_`.
QUESTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Are requests answered, and what becomes of the others?",
        (
            "requests",
            "problems",
            "held_requests",
            "held_bytes",
            "connections",
            "streams",
            "event_listeners",
            "grpc_calls",
        ),
    ),
    (
        "How long does an answer take, and where does the time go?",
        ("request_seconds", "stage_seconds", "queue_wait_seconds"),
    ),
    ("Who waits?", ("waiting", "queue_depth", "queue_unread", "tasks_pending")),
    ("Are batches full, or sent because somebody waited?", ("batches", "batch_fill", "batch_size")),
    (
        "Which GPU is slow, or fails?",
        (
            "upstream_latency_seconds",
            "upstream_calls",
            "endpoint_calls",
            "endpoint_state",
            "endpoint_breaker",
            "upstream_stray_answers",
        ),
    ),
    (
        "Are there enough GPUs?",
        (
            "utilization",
            "utilization_target",
            "pressure",
            "arrival_rate",
            "capacity_rps",
            "slots",
            "healthy_slots",
        ),
    ),
    ("Who is refused on admission?", ("shed", "rate_limit_asks", "rate_limit_failures")),
    ("Are Carpool's estimates right, or do they drift?", ("arrival_error_ratio", "wait_error_seconds")),
    (
        "Does somebody send bad inputs? What was given up on?",
        (
            "isolation",
            "quarantined",
            "dead_letters",
            "dead_letters_kept",
            "dead_letter_bytes",
            "dead_letters_lost",
            "dead_letters_dropped",
        ),
    ),
    ("Do webhooks reach their receivers?", ("webhooks_waiting", "webhook_attempts", "webhook_bytes")),
    ("Do kept results pay?", ("cache_lookups", "cache_entries", "cache_bytes", "broker_cache_bytes")),
    (
        "Is there room for tasks and results?",
        (
            "results_stored",
            "journal_bytes",
            "journal_fill",
            "journal_disk_free_share",
            "journal_commit_seconds",
            "journal_commit_failures",
            "task_bytes",
            "broker_memory_share",
            "broker_memory_bytes",
            "broker_disks",
        ),
    ),
    (
        "Are traces and records kept, or lost?",
        (
            "traces_kept",
            "trace_spans",
            "trace_export_failures",
            "tracking_written",
            "tracking_dropped",
            "tracking_waiting",
            "tracking_failures",
        ),
    ),
    (
        "Is the fleet whole, and does Redis keep up?",
        (
            "live_gateways",
            "live_batchers",
            "heartbeat_failures",
            "broker_mode",
            "sent_again",
            "late_outcomes",
            "entries_taken",
            "entries_claimed",
            "entries_unreadable",
            "leases_lost",
            "outcomes_unconfirmed",
            "outcome_retries",
        ),
    ),
)

# Names that other gateways give to metrics, and the metrics here.
CLASSIC: tuple[tuple[str, str], ...] = (
    ("batch_size_distribution", "`carpool_batch_size`; as a share of what may be in a batch, `carpool_batch_fill`"),
    (
        "gpu_worker_latency",
        "`carpool_upstream_latency_seconds`, by model; which endpoint: `carpool_endpoint_calls_total`, "
        "`/internal/fleet`",
    ),
    (
        "queue_depth",
        "`carpool_waiting`, by tier, alone and over Redis (there `max`, not `sum`: every process shows all); "
        "`carpool_queue_depth`: by model, what waits in one process",
    ),
    (
        "queue_wait_time",
        '`carpool_queue_wait_seconds`; of answered requests alone `carpool_stage_seconds{stage="queue"}`',
    ),
    ("request_latency", "`carpool_request_seconds`, by tier; its parts: `carpool_stage_seconds`"),
    (
        "request_count, error_rate",
        "`carpool_requests_total`, by outcome; what clients were told: `carpool_problems_total`",
    ),
    ("gpu_utilization", "`carpool_utilization`, beside `carpool_utilization_target`"),
    ("timeout_flushes", '`carpool_batches_total{reason="waited"}`'),
    ("cache_hit_ratio", "`carpool_cache_lookups_total`, by result"),
)

EXAMPLE = """\
model = "small"

[gateway]
host = "0.0.0.0"
port = 8000

[batching]
max_wait_ms = 20

[upstream]
endpoints = ["http://127.0.0.1:9000-9031/infer"]

[models.small]

[models."vendor/large:2"]
endpoints = ["http://10.0.0.7:8500/v1/models/large:predict"]
protocol = "kserve_v1"
max_batch = 8
timeout_s = 30                    # and so broker.total_timeout_s is 31
body_bytes_max = 16777216

[[tiers]]
name = "paid"
target_ms = 100

[[tiers]]
name = "free"
target_ms = 500
"""


# What most people set first; the others have defaults that last. docs/configuration.md marks them.
START_HERE = (
    "upstream.endpoints",
    "upstream.protocol",
    "upstream.inputs_field",
    "upstream.outputs_field",
    "upstream.slots",
    "upstream.timeout_s",
    "batching.max_batch",
    "batching.max_wait_ms",
    "gateway.host",
    "auth.mode",
)


def errors_page() -> str:
    """docs/errors.md."""
    parts = [_GENERATED.format(source="src/carpool/core/errors.py"), _ERRORS_INTRO]
    for root, title in _FAULTS:
        rows = [
            (
                f"`{error.code}`",
                error.status,
                f"`{error.grpc_code}`",
                "yes" if error.retryable else "no",
                error.title,
                _first_line(error),
            )
            for error in sorted(all_errors(root), key=lambda each: each.status)
        ]
        parts += [f"\n## {title}\n\n{_first_line(root)}\n\n"]
        parts += _table(("code", "HTTP", "gRPC", "retry", "title", "meaning"), rows)
    return "".join(parts)


def configuration_page() -> str:
    """docs/configuration.md."""
    parts = [
        _GENERATED.format(source="src/carpool/settings/schema.py"),
        _CONFIGURATION_INTRO.replace("{example}", EXAMPLE),
        *_table(_HEADINGS, (_setting_row(KEYS[path], path) for path in START_HERE)),
        "\n## Top level\n\n",
        *_table(_HEADINGS, map(_setting_row, ROOT_KEYS)),
    ]
    for name, section in SECTIONS.items():
        parts += [f"\n## [{name}]\n\n{summary(section)}\n\n"]
        parts += _table(_HEADINGS, map(_setting_row, section_keys(section, f"{name}.")))
    parts += [f"\n## [[tiers]]\n\n{summary(TierSettings)} By default: enterprise, paid, free. File only.\n\n"]
    parts += _table(_FILE_HEADINGS, map(_file_row, section_keys(TierSettings, "")))
    parts += [f"\n## [models.NAME]\n\n{summary(ModelSettings)} File only.\n\n"]
    parts += _table(_FILE_HEADINGS, map(_file_row, section_keys(ModelSettings, "")))
    parts += [f"\n## [keys.NAME]\n\n{summary(KeySettings)} File only.\n\n"]
    parts += _table(_FILE_HEADINGS, map(_file_row, section_keys(KeySettings, "")))
    return "".join(parts)


def metrics_page() -> str:
    """docs/metrics.md."""
    suffix = {"counter": "_total", "gauge": "", "histogram": ""}
    rows = [
        (
            f"`{metric.name}{suffix[metric.kind]}`",
            metric.kind,
            ", ".join(f"`{label}`" for label in metric.labels),
            metric.shown,
            metric.meaning,
        )
        for metric in METRICS
    ]
    return "".join(
        [
            _GENERATED.format(source="src/carpool/telemetry/metrics.py"),
            _METRICS_INTRO,
            "## Which question each answers\n\n",
            *_table(
                ("question", "metrics"),
                [(asked, ", ".join(f"`carpool_{name}`" for name in names)) for asked, names in QUESTIONS],
            ),
            "\n## By other names\n\n",
            *_table(("elsewhere", "here"), [(f"`{name}`", here) for name, here in CLASSIC]),
            "\n## All of them\n\n",
            *_table(("metric", "kind", "labels", "shown by", "meaning"), rows),
        ]
    )


def messages_page() -> str:
    """docs/inference.proto: the one in the package."""
    proto = files("carpool.core").joinpath("protos/carpool/v1/inference.proto").read_text(encoding="utf-8")
    return "// Written by `make docs` from src/carpool/core/protos; changes made here are lost.\n" + proto


PAGES = {
    "errors.md": errors_page,
    "configuration.md": configuration_page,
    "metrics.md": metrics_page,
    "inference.proto": messages_page,
}

_HEADINGS = ("key", "type", "default", "environment, flag", "meaning")
_FILE_HEADINGS = ("key", "type", "default", "meaning")


def _setting_row(key: Key, name: str = "") -> tuple[Any, ...]:
    """Of the key's own section; with a `name`, of a table over several."""
    also = f"`{key.variable}`"
    if flag := FLAGS.get(key.path):
        also += " " + " ".join(f"`{each}`" for each in flag.split("/"))
    mark = " **start here**" if key.path in START_HERE and not name else ""
    return f"`{name or key.name}`{mark}", _type_text(key), _default_text(key), also, key.description


def _file_row(key: Key) -> tuple[Any, ...]:
    return f"`{key.name}`", _type_text(key), _default_text(key), key.description


def _type_text(key: Key) -> str:
    return describe(key.hint).removeprefix("a ")


def _default_text(key: Key) -> str:
    if key.default is NODEFAULT:
        return "required"
    if key.default is None or key.default in ("", []):
        return "not set"
    if isinstance(key.default, bool):
        return f"`{str(key.default).lower()}`"
    if isinstance(key.default, float) and key.default.is_integer():
        return f"`{int(key.default)}`"
    return f"`{key.default}`"


def _first_line(documented: type) -> str:
    return (documented.__doc__ or "").strip().splitlines()[0]


def _table(headings: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> Iterator[str]:
    for row in (headings, ("---",) * len(headings), *rows):
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |\n"


def main(arguments: list[str] | None = None) -> int:
    """Write the pages, or with --check say which are out of date and return 1."""
    parser = argparse.ArgumentParser(prog="python -m carpool.tools.docs", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs"), metavar="DIR")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    options = parser.parse_args(arguments)
    stale = 0
    for name, page in PAGES.items():
        path, text = options.folder / name, page()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if options.check:
            stale = 1
            sys.stderr.write(f"{path} is out of date: run `make docs`\n")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"wrote {path}\n")
    return stale


if __name__ == "__main__":
    sys.exit(main())
