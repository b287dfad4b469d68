"""What a check of `carpool doctor` found."""

from collections.abc import Sequence
from typing import Literal

import msgspec

Level = Literal["ok", "warning", "problem"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "problem")
# The path of a setting, and its value; a tuple stands for a list.
Change = tuple[str, str | int | float | tuple[str, ...]]


class Finding(msgspec.Struct, frozen=True):
    """The result of one check."""

    check: str
    level: Level
    # What is so, and what it means.
    says: str
    # What to change; empty where nothing is.
    do: str = ""
    # The servers it was found at; empty where there is only one, or where it is about all together.
    where: tuple[str, ...] = ()
    # The settings to change, where it is known to what.
    changes: tuple[Change, ...] = ()
    # The other side's own words, cut short: for the person who asked, and for no log.
    heard: str = ""


def merged(findings: Sequence[Finding], servers: int) -> list[Finding]:
    """The same finding of several servers as one; the order stays. `where` is dropped where it says nothing."""
    places: dict[Finding, list[str]] = {}
    for finding in findings:
        bare = msgspec.structs.replace(finding, where=())
        places.setdefault(bare, []).extend(finding.where)
    return [
        msgspec.structs.replace(bare, where=tuple(where) if len(where) < servers else ())
        for bare, where in places.items()
    ]


def worst(findings: Sequence[Finding]) -> Level:
    """The gravest level among them."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")
