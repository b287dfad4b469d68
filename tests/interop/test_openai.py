"""Unmodified OpenAI SDKs of two major versions in front of Carpool: every answer by value, single calls together."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.embedder import Embedder
from support.gateway import serving
from support.interop import environment_python, free_ports, get_json, running_server, show, show_version

pytestmark = pytest.mark.timeout(2000)

HERE = Path(__file__).parent
PROGRAM = HERE / "clients" / "openai_sdk.py"
VERSIONS = ["openai2", "openai3"]
# At once, from one process. The pool of 2.x has 1,000 connections, and takes many minutes for twice as many calls.
SINGLES = {"openai2": 1000, "openai3": 2000}
PATIENT = {
    "shedding.mode": "off",
    "broker.queue_timeout_s": 60,
    "broker.total_timeout_s": 60,
    "upstream.timeout_s": 60,
}


def run(environment: str, program: Path, *arguments: str) -> Any:
    """What a program found."""
    command = [str(environment_python(environment)), str(program), *arguments]
    done = subprocess.run(command, check=False, timeout=900, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def configure(directory: Path, url: str) -> None:
    """One model embeds, and one completes."""
    models = {"ada": "openai_embeddings", "gpt": "openai_completions"}
    texts = [
        f"[models.{name}]\nendpoints = ['{url}']\nprotocol = '{kind}'\nslots = 2\n" for name, kind in models.items()
    ]
    (directory / "carpool.toml").write_text("".join(texts))


@pytest.mark.parametrize("version", VERSIONS)
def test_by_value(version: str, tmp_path: Path) -> None:
    with Embedder().running() as embedder:
        configure(tmp_path, embedder.url)
        with serving(tmp_path, "", settings=PATIENT) as gateway:
            found = run(version, PROGRAM, f"http://127.0.0.1:{gateway.port}/v1")
    show_version(environment_python(version), "openai")
    show(f"openai by value: {found}")
    assert found == {"sync": 311, "errors": 5, "async": 310}


@pytest.mark.parametrize("version", VERSIONS)
def test_single_calls_ride_together(version: str, tmp_path: Path) -> None:
    [port], count = free_ports(1), SINGLES[version]
    command = [sys.executable, str(HERE / "servers" / "embeddings.py"), str(port)]
    with running_server(command, {}, (port, "/stats"), tmp_path / "server.log"):
        configure(tmp_path, f"http://127.0.0.1:{port}")
        with serving(tmp_path, "", settings=PATIENT) as gateway:
            found = run(version, PROGRAM, f"http://127.0.0.1:{gateway.port}/v1", str(count))
            through = get_json(port, "/stats")
        direct = run(version, PROGRAM, f"http://127.0.0.1:{port}/v1", str(count))
    mean = through["inputs"] / through["calls"]
    show_version(environment_python(version), "openai")
    show(f"{count} single calls: {found}, mean batch {mean:.1f}; against the server itself {direct}")
    # A few may be sent twice: whose answer is in doubt, or whose connection was dead.
    assert (found["answers"], found["wrong"]) == (count, 0) and through["inputs"] < 1.1 * count
    assert mean >= 30


def test_what_is_built_on_it(tmp_path: Path) -> None:
    with Embedder().running() as embedder:
        configure(tmp_path, embedder.url)
        with serving(tmp_path, "", settings=PATIENT) as gateway:
            found = run("openai3", HERE / "clients" / "openai_frameworks.py", f"http://127.0.0.1:{gateway.port}/v1")
    for package in ("langchain-openai", "llama-index-embeddings-openai-like", "litellm"):
        show_version(environment_python("openai3"), package)
    show(f"right by value: {found}")
    assert found == {"langchain": 81, "llama-index": 41, "litellm": 43}
