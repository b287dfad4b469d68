"""`carpool sim-gpu` and `carpool demo`: simulated GPUs, alone or with a gateway in front of them."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    from carpool.settings import Settings
    from carpool.tools.sim_gpu import GpuFleet
    from carpool.upstream.simulated import SimulationSettings

EXIT_CANNOT_START, EXIT_INTERRUPTED = 2, 130
CHILD_STOP_S = 5.0
# An input with this makes the demo's GPUs fail its whole batch.
DEMO_POISON = "poison-for-the-demo"

Workers = Annotated[int, typer.Option(min=1, max=1024, help="Independent GPUs, each on a port of its own.")]
LatencyMs = Annotated[float, typer.Option(help="Time for a batch.")]
PerItemMs = Annotated[float, typer.Option(help="Time added for each input of a batch.")]
PerKbMs = Annotated[float, typer.Option(help="Time added for each KB (1,000 bytes of JSON) of a batch's inputs.")]
PaddedMsPerKb = Annotated[
    float,
    typer.Option(
        help="Time added for each KB of the padded batch, which is its number of inputs times its largest input: what "
        "a GPU pays that pads all to the longest. Short inputs beside a long one cost as much as that."
    ),
]
Jitter = Annotated[
    float, typer.Option(help="0 to 1. With 0.2 each batch takes 0.8 to 1.2 times its time, drawn evenly.")
]
Slots = Annotated[int, typer.Option(help="Batches that one GPU runs at once; more wait for their turn.")]


def sim_gpu(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the first GPU; 0 picks free ones.")] = 9000,
    workers: Workers = 32,
    latency_ms: LatencyMs = 200.0,
    per_item_ms: PerItemMs = 0.0,
    per_kb_ms: PerKbMs = 0.0,
    padded_ms_per_kb: PaddedMsPerKb = 0.0,
    jitter: Jitter = 0.0,
    slots: Slots = 1,
    max_batch: Annotated[int, typer.Option(help="More inputs in one call are refused with 400.")] = 64,
    dimensions: Annotated[int, typer.Option(help="Above 0: a model that embeds, in vectors of so many numbers.")] = 0,
    error_rate: Annotated[float, typer.Option(help="Share of the calls answered with 500.")] = 0.0,
    hang_rate: Annotated[float, typer.Option(help="Share of the calls that get no answer.")] = 0.0,
    reset_rate: Annotated[float, typer.Option(help="Share of the calls whose connection is reset.")] = 0.0,
    short_rate: Annotated[float, typer.Option(help="Share of the answers with one output too few.")] = 0.0,
    garbage_rate: Annotated[float, typer.Option(help="Share of the answers that are no JSON.")] = 0.0,
    poison: Annotated[
        str, typer.Option(metavar="TEXT", help="A batch with an input containing TEXT gets 500 whole.")
    ] = "",
    refuse: Annotated[
        str, typer.Option(metavar="TEXT", help="A batch with an input containing TEXT gets 400 whole.")
    ] = "",
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same faults and jitter.", show_default=False)
    ] = None,
    leave_with_stdin: Annotated[
        bool, typer.Option("--leave-with-stdin", hidden=True, help="Exit when stdin ends.")
    ] = False,
) -> int:
    """Serve simulated GPUs to develop and measure against: POST /infer {"inputs": […]} gives {"outputs": […]}.

    A string is answered reversed, anything else as {"echo": input}. GET /stats tells what has come so far.
    """
    given = dict(locals())
    # Here, so that the other commands do not pay for it.
    import uvloop

    from carpool.tools.sim_gpu import CannotListenError
    from carpool.upstream.simulated import SimulationSettings, simulation_settings

    try:
        settings = simulation_settings({name: given[name] for name in SimulationSettings.__struct_fields__})
        uvloop.run(_serve_until_told(settings, host, port, workers, leave_with_stdin))
    except (ValueError, CannotListenError) as fault:
        typer.echo(f"carpool sim-gpu: {fault}", err=True)
        return EXIT_CANNOT_START
    return 0


async def _serve_until_told(
    settings: "SimulationSettings", host: str, port: int, workers: int, leave_with_stdin: bool
) -> None:
    import asyncio
    import signal

    from carpool.tools.sim_gpu import serve_gpus

    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    fleet = await serve_gpus(settings, host, port, workers)
    if leave_with_stdin:
        obeying = asyncio.create_task(_obey(fleet, host))
        obeying.add_done_callback(lambda _: told.set())
    first, last = fleet.ports[0], fleet.ports[-1]
    ports = str(first) if first == last else f"{first}-{last}"
    base = f"http://[{host}]" if ":" in host else f"http://{host}"
    plural = "" if workers == 1 else "s"
    typer.echo(f"{workers} simulated GPU{plural} at {base}:{ports}/infer, counts at {base}:{first}/stats")
    await told.wait()
    await fleet.close()


async def _obey(fleet: "GpuFleet", host: str) -> None:
    """Do what the demo says, `kill 3` or `revive 3` a line, until stdin ends."""
    from carpool.tools.demo import stdin_lines

    async for line in stdin_lines():
        match line.split():
            case [b"kill", number]:
                fleet.kill(host, int(number))
            case [b"revive", number]:
                with suppress(OSError):  # another program has the port meanwhile; one can ask again
                    await fleet.revive(host, int(number))


def demo(
    host: Annotated[str, typer.Option(help="Address of the gateway.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the gateway; its admin port is the next one.")
    ] = 8000,
    workers: Workers = 8,
    latency_ms: LatencyMs = 200.0,
    per_item_ms: PerItemMs = 0.0,
    per_kb_ms: PerKbMs = 0.0,
    padded_ms_per_kb: PaddedMsPerKb = 0.0,
    jitter: Jitter = 0.0,
    slots: Slots = 1,
    gpu_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the first GPU; 0 picks free ones.")] = 9000,
    data_dir: Annotated[
        Path | None, typer.Option(help="Keep tasks here.", show_default="a temporary directory")
    ] = None,
) -> int:
    """Start a gateway and simulated GPUs behind it, and show what to try first.

    The live page at its admin port has a panel to put load on it, to kill GPUs, and more.

    Settings of the gateway come from the environment and carpool.toml as for `carpool serve`.
    """
    gpu_flags: dict[str, Any] = {"--port": gpu_port, "--workers": workers, "--slots": slots, "--latency-ms": latency_ms}
    gpu_flags |= {"--per-item-ms": per_item_ms, "--per-kb-ms": per_kb_ms, "--padded-ms-per-kb": padded_ms_per_kb}
    gpu_flags |= {"--jitter": jitter, "--poison": DEMO_POISON}
    flags: dict[str, Any] = {"gateway.host": host, "gateway.port": port, "upstream.slots": slots}
    try:
        with simulated_gpus(gpu_flags) as gpus, TemporaryDirectory(prefix="carpool-demo-") as temporary:
            if gpus.address is None:
                return gpus.process.wait()
            from carpool.app import run
            from carpool.settings import load_settings
            from carpool.tools.demo.panel import DemoPanel, Gpus

            flags |= {"upstream.endpoints": [gpus.address], "upstream.protocol": "json"}
            flags |= {"tasks.data_dir": str(data_dir or temporary)}
            settings = load_settings(flags, environ=os.environ, file=None)
            panel = DemoPanel(Gpus(workers, slots, latency_ms, gpus.tell, DEMO_POISON), settings.tiers)
            about = f"{workers} simulated GPUs of {latency_ms:g} ms a batch"

            def on_ready(gateway_port: int, admin_port: int) -> None:
                show_banner(settings, gateway_port, admin_port, about, gpus.address or "")

            return run(settings, on_ready=on_ready, panel=panel)
    except KeyboardInterrupt:  # before the gateway took over the signals
        return EXIT_INTERRUPTED


class SimulatedGpus(NamedTuple):
    """A child process with simulated GPUs. `address` is None if it could not start; it has said why on stderr."""

    process: subprocess.Popen[str]
    address: str | None

    def tell(self, line: str) -> None:
        """Send a line to the process on its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()


