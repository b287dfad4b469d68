from collections import Counter
from pathlib import Path

import pytest

from carpool.tools.bench.options import TURNS, BadOption, TierLoad, parse_tiers, turns


def test_tiers_have_keys_from_files_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a:b.key"
    file.write_text("cp_first\n")
    monkeypatch.setenv("SECOND_KEY", "cp_second")
    tiers = parse_tiers(f"enterprise={file}:5, paid=env:SECOND_KEY:25.5,free=:70")
    assert tiers == [
        TierLoad("enterprise", 5, "cp_first"),
        TierLoad("paid", 25.5, "cp_second"),
        TierLoad("free", 70, ""),
    ]
    assert "cp_" not in repr(tiers)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is not NAME=KEYFILE:SHARE"),
        ("free=70", "is not NAME=KEYFILE:SHARE"),
        ("=:70", "is not NAME=KEYFILE:SHARE"),
        ("free=:none", "is not a share"),
        ("free=:0", "is not a share"),
        ("free=:inf", "is not a share"),
        ("free=:1,free=:2", "twice"),
        ("free=no-such-file:1", "cannot be read: No such file"),
        ("free=env:NO_SUCH_VARIABLE:1", "has no key in it"),
    ],
)
def test_bad_tiers_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(BadOption, match=complaint):
        parse_tiers(text)


def test_a_file_that_is_no_key_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("two words")
    with pytest.raises(BadOption) as refused:
        parse_tiers(f"free={file}:1")
    assert "two words" not in str(refused.value)


def test_each_has_its_share_of_the_turns() -> None:
    tiers = parse_tiers("a=:5,b=:25,c=:70")
    order = turns(tiers, seed=1)
    assert Counter(order) == {0: 50, 1: 250, 2: 700}
    assert order == turns(tiers, seed=1) != turns(tiers, seed=2)
    # Shares that are no whole turns are rounded, and all turns are given.
    assert len(turns(parse_tiers("a=:1,b=:1,c=:1"), seed=0)) == TURNS
