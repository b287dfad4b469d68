"""The `carpool` command: its options, its commands, and one line for every mistake.

Command modules stay cheap to import: what needs the network is imported when a command runs.
"""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.exceptions import TyperException

from carpool.cli import serve
from carpool.cli.bench import bench
from carpool.cli.dlq import dlq, examples, webhooks
from carpool.cli.doctor import EPILOG, doctor
from carpool.cli.keys import keys
from carpool.cli.plan import EPILOG as PLAN_EPILOG
from carpool.cli.plan import plan
from carpool.cli.sim import demo, sim_gpu
from carpool.cli.simulate import EPILOG as SIMULATE_EPILOG
from carpool.cli.simulate import simulate
from carpool.cli.top import EPILOG as TOP_EPILOG
from carpool.cli.top import top
from carpool.cli.tracking import REQUESTS_EPILOG, USAGE_EPILOG, WHY_EPILOG, requests, tracking, usage, why
from carpool.settings import ConfigError
from carpool.version import __version__

EXIT_BAD_CONFIGURATION = 2

app = typer.Typer(
    name="carpool",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        "carpool demo",
        "carpool serve --upstream http://127.0.0.1:9000-9031/infer",
        "carpool bench http://127.0.0.1:8000 --rate 1000 --duration 20s",
    ),
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"carpool {__version__}")
        raise typer.Exit


@app.callback()
def carpool(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A batching gateway for GPU inference: single requests in, full batches out."""


app.command(rich_help_panel="Serving")(demo)
serve.register(app)
app.command(epilog=TOP_EPILOG, rich_help_panel="Serving")(top)
app.add_typer(dlq, rich_help_panel="Serving")
app.add_typer(webhooks, rich_help_panel="Serving")
app.add_typer(keys, rich_help_panel="Serving")
app.command(epilog=EPILOG, rich_help_panel="Serving")(doctor)
app.command(epilog=WHY_EPILOG, rich_help_panel="Looking")(why)
app.command(epilog=REQUESTS_EPILOG, rich_help_panel="Looking")(requests)
app.command(epilog=USAGE_EPILOG, rich_help_panel="Looking")(usage)
app.add_typer(tracking, rich_help_panel="Looking")
app.command("sim-gpu", rich_help_panel="Measuring")(sim_gpu)
app.command(rich_help_panel="Measuring")(bench)
app.command(epilog=PLAN_EPILOG, rich_help_panel="Measuring")(plan)
app.command(epilog=SIMULATE_EPILOG, rich_help_panel="Measuring")(simulate)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status; 2 stands for a wrong command line or configuration."""
    try:
        status = app(args=arguments, prog_name="carpool", standalone_mode=False)
    except ConfigError as error:
        return _complain("carpool", str(error), EXIT_BAD_CONFIGURATION)
    except TyperException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "carpool"
        message = error.format_message().rstrip(".")
        if not message:  # `carpool` alone: the help has been shown
            return error.exit_code
        return _complain(command, f"{message}; see `{command} --help`", error.exit_code)
    return status if isinstance(status, int) else 0


def _complain(who: str, text: str, status: int) -> int:
    """Say what is wrong on one line of stderr."""
    sys.stderr.write(f"{who}: {' '.join(text.split())}\n")
    return status
