"""What the GPU's benchmark sends and what its server makes of it: padding, sizes, batches."""

import sys
from array import array
from itertools import chain, islice
from pathlib import Path
from random import Random

from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "bench" / "gpu"))

from clients import batches_of, sizes_of
from tokens import TOKEN_BYTES, TOKENS_MAX, tokens_of_bytes, tokens_of_rows

texts = st.lists(st.text(max_size=40) | st.integers(2000, 2100).map("é".__mul__), min_size=1, max_size=64)


@given(texts)
def test_a_text_is_padded_to_the_longest_and_cut_at_the_most(batch: list[str]) -> None:
    tokens = tokens_of_bytes(batch)
    longest = max(tokens.lengths)
    assert longest <= TOKENS_MAX
    assert tokens.padded == longest * len(batch)
    assert tokens.real == sum(tokens.lengths) <= tokens.padded
    for number, (text, length) in enumerate(zip(batch, tokens.lengths, strict=True)):
        row = tokens.ids[number * longest * TOKEN_BYTES :][: longest * TOKEN_BYTES]
        kept = text.encode()[: TOKENS_MAX * TOKEN_BYTES]
        # Every 4 bytes are a token, what is left over is one more, and nothing is one.
        assert length == max(1, (len(kept) + TOKEN_BYTES - 1) // TOKEN_BYTES)
        assert row == kept + bytes(len(row) - len(kept))


@given(st.lists(st.lists(st.integers(0, 30_521), min_size=1, max_size=20), min_size=1, max_size=8))
def test_a_tokenizers_rows_are_padded_the_same_way(rows: list[list[int]]) -> None:
    tokens = tokens_of_rows(rows)
    assert tokens.lengths == [len(row) for row in rows]
    longest = max(tokens.lengths)
    ids = array("i", tokens.ids).tolist()
    assert [ids[start : start + longest] for start in range(0, len(ids), longest)] == [
        row + [0] * (longest - len(row)) for row in rows
    ]


@given(st.integers(0, 2**32))
def test_sizes_are_lognormal_and_cut(seed: int) -> None:
    drawn = sorted(islice(sizes_of("lognormal:240,0.875,2048", Random(seed)), 2001))
    assert drawn[-1] == 2048
    # The standard error of this median is 2.5 %.
    assert 0.8 * 240 < drawn[1000] < 1.25 * 240


def test_a_number_is_every_size() -> None:
    assert list(islice(sizes_of("2000", Random(0)), 3)) == [2000] * 3


@given(st.integers(0, 2**32))
def test_sorted_batches_have_the_same_texts_and_less_padding(seed: int) -> None:
    def first(sort_among: int) -> list[list[int]]:
        return list(islice(batches_of(sizes_of("lognormal:240,0.875,2048", Random(seed)), 64, sort_among), 16))

    as_they_come, by_size = first(0), first(1024)
    assert {len(batch) for batch in as_they_come + by_size} == {64}
    assert sorted(chain.from_iterable(as_they_come)) == sorted(chain.from_iterable(by_size))
    assert sum(max(batch) for batch in by_size) < sum(max(batch) for batch in as_they_come)
