"""Load of several tiers: which share of the requests each has, and the API key that they carry.

A key is never on the command line, where `ps` shows it: it is in a file, or in the environment.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec

from carpool.tools.bench.schedule import BadOption

TIERS_HELP = (
    "Requests of several tiers, NAME=KEYFILE:SHARE each: NAME for the report, a file with the API key to send "
    "(env:VARIABLE: from the environment; nothing: no key), the share of the requests. "
    "Example: enterprise=ent.key:5,paid=paid.key:25,free=env:FREE_KEY:70"
)
FROM_ENVIRONMENT = "env:"
# Turns in which requests of the tiers come: shares are exact to a thousandth.
TURNS = 1000


class TierLoad(msgspec.Struct, frozen=True):
    """One tier of the load."""

    name: str
    share: float
    key: str

    def __repr__(self) -> str:
        """Without the key."""
        return f"TierLoad({self.name!r}, {self.share:g})"


def parse_tiers(text: str) -> list[TierLoad]:
    """The tiers in the syntax of TIERS_HELP, with their keys."""
    tiers = [_parse_tier(part.strip()) for part in text.split(",")]
    if len({tier.name for tier in tiers}) < len(tiers):
        raise BadOption("a tier is named twice")
    return tiers


def _parse_tier(part: str) -> TierLoad:
    name, equals, rest = part.partition("=")
    source, colon, share_text = rest.rpartition(":")
    if not name or not equals or not colon:
        raise BadOption(f"{part!r} is not NAME=KEYFILE:SHARE")
    try:
        share = float(share_text)
    except ValueError:
        share = 0.0
    if not 0 < share < float("inf"):
        raise BadOption(f"{share_text!r} is not a share above 0")
    return TierLoad(name, share, read_key(source))


def read_key(source: str) -> str:
    """The key in a file, or behind `env:` in a variable; "" without a source."""
    if not source:
        return ""
    if source.startswith(FROM_ENVIRONMENT):
        variable = source.removeprefix(FROM_ENVIRONMENT)
        key = os.environ.get(variable, "")
        where = f"environment variable {variable!r}"
    else:
        where = f"file {source!r}"
        try:
            key = Path(source).read_text().strip()
        except (OSError, UnicodeDecodeError) as fault:
            raise BadOption(f"{where} cannot be read: {getattr(fault, 'strerror', 'not text')}") from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise BadOption(f"{where} has no key in it")
    return key


def turns(tiers: Sequence[TierLoad], seed: int) -> list[int]:
    """Whose turn it is: places in `tiers`, each as often as its share says, in an order without a pattern."""
    total = sum(tier.share for tier in tiers)
    order: list[int] = []
    share = 0.0
    for place, tier in enumerate(tiers):
        share += tier.share / total
        order += [place] * (round(share * TURNS) - len(order))
    Random(seed).shuffle(order)
    return order
