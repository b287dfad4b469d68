"""Logs: what a line looks like, and that no log call can fail its caller."""

import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest

from carpool.telemetry.logs import FIELD_CHARS_MAX, SafeHandler, configure_logging

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
    def test_a_line_has_time_level_logger_message_and_fields(self) -> None:
        line = json_line("batch of %d", 3, extra={"fields": {"endpoint": "http://a", "batch_size": 3}})
        moment = datetime.fromisoformat(line.pop("ts"))
        assert abs(datetime.now(moment.tzinfo) - moment) < timedelta(minutes=1)
        assert line == {
            "level": "warning",
            "logger": "carpool.test",
            "message": "batch of 3",
            "endpoint": "http://a",
            "batch_size": 3,
        }

    def test_the_time_is_rfc_3339_in_utc(self) -> None:
        assert json_line("x")["ts"].endswith("Z")

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

    def test_exc_info_without_an_exception(self) -> None:
        assert "exception" not in json_line("fine", exc_info=True)

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
            pytest.param(1 << 20_000, "<integer of 20001 bits>", id="endless digits"),
            ("x" * 2000, "x" * FIELD_CHARS_MAX + "…"),
            ("\ud800", "\ud800"),
            ((1, {"a": b"x"}), [1, {"a": "<1 bytes>"}]),
            (ValueError("v"), "v"),
            (Unprintable(), "<Unprintable>"),
        ],
    )
    def test_any_value_can_be_a_field(self, value: object, written: object) -> None:
        assert json_line("x", extra={"fields": {"value": value}})["value"] == written

    def test_a_field_that_holds_itself(self) -> None:
        loop: list[Any] = []
        loop.append(loop)
        assert json_line("x", extra={"fields": {"loop": loop}})["message"] == "x"

    @pytest.mark.parametrize("fields", [None, 3, [1], "text"])
    def test_fields_that_are_no_mapping_are_left_out(self, fields: object) -> None:
        assert json_line("x", extra={"fields": fields}).keys() == {"ts", "level", "logger", "message"}


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

    def test_the_level_holds_and_libraries_stay_quiet(self) -> None:
        stream = io.StringIO()
        configure_logging("debug", "json", stream)
        log.debug("own")
        logging.getLogger("aiohttp.client").info("theirs")
        configure_logging("error", "json", stream)
        log.warning("too mild")
        logging.getLogger("aiohttp.client").error("serious")
        assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["own", "serious"]

    def test_configuring_again_replaces_the_first(self) -> None:
        first, second = io.StringIO(), io.StringIO()
        configure_logging("info", "json", first)
        configure_logging("info", "json", second)
        log.info("once")
        assert first.getvalue() == ""
        assert second.getvalue().count("once") == 1
        assert sum(isinstance(each, SafeHandler) for each in logging.getLogger().handlers) == 1


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

    @pytest.mark.parametrize("failure", [OSError("disk full"), ValueError("closed"), RecursionError()])
    def test_a_stream_that_fails(self, failure: Exception) -> None:
        class Broken(io.StringIO):
            def write(self, text: str) -> int:
                raise failure

            def isatty(self) -> bool:
                raise failure

        configure_logging("info", "auto", Broken())
        log.error("lost", exc_info=ValueError("x"))

    def test_an_exception_without_a_text(self) -> None:
        class Mute(Exception):
            __str__ = Unprintable.__str__

        stream = io.StringIO()
        configure_logging("info", "json", stream)
        log.error("failed", exc_info=Mute())
        assert "Mute" in json.loads(stream.getvalue())["exception"]

    def test_an_endless_chain_of_frames_is_cut(self) -> None:
        def deep(n: int) -> None:
            if n == 0:
                raise ValueError("y" * 20_000)
            deep(n - 1)

        stream = io.StringIO()
        configure_logging("info", "json", stream)
        try:
            deep(500)
        except ValueError:
            log.exception("failed")
        assert len(stream.getvalue()) < 10_000
