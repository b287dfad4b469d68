"""Every fenced command and configuration of README.md and docs/*.md does what its page says.

`support/doc_blocks.py` says what the words behind a fence mean, `support/doc_page.py` runs a page; by hand:
`PYTHONPATH=src:tests python -m support.doc_page docs/client.md EMPTY_DIRECTORY`, where the page's ports are free.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.doc_blocks import ROOT, Block, blocks_of, pages
from support.processes import CLEAN_ENVIRONMENT, PATIENCE_S

EXCERPTS_MAX = 10
UNSHARE = ["unshare", "--map-root-user", "--net", "--pid", "--mount-proc", "--fork", "--kill-child"]
IS_ISOLATED = (
    shutil.which("unshare") is not None
    and subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0
)
# Pages use the same ports: where none has a network of its own, they go one after the other.
pytestmark = [pytest.mark.xdist_group("docs")][IS_ISOLATED:]


def run_page(page: Path, directory: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "support.doc_page", str(page), str(directory)]
    return subprocess.run(
        [*UNSHARE, *command, "--isolated"] if IS_ISOLATED else command,
        env=CLEAN_ENVIRONMENT | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=4 * PATIENCE_S,
        check=False,
    )


def all_blocks() -> Iterator[Block]:
    for page in pages():
        yield from blocks_of(page)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_the_page_does_what_it_says(page: Path, tmp_path: Path) -> None:
    done = run_page(page, tmp_path)
    assert done.returncode == 0, done.stdout


def test_next_to_nothing_is_left_out() -> None:
    left_out = {block.place: block.excerpt for block in all_blocks() if block.excerpt is not None}
    assert len(left_out) <= EXCERPTS_MAX
    assert all(left_out.values()), "an excerpt says why it is one"
    assert not [block.place for block in all_blocks() if block.hides_a_command]


BROKEN = {
    "a command fails": ("```sh\ntrue\nfalse\n```", "page.md:1: a command failed"),
    "a setting is not known": ("```toml\n[batching]\nmax_weight_ms = 3\n```", "batching.max_weight_ms"),
    "another JSON": ('```sh\necho \'{"a": 1}\'\n```\n```json\n{"a": 2}\n```', "page.md:1: {'a': 2} is not in"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_block_is_told(name: str, tmp_path: Path) -> None:
    text, told = BROKEN[name]
    page, directory = tmp_path / "page.md", tmp_path / "directory"
    page.write_text(text)
    directory.mkdir()
    done = run_page(page, directory)
    assert done.returncode == 1
    assert told in done.stdout
