"""Logs: what a line looks like, and that no log call can fail its caller."""

import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from carpool.telemetry.logs import FIELD_CHARS_MAX, configure_logging

log = logging.getLogger("carpool.test")


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("carpool")
    before = (root.handlers[:], root.level, own.level, logging.raiseExceptions)
    yield
    root.handlers[:], root_level, own_level, logging.raiseExceptions = before
    root.setLevel(root_level)
    own.setLevel(own_level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_closed", [False, True])
def test_without_a_stream_nothing_fails(is_closed: bool) -> None:
    stream = io.StringIO() if is_closed else None
    if stream is not None:
        stream.close()
    configure_logging("info", "auto", stream)
    log.warning("nobody reads this")


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def json_line(*args: Any, **kwargs: Any) -> dict[str, Any]:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    log.warning(*args, **kwargs)
    [line] = stream.getvalue().splitlines()
    found = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert isinstance(found, dict)
    return found


def console_text(*args: Any, stream: io.StringIO | None = None, **kwargs: Any) -> str:
    stream = stream or io.StringIO()
    configure_logging("info", "console", stream)
    log.warning(*args, **kwargs)
    return stream.getvalue()


class TestJson:
    def test_a_field_never_replaces_what_every_line_has(self) -> None:
        line = json_line("real", extra={"fields": {"message": "forged"}})
        assert (line["message"], line["message_"]) == ("real", "forged")

    def test_an_exception_comes_with_its_traceback(self) -> None:
        try:
            raise ValueError("what happened")
        except ValueError:
            line = json_line("failed", exc_info=True)
        assert line["exception"].startswith("Traceback")
        assert line["exception"].endswith("ValueError: what happened")

    @pytest.mark.parametrize(
        ("value", "written"),
        [
            (b"payload", "<7 bytes>"),
            (bytearray(b"ab"), "<2 bytes>"),
            (float("nan"), "nan"),
            (float("inf"), "inf"),
            (1.5, 1.5),
            (True, True),
            (None, None),
            ("x" * 2000, "x" * FIELD_CHARS_MAX + "…"),
            ("\ud800", "\ud800"),
            ((1, b"x"), [1, "<1 bytes>"]),
            (ValueError("v"), "v"),
        ],
    )
    def test_any_value_can_be_a_field(self, value: object, written: object) -> None:
        assert json_line("x", extra={"fields": {"value": value}})["value"] == written


class TestConsole:
    def test_a_line_is_short(self) -> None:
        text = console_text("ready", extra={"fields": {"port": 8000, "host": "::"}})
        clock, rest = text.split(" ", 1)
        datetime.strptime(clock, "%H:%M:%S")
        assert rest == "warning ready port=8000 host=::\n"

    def test_no_text_can_forge_a_line(self) -> None:
        text = console_text("a\nb \x1b[31m", extra={"fields": {"c\nd": "e\rf"}})
        assert text.count("\n") == 1
        assert r"a\nb \x1b[31m c\nd=e\rf" in text

    def test_colour_is_for_terminals(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert "\x1b[" in console_text("x", stream=Terminal())
        assert "\x1b[" not in console_text("x")
        monkeypatch.setenv("NO_COLOR", "1")
        assert "\x1b[" not in console_text("x", stream=Terminal())

    def test_an_exception_is_indented_below(self) -> None:
        text = console_text("failed", exc_info=ValueError("one\ntwo"))
        assert text.splitlines()[0].endswith("failed")
        assert all(line.startswith("    ") for line in text.splitlines()[1:])
        assert "ValueError: one" in text


class TestConfiguration:
    def test_auto_is_console_on_a_terminal_and_json_elsewhere(self) -> None:
        terminal, pipe = Terminal(), io.StringIO()
        for stream in (terminal, pipe):
            configure_logging("info", "auto", stream)
            log.info("hello")
        assert terminal.getvalue().endswith("hello\n")
        assert json.loads(pipe.getvalue())["message"] == "hello"


class TestNothingRaises:
    """Without pytest's own handler, which does raise."""

    @pytest.fixture(autouse=True)
    def _only_our_handler(self) -> None:
        logging.getLogger().handlers[:] = []

    @pytest.mark.parametrize("format", ["json", "console"])
    @pytest.mark.parametrize(
        ("message", "args"),
        [
            ("%d items", ("x",)),
            ("%s", (Unprintable(),)),
            ("%s %s", (1,)),
            (Unprintable(), ()),
            ("%(a)s", ({},)),
        ],
    )
    def test_a_message_that_cannot_be_formatted_still_leaves_a_line(
        self, format: str, message: Any, args: tuple[object, ...]
    ) -> None:
        stream = io.StringIO()
        configure_logging("info", format, stream)
        log.info(message, *args)
        assert "arguments left out" in stream.getvalue()

    @pytest.mark.parametrize("failure", [OSError("disk full"), ValueError("closed")])
    def test_a_stream_that_fails(self, failure: Exception) -> None:
        class Broken(io.StringIO):
            def write(self, text: str) -> int:
                raise failure

        configure_logging("info", "auto", Broken())
        log.error("lost", exc_info=ValueError("x"))
