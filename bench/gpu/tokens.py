"""Texts as the rows of ids that a model gets: padded to the longest of the batch, as most servers do."""

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

TOKENS_MAX = 512
TOKEN_BYTES = 4


class Tokens(NamedTuple):
    """A batch as the model gets it: rows of 32-bit ids, each padded to the longest; and how long each one was."""

    ids: bytes
    lengths: list[int]

    @property
    def padded(self) -> int:
        """Tokens that are computed: padding included."""
        return len(self.ids) // TOKEN_BYTES

    @property
    def real(self) -> int:
        """Tokens that were asked for."""
        return sum(self.lengths)


def tokens_of_bytes(texts: Sequence[str]) -> Tokens:
    """One token for each 4 bytes: the bytes are the id (the model takes it modulo the vocabulary)."""
    cut = [text.encode()[: TOKENS_MAX * TOKEN_BYTES] for text in texts]
    lengths = [max(1, -(-len(text) // TOKEN_BYTES)) for text in cut]
    longest = max(lengths) * TOKEN_BYTES
    return Tokens(b"".join([text.ljust(longest, b"\0") for text in cut]), lengths)


def tokens_of_rows(rows: Sequence[Sequence[int]]) -> Tokens:
    """The same from a tokenizer's ids."""
    longest = max(map(len, rows))
    padded = array("i", [token for row in rows for token in (*row, *[0] * (longest - len(row)))])
    return Tokens(padded.tobytes(), [len(row) for row in rows])


def tokenizer_of(folder: Path | None) -> Callable[[Sequence[str]], Tokens]:
    """The one in the folder, or bytes."""
    if folder is None:
        return tokens_of_bytes
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(TOKENS_MAX)
    return lambda texts: tokens_of_rows([found.ids or [0] for found in tokenizer.encode_batch(list(texts))])
