"""OpenAI's `/v1/embeddings` of one text beside `/v1/inference`, with the same upstream: throughput, and CPU an answer.

    .venv/bin/python bench/run.py --only faces

Before that, `carpool bench --face openai` verifies that the answers are right.
"""

import tempfile
from statistics import median

import measuring
from measuring import CARPOOL, HERE, bench, beside_kept, console, free_port, process, show, verdict

SIMULATED = "sim:?latency_ms=50&slots=64&dimensions=384"
CONNECTIONS = 1000
SCRIPT = HERE / "embeddings.lua"


def faces(quick: bool) -> None:
    seconds, rounds = (3, 3) if quick else (8, 5)
    rate: dict[str, list[float]] = {"inference": [], "openai": []}
    cpu: dict[str, list[float]] = {"inference": [], "openai": []}
    port = free_port()
    with tempfile.TemporaryDirectory() as data:
        command = [*CARPOOL, "serve", "--upstream", SIMULATED, "--port", str(port), "--data-dir", data]
        with process(command, port) as gateway:
            report = bench(port, "--face", "openai", "--rate", "200", "--duration", "2s")
            for number in range(rounds):
                console.print(f"faces, round {number + 1} of {rounds} ...")
                for face in rate:
                    pids = {"server": [gateway.pid]}
                    load = measuring.wrk([port], pids, seconds, CONNECTIONS, SCRIPT, face)
                    rate[face].append(load.rate)
                    cpu[face].append(load.cpu_us["server"])
    share = median(own / plain for own, plain in zip(rate["openai"], rate["inference"], strict=True))
    bad = report["errors"] + report["wrong"]
    rows = [
        verdict("errors and wrong answers, verified", f"{bad} of {report['sent']}", "0", bad == 0),
        verdict(
            "embeddings, share of /v1/inference",
            f"{median(rate['openai']):,.0f}/s of {median(rate['inference']):,.0f}/s: {share:.0%}",
            ">= 60 %",
            share >= 0.6,
        ),
        ("CPU an answer", ", ".join(f"{face} {median(each):.1f} us" for face, each in cpu.items()), "", ""),
        beside_kept("OpenAI embeddings: share of /v1/inference", share, more_is_better=True),
    ]
    show(f"wrk -t1 -c{CONNECTIONS}, 2 KB, {SIMULATED}; medians of {rounds}", rows)
