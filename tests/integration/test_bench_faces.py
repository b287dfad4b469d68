"""`carpool bench --face openai`: a real gateway, in whose models right vectors and mixed-up ones are known."""

import json
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from carpool.tools.bench.sizes import parse_sizes
from carpool.upstream.simulated import read_call, vectors_json
from support.embedder import Embedder
from support.gateway import serving
from support.processes import GatewayProcess, carpool

pytestmark = pytest.mark.xdist_group("bench faces")

KEY = "cp_" + "k" * 40
LIMITED_KEY = f"{KEY}-limited"
# One input in so many gets the output of the one before it.
MIXED_EVERY = 5


class MixedUp(Embedder):
    """Speaks `json`, of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self.inputs = 0
        self._previous = ""
        self.sizes: list[int] = []

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        with self._lock:
            texts = [self._mixed(text) for text in body["inputs"]]
        return json.loads(vectors_json(read_call(json.dumps({"inputs": texts}).encode()), len(texts), 8))

    def _mixed(self, text: str) -> str:
        self.inputs += 1
        self.sizes.append(len(json.dumps(text)))
        previous, self._previous = self._previous, text
        return previous if self.inputs % MIXED_EVERY == 0 else text


@pytest.fixture(scope="module")
def mixed_up() -> Iterator[MixedUp]:
    with MixedUp().running() as running:
        assert isinstance(running, MixedUp)
        yield running


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, mixed_up: MixedUp) -> Iterator[GatewayProcess]:
    """Whoever has the key is served; the limited one may send five."""
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "carpool.toml").write_text(
        f"""
        [auth]
        mode = "keys"
        [keys.main]
        sha256 = "{sha256(KEY.encode()).hexdigest()}"
        per_minute = 100000
        [keys.limited]
        sha256 = "{sha256(LIMITED_KEY.encode()).hexdigest()}"
        per_minute = 1
        burst = 5
        [models.words]
        endpoints = ["sim:?latency_ms=1&slots=4"]
        [models.vectors]
        endpoints = ["sim:?latency_ms=1&slots=4&dimensions=384"]
        [models.padded]
        endpoints = ["sim:?latency_ms=1&slots=4&per_kb_ms=0.1&padded_ms_per_kb=0.1&jitter=0.5"]
        [models.mixed-vectors]
        endpoints = ["{mixed_up.url}/vectors"]
        """
    )
    with serving(folder, "") as running:
        yield running
    assert running.log_messages("error") == []


class Run:
    """One `carpool bench` of about 50 requests, and its report; empty if no load was sent."""

    def __init__(
        self, gateway: GatewayProcess, file: Path, model: str, face: str = "openai", sizes: str = "fixed"
    ) -> None:
        load = ("--rate", "100", "--duration", "500ms", "--arrivals", "uniform", "--connections", "5")
        which = ("--face", face, "--model", model, "--payload-bytes", "200", "--sizes", sizes, "--timeout", "60s")
        done = carpool(
            *("bench", f"http://127.0.0.1:{gateway.port}", *which, *load, "--quiet", "--json", str(file)),
            CARPOOL_API_KEY=KEY,
        )
        self.status, self.said = done.returncode, done.stderr.strip()
        self.report: dict[str, Any] = json.loads(file.read_bytes()) if file.exists() else {}


@pytest.mark.parametrize(("face", "model"), [("http", "words"), ("openai", "vectors")])
def test_right_answers_are_right(gateway: GatewayProcess, tmp_path: Path, face: str, model: str) -> None:
    run = Run(gateway, tmp_path / "report.json", model, face)
    assert (run.status, run.said) == (0, "")
    assert run.report["sent"] == run.report["ok"] == 50
    assert run.report["status"] == {"200": 50}
    assert (run.report["batch_mean"] is not None) == (face == "http")


def test_another_requests_answer_is_found(gateway: GatewayProcess, mixed_up: MixedUp, tmp_path: Path) -> None:
    # The first of a run is the one that tries the face: it gets its own.
    mixed_up.inputs = 0
    run = Run(gateway, tmp_path / "report.json", "mixed-vectors")
    assert (run.status, run.said) == (1, "")
    assert (mixed_up.inputs, run.report["errors"]) == (51, 0), run.report["status"]
    assert (run.report["ok"], run.report["wrong"]) == (40, 10)


def test_inputs_of_many_sizes_are_verified_too(gateway: GatewayProcess, mixed_up: MixedUp, tmp_path: Path) -> None:
    sizes = "lognormal:240,0.9,1000"
    mixed_up.inputs, mixed_up.sizes = 0, []
    wrong = Run(gateway, tmp_path / "wrong.json", "mixed-vectors", sizes=sizes).report
    assert (wrong["ok"], wrong["wrong"], wrong["errors"]) == (40, 10, 0), wrong["status"]
    # The first one tried the face, as the first of the load.
    asked = parse_sizes(sizes, seed=0)[1:51]
    assert sorted(mixed_up.sizes) == sorted([asked[0], *asked])
    for face, model in (("http", "padded"), ("openai", "vectors")):
        run = Run(gateway, tmp_path / f"{face}.json", model, face, sizes)
        assert (run.status, run.report["ok"]) == (0, 50), (run.said, run.report)
        assert run.report["input_bytes"] == {
            "mean": round(sum(asked) / 50, 1),
            "p99": sorted(asked)[-1],
            "max": sorted(asked)[-1],
        }


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ("nobody", "ended with 404 (no such model, or it has no such face)"),
        ("words", "`carpool sim-gpu --dimensions N`"),
    ],
)
def test_what_cannot_be_verified_gets_no_load(
    gateway: GatewayProcess, tmp_path: Path, model: str, complaint: str
) -> None:
    run = Run(gateway, tmp_path / "report.json", model)
    assert run.status == 1
    assert run.said.startswith("carpool bench: --face openai: ")
    assert complaint in run.said and run.said.count("\n") == 0
    assert run.report == {}
