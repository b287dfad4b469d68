"""Writes docs/gpu.md and its pictures from what bench/gpu/drive.py measured. A section without data is left out.

python3 bench/gpu/report.py DATA [--docs docs]
"""

import argparse
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from figures import ALONE, CURVE, MIXED, ONE_BY_ONE, RATE, REDIS, SATURATION, SECTIONS, Row, Section

sys.path.append(str(Path(__file__).parents[1]))

from carpool.tools.charts import Axis, Panel, draw, draw_bars

ROOT = Path(__file__).parents[2]
NAMES = {"minilm": "MiniLM-L6", "bert": "BERT-base", "tiny": "a tiny encoder"}
# A token has 4 bytes.
TOKENS = {240: "60 tokens", 2000: "500 tokens"}
TICKS = tuple(digit * 10.0**power for power in range(7) for digit in (1, 2, 5))
# What the server alone does with the same batches is what there is to have.
ALONE_SHARE_MIN = 0.95
HEAD = ("model", "in front of it", "load", "answered/s", "p50, p99 ms", "errors, wrong", "GPU busy", "texts a call")
HEAD_MORE = ("padding", "Carpool, load: of a core")
INTRO = """# On a real GPU

Carpool in front of a real model, all on the GPU's own machine: a plain server
([bench/gpu/server.py](../bench/gpu/server.py): PyTorch, fp16, text encoders of known shapes, at most 64 texts a call,
padded to the longest of them), Carpool, and the load. The weights are random, for what a call costs depends on the
shapes alone; a folder with real ones may be given to the server (`--weights`).

A text has one token for each 4 bytes, 512 at most. The server answers it reversed, once the GPU has worked on it: so
every answer can be verified, and is.

`make gpu` measures all of this and writes this page; `python3 bench/gpu/drive.py --help` lists the sections. It needs
PyTorch and a GPU, and takes some minutes.
"""
WORDS = """
- **Saturation** is a closed loop (`bench/gpu/clients.py`): so many clients, each of which sends again once it has its
  answer. So that none is refused, `shedding.mode` is `off`, and the timeouts are long. What has a rate is an open loop
  (`carpool bench`), whose latencies count from when a request was due. Of several senders p99 is the highest.
- **GPU busy**: the share of the time in which the server had a call on its way to the GPU and back; in brackets the
  share in which a kernel ran, as `nvidia-smi` samples it.
- **Padding**: tokens that the GPU computed for each token that was asked for.
- **Carpool, load: of a core**: the busiest process of each. Where one is near 100%, that is what was measured.
"""


def read(folder: Path) -> dict[str, Section]:
    """The sections that are there."""
    files = {name: folder / f"{name}.json" for name in SECTIONS}
    return {name: msgspec.json.decode(file.read_bytes(), type=Section) for name, file in files.items() if file.exists()}


def page(data: Mapping[str, Section]) -> str:
    """The whole of docs/gpu.md."""
    parts = [INTRO]
    if data:
        machines = dict.fromkeys(f"{section.device}, {section.machine}" for section in data.values())
        parts.append(f"\nThe figures are of: {'; '.join(machines)}.\n{WORDS}")
    writers = ((CURVE, curve), (ONE_BY_ONE, one_by_one), (RATE, at_a_rate), (MIXED, mixed), (REDIS, mixed))
    parts += [writer(name, data[name]) for name, writer in writers if name in data]
    return "".join(parts)


def pictures(data: Mapping[str, Section]) -> dict[str, str]:
    """SVGs by name."""
    drawn = {}
    if CURVE in data:
        drawn[CURVE] = draw_curve(data[CURVE])
    for name in (ONE_BY_ONE, MIXED, REDIS):
        if name in data:
            rows = [row for row in data[name].rows if is_saturated(row)]
            drawn[name] = draw_bars(
                "Texts a second at saturation", [(label(row), row.rate, f"{row.rate:,.0f}/s") for row in rows]
            )
    return drawn


def is_saturated(row: Row) -> bool:
    return row.load == SATURATION or (row.system == ALONE and not row.load.endswith("/s"))


def label(row: Row) -> str:
    load = "" if row.load == SATURATION else f", {row.load}"
    return f"{NAMES[row.shape]}: {row.system}{load}"


def curve(name: str, section: Section) -> str:
    """A column for each shape and length, a row for each size of batch."""
    columns = list(dict.fromkeys((point.shape, point.text_bytes) for point in section.points))
    found = {(point.shape, point.text_bytes, point.batch): point for point in section.points}
    head = ["texts in a call", *(f"{NAMES[shape]}, {TOKENS[size]}: ms a call, texts/s" for shape, size in columns)]
    sizes = dict.fromkeys(point.batch for point in section.points)
    rows = [
        [str(batch), *(f"{found[*at, batch].call_ms:.1f}, {found[*at, batch].rate:,.0f}" for at in columns)]
        for batch in sizes
    ]
    least, most = min(sizes), max(sizes)
    gains = [
        f"{found[*at, most].rate / found[*at, least].rate:.1f} ({NAMES[at[0]]}, {TOKENS[at[1]]})" for at in columns
    ]
    return f"""
## Why batching pays
One call at a time, straight to the server. Texts a second in calls of {most}, times those in calls of {least}:
{", ".join(gains)}.

![Texts a second by the size of the batch](gpu/{CURVE}.svg)

{table(head, rows)}
{command(name)}
"""


