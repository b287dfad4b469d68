"""What a check of `carpool doctor` found."""

from typing import Literal

import msgspec

Level = Literal["ok", "warning", "problem"]
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
