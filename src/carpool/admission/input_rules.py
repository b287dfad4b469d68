"""What a text may not have, whatever its words: control and invisible characters, and long repetitions. Pure.

1. `control`: characters of Unicode's category Cc but tab, line feed and carriage return.
2. `invisible`: category Cf (zero-width spaces, marks that turn the direction of writing, tags), and what else is shown
   as nothing at all: fillers, and variation selectors but the sixteen that emoji have.
3. `repeats=N`: no pattern of up to PATTERN_BYTES_MAX bytes stands more than N times in a row: a character, a word with
   its space, `<|x|>`. A pattern of k bytes that repeats so often is a run of N x k bytes that are each equal to the
   byte k after it; such a run holds a whole block of half its length, so one byte of each block tells nearly always
   that there is none. Where a block is equal, bisection finds how far the run goes. Texts that were made to have many
   such blocks are compared as a whole. So time is in proportion to the text, whatever is in it.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence

PATTERN_BYTES_MAX = 32
# Where more blocks may be equal, the text is compared as a whole: a MiB takes as long as some thousand blocks.
BLOCKS_MAX = 4096
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
    longest = min(PATTERN_BYTES_MAX, len(text) // (most + 1))
    return any(_has_run(text, length, most * length) for length in range(1, longest + 1))


def _has_run(text: bytes, length: int, run: int) -> bool:
    """Whether so many bytes in a row are each equal to the byte `length` after it."""
    step = max(1, run // 2)
    differ = _differences(text[::step], text[length::step])
    if differ.count(0) > BLOCKS_MAX:
        bits = int.from_bytes(text, "little")
        return (bits ^ bits >> 8 * length).to_bytes(len(text), "little").find(bytes(run), 0, len(text) - length) >= 0
    looked_at, block = 0, differ.find(0)
    while block >= 0:
        start = block * step
        if start >= looked_at and text[start : start + step] == text[start + length : start + length + step]:
            after, before = _equal_after(text, start, length, run), _equal_before(text, start, length, run)
            if before + after >= run:
                return True
            looked_at = start + after
        block = differ.find(0, block + 1)
    return False


def _differences(one: bytes, other: bytes) -> bytes:
    """Zeros where the two are equal, as far as the second goes."""
    size = len(other)
    return (int.from_bytes(one[:size], "little") ^ int.from_bytes(other, "little")).to_bytes(size, "little")


def _equal_after(text: bytes, start: int, length: int, most: int) -> int:
    """How many bytes from `start` on are each equal to the byte `length` after it: `most`, if it is more."""
    first, other = text[start : start + most], text[start + length : start + length + most]
    if first == other:
        return most
    return bisect_left(range(len(other)), True, key=lambda count: first[: count + 1] != other[: count + 1])


def _equal_before(text: bytes, end: int, length: int, most: int) -> int:
    """The same before `end`."""
    start = max(0, end - most)
    first, other = text[start:end], text[start + length : end + length]
    return bisect_left(
        range(end - start), True, key=lambda count: first[end - start - count - 1 :] != other[end - start - count - 1 :]
    )
