"""An alert of those that are shipped, all the way: Carpool, Prometheus, Alertmanager, somebody's webhook."""

import asyncio
import json
from pathlib import Path
from typing import Any

from aiohttp import web

from support.client import ask_once, inference_body
from support.processes import running_gateway
from support.prometheus import running_alertmanager, running_prometheus

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "carpool-rules.yml"
PATIENCE_S = 120.0


async def test_a_dead_letter_reaches_a_webhook(tmp_path: Path) -> None:
    told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def hook(request: web.Request) -> web.Response:
        told.put_nowait(await request.json())
        return web.Response()

    app = web.Application()
    app.router.add_post("/hook", hook)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    _, port = runner.addresses[0]
    try:
        async with (
            running_gateway(tmp_path / "serve", "sim:?latency_ms=1&poison=spoiled") as process,
            running_alertmanager(tmp_path / "alertmanager", f"http://127.0.0.1:{port}/hook") as alertmanager,
            running_prometheus(tmp_path / "prometheus", [process.admin_port], [RULES], alertmanager) as prometheus,
        ):
            await prometheus.until_found('carpool_dead_letters_total{cause="input-refused"} == 0')
            assert (await prometheus.ask("ALERTS")) == []
            # An input is to blame only where the endpoint answers others.
            for text, status in (("fine", 200), ("spoiled", 422)):
                answer = await ask_once(process.port, "POST", "/v1/inference", inference_body(text))
                assert answer.status == status
            async with asyncio.timeout(PATIENCE_S):
                message = await told.get()
            (alert,) = message["alerts"]
            assert message["status"] == alert["status"] == "firing"
            assert alert["labels"] == {
                "alertname": "CarpoolDeadLetters",
                "cause": "input-refused",
                "job": "carpool",
                "severity": "warning",
            }
            assert alert["annotations"]["runbook"] == "docs/runbooks.md#carpooldeadletters"
            assert "carpool dlq list" in alert["annotations"]["description"]
            assert "spoiled" not in json.dumps(message), "no input gets out this way"
    finally:
        await runner.cleanup()
