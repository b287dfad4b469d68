"""What inputs may be: a longest length, and what must not be found in their texts: patterns, and what `input_rules.py`
knows. Pure.

1. Both see what the model's JSON parser would see: every string of input and parameters, names in objects too, with
   its escapes undone. Of names that stand twice in an object, both are looked at. Numbers are no texts. Binary input
   towards JSON upstreams is its base64 text, which is not decoded for this; of packed tensors, names and the elements
   of BYTES are looked at, whatever bytes they are.
2. All texts of a request are one text, each on a line of its own, in their order; `^` and `$` are those of lines. A
   text that is cut up into an array is found by a pattern that allows for white space.
3. RE2 takes time in proportion to the text, whatever the pattern, and bounded memory. Its fallback for patterns that
   need more is slower, and still linear: nothing passes because memory was short.
4. A refusal names the rule, never the text.
"""

from collections.abc import Callable, Sequence

import msgspec

from carpool.admission.input_rules import make_rules
from carpool.core.errors import InputDenied, Malformed
from carpool.core.request import Request
from carpool.core.tensors import is_packed, texts_in

# For one pattern, and for all of them as one.
PATTERN_MEMORY_BYTES = 8 * 1024 * 1024
INSTALL = "pip install 'carpool[policy]'"

QUOTE = 0x22
# Stand for escaped backslashes and quotes: valid JSON has no such bytes.
BACKSLASH, ESCAPED_QUOTE = b"\0\0", b"\0\1"
_decode_strings = msgspec.json.Decoder(list[str]).decode


class BadPatternError(ValueError):
    """A pattern that cannot be used; its text is for the operator."""


class InputPolicy:
    """What the inputs of one model may be."""

    def __init__(self, bytes_max: int, patterns: Sequence[str], rules: Sequence[str] = ()) -> None:
        self._bytes_max = bytes_max
        self._rules = [*zip(rules, make_rules(rules), strict=True)]
        self._finders = compile_patterns(patterns)
        # Most requests match none: one search tells.
        self._finds_any = finder_of_any(patterns, self._finders) if patterns else None

    def check(self, request: Request) -> None:
        """Raise InputDenied for a request that this model may not get."""
        value, bytes_max = request.input, self._bytes_max
        if bytes_max and len(value) > bytes_max:
            raise InputDenied(f"an input for this model may have {bytes_max} bytes at most; this one has {len(value)}")
        if self._finds_any is None and not self._rules:
            return
        text = packed_text_of(value) if is_packed(value) else text_of(value)
        if request.parameters:
            text += b"\n" + text_of(request.parameters)
        for name, fault_in in self._rules:
            if (fault := fault_in(text)) is not None:
                raise InputDenied(f"{fault}; `deny` has {name}")
        if self._finds_any is not None and self._finds_any(text):
            for number, find in enumerate(self._finders, 1):
                if find(text):
                    raise InputDenied(f"pattern {number} of deny_patterns is found in it")


def packed_text_of(value: bytes) -> bytes:
    """The same for packed tensors; raises Malformed."""
    try:
        return b"\n".join(texts_in(value))
    except (ValueError, RecursionError):
        raise Malformed("the input's raw tensors cannot be read") from None


def text_of(value: bytes) -> bytes:
    """The strings of a JSON value that was checked before, one below the other, as UTF-8."""
    if b"\\" not in value:
        return value[1:-1] if value[0] == QUOTE else b"\n".join(value.split(b'"')[1::2])
    if value[0] == QUOTE:
        strings = value
    else:
        hidden = value.replace(b"\\\\", BACKSLASH).replace(b'\\"', ESCAPED_QUOTE)
        joined = b'","'.join(hidden.split(b'"')[1::2])
        strings = b'"' + joined.replace(ESCAPED_QUOTE, b'\\"').replace(BACKSLASH, b"\\\\") + b'"'
    return "\n".join(_decode_strings(b"[" + strings + b"]")).encode()


def compile_patterns(patterns: Sequence[str]) -> list[Callable[[bytes], bool]]:
    """One function for each pattern, which says whether it is found in a text; raises BadPatternError."""
    found = []
    for number, pattern in enumerate(patterns, 1):
        try:
            find = finder_of(pattern)
        except BadPatternError as fault:
            raise BadPatternError(f"has pattern {number}, which cannot be used: {fault}") from None
        if find(b""):
            raise BadPatternError(f"has pattern {number}, which is found in every text")
        found.append(find)
    return found


def finder_of_any(patterns: Sequence[str], finders: Sequence[Callable[[bytes], bool]]) -> Callable[[bytes], bool]:
    """A function that says whether any of these patterns is found in a text."""
    try:
        return finder_of("|".join(f"(?:{pattern})" for pattern in patterns))
    except BadPatternError:  # too large together, or groups with the same name
        return lambda text: any(find(text) for find in finders)


def finder_of(pattern: str) -> Callable[[bytes], bool]:
    """A function that says whether a pattern is found in a text; raises BadPatternError."""
    try:
        import re2
    except ImportError:
        raise BadPatternError(f"google-re2 is not installed: {INSTALL}") from None
    options = re2.Options()
    options.max_mem = PATTERN_MEMORY_BYTES
    options.log_errors = False
    options.never_capture = True
    try:
        re2.compile(pattern, options)  # by itself: what stands around it must not make it whole
        search = re2.compile(f"(?m:{pattern})", options).search
    except re2.error as fault:
        raise BadPatternError(describe(fault)) from None
    return lambda text: search(text) is not None


def describe(fault: Exception) -> str:
    """What RE2 says of a pattern."""
    said = fault.args[0] if fault.args else ""
    return said.decode(errors="replace") if isinstance(said, bytes) else str(said)