def one_by_one(name: str, section: Section) -> str:
    """What batching brings, at a rate and at saturation."""
    said, clients = [], int(1024 * section.options.scale)
    for shape in dict.fromkeys(row.shape for row in section.rows):
        single, batched = (
            {row.load: row for row in section.rows if row.shape == shape and row.system == system}
            for system in ("Carpool, batches of 1", "Carpool, batches of 64")
        )
        times = batched[SATURATION].rate / single[SATURATION].rate
        p99s = [
            f"at {load} {ms(single[load].p99_ms)} one by one and {ms(batched[load].p99_ms)} batched" for load in single
        ]
        said.append(f"- {NAMES[shape]}: {times:.1f} times the throughput at saturation; p99 {', '.join(p99s)}.")
    return f"""
## One by one, and batched
Texts of 60 tokens. The server alone gets one text a call, as from clients without Carpool; Carpool with
`batching.max_batch = 1` only queues; and Carpool as it is. At saturation there are {clients:,} clients.

{chr(10).join(said)}

![Texts a second at saturation](gpu/{ONE_BY_ONE}.svg)

{table_of(section.rows)}
{command(name)}
"""


def at_a_rate(name: str, section: Section) -> str:
    return f"""
## 10,000 requests a second of 2 KB
For {section.options.long_s:g} s, every text 500 tokens, one process of Carpool at plain defaults but for
`upstream.slots = {section.options.slots}`: one call runs on the GPU, the next one waits there.
The server has {section.options.processes} processes.

{table_of(section.rows)}
{command(name)}
"""


def mixed(name: str, section: Section) -> str:
    """`batching.fit` off and auto, and the server alone with the same batches."""
    system = next(row.system for row in section.rows if row.system != ALONE).removesuffix(", fit off")
    said = []
    for shape in dict.fromkeys(row.shape for row in section.rows):
        by_load = {(row.system, row.load): row for row in section.rows if row.shape == shape}
        off, auto = (by_load[f"{system}, fit {fit}", SATURATION] for fit in ("off", "auto"))
        said.append(
            f"- {NAMES[shape]}: `auto` answers {auto.rate / off.rate:.2f} times as many as `off` at saturation."
        )
        for fit, row in (("off", off), ("auto", auto)):
            share = row.rate / by_load[ALONE, f"the batches of fit {fit}"].rate
            holds = "" if share >= ALONE_SHARE_MIN else f", under the {ALONE_SHARE_MIN:.0%} that it should have"
            said.append(
                f"  With `{fit}` it does {share:.1%} of what the server alone does with the very same batches{holds}."
            )
    gateways = f"{section.options.gateways} gateways and a batcher, one Redis without persistence."
    head, what = ("", "One process of Carpool.") if name == MIXED else (" over Redis", gateways)
    return f"""
## Mixed lengths{head}
{what} Lengths are lognormal: 60 tokens in the middle (sigma 0.875), 512 at most. `batching.fit` off: batches as they
come; auto: texts of similar size share a batch once enough wait. "80%" is of what `off` does at saturation. The server
alone has as many calls at once ({section.options.slots * section.options.processes}).

{chr(10).join(said)}

![Texts a second](gpu/{name}.svg)

{table_of(section.rows)}
{command(name)}
"""


def table_of(rows: Iterable[Row]) -> str:
    return table(
        (*HEAD, *HEAD_MORE),
        [
            [
                *(NAMES[row.shape], row.system, row.load, f"{row.rate:,.0f}"),
                f"{ms(row.p50_ms, '')}, {ms(row.p99_ms, '')}",
                f"{row.errors:,}, {row.wrong:,}",
                f"{row.busy:.0%}" + ("" if row.kernels is None else f" ({row.kernels:.0%})"),
                *(f"{row.batch:g}", f"{row.padding:.2f}"),
                f"{f'{row.carpool_busy:.0%}' if row.carpool_busy else '-'}, {row.generator_busy:.0%}",
            ]
            for row in rows
        ],
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def ms(value: float | None, unit: str = " ms") -> str:
    return "-" if value is None else f"{value:,.1f}{unit}" if value < 10 else f"{value:,.0f}{unit}"


def command(name: str) -> str:
    return f"\n`python3 bench/gpu/drive.py --only {name} --out DATA`; [the data](gpu/{name}.json)."


def draw_curve(section: Section) -> str:
    """Texts a second by the size of the batch, a panel for each shape."""
    shapes = list(dict.fromkeys(point.shape for point in section.points))
    sizes = list(dict.fromkeys(point.text_bytes for point in section.points))
    batches = sorted({point.batch for point in section.points})
    rates = {(point.shape, point.text_bytes, point.batch): point.rate for point in section.points}
    panels = [
        Panel(
            NAMES[shape],
            batches,
            {TOKENS[size]: [rates.get((shape, size, batch)) for batch in batches] for size in sizes},
        )
        for shape in shapes
    ]
    least, most = min(rates.values()), max(rates.values())
    ticks = [tick for tick in TICKS if least / 2.5 < tick < most * 2.5]
    x = Axis("texts in a call", batches, is_logarithmic=True)
    return draw("Texts a second, one call at a time", panels, x, Axis("texts/s", ticks, is_logarithmic=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    data, folder = read(options.data), options.docs / "gpu"
    folder.mkdir(exist_ok=True)
    for name in data:
        if options.data.resolve() != folder.resolve():
            shutil.copyfile(options.data / f"{name}.json", folder / f"{name}.json")
    for name, picture in pictures(data).items():
        (folder / f"{name}.svg").write_text(picture)
    (options.docs / "gpu.md").write_text(page(data))


if __name__ == "__main__":
    main()
