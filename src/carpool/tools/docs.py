"""Writes what the pages of docs/ have from the code: `python -m carpool.tools.docs`.

A page is written by hand up to a mark; what follows that is written here.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
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
from carpool.settings.keys import FLAGS, KEYS, MODEL_SUMMARY, ROOT_KEYS, SECTIONS, Key, describe, section_keys, summary
from carpool.settings.schema import KeySettings, TierSettings
from carpool.telemetry.metrics import METRICS

MARK = "<!-- `make docs` writes what follows; changes made below are lost. -->\n"

_FAULTS: tuple[tuple[type[CarpoolError], str], ...] = (
    (ClientError, "The client"),
    (OverloadError, "Overload"),
    (UpstreamError, "The upstream"),
    (GatewayError, "Carpool itself"),
)

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


def errors_tables() -> str:
    """Every error, by who is at fault."""
    parts: list[str] = []
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


def settings_tables() -> str:
    """The settings to start with, then every setting by section."""
    parts = [
        "\n",
        *_table(_HEADINGS, (_setting_row(KEYS[path], path) for path in START_HERE)),
        "\n## Top level\n\n",
        *_table(_HEADINGS, map(_setting_row, ROOT_KEYS)),
    ]
    for name, section in SECTIONS.items():
        parts += [f"\n## [{name}]\n\n{summary(section)}\n\n"]
        parts += _table(_HEADINGS, map(_setting_row, section_keys(section, f"{name}.")))
    parts += [f"\n## [[tiers]]\n\n{summary(TierSettings)} By default: enterprise, paid, free. File only.\n\n"]
    parts += _table(_FILE_HEADINGS, map(_file_row, section_keys(TierSettings, "")))
    parts += [f"\n## [models.NAME]\n\n{MODEL_SUMMARY} What is not set here comes from the sections. File only.\n"]
    parts += [f"\n## [keys.NAME]\n\n{summary(KeySettings)} File only.\n\n"]
    parts += _table(_FILE_HEADINGS, map(_file_row, section_keys(KeySettings, "")))
    return "".join(parts)


def metrics_table() -> str:
    """Every metric."""
    rows = [
        (
            f"`{metric.name}{'_total' if metric.kind == 'counter' else ''}`",
            metric.kind,
            ", ".join(f"`{label}`" for label in metric.labels),
            metric.shown,
            metric.meaning,
        )
        for metric in METRICS
    ]
    return "".join(
        ["\n## All of them\n\n", *_table(("metric", "kind", "labels", "shown by", "meaning"), rows)],
    )


def messages_page(_: str) -> str:
    """docs/inference.proto: the one in the package."""
    proto = files("carpool.core").joinpath("protos/carpool/v1/inference.proto").read_text(encoding="utf-8")
    return "// Written by `make docs` from src/carpool/core/protos; changes made here are lost.\n" + proto


def _behind_the_mark(tables: Callable[[], str]) -> Callable[[str], str]:
    return lambda page: page.partition(MARK)[0] + MARK + tables()


# What a page should be, made of what it is.
PAGES: dict[str, Callable[[str], str]] = {
    "errors.md": _behind_the_mark(errors_tables),
    "configuration.md": _behind_the_mark(settings_tables),
    "metrics.md": _behind_the_mark(metrics_table),
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


def write_pages(folder: Path) -> None:
    """Write the pages that are out of date."""
    for name, written in PAGES.items():
        path = folder / name
        page = path.read_text(encoding="utf-8")
        if page != (text := written(page)):
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"wrote {path}\n")


if __name__ == "__main__":
    write_pages(Path("docs"))
