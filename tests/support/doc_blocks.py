"""The fenced blocks of README.md and docs/*.md. The words behind a fence's language say what becomes of its block:

| fence | what becomes of the block |
|---|---|
| `sh` | typed into the page's one terminal, in the order of the page |
| `sh server` | typed into a terminal of its own, where it runs until its section ends, subsections included |
| `toml` | loaded by `carpool config` |
| `toml server` | saved as carpool.toml, and `carpool serve` runs with it, as `sh server` does |
| `python` | run |
| `json` | behind `sh`: what that printed, but for ids and times, `…` standing for more; elsewhere it must be JSON |
| `yaml` | parsed; a configuration of Prometheus by promtool too, where that is installed |
| any language and a file's name | saved under that name, for the blocks behind it |
| any language and `excerpt: REASON` | nothing, for this reason |
| `text`, or no language | nothing: it is a picture, and has no command in it |
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"```(?:text$)?(?P<language>\w*) ?(?P<word>.*)")
# What begins a line of a picture by mistake.
_COMMAND = re.compile(
    r"^\s*(\$|(\S*/)?(carpool|curl|make|pip|python3?|npx|buf|envoy|redis-\w+|docker|export) )", re.MULTILINE
)
# Different in each run: ids, times, and how far something is.
_VARYING = re.compile(r"id|request_id|task_id|timestamp|queue|batch_size|\w+_ms")


class Block(NamedTuple):
    """One of them. `section` has the line of each heading above it, the page's own first."""

    page: str
    line: int
    section: tuple[int, ...]
    language: str
    word: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def excerpt(self) -> str | None:
        """Why it is not run; None if it is."""
        reason = self.word.removeprefix("excerpt:")
        return None if reason == self.word else reason.strip()

    @property
    def is_server(self) -> bool:
        """It runs beside the blocks that follow."""
        return self.word == "server"

    @property
    def file(self) -> str | None:
        """The name under which it is saved for the others."""
        return self.word if self.excerpt is None and "." in self.word else None

    @property
    def hides_a_command(self) -> bool:
        """It has no language, and yet looks like something to type."""
        return not self.language and _COMMAND.search(self.text) is not None


def pages() -> list[Path]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in found if "```" in page.read_text(encoding="utf-8")]


def blocks_of(page: Path) -> list[Block]:
    return list(_blocks(page.name, page.read_text(encoding="utf-8").splitlines()))


def _blocks(page: str, lines: list[str]) -> Iterator[Block]:
    section: tuple[int, ...] = ()
    opened: tuple[int, str, str] | None = None
    text: list[str] = []
    for number, line in enumerate(lines, 1):
        if opened is not None:
            if line.strip() == "```":
                yield Block(page, opened[0], section, opened[1], opened[2], "".join(f"{each}\n" for each in text))
                opened = None
            else:
                text.append(line)
        elif found := _FENCE.fullmatch(line):
            opened, text = (number, found["language"], found["word"].strip()), []
        elif line.startswith("#"):
            level = len(line) - len(line.lstrip("#"))
            section = (*section[: level - 1], number)
        elif "```" in line:
            raise ValueError(f"{page}:{number}: a fence begins its line")
    if opened is not None:
        raise ValueError(f"{page}:{opened[0]}: this block has no end")


def json_shown(text: str) -> list[Any]:
    """The values of a `json` block; ValueError if it is none. `…` stands for more."""
    elided = re.sub(r",\s*…\s*([}\]])", r"\1", text)
    values, rest = [], elided.strip()
    while rest:
        value, end = json.JSONDecoder().raw_decode(rest)
        values.append(value)
        rest = rest[end:].strip()
    return values


def json_printed(text: str) -> list[Any]:
    """The objects in what commands printed, among other text."""
    values, at = [], 0
    while (at := text.find("{", at)) >= 0:
        try:
            value, at = json.JSONDecoder().raw_decode(text, at)
            values.append(value)
        except ValueError:
            at += 1
    return values


def is_like(shown: Any, printed: Any) -> bool:
    """Whether what was printed has all that a page shows, but for what differs each time."""
    if isinstance(shown, dict) and isinstance(printed, dict):
        if shown.get("status") == "PENDING" and printed.get("status") == "SUCCESS":
            return True  # whoever types slowly finds it done
        return all(
            key in printed and (_VARYING.fullmatch(key) or is_like(value, printed[key])) for key, value in shown.items()
        )
    if isinstance(shown, list) and isinstance(printed, list):
        return len(shown) == len(printed) and all(map(is_like, shown, printed))
    return bool(shown == printed)
