"""`carpool doctor`: look at the inference API and the Redis of a deployment; say what is wrong and what to change."""

import asyncio
import json as json_module
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from carpool.cli.dlq import examples
from carpool.settings import ConfigError, Settings, broker_address, load_settings, models_of

if TYPE_CHECKING:
    from carpool.core.finding import Finding

EXIT_PROBLEMS = 1
EPILOG = examples(
    "carpool doctor --upstream http://127.0.0.1:9000/predict",
    "carpool doctor --config /etc/carpool.toml --json",
    "carpool doctor --upstream http://127.0.0.1:9000/predict --input '[5.1, 3.5, 1.4, 0.2]'",
    "CARPOOL_BROKER_PASSWORD_FILE=/run/secrets/redis carpool doctor --broker redis+cluster://redis-1:6379,redis-2:6379",
    then="Give it the configuration of your gateways: it compares what it finds with it.\n\nExit status: 0 all is well "
    "(there may be warnings), 1 something is wrong, 2 the command line or the configuration is.",
)
# Of the endpoints or servers that a line is about.
NAMED_MAX = 4
_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


def doctor(
    upstream: Annotated[
        list[str] | None,
        typer.Option(
            "--upstream", metavar="URL", help="The API to call (default: upstream.endpoints); may be repeated."
        ),
    ] = None,
    protocol: Annotated[
        str | None, typer.Option("--protocol", metavar="NAME", help="What it speaks (default: upstream.protocol).")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="The model to ask it for (default: model).")
    ] = None,
    given: Annotated[
        str, typer.Option("--input", metavar="JSON", help="An input that the model takes (default: some of its own).")
    ] = "",
    broker: Annotated[
        str | None, typer.Option("--broker", metavar="URL", help="The Redis to look at (default: broker.url).")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The configuration file; also CARPOOL_CONFIG (default carpool.toml)."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> int:
    """Check the inference API, and the Redis between gateways and batchers, against the configuration.

    It makes calls of one input, of two, and of more to the API: path, TLS, credentials, names of fields, number of
    outputs, time, batch limit. Of Redis it looks at version, persistence, memory, replicas, and the queue.

    Each line says what is so, what it means, and what to change. Nothing is changed.
    """
    flags = {"upstream.endpoints": upstream, "upstream.protocol": protocol, "model": model}
    flags = {path: value or None for path, value in flags.items()}
    settings = load_settings({**flags, "broker.url": broker}, environ=os.environ, file=config)
    _check_input(given)
    if not settings.broker.url and not any(each.upstream.endpoints for each in models_of(settings).values()):
        raise ConfigError(
            "nothing to look at: give --upstream URL (or upstream.endpoints), or --broker redis://HOST:6379 "
            "(or broker.url)"
        )
    findings = asyncio.run(_examine(settings, given.encode()))
    changes = _changes(findings, flags)
    if json:
        _print_json(findings, changes)
    else:
        _print_lines(findings)
        _print_changes(changes)
    return EXIT_PROBLEMS if any(finding.level == "problem" for finding in findings) else 0


def _check_input(text: str) -> None:
    import msgspec

    try:
        if text:
            msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as fault:
        raise typer.BadParameter(f"--input is not JSON: {fault}") from None


async def _examine(settings: Settings, given: bytes) -> "list[Finding]":
    # Here, so that the other commands do not pay for it.
    from carpool.tools.api_doctor import ApiDoctor

    findings = []
    for each in models_of(settings).values():
        if each.upstream.endpoints:
            findings += await ApiDoctor(settings, each, given, _say).examine()
    if settings.broker.url:
        from carpool.broker.redis.keys import Keys
        from carpool.tools.doctor import Doctor

        broker = settings.broker
        findings += await Doctor(broker_address(broker), Keys(broker.namespace), broker).examine()
    return findings


def _say(text: str) -> None:
    """At a terminal: it may take a minute."""
    if sys.stderr.isatty():
        typer.echo(text, err=True)


def _changes(findings: "Sequence[Finding]", flags: Mapping[str, Any]) -> dict[str, Any]:
    """The settings to change, with those of the command line, so that a file has all; {} if none has to change."""
    from carpool.settings.loading import without_secrets

    found: dict[str, Any] = {path: value for finding in findings for path, value in finding.changes}
    given = {path: value for path, value in flags.items() if value is not None}
    if "upstream.endpoints" in given:
        given["upstream.endpoints"] = [without_secrets(url) for url in given["upstream.endpoints"]]
    return {**given, **found} if found else {}


def _print_json(findings: "Sequence[Finding]", changes: Mapping[str, Any]) -> None:
    """Without what the API said: this is for programs, which keep it."""
    import msgspec

    from carpool.core.finding import worst

    listed = [{**msgspec.structs.asdict(finding), "changes": dict(finding.changes)} for finding in findings]
    for each in listed:
        del each["heard"]
    typer.echo(json_module.dumps({"status": worst(findings), "findings": listed, "changes": changes}, indent=2))


def _print_changes(changes: Mapping[str, Any]) -> None:
    if changes:
        from carpool.settings.loading import changes_toml

        typer.echo("\nFor carpool.toml (where it has such a table already, put the lines into that one):\n")
        typer.echo(changes_toml(changes))
        typer.echo("\nThen run `carpool doctor` again; when all is well, `carpool serve`.")


def _print_lines(findings: "Sequence[Finding]") -> None:
    """A line for each finding, in colours at a terminal; below it what the API said, if anything."""
    for finding in findings:
        do = f" -> {finding.do}" if finding.do else ""
        level = typer.style(finding.level, fg=_COLOURS[finding.level], bold=finding.level == "problem")
        typer.echo(f"{level}: {_titled(finding)}: {finding.says}{do}")
        if finding.heard:
            typer.echo(f"    it said: {finding.heard}")


def _titled(finding: "Finding") -> str:
    named = list(finding.where[:NAMED_MAX])
    if len(finding.where) > NAMED_MAX:
        named.append(f"and {len(finding.where) - NAMED_MAX} more")
    return finding.check + (f" ({', '.join(named)})" if named else "")
