"""What a text may not have, whatever its words: control and invisible characters, and long repetitions. Pure.

1. `control`: characters of Unicode's category Cc but tab, line feed and carriage return.
2. `invisible`: category Cf (zero-width spaces, marks that turn the direction of writing, tags), and what else is shown
   as nothing at all: fillers, and variation selectors but the sixteen that emoji have.
3. `repeats=N`: no pattern of up to PATTERN_BYTES_MAX bytes stands more than N times in a row: a character, a word with
   its space, `<|x|>`. Time is in proportion to the text, whatever is in it: a pattern of k bytes that repeats so often
   is a run of N x k bytes that are each equal to the byte k after it; such a run holds a whole block of half its
   length, so one byte of each block tells nearly always that there is none, and where a block is equal the bytes
   around it are looked at once.
"""

import re
from collections.abc import Callable, Sequence

PATTERN_BYTES_MAX = 32
_CONTROL = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_INVISIBLE = re.compile(
    # Cf of Unicode 15.
    "[\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff"
    "\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    # A joiner, fillers, vowels of no width, selectors of Mongolian, a blank of Braille; tags and further selectors.
    "\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\uffa0\U000e0000-\U000e0fff]"
)

# Says what a text has that it may not have; None if there is nothing.
Rule = Callable[[bytes], str | None]


def make_rules(names: Sequence[str]) -> list[Rule]:
    """The rules of `input.deny`, by their names there."""
    return [_rule_of(name) for name in names]


def _rule_of(name: str) -> Rule:
    if name == "control":
        return lambda text: "it has a control character" if _CONTROL.search(_read(text)) else None
    if name == "invisible":
        return lambda text: (
            "it has an invisible character" if not text.isascii() and _INVISIBLE.search(_read(text)) else None
        )
    most = int(name.removeprefix("repeats="))
    said = f"a character, a word or a short pattern stands there more than {most} times in a row"
    return lambda text: said if repeats(text, most) else None


def _read(text: bytes) -> str:
    return text.decode(errors="replace")  # elements of BYTES may be any bytes


def repeats(text: bytes, most: int) -> bool:
    """Whether a short pattern stands in a text more than so many times in a row (rule 3)."""
    for length in range(1, min(PATTERN_BYTES_MAX, len(text) // (most + 1)) + 1):
        run = most * length
        step = max(1, run // 2)
        for block, (one, other) in enumerate(zip(text[::step], text[length::step], strict=False)):
            if one == other:
                at = block * step
                is_equal = text[at : at + step] == text[at + length : at + length + step]
                if is_equal and _has_run(text[max(0, at - run) : at + step + run + length], length, run):
                    return True
    return False


def _has_run(text: bytes, length: int, run: int) -> bool:
    """Whether so many bytes in a row are each equal to the byte `length` after it."""
    bits = int.from_bytes(text, "little")
    differences = (bits ^ (bits >> 8 * length)).to_bytes(len(text), "little")
    return differences.find(bytes(run), 0, len(text) - length) >= 0
