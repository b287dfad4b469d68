"""OpenAI's `/v1/embeddings` of one text beside `/v1/inference`, with the same upstream, in CPU of the gateway.

    .venv/bin/python bench/run.py --only faces

What a process answers in a second is what its core has time for: the CPU of an answer tells the share of the
throughput, also beside other programs. So few slots that batches are full, however fast the machine is: what a batch
costs is not the face's. Before that, `carpool bench --face openai` verifies that the answers are right.
"""

import tempfile
from statistics import median

import measuring
from measuring import CARPOOL, HERE, bench, beside_kept, console, free_port, process, show, verdict

SIMULATED = "sim:?latency_ms=50&slots=8&dimensions=384"
CONNECTIONS = 512
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
    share = median(plain / own for own, plain in zip(cpu["openai"], cpu["inference"], strict=True))
    bad = report["errors"] + report["wrong"]
    rows = [
        verdict("errors and wrong answers, verified", f"{bad} of {report['sent']}", "0", bad == 0),
        verdict(
            "embeddings, share of /v1/inference",
            f"{share:.0%} ({median(cpu['openai']):.1f} us of {median(cpu['inference']):.1f} us CPU an answer)",
            ">= 60 %",
            share >= 0.6,
        ),
        ("rates", ", ".join(f"{face} {median(each):,.0f}/s" for face, each in rate.items()), "", ""),
        beside_kept("OpenAI embeddings: share of /v1/inference", share, more_is_better=True),
    ]
    show(f"wrk -t1 -c{CONNECTIONS}, 2 KB, {SIMULATED}; medians of {rounds}", rows)
