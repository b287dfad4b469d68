"""Logs on the standard `logging`: short lines for a person, or one JSON object a line for a machine.

Fields go under one name, `log.info("text", extra={"fields": {"endpoint": url}})`, so that none can clash with
an attribute of the record. A log call never raises into its caller: what cannot be written is dropped.
Bytes are shown as their count and text is cut, so that no payload slips through.
"""

import json
import logging
import math
import os
import sys
import traceback
from collections.abc import Mapping
from datetime import datetime
from typing import Any, TextIO

from carpool.core.clock import rfc3339

HANDLER = "carpool"
MESSAGE_CHARS_MAX = 2000
FIELD_CHARS_MAX = 500
FIELD_ITEMS_MAX = 50
EXCEPTION_CHARS_MAX = 8000
EXCEPTION_FRAMES_MAX = 30

_COLOURS = {"DEBUG": "\x1b[2m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[1;31m"}
_RESET = "\x1b[0m"


def configure_logging(level: str, format: str, stream: TextIO | None = sys.stderr) -> None:
    """Send the logs to `stream` as `console` or `json` lines; `auto` takes console on a terminal."""
    is_terminal = stream is not None and not stream.closed and stream.isatty()
    formatter: logging.Formatter
    if format == "console" or (format == "auto" and is_terminal):
        formatter = ConsoleFormatter(colour=is_terminal and not os.environ.get("NO_COLOR"))
    else:
        formatter = JsonFormatter()
    handler = logging.StreamHandler(stream)
    handler.name = HANDLER
    handler.setFormatter(formatter)

    root = logging.getLogger()
    for old in [each for each in root.handlers if each.name == HANDLER]:
        root.removeHandler(old)
    root.addHandler(handler)
    threshold = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger("carpool").setLevel(threshold)
    # Libraries may put what they handle into their debug and info lines: those stay out at every level.
    root.setLevel(max(threshold, logging.WARNING))
    # A full disk or a closed pipe must not fail a request; there is nowhere left to say so.
    logging.raiseExceptions = False


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ts, level, logger, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        line: dict[str, Any] = {
            "ts": rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        for name, value in _fields(record).items():
            line[name if name not in line else f"{name}_"] = value
        if exception := _exception(record):
            line["exception"] = exception
        # ASCII only: a lone surrogate in a text would otherwise fail the write.
        return json.dumps(line)


class ConsoleFormatter(logging.Formatter):
    """A short line for a person: time, level, message, fields; then the traceback, if any."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line, control characters escaped so that no text can forge another line."""
        level = f"{record.levelname.lower():<7}"
        if self._colour and record.levelname in _COLOURS:
            level = _COLOURS[record.levelname] + level + _RESET
        clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        parts = [clock, level, _one_line(_message(record))]
        for name, value in _fields(record).items():
            text = value if isinstance(value, str) else json.dumps(value)
            parts.append(f"{_one_line(name)}={_one_line(text)}")
        line = " ".join(parts)
        if exception := _exception(record):
            line += "".join(f"\n    {_one_line(each)}" for each in exception.splitlines())
        return line


def _message(record: logging.LogRecord) -> str:
    try:
        text = record.getMessage()
    except Exception as error:
        template = record.msg if isinstance(record.msg, str) else f"<{type(record.msg).__name__}>"
        text = f"{template} (arguments left out: {type(error).__name__})"
    return _cut(text, MESSAGE_CHARS_MAX)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return {name: _plain(value) for name, value in fields.items()}


def _exception(record: logging.LogRecord) -> str:
    if not record.exc_info or record.exc_info[0] is None:
        return ""
    text = "".join(traceback.format_exception(*record.exc_info, limit=-EXCEPTION_FRAMES_MAX)).rstrip()
    # The end says what happened, so the start is what goes.
    return text if len(text) <= EXCEPTION_CHARS_MAX else "…" + text[-EXCEPTION_CHARS_MAX:]


def _plain(value: Any) -> Any:
    """The value as JSON can hold it, bounded in length and count."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value[:FIELD_ITEMS_MAX]]
    return _cut(str(value), FIELD_CHARS_MAX)


def _cut(text: str, chars_max: int) -> str:
    return text if len(text) <= chars_max else text[:chars_max] + "…"


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
