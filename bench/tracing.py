"""What tracing costs: at its default, and of every request, beside off."""

import sys
import tempfile
from contextlib import ExitStack
from statistics import median

from measuring import CARPOOL, HERE, Load, beside_kept, console, free_port, process, show, verdict, wrk

SIMULATED = "sim:?latency_ms=50&slots=256"
CONNECTIONS = 2000
# What is on, and how much of the throughput that may cost.
KINDS = {"off": {}, "default": {}, "all": {"CARPOOL_TRACING_SAMPLE_RATIO": "1"}}
MOST = {"default": 0.03, "all": 0.20}


def tracing(quick: bool) -> None:
    seconds, rounds = (3, 3) if quick else (6, 7)
    loads: dict[str, list[Load]] = {name: [] for name in KINDS}
    with ExitStack() as stack:
        taker = free_port()
        stack.enter_context(process([sys.executable, str(HERE / "trace_receiver.py"), str(taker)], taker))
        running: dict[str, tuple[int, int]] = {}
        for name, environment in KINDS.items():
            port = free_port()
            data = stack.enter_context(tempfile.TemporaryDirectory())
            command = [*CARPOOL, "serve", "--upstream", SIMULATED, "--port", str(port), "--data-dir", data]
            where = {} if name == "off" else {"CARPOOL_TRACING_OTLP_ENDPOINT": f"http://127.0.0.1:{taker}"}
            child = stack.enter_context(process(command, port, {**where, **environment}))
            running[name] = port, child.pid
        for number in range(rounds):
            console.print(f"tracing, round {number + 1} of {rounds} ...")
            for name, (port, pid) in running.items():
                loads[name].append(wrk([port], {"gateway": [pid]}, seconds, CONNECTIONS))
    rows = []
    for name, most in MOST.items():
        # One process is as fast as its CPU time allows. The load and the receiver may share the cores with it.
        pairs = zip(loads["off"], loads[name], strict=True)
        less = median(1 - off.cpu_us["gateway"] / on.cpu_us["gateway"] for off, on in pairs)
        cpu = {each: median(load.cpu_us["gateway"] for load in loads[each]) for each in ("off", name)}
        rate = {each: median(load.rate for load in loads[each]) for each in ("off", name)}
        figure = f"{less:.1%} ({cpu[name]:.1f} us of {cpu['off']:.1f} us CPU a request)"
        rows += [
            verdict(f"{name}: throughput that it costs", figure, f"<= {most:.0%}", less <= most),
            (f"{name}: rate", f"{rate[name]:,.0f}/s of {rate['off']:,.0f}/s", "", ""),
            beside_kept(f"tracing, {name}: CPU, times off", cpu[name] / cpu["off"], more_is_better=False),
        ]
    show(f"wrk -t1 -c{CONNECTIONS}, 2 KB, {SIMULATED}, tracing beside off; medians of {rounds}", rows)
