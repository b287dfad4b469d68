"""`carpool top`: what happens, second by second, in a terminal. The same events as those of the live page."""

import json as json_module
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from carpool.cli.dlq import DEFAULT_ADMIN, EXIT_FAILED, Admin, Gateway, Token, leave, printable

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

ENDPOINTS_SHOWN, SLOW_SHOWN = 20, 5
# Bars take the room of names on narrow terminals.
BAR_WIDTH, BARS_FROM_COLUMNS = 20, 110
COLOURS = {"healthy": "green", "ok": "green", "degraded": "yellow", "draining": "yellow", "offline": "red"}

EPILOG = """\
[bold]Examples[/bold]

  carpool top

  carpool top --once --json | jq .p99_ms

  carpool top --admin http://10.0.0.5:8001
"""


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one second and leave.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print each second as a line of JSON.")] = False,
    admin: Admin = DEFAULT_ADMIN,
    token: Token = "",
) -> None:
    """Show what happens now: requests by tier, latencies, batches, endpoints. Over Redis, of the whole fleet.

    Any process will do: each shows all. The admin port's / is the same in a browser.
    """
    events = seconds(Gateway(admin, token, "top"))
    try:
        if json:
            for event in events:
                typer.echo(json_module.dumps(event))
                if once:
                    return
        else:
            _show(events, once)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        sys.stderr.close()  # `carpool top | head`


def seconds(gateway: Gateway) -> Iterator[dict[str, Any]]:
    """Whole seconds as they come, until the process is gone."""
    for line in gateway.lines("/internal/live"):
        if line.startswith(b"data: "):
            event: dict[str, Any] = json_module.loads(line[6:])
            if event["seconds"]:
                yield event
    leave("the process is gone", EXIT_FAILED, "top")


def _show(events: Iterator[dict[str, Any]], once: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if once:
        console.print(picture(next(events), console.width))
        return
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as screen:
        for event in events:
            screen.update(picture(event, console.width), refresh=True)


def picture(event: dict[str, Any], columns: int) -> "Group":
    """One second, so that it fits into 80 columns or more: what is too long is folded, and nothing is cut."""
    from rich.console import Group
    from rich.text import Text

    health = event["health"]
    fill = _fill(event)
    head = Text.assemble(
        ("Carpool ", "bold"),
        (health["status"], COLOURS.get(health["status"], "red")),
        f"   p50 {number(event['p50_ms'])} ms   p99 {number(event['p99_ms'])} ms   "
        f"waiting {number(health['queue_depth'])}   GPUs busy {health['gpu_utilization']:.0%}   "
        f"batches {number(event['batches_ended'])}/s   places filled {'-' if fill is None else f'{fill:.0%}'}   "
        f"dead letters {event['dead_letters']}",
    )
    if "gateways" in health:
        head.append(f"   {health['gateways']} gateways, {health['batchers']} batchers")
    if "problem" in health:
        head.append("\n").append(_text(health["problem"], "yellow"))
    return Group(head, "", _tiers(event), "", _endpoints(event, columns >= BARS_FROM_COLUMNS), "", _slow(event))


def _table(*columns: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in LEFT else "right", overflow="fold")
    return table


LEFT = {"tier", "endpoint", "state", "busy", "request", "result", "where its time went"}


def _tiers(event: dict[str, Any]) -> "Table":
    table = _table("tier", "offered/s", "admitted/s", "shed/s", "answered/s", "failed/s", "p50 ms", "p99 ms", "waiting")
    fields = ("offered", "admitted", "shed", "answered", "failed", "p50_ms", "p99_ms", "waiting")
    for tier in event["tiers"]:
        table.add_row(_text(tier["name"]), *(number(tier[field]) for field in fields))
    return table


def _endpoints(event: dict[str, Any], has_bars: bool) -> "Table":
    table = _table("endpoint", "state", "calls", "busy", "batches/s", "mean size", "failed")
    found: dict[str, list[Any]] = {}
    for _, batch in event["batches"]:
        found.setdefault(batch[2], []).append(batch)
    endpoints = [each for model in event["fleet"]["models"].values() for each in model["endpoints"]]
    for each in endpoints[:ENDPOINTS_SHOWN]:
        ended = [batch for batch in found.get(each["endpoint"], ()) if batch[5]]
        size = sum(batch[3] for batch in ended) / len(ended) if ended else None
        bar = f"{'█' * round(BAR_WIDTH * each['utilization']):<{BAR_WIDTH}} " if has_bars else ""
        table.add_row(
            _text(each["endpoint"].removeprefix("http://")),
            _text(each["state"], COLOURS.get(each["state"], "red")),
            f"{each['in_flight']}/{each['limit']}",
            _text(f"{bar}{each['utilization']:4.0%}"),
            number(len(ended)),
            number(size),
            number(sum(batch[6] != "ok" for batch in ended)),
        )
    if len(endpoints) > ENDPOINTS_SHOWN:
        table.add_row(_text(f"and {len(endpoints) - ENDPOINTS_SHOWN} more"))
    return table


def _slow(event: dict[str, Any]) -> "Table":
    table = _table("request", "result", "ms", "where its time went")
    for each in event["slow"][:SLOW_SHOWN]:
        where = f"queue {number(each['queue_ms'])}, before the call {number(each['retry_ms'])}, "
        where += f"call {number(each['call_ms'])}; {each['batch_size']} together at {each['endpoint'] or '-'}"
        table.add_row(_text(each["id"]), _text(each["result"]), number(each["total_ms"]), _text(where))
    return table


def _fill(event: dict[str, Any]) -> float | None:
    """How full the batches were that ended."""
    ended = [batch for _, batch in event["batches"] if batch[5]]
    places = sum(event["max_batch"].get(batch[1], batch[3]) for batch in ended)
    return sum(batch[3] for batch in ended) / places if places else None


def _text(value: str, style: str = "") -> "Text":
    from rich.text import Text

    return Text(printable(value), style)


def number(value: float | None) -> str:
    """As short as it can be read."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"
