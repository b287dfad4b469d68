"""`carpool doctor`: look at the Redis of a deployment, and say what is wrong and what to change."""

import asyncio
import json as json_module
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carpool.settings import Settings, broker_address, load_settings, require_broker

if TYPE_CHECKING:
    from carpool.broker.redis.fleet.servers import Finding

EXIT_PROBLEMS = 1
EPILOG = """\
[bold]Examples[/bold]

  carpool doctor --broker redis://127.0.0.1:6379

  CARPOOL_BROKER_PASSWORD_FILE=/run/secrets/redis carpool doctor --broker redis+cluster://redis-1:6379,redis-2:6379

  carpool doctor --config /etc/carpool.toml --json

Give it the configuration of your gateways: it compares Redis with it. The exit status is 1 if there are problems.
"""
_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    broker: Annotated[
        str | None, typer.Option("--broker", metavar="URL", help="The Redis to look at (default: broker.url).")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The configuration file; also CARPOOL_CONFIG (default carpool.toml)."),
    ] = None,
    fix: Annotated[
        bool,
        typer.Option("--fix", help="Remove reply streams of gateways that are gone, and count again; nothing else."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> int:
    """Check the Redis between gateways and batchers: its version, persistence, memory and replicas, and the queue.

    Each line says what is so, what it means, and what to change. Nothing is changed without --fix.
    """
    settings = load_settings({"broker.url": broker}, environ=os.environ, file=config)
    require_broker(settings)
    findings = asyncio.run(_examine(settings, mend=fix))
    if json:
        _print_json(findings)
    else:
        _print_lines(findings)
    return EXIT_PROBLEMS if any(finding.level == "problem" for finding in findings) else 0


async def _examine(settings: Settings, *, mend: bool) -> "list[Finding]":
    # Here, so that the other commands do not pay for it.
    from carpool.broker.redis.keys import Keys
    from carpool.tools.doctor import Doctor
    from carpool.tools.doctor_checks import Wants

    broker = settings.broker
    wants = Wants(
        replicas=broker.replicas,
        memory_max=broker.memory_max,
        lease_ms=broker.lease_ms,
        persistence=broker.persistence,
    )
    keys = Keys(broker.namespace, broker.shards)
    return await Doctor(broker_address(broker), keys, wants).examine(mend=mend)


def _print_json(findings: "Sequence[Finding]") -> None:
    import msgspec

    from carpool.tools.doctor_checks import worst

    report = {"status": worst(findings), "findings": msgspec.to_builtins(findings)}
    typer.echo(json_module.dumps(report, indent=2))


def _print_lines(findings: "Sequence[Finding]") -> None:
    """A table for people at a terminal, else one plain line for each finding."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        for finding in findings:
            do = f" -> {finding.do}" if finding.do else ""
            typer.echo(f"{finding.level}: {_titled(finding)}: {finding.says}{do}")
        return
    table = Table(show_header=False, box=None)
    for finding in findings:
        words = Text(finding.says)
        if finding.do:
            words.append(f"\n→ {finding.do}", style="italic")
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), Text(_titled(finding)), words)
    console.print(table)
    counts = {level: sum(finding.level == level for finding in findings) for level in ("problem", "warning")}
    typer.echo(", ".join(f"{number} {level}{'' if number == 1 else 's'}" for level, number in counts.items()))


def _titled(finding: "Finding") -> str:
    return finding.check + (f" ({', '.join(finding.where)})" if finding.where else "")