@contextmanager
def simulated_gpus(flags: dict[str, Any]) -> Iterator[SimulatedGpus]:
    """Run `carpool sim-gpu` beside this process; it leaves with this one, however this one ends."""
    command = [sys.executable, "-m", "carpool", "sim-gpu", "--leave-with-stdin"]
    command += [f"{name}={value}" for name, value in flags.items()]
    # The pipe to its stdin ends with this process, even by kill -9. A process group of its own keeps Ctrl-C
    # from it: the gateway needs the GPUs for the batches it still has to finish.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        listening = re.search(r"http://\S+/infer", process.stdout.readline())
        yield SimulatedGpus(process, listening and listening.group())
    finally:
        process.stdin.close()
        try:
            process.wait(CHILD_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def show_banner(settings: "Settings", port: int, admin_port: int, about: str, gpu_address: str) -> None:
    """Print what to try first, in lines that can be copied."""
    from rich.console import Console
    from rich.text import Text

    from carpool.tools.demo import reachable

    gateway = settings.gateway
    scheme = "https" if gateway.tls_cert else "http"
    base = f"{scheme}://{reachable(gateway.host)}:{port}"
    admin = f"{scheme}://{reachable(gateway.admin_host)}:{admin_port}"
    stats = re.sub(r"(:\d+)(-\d+)?/infer$", r"\1/stats", gpu_address)
    post = f"curl -sw '\\n' {base}/v1/inference -H 'Content-Type: application/json'"
    lines = [
        ("Look at it, and play with it", f"{admin}/"),
        ("Ask and wait for the answer", f'{post} -d \'{{"input": "hello"}}\''),
        (
            "Submit a task, keep its id",
            f"task=$({post} -H 'Prefer: respond-async' -d '{{\"input\": \"later\"}}' | cut -d'\"' -f4); echo $task",
        ),
        ("Look whether it is done", f"curl -sw '\\n' {base}/v1/result/$task"),
        ("Or wait until it is", f'curl -sw "\\n" "{base}/v1/result/$task?wait_ms=5000"'),
        ("Put load on it", f"{_own_command()} bench {base} --rate 1000 --duration 10s"),
        ("Health, metrics, GPU counts", f"{admin}/internal/health  {admin}/metrics  {stats}"),
    ]
    console = Console(highlight=False)
    text = Text.assemble(("\nCarpool is ready: ", "bold green"), (base, "bold"), f", {about}\n\n")
    for meaning, what in lines:
        text.append(f"  # {meaning}\n", "dim").append(f"  {what}\n")
    text.append("\nCtrl-C stops everything.\n", "bold")
    # Soft wrap: the terminal breaks long lines and a copy of them stays whole.
    console.print(text, soft_wrap=True)


def _own_command() -> str:
    """What to type for this program: `make demo` starts it from a directory that is not on the PATH."""
    if shutil.which("carpool"):
        return "carpool"
    return sys.argv[0] if Path(sys.argv[0]).name == "carpool" else f"{sys.executable} -m carpool"
