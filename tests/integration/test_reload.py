"""Reading the configuration again: every model changes, or none does."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from carpool.embedded import EmbeddedProcess
from carpool.settings import Settings, load_settings

BEFORE = "[models.a]\nendpoints = ['sim:?slots=1']\n[models.b]\nendpoints = ['sim:?slots=2']\n"
AFTER = """
[models.a]
endpoints = ['sim:?slots=3', 'unix:{folder}/model.sock:/infer']
timeout_s = 9
[models.b]
endpoints = ['http://127.0.0.1:1/infer']
token_file = '{folder}/token'
"""


def load(folder: Path, toml: str) -> Settings:
    (folder / "carpool.toml").write_text(toml.format(folder=folder))
    flags = {"gateway.port": 0, "gateway.drain_grace_s": 0, "tasks.journal": False}
    return load_settings(flags, environ={}, file=folder / "carpool.toml")


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[EmbeddedProcess]:
    gateway = EmbeddedProcess(settings)
    try:
        await gateway.start()
        yield gateway
    finally:
        await gateway.close()


def endpoints(gateway: EmbeddedProcess) -> dict[str, list[str]]:
    models = gateway.snapshot().fleet.models
    return {name: [each.endpoint for each in model.endpoints] for name, model in models.items()}


async def test_a_fault_in_one_model_changes_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    token = tmp_path / "token"
    token.write_text("secret")

    def load_and_lose_the_token() -> Settings:
        settings = load(tmp_path, AFTER)
        token.unlink()
        return settings

    async with running(load(tmp_path, BEFORE)) as gateway:
        before = endpoints(gateway)
        gateway.reload(load_and_lose_the_token)
        assert endpoints(gateway) == before == {"a": ["sim:?slots=1"], "b": ["sim:?slots=2"]}
        assert [service.timeout_s for service in gateway.serving.services] == [3.0, 3.0]
        [said] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert said.startswith("the configuration was not changed: ") and str(token) in said

        token.write_text("secret")
        gateway.reload(lambda: load(tmp_path, AFTER))
        assert endpoints(gateway) == {
            "a": ["sim:?slots=3", f"unix:{tmp_path}/model.sock:/infer"],
            "b": ["http://127.0.0.1:1/infer"],
        }
        assert [service.timeout_s for service in gateway.serving.services] == [9.0, 3.0]
